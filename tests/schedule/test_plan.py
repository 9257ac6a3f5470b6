"""The stream: every row once an epoch, within the budgets, a pure function of what goes in."""

import dataclasses
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dflashdist.config import InputError, ScheduleConfig
from dflashdist.schedule.order import deviation_bound, share_deviation
from dflashdist.schedule.plan import Plan

SCHEDULE = ScheduleConfig(max_tokens=4096, max_anchors=800, num_buckets=6, sort_block=4)


def corpus(num_rows=3000, seed=0):
    draw = np.random.default_rng(seed)
    lengths = np.clip(np.exp(draw.normal(5.5, 1.0, num_rows)), 3, 2000).astype(np.int32)
    return lengths, (lengths * draw.random(num_rows)).astype(np.int32)


def make(schedule=SCHEDULE, seed=0, num_anchors=128, block_size=16, data=None, store="", **changes):
    lengths, supervised = corpus() if data is None else data
    schedule = dataclasses.replace(schedule, **changes)
    sizes = {"num_anchors": num_anchors, "block_size": block_size}
    return Plan(lengths, supervised, schedule, **sizes, seed=seed, store=store)


def rows_of(plan, seqs):
    return [tuple(plan.micro_batch(seq).rows.tolist()) for seq in seqs]


def contents(plan, seq):
    batch = dataclasses.asdict(plan.micro_batch(seq))
    return batch | {"rows": tuple(batch["rows"].tolist())}


@pytest.mark.parametrize("changes", [{}, {"sort_block": 1}, {"bucket_edges": [100, 512, 2048]}])
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
        assert batch.width == -(-inside.max() // 64) * 64
        assert batch.num_tokens == inside.sum()
        assert batch.num_anchors == anchors[batch.rows].sum()
        padded = len(batch.rows) * batch.width
        assert padded <= 4096
        assert batch.cost == 5 * batch.num_anchors * 16 + padded
        assert {type(value) for value in (batch.width, batch.num_tokens, batch.cost)} == {int}


def test_anchor_budget_holds_on_average():
    plan, free = make(), make(max_anchors=10**9)
    assert plan.micro_batches_per_epoch > free.micro_batches_per_epoch
    for bucket in range(plan.num_buckets):
        epoch = plan.epoch(0)
        inside = epoch.bucket == bucket
        assert epoch.num_anchors[inside].mean() <= 800 or (epoch.stop - epoch.start).max() == 1


def test_buckets_are_split_evenly():
    epoch, plan = make().epoch(0), make()
    for bucket, rows in enumerate(plan.rows_per_bucket):
        sizes = (epoch.stop - epoch.start)[epoch.bucket == bucket]
        assert sizes.max() - sizes.min() <= 1
        assert sizes.sum() == rows
        assert len(sizes) == plan.micro_batches_per_bucket[bucket]


def test_blocks_are_sorted_and_shuffled():
    sorted_plan, plain = make(sort_block=16), make(sort_block=1)
    assert plain.micro_batches_per_epoch == sorted_plan.micro_batches_per_epoch
    padded = [int(plan.epoch(0).padded_tokens.sum()) for plan in (sorted_plan, plain)]
    assert padded[0] < 0.95 * padded[1]
    epoch = sorted_plan.epoch(0)
    widths = epoch.width[epoch.bucket == sorted_plan.num_buckets - 1]
    assert len(widths) > 16 and list(widths[:16]) != sorted(widths[:16])


def test_epochs_differ_and_seeds_differ():
    plan = make()
    size = plan.micro_batches_per_epoch
    first, second = rows_of(plan, range(size)), rows_of(plan, range(size, 2 * size))
    other = rows_of(make(seed=1), range(size))
    for one, two in ((first, second), (first, other)):
        assert len(set(one) & set(two)) < 0.1 * size
    assert plan.epoch(0).bucket.tolist() != plan.epoch(1).bucket.tolist()


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
from dflashdist.schedule.plan import Plan, Steps
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
    lengths = np.arange(1, 13) * 10
    schedule = ScheduleConfig(max_tokens=256, num_buckets=2, grid=20, sort_block=2)
    plan = Plan(lengths, lengths, schedule, num_anchors=8, block_size=4, seed=7)
    assert plan.edges == (60, 120)
    stream = [(9, 10), (3, 4, 5), (6, 7), (0, 1, 2), (8, 11)]
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
        "sort_block": make(sort_block=5),
        "num_anchors": make(num_anchors=129),
        "block_size": make(block_size=15),
        "seed": make(seed=1),
        "store": make(store="another"),
    }
    assert len({plan.fingerprint for plan in plans.values()}) == len(plans)
    base = plans["base"].fingerprint_parts
    for name in ("lengths", "supervised", "max_tokens", "grid", "sort_block", "seed"):
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
    assert (plan.edges, plan.micro_batches_per_epoch, plan.num_buckets) == ((64,), 1, 1)
    assert contents(plan, 3) == {
        "seq": 3, "epoch": 3, "bucket": 0, "rows": (0,), "width": 64, "num_tokens": 5,
        "num_anchors": 0, "cost": 64,
    }  # fmt: skip


def test_a_row_of_the_whole_budget_fits_alone():
    lengths = np.array([4090, 4096, 10])
    plan = make(data=(lengths, lengths), max_tokens=4096, grid=60)  # 4096 rounds up to 4140
    sizes = {len(plan.micro_batch(seq).rows) for seq in range(plan.micro_batches_per_epoch)}
    assert sizes == {1}


@pytest.mark.parametrize(
    ("lengths", "supervised", "message"),
    [
        ([], [], "no rows"),
        ([10, 4097], [1, 1], r"schedule.max_tokens=4096: row 1 has 4097"),
        ([10, 0], [1, 0], "positive"),
        ([10, 4], [1, 5], "supervised"),
    ],
)
def test_impossible_data_is_refused(lengths, supervised, message):
    with pytest.raises(InputError, match=message):
        make(data=(np.array(lengths, dtype=int), np.array(supervised, dtype=int)))
