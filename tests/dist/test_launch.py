"""The launchers: the console ends with the job's own line, the exit code is the job's, and Python
is found or asked for."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "dirname", "sed", "env")


def as_nohup() -> None:
    """SIGHUP ignored; SIGINT heard, though a suite in the background ignores it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def local(conf, *arguments: str, script: Path = ROOT / "launch/local.sh", **environment: str):
    """Start launch/local.sh in a folder of its own."""
    return subprocess.Popen(
        ["bash", str(script), str(conf), *arguments], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=Path(conf).parent,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NPROC": "2"} | environment, preexec_fn=as_nohup,
    )  # fmt: skip


@pytest.fixture
def conf(tmp_path) -> Path:
    (tmp_path / "empty.yaml").touch()
    return tmp_path / "empty.yaml"


@pytest.fixture
def job(tiny_overrides) -> list[str]:
    """Two ranks, slowed so that a signal hits in mid-run."""
    return [*tiny_overrides, "roles.num_targets=1", "train.accumulation_steps=2",
            "train.max_steps=200", "train.log_every=1", "pipeline.delay_ms=30"]  # fmt: skip


def test_a_bad_configuration_is_refused_before_the_launcher_starts(tmp_path):
    process = local(tmp_path / "none.yaml")
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and out == ""
    assert errors == f"dflashdist plan: {tmp_path / 'none.yaml'}: no such configuration file\n"


@pytest.fixture
def bare(tmp_path) -> Path:
    """The launchers in a folder without an environment, and a PATH without Python beside it."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch", ignore=shutil.ignore_patterns("demo"))
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or tool)
    return tmp_path


def test_without_an_environment_it_says_how_to_get_one(bare):
    script = bare / "launch/local.sh"
    process = local(bare / "none.yaml", script=script, PATH=str(bare / "bin"), VIRTUAL_ENV="")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and errors.count("\n") == 1
    assert "no Python here has dflashdist" in errors and "environment.sh base" in errors


def test_the_environment_that_the_other_scripts_made_is_found(bare):
    folder = bare / ".venv/bin"
    folder.mkdir(parents=True)
    (folder / "python").write_text(f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n')
    (folder / "python").chmod(0o755)
    (folder / "activate").write_text(f'export VIRTUAL_ENV={folder.parent} PATH={folder}:"$PATH"\n')
    script = bare / "launch/local.sh"
    process = local(bare / "none.yaml", script=script, PATH=str(bare / "bin"), VIRTUAL_ENV="")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and errors.endswith("none.yaml: no such configuration file\n")


@pytest.mark.dist
@pytest.mark.slow
def test_what_the_ranks_refuse_is_the_last_line(conf, job):
    """Here that two ranks are too few: only the ranks know how many there are."""
    process = local(conf, *job, "roles.num_targets=2", "roles.num_drafters=2")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert errors.count("\n") == 1 and errors.startswith("dflashdist train: roles: 2 drafters + 2")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_end_in_mid_run(conf, job, tmp_path, number):
    """After Ctrl-C the ranks save and leave; a killed rank is named. No traceback follows. What
    nohup makes the launcher ignore it ignores."""
    process = local(conf, *job)
    assert process.stdout
    for line in process.stdout:
        if line.startswith("step 2/"):
            process.send_signal(signal.SIGHUP)
        if line.startswith("step 9/"):
            break
    if number == signal.SIGINT:
        process.send_signal(number)
    else:
        members = json.loads((tmp_path / "run/plan.json").read_text())["members"]
        os.kill(members[1]["pid"], number)
    began = time.monotonic()
    _, errors = process.communicate(timeout=60)
    lines = errors.splitlines()
    assert "Traceback" not in errors and time.monotonic() - began < 30
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert len(lines) == 1 and "asked to stop: saved after step" in lines[0]
        assert list((tmp_path / "run/checkpoints").glob("step_*"))
    else:
        assert process.returncode == 1
        assert "ended without a word" in lines[0]
        assert lines[-1].startswith("dflashdist") and len(lines) <= 3, errors
