"""Every spelling of a conversation gives the same canonical row, and nothing else does."""

import copy
import json

import numpy as np
import pytest
from spelled import CALL, CONVERSATIONS, TOOLS, assistant, spelled_rows, user

from dflashdist.data import messages as m
from dflashdist.data.conversations import PlainText, RowError, TokenRow, parse_prompt, parse_row

A, Q = assistant("a"), user("q")
PARTS = [{"begin_offset": 0, "end_offset": 0, "train": True}]  # axolotl's


def from_arrow(value):
    """As a data set hands rows out: arrays of numpy, absent things null, tuples."""
    if isinstance(value, dict):
        return {key: from_arrow(item) for key, item in value.items()} | {"absent": None}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        array = np.empty(len(value), dtype=object)
        array[:] = [from_arrow(item) for item in value]
        return array
    return tuple(map(from_arrow, value)) if isinstance(value, list) else value


@pytest.mark.parametrize("name", spelled_rows())
def test_all_spellings_give_the_same_rows(name):
    rows = spelled_rows()[name]
    assert rows
    for i, row in rows:
        messages, tools = CONVERSATIONS[i]
        for payload in (
            json.dumps(row),
            b"\xef\xbb\xbf" + json.dumps(row, ensure_ascii=False).encode() + b"\r\n",
            copy.deepcopy(row),
        ):
            parsed = parse_row("f:1", payload)
            as_came = [message.pop("written", None) for message in parsed.messages]
            assert (parsed.messages, parsed.tools) == (messages, tools)
            given = row.get("messages") if name.startswith("inline") else None
            for text, message, spelled in zip(as_came, messages, given or messages, strict=True):
                inline = given and "reasoning" in message
                assert text == (spelled["content"] if inline else None)
            assert parsed.key == parse_row("g:2", {"messages": messages, "tools": tools}).key


def test_rows_from_arrow_are_read_alike():
    for i, row in spelled_rows()["openai"]:
        messages, tools = CONVERSATIONS[i]
        parsed = parse_row("f[0]", from_arrow(row))
        assert (parsed.messages, parsed.tools) == (messages, tools)
    tokens = {"input_ids": np.arange(3), "loss_mask": np.array([False, True, True])}
    assert parse_row("f[0]", tokens) == TokenRow("f[0]", [0, 1, 2], [0, 1, 1])
    assert json.dumps(parse_row("f[0]", tokens).loss_mask) == "[0, 1, 1]"


def parsed(*messages, **row):
    return parse_row("f:1", json.dumps({"messages": list(messages)} | row))


def last(*messages):
    return parsed(*messages).messages[-1]


def test_text_blocks_and_results_of_tools():
    two = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    assert last(user("q"), {"role": "assistant", "content": two})["content"] == "a\nb\nc"
    for content, text in [
        ({"a": [1, None], "b": "ü"}, '{"a": [1, null], "b": "ü"}'),
        ([], "[]"), (3, "3"), (None, ""), ("x", "x"), (two[:2], "a\nb"),
        ([{"type": "repository", "name": "r"}], '[{"type": "repository", "name": "r"}]'),
        ([two[0], 3], '[{"type": "text", "text": "a"}, 3]'),
    ]:  # fmt: skip
        row = parsed(user("q"), {"role": "tool", "content": content}, assistant("a"))
        assert row.messages[1] == {"role": "tool", "content": text}


