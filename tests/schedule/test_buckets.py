"""Cells and edges: what every micro-batch of a cell keeps to, and the best runs of cells."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflashdist.config import InputError
from dflashdist.schedule.buckets import (
    MIN_FILL,
    SPAN,
    Budget,
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


def padding_to_edges(edges, cells):
    """(buckets that hold too few micro-batches, padded tokens), by the definition."""
    bucket = np.searchsorted(edges, cells.width)
    padded = int((np.asarray(edges)[bucket] * cells.num_rows).sum())
    return np.bincount(bucket, cells.num_micro_batches, len(edges)), padded


@settings(max_examples=150, deadline=None)
@given(
    num_rows=st.integers(1, 400),
    seed=st.integers(0, 1 << 20),
    num_buckets=st.integers(1, 4),
    share=st.sampled_from([Fraction(0), Fraction(1, 14), Fraction(1, 4), Fraction(2)]),
)
def test_edges_equal_brute_force(num_rows, seed, num_buckets, share):
    cells = lay_cells(*corpus(num_rows, seed), BUDGET)
    total = cells.num_micro_batches.sum()
    top = int(cells.width[-1])
    best = None
    for count in range(num_buckets):
        for inner in itertools.combinations(cells.width[:-1].tolist(), count):
            batches, padded = padding_to_edges((*inner, top), cells)
            if count == 0 or all(one >= share * total for one in batches.tolist()):
                best = padded if best is None else min(best, padded)
    edges = choose_edges(cells, num_buckets, share)
    batches, padded = padding_to_edges(edges, cells)
    assert padded == best and len(edges) <= num_buckets and edges[-1] == top
    assert len(edges) == 1 or min(batches) >= share * total


def test_every_bucket_has_its_share_and_fewer_buckets_where_it_cannot():
    cells = lay_cells(*corpus(3000), BUDGET)
    total = int(cells.num_micro_batches.sum())
    for window in (2, 3, 4, 7, 28, 112):
        edges = choose_edges(cells, 8, Fraction(2, window))
        batches, _ = padding_to_edges(edges, cells)
        assert len(edges) == 1 or min(batches) * window >= 2 * total
        assert len(edges) == min(8, max(1, window // 2)) or window < 8
    few = lay_cells(np.array([5, 900]), np.array([1, 1]), BUDGET)
    assert choose_edges(few, 8, Fraction(2, 28)) == (900,)  # one micro-batch holds both


def test_cells_hold_every_row_once_and_neighbours_in_length():
    lengths, anchors = corpus(5000)
    cells = lay_cells(lengths, anchors, BUDGET)
    assert sorted(cells.rows.tolist()) == list(range(5000))
    begins = np.cumsum(cells.num_rows) - cells.num_rows
    above = 0
    for begin, count, batches, width in zip(
        begins, cells.num_rows, cells.num_micro_batches, cells.width, strict=True
    ):
        rows = cells.rows[begin : begin + count]
        assert above < lengths[rows].min() and lengths[rows].max() <= width
        above = width
        assert (np.diff(anchors[rows]) <= 0).all()
        per_batch = -(-count // batches)
        assert per_batch * width <= BUDGET.max_tokens
        tiers = anchors[rows][::batches]
        assert len(tiers) == per_batch and tiers.sum() <= BUDGET.max_anchors
        if batches > 1:  # one fewer would be too few, by either budget
            fewer = batches - 1
            too_wide = -(-count // fewer) * width > BUDGET.max_tokens
            assert too_wide or anchors[rows][::fewer].sum() > BUDGET.max_anchors
        span = width - lengths[rows].min()
        wide = max(BUDGET.grid, width / SPAN + BUDGET.grid)
        assert span <= wide or batches <= 4 * MIN_FILL or width == cells.width[-1]


def test_cells_end_at_given_edges():
    lengths, anchors = corpus(500)
    assert {100, 200} <= set(lay_cells(lengths, anchors, BUDGET, [100, 200, 1000]).width.tolist())
    top = np.array([95, 99])
    cells = lay_cells(top, top, Budget(99, 300, 10), [99])  # the grid's next multiple is above
    assert cells.width.tolist() == [99]


def test_users_edges():
    lengths = np.array([10, 70, 500])
    budget = Budget(1000, 100, 64)
    assert given_edges(lengths, [32, 40, 100, 200, 500], budget) == (64, 128, 512)
    with pytest.raises(InputError, match=r"400.*500 tokens"):
        given_edges(lengths, [64, 400], budget)


def test_row_anchors():
    assert row_anchors(np.array([0, 1, 2, 512, 513, 514]), 512).tolist() == [0, 0, 1, 511, 512, 512]
