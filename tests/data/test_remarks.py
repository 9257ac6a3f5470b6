"""What is remarkable about rows that are kept: cut answers, greetings, nulls, and the audit."""

import json

import pyarrow as pa
import pyarrow.parquet
import pytest
from spelled import TOOLS, assistant, user
from test_families import CHATML, FAMILIES
from tiny_targets import shipped, write_target

from dflashdist.config import DataConfig
from dflashdist.data import conversations, turns
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.conversations import RowError, parse_prompt, parse_row
from dflashdist.data.prepare import format_summary, prepare

SYSTEM = {"role": "system", "content": "s"}
CALLS = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}]


def cut(text: str, reason: str = "length", **more) -> dict:
    return assistant(text, finish_reason=reason, **more)


def messages_of(*messages, **row) -> list:
    return parse_row("f:1", json.dumps({"messages": messages} | row)).messages


@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_learns_an_end_after_an_answer_that_was_cut_off(tmp_path, name):
    entry = FAMILIES[name]
    source = entry.source or shipped(name)
    chat = ChatTokenizer.load(write_target(tmp_path, entry.style, source), settings=entry.settings)
    talk = [user("What?"), assistant("It is."), user("And?"), cut("It walks the tree and then ")]
    whole, short = [parse_row("f:1", {"messages": talk[:-1] + last}) for last in
                    ([talk[-1] | {"finish_reason": "stop"}], talk[-1:])]  # fmt: skip
    try:
        complete = chat.training_rows(whole).rows
    except RowError as error:
        with pytest.raises(RowError, match=str(error)):
            chat.training_rows(short)
        return
    rows = chat.training_rows(short).rows
    assert len(rows) == len(complete)
    for row, other in zip(rows, complete, strict=True):
        chat.check(row, short)
        if row is not rows[-1]:
            assert row.ids.tolist() == other.ids.tolist()
    last, text = rows[-1].answers[-1], complete[-1].answers[-1]
    assert last.strip().endswith("walks the tree and then") and text.startswith(last)
    assert text[len(last) :].strip().removeprefix("<|END_RESPONSE|>") in entry.style.ends
    supervised = rows[-1].ids[rows[-1].loss_mask == 1][-1]
    assert supervised not in chat.end_ids and rows[-1].loss_mask[-1] == 1


def test_what_follows_a_cut_answer_is_left_out():
    said = [user("a"), assistant("b"), user("c"), cut("d"), user("e"), assistant("f")]
    assert messages_of(*said) == [
        user("a"), assistant("b"), user("c"), assistant("d", cut_off=True),
    ]  # fmt: skip
    for key, reason, is_cut in (
        ("finish_reason", "LENGTH", True), ("stop_reason", "max_tokens", True),
        ("finish_reason", "content_filter", True), ("finish_reason", "stop", False),
        ("stop_reason", 151645, False), ("finish_reason", None, False),
    ):  # fmt: skip
        beside = messages_of(user("a"), assistant("b"), user("c"), assistant("d"), **{key: reason})
        assert [m.get("cut_off", False) for m in beside] == [False, False, False, is_cut]
        of_turn = messages_of(user("a"), assistant("b", **{key: reason}), user("c"), assistant("d"))
        assert len(of_turn) == (2 if is_cut else 4)
    pair = parse_row("f:1", {"prompt": "a", "response": "b", "finish_reason": "length"})
    assert pair.messages[-1] == assistant("b", cut_off=True)
    # Who is asked anew is asked all of it.
    assert len(parse_prompt("f:1", {"messages": said}).messages) == 6


def test_a_call_that_was_cut_off_is_refused(tmp_path):
    chat = ChatTokenizer.load(write_target(tmp_path, CHATML, shipped("qwen3")))
    row = parse_row("f:1", {"messages": [user("q"), cut("", tool_calls=CALLS)], "tools": TOOLS})
    with pytest.raises(RowError, match=turns.CUT_CALL):
        chat.training_rows(row)


