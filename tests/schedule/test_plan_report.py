"""The report's numbers are those of the plan, counted here one micro-batch at a time."""

import itertools
import json

import numpy as np
import pytest

from dflashdist.config import ScheduleConfig
from dflashdist.schedule.plan import Plan
from dflashdist.schedule.report import plan_report, print_report
from dflashdist.schedule.stream import Steps, Stream

MEMORY = {"num_states": 5, "hidden_size": 32, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def plan():
    draw = np.random.default_rng(1)
    lengths = np.clip(np.exp(draw.normal(5.5, 1.0, 4000)), 3, 2000).astype(int)
    schedule = ScheduleConfig(max_tokens=4096, max_anchors=1500)
    return Plan(lengths, lengths // 2, schedule, num_anchors=128, block_size=16, seed=0)


def test_numbers(plan):
    steps = Steps(plan, num_drafters=3, accumulation=4, epochs=2)
    report = json.loads(json.dumps(plan_report(Stream(steps), queue_depth=24, **MEMORY)))
    batches = [plan.micro_batch(seq) for seq in range(plan.micro_batches_per_epoch)]
    padded = [len(batch.rows) * batch.width for batch in batches]
    real = [batch.num_tokens for batch in batches]
    assert report["num_rows"] == 4000 == sum(report["rows_per_bucket"])
    assert report["micro_batches_per_epoch"] == len(batches)
    assert report["bucket_edges"] == list(plan.edges) and report["num_buckets"] == len(plan.edges)
    assert report["padding_efficiency"] == sum(real) / sum(padded)
    assert report["num_tokens"] == sum(real) and report["padded_tokens"] == sum(padded)
    assert report["num_anchors"] == sum(batch.num_anchors for batch in batches)
    assert report["max_micro_batch"]["padded_tokens"] == max(padded)
    assert report["steps"] == -(-2 * len(batches) // 12) and report["epochs"] == 2
    assert 0 < report["max_share_deviation"] <= report["share_deviation_bound"] < 1
    assert report["fingerprint"] == plan.fingerprint

    counts = np.zeros(plan.num_buckets)
    worst = 0.0
    shares = np.array(plan.micro_batches_per_bucket) / len(batches)
    for n, batch in enumerate(batches, 1):
        counts[batch.bucket] += 1
        worst = max(worst, np.abs(counts - n * shares).max())
    assert report["max_share_deviation"] == pytest.approx(worst, abs=1e-9)  # float sums here

    places = [n for n, batch in enumerate(batches) if batch.bucket == 0]
    ring = [*places, places[0] + len(batches)]
    assert report["max_gap"][0] == max(b - a for a, b in itertools.pairwise(ring))


def test_balance(plan):
    steps = Steps(plan, num_drafters=3, accumulation=4, epochs=2)
    report = plan_report(Stream(steps), queue_depth=24, **MEMORY)
    anchors = np.minimum(np.maximum(plan.supervised - 1, 0), 128)
    imbalances, work, paid = [], 0.0, 0.0
    for step in range(plan.micro_batches_per_epoch // 12):
        loads = []
        for slot in steps.slots(step):
            batches = [plan.micro_batch(seq) for seq in slot]
            blocks = [len(b.rows) * anchors[b.rows].max() * 16 for b in batches]
            loads.append(sum(blocks) + sum(0.2 * len(b.rows) * b.width for b in batches))
            work += sum(blocks) + sum(0.2 * b.num_tokens for b in batches)
        imbalances.append(max(loads) / np.mean(loads))
        paid += 3 * max(loads)
    assert report["measured_steps"] == len(imbalances)
    assert report["step_imbalance"] == pytest.approx(np.mean(imbalances), rel=1e-9)  # float sums
    assert report["wasted_fraction"] == pytest.approx(1 - work / paid, rel=1e-9)


@pytest.mark.parametrize("depth", [1, 7, 5000])
def test_queue_bytes(plan, depth):
    steps = Steps(plan, num_drafters=2, accumulation=2, num_steps=3)
    report = plan_report(Stream(steps), queue_depth=depth, **MEMORY)
    size = plan.micro_batches_per_epoch
    messages = [plan.micro_batch(seq).num_tokens * 5 * 32 * 2 + 80 for seq in range(size)]
    assert report["max_message_bytes"] == max(messages)
    ring = messages * (depth // size + 2)
    expected = max(sum(ring[start : start + depth]) for start in range(0, size))
    assert report["queue_bytes"] == expected <= report["queue_bytes_bound"] == depth * max(messages)


def test_target_unknown_leaves_bytes_out(plan):
    steps = Steps(plan, num_drafters=2, accumulation=2, num_steps=3)
    report = plan_report(
        Stream(steps), queue_depth=8, num_states=5, hidden_size=None, dtype="bfloat16"
    )
    assert report["max_message_bytes"] is None and report["queue_bytes"] is None
    assert "target.path" in print_report(report)


def test_one_micro_batch_and_a_step_of_many_epochs():
    plan = Plan(np.array([5]), np.array([5]), ScheduleConfig(), num_anchors=4, block_size=4, seed=0)
    steps = Steps(plan, num_drafters=2, accumulation=3, num_steps=4)
    report = plan_report(Stream(steps), queue_depth=12, **MEMORY)
    assert report["max_share_deviation"] == report["share_deviation_bound"] == 0
    assert report["step_imbalance"] == 1 and report["max_gap"] == [1]
    # one row of 5 tokens, 4 anchors of 4, padded to 16: the work is 80 + 5 of 80 + 16
    assert report["wasted_fraction"] == pytest.approx(1 - 85 / 96)
    assert report["queue_bytes"] == 12 * (5 * 5 * 32 * 2 + 80)


def test_text_shows_every_bucket_and_the_totals(plan):
    steps = Steps(plan, num_drafters=3, accumulation=4, epochs=2)
    report = plan_report(Stream(steps), queue_depth=24, **MEMORY)
    lines = print_report(report).splitlines()
    for line, edge, count in zip(
        lines[1:], plan.edges, plan.micro_batches_per_bucket, strict=False
    ):
        assert line.split()[0] == str(edge) and line.split()[2] == f"{count:,}"
    assert any(line.startswith("wasted") for line in lines)
    assert lines[-1].endswith(plan.fingerprint) and max(map(len, lines)) <= 100
