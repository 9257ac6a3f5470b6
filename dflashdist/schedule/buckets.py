"""Rows grouped by length: bucket edges, and how many rows of a bucket make a micro-batch.

Two budgets bound a micro-batch: padded tokens, which is what a target's time goes with, and
anchors, which is what a drafter's mostly goes with. The edges are those that make the fewest
micro-batches under both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflashdist.config import InputError

# The programme is quadratic in the candidates: 4096 take about a second, and reach 262,144 tokens
# on a grid of 64. Beyond that, candidates lie on a multiple of the grid.
MAX_CANDIDATES = 4096
_UNREACHED = 1 << 61  # above every real value, and twice it still fits int64


@dataclass(frozen=True)
class Budget:
    """What one micro-batch may hold, and the grid (tokens) that edges and widths lie on."""

    max_tokens: int
    max_anchors: int
    grid: int

    def rows(self, edge: np.ndarray, num_rows: np.ndarray, num_anchors: np.ndarray) -> np.ndarray:
        """Rows a micro-batch, at most, of buckets with these edges and contents (int64, broadcast).

        max(1, min(floor(T / edge), floor(A / mean anchors))), the mean kept as a ratio of integers.
        """
        by_tokens = self.max_tokens // edge
        by_anchors = self.max_anchors * num_rows // np.maximum(num_anchors, 1)
        return np.maximum(
            1, np.where(num_anchors > 0, np.minimum(by_tokens, by_anchors), by_tokens)
        )


def row_anchors(supervised: np.ndarray, num_anchors: int) -> np.ndarray:
    """Anchors each row is planned with, int64 [N]: min(num_anchors, max(supervised - 1, 0)).

    A block needs its anchor and one token more to be supervised.
    """
    return np.clip(supervised.astype(np.int64) - 1, 0, num_anchors)


def round_up(tokens: np.ndarray, grid: int) -> np.ndarray:
    """The least multiple of `grid` that is no less, elementwise."""
    return -(-tokens // grid) * grid


def choose_edges(
    lengths: np.ndarray, anchors: np.ndarray, num_buckets: int, budget: Budget
) -> tuple[int, ...]:
    """The edges of at most `num_buckets` buckets that make the fewest micro-batches.

    lengths, anchors: int64 [N], tokens and anchors of each row. Returns ascending inclusive upper
    ends in tokens, multiples of the grid, each with a row in its bucket; among the best, those with
    the least padding to the edge. Fewer edges than asked where the rows have fewer distinct lengths
    on the grid. Exact dynamic programme over the candidates; O(num_buckets x candidates^2) steps,
    vectorised, and memory linear in the candidates.
    """
    grid = budget.grid
    stride = -(-int(lengths.max()) // (grid * MAX_CANDIDATES))
    units = -(-lengths // (grid * stride))
    counts = np.bincount(units)
    present = np.flatnonzero(counts)
    edges = present * (grid * stride)
    edges[-1] = round_up(lengths.max(), grid)
    rows_below = np.concatenate([[0], np.cumsum(counts[present])])
    # Float weights, exact: the sums stay far below 2^53.
    weights = np.bincount(units, weights=anchors)[present].astype(np.int64)
    anchors_below = np.concatenate([[0], np.cumsum(weights)])

    # One integer orders by micro-batches, then by padded tokens in units of the stride.
    scale = len(lengths) * int(present[-1]) + 1
    if (len(lengths) + 1) * scale >= _UNREACHED:
        raise InputError(f"schedule.grid={grid}: too fine for {len(lengths)} rows; raise it")
    size = len(present)
    depth = min(num_buckets, size)
    best = np.full((depth + 1, size + 1), _UNREACHED, dtype=np.int64)
    best[0, 0] = 0
    came_from = np.zeros((depth + 1, size + 1), dtype=np.int64)
    for end in range(1, size + 1):
        num_rows = rows_below[end] - rows_below[:end]
        rows = budget.rows(edges[end - 1], num_rows, anchors_below[end] - anchors_below[:end])
        cost = -(-num_rows // rows) * scale + num_rows * present[end - 1]
        through = best[:-1, :end] + cost
        came_from[1:, end] = through.argmin(axis=1)
        best[1:, end] = np.minimum(through.min(axis=1), _UNREACHED)

    bucket, end = int(best[:, size].argmin()), size
    chosen: list[int] = []
    while bucket:
        chosen.append(int(edges[end - 1]))
        bucket, end = bucket - 1, int(came_from[bucket, end])
    return tuple(reversed(chosen))


def given_edges(lengths: np.ndarray, edges: Sequence[int], grid: int) -> tuple[int, ...]:
    """A user's edges rounded up to the grid, without those whose bucket no row falls in.

    Raises InputError when the last edge is below the longest row.
    """
    longest = int(lengths.max())
    if edges[-1] < longest:
        raise InputError(
            f"schedule.bucket_edges: the last edge, {edges[-1]}, is below the longest row, "
            f"{longest} tokens; add an edge of at least {longest} or lower data.max_length"
        )
    rounded = np.unique(round_up(np.asarray(edges, dtype=np.int64), grid))
    used = np.unique(np.searchsorted(rounded, lengths))
    return tuple(int(edge) for edge in rounded[used])
