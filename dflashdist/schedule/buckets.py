"""Rows grouped by length: cells, whose rows trade places, and buckets, which are runs of cells.

A cell holds rows of nearly equal length and knows how many micro-batches they make. Two budgets
bound each of those: padded tokens, which is what a target's time goes with, and anchors, which is
what a drafter's mostly goes with. Both hold in every epoch, whichever rows meet:

- Tokens: all micro-batches of a cell have the same number of rows, or one fewer, and rows times the
  cell's width is within the budget.
- Anchors: a cell with c micro-batches sorts its rows by anchors, most first, and cuts them into
  tiers of c. Each micro-batch takes one row of each tier, any of them, so it never has more anchors
  than the largest of every tier together. c is the least for which that is within the budget. It
  also evens them out: two micro-batches of a cell differ by no more than its rows do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from dflashdist.config import InputError

# A cell grows until its lengths span a 32nd of the longest (which costs about 1 % of padding, and
# leaves rows enough to trade places with) and it fills two micro-batches, so that there is another
# one to trade with.
SPAN = 32
MIN_FILL = 2


@dataclass(frozen=True)
class Budget:
    """What one micro-batch may hold, and the grid (tokens) that edges and widths lie on."""

    max_tokens: int
    max_anchors: int
    grid: int

    def width(self, length: np.ndarray) -> np.ndarray:
        """What rows of up to `length` tokens are padded to: the grid's next multiple, within the
        budget; elementwise."""
        return np.minimum(-(-length // self.grid) * self.grid, self.max_tokens)


@dataclass(frozen=True, eq=False)
class Cells:
    """The rows in cells, shortest first; int64 arrays.

    Of each cell [C]: its number of rows, of micro-batches, and its width in tokens. rows [N]: row
    numbers by cell, then tier, that is by anchors.
    """

    rows: np.ndarray
    num_rows: np.ndarray
    num_micro_batches: np.ndarray
    width: np.ndarray


def row_anchors(supervised: np.ndarray, num_anchors: int) -> np.ndarray:
    """Anchors each row is planned with, int64 [N]: min(num_anchors, max(supervised - 1, 0)).

    A block needs its anchor and one token more to be supervised.
    """
    return np.clip(supervised.astype(np.int64) - 1, 0, num_anchors)


def lay_cells(
    lengths: np.ndarray, anchors: np.ndarray, budget: Budget, edges: Sequence[int] = ()
) -> Cells:
    """The cells of all rows; none lies on both sides of one of `edges`.

    lengths, anchors: int64 [N], tokens and anchors of each row, each within the budget.
    """
    units = -(-lengths // budget.grid)
    order = units.argsort(kind="stable")
    present, first = np.unique(units[order], return_index=True)
    bounds = np.append(first, len(lengths))  # rows of units below each
    width = budget.width(present * budget.grid)
    # What each unit fills of a micro-batch, by the budget that is the tighter one for it, in parts
    # of max_tokens x max_anchors. Python's integers: they cannot overflow.
    padded = (np.diff(bounds) * width).tolist()
    dealt = np.add.reduceat(anchors[order], first).tolist()
    fill = [
        max(tokens * budget.max_anchors, count * budget.max_tokens)
        for tokens, count in zip(padded, dealt, strict=True)
    ]
    enough = MIN_FILL * budget.max_tokens * budget.max_anchors
    ends = {*np.searchsorted(width, edges, "right").tolist(), len(width)} - {0}
    stops = _cell_stops(present.tolist(), fill, enough, sorted(ends))

    rows, counts = [], []
    for begin, end in pairwise([0, *stops]):
        inside = order[bounds[begin] : bounds[end]]
        inside = inside[(-anchors[inside]).argsort(kind="stable")]
        rows.append(inside)
        counts.append(_num_micro_batches(anchors[inside], int(width[end - 1]), budget))
    num_rows = np.diff(bounds[[0, *stops]])
    last = np.array(stops) - 1
    return Cells(np.concatenate(rows), num_rows, np.array(counts, dtype=np.int64), width[last])


def _cell_stops(units: list[int], fill: list[int], enough: int, ends: list[int]) -> list[int]:
    """Indices behind the last unit of each cell; `ends` are indices where one has to end."""
    stops: list[int] = []
    begin = 0
    for end in ends:
        first_cell, filled = len(stops), 0
        for index in range(begin, end):
            filled += fill[index]
            span = units[index] - units[begin] + 1
            if filled >= enough and span * SPAN >= units[index]:
                stops.append(index + 1)
                begin, filled = index + 1, 0
        if begin < end:  # too few are left: they join the cell before
            if len(stops) > first_cell:
                stops.pop()
            stops.append(end)
        begin = end
    return stops


def _num_micro_batches(anchors: np.ndarray, width: int, budget: Budget) -> int:
    """The fewest micro-batches for a cell's rows, given in descending number of anchors."""
    rows = budget.max_tokens // width
    low = max(-(-len(anchors) // rows), -(-int(anchors.sum()) // budget.max_anchors), 1)
    high = len(anchors)
    while low < high:
        count = (low + high) // 2
        if anchors[::count].sum() <= budget.max_anchors:  # of each tier the first, which is largest
            high = count
        else:
            low = count + 1
    return low


def choose_edges(cells: Cells, num_buckets: int, min_share: Fraction) -> tuple[int, ...]:
    """The edges of at most `num_buckets` buckets, each with its share of the micro-batches.

    Returns ascending inclusive upper ends in tokens, each the width of a cell. Among all runs of
    cells that hold at least `min_share` of the micro-batches each, those with the least padding to
    the edge; fewer buckets where that share leaves room for fewer, down to one. Exact dynamic
    programme, O(num_buckets x cells^2), vectorised.
    """
    size = len(cells.width)
    rows_below = np.concatenate([[0], np.cumsum(cells.num_rows)])
    batches_below = np.concatenate([[0], np.cumsum(cells.num_micro_batches)])
    least = -(-min_share.numerator * int(batches_below[-1]) // min_share.denominator)
    unreached = 2 * int(rows_below[-1] * cells.width[-1]) + 1
    depth = max(1, min(num_buckets, size))
    best = np.full((depth + 1, size + 1), unreached, dtype=np.int64)
    best[0, 0] = 0
    came_from = np.zeros((depth + 1, size + 1), dtype=np.int64)
    for end in range(1, size + 1):
        padded = (rows_below[end] - rows_below[:end]) * cells.width[end - 1]
        enough = batches_below[end] - batches_below[:end] >= least
        through = best[:-1, :end] + np.where(enough, padded, unreached)
        came_from[1:, end] = through.argmin(axis=1)
        best[1:, end] = np.minimum(through.min(axis=1), unreached)

    bucket, end = int(best[:, size].argmin()), size
    if best[bucket, size] == unreached:  # a share above 1: one bucket
        return (int(cells.width[-1]),)
    chosen: list[int] = []
    while bucket:
        chosen.append(int(cells.width[end - 1]))
        bucket, end = bucket - 1, int(came_from[bucket, end])
    return tuple(reversed(chosen))


def given_edges(lengths: np.ndarray, edges: Sequence[int], budget: Budget) -> tuple[int, ...]:
    """A user's edges rounded up to the grid, without those whose bucket no row falls in.

    Raises InputError when the last edge is below the longest row.
    """
    longest = int(lengths.max())
    if edges[-1] < longest:
        raise InputError(
            f"schedule.bucket_edges: the last edge, {edges[-1]}, is below the longest row, "
            f"{longest} tokens; add an edge of at least {longest} or lower data.max_length"
        )
    rounded = np.unique(budget.width(np.asarray(edges, dtype=np.int64)))
    used = np.unique(np.searchsorted(rounded, lengths))
    return tuple(int(edge) for edge in rounded[used])
