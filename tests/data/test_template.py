"""Chat templates: what they are given, how they are compiled, where their tags stand."""

import pytest
from tiny_targets import shipped

from dflashdist.config import InputError
from dflashdist.data import template as module
from dflashdist.data.messages import RowError
from dflashdist.data.template import ChatTemplate, special_literals

TALK = [
    {"role": "user", "content": "Why <b>?"},
    {"role": "assistant", "content": "So.", "reasoning": "Hm.", "supervised": False},
]
BODY = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def made(source: str | dict[str, str], **settings) -> ChatTemplate:
    sources = source if isinstance(source, dict) else {"default": source}
    return ChatTemplate("here", sources, {"bos_token": "<s>"}, settings, "2024-02-29")


def rendered(template: ChatTemplate, messages=TALK, tools=None, prompt=False) -> str:
    return template.render(template.inputs(messages, tools), tools, prompt)


def test_a_template_gets_reasoning_under_every_name_or_inline():
    for name in module.REASONING_NAMES:
        source = "{% for m in messages %}{{ m." + name + " }}{{ m.content }}{% endfor %}"
        assert rendered(made(source)) == "Why <b>?Hm.So."
    assert rendered(made(BODY)) == "user:Why <b>?;assistant:<think>\nHm.\n</think>\n\nSo.;"
    beside_a_call = "{% for m in messages if m.tool_calls %}{{ m.thinking }}{% endfor %}" + BODY
    assert rendered(made(beside_a_call)).endswith("assistant:So.;")
    assert "supervised" not in made(BODY).inputs(TALK, None)[1]


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_settings_do_not_hide_that_a_template_has_a_reasoning_field(name):
    shown = "{% if m.reasoning_content and " + name + " %}{{ m.reasoning_content }}|{% endif %}"
    source = BODY.replace("{{ m.content }}", shown + "{{ m.content }}")
    for settings, expected in (({}, "So."), ({name: False}, "So."), ({name: True}, "Hm.|So.")):
        assert rendered(made(source, **settings)).endswith(f"assistant:{expected};")
    by_default = source.replace("and " + name, "and " + name + " | default(true)")
    assert rendered(made(by_default, **{name: False})).endswith("assistant:So.;")
    spoken = source.replace("and " + name, "and not no_thinking")
    assert rendered(made(spoken, no_thinking=True)).endswith("assistant:So.;")
    chosen = source.replace(name, "mode == 'deep'")  # a setting that nothing but the user knows
    assert rendered(made(chosen, mode="deep")).endswith("assistant:Hm.|So.;")


def test_tools_take_the_template_made_for_them():
    template = made({"default": BODY, "tool_use": "{{ tools | tojson }}", "rag": "{% no"})
    assert rendered(template) != rendered(template, tools=[{"a": "<é>"}]) == '[{"a": "<é>"}]'
    assert rendered(made("{{ tools is none }}"), tools=[]) == "True"
    with pytest.raises(InputError, match="here: no chat template named 'default' but rag"):
        made({"rag": BODY})


def test_dates_are_fixed_and_noted_only_where_they_are_written():
    dated = made("{{ strftime_now('%d %b %Y') }}")
    assert (rendered(dated), dated.date) == ("29 Feb 2024", "2024-02-29")
    assert made(BODY).date is None
    with pytest.raises(InputError, match=r"data\.date=2023-02-29: a day is YYYY-MM-DD"):
        ChatTemplate("here", {"default": BODY}, {}, {}, "2023-02-29")


def test_settings_are_variables():
    source = "{{ bos_token }}{{ enable_thinking is false }}"
    assert rendered(made(source, enable_thinking=False)) == "<s>True"
    assert rendered(made(source, bos_token="<b>")) == "<b>False"
    with pytest.raises(InputError, match=r"data\.template_settings\.messages"):
        made(source, messages=[])


@pytest.mark.parametrize(
    "tag", ["{% generation %}", "{%- generation -%}", "{%generation%}", "{%+ generation -%}"]
)
@pytest.mark.parametrize("end", ["{% endgeneration %}", "{%-endgeneration-%}"])
def test_tags_in_any_spelling_mark_the_body(tag, end):
    body = "{% for m in messages %}{{ m.role }}:" + tag + "{{ m.content }}." + end
    template = made(body + "{{ ';' }}{% endfor %}")
    text, spans = template.render_tagged(template.inputs(TALK[:1] * 2, None), None)
    assert text == "user:Why <b>?.;" * 2
    assert spans is not None
    assert [text[start:stop] for start, stop in spans] == ["Why <b>?."] * 2


def test_a_template_that_only_speaks_of_tags_has_none():
    template = made("{#- {% generation %} {% endgeneration %} -#}" + BODY)
    assert template.render_tagged(template.inputs(TALK, None), None)[1] is None
    for name in ("qwen3", "gptoss"):
        assert made(shipped(f"{name}_training")).render_tagged([TALK[0]], None)[1] == []


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | length }}", ""),
        ("{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}", ""),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", f"a{module.OPEN}b"),
    ],
)
def test_tags_that_cannot_be_told_from_the_text_are_refused(source, content):
    with pytest.raises(RowError, match=module.TAGS_CHANGE_TEXT):
        made(source).render_tagged([{"role": "user", "content": content}], None)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}", "{{ messages[0].content + 1 }}", "{{ 1 // 0 }}",
        "{{ messages[0].nothing.more }}", "{{ messages.append(1) }}", "{{ x.y }}",
        "{{ messages | tojson(indent={}) }}",
    ],
)  # fmt: skip
def test_whatever_a_template_raises_refuses_the_row(source):
    with pytest.raises(RowError, match=module.TEMPLATE_REFUSES):
        rendered(made(source))


def test_a_template_that_does_not_compile_names_its_line():
    with pytest.raises(InputError, match=r"here \(default\): line 2 of the chat template"):
        made("{{ 1 }}\n{% for %}")


def test_special_looking_literals():
    texts = frozenset(["<|im_start|>user\n[INST] <b> </b>", "<start_of_turn><<SYS>> a | b <x"])
    assert special_literals(texts) == ["<<SYS>>", "<start_of_turn>", "<|im_start|>", "[INST]"]
