"""A target's chat format: how it is loaded, what its rows are, and the check by decoding."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from demo_files import TARGET
from test_families import CHATML, DEEPSEEK, LLAMA, LLAMA_2, LLAMA_2_FIRST, MISTRAL_1
from tiny_targets import shipped, write_target
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from dflashdist.config import InputError
from dflashdist.data import chat as module
from dflashdist.data import tokenizer as files
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.conversations import Conversation, PlainText, RowError, TokenRow
from dflashdist.data.messages import NOT_UNICODE

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What does naïve.walk do?"},
    {"role": "assistant", "content": "Walk the “tree”.\n\n    x = 1"},
    {"role": "user", "content": "And its signature?"},
    {"role": "assistant", "content": "```python\ndef walk(top):\n```"},
]


@pytest.fixture(scope="module")
def chat():
    return ChatTokenizer.load(TARGET)


@pytest.fixture
def qwen(tmp_path) -> Path:
    return write_target(tmp_path / "qwen", CHATML, shipped("qwen3"))


def test_supervised_tokens_decode_to_the_answers_and_their_end_of_turn(chat):
    (row,) = chat.training_rows(Conversation("here", TALK)).rows
    supervised = chat.decode([i for i, on in zip(row.ids, row.loss_mask, strict=True) if on])
    assert supervised == "".join(TALK[i]["content"] + "<|im_end|>" for i in (2, 4))
    assert (row.ids.dtype, row.loss_mask.dtype) == (np.int32, np.uint8)
    chat.check(row, Conversation("here", TALK))


def test_what_precedes_an_answer_is_the_prompt_the_target_would_get(chat):
    (row,) = chat.training_rows(Conversation("here", TALK)).rows
    first_of_last = np.flatnonzero(np.diff(row.loss_mask.astype(int)) == 1)[-1] + 1
    assert row.ids[:first_of_last].tolist() == chat.encode_prompt(TALK[:-1])


@pytest.mark.parametrize("shift", [1, -1])
def test_a_shifted_mask_is_noticed(chat, shift):
    (row,) = chat.training_rows(Conversation("here", TALK)).rows
    shifted = replace(row, loss_mask=np.roll(row.loss_mask, shift))
    with pytest.raises(InputError, match=r"here: (the supervised tokens decode to|3 supervised)"):
        chat.check(shifted, Conversation("here", TALK))
    with pytest.raises(InputError, match="here: 1 supervised runs for 2 answers"):
        chat.check(replace(row, loss_mask=np.ones_like(row.loss_mask)), Conversation("here", TALK))


def test_a_mask_off_by_a_blank_is_noticed(chat):
    (row,) = chat.training_rows(Conversation("here", TALK[:3])).rows
    longer = row.loss_mask.copy()
    longer[np.flatnonzero(longer)[0] - 1] = 1  # the newline that ends the generation prompt
    with pytest.raises(InputError, match=r"here: the supervised tokens decode to '\\nWalk"):
        chat.check(replace(row, loss_mask=longer), Conversation("here", TALK[:3]))


@pytest.mark.parametrize("style", [LLAMA_2_FIRST, MISTRAL_1])
def test_blanks_before_the_first_word_are_no_fault(tmp_path, style):
    chat = ChatTokenizer.load(write_target(tmp_path, style, LLAMA_2))
    (row,) = chat.training_rows(Conversation("here", TALK[1:])).rows
    chat.check(row, Conversation("here", TALK[1:]))
    assert row.ids.tolist() == chat.encode([chat.render(TALK[1:])])[0].ids
    with pytest.raises(InputError, match="the supervised tokens decode to"):
        chat.check(
            replace(row, loss_mask=np.roll(row.loss_mask, -1)), Conversation("here", TALK[1:])
        )


def test_plain_text_is_supervised_but_for_what_the_tokenizer_adds(tmp_path):
    folder = write_target(tmp_path, LLAMA, shipped("llama3"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = TemplateProcessing(
        "<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    chat = ChatTokenizer.load(folder)
    for text in ("  walk the tree", "<|begin_of_text|>  walk the tree"):
        made = chat.training_rows(PlainText("here", text))
        assert made.answers == 0
        assert made.rows[0].ids.tolist()[:1] == [bos] != made.rows[0].ids.tolist()[1:2]
        assert made.rows[0].loss_mask.tolist() == [0] + [1] * (len(made.rows[0].ids) - 1)
        chat.check(made.rows[0], PlainText("here", text))
    (row,) = chat.training_rows(Conversation("here", TALK)).rows
    assert row.ids.tolist().count(bos) == 1


def test_token_rows_are_taken_as_they_are(chat):
    (row,) = chat.training_rows(TokenRow("here", [5, 6, 7], [0, 1, 1])).rows
    assert (row.ids.tolist(), row.loss_mask.tolist(), row.answers) == ([5, 6, 7], [0, 1, 1], ())
    chat.check(row, TokenRow("here", [5, 6, 7], [0, 1, 1]))
    for bad in (chat.length, -1):
        with pytest.raises(RowError, match=module.UNKNOWN_IDS):
            chat.training_rows(TokenRow("here", [5, bad], [1, 1]))


def test_half_a_surrogate_pair_is_refused(chat):
    for row in (
        PlainText("here", "a\ud83d"),
        Conversation("here", [TALK[1], TALK[2] | {"content": "\ud83d"}]),
    ):
        with pytest.raises(RowError, match=NOT_UNICODE):
            chat.training_rows(row)


def test_fingerprints_tell_apart_what_decides_the_rows(qwen, tmp_path):
    base = ChatTokenizer.load(qwen)
    assert base.rendering == {
        "template": "own", "template_sha256": base.rendering["template_sha256"],
        "settings": {}, "date": None,
    }  # fmt: skip
    assert ChatTokenizer.load(qwen, date="2020-01-01").fingerprint == base.fingerprint
    calm = ChatTokenizer.load(qwen, settings={"enable_thinking": False})
    file = tmp_path / "other.jinja"
    file.write_text(shipped("qwen3"))
    same = ChatTokenizer.load(qwen, template=str(file))
    assert same.rendering["template"] == "other.jinja" and same.fingerprint == base.fingerprint
    file.write_text(shipped("llama3_2"))
    dated = [ChatTokenizer.load(qwen, template=str(file), date=f"2020-01-0{i}") for i in (1, 2)]
    assert dated[0].rendering["date"] == "2020-01-01"
    config = json.loads((qwen / "generation_config.json").read_text())
    (qwen / "generation_config.json").write_text(
        json.dumps({"eos_token_id": config["eos_token_id"][1]})
    )
    (qwen / "config.json").write_text(
        json.dumps(json.loads((qwen / "config.json").read_text()) | {"eos_token_id": 0})
    )
    other_end = ChatTokenizer.load(qwen)
    made = [base, calm, *dated, ChatTokenizer.load(TARGET)]
    assert len({chat.fingerprint for chat in made}) == 5
    assert len({chat.tokenizer_fingerprint for chat in made}) == 2
    assert other_end.end_ids == base.end_ids  # the same ends, named elsewhere
    assert other_end.fingerprint == base.fingerprint


def test_a_template_of_another_tokenizer_warns(tmp_path):
    folder = write_target(tmp_path / "a", DEEPSEEK, shipped("qwen2_5"))
    (warning,) = ChatTokenizer.load(folder).warnings()
    assert "<|im_end|>, <|im_start|>" in warning and "another tokenizer" in warning
    (warning,) = ChatTokenizer.load(folder, template=str(written(tmp_path, LLAMA_2))).warnings()
    assert "[/INST], [INST]" in warning
    assert ChatTokenizer.load(write_target(tmp_path / "b", LLAMA_2_FIRST, LLAMA_2)).warnings() == []
    plain = write_target(tmp_path / "c", CHATML, shipped("qwen3"))
    (warning,) = ChatTokenizer.load(plain, settings={"thinking": True}).warnings()
    assert "data.template_settings.thinking" in warning
    assert ChatTokenizer.load(plain, settings={"enable_thinking": True}).warnings() == []


def written(folder: Path, text: str) -> Path:
    (folder / "given.jinja").write_text(text)
    return folder / "given.jinja"


def test_unfit_targets_and_arguments_are_refused(qwen, tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        ChatTokenizer.load(qwen, template=str(tmp_path / "none.jinja"))
    with pytest.raises(InputError, match=r"given.jinja \(default\): line 1"):
        ChatTokenizer.load(qwen, template=str(written(tmp_path, "{% if %}")))
    with pytest.raises(InputError, match="values must be plain JSON"):
        ChatTokenizer.load(qwen, settings={"x": object()})
    (qwen / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match=r"no chat template; add chat_template\.jinja"):
        ChatTokenizer.load(qwen)
    assert ChatTokenizer.load(qwen, template=str(written(tmp_path, "{{ messages }}")))
    small = write_target(tmp_path / "small", CHATML, "", vocab_size=100)
    with pytest.raises(InputError, match="its tokenizer has"):
        ChatTokenizer.load(small)


def test_named_templates_of_a_folder_and_of_a_list(qwen):
    (qwen / "additional_chat_templates").mkdir()
    (qwen / "additional_chat_templates/tool_use.jinja").write_text("{{ tools | length }} tools")
    chat = ChatTokenizer.load(qwen)
    assert chat.render(TALK, [{}, {}]) == "2 tools" != chat.render(TALK)
    alone = chat.rendering["template_sha256"]
    shutil.rmtree(qwen / "additional_chat_templates")
    assert ChatTokenizer.load(qwen).rendering["template_sha256"] != alone
    settings = json.loads((qwen / "tokenizer_config.json").read_text())
    named = {"default": (qwen / "chat_template.jinja").read_text(), "tool_use": "{{ 7 }}"}
    listed = [{"name": name, "template": text} for name, text in named.items()]
    (qwen / "chat_template.jinja").unlink()
    (qwen / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": listed}))
    assert ChatTokenizer.load(qwen).render(TALK, [{}]) == "7"


def test_equal_to_what_transformers_loads(chat, qwen):
    for folder in (TARGET, qwen):
        here = files.TargetTokenizer.read(folder)
        theirs = files._from_transformers(str(folder), None)
        assert (theirs.end_ids, theirs.pad_id, theirs.vocab_size, theirs.templates) == (
            here.end_ids, here.pad_id, here.vocab_size, here.templates
        )  # fmt: skip
        assert {k: here.specials[k] for k in theirs.specials} == theirs.specials
        assert theirs.fingerprint == here.fingerprint
        text = chat.render(TALK)
        ids = [t.tokenizer.encode(text, add_special_tokens=False).ids for t in (here, theirs)]
        assert ids[0] == ids[1]


def test_a_folder_is_read_without_transformers_or_torch():
    code = (
        "import sys; from dflashdist.data.chat import ChatTokenizer; "
        f"ChatTokenizer.load({str(TARGET)!r}); "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
