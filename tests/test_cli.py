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


@pytest.mark.parametrize("command", ["prepare", "plan", "train", "evaluate"])
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
                 "roles.num_drafters=2", "schedule.max_tokens=2048"]  # fmt: skip
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {
        "num_rows", "num_buckets", "bucket_edges", "micro_batches_per_epoch", "rows_per_bucket",
        "steps", "padding_efficiency", "max_share_deviation", "share_deviation_bound",
        "step_imbalance", "wasted_fraction", "max_gap", "queue_bytes", "max_message_bytes",
        "fingerprint",
    } <= report.keys()  # fmt: skip
    assert report["num_rows"] == 300 and sum(report["rows_per_bucket"]) == 300
    assert report["max_share_deviation"] <= report["share_deviation_bound"]
    assert main(arguments) == 0
    assert report["fingerprint"] in capsys.readouterr().out


def test_plan_knows_the_message_size(lengths, tmp_path, capsys, tiny_target):
    arguments = ["plan", str(tmp_path / "empty.yaml"), f"data.lengths={lengths}", "--json",
                 f"target.path={tiny_target}"]  # fmt: skip
    assert main([*arguments[:3], arguments[4], "drafter.target_layer_ids=[1,3]", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["max_message_bytes"] > 2 * 2 * 32 * 500
    error = refused(capsys, *arguments[:3], arguments[4], "drafter.target_layer_ids=[1,6]")
    assert "6 is no layer" in error and "0 to 5" in error


def test_a_plan_is_that_of_the_run(tmp_path, capsys, tiny_overrides):
    """The fingerprint too, which holds the store's."""
    from dflashdist.cluster.world import Place
    from dflashdist.config import load_config
    from dflashdist.train.blueprint import Blueprint

    (tmp_path / "empty.yaml").touch()
    assert main(["plan", str(tmp_path / "empty.yaml"), *tiny_overrides, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    run = Blueprint(load_config(None, tiny_overrides), Place())
    assert report["fingerprint"] == run.plan.fingerprint


def test_refusals(capsys, tmp_path, lengths):
    empty = str(tmp_path / "empty.yaml")
    assert "set data.store" in refused(capsys, "plan", empty)
    assert "no such configuration" in refused(capsys, "plan", str(tmp_path / "none.yaml"))
    assert "no token store" in refused(capsys, "plan", empty, f"data.store={tmp_path / 'nope'}")
    assert "nearest known key" in refused(capsys, "plan", empty, "seeed=1")
    assert "max_tokens=64" in refused(
        capsys, "plan", empty, f"data.lengths={lengths}", "schedule.max_tokens=64"
    )
    assert "target.path" in refused(capsys, "evaluate", str(tmp_path))
    sources = ["prepare", "seed=1", "--target", "t", "--out", "o"]
    assert "no source" in refused(capsys, *sources)


def test_train_refuses_before_anything_is_loaded(tmp_path, lengths):
    """As one process of many would be started: only rank 0 speaks, all exit with 2."""
    result = run("train", str(tmp_path / "empty.yaml"))
    assert result.returncode == 2
    assert result.stderr.strip().startswith("dflashdist train: data.store is not set")
    assert "transformers" not in result.stderr
