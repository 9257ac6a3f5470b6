"""Cells and edges: what every micro-batch of a cell keeps to, and the best runs of stretches."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflashdist.config import InputError
from dflashdist.schedule.buckets import (
    ANCHOR_SPAN,
    LENGTH_SPAN,
    MIN_BATCHES,
    MIN_BUCKET,
    MIN_ROWS,
    Budget,
    choose_buckets,
    choose_edges,
    given_edges,
    lay_cells,
    row_anchors,
)

BUDGET = Budget(max_tokens=2000, max_anchors=300, grid=10)


def corpus(num_rows, seed=0):
    draw = np.random.default_rng(seed)
    lengths = np.clip(np.exp(draw.normal(4.5, 0.9, num_rows)), 1, 1000).astype(int)
    return lengths, row_anchors((lengths * draw.random(num_rows)).astype(int), 60)


def bucket_sums(edges, lengths, anchors):
    """Of each bucket what its rows fill, by the tighter budget of each stretch; and padding."""
    loads, padded, below = [], 0, 0
    for edge in edges:
        inside = (lengths > below) & (lengths <= edge)
        load, first = 0.0, None
        for unit in sorted({-(-int(one) // 10) for one in lengths[inside]}):
            if first is None or (unit - first + 1) * LENGTH_SPAN > unit:
                first, stretch = unit, []
                loads_of = load
            stretch.append(unit)
            rows = inside & np.isin(-(-lengths // 10), stretch)
            widest = -(-int(lengths[rows].max()) // 10) * 10
            load = loads_of + max(rows.sum() * widest / 2000, anchors[rows].sum() / 300)
        loads.append(load)
        padded += int(inside.sum()) * edge
        below = edge
    return loads, padded


@settings(max_examples=100, deadline=None)
@given(
    num_rows=st.integers(1, 60),
    seed=st.integers(0, 1 << 20),
    num_buckets=st.integers(1, 3),
    share=st.sampled_from([Fraction(0), Fraction(1, 14), Fraction(1, 4), Fraction(2)]),
)
def test_edges_equal_brute_force(num_rows, seed, num_buckets, share):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 250, num_rows)
    anchors = row_anchors(draw.integers(0, lengths + 1), 60)
    ends, first = [], None  # of the stretches
    for unit in sorted({-(-int(one) // 10) for one in lengths}):
        if first is None or (unit - first + 1) * LENGTH_SPAN > unit:
            first = unit
            ends.append(unit * 10)
        ends[-1] = unit * 10
    whole = bucket_sums((ends[-1],), lengths, anchors)[0][0]
    best = None
    for count in range(num_buckets):
        for inner in itertools.combinations(ends[:-1], count):
            loads, padded = bucket_sums((*inner, ends[-1]), lengths, anchors)
            least = max(float(share) * whole, MIN_BUCKET) * 9 / 8
            if count == 0 or min(loads) >= least - 1e-3:  # loads are counted in parts of a million
                best = padded if best is None else min(best, padded)
    edges = choose_edges(lengths, anchors, num_buckets, share, BUDGET)
    assert edges[-1] == ends[-1] and len(edges) <= num_buckets
    assert bucket_sums(edges, lengths, anchors)[1] == best


def test_every_bucket_has_its_share_and_fewer_buckets_where_it_cannot():
    lengths, anchors = corpus(3000)
    for window in (2, 3, 4, 7, 28, 112):
        edges, cells = choose_buckets(lengths, anchors, 8, Fraction(2, window), BUDGET)
        batches = np.bincount(cells.bucket, cells.num_micro_batches)
        assert len(edges) == len(batches) <= max(1, window // 2)
        assert len(edges) == 1 or min(batches) * window >= 2 * sum(batches)
        assert len(edges) == 8 or window < 28
    many = choose_buckets(lengths, anchors, 1 << 40, Fraction(0), BUDGET)[0]  # as many as can be
    assert len(many) > 8
    few = np.array([5, 900])
    assert choose_buckets(few, np.array([1, 1]), 8, Fraction(2, 28), BUDGET)[0] == (900,)


def test_cells_hold_every_row_once_and_rows_alike():
    lengths, anchors = corpus(5000)
    edges = (60, 150, 1000)
    cells = lay_cells(lengths, anchors, edges, BUDGET)
    assert sorted(cells.rows.tolist()) == list(range(5000))
    assert (np.diff(cells.bucket) >= 0).all()
    stops = np.cumsum(cells.num_rows)
    full = loose = 0
    for cell, stop in enumerate(stops):
        rows = cells.rows[stop - cells.num_rows[cell] : stop]
        count, last = cells.num_micro_batches[cell], stop in np.cumsum(np.bincount(
            np.searchsorted(edges, lengths)))  # fmt: skip
        assert set(np.searchsorted(edges, lengths[rows])) == {cells.bucket[cell]}
        longest, most = int(lengths[rows].max()), int(anchors[rows].max())
        each = min(2000 // (-(-longest // 10) * 10), 300 // max(1, most))
        assert count == -(-len(rows) // each)
        assert last or len(rows) % count == 0
        full += len(rows) == count * each
        assert last or (count >= MIN_BATCHES and len(rows) >= MIN_ROWS)
        if count > max(MIN_BATCHES, -(-MIN_ROWS // each)) + 1:
            low = int(anchors[rows].min())
            loose += low < most - most // ANCHOR_SPAN
            loose += (longest - int(lengths[rows].min())) > longest / LENGTH_SPAN + 10
    assert full > 0.9 * len(stops) and loose <= 6  # those that hold what a bucket ends with


def test_cells_end_at_given_edges():
    top = np.array([95, 99])
    cells = lay_cells(top, top, [99], Budget(99, 300, 10))  # the grid's next multiple is above
    assert cells.num_micro_batches.tolist() == [2]


def test_users_edges():
    lengths = np.array([10, 70, 500])
    budget = Budget(1000, 100, 64)
    assert given_edges(lengths, [32, 40, 100, 200, 500], budget) == (64, 128, 512)
    with pytest.raises(InputError, match=r"400.*500 tokens"):
        given_edges(lengths, [64, 400], budget)


def test_row_anchors():
    assert row_anchors(np.array([0, 1, 2, 512, 513, 514]), 512).tolist() == [0, 0, 1, 511, 512, 512]
