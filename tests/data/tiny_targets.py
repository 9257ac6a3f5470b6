"""Small targets for tests: a folder with a tokenizer of a few hundred tokens and any template."""

import json
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

TEXTS = [
    "What does walk do? It walks the tree, top first, and yields every folder that it finds.",
    "user assistant system tool model think answer question result search text function name",
    "def walk(top):\n    return [top]\n\n\nclass Tree:\n    pass\n",
    '{"name": "search", "arguments": {"text": "answer"}}  <tool_call>\n</tool_call>\n\n',
    "The answer is 42, isn't it?  Yes.\n\n- one\n- two\n  - three\n",
] * 3
SPLIT = {  # how the families' byte-level tokenizers split text before they merge
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "o200k": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


@dataclass(frozen=True)
class Style:
    """A tokenizer's kind and what it adds."""

    kind: str  # a key of SPLIT, or metaspace: gemma, llama2 (blank before each text), first
    specials: tuple[str, ...]  # the first is what nothing else is: padding
    ends: tuple[str, ...]  # tokens that end a turn; the first is EOS, the rest generation_config's
    bos: str | None = None
    rstrip: tuple[str, ...] = ()  # of the specials, those that take the blanks after them


@cache
def tokenizer_json(kind: str, specials: tuple[str, ...], rstrip: tuple[str, ...] = ()) -> str:
    """A trained tokenizer of this kind."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind not in SPLIT, unk_token=None))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    first: list[str] = []
    if kind in SPLIT:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLIT[kind]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
    else:
        alphabet, first = [], [f"<0x{byte:02X}>" for byte in range(256)]
        strip: list[Any] = [decoders.Strip(" ", 1, 0)] if kind != "gemma" else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        if kind == "first":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
        else:
            blank = normalizers.Replace(" ", "▁")
            both = [normalizers.Prepend("▁"), blank] if kind == "llama2" else [blank]
            tokenizer.normalizer = normalizers.Sequence(both)
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[*specials[:1], *first], initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    if kind in SPLIT:
        tokenizer.train_from_iterator(TEXTS, trainer)
    else:  # words apart, as such vocabularies have them: a blank only begins a token
        splitter = tokenizer.pre_tokenizer
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[^▁\n]+"), "isolated")
        normalizer, tokenizer.normalizer = tokenizer.normalizer, normalizers.Replace(" ", "▁")
        tokenizer.train_from_iterator(TEXTS, trainer)
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    tokenizer.add_special_tokens(
        [AddedToken(s, normalized=False, special=True, rstrip=s in rstrip) for s in specials]
    )
    return tokenizer.to_str()


def write_target(folder: Path, style: Style, template: str | None, **config: Any) -> Path:
    """A target's folder, weights aside."""
    folder.mkdir(parents=True, exist_ok=True)
    text = tokenizer_json(style.kind, style.specials, style.rstrip)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    tokenizer = Tokenizer.from_str(text)
    settings = {
        "tokenizer_class": "TokenizersBackend", "backend": "tokenizers",
        "eos_token": style.ends[0], "pad_token": style.specials[0],
    }  # fmt: skip
    if style.bos:
        settings["bos_token"] = style.bos
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    eos, *more = [tokenizer.token_to_id(end) for end in style.ends]
    size = tokenizer.get_vocab_size() + 8
    values = {"model_type": "llama", "vocab_size": size, "eos_token_id": eos} | config
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos, *more]}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def shipped(name: str) -> str:
    """A model family's chat template as the trl package ships it, read as a file."""
    spec = find_spec("trl")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")
