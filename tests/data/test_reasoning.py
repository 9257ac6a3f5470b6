"""A `<think>` block in an answer's text: kept to the character where the template keeps it."""

import json

import pytest
from test_families import CHATML
from tiny_targets import shipped, write_target

from dflashdist.config import DataConfig, InputError
from dflashdist.data import parts, turns
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.conversations import RowError, parse_row
from dflashdist.data.prepare import format_summary, prepare

ASKED = {"role": "user", "content": "Why?"}
BODY = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
)
PLAIN, OPENED = BODY + "{% endif %}", BODY + "{{ '<think>\n' }}{% endif %}"
END = "<|im_end|>"


def row(content: str, **more) -> dict:
    return {"messages": [ASKED, {"role": "assistant", "content": content, **more}]}


def chat_of(folder, template: str) -> ChatTokenizer:
    return ChatTokenizer.load(write_target(folder, CHATML, template))


def written(chat: ChatTokenizer, source: dict) -> str:
    """What is supervised, decoded and held to the source."""
    parsed = parse_row("f:1", source)
    (made,) = chat.training_rows(parsed).rows
    chat.check(made, parsed)
    return chat.decode(made.ids[made.loss_mask == 1].tolist())


@pytest.mark.parametrize(
    "content",
    [
        "<think>abc</think>x",
        "<think>\nabc\n</think>\n\nx",
        "<think>\n\n  abc \n</think>x\n",
        "<think></think>x",
        "<think>\n\n</think>\n\nx",
        " \n<think>abc</think>\n x",
        "abc\n</think>\n\nx",
        "</think>x",
        "<think>abc, without an end",
        "x </think> y",
    ],
)
def test_a_template_without_a_field_for_it_gets_what_came(tmp_path, content):
    assert written(chat_of(tmp_path, PLAIN), row(content)) == content + END


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ("<think>\nabc\n</think>\n\nx", "abc\n</think>\n\nx"),
        ("<think>abc</think>x", "abc</think>x"),  # the line break is the prompt's
        ("abc</think>\nno block\n</think>\nx", "abc</think>\nno block\n</think>\nx"),
        ("abc\n</think>x", None),  # speaks of the tag: no block
        (" abc\n</think>\n\nx", " abc\n</think>\n\nx"),
        ("<think>\n\n</think>\n\nx", "\n</think>\n\nx"),
    ],
)
def test_an_opening_that_the_prompt_writes_is_not_written_twice(tmp_path, content, answer):
    chat = chat_of(tmp_path, OPENED)
    if answer is None:
        with pytest.raises(RowError, match=turns.REASONING_DROPPED):
            written(chat, row(content))
    else:
        assert written(chat, row(content)) == answer + END
        parsed = parse_row("f:1", row(content))
        (made,) = chat.training_rows(parsed).rows
        prompt = chat.encode_prompt([ASKED])
        assert made.ids[: len(prompt)].tolist() == prompt


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_a_field_is_put_before_the_answer(tmp_path, name):
    chat = chat_of(tmp_path, PLAIN)
    for reasoning, content in (("abc", "x"), ("\nabc\n", "\n\nx")):  # stripped, and as vLLM cuts it
        whole = "<think>\nabc\n</think>\n\nx" + END
        assert written(chat, row(content, **{name: reasoning})) == whole
    assert written(chat, row("<think></think>x", **{name: " abc"})).startswith("<think>\n abc\n<")


def test_a_template_with_a_field_keeps_the_reasoning_and_writes_its_own_block(tmp_path):
    chat = chat_of(tmp_path, shipped("qwen3"))
    for content in ("<think>  abc </think>x", "<think>\n  abc \n</think>\n\nx"):
        assert written(chat, row(content)) == "<think>\n  abc \n</think>\n\nx" + END
    # Its own empty block would stand before one that has no end.
    with pytest.raises(RowError, match=turns.CHANGES_ANSWER):
        written(chat, row("<think>abc, without an end"))


def test_what_is_supervised_is_held_to_the_source_row(tmp_path):
    chat = chat_of(tmp_path, PLAIN)
    (made,) = chat.training_rows(parse_row("f:1", row("<think>\nabc\n</think>\n\nx"))).rows
    for other in ("<think>abc</think>x", "abc\n</think>\n\nx y", "<think>\nabc\n</think>\nx"):
        with pytest.raises(InputError, match=r"f:2: .* is not in what is supervised"):
            chat.check(made, parse_row("f:2", row(other)))
    chat.check(made, parse_row("f:2", row("<think>\nabc\n</think>\n\nx\n")))


def test_blocks_that_a_template_spaces_otherwise_are_counted(tmp_path):
    file = tmp_path / "rows.jsonl"
    contents = ("<think>abc</think>x", "<think>\nabc\n</think>\n\nx", "<think></think>y", "x")
    file.write_text("\n".join(json.dumps(row(content)) for content in contents))
    outcomes = {}
    for name, template in (("plain", PLAIN), ("qwen3", shipped("qwen3"))):
        target = write_target(tmp_path / name, CHATML, template)
        outcomes[name] = prepare(
            [file], target, tmp_path / f"{name}-store", DataConfig(), verify_all=True
        )
    assert outcomes["plain"]["remarks"] == {}
    assert outcomes["qwen3"]["remarks"] == {parts.REFRAMED: 2}
    assert f"{parts.REFRAMED}" in format_summary(outcomes["qwen3"])
    assert f"{file}:1, {file}:3" in format_summary(outcomes["qwen3"])
