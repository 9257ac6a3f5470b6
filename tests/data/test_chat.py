"""Rendering and the loss mask: what the target itself would write, to the token."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import processors

import dflashdist.demo
from dflashdist.config import InputError
from dflashdist.data import chat as module
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.conversations import RowError

TARGET = Path(dflashdist.demo.__file__).parent / "target"
FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json")
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What does naïve.walk do?"},
    {"role": "assistant", "content": "Walk the “tree”.\n\n    x = 1"},
    {"role": "user", "content": "And its signature?"},
    {"role": "assistant", "content": "```python\ndef walk(top):\n```"},
]
TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


@pytest.fixture(scope="module")
def chat():
    return ChatTokenizer.load(TARGET)


def with_template(folder, template: str, **config) -> ChatTokenizer:
    """The demo target's tokenizer under another template and changed config.json keys."""
    for name in FILES:
        shutil.copy(TARGET / name, folder / name)
    (folder / "chat_template.jinja").write_text(template)
    settings = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(settings))
    return ChatTokenizer.load(folder)


def supervised_text(chat: ChatTokenizer, messages) -> str:
    rendering = chat.render_answers(messages)
    encoding = chat.encode([rendering.text])[0]
    mask = chat.loss_mask(encoding, rendering.spans)
    chat.check_mask(encoding, mask, rendering, "here")
    return chat.decode([i for i, inside in zip(encoding.ids, mask, strict=True) if inside])


def test_supervised_tokens_decode_to_the_answers_and_their_end_of_turn(chat):
    answers = [message["content"] for message in TALK if message["role"] == "assistant"]
    assert supervised_text(chat, TALK) == "".join(answer + "<|im_end|>" for answer in answers)


def test_what_precedes_an_answer_is_the_prompt_the_target_would_get(chat):
    rendering = chat.render_answers(TALK)
    encoding = chat.encode([rendering.text])[0]
    mask = chat.loss_mask(encoding, rendering.spans)
    first_of_last = np.flatnonzero(np.diff(mask.astype(int)) == 1)[-1] + 1
    assert encoding.ids[:first_of_last] == chat.encode_prompt(TALK[:-1])


def test_generation_tags_change_nothing(chat, tmp_path):
    tagged = TURN.replace("m['content'] + '<|im_end|>\n' }}", "")
    tagged = tagged.rstrip(" +") + " }}{%- generation -%}{{ m['content'] + '<|im_end|>' }}"
    tagged += "{%- endgeneration -%}{{ '\n' }}"
    same = with_template(tmp_path, "{% for m in messages %}" + tagged + "{% endfor %}" + PROMPT)
    assert same.render(TALK) == chat.render(TALK)
    assert supervised_text(same, TALK) == supervised_text(chat, TALK)


def test_a_thinking_template_supervises_what_follows_its_prompt(tmp_path):
    last = "('<think></think>' if loop.last and m['role'] == 'assistant' else '')"
    turn = TURN.replace("m['content']", last + " + m['content']")
    chat = with_template(tmp_path, "{% for m in messages %}" + turn + "{% endfor %}" + PROMPT)
    assert supervised_text(chat, TALK[1:3]).startswith("<think></think>Walk")
    with pytest.raises(RowError, match=module.REWRITES_HISTORY):
        chat.render_answers(TALK)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m['role'] }}{% endfor %}", module.CHANGES_ANSWER),
        ("{% for m in messages %}{{ m['content'] }} {% endfor %}", module.NO_END_OF_TURN),
        ("{{ raise_exception('no system role') }}", module.TEMPLATE_REFUSES),
    ],
)
def test_templates_that_cannot_be_masked_are_refused(tmp_path, template, reason):
    with pytest.raises(RowError, match=reason):
        with_template(tmp_path, template).render_answers(TALK)


def test_a_token_across_the_edge_is_refused(chat, tmp_path):
    indented = [TALK[1], {"role": "assistant", "content": "  indented"}]  # newline and blanks merge
    with pytest.raises(RowError, match=module.STRADDLES):
        supervised_text(chat, indented)
    # " Walk" is one token, whose offsets leave out the blank that the prompt ends with.
    joined = (
        "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + '<|im_end|>' }}{% endfor %}"
    )
    prompt = "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
    trimming = with_template(tmp_path, joined + prompt)
    trimming.tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    with pytest.raises(RowError, match=module.STRADDLES):
        supervised_text(trimming, TALK[1:3])


def test_an_end_of_turn_inside_an_answer_is_refused(chat):
    with pytest.raises(RowError, match=module.END_INSIDE):
        supervised_text(chat, [TALK[1], {"role": "assistant", "content": "a<|im_end|>b"}])


def test_wrong_offsets_are_noticed(chat):
    rendering = chat.render_answers(TALK)
    encoding = chat.encode([rendering.text])[0]
    mask = chat.loss_mask(encoding, rendering.spans)
    with pytest.raises(InputError, match="here: the supervised tokens decode"):
        chat.check_mask(encoding, np.roll(mask, 1), rendering, "here")


def test_unfit_targets_are_refused(tmp_path):
    with pytest.raises(InputError, match="its tokenizer has"):
        with_template(tmp_path, PROMPT, vocab_size=2000)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="no chat template"):
        ChatTokenizer.load(tmp_path)


def test_equal_to_transformers(chat):
    slow = module._from_transformers(str(TARGET), None)
    for add_generation_prompt in (False, True):
        assert slow.render(TALK, add_generation_prompt) == chat.render(TALK, add_generation_prompt)
    text = chat.render(TALK)
    assert slow.encode([text])[0].ids == chat.encode([text])[0].ids
    assert (slow.end_ids, slow.pad_id, slow.vocab_size) == ((2,), 0, 2112)
    assert (chat.end_ids, chat.pad_id, chat.vocab_size) == ((2,), 0, 2112)
