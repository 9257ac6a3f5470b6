"""The stream: every row once an epoch, within the budgets, a pure function of what goes in."""

import dataclasses
import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflashdist.checks import least_share
from dflashdist.config import InputError, ScheduleConfig
from dflashdist.schedule.order import deviation_bound, share_deviation
from dflashdist.schedule.plan import Plan

SCHEDULE = ScheduleConfig(max_tokens=4096, max_anchors=800, num_buckets=6)


def corpus(num_rows=3000, seed=0):
    draw = np.random.default_rng(seed)
    lengths = np.clip(np.exp(draw.normal(5.5, 1.0, num_rows)), 3, 2000).astype(np.int32)
    return lengths, (lengths * draw.random(num_rows)).astype(np.int32)


def make(data=None, num_anchors=128, block_size=16, seed=0, window=48, store="", **changes):
    lengths, supervised = corpus() if data is None else data
    schedule = dataclasses.replace(SCHEDULE, **changes)
    return Plan(
        lengths, supervised, schedule, num_anchors=num_anchors, block_size=block_size, seed=seed,
        min_share=least_share(schedule, window), store=store,
    )  # fmt: skip


def rows_of(plan, seqs):
    return [tuple(plan.micro_batch(seq).rows.tolist()) for seq in seqs]


def contents(plan, seq):
    batch = dataclasses.asdict(plan.micro_batch(seq))
    return batch | {"rows": tuple(batch["rows"].tolist())}


@pytest.mark.parametrize("changes", [{}, {"max_anchors": 128}, {"bucket_edges": [100, 512, 2048]}])
def test_every_row_once_an_epoch(changes):
    plan = make(**changes)
    size = plan.micro_batches_per_epoch
    for epoch in range(4):
        batches = rows_of(plan, range(epoch * size, (epoch + 1) * size))
        assert sorted(row for rows in batches for row in rows) == list(range(plan.num_rows))
        assert {plan.micro_batch(epoch * size + n).epoch for n in (0, size - 1)} == {epoch}


