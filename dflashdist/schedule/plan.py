"""The plan: the endless, deterministic stream of micro-batches, and its cut into optimizer steps.

What holds, for every seq (a micro-batch's number, from 0, across epochs):

1. A micro-batch is a pure function of the rows' lengths and supervised counts, the schedule's
   configuration, the anchors a row, the block size, the seed and its seq. Not of drafters,
   accumulation, targets, threads, processes or what was asked before.
2. Each epoch holds every row once, and its buckets in the order of `order.interleave`.
3. A step is W = drafters x accumulation consecutive seqs. Its slots are a permutation of them.

Random order comes from sorting raw words of the counter-based generator Philox, whose stream numpy
guarantees; the methods of numpy's Generator may change between versions.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock

import numpy as np

from dflashdist.config import InputError, ScheduleConfig
from dflashdist.schedule.buckets import Budget, choose_edges, given_edges, round_up, row_anchors
from dflashdist.schedule.order import interleave
from dflashdist.schedule.steps import share_out

ALGORITHM = 1  # raise it with any change that gives other micro-batches or slots for the same input
CACHED_EPOCHS = 3  # the one in use, the next one that is dispatched ahead, and one to spare
_ROWS, _MICRO_BATCHES, _TIES = 1, 2, 3  # what random words are for


@dataclass(frozen=True, eq=False, slots=True)
class MicroBatch:
    """Rows that go through one target forward and one drafter forward and backward."""

    seq: int
    epoch: int
    bucket: int
    rows: np.ndarray  # int64 [B], row numbers of the store, ascending in length
    width: int  # tokens each row is padded to: the longest, rounded up to the grid
    num_tokens: int  # real tokens
    num_anchors: int
    cost: int  # planned drafter cost: 5 x (anchors x block size + 0.2 x padded tokens)


@dataclass(frozen=True, eq=False)
class Epoch:
    """One epoch's micro-batches in stream order, as read-only int64 arrays [N]."""

    rows: np.ndarray  # [num_rows], every row once; a micro-batch's rows are adjacent
    start: np.ndarray  # micro-batch n is rows[start[n]:stop[n]]
    stop: np.ndarray
    bucket: np.ndarray
    width: np.ndarray
    padded_tokens: np.ndarray  # rows x width
    num_tokens: np.ndarray
    num_anchors: np.ndarray
    cost: np.ndarray


