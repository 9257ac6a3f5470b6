"""A killed or frozen rank, a signal: named, all ranks end, and runs resume exactly."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import Ranks, train_overrides
from run_folder import assert_same_bits, scalars, slots, trace, weights

pytestmark = pytest.mark.dist


def wait_for_step(folder: Path, step: int, seconds: float = 120) -> dict[int, int]:
    """Wait until a slot of this step was trained on; returns rank -> process id."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if any(fact["step"] >= step for fact in trace(folder, "slot")):
            members = json.loads((folder / "plan.json").read_text())["members"]
            return {member["rank"]: member["pid"] for member in members}
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached in {seconds} s")


def causes(folder: Path) -> list[str]:
    """What each survivor gives as the cause that ended the job. Where the store dies with rank 0
    each finds it alone, so the words may differ."""
    lines = [line for f in (folder / "logs").glob("rank*.log") for line in f.open()]
    return [line.split("the job ends: ")[1] for line in lines if "the job ends: " in line]


def assert_named(folder: Path, victim: int, *what: str) -> None:
    """Every survivor names the victim, in one of these words."""
    assert causes(folder)
    for cause in causes(folder):
        assert cause.startswith(f"rank {victim} ("), cause
        assert any(words in cause for words in what), cause


@pytest.fixture
def slow(tiny_overrides, tmp_path) -> list[str]:
    """Two drafters and two targets, slowed so that a fault hits in mid-run."""
    return [*tiny_overrides, f"run.dir={tmp_path / 'run'}", "roles.num_targets=2",
            "train.accumulation_steps=2", "train.max_steps=12", "pipeline.delay_ms=80"]  # fmt: skip


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_killed_rank_is_named(slow, tmp_path, victim):
    ranks = Ranks(4, train_overrides, slow)
    pid = wait_for_step(tmp_path / "run", 1)[victim]
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    codes = ranks.exit_codes(30)
    assert time.monotonic() - began < 30
    assert all(codes), codes
    assert_named(tmp_path / "run", victim, f"process {pid} ended without a word")


@pytest.mark.parametrize("victim", [0, 2])
def test_a_frozen_rank_is_named_and_ended(slow, tmp_path, victim):
    """Silence is made short to keep the test quick; the default is 20 s."""
    ranks = Ranks(4, train_overrides, [*slow, "pipeline.silence_seconds=4"])
    pid = wait_for_step(tmp_path / "run", 1)[victim]
    os.kill(pid, signal.SIGSTOP)
    codes = ranks.exit_codes(30)
    assert all(codes), codes
    assert_named(tmp_path / "run", victim, "no sign of life", f"process {pid} ended")


