"""What rows are made of, held to golden.json for as long as FORMAT stays what it is.

`python tests/data/test_format.py` writes golden.json anew; the vocabularies are made here without
training, so that no version of a library decides an id. Templates that the trl package ships are
compared where they are the ones that golden.json was written with.
"""

import hashlib
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from spelled import spelled_rows
from test_families import (
    CHATML,
    DEEPSEEK_V3,
    FAMILIES,
    LLAMA_2,
    MISTRAL_3,
    PHI_4,
    TALKS,
    Family,
)
from tiny_targets import Style, shipped, tokenizer_json, write_target
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from dflashdist.config import DataConfig
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.conversations import Conversation, RowError, parse_row
from dflashdist.data.parts import CONVERSATION, ROW, Part
from dflashdist.data.prepare import prepare
from dflashdist.data.shards import TokenStore
from dflashdist.data.workspace import FORMAT

GOLDEN = Path(__file__).parent / "golden.json"
AGAIN = "then write the file anew: python tests/data/test_format.py"
DATED = (
    "{{ '<|im_start|>system\nIt is ' + strftime_now('%d %b %Y') + '<|im_end|>\n' }}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OURS = (DATED, DEEPSEEK_V3, LLAMA_2, MISTRAL_3, PHI_4)  # of the templates, whatever trl ships
TEMPLATES = FAMILIES | {"dated and tagged": Family(CHATML, (), DATED)}
SHOWN = (("qwen3", "two"), ("llama 2", "odd"), ("dated and tagged", "system"))  # in full
MERGES = ["th", "he", "in", "an", "wa", "as", "  ", "\n\n", " t", ".\n"]  # some cross an edge
ROWS = [
    *({"prompt": f"What is {i % 20}?", "completion": f"Thing {i}: " + "walks " * (i % 12)}
      for i in range(40)),
    {"text": "All of it."}, {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, {"messages": []},
    {"prompt": "What is 3?", "completion": "Thing 3: " + "walks " * 3},
]  # fmt: skip


MARKS = (
    {"weight": 0}, {"train": False}, {"training": 0}, {"trainable": False}, {"loss": False},
    {"loss_mask": 0}, {"masked": True}, {"train_detail": []}, {"prefix": True}, {"weight": 1},
    {"finish_reason": "length"}, {"stop_reason": "max_tokens"}, {"finish_reason": "stop"},
)  # fmt: skip


BLOCKS = ("<think>abc</think>x", "<think>\n\n</think>\n\nx", "abc\n</think>\n\nx", "<think> a")


def digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def untrained(style: Style) -> Tokenizer:
    """The style's tokenizer with a vocabulary that is written down: letters and a few merges."""
    trained = Tokenizer.from_str(tokenizer_json(style.kind, style.specials, style.rstrip))
    bytewise = trained.normalizer is None and style.kind != "first"
    if bytewise:
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
        pairs = [splitter.pre_tokenize_str(pair)[0][0] for pair in MERGES]
    else:
        tokens = [f"<0x{byte:02X}>" for byte in range(256)] + [chr(c) for c in range(33, 127)]
        tokens += ["▁", "\n"]
        pairs = [pair.replace(" ", "▁") for pair in MERGES]
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*tokens, *pairs]))}
    merges = [(pair[0], pair[1]) for pair in pairs]
    made = Tokenizer(models.BPE(vocab, merges, byte_fallback=not bytewise))
    if trained.normalizer is not None:
        made.normalizer = trained.normalizer
    if trained.pre_tokenizer is not None:
        made.pre_tokenizer = trained.pre_tokenizer
    made.decoder = trained.decoder
    made.add_special_tokens(
        [AddedToken(s, normalized=False, special=True, rstrip=s in style.rstrip)
         for s in style.specials]
    )  # fmt: skip
    return made


def chat_of(folder: Path, entry: Family, source: str) -> ChatTokenizer:
    write_target(folder, entry.style, source)
    tokenizer = untrained(entry.style)
    tokenizer.save(str(folder / "tokenizer.json"))
    eos, *more = map(tokenizer.token_to_id, entry.style.ends)
    config = {"model_type": "llama", "vocab_size": 1024, "eos_token_id": eos}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos, *more]}))
    return ChatTokenizer.load(folder, settings=entry.settings, date="2026-01-02")


def made_of(chat: ChatTokenizer, conversation: Any) -> Any:
    """[[ids, where the mask changes], ...] of a conversation, or the reason it is refused."""
    try:
        rows = chat.training_rows(conversation).rows
    except RowError as error:
        return str(error)
    return [
        [row.ids.tolist(), (np.flatnonzero(np.diff(row.loss_mask)) + 1).tolist()] for row in rows
    ]


