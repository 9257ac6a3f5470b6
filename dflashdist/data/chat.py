"""The target's chat format: conversations to token ids, and which of them it would write itself.

Supervised are, of each assistant turn, the tokens from right after the generation prompt to the
end-of-turn token inclusive. The boundaries are found by rendering prefixes of the conversation;
where a template rewrites what it rendered before, the row is refused, never approximated.

A local folder is read with `tokenizers` and `jinja2` alone; transformers (8 s to import) is
loaded only where that is not enough: a model's name, or a folder without these files.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from dflashdist.config import InputError
from dflashdist.data.conversations import Message, RowError

REWRITES_HISTORY = "template rewrites history"
CHANGES_ANSWER = "template changes the answer"
NO_END_OF_TURN = "no end-of-turn token after an answer"
END_INSIDE = "end-of-turn token inside an answer"
STRADDLES = "a token straddles the edge of an answer"
TEMPLATE_REFUSES = "template refuses the conversation"

Span = tuple[int, int]
Template = Callable[[Sequence[Message], bool], str]  # (messages, add_generation_prompt) -> text


@dataclass(frozen=True)
class Rendering:
    """One conversation as text: character spans of the answers, end-of-turn text included."""

    text: str
    spans: list[Span]


@dataclass(frozen=True)
class ChatTokenizer:
    """A target's tokenizer and chat template."""

    name: str
    tokenizer: Tokenizer
    template: Template
    end_ids: tuple[int, ...]  # tokens that end a turn
    pad_id: int
    vocab_size: int  # rows of the target's embedding
    fingerprint: str  # hex, of tokenizer and template

    @classmethod
    def load(cls, path: str | Path, revision: str | None = None) -> "ChatTokenizer":
        """The chat format of a local folder or of a model's name.

        Raises InputError when there is no tokenizer, no chat template, no end-of-turn token, or
        when the tokenizer has ids that the target's embedding has no row for.
        """
        folder = Path(path).expanduser()
        chat = _from_folder(folder) if (folder / "tokenizer.json").is_file() else None
        if chat is None:
            chat = _from_transformers(str(path), revision)
        if chat.length > chat.vocab_size:
            raise InputError(
                f"{path}: its tokenizer has {chat.length} ids, its embedding {chat.vocab_size} "
                "rows; use the tokenizer that belongs to the target"
            )
        if not chat.end_ids:
            raise InputError(f"{path}: no eos_token_id in config.json or generation_config.json")
        return chat

    @property
    def length(self) -> int:
        """Token ids in use, added tokens included: the first embedding row past them is free."""
        return 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values())

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The conversation as the target reads it. Raises RowError when the template refuses it."""
        try:
            return self.template(messages, add_generation_prompt)
        except TemplateError as error:
            raise RowError(TEMPLATE_REFUSES) from error

    def encode(self, texts: Sequence[str]) -> list[Any]:
        """`tokenizers` encodings of rendered texts; no special token is added to them."""
        return self.tokenizer.encode_batch(list(texts), add_special_tokens=False)

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the conversation with the generation prompt after it. Raises RowError."""
        return self.encode([self.render(messages, add_generation_prompt=True)])[0].ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def render_answers(self, messages: Sequence[Message]) -> Rendering:
        """The whole conversation and the character spans that the target would write.

        Raises RowError when a prefix of the conversation does not render to a prefix of the text.
        """
        text = self.render(messages)
        ends = [token for i in self.end_ids if (token := self.tokenizer.id_to_token(i))]
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.render(messages[:i], add_generation_prompt=True)
            turn = self.render(messages[: i + 1])
            if not (text.startswith(turn) and turn.startswith(prompt)):
                raise RowError(REWRITES_HISTORY)
            answer = message["content"].strip()
            at = turn.rfind(answer, len(prompt))
            if at < 0:
                raise RowError(CHANGES_ANSWER)
            after = at + len(answer)
            found = [(turn.find(end, after), len(end)) for end in ends]
            stops = [start + length for start, length in found if start >= 0]
            if not stops:
                raise RowError(NO_END_OF_TURN)
            spans.append((len(prompt), min(stops)))
        return Rendering(text, spans)

    def loss_mask(self, encoding: Any, spans: Sequence[Span]) -> np.ndarray:
        """uint8 [len]: 1 on the tokens inside the character spans.

        Raises RowError when a token lies across the edge of a span, or an answer holds an
        end-of-turn token before its last one.
        """
        mask = np.zeros(len(encoding.ids), dtype=np.uint8)
        ends = np.array([end for _, end in encoding.offsets], dtype=np.int64)
        # A byte-level token may report its offset without its leading space: it begins where the
        # token before it ended, or earlier when both hold bytes of one character.
        starts = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
        starts[1:] = np.minimum(starts[1:], ends[:-1])
        for first_char, end_char in spans:
            first = int(np.searchsorted(ends, first_char, side="right"))
            stop = int(np.searchsorted(ends, end_char, side="right"))
            for edge, char in ((first, first_char), (stop, end_char)):
                if edge < len(starts) and starts[edge] < char:
                    raise RowError(STRADDLES)
            if np.isin(encoding.ids[first : stop - 1], self.end_ids).any():
                raise RowError(END_INSIDE)
            mask[first:stop] = 1
        return mask

    def check_mask(
        self, encoding: Any, mask: np.ndarray, rendering: Rendering, origin: str
    ) -> None:
        """Decode the supervised tokens and compare them with the answers and their end of turn.

        White space and Unicode composition are left out of the comparison, which tokenizers with
        a normaliser do not keep. Raises InputError: the tokenizer's offsets cannot be trusted.
        """
        runs = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]))).reshape(-1, 2)
        written = "".join(self.decode(encoding.ids[start:stop]) for start, stop in runs)
        expected = "".join(rendering.text[start:end] for start, end in rendering.spans)
        if _squeezed(written) != _squeezed(expected):
            raise InputError(
                f"{origin}: the supervised tokens decode to {written[:80]!r}, the answer is "
                f"{expected[:80]!r}: the tokenizer of {self.name} reports wrong offsets"
            )


