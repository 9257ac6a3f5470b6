"""Rows grouped by length: buckets, and inside them cells, whose rows trade places.

A cell holds rows of nearly equal length and nearly as many anchors. Two budgets bound a
micro-batch: padded tokens, its rows times the longest, which is what a target's time goes with; and
padded anchors, its rows times the most anchors, which is what a drafter's time and memory mostly go
with (it computes as many blocks for each row). A cell gives each micro-batch as many rows as the
tighter budget takes of its longest row and its most anchors, so both hold in every epoch, whichever
rows meet.

Cells are cut along a path through a bucket: stretches of length, shortest first, and through each
of them by anchors, down and up in turn. So neighbours on the path are alike in both, and a cell may
go on into the next stretch instead of leaving a micro-batch half empty at its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from dflashdist.config import InputError

# A stretch spans a 32nd of its longest length, which costs about 1 % of padding, and a cell's
# anchors a 16th of the most; more where it would have fewer micro-batches or rows than these, since
# rows need others to trade places with.
LENGTH_SPAN = 32
ANCHOR_SPAN = 16
MIN_BATCHES = 2
MIN_ROWS = 8
MIN_BUCKET = 4  # micro-batches of a bucket, where there is more than one
_PARTS = 1 << 20  # of a micro-batch, in which loads are counted


@dataclass(frozen=True)
class Budget:
    """What one micro-batch may hold, and the grid (tokens) that edges and widths lie on."""

    max_tokens: int
    max_anchors: int
    grid: int

    def rows(self, width: int, num_anchors: int) -> int:
        """How many rows of that width with up to so many anchors each a micro-batch takes."""
        return min(self.max_tokens // width, self.max_anchors // max(1, num_anchors))

    def width(self, length: np.ndarray) -> np.ndarray:
        """What rows of up to `length` tokens are padded to: the grid's next multiple, within the
        budget; elementwise."""
        return np.minimum(-(-length // self.grid) * self.grid, self.max_tokens)


@dataclass(frozen=True, eq=False)
class Cells:
    """The rows in cells, along the path; int64 arrays.

    Of each cell [C]: its number of rows, of micro-batches, and its bucket. rows [N]: row numbers,
    cell after cell.
    """

    rows: np.ndarray
    num_rows: np.ndarray
    num_micro_batches: np.ndarray
    bucket: np.ndarray


def row_anchors(supervised: np.ndarray, num_anchors: int) -> np.ndarray:
    """Anchors each row is planned with, int64 [N]: min(num_anchors, max(supervised - 1, 0)).

    A block needs its anchor and one token more to be supervised.
    """
    return np.clip(supervised.astype(np.int64) - 1, 0, num_anchors)


def choose_buckets(
    lengths: np.ndarray,
    anchors: np.ndarray,
    num_buckets: int,
    min_share: Fraction,
    budget: Budget,
) -> tuple[tuple[int, ...], Cells]:
    """The edges of at most `num_buckets` buckets with their share of the micro-batches, and cells.

    Each of several has at least `min_share` of them; there are fewer where that leaves room for
    fewer, down to one.
    """
    while True:
        edges = choose_edges(lengths, anchors, num_buckets, min_share, budget)
        cells = lay_cells(lengths, anchors, edges, budget)
        batches = np.bincount(cells.bucket, cells.num_micro_batches)
        if len(edges) == 1 or all(int(one) >= min_share * int(batches.sum()) for one in batches):
            return edges, cells
        num_buckets = len(edges) - 1  # any number in between gives these edges again


def choose_edges(
    lengths: np.ndarray,
    anchors: np.ndarray,
    num_buckets: int,
    min_share: Fraction,
    budget: Budget,
) -> tuple[int, ...]:
    """The edges of at most `num_buckets` buckets, by what their rows fill of micro-batches.

    Returns ascending inclusive upper ends in tokens, each the end of a stretch. Among all runs of
    stretches that fill `min_share` of the whole each, or `MIN_BUCKET`, and an 8th more, as
    micro-batches are whole: those with the least padding to the edge. Exact dynamic programme,
    O(num_buckets x stretches^2), vectorised.
    """
    stretch = _stretches(lengths, (), budget)
    first = np.unique(stretch, return_index=True)[1]
    size = len(first)
    num_buckets = min(num_buckets, size)
    num_rows = np.bincount(stretch)
    longest = np.zeros(size, dtype=np.int64)
    np.maximum.at(longest, stretch, lengths)
    width = budget.width(longest)
    # By the tighter budget. Python's integers: they cannot overflow.
    dealt = np.bincount(stretch, anchors).astype(np.int64).tolist()
    most = budget.max_tokens * budget.max_anchors
    loads = [
        max(tokens * budget.max_anchors, count * budget.max_tokens) * _PARTS // most
        for tokens, count in zip((num_rows * width).tolist(), dealt, strict=True)
    ]
    rows_below = np.append(0, np.cumsum(num_rows))
    load_below = np.append(0, np.cumsum(np.array(loads, dtype=np.int64)))
    least = max(min_share * sum(loads), MIN_BUCKET * _PARTS) * 9 // 8
    unreached = 2 * int(rows_below[-1] * width[-1]) + 1
    best = np.full((num_buckets + 1, size + 1), unreached, dtype=np.int64)
    best[0, 0] = 0
    came_from = np.zeros((num_buckets + 1, size + 1), dtype=np.int64)
    for end in range(1, size + 1):
        padded = (rows_below[end] - rows_below[:end]) * width[end - 1]
        enough = load_below[end] - load_below[:end] >= least
        through = best[:-1, :end] + np.where(enough, padded, unreached)
        came_from[1:, end] = through.argmin(axis=1)
        best[1:, end] = np.minimum(through.min(axis=1), unreached)

    bucket, end = int(best[:, size].argmin()), size
    if best[bucket, size] == unreached:
        return (int(width[-1]),)
    chosen: list[int] = []
    while bucket:
        chosen.append(int(width[end - 1]))
        bucket, end = bucket - 1, int(came_from[bucket, end])
    return tuple(reversed(chosen))


def lay_cells(
    lengths: np.ndarray, anchors: np.ndarray, edges: Sequence[int], budget: Budget
) -> Cells:
    """The cells of the buckets that end at `edges`; ascending, the last no shorter than any row.

    lengths, anchors: int64 [N], tokens and anchors of each row, each within the budget.
    """
    stretch = _stretches(lengths, edges, budget)
    path = np.lexsort((np.where(stretch % 2, anchors, -anchors), stretch))
    lengths, anchors = lengths[path], anchors[path]
    stretch_ends = np.cumsum(np.bincount(stretch))[stretch[path]]
    bucket_ends = np.cumsum(np.bincount(np.searchsorted(edges, lengths), minlength=len(edges)))
    cells: list[tuple[int, int, int]] = []  # rows, micro-batches, bucket
    begin = 0
    for bucket, bucket_end in enumerate(bucket_ends.tolist()):
        while begin < bucket_end:
            alike = anchors[begin : stretch_ends[begin]]
            low, high = np.minimum(alike, alike[0]), np.maximum(alike, alike[0])
            unlike = np.flatnonzero(low < high - high // ANCHOR_SPAN)
            end = begin + int(unlike[0] if len(unlike) else len(alike))
            while True:
                longest, most = lengths[begin:end].max(), anchors[begin:end].max()
                rows = budget.rows(int(budget.width(longest)), int(most))
                full = max(MIN_BATCHES, -(-MIN_ROWS // rows), (end - begin) // rows)
                wanted = begin + full * rows
                if wanted > bucket_end - rows:
                    wanted = bucket_end  # what is left would not fill one
                if wanted <= end:
                    break
                end = wanted
            end = wanted
            cells.append((end - begin, -(-(end - begin) // rows), bucket))
            begin = end
    return Cells(path, *np.array(cells, dtype=np.int64).T)


def _stretches(lengths: np.ndarray, edges: Sequence[int], budget: Budget) -> np.ndarray:
    """The stretch of each row, from 0, int64 [N]: of lengths that span at most a 32nd of the
    longest, or a unit of the grid, on one side of each edge."""
    units, place = np.unique(-(-lengths // budget.grid), return_inverse=True)
    buckets = np.searchsorted(edges, budget.width(units * budget.grid)).tolist()
    number, first, before = -1, 0, -1
    numbers = []
    for unit, bucket in zip(units.tolist(), buckets, strict=True):
        if not numbers or (unit - first + 1) * LENGTH_SPAN > unit or bucket != before:
            number, first, before = number + 1, unit, bucket
        numbers.append(number)
    return np.array(numbers)[place]


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