def read(row: dict[str, Any]) -> tuple[str, str] | None:
    """The key and opening of a row, or None where it is refused."""
    try:
        parsed = parse_row("f:1", row)
    except RowError:
        return None
    return parsed.key.hex(), parsed.opening.hex()


def found(folder: Path) -> dict[str, dict[str, Any]]:
    """What golden.json should hold."""
    spellings = {
        name: digest([read(row) for _, row in rows]) for name, rows in spelled_rows().items()
    }
    asked, said = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    marked = [{"messages": [asked, said | mark, asked, said]} for mark in MARKS]
    spellings["marks"] = digest([read(row) for row in marked])
    spellings["greeting"] = digest(read({"messages": [said, asked, said]}))
    spellings["chosen"] = digest([read({"prompt": "q", "chosen": [said]})])
    templates, shown = {}, {}
    for name, entry in TEMPLATES.items():
        source = entry.source or shipped(name)
        chat = chat_of(folder / name, entry, source)
        outcomes = {talk: made_of(chat, Conversation("f:1", *TALKS[talk])) for talk in TALKS}
        for block in BLOCKS:
            outcomes[block] = made_of(chat, parse_row("f:1", {"prompt": "q", "answer": block}))
        cut = {"prompt": "q", "answer": "a b ", "finish_reason": "length"}
        outcomes["cut off"] = made_of(chat, parse_row("f:1", cut))
        templates[name] = {"template": digest(source), "rows": digest(outcomes)}
        shown |= {f"{name}: {talk}": outcomes[talk] for other, talk in SHOWN if other == name}
    lines = "\n".join(map(json.dumps, ROWS))
    (folder / "rows.jsonl").write_text(lines)
    data = DataConfig(
        validation=0.3, deduplicate=True, max_length=100, max_rejected=1.0, date="2026-01-02"
    )
    store = folder / "store"
    source = f"{folder / 'rows.jsonl'},weight=1.5"
    prepare([source], folder / "dated and tagged", store, data)
    whole = {}
    for name, path in (("training", store), ("validation", store / "validation")):
        opened = TokenStore.open(path)
        rows = [opened.row(i) for i in range(opened.num_rows)]
        whole[name] = digest([[ids.tolist(), mask.tolist()] for ids, mask in rows])
    Part().save(folder / "part.npz")
    with np.load(folder / "part.npz") as part:
        ledger = json.loads(part["ledger"].tobytes())
        layout = [str(CONVERSATION.descr), str(ROW.descr), sorted(part), sorted(ledger)]
    return {
        "spellings": spellings,
        "templates": templates,
        "shown": shown,
        "whole": whole | {"parts": digest(layout)},
    }


def changed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What both know, and not alike; a template that is another text says nothing of the code."""
    others = {
        name
        for name, entry in old["templates"].items()
        if entry["template"] != new["templates"].get(name, entry)["template"]
        and TEMPLATES[name].source not in OURS
    }
    return [
        f"{kind}: {name}"
        for kind, entries in new.items()
        for name, entry in entries.items()
        if name in old[kind] and old[kind][name] != entry and name.partition(":")[0] not in others
    ]


def test_rows_change_with_their_format_number_alone(tmp_path):
    golden, now = json.loads(GOLDEN.read_text()), found(tmp_path)
    differ = changed(golden, now)
    assert golden["format"] == FORMAT or differ, f"FORMAT is new: {AGAIN}"
    assert not differ, (
        f"{', '.join(differ)}: not what rows of format {golden['format']} are. Stores that were "
        f"made before must not be reused: raise FORMAT in dflashdist/data/workspace.py, {AGAIN}"
    )
    for kind, entries in now.items():
        assert entries.keys() == golden[kind].keys(), f"{kind} were added or removed: {AGAIN}"


if __name__ == "__main__":
    with TemporaryDirectory() as place:
        new = found(Path(place))
    old = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else None
    if old and old["format"] == FORMAT and (differ := changed(old, new)):
        sys.exit(f"raise FORMAT in dflashdist/data/workspace.py first: {', '.join(differ)} changed")
    sections = [
        f'"{kind}": {{\n'
        + ",\n".join(f'"{name}": {json.dumps(entry)}' for name, entry in entries.items())
        + "\n}"
        for kind, entries in new.items()
    ]
    GOLDEN.write_text(f'{{"format": {FORMAT},\n' + ",\n".join(sections) + "}\n")
