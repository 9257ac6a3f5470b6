"""What a target's files say about its tokenizer: vocabulary, special tokens, ends of a turn.

A local folder is read with `tokenizers` alone; transformers (8 s to import) is loaded only where
that is not enough: a model's name, or a folder without a tokenizer.json and a config.json. It then
supplies the tokenizer, the configuration and the template's text, and nothing else of it is used.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dflashdist.config import InputError

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