def test_answers_before_any_question_are_read_and_not_learnt():
    hello = assistant("Hello!", supervised=False)
    assert messages_of(SYSTEM, assistant("Hello!"), user("q"), assistant("a")) == [
        SYSTEM, hello, user("q"), assistant("a"),
    ]  # fmt: skip
    row = parse_row("f:1", {"messages": [assistant("Hello!"), user("q"), assistant("a")]})
    assert row.messages[0] == hello and row.remarks == (conversations.GREETING,)
    marked = parse_row("f:1", {"messages": [hello | {"weight": 0}, user("q"), assistant("a")]})
    assert marked.remarks == () and marked.key == row.key
    # The result of a tool asks for an answer, too.
    result = {"role": "tool", "content": "r"}
    assert messages_of(result, assistant("a")) == [result, assistant("a")]


def test_nulls_of_columns_are_told_apart_from_those_of_json(tmp_path):
    def row(arguments: object, parameters: object = None) -> dict:
        call = {"function": {"name": "f", "arguments": arguments}}
        tool = {"name": "f", "parameters": parameters or {"type": "object"}}
        return {"messages": [user("q"), assistant("", tool_calls=[call])], "tools": [tool]}

    named = (conversations.NULLS,)
    for arguments, parameters, remarks in (
        ({"a": 1, "b": None}, None, named), ({"a": {"b": [{"c": None}]}}, None, named),
        ({"a": 1}, {"properties": {"x": {"default": None}}}, named), ({"a": 1}, None, ()),
        ('{"a": null}', None, ()),
    ):  # fmt: skip
        of_columns = parse_row("f[0]", row(arguments, parameters))
        of_json = parse_row("f:1", json.dumps(row(arguments, parameters)))
        assert (of_columns.remarks, of_json.remarks) == (remarks, ())
        assert (of_columns.key == of_json.key) == (not remarks)
    rows = [row({"a": 1, "b": None}), row({"a": None, "b": 2})]
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    target = write_target(tmp_path / "target", CHATML, shipped("qwen3"))
    summary = prepare([tmp_path / "rows.parquet"], target, tmp_path / "store", DataConfig())
    assert summary["remarks"] == {conversations.NULLS: 2}
    (warning,) = [text for text in summary["warnings"] if conversations.NULLS in text]
    assert warning.startswith("2 conversations") and "as JSON text" in warning


def test_the_audit_says_it_of_both_stores(tmp_path):
    def rows(question: str) -> str:
        talks = [
            [assistant("Hello!"), user(f"{question} 1?"), assistant("It is.")],
            [user(f"{question} 2?"), cut("It walks and")],
            [user(f"{question} 3?"), assistant("word " * 400)],
        ]
        return "\n".join(json.dumps({"messages": talk}) for talk in talks)

    (tmp_path / "rows.jsonl").write_text(rows("What is"))
    held = tmp_path / "held.jsonl"
    held.write_text(rows("Who is"))
    target = write_target(tmp_path / "target", CHATML, shipped("qwen2_5"))
    data = DataConfig(max_length=256, validation=[str(held)])
    summary = prepare([tmp_path / "rows.jsonl"], target, tmp_path / "store", data)
    for one in (summary, summary["validation"]):
        assert one["remarks"] == {conversations.GREETING: 1, conversations.CUT_OFF: 1}
        assert (one["cut_rows"], one["unsupervised_answers"]) == (1, 1)
    training, validation = format_summary(summary).split("validation store")
    inside = summary["validation"]
    for text, one, file in ((training, summary, "rows"), (validation, inside, "held")):
        assert "cut at 256" in text and f"1  ({one['cut_tokens']:,} tokens lost)" in text
        for remark, line in ((conversations.GREETING, 1), (conversations.CUT_OFF, 2)):
            (found,) = [entry for entry in text.splitlines() if remark in entry]
            assert found.endswith(f"1  ({tmp_path}/{file}.jsonl:{line})")
