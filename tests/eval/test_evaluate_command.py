"""`dflashdist evaluate` from the command line: what goes where, and refusals of one line."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from demo_files import DEMO, TARGET
from variants import variant_drafter

from dflashdist.cli import main
from dflashdist.config import DrafterConfig, InputError
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.shards import TokenStoreWriter
from dflashdist.eval.generate import load_model
from dflashdist.model.drafter_folder import save_drafter
from dflashdist.model.shape import DrafterShape
from dflashdist.model.target_files import read_target_config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random drafter of the demo's target that training measured far better."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints/step_00000750"
    settings = DrafterConfig(num_layers=1, block_size=4, target_layer_ids=[1], mask_token_id=2111)
    shape = DrafterShape.from_target(read_target_config(str(TARGET)), None, settings)
    save_drafter(folder, variant_drafter(shape, "dflash"))
    (folder / "trainer").mkdir()
    best = {"step": 750, "acceptance_length": 3.5}
    (folder / "trainer/state.json").write_text(json.dumps({"step": 750, "best": best}))
    return folder


@pytest.fixture
def arguments(checkpoint):
    prompts = DEMO / "heldout.jsonl.gz"
    return ["evaluate", str(checkpoint), f"target.path={TARGET}", f"evaluate.prompts={prompts}",
            "evaluate.max_prompts=2", "evaluate.max_new_tokens=6", "train.device=cpu"]  # fmt: skip


def refused(capsys, *arguments: str) -> str:
    """The one line of a refusal."""
    assert main(list(arguments)) == 2
    told = capsys.readouterr()
    assert not told.out
    assert told.err.count("\n") == 1 and told.err.startswith("dflashdist evaluate: ")
    return told.err


def warnings_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("WARNING: ")]


def test_json_is_alone_on_stdout_and_warnings_go_to_stderr(arguments, capsys, tmp_path):
    figure = tmp_path / "figure.png"
    assert main([*arguments, "--json", "--figure", str(figure), "target.dtype=bfloat16"]) == 0
    told = capsys.readouterr()
    report = json.loads(told.out)
    assert report["last_round"] == {"step": 750, "acceptance_length": 3.5}
    assert report["dtype"] == "bfloat16" and report["device"] == "cpu"
    (warning,) = warnings_in(told.err)
    assert "training measured 3.50 on its held-out rows (step 750)" in warning
    before = figure.stat().st_ino
    assert main([*arguments, "--figure", str(figure)]) == 0
    assert figure.stat().st_ino != before  # its own is replaced
    assert list(tmp_path.iterdir()) == [figure]
    told = capsys.readouterr()
    assert "training measured 3.50 on its held-out rows at step 750" in told.out
    assert "WARNING" not in told.out and warnings_in(told.err) == [warning]


def test_a_run_means_its_best_checkpoint_else_its_newest_and_its_own_settings(
    arguments, checkpoint, capsys, tmp_path
):
    run = tmp_path / "run"
    for step in (250, 500, 1000):
        shutil.copytree(checkpoint, run / f"checkpoints/step_{step:08d}")
    (run / "checkpoints/step_00001000/trainer/state.json").unlink()  # not complete
    (run / "config.yaml").write_text(
        f"target: {{path: {TARGET}}}\n"
        "evaluate: {prompts: builtin, max_prompts: 1, max_new_tokens: 4}"
    )
    assert main(["evaluate", str(run), "--json", "train.device=cpu"]) == 0
    told = capsys.readouterr()
    newest = run / "checkpoints/step_00000500"
    assert json.loads(told.out)["checkpoint"] == str(newest)
    assert json.loads(told.out)["max_new_tokens"] == 4
    assert f"{run}: takes {newest} (step_00000500)" in told.err
    assert f"with the settings in {run}/config.yaml" in told.err
    (run / "checkpoints/best").symlink_to("step_00000250")
    assert main([*arguments[:1], str(run), *arguments[2:], "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["checkpoint"] == str(run / "checkpoints/best")
    assert f"{run}: takes {run}/checkpoints/best (step_00000250)" in told.err
    arguments[1] = str(tmp_path)
    error = refused(capsys, *arguments)
    for words in (
        f"{tmp_path}: no drafter",
        "config.json",
        "checkpoints/best",
        "checkpoints/step_",
    ):
        assert words in error


def test_rows_that_training_may_have_seen(arguments, capsys, tmp_path):
    meta = {"tokenizer_fingerprint": ChatTokenizer.load(TARGET).tokenizer_fingerprint}
    with TokenStoreWriter(tmp_path / "store", meta) as writer:
        writer.add(np.array([5, 6, 7, 8]), np.array([0, 0, 1, 1]))
    assert main([*arguments, "--json", f"evaluate.prompts={tmp_path / 'store'}"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["num_prompts"] == 1
    assert "without a validation part: training may have seen" in warnings_in(told.err)[0]


def test_a_figure_that_cannot_be_written_is_refused_before_decoding(arguments, capsys, tmp_path):
    error = refused(capsys, *arguments, "--figure", str(tmp_path / "no/such/figure.png"))
    assert "cannot be written" in error and "make the folder" in error
    assert "it is a folder" in refused(capsys, *arguments, "--figure", str(tmp_path))
    other = tmp_path / "weights.safetensors"
    other.write_bytes(b"mine")
    assert "is there and no figure" in refused(capsys, *arguments, "--figure", str(other))
    assert other.read_bytes() == b"mine"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
def test_cuda_where_there_is_none(arguments, capsys):
    assert "torch sees no CUDA device" in refused(capsys, *arguments, "train.device=cuda")


def test_a_target_of_other_keys(arguments, capsys, tmp_path):
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TARGET / file, tmp_path / file)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 32}))
    error = refused(capsys, *arguments, f"target.path={tmp_path}")
    assert "config.json of type gpt2 has no hidden_size" in error


@pytest.mark.parametrize("text", ["[", "[]"])
def test_a_corrupt_state(arguments, capsys, checkpoint, tmp_path, text):
    shutil.copytree(checkpoint, tmp_path / "copy")
    (tmp_path / "copy/trainer/state.json").write_text(text)
    arguments[1] = str(tmp_path / "copy")
    assert "state.json: " in refused(capsys, *arguments)


def test_attention_of_the_target(arguments, capsys):
    error = refused(capsys, *arguments, "target.attention=flash_attention_2")
    assert "target.attention=flash_attention_2: evaluate decodes with sdpa or eager" in error
    assert main([*arguments, "target.attention=eager", "--json"]) == 0
    model = load_model(str(TARGET), "float32", "cpu", attention="eager")
    assert model.config._attn_implementation == "eager"


def test_code_of_a_target_runs_only_where_it_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])  # the cache's folder is added
    told = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM":
            "own.OwnModel"}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(told))
    (tmp_path / "own.py").write_text("raise ValueError('it ran')")
    with pytest.raises(InputError, match="contains custom code"):
        load_model(str(tmp_path), "float32", "cpu")
    with pytest.raises(InputError, match="it ran"):
        load_model(str(tmp_path), "float32", "cpu", trust_remote_code=True)