def test_what_is_reasoning():
    answer = {"role": "assistant"}
    for content, expected in [
        ("<think>r</think>a", ("a", "r")),
        (" \n<think>\n r \n</think>\n\n  a\n", ("  a\n", " r ")),
        ("r\n</think>\n\na", ("a", "r")),
        ("r\r\n</think> \r\na", ("a", "r")),
        ("the </think> tag\n </think>\na", ("a", "the </think> tag")),
        (" </think>\n\na", ("a", None)),
        # An answer may speak of the tag.
        ("The </think> token ends it.", ("The </think> token ends it.", None)),
        ("r</think>\n\na", ("r</think>\n\na", None)),
        ("a </think>", ("a </think>", None)),
        ("say <think>r\n</think>\na", ("say <think>r\n</think>\na", None)),
        ("<think>\n\n</think>\n\na", ("a", None)),
        ("<think>r a", ("<think>r a", None)),
        ("say <think>r</think>a", ("say <think>r</think>a", None)),
        ("<think>r</think>a</think>b", ("a</think>b", "r")),
    ]:
        got = last(user("q"), answer | {"content": content})
        assert (got["content"], got.get("reasoning")) == expected, content
        assert got.get("written", got["content"]) == content  # kept as it came
    same = {"content": "<think>r</think>a", "reasoning": "r ", "reasoning_content": "r"}
    whole = {"written": "<think>r</think>a"}
    assert last(user("q"), answer | same) == assistant("a", reasoning="r", **whole)
    # What is in a field of its own is not in the text.
    empty = {"content": "<think></think>a", "reasoning": "r"}
    assert last(user("q"), answer | empty) == assistant("a", reasoning="r")
    empty = {"content": "a", "reasoning": "", "thinking": " \n", "reasoning_content": None}
    assert last(user("q"), answer | empty) == assistant("a")
    # Only answers have reasoning.
    assert parsed(user("r</think>q"), assistant("a")).messages[0] == user("r</think>q")


def test_weights_and_identities():
    row = parsed(
        user("q") | {"name": "me"},
        assistant("a", weight=0),
        user("q"),
        assistant("", weight=1, tool_calls=[CALL | {"id": "c1", "index": 0}]),
        {"role": "tool", "content": "r", "tool_call_id": "c1", "name": None},
        assistant("b"),
        user("thanks"),
    )
    assert row.messages == [
        user("q"),
        assistant("a", supervised=False),
        user("q"),
        assistant("", tool_calls=[CALL | {"id": "c1"}]),
        {"role": "tool", "content": "r", "tool_call_id": "c1"},
        assistant("b"),
    ]
    assert len(parse_prompt("f:1", {"messages": [user("q"), assistant("")]}).messages) == 2


@pytest.mark.parametrize(
    ("mark", "learnt"),
    [
        *(({name: value}, bool(value)) for name in m.FLAGS for value in (0, 1, False, True)),
        *(({name: None}, True) for name in (*m.FLAGS, "masked", "train_detail", "prefix")),
        ({"masked": True}, False),
        ({"masked": False, "weight": 1}, True),
        ({"train_detail": []}, False),
        ({"weight": 0, "train_detail": PARTS}, False),
        ({"weight": 0.0, "train": False, "loss": 0}, False),
        ({"prefix": False, "train": True}, True),
    ],
)  # fmt: skip
def test_every_mark_of_what_is_not_learnt_is_honoured(mark, learnt):
    marked = assistant("a", **({} if learnt else {"supervised": False}))
    assert parsed(user("q"), assistant("a") | mark, user("r"), assistant("b")).messages[1] == marked
    spelled = {"from": "gpt", "value": "a"} | mark
    row = {"conversations": [user("q"), spelled, user("r"), assistant("b")]}
    assert parse_row("f:1", row).messages[1] == marked
    # Only answers are ever learnt.
    assert parsed(user("q") | mark, assistant("a")).messages == [user("q"), assistant("a")]


def test_a_row_that_says_so_is_learnt_and_other_values_say_nothing():
    for mark in ({"train": True}, {"weight": 0.5}, {"loss": 0.0}, {"loss": None}, {"train": "yes"}):
        assert parse_row("f:1", {"prompt": "q", "completion": "a"} | mark).messages[-1] == A


def test_what_was_chosen_is_read():
    talk, bad = [Q, A], [Q, assistant("no")]
    for row in (
        {"chosen": talk, "rejected": bad},
        {"prompt": "q", "chosen": talk, "rejected": bad},  # the whole conversation
        {"prompt": [Q], "chosen": [A], "rejected": bad[1:]},  # what follows the prompt
        {"prompt": "q", "chosen": [A], "rejected": bad[1:], "completion": None},
    ):
        assert parse_row("f:1", row).messages == talk
    # What is named otherwise is not passed over for it.
    assert parse_row("f:1", {"messages": [Q, assistant("b")], "chosen": talk}).messages[-1] != A
    assert parse_row("f:1", {"prompt": "q", "answer": "b", "chosen": [A]}).messages[-1] != A


