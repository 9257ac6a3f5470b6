"""Rows bent out of shape: nothing but a reason comes of them, and none goes missing."""

import copy
import json
import random
from collections import Counter

import numpy as np
import pytest
from demo_files import TARGET
from spelled import spelled_rows

from dflashdist.config import DataConfig
from dflashdist.data import messages
from dflashdist.data.conversations import RowError, parse_prompt, parse_row
from dflashdist.data.prepare import prepare
from dflashdist.data.shards import TokenStore
from dflashdist.data.sources import Sources

REASONS = {value for name, value in vars(messages).items() if name.isupper()
           and isinstance(value, str)}  # fmt: skip
SPELLED = [row for rows in spelled_rows().values() for _, row in rows]
GOOD = [
    *SPELLED,
    {"text": "Some text.\nAnd more."},
    {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, True]},
]
JUNK = [
    None, "", " ", "x", 0, 1, -1, 2**70, 0.5, float("nan"), float("inf"), True, [], {}, [[]],
    [None], {"": {}}, "null", "[]", "{}", "[1", '{"a": 1}', "\ud83d", "\x00", "\u2028", "é" * 99,
    "<think>", "</think>", "<|im_end|>", "<|im_start|>assistant\n", "system", "gpt", "function",
    {"type": "text", "text": "t"}, [{"type": "image_url"}], [{"role": "user", "content": "q"}],
]  # fmt: skip
KEYS = [
    "messages", "conversations", "role", "from", "content", "value", "tools", "tool_calls", "text",
    "function_call", "system", "reasoning", "weight", "images", "input_ids", "history", "answer",
    "name", "arguments", "type", "prompt", "input",
]  # fmt: skip


def bend(row: dict, generator: random.Random) -> dict:
    """One to three places of a copy of the row changed."""
    row = copy.deepcopy(row)
    for _ in range(generator.randint(1, 3)):
        holder = row
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = generator.choice(keys)
            if isinstance(holder[key], dict | list) and generator.random() < 0.8:
                holder = holder[key]
                continue
            change = generator.randrange(6)
            if change == 0:
                del holder[key]
            elif change == 1 and isinstance(holder, dict):
                holder[generator.choice(KEYS)] = holder[key]
            elif change == 2 and isinstance(holder, list):
                holder.insert(key, copy.deepcopy(generator.choice(holder)))
            elif change == 3:
                holder[key] = json.dumps(holder[key])
            elif change == 4 and isinstance(holder, dict):
                holder[generator.choice(KEYS)] = copy.deepcopy(generator.choice(JUNK))
            else:
                holder[key] = copy.deepcopy(generator.choice(JUNK))
            break
    return row


def damage(line: bytes, generator: random.Random) -> bytes:
    """A few bytes of the line changed; it may become several lines, or none."""
    for _ in range(generator.randint(1, 3)):
        at = generator.randrange(len(line) + 1)
        cut = line[at + generator.randint(0, 3) :] if generator.random() < 0.9 else b""
        line = line[:at] + generator.choice([b"", b'"', b"\\", b"\xff", b"{", b"]", b"\n"]) + cut
    return line


def bent_lines(count: int, seed: int) -> list[bytes]:
    generator = random.Random(seed)
    lines = []
    for _ in range(count):
        row = generator.choice(GOOD)
        row = bend(row, generator) if generator.random() < 0.9 else row
        line = json.dumps(row).encode()
        lines.append(damage(line, generator) if generator.random() < 0.1 else line)
    return lines


def test_ten_thousand_bent_rows_are_all_accounted_for(tmp_path):
    content = b"\n".join(bent_lines(10_000, seed=0))
    (tmp_path / "rows.jsonl").write_bytes(content)
    data = DataConfig(max_rejected=1.0, workers=1, max_length=512)
    summary = prepare([tmp_path / "rows.jsonl"], TARGET, tmp_path / "store", data, verify_all=True)
    lines = [line for line in content.split(b"\n") if line.strip()]
    assert summary["source_rows"] == len(lines)
    assert summary["kept"] + sum(summary["rejected"].values()) == len(lines)
    # Neither half of the ledger is there by chance: it is what parsing alone already says.
    refused: Counter[str] = Counter()
    for line in lines:
        try:
            parse_row("f:1", line)
        except RowError as error:
            refused[str(error)] += 1
    assert {reason: summary["rejected"][reason] for reason in refused} == refused
    assert len(refused) > 20 and summary["kept"] > 1000


def test_rows_of_any_values_give_a_row_or_a_known_reason():
    """As from Arrow: values that JSON has no word for, arrays, and every format and mapping."""
    generator = random.Random(1)
    odd = [b"\x00\xff", np.float32("nan"), np.arange(3), np.array(["a", None]), np.int64(3), object]
    formats = ("auto", "messages", "sharegpt", "pairs", "text", "tokens")
    refused: Counter[str] = Counter()
    for _ in range(5000):
        row = bend(generator.choice(GOOD), generator)
        if generator.random() < 0.3:
            row[generator.choice(KEYS)] = generator.choice(odd)
        format = generator.choice(formats)
        fields = {"prompt": "input"} if generator.random() < 0.2 else {}
        for parse in (parse_row, parse_prompt):
            try:
                parsed = parse("f[0]", row, format, fields)
                assert len(parsed.key) == len(parsed.opening) == 16
            except RowError as error:
                refused[str(error)] += 1
    assert set(refused) <= REASONS and len(refused) > 20


@pytest.mark.parametrize("seed", range(5))
def test_bent_arrays_lose_nothing_between_the_commas(tmp_path, seed):
    """Elements that keep their brackets and quotes come out as they went in, good or not."""
    generator = random.Random(seed)
    values = [json.dumps(bend(generator.choice(GOOD), generator)) for _ in range(300)]
    values[::7] = [value.replace("null", "nul") for value in values[::7]]
    (tmp_path / "rows.json").write_text("[" + ",\n".join(values) + "]")
    read = [payload.decode() for _, payload in Sources([tmp_path / "rows.json"]).rows()]
    assert read == values


def test_all_spellings_make_the_same_store(tmp_path):
    def rows_of(name: str, rows: list[dict], **data) -> tuple[dict, list[bytes]]:
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        config = DataConfig(max_rejected=1.0, workers=1, **data)
        summary = prepare([file], TARGET, tmp_path / name, config, verify_all=True)
        store = TokenStore.open(tmp_path / name)
        read = [store.row(i) for i in range(store.num_rows)]
        return summary, sorted(ids.tobytes() + mask.tobytes() for ids, mask in read)

    canonical = [row for _, row in spelled_rows()["canonical"]]
    plain, expected = rows_of("plain", canonical)
    everything, same = rows_of("everything", SPELLED, deduplicate=True)
    assert expected and same == expected
    assert everything["source_rows"] == len(SPELLED)
    assert everything["kept"] == plain["kept"]