def torchrun(overrides: list[str], *options: str, ranks: int = 4) -> subprocess.Popen:
    conf = Path(next(o for o in overrides if o.startswith("target.path=")).partition("=")[2])
    conf = conf / "empty.yaml"
    conf.touch()
    command = [
        sys.executable, "-m", "dflashdist.launch", "--standalone", f"--nproc-per-node={ranks}",
        *options, "-m", "dflashdist", "train", str(conf), *overrides,
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_torchrun_restarts_after_kill_and_by_hand(run_ranks, slow, tmp_path):
    """kill -9 of a random rank: `--max-restarts=1` goes on by itself, and a new start after a
    second kill goes on too; the weights and the trace are those of the unbroken run."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    steps = [*slow, "train.max_steps=16"]
    run_ranks(4, train_overrides, [*steps, f"run.dir={whole}", "pipeline.delay_ms=0"])
    victim = random.randrange(4)
    print("victim", victim)
    job = torchrun([*steps, f"run.dir={broken}"], "--max-restarts=1")
    os.kill(wait_for_step(broken, 5)[victim], signal.SIGKILL)
    deadline = time.monotonic() + 120
    while len(lives(broken)) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert len(lives(broken)) == 2 and lives(broken)[1] >= 4
    os.kill(wait_for_step(broken, 9)[(victim + 1) % 4], signal.SIGKILL)
    output, _ = job.communicate(timeout=90)
    assert job.returncode == 1 and "Traceback" not in output
    first = next(line for line in output.splitlines() if "ended without a word" in line)
    assert first.startswith(f"dflashdist: rank {victim} ("), "the first cause is the killed rank"
    run_ranks(4, train_overrides, [*steps, f"run.dir={broken}", "pipeline.delay_ms=0"])
    assert len(lives(broken)) == 3 and lives(broken)[2] >= 8
    assert_same_bits(weights(whole, 16), weights(broken, 16))
    shown = scalars(broken)
    assert shown["loss"] == scalars(whole)["loss"], "a dead life's points are purged"
    assert {"tokens_per_second/targets", "time/targets_wait"} <= shown.keys()
    assert slots(whole) == slots(broken)


def lives(folder: Path) -> list[int]:
    """The step at which each start of the run began."""
    return [fact["step"] for fact in trace(folder, "start") if fact["rank"] == 0]


@pytest.mark.slow
def test_sigterm_saves_and_stops(slow, tmp_path, run_ranks):
    """SIGTERM is passed on to all ranks: they stop together after a step, saved; the next
    start goes on from there to the weights of an unbroken run."""
    folder, whole = tmp_path / "run", tmp_path / "whole"
    job = torchrun(slow, ranks=4)
    wait_for_step(folder, 1)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGTERM
    assert "asked to stop: saved after step" in output.splitlines()[-1], output
    stopped = int(output.split("saved after step ")[1].split(";")[0])
    assert 0 < stopped < 12 and (folder / "checkpoints" / f"step_{stopped:08d}").is_dir()
    run_ranks(4, train_overrides, [*slow, "pipeline.delay_ms=0"])
    run_ranks(4, train_overrides, [*slow, f"run.dir={whole}", "pipeline.delay_ms=0"])
    assert_same_bits(weights(whole, 12), weights(folder, 12))


def test_a_run_folder_is_one_job_s(slow, tmp_path):
    """The second job is refused by name; the first goes on."""
    first = Ranks(4, train_overrides, slow)
    wait_for_step(tmp_path / "run", 1)
    second = Ranks(4, train_overrides, slow)
    rank, kind, text = second.queue.get(timeout=60)
    second.kill()
    assert (rank, kind) == (0, "error") and "trains in it" in text, text
    assert first.results() == [None] * 4


def flip_a_bit(file: Path) -> None:
    """In the middle; only reading it all shows, which rank 0 does once all have joined."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_all_ranks_pass_over_a_damaged_checkpoint(slow, run_ranks, tmp_path):
    """To end with the weights of a run whose newest was whole."""
    folder = tmp_path / "run"
    quick = [*slow, "pipeline.delay_ms=0", "checkpoint.every=2"]
    run_ranks(4, train_overrides, [*quick, "train.max_steps=4"])
    whole = {name: tensor.clone() for name, tensor in weights(folder, 4).items()}  # off the file
    file = folder / "checkpoints/step_00000004/trainer/weights.safetensors"
    flip_a_bit(file)
    run_ranks(4, train_overrides, [*quick, "train.max_steps=4"])
    assert lives(folder) == [0, 2]
    assert_same_bits(whole, weights(folder, 4))
    log = (folder / "logs/rank0.log").read_text()
    assert f"WARNING dflashdist.train.run: checkpoint passed over: {file}: holds something" in log


def test_a_refusal_after_joining_names_the_fix(slow, tmp_path):
    """A damaged checkpoint, the only one, is the user's to mend: no advice to just start again."""
    folder = tmp_path / "run"
    Ranks(4, train_overrides, [*slow, "train.max_steps=4", "pipeline.delay_ms=0"]).results()
    file = folder / "checkpoints/step_00000004/trainer/optimizer.pt"
    flip_a_bit(file)
    shutil.rmtree(folder / "logs")
    assert all(Ranks(4, train_overrides, slow).exit_codes(60))
    assert causes(folder)
    for cause in causes(folder):
        assert f": {file}: holds something else than was saved" in cause, cause
        assert cause.endswith("delete it to start anew, or take another run.dir\n")