@pytest.mark.parametrize(
    ("row", "reason", "hint"),
    [
        ({"query": "q", "response": "a"}, m.NO_MESSAGES, "prompt=query reads it"),
        ({"query": "q", "target": "a", "id": 3}, m.NO_MESSAGES,
         "its columns are query, target, id; data.fields.prompt=query data.fields.answer=target"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, m.NO_ANSWER, "answer=chosen reads it"),
        ({"dialog": [Q, A]}, m.NO_MESSAGES, "data.fields.messages=dialog reads it"),
        ({"train": [{"text": "a"}], "test": [{"text": "b"}]}, m.NO_MESSAGES,
         "give the rows in train a file of their own"),
        ({"id": 3, "when": "now"}, m.NO_MESSAGES,
         "its columns are id, when; name them by data.fields.messages"),
        ({f"c{i}": i for i in range(20)}, m.NO_MESSAGES, "c6, c7 and 12 more; name"),
        ({"\x1b[2J": 1, "\ud83d": 2, "x" * 50: 3}, m.NO_MESSAGES,
         f"its columns are '\\x1b[2J', '\\ud83d', {'x' * 40}...; name"),
        ({"\x1b[2J": [Q, A]}, m.NO_MESSAGES, r"data.fields.messages='\x1b[2J' reads"),
        ({"\ud83d": [{"a": 1}]}, m.NO_MESSAGES, r"give the rows in '\ud83d' a file"),
        ({}, m.NO_MESSAGES, "it is empty; name"),
        ({"messages": [Q]}, m.NO_ANSWER, ""),
    ],
)  # fmt: skip
def test_a_row_of_no_known_shape_says_what_would_make_it_one(row, reason, hint):
    with pytest.raises(RowError) as refused:
        parse_row("f:1", row)
    assert str(refused.value) == reason
    assert hint in refused.value.detail and bool(hint) == bool(refused.value.detail)
    if hint.endswith("reads it"):
        mapped = dict(word[len("data.fields."):].split("=") for word in refused.value.detail.split()
                      if word.startswith("data.fields."))  # fmt: skip
        assert parse_row("f:1", row, "auto", mapped).messages == [Q, A]


@pytest.mark.parametrize("arguments", ["absent", None, "", " ", "{}", {}])
def test_no_arguments(arguments):
    function = {"name": "now"} | ({} if arguments == "absent" else {"arguments": arguments})
    got = last(user("q"), assistant("", tool_calls=[{"function": function}]))
    assert got["tool_calls"] == [{"type": "function", "function": {"name": "now", "arguments": {}}}]


def test_nulls_inside_arguments_and_schemas_are_kept_in_json():
    call = {"function": {"name": "f", "arguments": {"unit": None}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"default": None}}}
    row = parsed(user("q"), assistant("", tool_calls=[call]), tools=[tool])
    assert row.messages[1]["tool_calls"][0]["function"]["arguments"] == {"unit": None}
    assert row.tools == [tool]
    as_text = {"name": "f", "parameters": json.dumps({"default": None})}
    assert parsed(user("q"), assistant("a"), tools=[json.dumps(as_text)]).tools == [tool]


def test_pairs():
    def pair(**row):
        return parse_row("f:1", row).messages

    both = [user("a\nb"), assistant("c")]
    assert pair(instruction="a", input="b", output="c") == both
    assert pair(prompt="a\nb", response="c", input=None) == both
    assert pair(question="q", answer="a", system_prompt="s")[0]["content"] == "s"
    assert pair(prompt="", question="q", output="", answer="a", system="") == [
        user("q"),
        assistant("a"),
    ]
    assert pair(prompt=[user("x")], completion="<think>r</think>c") == [
        user("x"), assistant("c", reasoning="r", written="<think>r</think>c"),
    ]  # fmt: skip
    assert parse_prompt("f:1", {"prompt": "q"}).messages == [user("q")]
    assert pair(instruction="a", context="b", response="c") == both
    assert pair(instruction="a", context="b", input="", response="c") == both
    assert pair(instruction="", input="a\nb", context="", response="c") == both
    fields = {"answer": "context"}  # a column that is mapped has no other meaning
    assert parse_row("f:1", {"prompt": "a\nb", "context": "c"}, "auto", fields).messages == both


