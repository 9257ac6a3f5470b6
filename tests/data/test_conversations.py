"""Keys and openings of rows, and how rejected rows are counted."""

import json
import pickle
from dataclasses import replace

from dflashdist.data.conversations import (
    Conversation,
    PlainText,
    Rejections,
    RowError,
    TokenRow,
    parse_prompt,
    parse_row,
)

SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
OTHER = {"role": "assistant", "content": "b"}
TOOL = {"type": "function", "function": {"name": "f"}}


def test_what_follows_the_last_answer_is_left_out_of_rows_and_kept_in_prompts():
    row = json.dumps({"messages": [USER, ANSWER, USER]})
    assert parse_row("f:1", row).messages == [USER, ANSWER]
    assert parse_prompt("f:1", row).messages == [USER, ANSWER, USER]


def test_keys_are_of_the_content_alone():
    one = Conversation("f:1", [USER, ANSWER])
    assert len(one.key) == len(one.opening) == 16
    assert one.key == Conversation("g:2", [dict(USER), dict(ANSWER)]).key
    assert pickle.loads(pickle.dumps(one)).key == one.key
    others = [
        one,
        Conversation("f:1", [USER, OTHER]),
        Conversation("f:1", [USER, ANSWER], [TOOL]),
        Conversation("f:1", [USER, ANSWER | {"supervised": False}]),
        Conversation("f:1", [USER, ANSWER | {"reasoning": "r"}]),
        PlainText("f:1", "q"),
        TokenRow("f:1", [1, 2], [0, 1]),
        TokenRow("f:1", [1, 2], [1, 1]),
    ]
    assert len({row.key for row in others}) == len(others)
    for row in others[-3:]:
        assert row.opening == row.key and replace(row, origin="g").key == row.key


def test_token_rows_share_the_ids_before_what_is_supervised():
    def row(ids, mask):
        return TokenRow("f:1", ids, mask)

    one = row([1, 2, 3, 4], [0, 0, 1, 1])
    for other in (row([1, 2, 9], [0, 0, 1]), row([1, 2, 3, 4], [0, 0, 1, 0])):
        assert one.opening == other.opening and one.key != other.key
    assert one.opening != row([1, 3, 3, 4], [0, 0, 1, 1]).opening
    assert len(one.opening) == 16
    # Texts have nothing in common that only begin with the same BOS.
    for alone in (row([1, 2, 3], [0, 1, 1]), row([1, 2], [1, 1]), row([1, 2], [0, 0])):
        assert alone.opening == alone.key


def test_openings_are_shared_by_answers_to_one_question():
    one = Conversation("f:1", [SYSTEM, USER, ANSWER])
    assert one.opening == Conversation("g:1", [SYSTEM, USER, OTHER, USER, ANSWER]).opening
    assert one.opening != Conversation("f:1", [SYSTEM, USER, ANSWER], [TOOL]).opening
    assert one.opening != Conversation("f:1", [USER, ANSWER]).opening


def test_conversations_that_begin_with_an_answer_do_not_share_an_empty_opening():
    greeting, other = ([SYSTEM, OTHER, dict(USER, content=text), ANSWER] for text in "xy")
    assert Conversation("f:1", greeting).opening != Conversation("f:2", other).opening
    assert Conversation("f:1", [ANSWER]).opening != Conversation("f:1", [OTHER]).opening


def test_rejections_keep_the_first_few_places_in_order():
    first, second = Rejections(shown=2), Rejections(shown=2)
    for i in range(3):
        second.add("why", f"b{i}")
    first.add("why", "a0")
    second.add("other", "b3")
    first.merge(second)
    assert first.counts == {"why": 4, "other": 1} and first.total == 5
    assert first.examples == {"why": ["a0", "b0"], "other": ["b3"]}


def test_the_first_rejected_row_says_more():
    found = Rejections()
    for i in range(2):
        found.add(RowError("why", "because"), f"a{i}")
    assert found.counts == {"why": 2} and found.examples == {"why": ["a0 [because]", "a1"]}