def _squeezed(text: str) -> str:
    return "".join(unicodedata.normalize("NFC", text).split())


def _from_folder(folder: Path) -> ChatTokenizer | None:
    """From tokenizer.json, the template's file and the configs; None where one is missing."""
    settings = _read_json(folder / "tokenizer_config.json")
    source = _template_source(folder, settings)
    config = _read_json(folder / "config.json")
    vocab_size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if source is None or vocab_size is None:
        return None
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    specials = {
        key: value if isinstance(value, str) else value.get("content")
        for key, value in settings.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }
    end_ids: list[Any] = [tokenizer.token_to_id(specials.get("eos_token") or "")]
    for place in (
        config,
        config.get("text_config", {}),
        _read_json(folder / "generation_config.json"),
    ):
        value = place.get("eos_token_id")
        end_ids += value if isinstance(value, list) else [value]
    pad_id = tokenizer.token_to_id(specials.get("pad_token") or "")
    template = _compile(source, specials)
    return _build(str(folder), tokenizer, template, source, end_ids, pad_id, vocab_size)


def _from_transformers(name: str, revision: str | None) -> ChatTokenizer:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    pinned: dict[str, Any] = {"revision": revision} if revision else {}
    try:
        auto = AutoTokenizer.from_pretrained(name, **pinned)
        config = AutoConfig.from_pretrained(name, **pinned).get_text_config()
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{name}: no tokenizer can be loaded: {reason}") from error
    try:
        generation = GenerationConfig.from_pretrained(name, **pinned).eos_token_id
    except OSError:
        generation = None
    if not auto.chat_template:
        raise InputError(
            f"{name}: no chat template; add chat_template.jinja to the target's folder"
        )
    backend = getattr(auto, "backend_tokenizer", None)
    if backend is None:
        raise InputError(f"{name}: only tokenizers with a tokenizer.json are supported")
    end_ids: list[Any] = [auto.eos_token_id]
    for value in (config.eos_token_id, generation):
        end_ids += value if isinstance(value, list) else [value]

    def template(messages: Sequence[Message], add_generation_prompt: bool) -> str:
        return auto.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )

    source = json.dumps(auto.chat_template)
    return _build(name, backend, template, source, end_ids, auto.pad_token_id, config.vocab_size)


def _build(
    name: str, tokenizer: Tokenizer, template: Template, source: str,
    end_ids: list[Any], pad_id: int | None, vocab_size: int,
) -> ChatTokenizer:  # fmt: skip
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ends = tuple(sorted({i for i in end_ids if i is not None}))
    digest = hashlib.sha256((tokenizer.to_str() + "\0" + source).encode()).hexdigest()[:16]
    # What fills a row up is never looked at, so any valid id will do where none is named.
    pad = pad_id if pad_id is not None else next(iter(ends), 0)
    return ChatTokenizer(name, tokenizer, template, ends, pad, vocab_size, digest)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error


def _template_source(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = settings.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    return source


def _compile(source: str, specials: dict[str, Any]) -> Template:
    """The template under the rules that chat templates are written for."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
        sort_keys: bool = False,
    ) -> str:  # fmt: skip
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    # {% generation %} marks answers for trainers; this module finds them itself.
    source = re.sub(r"\{%(-?)\s*generation\s*(-?)%\}", r"{%\1 if true \2%}", source)
    source = re.sub(r"\{%(-?)\s*endgeneration\s*(-?)%\}", r"{%\1 endif \2%}", source)
    plain = environment.from_string(source)

    def template(messages: Sequence[Message], add_generation_prompt: bool) -> str:
        return plain.render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **specials,
        )

    return template
