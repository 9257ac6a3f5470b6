"""What a folder says of itself: an export says what its checkpoint said; half a record is named."""

import json
import shutil

import pytest
from exported import card_of, change_state, config_of
from run_folder import assert_same_bits
from safetensors.torch import load_file, save_file

from dflashdist.config import DataConfig, InputError
from dflashdist.eval.prompts import chat_of
from dflashdist.export.folder import export_drafter


def test_an_export_of_an_export_is_the_same(checkpoint, tmp_path):
    one = export_drafter(checkpoint, tmp_path / "one", ema=True,
                         dtype="float32")  # fmt: skip
    two = export_drafter(one, tmp_path / "two", dtype="float32")
    assert config_of(two) == config_of(one) and config_of(two)["dflashdist"]["averaged"] is True
    assert card_of(two).replace("two", "one") == card_of(one)
    assert_same_bits(load_file(two / "model.safetensors"), load_file(one / "model.safetensors"))


def test_an_export_is_held_to_its_target(checkpoint, tiny_target, tmp_path):
    out = export_drafter(checkpoint, tmp_path / "out")
    other = tmp_path / "other"
    shutil.copytree(tiny_target, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.embed_tokens.weight"] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="another target"):
        export_drafter(out, tmp_path / "bad", target=str(other))
    named = export_drafter(out, tmp_path / "named", target="owner/name", revision="abc")
    again = config_of(export_drafter(named, tmp_path / "again"))["dflashdist"]["target"]
    assert (again["name"], again["revision"]) == ("owner/name", "abc")
    assert again["fingerprint"] == config_of(out)["dflashdist"]["target"]["fingerprint"] is not None


def test_an_export_in_the_other_layout_is_named(checkpoint, tmp_path):
    from dflashdist.model.drafter_folder import load_drafter

    out = export_drafter(checkpoint, tmp_path / "out", format="speculators")
    for read in (load_drafter, lambda folder: export_drafter(folder, tmp_path / "bad")):
        with pytest.raises(InputError, match=r"speculators layout.* again with --format hf"):
            read(out)


STATES = [
    ({"best": 500}, "best is 500"),
    ({"best": {"step": 1}}, "best is"),
    ({"config": "target: null"}, "target is null"),
    ({"config": "data: null"}, "data is null"),
    ({"config": "data: {template: 3}"}, "template is 3"),
    ({"config": "[1]"}, "config is"),
    ({"config": "a: ["}, "config cannot be read"),
    ({"config": "loss: 3"}, "loss is 3"),
    ({"target": 5}, "target is 5"),
    ({"rendering": [1]}, "rendering is"),
    ({"rendering": {"settings": 4}}, "settings is 4"),
    ({"rendering": {"template": 4}}, "template is 4"),
    ({"versions": "5"}, "versions is"),
]


@pytest.mark.parametrize(("changes", "fault"), STATES)
def test_half_a_state_is_one_line(checkpoint, tiny_target, tmp_path, changes, fault):
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    change_state(source, **changes)
    for read in (
        lambda: export_drafter(source, tmp_path / "out"),
        lambda: chat_of([source], tiny_target, None, DataConfig()),
    ):
        with pytest.raises(InputError, match=f"state.json: .*{fault}") as error:
            read()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["[", "[1]", "3"])
def test_no_state_is_one_line(checkpoint, tiny_target, tmp_path, text):
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    (source / "trainer/state.json").write_text(text)
    with pytest.raises(InputError, match=r"state\.json"):
        export_drafter(source, tmp_path / "out")
    with pytest.raises(InputError, match=r"state\.json"):
        chat_of([source / "ema"], tiny_target, None, DataConfig())


@pytest.mark.parametrize(
    ("own", "fault"),
    [(3, "dflashdist is 3"), ({"target": None}, "target is null"),
     ({"training": {"optim": 3}}, "optim is 3"), ({"rendering": "x"}, "rendering is")],
)  # fmt: skip
def test_half_a_record_of_an_export_is_one_line(checkpoint, tmp_path, own, fault):
    out = export_drafter(checkpoint, tmp_path / "out")
    (out / "config.json").write_text(json.dumps(config_of(out) | {"dflashdist": own}))
    with pytest.raises(InputError, match=f"config.json: .*{fault}"):
        export_drafter(out, tmp_path / "again", target="owner/name")