def test_a_micro_batch_is_what_it_says_and_fits():
    lengths, supervised = corpus()
    plan = make()
    anchors = np.minimum(np.maximum(supervised - 1, 0), 128)
    for seq in range(2 * plan.micro_batches_per_epoch):
        batch = plan.micro_batch(seq)
        assert batch.seq == seq and batch.rows.dtype == np.int64
        inside = lengths[batch.rows]
        below = plan.edges[batch.bucket - 1] if batch.bucket else 0
        assert below < inside.min() and inside.max() <= plan.edges[batch.bucket]
        assert batch.width == -(-inside.max() // 16) * 16
        assert batch.num_tokens == inside.sum()
        assert batch.num_anchors == anchors[batch.rows].sum()
        padded = len(batch.rows) * batch.width
        assert padded <= 4096 and batch.num_anchors <= 800
        assert batch.cost == 5 * len(batch.rows) * anchors[batch.rows].max() * 16 + padded
        assert {type(value) for value in (batch.width, batch.num_tokens, batch.cost)} == {int}


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    num_rows=st.integers(1, 300),
    max_tokens=st.integers(200, 3000),
    max_anchors=st.integers(30, 500),
    grid=st.sampled_from([1, 7, 16, 64]),
    edges=st.sampled_from([None, [50, 120, 200]]),
)
def test_both_budgets_hold_for_every_micro_batch(
    seed, num_rows, max_tokens, max_anchors, grid, edges
):
    """Of any rows: the widest that the budget takes, with no or all tokens supervised."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 201, num_rows)
    supervised = np.where(draw.random(num_rows) < 0.3, lengths, draw.integers(0, lengths + 1))
    plan = make(
        (lengths, supervised), num_anchors=30, max_tokens=max_tokens, max_anchors=max_anchors,
        grid=grid, bucket_edges=edges,
    )  # fmt: skip
    anchors = np.minimum(np.maximum(supervised - 1, 0), 30)
    for number in range(3):
        epoch = plan.epoch(number)
        assert sorted(epoch.rows.tolist()) == list(range(num_rows))
        for n in range(plan.micro_batches_per_epoch):
            rows = epoch.rows[epoch.bounds[n] : epoch.bounds[n + 1]]
            assert len(rows) * epoch.width[n] <= max_tokens
            assert lengths[rows].max() <= epoch.width[n]
            assert anchors[rows].sum() == epoch.num_anchors[n]
            assert len(rows) * anchors[rows].max() == epoch.padded_anchors[n] <= max_anchors


def test_micro_batches_are_full():
    lengths, supervised = corpus(20_000)
    plan = make((lengths, supervised))
    epoch = plan.epoch(0)
    fill = np.maximum(epoch.padded_anchors / 800, epoch.padded_tokens / 4096)
    assert fill.mean() > 0.9 and epoch.num_anchors.sum() > 0.95 * epoch.padded_anchors.sum()


def test_padding_is_that_of_nearly_equal_lengths():
    lengths, supervised = corpus(20_000)
    padded = make((lengths, supervised)).epoch(0).padded_tokens.sum()
    assert lengths.sum() / padded > 0.96  # 2.6 % of it is the grid of 16 at a mean of 310 tokens
    plain = make((lengths, supervised), bucket_edges=[2000], grid=2000)  # one cell of all rows
    assert lengths.sum() / plain.epoch(0).padded_tokens.sum() < 0.2


def test_epochs_differ_and_seeds_differ():
    plan = make()
    size = plan.micro_batches_per_epoch
    first, second = rows_of(plan, range(size)), rows_of(plan, range(size, 2 * size))
    other = rows_of(make(seed=1), range(size))
    for one, two in ((first, second), (first, other)):
        assert len({*map(frozenset, one)} & {*map(frozenset, two)}) < 0.03 * size
    assert plan.epoch(0).bucket.tolist() != plan.epoch(1).bucket.tolist()


@pytest.mark.parametrize(("num_rows", "at_most"), [(10, 0), (50, 1), (800, 6)])
def test_few_rows_meet_others_in_each_epoch(num_rows, at_most):
    draw = np.random.default_rng(5)
    lengths = np.clip(np.exp(draw.normal(6.2, 0.8, num_rows)), 40, 3072).astype(int)
    plan = Plan(
        lengths, lengths // 2, ScheduleConfig(), num_anchors=512, block_size=16, seed=0,
        min_share=Fraction(2, 28),
    )  # fmt: skip
    size = plan.micro_batches_per_epoch
    epochs = [{*map(frozenset, rows_of(plan, range(e * size, (e + 1) * size)))} for e in range(5)]
    assert size > 1
    for before, after in itertools.pairwise(epochs):
        assert len(before & after) <= at_most  # single rows of 3,072 tokens are always alone


def test_shares_are_even_over_a_boundary_of_epochs():
    plan = make()
    order = np.concatenate([plan.epoch(epoch).bucket for epoch in range(3)])
    counts = [3 * count for count in plan.micro_batches_per_bucket]
    assert share_deviation(order, counts) <= deviation_bound(plan.num_buckets)


def test_suffix_from_any_cursor_equals_the_tail():
    plan = make()
    end = 3 * plan.micro_batches_per_epoch
    whole = [contents(plan, seq) for seq in range(end)]
    for cursor in range(0, end, 97):
        fresh = make()
        assert [contents(fresh, seq) for seq in range(cursor, end)] == whole[cursor:]


def test_threads_see_the_same_stream():
    plan, reference = make(), make()
    seqs = [seq * 37 % (6 * plan.micro_batches_per_epoch) for seq in range(2000)]  # evicts epochs
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda seq: contents(plan, seq), seqs))
    assert {r["seq"]: r for r in results} == {seq: contents(reference, seq) for seq in sorted(seqs)}


def test_column_crosses_epochs():
    plan = make()
    seqs = range(5, 2 * plan.micro_batches_per_epoch + 5)
    assert plan.column("cost", seqs).tolist() == [plan.micro_batch(seq).cost for seq in seqs]


PROBE = """
import sys
import numpy as np
from dflashdist.config import ScheduleConfig
from dflashdist.schedule.plan import Plan
from dflashdist.schedule.stream import Steps
import dflashdist.schedule.report
assert not [name for name in sys.modules if name.split(".")[0] in ("torch", "transformers")]
lengths = np.arange(1, 2001)
plan = Plan(lengths, lengths, ScheduleConfig(), num_anchors=64, block_size=8, seed=5)
steps = Steps(plan, num_drafters=3, accumulation=2, num_steps=4)
print(plan.fingerprint)
for seq in range(plan.micro_batches_per_epoch, plan.micro_batches_per_epoch + 9):
    print(plan.micro_batch(seq).rows.tolist())