@pytest.mark.parametrize("name", m.REASONING_KEYS)
def test_reasoning_beside_a_pair_is_that_of_its_answer(name):
    for answer in ("a", [A], "<think>r</think>a", [json.dumps(A)]):
        row = {"prompt": "q", "completion": answer, name: "\nr\n", "history": [["x", "y"]]}
        before, turns = [user("x"), assistant("y")], [Q, assistant("a", reasoning="r")]
        inline = {"written": answer} if "<think>" in answer else {}
        assert parse_row("f:1", row).messages == [*before, Q, turns[1] | inline]
    two = [assistant("", tool_calls=[CALL]), {"role": "tool", "content": "r"}, A]
    row = parse_row("f:1", {"prompt": "q", "completion": two, name: "r"})
    assert [message.get("reasoning") for message in row.messages] == [None, None, None, "r"]
    assert parse_row("f:1", {"prompt": "q", "completion": "a", name: ""}).messages == [Q, A]


def test_tools_have_the_order_in_which_servers_write_them():
    shuffled = {
        "function": {
            "strict": True, "parameters": {"type": "object", "properties": {}}, "name": "f",
            "description": "d",
        },
        "extra": 1,
    }  # fmt: skip
    for tool in (shuffled, shuffled | {"type": "function"}):
        (read,) = parsed(Q, A, tools=[tool]).tools
        assert list(read) == ["type", "function", "extra"] and read["type"] == "function"
        assert list(read["function"]) == ["name", "description", "parameters", "strict"]
        assert list(read["function"]["parameters"]) == ["type", "properties"]
    (bare,) = parsed(Q, A, tools=[shuffled["function"]]).tools
    assert list(bare) == ["type", "function"]
    assert list(bare["function"]) == ["name", "description", "parameters", "strict"]


def test_fields_give_columns_their_meaning():
    row = {"input": "q", "chosen": "a", "persona": "s", "text": "t"}
    fields = {"prompt": "input", "answer": "chosen", "system": "persona"}
    conversation = parse_row("f:1", row, "auto", fields).messages
    assert conversation == [{"role": "system", "content": "s"}, user("q"), assistant("a")]
    assert parse_row("f:1", row, "text") == PlainText("f:1", "t")
    chat = {"dialog": [user("q"), assistant("a")], "functions_json": json.dumps(TOOLS)}
    named = parse_row("f:1", chat, "auto", {"messages": "dialog", "tools": "functions_json"})
    assert named.messages == chat["dialog"] and named.tools == TOOLS
    tokens = {"tokens": [1, 2], "mask": [0, 1]}
    mapped = {"input_ids": "tokens", "loss_mask": "mask"}
    assert parse_row("f:1", tokens, "auto", mapped) == TokenRow("f:1", [1, 2], [0, 1])