class Plan:
    """The stream of micro-batches. Thread safe; epochs are laid out when first asked for.

    lengths, supervised: integers [N], tokens and supervised tokens a row. store: the fingerprint of
    the token store, if there is one; it changes the plan's fingerprint, never its order. Raises
    InputError when there is no row, or one longer than a micro-batch may be.
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
        store: str = "",
    ) -> None:
        self._lengths = np.asarray(lengths).astype(np.int64)
        supervised = np.asarray(supervised)
        self._anchors = row_anchors(supervised, num_anchors)
        self._check(supervised, schedule)
        self.num_rows = len(self._lengths)
        self.seed = seed
        self.block_size = block_size
        self.grid = schedule.grid
        self.sort_block = schedule.sort_block
        budget = Budget(schedule.max_tokens, schedule.max_anchors, schedule.grid)
        if schedule.bucket_edges is not None:
            self.edges = given_edges(self._lengths, schedule.bucket_edges, schedule.grid)
        else:
            self.edges = choose_edges(self._lengths, self._anchors, schedule.num_buckets, budget)
        self.num_buckets = len(self.edges)
        self._fill_buckets(budget)
        self.fingerprint_parts: dict[str, str | int] = {
            "algorithm": ALGORITHM,
            "num_rows": self.num_rows,
            "lengths": _digest(self._lengths),
            "supervised": _digest(supervised),
            "bucket_edges": " ".join(map(str, self.edges)),
            "max_tokens": schedule.max_tokens,
            "max_anchors": schedule.max_anchors,
            "grid": schedule.grid,
            "sort_block": schedule.sort_block,
            "num_anchors": num_anchors,
            "block_size": block_size,
            "seed": seed,
            "store": store,
        }
        named = "\n".join(f"{key}={value}" for key, value in self.fingerprint_parts.items())
        self.fingerprint = hashlib.sha256(named.encode()).hexdigest()
        self._lock = Lock()
        self._epochs = lru_cache(maxsize=CACHED_EPOCHS)(self._lay_out)

    def _check(self, supervised: np.ndarray, schedule: ScheduleConfig) -> None:
        lengths = self._lengths
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

    def _fill_buckets(self, budget: Budget) -> None:
        """Split each bucket evenly: as few micro-batches as fit, sizes differing by one at most."""
        self._bucket = np.searchsorted(self.edges, self._lengths).astype(np.uint16)
        rows = np.bincount(self._bucket, minlength=self.num_buckets)
        anchors = np.bincount(self._bucket, self._anchors, self.num_buckets).astype(np.int64)
        capacity = budget.rows(np.asarray(self.edges), rows, anchors)
        batches = -(-rows // capacity)
        self.rows_per_bucket = tuple(rows.tolist())
        self.micro_batches_per_bucket = tuple(batches.tolist())
        self.micro_batches_per_epoch = sum(self.micro_batches_per_bucket)
        # Of each micro-batch, by bucket: where it begins among the rows, and its sorting block.
        bounds, blocks, first_row, first_block = [], [], 0, 0
        for num_rows, num in zip(self.rows_per_bucket, self.micro_batches_per_bucket, strict=True):
            index = np.arange(num, dtype=np.int64)
            bounds.append(first_row + index * num_rows // num)
            blocks.append(first_block + index // self.sort_block)
            first_row += num_rows
            first_block = int(blocks[-1][-1]) + 1
        self._bounds = np.append(np.concatenate(bounds), self.num_rows)
        self._blocks = np.concatenate(blocks)

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
            rows=epoch.rows[epoch.start[n] : epoch.stop[n]],
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

    def _words(self, epoch: int, purpose: int, count: int) -> np.ndarray:
        """Random uint64 [count] of (seed, epoch, purpose)."""
        key = np.array([self.seed % (1 << 64), epoch], dtype=np.uint64)
        counter = np.array([0, purpose, 0, 0], dtype=np.uint64)
        return np.random.Philox(key=key, counter=counter).random_raw(count)

    def _lay_out(self, number: int) -> Epoch:
        """Shuffle rows, sort blocks by length, cut, shuffle inside blocks, interleave buckets."""
        rows = self._words(number, _ROWS, self.num_rows).argsort(kind="stable")
        rows = rows[self._bucket[rows].argsort(kind="stable")]  # by bucket, random within
        sizes = np.diff(self._bounds)
        by_length = np.repeat(self._blocks, sizes) * (self.edges[-1] + 1) + self._lengths[rows]
        rows = rows[by_length.argsort(kind="stable")]  # by block, then length

        begins = self._bounds[:-1]
        lengths = self._lengths[rows]
        width = round_up(np.maximum.reduceat(lengths, begins), self.grid)
        padded = sizes * width
        tokens = np.add.reduceat(lengths, begins)
        anchors = np.add.reduceat(self._anchors[rows], begins)
        cost = 5 * anchors * self.block_size + padded

        words = self._words(number, _TIES, self.num_buckets)
        ties = words.argsort(kind="stable").tolist()
        bucket = np.array(interleave(self.micro_batches_per_bucket, ties), dtype=np.uint16)
        words = self._words(number, _MICRO_BATCHES, len(sizes))
        shuffled = np.lexsort((words, self._blocks))  # still by bucket
        picked = np.empty_like(shuffled)
        picked[bucket.argsort(kind="stable")] = shuffled  # position in the stream -> micro-batch
        epoch = Epoch(
            rows=rows,
            start=begins[picked],
            stop=self._bounds[1:][picked],
            bucket=bucket.astype(np.int64),
            width=width[picked],
            padded_tokens=padded[picked],
            num_tokens=tokens[picked],
            num_anchors=anchors[picked],
            cost=cost[picked],
        )
        for array in vars(epoch).values():
            array.flags.writeable = False
        return epoch


def _digest(values: np.ndarray) -> str:
    return hashlib.sha256(values.astype("<i8").tobytes()).hexdigest()


class Steps:
    """The stream cut into optimizer steps of W = num_drafters x accumulation micro-batches.

    Exactly one of num_steps and epochs says where training ends. With epochs, the last step may
    hold fewer than W. Which drafter computes a micro-batch changes with D; the stream does not.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        num_drafters: int,
        accumulation: int,
        num_steps: int | None = None,
        epochs: float | None = None,
    ) -> None:
        assert num_drafters > 0 and accumulation > 0, (num_drafters, accumulation)
        if (num_steps is None) == (epochs is None):
            raise InputError("train.max_steps and train.epochs: give one of them, not both or none")
        self.plan = plan
        self.num_drafters = num_drafters
        self.accumulation = accumulation
        self.window = num_drafters * accumulation
        if epochs is not None:
            self.end = round(epochs * plan.micro_batches_per_epoch)
        else:
            self.end = (num_steps or 0) * self.window
        if self.end < 1:
            given = (
                f"train.epochs={epochs}" if epochs is not None else f"train.max_steps={num_steps}"
            )
            raise InputError(f"{given}: trains on nothing; raise it")
        self.num_steps = -(-self.end // self.window)
        self._slots = lru_cache(maxsize=16)(self._assign)

    def step_of(self, seq: int) -> int:
        """The step that uses this micro-batch."""
        return seq // self.window

    def seqs(self, step: int) -> range:
        """The micro-batches of a step: W of them, or fewer in the last step of whole epochs."""
        assert 0 <= step < self.num_steps, (step, self.num_steps)
        return range(step * self.window, min((step + 1) * self.window, self.end))

    def slots(self, step: int) -> tuple[tuple[int, ...], ...]:
        """For each drafter its seqs of this step, ascending: `accumulation` each in a full step."""
        return self._slots(step)

    def drafter_of(self, seq: int) -> int:
        """The drafter that trains on this micro-batch."""
        return next(d for d, seqs in enumerate(self.slots(self.step_of(seq))) if seq in seqs)

    def _assign(self, step: int) -> tuple[tuple[int, ...], ...]:
        """Shares of nearly equal cost, handed to the drafters in turn.

        Without the turn one drafter would always have the long rows. It slips by one after each
        round, so that an order whose period divides D does not make it stand still either.
        """
        seqs = self.seqs(step)
        costs = self.plan.column("cost", seqs)
        shares = share_out(costs, self.num_drafters, self.accumulation)
        turn = step + step // self.num_drafters
        return tuple(
            tuple(seqs[index] for index in shares[(drafter + turn) % self.num_drafters])
            for drafter in range(self.num_drafters)
        )