print(steps.slots(2))
"""


def test_same_in_every_process_and_without_torch():
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PROBE],
            env={"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1 and len(outputs.pop().splitlines()) == 11


def test_stream_is_pinned():
    """The stream of one small plan, so that a change of it is seen and ALGORITHM raised."""
    lengths = np.arange(1, 41) * 5
    schedule = ScheduleConfig(max_tokens=400, num_buckets=2, grid=20)
    share = Fraction(1, 5)
    plan = Plan(lengths, lengths, schedule, num_anchors=8, block_size=4, seed=7, min_share=share)
    assert plan.edges == (140, 200)
    stream = [
        (7, 2),
        (32, 35),
        (24, 0),
        (25, 11),
        (39, 37),
        (21, 10),
        (3, 22),
        (23, 12),
        (33, 28),
        (13, 9),
        (4, 26),
        (29, 31),
        (16, 8),
        (14, 5),
        (38, 36),
        (20, 15),
        (27, 18),
        (17, 19),
        (30, 34),
        (6, 1),
    ]
    assert rows_of(plan, range(plan.micro_batches_per_epoch)) == stream


def test_fingerprint_changes_with_each_ingredient():
    lengths, supervised = corpus()
    longer, fewer = lengths.copy(), supervised.copy()
    longer[7] += 1
    fewer[np.argmax(fewer)] -= 1
    plans = {
        "base": make(),
        "lengths": make(data=(longer, supervised)),
        "supervised": make(data=(lengths, fewer)),
        "edges": make(bucket_edges=[512, 2048]),
        "max_tokens": make(max_tokens=4097),
        "max_anchors": make(max_anchors=801),
        "grid": make(grid=32),
        "min_share": make(bucket_edges=list(make().edges), min_share="0.04"),
        "num_anchors": make(num_anchors=129),
        "block_size": make(block_size=15),
        "seed": make(seed=1),
        "store": make(store="another"),
    }
    assert len({plan.fingerprint for plan in plans.values()}) == len(plans)
    base = plans["base"].fingerprint_parts
    for name in ("lengths", "supervised", "max_tokens", "grid", "min_share", "seed"):
        parts = plans[name].fingerprint_parts
        assert parts[name] != base[name] and parts.keys() == base.keys()
    int64 = tuple(array.astype(np.int64) for array in (lengths, supervised))
    assert make(data=int64).fingerprint == plans["base"].fingerprint


def test_the_store_changes_the_fingerprint_and_not_the_order():
    plan, other = make(), make(store="another")
    assert plan.fingerprint != other.fingerprint
    assert rows_of(plan, range(50)) == rows_of(other, range(50))


def test_edges_chosen_and_edges_given_are_the_same_plan():
    plan = make()
    given = make(bucket_edges=list(plan.edges))
    assert given.fingerprint == plan.fingerprint
    assert rows_of(given, range(50)) == rows_of(plan, range(50))


def test_small_data():
    plan = make(data=(np.array([5]), np.array([0])))
    assert (plan.edges, plan.micro_batches_per_epoch, plan.num_buckets) == ((16,), 1, 1)
    assert contents(plan, 3) == {
        "seq": 3, "epoch": 3, "bucket": 0, "rows": (0,), "width": 16, "num_tokens": 5,
        "num_anchors": 0, "cost": 16,
    }  # fmt: skip


def test_a_row_of_the_whole_budget_fits_alone():
    lengths = np.array([4090, 4096, 10])
    plan = make(data=(lengths, lengths), max_tokens=4096, grid=60)  # 4096 rounds up to 4140
    batches = [plan.micro_batch(seq) for seq in range(plan.micro_batches_per_epoch)]
    assert sorted(len(batch.rows) * batch.width for batch in batches) == [60, 4096, 4096]


@pytest.mark.parametrize(
    ("lengths", "supervised", "message"),
    [
        ([], [], "no rows"),
        ([10, 4097], [1, 1], r"schedule.max_tokens=4096: row 1 has 4097"),
        ([10, 0], [1, 0], "positive"),
        ([10, 4], [1, 5], "supervised"),
        ([900, 4000], [3, 3000], "max_anchors=800: row 1 has 1000"),
    ],
)
def test_impossible_data_is_refused(lengths, supervised, message):
    with pytest.raises(InputError, match=message):
        make((np.array(lengths, dtype=int), np.array(supervised, dtype=int)), num_anchors=1000)
