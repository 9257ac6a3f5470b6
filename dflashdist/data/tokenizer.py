"""A target's tokenizer: what its files say, and exact encodings in pieces, no text twice.

A local folder is read with `tokenizers` alone; transformers (8 s to import) is loaded only where
that is not enough: a model's name, or a folder whose config.json does not say enough. It then
supplies the tokenizer, the configuration and the template's text, and nothing else of it is used.

Invariant of the pieces: text that is cut where a cutting token begins encodes to the ids of its two
pieces, one after the other. A tokenizer takes added tokens out of a text before it normalises and
splits the rest, so the text on either side of one is encoded alone. Cutting before the token, not
after it, keeps that true of tokenizers that put a blank before the first word of a text and of no
other.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from dflashdist.config import InputError
from dflashdist.data.messages import NOT_UNICODE, RowError

DEFAULT = "default"  # the name of the template that is used without tools


@dataclass(frozen=True)
class TargetTokenizer:
    """A target's tokenizer, and what its configuration adds to it."""

    name: str
    tokenizer: Tokenizer
    specials: dict[str, str]  # bos_token and the like: variables of a chat template
    templates: dict[str, str]  # the target's own chat templates by name; empty if it has none
    end_ids: tuple[int, ...]  # tokens that end a turn, ascending
    pad_id: int
    vocab_size: int  # rows of the target's embedding

    @classmethod
    def read(cls, path: str | Path, revision: str | None = None) -> "TargetTokenizer":
        """From a local folder or a model's name.

        Raises InputError when there is no tokenizer or no end-of-turn token, or when the tokenizer
        has ids that the target's embedding has no row for.
        """
        folder = Path(path).expanduser()
        read = _from_folder(folder) if (folder / "tokenizer.json").is_file() else None
        target = read or _from_transformers(str(path), revision)
        if target.length > target.vocab_size:
            raise InputError(
                f"{path}: its tokenizer has {target.length} ids, its embedding "
                f"{target.vocab_size} rows; use the tokenizer that belongs to the target"
            )
        if not target.end_ids:
            raise InputError(f"{path}: no eos_token_id in config.json or generation_config.json")
        return target

    @cached_property
    def length(self) -> int:
        """Token ids in use, added tokens included: the first embedding row past them is free."""
        return _length(self.tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """Hex: of what decides a text's ids.

        Of the post-processor, which transformers fills in where a file has none, only what it puts
        around a text counts.
        """
        around = self.tokenizer.encode("").ids
        processor = self.tokenizer.post_processor
        self.tokenizer.post_processor = None  # type: ignore[assignment]
        text = self.tokenizer.to_str()
        self.tokenizer.post_processor = processor
        return hashlib.sha256(f"{around}{text}".encode()).hexdigest()[:16]


def template_digest(templates: Mapping[str, str]) -> str:
    """sha256 of a chat template's text; of several named ones, of all of them."""
    plain = list(templates) == [DEFAULT]
    text = templates[DEFAULT] if plain else json.dumps(dict(sorted(templates.items())))
    return hashlib.sha256(text.encode()).hexdigest()


def template_file(places: Iterable[Path], digest: str | None) -> Path | None:
    """The first of these files that holds the one template of this digest; None where none does."""
    for place in places:
        try:
            if template_digest({DEFAULT: place.read_text("utf-8")}) == digest:
                return place
        except (OSError, UnicodeDecodeError):
            continue
    return None


def _from_folder(folder: Path) -> TargetTokenizer | None:
    """From tokenizer.json and the configs beside it; None where config.json does not say how large
    the embedding is. A tokenizer without one is taken to fill it."""
    settings = _read_json(folder / "tokenizer_config.json")
    config = _read_json(folder / "config.json")
    text_config = config.get("text_config") or {}
    vocab_size = config.get("vocab_size") or text_config.get("vocab_size")
    if vocab_size is None and config:
        return None
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocab_size = vocab_size or _length(tokenizer)
    specials: dict[str, str] = {}
    for entries in (_read_json(folder / "special_tokens_map.json"), settings):
        for key, value in entries.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                specials[key] = text
    generation = _read_json(folder / "generation_config.json")
    ends = [entries.get("eos_token_id") for entries in (config, text_config, generation)]
    ends.append(tokenizer.token_to_id(specials.get("eos_token", "")))
    pad_id = tokenizer.token_to_id(specials.get("pad_token", ""))
    templates = _folder_templates(folder, settings)
    return _build(str(folder), tokenizer, specials, templates, ends, pad_id, vocab_size)


def _folder_templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """chat_template.jinja and the named ones beside it, or else those of tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if not file.is_file():
        return _named(settings.get("chat_template"))
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return {DEFAULT: file.read_text("utf-8")} | {p.stem: p.read_text("utf-8") for p in more}


def _named(template: Any) -> dict[str, str]:
    """Templates by name out of the ways to write them: one text, a list of named ones, a dict."""
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        return dict(template)
    return {DEFAULT: template} if template else {}


def _from_transformers(name: str, revision: str | None) -> TargetTokenizer:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    pinned: dict[str, Any] = {"revision": revision} if revision else {}
    if not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise InputError(f"{name}: no such folder here; relative paths count from {Path.cwd()}")
    try:
        auto = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **pinned)
        config = AutoConfig.from_pretrained(name, trust_remote_code=False, **pinned)
        config = config.get_text_config()
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{name}: no tokenizer can be loaded: {reason}") from error
    try:
        generation = GenerationConfig.from_pretrained(name, **pinned).eos_token_id
    except OSError:
        generation = None
    backend = getattr(auto, "backend_tokenizer", None)
    if backend is None:
        raise InputError(f"{name}: only tokenizers with a tokenizer.json are supported")
    specials = {key: str(value) for key, value in auto.special_tokens_map.items()
                if key.endswith("_token")}  # fmt: skip
    ends = [config.eos_token_id, generation, auto.eos_token_id]
    templates = _named(auto.chat_template)
    return _build(name, backend, specials, templates, ends, auto.pad_token_id, config.vocab_size)


def _build(
    name: str, tokenizer: Tokenizer, specials: dict[str, str], templates: dict[str, str],
    ends: list[Any], pad_id: int | None, vocab_size: int,
) -> TargetTokenizer:  # fmt: skip
    tokenizer.no_truncation()
    tokenizer.no_padding()
    flat = [i for value in ends for i in (value if isinstance(value, list) else [value])]
    end_ids = tuple(sorted({i for i in flat if i is not None}))
    # What fills a row up is never looked at, so any valid id will do where none is named.
    pad = pad_id if pad_id is not None else next(iter(end_ids), 0)
    return TargetTokenizer(name, tokenizer, specials, templates, end_ids, pad, vocab_size)


def _length(tokenizer: Tokenizer) -> int:
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error


STRADDLES = "a token straddles the edge of an answer"

TAIL_CHARS = 64  # a generation prompt's header is shorter, and few of them differ
MAX_TAILS = 256
ANCHORS = ("\n", ".", ";", ")", "0")


class PieceEncoder:
    """A tokenizer that adds no special tokens, and knows where its texts may be cut."""

    def __init__(self, tokenizer: Tokenizer, candidates: Iterable[str]) -> None:
        """`candidates`: added tokens worth cutting at, those that the template writes."""
        self._tokenizer = tokenizer
        added = list(tokenizer.get_added_tokens_decoder().values())
        plain = repr(tokenizer.normalizer) in ("None", "Sequence(normalizers=[])")
        wanted = set(candidates)
        self.cuts = tuple(
            sorted(token.content for token in added
                   if token.content in wanted and _cuts(token, added, plain))
        )  # fmt: skip
        self._tails: dict[str, list[int]] = {}
        self._anchors = self._find_anchors()
        # A word at the start gets no blank, and no added token takes blanks away.
        self.keeps_blanks = self._anchors == ("",) and not any(t.lstrip or t.rstrip for t in added)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text as it stands. Raises RowError for half a surrogate pair."""
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError as error:
            raise RowError(NOT_UNICODE) from error
        return [encoding.ids for encoding in encodings]

    def continue_with(
        self, prompt: str, answer: str, start: int = 0
    ) -> tuple[list[int], list[int], bool]:
        """Ids of `prompt[start:]`, of `answer` after the prompt, and whether they are joined.

        Joined: the ids of the prompt and of the answer are those of both texts in one. Otherwise a
        token would straddle their edge, which a target cannot write once it has read the prompt;
        the answer's ids are then those of its text alone. `start` is 0 or where a cutting token
        begins. Raises RowError when the tokenizer cannot encode the answer alone.
        """
        cut = max(start, *(prompt.rfind(token, start) for token in self.cuts), start)
        tail = prompt[cut:]
        texts = [tail + answer] if cut == start else [tail + answer, prompt[start:cut]]
        both, *head = self.encode(texts)
        tail_ids = self._encode_tail(tail)
        joined = both[: len(tail_ids)] == tail_ids
        answer_ids = both[len(tail_ids) :] if joined else self._alone(answer)
        return (head[0] if head else []) + tail_ids, answer_ids, joined

    def _encode_tail(self, tail: str) -> list[int]:
        """Ids of a text that is likely to come again."""
        known = self._tails.get(tail)
        if known is None:
            known = self.encode([tail])[0]
            if len(tail) <= TAIL_CHARS and len(self._tails) < MAX_TAILS:
                self._tails[tail] = known
        return known

    def _alone(self, answer: str) -> list[int]:
        """Ids of a text in the middle of another, whatever stands before it."""
        for anchor in self._anchors:
            before, both = self.encode([anchor, anchor + answer])
            if both[: len(before)] == before:
                return both[len(before) :]
        raise RowError(STRADDLES)

    def _find_anchors(self) -> tuple[str, ...]:
        """What to put before a text so that it is not taken for the beginning of one.

        Nothing for byte-level tokenizers. Where the first word of a text gets a blank, characters
        that leave the ids of a word after them alone.
        """
        word, spaced = self.encode(["x", " x"])
        anchors = []
        for anchor in ANCHORS:
            before, *both = self.encode([anchor, anchor + "x", anchor + " x"])
            if anchor not in self._tokenizer.decode(before) or any(
                ids[: len(before)] != before for ids in both
            ):
                continue  # not in the vocabulary, or merged with what follows
            after = [ids[len(before) :] for ids in both]
            if after == [word, spaced]:
                return ("",)
            if after[1] == word != after[0]:
                anchors.append(anchor)
        return tuple(anchors)


def _cuts(token: AddedToken, added: Sequence[AddedToken], plain: bool) -> bool:
    """Whether a text may be cut before every occurrence of this added token.

    It takes no blanks before it away (those after it are in the same piece), it is found in the
    text as it stands, and no other added token can hide a part of it.
    """
    text = token.content
    if token.lstrip or token.single_word or (token.normalized and not plain):
        return False
    return not (text[0].isalnum() or text[0] in "_ ") and not any(
        _overlap(other.content, text) or _overlap(text, other.content)
        for other in added
        if other.content != text
    )


def _overlap(first: str, second: str) -> bool:
    """Whether an occurrence of `first` can end inside `second`, or hold it."""
    return second in first or any(
        first.endswith(second[:n]) for n in range(1, min(len(first), len(second)))
    )
