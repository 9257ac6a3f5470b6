"""From JSON Lines to a store: every row accounted for."""

import json
from pathlib import Path

import pytest

import dflashdist.demo
from dflashdist.config import DataConfig, InputError
from dflashdist.data import chat, conversations, prepare
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.shards import TokenStore

TARGET = Path(dflashdist.demo.__file__).parent / "target"


def row(question: str, answer: object) -> str:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages})


def run(tmp_path, lines, **data):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(lines))
    return prepare.prepare([file], TARGET, tmp_path / "store", DataConfig(**data), overwrite=True)


def test_counts_add_up_over_every_kind_of_row(tmp_path):
    lines = [
        row("What is it?", "A thing."),
        row("What is it?", "word " * 40 + "end"),  # cut
        "{",
        row("What is it?", ["parts"]),
        row("What is it?", "  indented"),
        row("What is it?", "a<|im_end|>b"),
        row("word " * 60, "A thing."),
        row("What is it?", "x"),
    ]
    summary = run(tmp_path, lines, max_length=32, min_supervised=3)
    assert summary["rejected"] == {
        conversations.NOT_JSON: 1,
        conversations.NOT_TEXT: 1,
        chat.STRADDLES: 1,
        chat.END_INSIDE: 1,
        prepare.BEYOND: 1,
        "fewer than 3 supervised tokens": 1,
    }
    assert summary["rows"] == len(lines) == summary["kept"] + sum(summary["rejected"].values())
    tokenizer = ChatTokenizer.load(TARGET)
    whole = tokenizer.encode([tokenizer.render(json.loads(lines[1])["messages"])])[0].ids
    assert (summary["cut_rows"], summary["cut_tokens"]) == (1, len(whole) - 32)
    store = TokenStore.open(tmp_path / "store")
    assert store.num_rows == summary["kept"] == 2 and store.lengths.max() == 32
    table = prepare.format_summary(summary)
    assert "rows rejected" in table and f"{tmp_path / 'rows.jsonl'}:3" in table


def test_masks_in_the_store_decode_to_the_answers(tmp_path):
    answers = [f"Answer {i}: `f({i})`\n\n- café" for i in range(700)]  # more than one chunk
    run(tmp_path, [row("What?", answer) for answer in answers])
    store, tokenizer = TokenStore.open(tmp_path / "store"), ChatTokenizer.load(TARGET)
    for i, answer in enumerate(answers):
        ids, mask = store.row(i)
        assert tokenizer.decode(ids[mask == 1].tolist()) == answer + "<|im_end|>"
        assert store.supervised[i] == mask.sum()


def test_two_adjacent_supervised_tokens_are_needed(tmp_path):
    # Cut after the first token of the answer, or after the second.
    length = len(ChatTokenizer.load(TARGET).encode_prompt([{"role": "user", "content": "What?"}]))
    with pytest.raises(InputError, match=prepare.BEYOND):
        run(tmp_path, [row("What?", "A thing.")], max_length=length + 1)
    assert run(tmp_path, [row("What?", "A thing.")], max_length=length + 2)["kept"] == 1


def test_no_usable_row_names_the_reasons(tmp_path):
    with pytest.raises(InputError, match=r"no usable row among 2: 2 x not JSON .*rows\.jsonl:1"):
        run(tmp_path, ["{", "{"])
    assert not (tmp_path / "store").exists()


def test_the_same_rows_give_the_same_fingerprint(tmp_path):
    lines = [row("What?", "A thing."), row("Why?", "A reason.")]
    first = run(tmp_path, lines)["fingerprint"]
    assert run(tmp_path, lines)["fingerprint"] == first
    assert run(tmp_path, lines, max_length=100)["fingerprint"] != first
