"""A chat template that is not the target's own: the folder has it, and everything renders by it."""

import hashlib
import shutil

import pytest
from exported import RENDERING, card_of, change_state, config_of, python_of

from dflashdist.config import DataConfig, InputError
from dflashdist.eval.prompts import chat_of
from dflashdist.export.folder import export_drafter

TEXT = (
    "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ strftime_now('w%d') }} {{ greeting }} w7{% endif %}"
)
SHA256 = hashlib.sha256(TEXT.encode()).hexdigest()
OPTION = "--chat-template ./out/chat_template.jinja"


@pytest.fixture
def source(checkpoint, tmp_path, tiny_target):
    """A checkpoint that was trained with a template's file, on a day."""
    folder, file = tmp_path / "source", tmp_path / "own.jinja"
    file.write_text(TEXT)
    shutil.copytree(checkpoint, folder)
    change_state(
        folder,
        config=f"data: {{template: {file}}}\ntarget: {{path: {tiny_target}}}",
        rendering={
            "template": "own.jinja",
            "template_sha256": SHA256,
            "settings": {"greeting": "w9"},
            "date": "2026-08-03",
        },
    )
    return folder


@pytest.mark.parametrize("layout", ["hf", "speculators"])
def test_the_folder_has_it_and_the_commands_give_it(source, tmp_path, layout, caplog):
    out = export_drafter(source, tmp_path / "out", format=layout)
    assert (out / "chat_template.jinja").read_text() == TEXT
    card = card_of(out)
    assert card.count(OPTION) == (2 if layout == "hf" else 1)
    assert (
        "That template is `chat_template.jinja` here" in card and "not at hand" not in caplog.text
    )
    export_drafter(source, out, overwrite=True)  # it is one of the files that an export writes


def test_the_python_of_the_card_renders_as_training_did(source, tiny_target, tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    out = export_drafter(source, tmp_path / "out")
    code = python_of(out)
    monkeypatch.chdir(tmp_path)
    before = code[: code.index("import torch")]
    rendering = code[code.index("prompt = ") : code.index("ids = ")]
    found = {"tokenizer": AutoTokenizer.from_pretrained(tiny_target)}
    exec(before + rendering, found)
    assert found["text"] == "<|im_start|>Hello<|im_end|>w03 w9 w7"


def test_the_python_of_the_card_writes_the_day_of_training(
    source, tiny_target, tmp_path, monkeypatch
):
    """Also into the target's own template."""
    from transformers import AutoTokenizer

    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    (target / "chat_template.jinja").write_text(TEXT)
    digest = {"template_sha256": SHA256, "date": "2026-08-04"}
    change_state(source, rendering=RENDERING | digest)
    out = export_drafter(source, tmp_path / "out", target=str(target))
    assert not (out / "chat_template.jinja").exists() and OPTION not in card_of(out)
    code = python_of(out)
    found = {"tokenizer": AutoTokenizer.from_pretrained(target)}
    rendering = code[code.index("prompt = ") : code.index("ids = ")]
    exec(code[: code.index("import torch")] + rendering, found)
    assert found["text"] == "<|im_start|>Hello<|im_end|>w04  w7"


@pytest.mark.parametrize("fault", ["gone", "changed"])
def test_where_it_is_not_at_hand_the_card_says_so(source, tmp_path, fault, caplog):
    file = tmp_path / "own.jinja"
    file.unlink() if fault == "gone" else file.write_text(TEXT + "more")
    out = export_drafter(source, tmp_path / "out")
    assert not (out / "chat_template.jinja").exists() and "is not at hand" in caplog.text
    card = card_of(out)
    assert card.count(OPTION) == 2 and "not in this folder: add the file as" in card


def test_an_export_of_an_export_has_it_too(source, tmp_path):
    out = export_drafter(source, tmp_path / "out")
    (tmp_path / "own.jinja").unlink()
    again = export_drafter(out, tmp_path / "again")
    assert (again / "chat_template.jinja").read_text() == TEXT
    assert config_of(again)["dflashdist"] == config_of(out)["dflashdist"]


def test_an_export_is_evaluated_as_it_was_trained(source, checkpoint, tiny_target, tmp_path):
    """By its template, settings and date. A checkpoint by the file that training read; where that
    is gone or another, by name of the file."""
    out = export_drafter(source, tmp_path / "out")
    asked = [{"role": "user", "content": "w5"}]

    def text(*folders, **data):
        chat = chat_of(folders, tiny_target, None, DataConfig(**data))
        return chat.render(asked, add_generation_prompt=True)

    assert text(out) == "<|im_start|>w5<|im_end|>w03 w9 w7"
    assert text(out, date="2026-01-31", template_settings={"greeting": "w8"}).endswith("w31 w8 w7")
    assert text(source) == text(out)
    own = tmp_path / "own.jinja"
    elsewhere = own.rename(tmp_path / "elsewhere.jinja")
    for _ in range(2):
        with pytest.raises(InputError, match=r"own\.jinja; name its file by data.template"):
            text(source)
        own.write_text("another")
    assert text(source, template=str(elsewhere)) == text(out)
    (out / "chat_template.jinja").write_text("another")
    with pytest.raises(InputError, match=r"own\.jinja; name its file by data.template"):
        text(out)
    plain = export_drafter(checkpoint, tmp_path / "plain")
    assert (
        chat_of([plain], tiny_target, None, DataConfig()).rendering["settings"]
        == (RENDERING["settings"])
    )


def test_renderings_that_differ_are_not_mixed(source, checkpoint, tiny_target, tmp_path):
    out = export_drafter(source, tmp_path / "out")

    def chat(*folders, **data):
        return chat_of(folders, tiny_target, None, DataConfig(**data))

    for folders in ((checkpoint, out), (out, checkpoint / "ema")):
        with pytest.raises(InputError, match="template_sha256, template_settings") as error:
            chat(*folders)
        assert all(str(folder) in str(error.value) for folder in folders)
    bare = tmp_path / "bare"  # records nothing, and is asked as the others are
    shutil.copytree(checkpoint, bare, ignore=shutil.ignore_patterns("trainer", "ema"))
    assert chat(bare, out).rendering == chat(out, bare, out).rendering
    assert chat(bare).rendering["settings"] == {}
    named = {"template": str(tmp_path / "own.jinja"), "template_settings": {"greeting": "w1"},
             "date": "2026-02-02"}  # fmt: skip
    assert chat(checkpoint, out, **named).rendering["settings"] == {"greeting": "w1"}
