"""Rows of a conversation: which answers they hold, what tags say, and the encoding in pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_families import (
    CHATML,
    COHERE,
    GEMMA,
    HARMONY,
    LLAMA,
    LLAMA_2,
    LLAMA_2_FIRST,
    MISTRAL_1,
    PHI_3,
)
from tiny_targets import shipped, write_target

from dflashdist.data import turns as module
from dflashdist.data.chat import UNTAGGED, ChatTokenizer
from dflashdist.data.conversations import Conversation, RowError
from dflashdist.data.messages import NO_SUPERVISED
from dflashdist.data.turns import AnswerText, assemble

ASKED = {"role": "user", "content": "Why?"}
SAID = {"role": "assistant", "content": "So."}
MORE = [ASKED, SAID, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "No."}]
HEAD = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
TAIL = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
PLAIN = HEAD + "{{ m.content + '<|im_end|>\n' }}" + TAIL


def chat_of(folder, source: str, style=CHATML, **options) -> ChatTokenizer:
    return ChatTokenizer.load(write_target(folder, style, source), **options)


def supervised(chat: ChatTokenizer, messages, turns="all") -> list[list[str]]:
    """The decoded supervised runs of every row."""
    made = chat.training_rows(Conversation("here", messages), turns)
    for row in made.rows:
        chat.check(row, Conversation("here", messages))
    return [list(row.answers) for row in made.rows]


def test_choices_of_turns(tmp_path):
    keeps, rewrites = chat_of(tmp_path / "a", PLAIN), chat_of(tmp_path / "b", shipped("qwen3"))
    thought = "<think>\n\n</think>\n\n"
    assert supervised(keeps, MORE) == [["So.<|im_end|>", "No.<|im_end|>"]]
    assert supervised(keeps, MORE, "auto") == supervised(keeps, MORE)
    assert supervised(rewrites, MORE) == [[f"{thought}So.<|im_end|>"], [f"{thought}No.<|im_end|>"]]
    for turns, chat in (("last", keeps), ("last", rewrites), ("auto", rewrites)):
        assert supervised(chat, MORE, turns)[0][0].endswith("No.<|im_end|>")
        made = chat.training_rows(Conversation("here", MORE), turns)
        assert (len(made.rows), made.answers, len(made.rows[0].answers)) == (1, 2, 1)


def test_answers_of_weight_0_are_read_and_not_supervised(tmp_path):
    chat = chat_of(tmp_path, PLAIN)
    unweighted = SAID | {"supervised": False}
    made = chat.training_rows(Conversation("here", [ASKED, unweighted, *MORE[2:]]))
    assert made.rows[0].answers == ("No.<|im_end|>",)
    assert made.answers == 2
    assert made.rows[0].ids.tolist() == chat.encode([chat.render(MORE)[:-1]])[0].ids
    assert supervised(chat, [*MORE[:3], MORE[3] | {"supervised": False}], "last") == [
        ["So.<|im_end|>"]
    ]
    with pytest.raises(RowError, match=NO_SUPERVISED):
        chat.training_rows(Conversation("here", [ASKED, unweighted]))


TAGGED = "{% if m.role == 'assistant' %}BODY{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}", "So."),
        ("{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}", "So."),
        ("{%- generation -%}{{ m.content }}{%- endgeneration -%}{{ '<|im_end|>\n' }}", "So."),
        (
            "{% generation %}{{ m.content }}{% endgeneration %}"
            "{% generation %}{{ '<|im_end|>\n<|endoftext|>' }}{% endgeneration %}",
            "So.",
        ),
        ("S{% generation %}{{ m.content[1:] + '<|im_end|>\n' }}{% endgeneration %}", "o."),
        ("{% generation %}{{ m.content }}{% endgeneration %}!<|im_end|>\n", None),
        (
            "{% generation %}S{% endgeneration %}o{% generation %}.<|im_end|>{% endgeneration %}",
            None,
        ),
        ("{% generation %}{{ m.content + '<|im_' }}{% endgeneration %}end|>", None),
    ],
)
def test_tags_decide_where_supervision_begins_and_must_end_with_the_turn(tmp_path, body, expected):
    chat = chat_of(tmp_path, HEAD + TAGGED.replace("BODY", body) + TAIL)
    if expected is None:
        with pytest.raises(RowError, match=module.TAGS_DISAGREE):
            chat.training_rows(Conversation("here", MORE[:2]))
    else:
        assert supervised(chat, MORE[:2]) == [[expected + "<|im_end|>"]]


def test_untagged_turns_are_not_supervised(tmp_path):
    body = (
        "{% if m.content == 'No.' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}"
    )
    chat = chat_of(tmp_path, HEAD + TAGGED.replace("BODY", body) + TAIL)
    made = chat.training_rows(Conversation("here", MORE))
    assert (made.rows[0].answers, made.answers) == (("No.<|im_end|>",), 2)
    with pytest.raises(RowError, match=UNTAGGED):
        chat.training_rows(Conversation("here", MORE[:2]))


def calls(**arguments):
    return [{"type": "function", "function": {"name": "look", "arguments": arguments}}]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "a<|im_end|>"}, module.END_INSIDE),
        ({"content": "a<|im_end|>b"}, module.END_INSIDE),
        ({"content": "a", "reasoning": "b<|im_end|>"}, module.END_INSIDE),
        ({"content": "", "tool_calls": calls(a="<|im_end|>")}, module.END_INSIDE),
        ({"content": "", "tool_calls": calls()}, module.CHANGES_ANSWER),
    ],
)
def test_answers_that_cannot_be_supervised(tmp_path, message, reason):
    with pytest.raises(RowError, match=reason):
        supervised(chat_of(tmp_path, PLAIN), [ASKED, {"role": "assistant", **message}])


def test_reasoning_that_a_setting_turns_off_is_refused(tmp_path):
    thought = "{% if enable_thinking and m.reasoning_content %}{{ m.reasoning_content }}{% endif %}"
    source = HEAD + thought + "{{ m.content + '<|im_end|>\n' }}" + TAIL
    talk = [ASKED, SAID | {"reasoning": "Hm."}]
    with pytest.raises(RowError, match=module.REASONING_LOST):
        supervised(chat_of(tmp_path, source, settings={"enable_thinking": False}), talk)
    on = chat_of(tmp_path, source, settings={"enable_thinking": True})
    assert supervised(on, talk) == [["Hm.So.<|im_end|>"]]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (HEAD + "{{ m.content + '\n' }}" + TAIL, module.NO_END_OF_TURN),
        (PLAIN.replace("m.content", "m.content[::-1]"), module.CHANGES_ANSWER),
        (PLAIN.replace("m.content +", "m.content + '<|im_end|>' + m.role +"), module.END_INSIDE),
        (PLAIN.replace("assistant\n", "assistant\nFirst: "), module.PROMPT_DIFFERS),
        ("{{ messages | length }}" + PLAIN, module.HISTORY_DIFFERS),
    ],
)
def test_templates_that_cannot_be_followed(tmp_path, source, reason):
    with pytest.raises(RowError, match=reason):
        supervised(chat_of(tmp_path, source), MORE[:2])


def test_an_end_of_turn_that_is_not_eos_and_one_that_opens_the_next_turn(tmp_path):
    eos_first = chat_of(tmp_path / "a", shipped("llama3"), LLAMA)
    assert eos_first._target.specials["eos_token"] == "<|end_of_text|>"
    assert supervised(eos_first, MORE) == [["So.<|eot_id|>", "No.<|eot_id|>"]]
    opening = "{% for m in messages %}{{ '<|im_end|>' + m.role + ':' + m.content }}{% endfor %}"
    opening += "{% if add_generation_prompt %}{{ '<|im_end|>assistant:' }}{% endif %}"
    assert supervised(chat_of(tmp_path / "b", opening), MORE) == [
        ["So.<|im_end|>", "No.<|im_end|>"]
    ]


def test_a_token_across_the_edge_of_the_prompt_is_two_tokens_as_the_target_writes_them(tmp_path):
    chat, messages = chat_of(tmp_path, PLAIN), [ASKED, SAID | {"content": "\nSo."}]
    row = chat.training_rows(Conversation("here", messages)).rows[0]
    prompt = chat.encode_prompt([ASKED])
    assert row.ids[: len(prompt)].tolist() == prompt and not row.loss_mask[: len(prompt)].any()
    assert row.loss_mask[len(prompt) :].all()
    whole = chat.encode([chat.render(messages)])[0].ids
    assert whole[: len(prompt)] != prompt  # in one text, both newlines are one token
    chat.check(row, Conversation("here", messages))
    more = [*messages, *MORE[2:]]  # which is how the next prompt has it
    assert len(chat.training_rows(Conversation("here", more)).rows) == 2


def test_answers_with_nothing_between_them_are_one_run(tmp_path):
    bare = "{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    assert supervised(chat_of(tmp_path, bare), [ASKED, SAID, SAID, *MORE]) == [
        ["So.<|im_end|>So.<|im_end|>", "So.<|im_end|>", "No.<|im_end|>"]
    ]


def literal(answers: list[AnswerText], chat: ChatTokenizer) -> list[tuple[list[int], list[int]]]:
    """The definition of rows, in whole encodings."""
    rows: list[tuple[list[int], list[int]]] = []
    for answer in answers:
        before, both = (
            chat.tokenizer.encode(text, add_special_tokens=False).ids
            for text in (answer.prompt, answer.prompt + answer.text)
        )
        ids = both[len(before) :] if both[: len(before)] == before else None
        ids = chat._pieces._alone(answer.text) if ids is None else ids
        if not rows or before[: len(rows[-1][0])] != rows[-1][0]:
            rows.append(([], []))
        row_ids, mask = rows[-1]
        mask += [0] * (len(before) - len(row_ids)) + [1] * len(ids)
        row_ids[:] = before + ids
    return rows


STYLES = {
    "qwen3": (CHATML, "qwen3"), "llama3": (LLAMA, "llama3"), "gemma": (GEMMA, "gemma"),
    "gptoss": (HARMONY, "gptoss"), "cohere": (COHERE, "cohere2"), "phi3": (PHI_3, "phi3"),
    "llama2": (LLAMA_2_FIRST, LLAMA_2), "mistral": (MISTRAL_1, LLAMA_2), "plain": (CHATML, PLAIN),
    "whole": (CHATML, PLAIN),
}  # fmt: skip
PIECES = ["a", "walk", " ", "  ", "\n", "\n\n", "/", "'s", "1", "🙂", "é", "<", "|>", "<|im_", "\t"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    made = {}
    for name, (style, source) in STYLES.items():
        text = source if "{" in source else shipped(source)
        made[name] = chat_of(tmp_path_factory.mktemp("chat"), text, style)
    made["whole"]._pieces.cuts = ()  # as if every added token took the blanks before it
    return made


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=60, deadline=None)
@given(contents=st.lists(TEXTS, min_size=2, max_size=6))
def test_encoding_in_pieces_is_the_literal_definition(chats, name, contents):
    chat = chats[name]
    roles = ["user", "assistant"] * 3
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    inputs = chat._template.inputs(messages, None)
    try:
        found = [chat._answers.find(inputs, i, None) for i in range(1, len(inputs), 2)]
        answers = [answer for answer in found if answer is not None]
        rows = assemble(answers, chat._pieces, chat.end_ids)
    except RowError:
        return
    made = [(row.ids.tolist(), row.loss_mask.tolist()) for row in rows]
    assert made == literal(answers, chat)
    for row in rows:
        chat.check(row, Conversation("here", messages))


@pytest.mark.parametrize(
    ("name", "before"), [("llama2", "walk "), ("mistral", "walk "), ("qwen3", "a\n")]
)
def test_an_answer_that_cannot_be_joined_gets_no_blank_before_it(chats, name, before):
    chat, answer = chats[name], "tree" if before[-1] == " " else "\ntree"
    prompt, ids, joined = chat._pieces.continue_with(before, answer)
    assert not joined and prompt == chat.encode([before])[0].ids
    tokens = "".join(chat.tokenizer.id_to_token(i) for i in ids)
    assert tokens == answer.replace("\n", "Ċ")


def test_a_long_text_is_tokenised_once(chats):
    chat, seen = chats["qwen3"], []
    encode = chat._pieces.encode
    chat._pieces.encode = lambda texts: (seen.extend(map(len, texts)), encode(texts))[1]
    try:
        chat.training_rows(Conversation("here", [ASKED | {"content": "ab " * 999}, SAID]))
    finally:
        del chat._pieces.encode
    assert sum(seen) < 999 * 3 + 300