def test_the_first_spelling_that_is_filled_is_taken():
    tokens = {"input_ids": [1, 2], "loss_mask": [0, 1]}
    pair = {"prompt": "q", "completion": "a"}
    chat = {"messages": [user("m"), assistant("n")]}
    share = {"conversations": [user("s"), assistant("t")]}
    everything = chat | share | pair | tokens | {"text": "t"}
    first = []
    for emptied in ("messages", "conversations", "prompt", "input_ids", "text"):
        first.append(parse_row("f:1", everything))
        everything[emptied] = [] if emptied in ("messages", "conversations") else None
    openings = [row.messages[0]["content"] for row in first[:3]]
    assert openings == ["m", "s", "q"]
    assert first[3:] == [TokenRow("f:1", [1, 2], [0, 1]), PlainText("f:1", "t")]
    assert parse_row("f:1", chat | pair, "pairs").messages[0] == user("q")
    with pytest.raises(RowError, match=m.NO_MESSAGES):
        parse_row("f:1", pair, "sharegpt")


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
REFUSED = [
    (m.NOT_UTF8, b'{"text": "\xff"}'),
    (m.NOT_JSON, '{"messages": ['),
    (m.NOT_JSON, "[" * 100_000),
    (m.NOT_JSON, ""),
    (m.NOT_AN_OBJECT, "[1]"),
    (m.NOT_UNICODE, {"messages": [Q, assistant("\ud83d")]}),
    (m.NOT_UNICODE, '{"text": "\\ud83d"}'),
    (m.NO_MESSAGES, {"id": 3}),
    (m.NO_MESSAGES, {"messages": []}),
    (m.NO_MESSAGES, {"messages": '{"role": "user"}'}),
    (m.NO_MESSAGES, {"messages": "hello"}),
    (m.BAD_MESSAGE, {"messages": ["hello", "there"]}),
    (m.BAD_MESSAGE, {"messages": [Q, 3]}),
    (m.UNKNOWN_ROLE, {"messages": [Q, {"role": "wizard", "content": "a"}]}),
    (m.UNKNOWN_ROLE, {"messages": [Q, {"content": "a"}]}),
    (m.NO_ANSWER, {"messages": [Q]}),
    (m.NO_ANSWER, {"prompt": "q"}),
    (m.EMPTY_ANSWER, {"messages": [Q, assistant(" \n"), Q, A]}),
    (m.EMPTY_ANSWER, {"messages": [Q, assistant("<think>r</think>")]}),
    (m.EMPTY_ANSWER, {"prompt": "q", "completion": ""}),
    (m.NO_SUPERVISED, {"messages": [Q, assistant("a", weight=0)]}),
    (m.BAD_FLAG, {"messages": [Q, assistant("a", weight=0.5)]}),
    (m.BAD_FLAG, {"messages": [Q, assistant("a", loss_mask=[0, 1])]}),
    (m.BAD_FLAG, {"messages": [Q, assistant("a", train="no")]}),
    (m.BAD_FLAG, {"messages": [Q, assistant("a", masked="yes")]}),
    (m.TWO_FLAGS, {"messages": [Q, assistant("a", weight=1, train=False)]}),
    (m.IN_PART, {"messages": [Q, assistant("a", train_detail=PARTS)]}),
    (m.IN_PART, {"messages": [Q, assistant("a", train_detail=PARTS, train=True)]}),
    (m.PREFIX, {"messages": [Q, assistant("{", prefix=True)]}),
    (m.PREFIX, {"messages": [Q, assistant("{", prefix=True), assistant("}")]}),
    (m.NO_QUESTION, {"messages": [A]}),
    (m.NO_QUESTION, {"messages": [{"role": "system", "content": "s"}, A, Q]}),
    (m.NO_QUESTION, {"messages": [A, Q, assistant("b", weight=0)]}),
    (m.NO_SUPERVISED, {"messages": [Q, A], "train": False}),
    (m.NO_SUPERVISED, {"prompt": "q", "completion": "a", "weight": 0}),
    (m.NO_SUPERVISED, {"text": "a", "training": False}),
    (m.NO_SUPERVISED, {"input_ids": [1, 2], "loss_mask": [0, 1], "trainable": False}),
    (m.NOT_TEXT, {"messages": [Q, {"role": "assistant", "content": None}]}),
    (m.NOT_TEXT, {"messages": [Q, {"role": "assistant", "content": {"text": "a"}}]}),
    (m.TYPED, {"messages": [{"role": "user", "content": 3}, A]}),
    (m.NOT_TEXT, {"messages": [Q, {"role": "assistant", "content": [{"type": "text"}]}]}),
    (m.NOT_TEXT, {"messages": [Q, assistant("a", reasoning=["r"])]}),
    (m.TYPED, {"prompt": "q", "completion": 4}),
    (m.TYPED, {"text": 4}),
    (m.MEDIA, {"messages": [{"role": "user", "content": [IMAGE]}, A]}),
    (m.MEDIA, {"messages": [Q, {"role": "tool", "content": [IMAGE]}, A]}),
    (m.MEDIA, {"messages": [Q | {"images": ["x.png"]}, A]}),
    (m.MEDIA, {"messages": [Q, A], "images": [{"bytes": "x"}]}),
    (m.TWO_REASONINGS, {"messages": [Q, assistant("<think>r</think>a", reasoning="s")]}),
    (m.TWO_REASONINGS, {"prompt": "q", "completion": "<think>r</think>a", "reasoning": "s"}),
    (m.TWO_REASONINGS, {"prompt": "q", "completion": "a", "reasoning": "s", "thinking": "r"}),
    (m.NOT_TEXT, {"prompt": "q", "completion": "a", "reasoning": ["s"]}),
    (m.NOT_TEXT, {"prompt": "q", "completion": "a", "context": {"a": "s"}}),
    (m.TWO_INPUTS, {"prompt": "q", "completion": "a", "input": "b", "context": "c"}),
    (m.TWO_SYSTEMS, {"messages": [{"role": "system", "content": "a"}, Q, A], "system": "b"}),
    (m.BAD_HISTORY, {"prompt": "q", "completion": "a", "history": [["q"]]}),
    (m.BAD_TOOL_CALL, {"messages": [Q, assistant("", tool_calls=[{"id": "x"}])]}),
    (m.BAD_TOOL_CALL, {"messages": [Q, assistant("", tool_calls=["{"])]}),
    (m.BAD_TOOL_CALL, {"messages": [Q, assistant("", tool_calls={"function": {}})]}),
    (
        m.BAD_TOOL_CALL,
        {"messages": [Q, assistant("", function_call={"name": "f", "arguments": "[1]"})]},
    ),
    (m.BAD_TOOL_CALL, {"messages": [Q | {"tool_calls": [CALL]}, A]}),
    (m.BAD_TOOLS, {"messages": [Q, A], "tools": "search"}),
    (m.BAD_TOOLS, {"messages": [Q, A], "tools": [{"type": "web_search"}]}),
    (m.BAD_TOOLS, {"messages": [Q, A], "tools": {"name": "f"}}),
    (m.NOT_PLAIN, {"messages": [Q, assistant("", tool_calls=[
        {"function": {"name": "f", "arguments": {"a": float("inf")}}}])]}),
    (m.NOT_PLAIN, {"messages": [Q, assistant("", tool_calls=[
        {"function": {"name": "f", "arguments": {"a": b"x"}}}])]}),
    (m.EMPTY_TEXT, {"text": " "}),
    (m.BAD_IDS, {"input_ids": [1, -1], "loss_mask": [0, 1]}),
    (m.BAD_IDS, {"input_ids": [[1, 1]], "loss_mask": [0, 1]}),
    (m.BAD_IDS, {"input_ids": [True, 1], "loss_mask": [0, 1]}),
    (m.BAD_MASK, {"input_ids": [1, 1], "loss_mask": [0, 2]}),
    (m.UNEQUAL, {"input_ids": [1, 1], "loss_mask": [0, 1, 1]}),
    (m.NO_TOKENS, {"input_ids": [], "loss_mask": []}),
]  # fmt: skip
EXPLICIT = [
    (m.NO_PAIR, "pairs", {"completion": "a"}),
    (m.NO_TEXT, "text", {"prompt": "a"}),
    (m.NO_TOKENS, "tokens", {"input_ids": [1, 2]}),
    (m.NO_MESSAGES, "messages", {"conversations": [Q, A]}),
]


@pytest.mark.parametrize(("reason", "payload"), REFUSED)
def test_what_cannot_be_used_is_refused_with_its_reason(reason, payload):
    with pytest.raises(RowError) as refused:
        parse_row("f:1", payload)
    assert str(refused.value) == reason


@pytest.mark.parametrize(("reason", "format", "row"), EXPLICIT)
def test_a_given_format_is_the_only_one(reason, format, row):
    with pytest.raises(RowError, match=reason):
        parse_row("f:1", row, format)


def test_every_reason_is_tried():
    reasons = {value for name, value in vars(m).items() if name.isupper() and name != "THINK"
               and isinstance(value, str) and name != "END_THINK"}  # fmt: skip
    tried = {reason for reason, _ in REFUSED} | {reason for reason, _, _ in EXPLICIT}
    assert tried == reasons


def test_nan_is_what_data_frames_write_for_nothing():
    row = '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], '
    assert parse_row("f:1", row + '"system": NaN, "score": Infinity}').messages == [Q, A]
    assert parse_row("f:1", {"messages": [Q, A], "system": float("nan")}).messages == [Q, A]
