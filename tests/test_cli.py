"""The command line: help with examples, one-line errors, exit codes, JSON."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from dflashdist.cli import main


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "dflashdist", *arguments], capture_output=True, text=True,
        timeout=120, env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip


@pytest.mark.parametrize("command", ["prepare", "plan", "train", "evaluate", "export"])
def test_help_has_an_example(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert "example" in (out := capsys.readouterr().out) and f"dflashdist {command}" in out


def refused(capsys, *arguments: str) -> str:
    """The one line of a refusal."""
    assert main(list(arguments)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith(f"dflashdist {arguments[0]}: ")
    return error


@pytest.fixture
def lengths(tmp_path) -> str:
    np.save(tmp_path / "lengths.npy", np.random.default_rng(0).integers(20, 500, 300))
    (tmp_path / "empty.yaml").touch()
    return str(tmp_path / "lengths.npy")


def test_plan_json(lengths, tmp_path, capsys):
    arguments = ["plan", str(tmp_path / "empty.yaml"), f"data.lengths={lengths}",
                 "roles.num_drafters=2", "schedule.max_tokens=2048", "train.epochs=1"]  # fmt: skip
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {
        "num_rows", "num_buckets", "bucket_edges", "micro_batches_per_epoch", "rows_per_bucket",
        "steps", "padding_efficiency", "max_share_deviation", "share_deviation_bound",
        "step_imbalance", "wasted_fraction", "max_gap", "queue_bytes", "max_message_bytes",
        "fingerprint", "step_mix", "step_mix_vs_shuffle", "anchor_efficiency", "evaluation",
        "num_ranks", "notes",
    } <= report.keys()  # fmt: skip
    assert report["num_rows"] == 300 and sum(report["rows_per_bucket"]) == 300
    assert report["max_share_deviation"] <= report["share_deviation_bound"]
    assert main(arguments) == 0
    assert report["fingerprint"] in capsys.readouterr().out


def test_plan_knows_the_message_size(lengths, tmp_path, capsys, tiny_target):
    arguments = ["plan", str(tmp_path / "empty.yaml"), f"data.lengths={lengths}",
                 f"target.path={tiny_target}", "train.epochs=1"]  # fmt: skip
    assert main([*arguments, "drafter.target_layer_ids=[1,3]", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["max_message_bytes"] > 2 * 2 * 32 * 500
    error = refused(capsys, *arguments, "drafter.target_layer_ids=[1,6]")
    assert "6 is no layer" in error and "0 to 5" in error


def test_a_plan_is_that_of_the_run(tmp_path, capsys, tiny_overrides):
    """The fingerprint too, which holds the store's."""
    from dflashdist.config import load_config
    from dflashdist.train.job import TrainingJob

    (tmp_path / "empty.yaml").touch()
    assert main(["plan", str(tmp_path / "empty.yaml"), *tiny_overrides, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    run = TrainingJob(load_config(None, tiny_overrides), 1)
    assert report["fingerprint"] == run.plan.fingerprint


def test_refusals(capsys, tmp_path, lengths):
    empty = str(tmp_path / "empty.yaml")
    assert "data.store is not set" in refused(capsys, "plan", empty)
    assert "no such configuration" in refused(capsys, "plan", str(tmp_path / "none.yaml"))
    assert "no token store" in refused(capsys, "plan", empty, f"data.store={tmp_path / 'nope'}")
    assert "nearest known key" in refused(capsys, "plan", empty, "seeed=1")
    assert "max_tokens=64" in refused(
        capsys, "plan", empty, f"data.lengths={lengths}", "schedule.max_tokens=64"
    )
    assert "no drafter here" in refused(capsys, "evaluate", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert "target.path" in refused(capsys, "evaluate", str(tmp_path))
    sources = ["prepare", "seed=1", "--target", "t", "--out", "o"]
    assert "no source" in refused(capsys, *sources)


def test_train_refuses_before_anything_is_loaded(tmp_path, lengths):
    """As one process of many would be started: only rank 0 speaks, all exit with 2."""
    result = run("train", str(tmp_path / "empty.yaml"))
    assert result.returncode == 2
    assert result.stderr.strip().startswith("dflashdist train: data.store is not set")
    assert "transformers" not in result.stderr


@pytest.mark.parametrize(
    ("item", "key", "value"),
    [
        ("gates_stop=true", "gates_stop", True),
        ("seed=7", "seed", 7),
        ("optim.lr=1e-3", "optim.lr", 1e-3),
        ("gates=[{metric: loss, below: 3.0, step: 5}]", "gates", None),
    ],
)
def test_overrides_are_told_from_sources(item, key, value):
    """Every known key, whether it has a dot or not."""
    from dflashdist.commands import sort_out
    from dflashdist.config import value_of

    config, others = sort_out(["checkpoints/lr=1e-3", item, "conf/demo.yaml"], [])
    assert others == ["checkpoints/lr=1e-3"]
    assert value_of(config, key) == value or config.gates[0].below == 3.0


def test_every_known_key_is_an_override():
    from dflashdist.commands import OVERRIDE
    from dflashdist.config import known_keys

    assert all(OVERRIDE.match(f"{key}=1") for key in known_keys())
    assert not OVERRIDE.match("runs/seed=1") and not OVERRIDE.match("my_seed=1")


@pytest.fixture
def drafter(tmp_path, tiny_target):
    """An untrained one, as another trainer would publish it."""
    from dflashdist.config import DrafterConfig
    from dflashdist.model.drafter import Drafter
    from dflashdist.model.drafter_folder import save_drafter
    from dflashdist.model.shape import DrafterShape
    from dflashdist.model.target_files import read_target_config

    settings = DrafterConfig(num_layers=1, block_size=4, target_layer_ids=[1])
    drafter = Drafter(DrafterShape.from_target(read_target_config(tiny_target), 200, settings))
    drafter.reset_parameters("fan_in", seed=0)
    save_drafter(tmp_path / "drafter", drafter)
    return str(tmp_path / "drafter")


def test_export(drafter, tiny_target, tmp_path, capsys):
    """From evaluate's report to a folder; and the ways in which it is refused."""
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "w5"}]})
    )
    asked = [f"target.path={tiny_target}", f"evaluate.prompts={tmp_path / 'rows.jsonl'}"]
    asked += ["evaluate.max_new_tokens=3", "train.device=cpu", "gates_stop=true"]
    assert main(["evaluate", drafter, *asked, "--json"]) == 0
    report = tmp_path / "report.json"
    report.write_text(capsys.readouterr().out)
    out = str(tmp_path / "out")
    arguments = ["export", drafter, out, "--target", tiny_target, "--report", str(report)]
    assert main([*arguments, "--dtype", "float16"]) == 0
    assert capsys.readouterr().out == f"{out}: README.md, config.json, model.safetensors\n"
    card = (tmp_path / "out/README.md").read_text()
    assert "| acceptance length, pooled |" in card and f"vllm serve {tiny_target}" in card
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "float16"
    assert "--overwrite" in refused(capsys, *arguments)
    assert main([*arguments, "--overwrite", "--format", "speculators"]) == 0
    capsys.readouterr()
    assert "speculators layout" in refused(capsys, "export", out, f"{out}2")
    assert "which target" in refused(capsys, "export", drafter, f"{out}2")
    assert "takes no overrides" in refused(capsys, "export", drafter, f"{out}2", "seed=1")
    with pytest.raises(SystemExit) as end:
        main(["export", drafter, f"{out}2", "--dtype", "int8"])
    assert end.value.code == 2 and "invalid choice: 'int8'" in capsys.readouterr().err
    assert not (tmp_path / "out2").exists()


def test_export_warns_in_one_line(drafter, tmp_path):
    result = run("export", drafter, str(tmp_path / "out"), "--target", "owner/name")
    assert result.returncode == 0
    assert result.stderr == "not checked: owner/name is not in the hub's cache\n"
