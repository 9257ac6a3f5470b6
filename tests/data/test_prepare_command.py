"""What the commands `prepare` and `regenerate` say of a target before any work is done."""

import json
import shutil

import pytest
from test_prepare import FILES, TARGET, talk, write

from dflashdist.cli import main
from dflashdist.data.shards import TokenStore


@pytest.fixture
def rows(tmp_path):
    return write(tmp_path / "rows.jsonl", [talk("What?", "A thing.")])


def target_with(folder, **config):
    shutil.copytree(TARGET, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


UNFIT = {
    "hybrid": ({"layer_types": ["linear_attention", "full_attention"]}, "is a hybrid"),
    "wrapped": ({"text_config": {"hidden_size": 8}}, "is multimodal"),
    "encoder": ({"is_encoder_decoder": True}, "has an encoder"),
    "sizeless": ({"hidden_size": None}, "has no hidden_size"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_target_that_training_refuses_is_refused_at_once(tmp_path, rows, capsys, kind):
    config, reason = UNFIT[kind]
    target = target_with(tmp_path / "target", **config)
    out, answers = tmp_path / "store", tmp_path / "answers.jsonl"
    for command in (
        ["prepare", str(rows), "--target", str(target), "--out", str(out)],
        ["prepare", str(rows), f"target.path={target}", f"data.store={out}"],
        ["regenerate", str(rows), "--out", str(answers), "--local", "--target", str(target)],
        ["regenerate", str(rows), "--out", str(answers), "--base-url", "http://localhost:9/v1",
         "--model", "it", f"target.path={target}"],
    ):  # fmt: skip
        assert main(command) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"dflashdist {command[0]}: {target}: ") and reason in said
        assert said.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "target"]


def test_a_tokenizer_alone_is_enough_and_the_target_is_said_to_be_unchecked(tmp_path, rows, capsys):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in (*FILES, "chat_template.jinja"):
        if name != "config.json":
            shutil.copy(TARGET / name, folder / name)
    stores = []
    for target in (folder, TARGET):
        out = tmp_path / f"of-{target.name}"
        assert main(["prepare", str(rows), "--target", str(target), "--out", str(out)]) == 0
        stores.append(TokenStore.open(out))
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"dflashdist: {folder} has no config.json: whether it can be trained for is not checked"
    ]
    alone, whole = stores
    assert alone.row(0)[0].tolist() == whole.row(0)[0].tolist()
    for name in ("tokenizer_fingerprint", "tokenizer_length"):  # what training holds it to
        assert alone.meta[name] == whole.meta[name]
