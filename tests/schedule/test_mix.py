"""What a step sees: the mix of lengths, held to a shuffle's by counting rows one by one."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from corpora import CORPORA

from dflashdist.config import ScheduleConfig
from dflashdist.schedule.mix import length_classes, step_mix
from dflashdist.schedule.order import spread
from dflashdist.schedule.plan import Plan
from dflashdist.schedule.report import plan_report
from dflashdist.schedule.stream import Steps, Stream

MEMORY = {"queue_depth": 64, "num_states": 5, "hidden_size": 32, "dtype": "bfloat16"}


def planned(lengths, supervised, num_drafters, accumulation=4, **changes):
    """The default schedule, as a job of that many drafters plans it."""
    window = num_drafters * accumulation
    plan = Plan(
        lengths, supervised, ScheduleConfig(**changes), num_anchors=512, block_size=16, seed=0,
        min_share=Fraction(2, window),
    )  # fmt: skip
    return Steps(plan, num_drafters=num_drafters, accumulation=accumulation, epochs=1)


@pytest.mark.parametrize("name", CORPORA)
def test_steps_are_mixed_as_well_as_by_a_shuffle_and_better(name):
    """What the default schedule keeps to; tests/bench/step_mix.py prints what it reaches."""
    lengths, supervised = CORPORA[name](0)
    for num_drafters, bound in ((7, 1.25), (14, 0.95), (28, 0.85)):
        steps = planned(lengths, supervised, num_drafters)
        report = plan_report(Stream(steps), **MEMORY)
        assert report["step_mix_vs_shuffle"] <= bound
        assert report["padding_efficiency"] >= 0.97
        assert report["step_mix"]["last_tenth"] <= 1.5 * report["step_mix"]["shuffle_mean"]
        assert report["step_mix"]["worst"] <= bound * report["step_mix"]["shuffle_worst"]
        assert max(report["max_gap"]) <= steps.window
        assert report["max_share_deviation"] <= report["share_deviation_bound"]
        if num_drafters == 7:
            assert report["wasted_fraction"] <= 0.0125


@pytest.mark.parametrize("num_drafters", [1, 2, 7])
def test_every_step_holds_every_bucket_over_epochs(num_drafters):
    lengths, supervised = CORPORA["mixture"](0)
    steps = planned(lengths[:3000], supervised[:3000], num_drafters, num_buckets=8)
    plan = steps.plan
    assert plan.num_buckets <= steps.window // 2 and (num_drafters < 7 or plan.num_buckets == 8)
    bucket = plan.column("bucket", range(3 * plan.micro_batches_per_epoch))
    for seq in range(len(bucket) - steps.window + 1):  # any W in a row, across epochs too
        assert len(set(bucket[seq : seq + steps.window].tolist())) == plan.num_buckets


def test_numbers_are_those_of_rows_counted_one_by_one():
    lengths, supervised = CORPORA["log-normal 0.7"](3)
    steps = planned(lengths[:4000], supervised[:4000], 2)
    plan, classes = steps.plan, length_classes(lengths[:4000])
    assert max(Counter(classes.tolist()).values()) < 1.1 * 4000 / 12

    def shares(rows):
        sums = Counter()
        for row in rows:
            sums[int(classes[row])] += int(supervised[row])
        total = sum(sums.values())
        return {k: value / total for k, value in sums.items()}

    corpus = shares(range(4000))
    distances = []
    for step in range(plan.micro_batches_per_epoch // 8):
        mine = shares(row for seq in steps.seqs(step) for row in plan.micro_batch(seq).rows)
        distances.append(sum(abs(mine.get(k, 0) - share) for k, share in corpus.items()) / 2)
    found = step_mix(steps)["step_mix"]
    tail = distances[-(len(distances) // 10) :]
    assert found["mean"] == pytest.approx(np.mean(distances), rel=1e-9)  # float64 sums
    assert found["worst"] == pytest.approx(max(distances), rel=1e-9)
    assert found["last_tenth"] == pytest.approx(np.mean(tail), rel=1e-9)


def test_a_shuffle_measured_against_a_shuffle_gives_one():
    """One row a micro-batch, no order by length inside the only bucket: a shuffle of its own."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 3000, 6000)
    steps = planned(lengths, lengths, 7, max_tokens=3000, grid=3000, num_buckets=1)
    assert steps.plan.micro_batches_per_epoch == 6000
    assert step_mix(steps)["step_mix_vs_shuffle"] == pytest.approx(1, abs=0.05)  # 214 steps


@pytest.mark.parametrize(
    ("lengths", "supervised"),
    [([500] * 100, [300] * 100), ([7], [5]), ([100, 900], [0, 0]), ([300] * 50, [1] * 50)],
)
def test_nothing_to_compare(lengths, supervised):
    steps = planned(np.array(lengths), np.array(supervised), 7)
    found = step_mix(steps)
    assert found["step_mix_vs_shuffle"] is None and set(found["step_mix"].values()) == {None}
    rows = sorted(steps.plan.epoch(0).rows.tolist())
    assert rows == list(range(len(lengths)))


def test_steps_without_a_supervised_token_are_left_out_even_if_all_are():
    """Few rows teach, and none of the few steps that are measured holds one."""
    lengths, supervised = np.arange(16, 2016), np.zeros(2000, dtype=int)
    supervised[0] = 10
    plan = Plan(
        lengths, supervised, ScheduleConfig(), num_anchors=512, block_size=16, seed=0,
    )  # fmt: skip
    first = int(np.flatnonzero(plan.epoch(0).num_anchors)[0])
    assert first > 0
    steps = Steps(plan, num_drafters=1, accumulation=1, num_steps=first)
    assert step_mix(steps)["step_mix_vs_shuffle"] is None
    assert step_mix(Steps(plan, num_drafters=1, accumulation=1, epochs=1))["step_mix"]["mean"] == 0


def test_ten_rows_for_28_slots():
    lengths = np.array([40, 90, 200, 350, 500, 800, 1200, 1900, 2500, 3000])
    steps = planned(lengths, lengths // 2, 7)
    rows, _ = steps.plan.rows(range(steps.plan.micro_batches_per_epoch * 14))
    assert Counter(rows.tolist()) == dict.fromkeys(range(10), 14)
    assert plan_report(Stream(steps), **MEMORY)["max_gap"] == [1]


def test_spread_lies_evenly_in_every_stretch():
    """Discrepancy of any stretch of n: below 2 + log2 n places, where a shuffle's grows as sqrt."""
    for count, start, first in ((1, 3, 0), (89, 0, 0), (1000, 1 << 63, 5000), (997, 12345, 1)):
        order = spread(count, start, first)
        assert sorted(order.tolist()) == list(range(count))
        for size in (2, 3, 5, 10, 28, 50, 112):
            for begin in range(0, count - size, 7):
                places = np.sort(order[begin : begin + size])
                even = (np.arange(size) + 0.5) * count / size
                assert np.abs(places - even).max() * size / count <= 2 + np.log2(size)


def test_spread_goes_on_where_an_epoch_ended():
    """Two epochs of a bucket in a row are as even at their border as inside."""
    count = 500
    both = np.concatenate([spread(count, 77, 0), spread(count, 77, count)])
    for size in (7, 28):
        for begin in range(count - size + 1, count):
            places = np.sort(both[begin : begin + size])
            even = (np.arange(size) + 0.5) * count / size
            assert np.abs(places - even).max() * size / count <= 2 + np.log2(size)
