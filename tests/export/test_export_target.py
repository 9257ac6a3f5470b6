"""Which target an export names, and what it is held to: nothing is fetched, little taken on trust.

The hub's cache is laid out as huggingface_hub does it: refs/main and snapshots/COMMIT.
"""

import json
import shutil
from pathlib import Path

import pytest
from exported import card_of, change_state, config_of
from safetensors.torch import load_file, save_file

from dflashdist.config import InputError
from dflashdist.export.folder import export_drafter
from dflashdist.export.origin import is_hub_name

HUB = "owner/name"


@pytest.fixture
def cache(tmp_path, tiny_target, monkeypatch):
    """Put a target into the hub's cache; returns its snapshot's folder."""

    def put(*without: str, name: str = HUB) -> Path:
        place = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = place / "snapshots/abc"
        shutil.copytree(tiny_target, snapshot, ignore=shutil.ignore_patterns(*without))
        (place / "refs").mkdir()
        (place / "refs/main").write_text("abc")
        return snapshot

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return put


def test_a_target_in_the_cache_is_held_to_the_drafter(checkpoint, tmp_path, cache, caplog):
    snapshot = cache()
    out = export_drafter(checkpoint, tmp_path / "out", target=HUB)
    assert "not checked" not in caplog.text and "base_model: owner/name" in card_of(out)
    assert str(tmp_path) not in card_of(out) + json.dumps(config_of(out))
    assert "stop = [2]" in card_of(out)
    tensors = load_file(snapshot / "model.safetensors")
    tensors["model.embed_tokens.weight"] += 1
    save_file(tensors, snapshot / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="owner/name: another target"):
        export_drafter(checkpoint, tmp_path / "bad", target=HUB)


def test_sizes_are_held_where_the_weights_are_not_cached(checkpoint, tmp_path, cache, caplog):
    snapshot = cache("*.safetensors", "generation_config.json")
    out = export_drafter(checkpoint, tmp_path / "out", target=HUB)
    assert "not checked: the hub's cache has no weights of owner/name" in caplog.text
    assert "target.generation_config.eos_token_id" in card_of(out)  # found when it is run
    config = config_of(snapshot) | {"vocab_size": 99}
    (snapshot / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="owner/name: vocab_size is 99"):
        export_drafter(checkpoint, tmp_path / "bad", target=HUB)


def test_one_line_says_what_is_not_checked(checkpoint, tmp_path, cache, caplog):
    cache(name="owner/another")
    export_drafter(checkpoint, tmp_path / "out", target=HUB)
    assert [record.message for record in caplog.records] == [
        "not checked: owner/name is not in the hub's cache"
    ]


def test_a_revision_that_is_not_cached_is_not_checked(checkpoint, tmp_path, cache, caplog):
    cache()
    export_drafter(checkpoint, tmp_path / "out", target=HUB, revision="v2")
    assert "not checked: owner/name" in caplog.text


def test_a_local_folder_is_warned_of(checkpoint, tiny_target, tmp_path, monkeypatch, caplog):
    """Also one under the home folder, which shells would not expand inside quotes."""
    export_drafter(checkpoint, tmp_path / "out")
    assert f"names a local folder, {tiny_target}; give --target OWNER/NAME" in caplog.text
    monkeypatch.setenv("HOME", str(Path(tiny_target).parent))
    home = f"~/{Path(tiny_target).name}"
    card = card_of(export_drafter(checkpoint, tmp_path / "home", target=home))
    assert f"vllm serve {tiny_target} " in card and "~" not in card
    assert "base_model" not in card


@pytest.mark.parametrize(
    "name", ["nowhere", "./owner/name", "models/a/b", "/no/where", "~/no/where"]
)
def test_what_is_no_folder_and_no_name_is_refused(checkpoint, tmp_path, name):
    with pytest.raises(InputError, match="no such folder, and no name on the hub"):
        export_drafter(checkpoint, tmp_path / "out", target=name)
    source = tmp_path / "source"  # and where training recorded it
    shutil.copytree(checkpoint, source)
    change_state(source, config=f"target: {{path: {name}}}")
    with pytest.raises(InputError, match="no such folder, and no name on the hub"):
        export_drafter(source, tmp_path / "out")


def test_a_recorded_name_may_have_been_a_folder(checkpoint, tiny_target, tmp_path, monkeypatch,
                                                caplog):  # fmt: skip
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    change_state(source, config="target: {path: models/tiny}")
    monkeypatch.chdir(tmp_path)
    export_drafter(source, tmp_path / "out")
    assert "if training read a local folder of that name, give --target" in caplog.text
    caplog.clear()
    shutil.copytree(tiny_target, tmp_path / "models/tiny")
    card = card_of(export_drafter(source, tmp_path / "local"))
    assert "names a local folder" in caplog.text and "base_model" not in card
    caplog.clear()  # said now, it is the name on the hub, held to the folder that is here
    card = card_of(export_drafter(source, tmp_path / "hub", target="models/tiny"))
    assert not caplog.records and "base_model: models/tiny" in card


def test_names_of_the_hub():
    assert all(map(is_hub_name, ("Qwen/Qwen3-8B", "z-lab/a.b_c")))
    assert not any(
        map(is_hub_name, ("Qwen", "a/b/c", "./a", "../a", "~/a", "/a", "a b/c", "a/b: c"))
    )
