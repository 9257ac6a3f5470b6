"""The plan: the endless, deterministic stream of micro-batches, and its cut into optimizer steps.

What holds, for every seq (a micro-batch's number, from 0, across epochs):

1. A micro-batch is a pure function of the rows' lengths and supervised counts, the schedule's
   configuration, the anchors a row, the block size, the seed and its seq. Not of drafters,
   accumulation, targets, threads, processes or what was asked before.
2. Each epoch holds every row once, its buckets in the order of `order.interleave`, and the
   micro-batches of a bucket, shortest to longest, in that of `order.spread`.
3. Both budgets hold for every micro-batch: `buckets` says why. How many rows each has is the same
   in all epochs; which ones changes with each.
4. A step is W = drafters x accumulation consecutive seqs. Its slots are a permutation of them.

Random order comes from sorting raw words of the counter-based generator Philox, whose stream numpy
guarantees; the methods of numpy's Generator may change between versions.
"""

import hashlib
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from threading import Lock

import numpy as np

from dflashdist.config import InputError, ScheduleConfig
from dflashdist.schedule.buckets import (
    Budget,
    Cells,
    choose_buckets,
    given_edges,
    lay_cells,
    row_anchors,
)
from dflashdist.schedule.order import interleave, max_gaps, spread

ALGORITHM = 2  # raise it with any change that gives other micro-batches or slots for the same input
CACHED_EPOCHS = 3  # the one in use, the next one that is dispatched ahead, and one to spare
_WORD_BITS = np.uint64(32)
_ROWS, _STARTS, _TIES = 1, 2, 3  # what random words are for


@dataclass(frozen=True, eq=False, slots=True)
class MicroBatch:
    """Rows that go through one target forward and one drafter forward and backward."""

    seq: int
    epoch: int
    bucket: int
    rows: np.ndarray  # int64 [B], row numbers of the store
    width: int  # tokens each row is padded to: the longest, rounded up to the grid
    num_tokens: int  # real tokens
    num_anchors: int
    cost: int  # planned drafter cost: 5 x (padded anchors x block size + 0.2 x padded tokens)


@dataclass(frozen=True, eq=False)
class Epoch:
    """One epoch's micro-batches in stream order, as read-only int64 arrays [N]."""

    rows: np.ndarray  # [num_rows], every row once
    bounds: np.ndarray  # [N + 1], micro-batch n is rows[bounds[n]:bounds[n + 1]]
    num_rows: np.ndarray
    bucket: np.ndarray
    width: np.ndarray
    padded_tokens: np.ndarray  # rows x width
    num_tokens: np.ndarray
    num_anchors: np.ndarray
    padded_anchors: np.ndarray  # rows x most anchors of a row: what a drafter computes
    cost: np.ndarray


