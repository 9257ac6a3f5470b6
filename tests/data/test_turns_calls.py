"""Tool calls in a template's text: whatever targets write counts, what drops a part does not."""

import json

import pytest
from test_families import CHATML, HARMONY, RESULT, TOOLS, answer, user
from tiny_targets import shipped, write_target

from dflashdist.data import turns
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.conversations import Conversation, RowError
from dflashdist.data.turns import writes_calls

ARGUMENTS = {
    "text": "é <b> \"q\" 'x'\\\n y", "n": 1.5, "b": True, "z": None, "l": [1, {"a": "b"}],
    "d": {}, "e": [], "none": "",
}  # fmt: skip


def call(name: str = "search", /, **arguments) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def as_gemma(value, quote: str = '<|"|>') -> str:
    if isinstance(value, dict):
        items = sorted(value.items())
        return "{" + ",".join(f"{key}:{as_gemma(inner, quote)}" for key, inner in items) + "}"
    if isinstance(value, list):
        return "[" + ",".join(as_gemma(inner, quote) for inner in value) + "]"
    return quote + value + quote if isinstance(value, str) else json.dumps(value)


def as_tags(value) -> str:
    """A tag for every argument, JSON for what has parts."""
    texts = {k: json.dumps(v) if isinstance(v, dict | list) else str(v) for k, v in value.items()}
    return "".join(f"<parameter={key}>\n{text}\n</parameter>" for key, text in texts.items())


@pytest.mark.parametrize(
    "written",
    [
        json.dumps({"name": "search", "arguments": ARGUMENTS}),
        json.dumps({"name": "search", "arguments": ARGUMENTS}, ensure_ascii=False, indent=4),
        json.dumps({"name": "search", "arguments": ARGUMENTS}, separators=(",", ":")),
        json.dumps(["search", json.dumps(ARGUMENTS, ensure_ascii=False)], ensure_ascii=False),
        "call:search" + as_gemma(ARGUMENTS),
        "<function=search>" + as_tags(ARGUMENTS) + "</function>",
        "search(" + ", ".join(f"{key}={value!r}" for key, value in ARGUMENTS.items()) + ")",
    ],
)
def test_every_notation_of_a_call_counts(written):
    assert writes_calls([call(**ARGUMENTS)], f"<tool_call>{written}</tool_call>")
    assert not writes_calls([call(**ARGUMENTS)] * 2, f"<tool_call>{written}</tool_call>")
    for key in ARGUMENTS.keys() - {"none", "d"}:  # a change of any argument is noticed
        assert not writes_calls([call(**ARGUMENTS | {key: "changed"})], written), key


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ({"text": "first0"}, "<tool_call>search</tool_call>"),
        ({"i": "m"}, "<tool_call>search</tool_call><|im_end|>"),
        ({"text": "first0"}, "search({'text': 'first0'})"),
        ({"text": {"a": "b"}}, "<function=search><parameter=text>\n{'a': 'b'}\n</parameter>"),
        ({"text": ["a"]}, "<function=search><parameter=text>\n['a']\n</parameter>"),
        ({"text": True}, 'search {"text": True}'),
        ({"text": 'a "b"'}, 'search {"text": "a "b""}'),
        ({"text": "first"}, 'search {"text": "first0"}'),
        ({"a": "b", "c": "d"}, 'search {"a": "d", "c": "b"}'),
        ({"text": "a"}, 'look {"text": "a"}'),
    ],
)
def test_what_is_no_notation_of_the_call(arguments, written):
    assert not writes_calls([call(**arguments)], written)


def test_calls_come_in_their_order_and_one_by_one():
    one, two = call(text="a"), call("look", text="b")
    written = [json.dumps(c["function"]) for c in (one, two)]
    assert writes_calls([one, two], "\n".join(written))
    assert not writes_calls([two, one], "\n".join(written))
    assert not writes_calls([one, call(text="b")], "\n".join(written))
    assert writes_calls([call(), call()], "search()search()")
    assert not writes_calls([call(), call()], "search()")


HEAD = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
TAIL = (
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    "written", ["{{ c.function.name }}", "{{ c.function.name }}({{ c.function.arguments }})"]
)
def test_templates_that_drop_or_reprint_arguments_are_refused(tmp_path, written):
    each = "{% for c in m.tool_calls or [] %}<tool_call>" + written + "{% endfor %}"
    chat = ChatTokenizer.load(write_target(tmp_path, CHATML, HEAD + each + TAIL))
    # That the content speaks of the call does not make it one.
    said = answer('search {"text": "first"}', tool_calls=[call(text="first")])
    for message in (said, answer("", tool_calls=said["tool_calls"])):
        with pytest.raises(RowError, match=turns.CHANGES_ANSWER):
            chat.training_rows(Conversation("here", [user("What?"), message], TOOLS))
    unlike = answer("search", tool_calls=[call()])
    if "arguments" not in written:
        assert chat.training_rows(Conversation("here", [user("What?"), unlike], TOOLS)).rows


def test_an_answer_after_its_calls_may_repeat_what_they_say(tmp_path):
    each = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    late = HEAD.replace(" + m.content", "") + each + "{{ m.content }}" + TAIL
    chat = ChatTokenizer.load(write_target(tmp_path, CHATML, late))
    talk = [user("What?"), answer("search", tool_calls=[call(text="first")])]
    written = chat.training_rows(Conversation("here", talk, TOOLS)).rows[0].answers[0]
    assert written.endswith('"}}search<|im_end|>')


@pytest.mark.parametrize(
    ("name", "style", "kept"), [("gptoss", HARMONY, False), ("qwen3", CHATML, True)]
)
def test_parallel_calls_are_kept_or_the_row_refused(tmp_path, name, style, kept):
    chat = ChatTokenizer.load(write_target(tmp_path, style, shipped(name)))
    both = [call(text="first") | {"id": "callcall1"}, call(text="second") | {"id": "callcall2"}]
    result = RESULT | {"tool_call_id": "callcall2"}
    talk = [user("What?"), answer("", tool_calls=both), RESULT, result, answer("It is 1.")]
    conversation = Conversation("here", talk, TOOLS)
    if kept:
        written = chat.training_rows(conversation).rows[0].answers[0]
        assert "first" in written and "second" in written
    else:
        with pytest.raises(RowError, match=turns.CHANGES_ANSWER):
            chat.training_rows(conversation)
