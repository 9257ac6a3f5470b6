"""What is shown of training: means of all steps since the last line, in lines that fit."""

import io
import logging
import re

import numpy as np
import pytest
import torch
from run_folder import scalars

from dflashdist.config import ScheduleConfig
from dflashdist.model.loss import LossSums, sums_layout
from dflashdist.schedule.plan import Plan
from dflashdist.schedule.stream import Steps
from dflashdist.train.metrics import LINE, ConsoleHandler, Reporter, StepSums, step_line, summary

BLOCK = 4


@pytest.fixture(scope="module")
def steps() -> Steps:
    """40 rows of 10 to 49 tokens in two buckets; steps of 3 micro-batches."""
    lengths = np.arange(10, 50)
    schedule = ScheduleConfig(max_tokens=100, max_anchors=50, num_buckets=2, grid=10)
    plan = Plan(lengths, lengths // 2, schedule, num_anchors=8, block_size=BLOCK, seed=0)
    return Steps(plan, num_drafters=3, accumulation=1, num_steps=12)


def sums_of(steps: Steps, step: int, losses: list[float], weights: list[float]) -> StepSums:
    """A step's reduced sums, with these of its micro-batches."""
    sums = StepSums(BLOCK, steps.seqs(step), torch.device("cpu"))
    layout = sums_layout(BLOCK)
    for seq, loss, weight in zip(steps.seqs(step), losses, weights, strict=True):
        vector = torch.zeros(LossSums.size(BLOCK), dtype=torch.float64)
        values = {"loss": loss, "weight": weight, "blocks": weight / 2, "accepted": weight / 4,
                  "correct": weight / 3, "count": weight}  # fmt: skip
        for name, value in values.items():
            vector[layout[name]] = value
        sums.add(steps.plan.micro_batch(seq), vector)
    sums.add_extra("total", 2.0)
    return sums


def report(steps: Steps, folder, every: int, first: int, losses: dict[int, list[float]]) -> None:
    """The reporter of a run from step `first`, with a loss of each micro-batch of its steps."""
    reporter = Reporter(
        steps.plan, steps, first_step=first, tensorboard=str(folder / "tb"), every=every
    )
    for step, of_step in losses.items():
        sums = sums_of(steps, step - 1, of_step, [step * weight for weight in (1.0, 2.0, 5.0)])
        reporter.step(
            step, sums, lr=1e-3, grad_norm=1.0, skipped=0, empty=0, queue_depth=3, beats={}
        )  # fmt: skip
    reporter.close()


def test_a_point_is_the_mean_of_all_tokens_since_the_last(steps, tmp_path):
    """Sums over sums: a step with ten times the tokens counts ten times, and no step is skipped."""
    random = np.random.default_rng(0)
    losses = {step: list(random.uniform(1, 9, 3)) for step in range(1, 11)}
    report(steps, tmp_path, 5, 0, losses)
    points = scalars(tmp_path)
    assert list(points["loss"]) == [1, 5, 10]
    for at, since in ((1, [1]), (5, [2, 3, 4, 5]), (10, [6, 7, 8, 9, 10])):
        mean = sum(sum(losses[step]) for step in since) / sum(8.0 * step for step in since)
        assert points["loss"][at] == pytest.approx(mean, rel=1e-6)
        assert points["block_prefix"][at] == pytest.approx(1.5)
        counts = [points[name][at] for name in points if name.startswith("bucket_micro_batches")]
        assert sum(counts) == pytest.approx(3), "of a step, whatever the interval"
    edges = steps.plan.edges
    total, weight = dict.fromkeys(edges, 0.0), dict.fromkeys(edges, 0.0)
    for step in (6, 7, 8, 9, 10):
        for seq, loss, share in zip(steps.seqs(step - 1), losses[step], (1, 2, 5), strict=True):
            edge = edges[steps.plan.micro_batch(seq).bucket]
            total[edge] += loss
            weight[edge] += step * share
    for edge in edges:
        shown = points[f"bucket_loss/{edge:05d}"][10]
        assert shown == pytest.approx(total[edge] / weight[edge], rel=1e-6)


def test_a_resumed_run_shows_each_step_once(steps, tmp_path):
    """Stopped after step 7, in the middle of an interval; the next first line stands apart."""
    losses = {step: [1.0 * step] * 3 for step in range(1, 11)}
    report(steps, tmp_path, 5, 0, {step: losses[step] for step in range(1, 10)})
    report(steps, tmp_path, 5, 7, {step: losses[step] for step in range(8, 11)})
    assert list(scalars(tmp_path)["loss"]) == [1, 5, 8, 10]


def test_a_skipped_step_does_not_hide_the_others(steps):
    good = sums_of(steps, 0, [2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    bad = sums_of(steps, 1, [2.0, float("nan"), 2.0], [1.0, 1.0, 1.0])
    assert summary([good, bad], steps.plan)["loss"] == 2.0
    assert np.isnan(summary([bad], steps.plan)["loss"])


@pytest.mark.parametrize("large", [False, True])
def test_the_line_of_a_step_fits(large):
    values = {"loss": 2.28141, "block_prefix": 2.312, "tokens_per_second/drafters": 2874.0,
              "time/drafters_wait": 0.04, "time/targets_wait": 0.61}  # fmt: skip
    if not large:
        assert step_line(1000, 1000, values, 302) == (
            "step 1000/1000 | loss 2.2814 | block prefix 2.31 | 2,874 tok/s | eta 0:05:02 | "
            "wait d 4% t 61%"
        )
        return
    values |= {"loss": 59123.7785, "block_prefix": 15.99, "tokens_per_second/drafters": 12345678.0,
               "time/drafters_wait": 1.0, "time/targets_wait": 1.0}  # fmt: skip
    assert len(step_line(1_000_000, 1_000_000, values, 2e6)) <= LINE


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_of_a_round_fit_and_a_warning_is_not_glued_to_the_bar(steps, tmp_path, monkeypatch):
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr("sys.stdout", screen)
    reporter = Reporter(steps.plan, steps, first_step=0, tensorboard=str(tmp_path / "tb"), every=1)
    console = ConsoleHandler()
    handle = logging.getLogger("test of the console")
    handle.addHandler(console)
    reporter.step(1, sums_of(steps, 0, [1.0] * 3, [1.0] * 3), lr=1e-3, grad_norm=1.0, skipped=0,
                  empty=0, queue_depth=3, beats={})  # fmt: skip
    handle.warning("gate loss is violated")
    values = {f"eval/position_{k:02d}": 1 / k for k in range(1, 31)}
    values |= {"eval/acceptance_length": 9.87, "eval_ema/acceptance_length": 9.88}
    reporter.evaluation(1, values | {"eval/seconds": 123.4}, best=True)
    reporter.close()
    handle.removeHandler(console)
    assert "step/s" in screen.getvalue(), "a bar was drawn"
    # What stands in a row is what follows the last return to its start.
    rows = [re.split("\r", row)[-1] for row in screen.getvalue().split("\n")]
    assert "WARNING: gate loss is violated" in rows
    told = [row for row in rows if row and "step/s" not in row]
    assert len(told) == 5 and max(map(len, told)) <= LINE, told