class Plan:
    """The stream of micro-batches. Thread safe; epochs are laid out when first asked for.

    lengths, supervised: integers [N], tokens and supervised tokens a row. min_share: of the
    micro-batches, what each bucket has at least, where `schedule` gives no edges. store: the
    fingerprint of the token store, if there is one; it changes the plan's fingerprint, never its
    order. Raises InputError when there is no row, or one longer than a micro-batch may be, or with
    more anchors than one may have.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        supervised: np.ndarray,
        schedule: ScheduleConfig,
        *,
        num_anchors: int,
        block_size: int,
        seed: int,
        min_share: Fraction = Fraction(0),
        store: str = "",
    ) -> None:
        self.lengths = np.asarray(lengths).astype(np.int64)
        self.supervised = np.asarray(supervised).astype(np.int64)
        self._anchors = row_anchors(self.supervised, num_anchors)
        self._check(schedule, num_anchors)
        self.num_rows = len(self.lengths)
        self.seed = seed
        self.block_size = block_size
        self._budget = Budget(schedule.max_tokens, schedule.max_anchors, schedule.grid)
        rows = (self.lengths, self._anchors)
        if schedule.bucket_edges is not None:
            self.edges = given_edges(self.lengths, schedule.bucket_edges, self._budget)
            cells = lay_cells(*rows, self.edges, self._budget)
        else:
            self.edges, cells = choose_buckets(*rows, schedule.num_buckets, min_share, self._budget)
        self.num_buckets = len(self.edges)
        self._fill_buckets(cells)
        self.fingerprint_parts: dict[str, str | int] = {
            "algorithm": ALGORITHM,
            "num_rows": self.num_rows,
            "lengths": _digest(self.lengths),
            "supervised": _digest(self.supervised),
            "bucket_edges": " ".join(map(str, self.edges)),
            "max_tokens": schedule.max_tokens,
            "max_anchors": schedule.max_anchors,
            "grid": schedule.grid,
            "min_share": str(min_share),
            "num_anchors": num_anchors,
            "block_size": block_size,
            "seed": seed,
            "store": store,
        }
        named = "\n".join(f"{key}={value}" for key, value in self.fingerprint_parts.items())
        self.fingerprint = hashlib.sha256(named.encode()).hexdigest()
        self._lock = Lock()
        self._epochs = lru_cache(maxsize=CACHED_EPOCHS)(self._lay_out)

    def _check(self, schedule: ScheduleConfig, num_anchors: int) -> None:
        lengths, supervised = self.lengths, self.supervised
        assert lengths.ndim == 1 and lengths.shape == supervised.shape, supervised.shape
        if len(lengths) == 0:
            raise InputError(
                "the data holds no rows: prepare some, or look at why all were rejected"
            )
        if lengths.min() < 1 or (supervised < 0).any() or (supervised > lengths).any():
            raise InputError(
                "the data's lengths are not all positive with supervised counts within"
            )
        if lengths.max() > schedule.max_tokens:
            raise InputError(
                f"schedule.max_tokens={schedule.max_tokens}: row {int(lengths.argmax())} has "
                f"{int(lengths.max())} tokens; raise it, or lower data.max_length and prepare again"
            )
        if self._anchors.max() > schedule.max_anchors:
            raise InputError(
                f"schedule.max_anchors={schedule.max_anchors}: row {int(self._anchors.argmax())} "
                f"has {int(self._anchors.max())}; raise it, or lower drafter.num_anchors"
                f"={num_anchors}"
            )

    def _fill_buckets(self, cells: Cells) -> None:
        """What is the same in all epochs: how many rows each micro-batch takes, and from where."""
        rows_of, batches_of = cells.num_rows, cells.num_micro_batches
        self.rows_per_bucket = _sums(cells.bucket, rows_of, self.num_buckets)
        self.micro_batches_per_bucket = _sums(cells.bucket, batches_of, self.num_buckets)
        self.micro_batches_per_epoch = sum(self.micro_batches_per_bucket)
        # Of a cell with c micro-batches, the i-th row of its shuffled ones goes to number i % c.
        first_row = np.repeat(np.cumsum(rows_of) - rows_of, rows_of)
        counts = np.repeat(batches_of, rows_of)
        index = np.arange(self.num_rows) - first_row
        taker = np.repeat(np.cumsum(batches_of) - batches_of, rows_of) + index % counts
        self._bounds = np.concatenate([[0], np.cumsum(np.bincount(taker))])
        self._target = self._bounds[taker] + index // counts
        self._cell = first_row.astype(np.uint64) << _WORD_BITS  # below goes a random word's half
        self._rows = cells.rows

    @cached_property
    def max_gaps(self) -> list[int]:
        """For each bucket the most seqs from one of its micro-batches to the next."""
        return max_gaps(self.epoch(0).bucket, self.num_buckets)

    def epoch(self, number: int) -> Epoch:
        """One epoch's micro-batches; the last few asked for are kept."""
        with self._lock:
            return self._epochs(number)

    def micro_batch(self, seq: int) -> MicroBatch:
        """The micro-batch of this number in the stream."""
        assert seq >= 0, seq
        number, n = divmod(seq, self.micro_batches_per_epoch)
        epoch = self.epoch(number)
        return MicroBatch(
            seq=seq,
            epoch=number,
            bucket=int(epoch.bucket[n]),
            rows=epoch.rows[epoch.bounds[n] : epoch.bounds[n + 1]],
            width=int(epoch.width[n]),
            num_tokens=int(epoch.num_tokens[n]),
            num_anchors=int(epoch.num_anchors[n]),
            cost=int(epoch.cost[n]),
        )

    def column(self, name: str, seqs: range) -> np.ndarray:
        """One of `Epoch`'s columns for consecutive micro-batches, int64 [len(seqs)]."""
        parts: list[np.ndarray] = []
        seq = seqs.start
        while seq < seqs.stop:
            number, n = divmod(seq, self.micro_batches_per_epoch)
            parts.append(getattr(self.epoch(number), name)[n : n + seqs.stop - seq])
            seq += len(parts[-1])
        return np.concatenate(parts)

    def rows(self, seqs: range) -> tuple[np.ndarray, np.ndarray]:
        """The rows of consecutive micro-batches, and the seq of each row, int64 [M] both."""
        rows: list[np.ndarray] = []
        seq = seqs.start
        while seq < seqs.stop:
            number, n = divmod(seq, self.micro_batches_per_epoch)
            stop = min(n + seqs.stop - seq, self.micro_batches_per_epoch)
            epoch = self.epoch(number)
            rows.append(epoch.rows[epoch.bounds[n] : epoch.bounds[stop]])
            seq += stop - n
        return np.concatenate(rows), np.repeat(np.asarray(seqs), self.column("num_rows", seqs))

    def _words(self, epoch: int, purpose: int, count: int) -> np.ndarray:
        """Random uint64 [count] of (seed, epoch, purpose)."""
        key = np.array([self.seed, epoch], dtype=np.uint64)
        counter = np.array([0, purpose, 0, 0], dtype=np.uint64)
        return np.random.Philox(key=key, counter=counter).random_raw(count)

    def _lay_out(self, number: int) -> Epoch:
        """Shuffle the rows of each cell, order each bucket, interleave buckets, deal out rows."""
        words = self._words(number, _TIES, self.num_buckets)
        ties = words.argsort(kind="stable").tolist()
        bucket = np.array(interleave(self.micro_batches_per_bucket, ties), dtype=np.int64)
        starts = self._words(0, _STARTS, self.num_buckets).tolist()
        picked = np.empty_like(bucket)  # position in the stream -> micro-batch, shortest first
        first = 0
        for k, count in enumerate(self.micro_batches_per_bucket):
            picked[bucket == k] = first + spread(count, starts[k], number * count)
            first += count

        words = self._words(number, _ROWS, self.num_rows)
        rows = np.empty_like(self._rows)
        rows[self._target] = self._rows[(self._cell | words >> _WORD_BITS).argsort(kind="stable")]
        num_rows = np.diff(self._bounds)[picked]
        bounds = np.concatenate([[0], np.cumsum(num_rows)])
        begins = bounds[:-1]
        moved = np.repeat(self._bounds[picked] - begins, num_rows)
        rows = rows[np.arange(self.num_rows) + moved]

        lengths = self.lengths[rows]
        width = self._budget.width(np.maximum.reduceat(lengths, begins))
        anchors = self._anchors[rows]
        padded_anchors = num_rows * np.maximum.reduceat(anchors, begins)
        padded = num_rows * width
        epoch = Epoch(
            rows=rows,
            bounds=bounds,
            num_rows=num_rows,
            bucket=bucket,
            width=width,
            padded_tokens=padded,
            num_tokens=np.add.reduceat(lengths, begins),
            num_anchors=np.add.reduceat(anchors, begins),
            padded_anchors=padded_anchors,
            cost=5 * padded_anchors * self.block_size + padded,
        )
        for array in vars(epoch).values():
            array.flags.writeable = False
        return epoch


def _sums(index: np.ndarray, values: np.ndarray, size: int) -> tuple[int, ...]:
    totals = np.zeros(size, dtype=np.int64)
    np.add.at(totals, index, values)
    return tuple(totals.tolist())


def _digest(values: np.ndarray) -> str:
    return hashlib.sha256(values.astype("<i8").tobytes()).hexdigest()
