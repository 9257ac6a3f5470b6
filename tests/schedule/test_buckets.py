"""Edges make the fewest micro-batches that any edges make."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflashdist.config import InputError
from dflashdist.schedule import buckets
from dflashdist.schedule.buckets import Budget, choose_edges, given_edges, row_anchors


def cost_of(edges, lengths, anchors, budget):
    """(micro-batches, padded tokens to the edges), by the definition, one bucket at a time."""
    batches = padded = 0
    below = 0
    for edge in edges:
        inside = [i for i, length in enumerate(lengths) if below < length <= edge]
        below = edge
        if not inside:
            continue
        rows = budget.max_tokens // edge
        total = sum(int(anchors[i]) for i in inside)
        if total:
            rows = min(rows, budget.max_anchors * len(inside) // total)
        batches += -(-len(inside) // max(1, rows))
        padded += len(inside) * edge
    return batches, padded


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=40),
    share=st.sampled_from([0.0, 0.2, 1.0]),
    num_buckets=st.integers(1, 5),
    max_tokens=st.integers(90, 400),
    max_anchors=st.sampled_from([20, 100, 10**9]),
)
def test_edges_equal_brute_force(lengths, share, num_buckets, max_tokens, max_anchors):
    budget = Budget(max_tokens, max_anchors, grid=10)
    lengths = np.array(lengths)
    anchors = row_anchors((lengths * share).astype(int), 30)
    top = -(-lengths.max() // 10) * 10
    best = min(
        cost_of((*inner, top), lengths, anchors, budget)
        for count in range(num_buckets)
        for inner in itertools.combinations(range(10, top, 10), count)
    )
    edges = choose_edges(lengths, anchors, num_buckets, budget)
    assert cost_of(edges, lengths, anchors, budget) == best
    assert len(edges) <= num_buckets and edges[-1] == top and not any(e % 10 for e in edges)


def test_published_corpus():
    """Log-normal lengths, 50,000 rows, 8 buckets of 16,384 tokens: the counts of the study."""
    lengths = np.exp(np.random.default_rng(0).normal(np.log(700), 1.0, 50_000))
    lengths = np.clip(lengths, 32, 8192).astype(np.int64)
    budget = Budget(16384, 10**9, grid=64)
    edges = choose_edges(lengths, row_anchors(lengths, 512), 8, budget)
    assert cost_of(edges, lengths, lengths * 0, budget)[0] == 4377


def test_fewer_buckets_than_asked():
    lengths = np.array([5, 64, 64, 200])
    assert choose_edges(lengths, lengths * 0, 8, Budget(1000, 10**9, 64)) == (64, 256)


def test_many_candidates_are_thinned(monkeypatch):
    monkeypatch.setattr(buckets, "MAX_CANDIDATES", 16)
    lengths = np.arange(1, 1001)
    edges = choose_edges(lengths, lengths * 0, 4, Budget(4000, 10**9, grid=2))
    assert edges[-1] == 1000  # the longest row on the grid, not on the coarser step
    assert len(edges) == 4 and not any(edge % 64 for edge in edges[:-1])


def test_users_edges():
    lengths = np.array([10, 70, 500])
    assert given_edges(lengths, [32, 40, 100, 200, 500], 64) == (64, 128, 512)
    with pytest.raises(InputError, match=r"400.*500 tokens"):
        given_edges(lengths, [64, 400], 64)


def test_row_anchors():
    assert row_anchors(np.array([0, 1, 2, 512, 513, 514]), 512).tolist() == [0, 0, 1, 511, 512, 512]
