"""The job's order of micro-batches: the plan's, step by step, and rounds of evaluation in between.

- A round's micro-batches have seqs of their own: round r of M micro-batches has EVALUATION + r M
  and the M - 1 that follow. Training's seqs are the same with rounds and without.
- The order and who computes what are pure functions of the steps, the held-out rows' plan and
  `every`: all ranks know them, from any step on.
- A drafter consumes its seqs in this order, and waits for other drafters only where a step or a
  round ends, so only for what comes earlier. So the least seq that is not consumed is always
  published, and its drafter waits for exactly it: no credit is too small.
- A step ends when its slowest drafter does, so its micro-batches are shared out at equal counts and
  nearly equal cost: longest processing time first, then swaps. At 7 drafters x 4 on chats the
  largest share is 1.043 of the mean after the first and 1.007 after the second: whoever lacks one
  of the few cheap micro-batches cannot make up for it by taking fewer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heappop, heapreplace

import numpy as np

from dflashdist.config import InputError
from dflashdist.schedule.plan import MicroBatch, Plan

EVALUATION = 1 << 40  # the first seq of evaluation; training ends long before
MAX_MEASURED_STEPS = 2000  # more steps add little to what is said of an epoch
_EMPTY = -1


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
        in_epoch = max(1, plan.micro_batches_per_epoch // self.window)
        self.num_measured = min(self.num_steps, in_epoch, MAX_MEASURED_STEPS)  # for reports
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


@dataclass(frozen=True, eq=False)
class Rounds:
    """Rounds of evaluation: on which rows, and when."""

    plan: Plan  # of the held-out rows; its first epoch is a round
    rows: np.ndarray  # int64 [plan.num_rows], their numbers in their token store
    every: int  # steps between rounds; one more round follows the last step


class Stream:
    """The micro-batches of a job in order. Thread safe. Without `rounds` it is the plan's."""

    def __init__(self, steps: Steps, rounds: Rounds | None = None) -> None:
        self.steps, self.rounds = steps, rounds
        self.round_size = 0  # micro-batches of a round, M
        self._shares: list[list[int]] = [[] for _ in range(steps.num_drafters)]
        if rounds:
            self.round_size = rounds.plan.micro_batches_per_epoch
            places = -(-self.round_size // steps.num_drafters)
            costs = rounds.plan.column("cost", range(self.round_size))
            self._shares = share_out(costs, steps.num_drafters, places)
        self._owner = {i: d for d, share in enumerate(self._shares) for i in share}

    def due(self, step: int) -> bool:
        """Whether a round follows when `step` steps are done."""
        if self.rounds is None or step == 0:
            return False
        return step % self.rounds.every == 0 or step == self.steps.num_steps

    def round(self, step: int) -> range:
        """The seqs of the round that follows when `step` steps are done."""
        assert self.rounds and self.due(step), step
        number = -(-step // self.rounds.every) - 1  # 0 is the first
        first = EVALUATION + number * self.round_size
        return range(first, first + self.round_size)

    def round_share(self, step: int, drafter: int) -> tuple[int, ...]:
        """A drafter's seqs of a round, ascending: shares of nearly equal cost."""
        return tuple(self.round(step)[i] for i in self._shares[drafter])

    def seqs(self, first_step: int, round_first: bool = False) -> Iterator[int]:
        """All seqs from a step to the end of the run, in the order in which they are published.

        `round_first`: begin with the round that was due before this step.
        """
        if round_first:
            yield from self.round(first_step)
        for step in range(first_step, self.steps.num_steps):
            yield from self.steps.seqs(step)
            if self.due(step + 1):
                yield from self.round(step + 1)

    def num_messages(self, drafter: int, first_step: int, round_first: bool = False) -> int:
        """How many of `seqs` this drafter computes."""
        last = self.steps.num_steps - 1
        training = max(0, last - first_step) * self.steps.accumulation
        if first_step <= last:
            training += len(self.steps.slots(last)[drafter])
        rounds = sum(map(self.due, range(first_step + 1, last + 2))) + round_first
        return training + rounds * len(self._shares[drafter])

    def drafter_of(self, seq: int) -> int:
        """The drafter that computes this micro-batch."""
        if seq < EVALUATION:
            return self.steps.drafter_of(seq)
        return self._owner[(seq - EVALUATION) % self.round_size]

    def micro_batch(self, seq: int) -> MicroBatch:
        """The micro-batch of this number; of evaluation, `rows` are those of the held-out store
        and `bucket` is one of the held-out rows' plan."""
        if seq < EVALUATION:
            return self.steps.plan.micro_batch(seq)
        assert self.rounds, seq
        micro_batch = self.rounds.plan.micro_batch((seq - EVALUATION) % self.round_size)
        return replace(micro_batch, seq=seq, rows=self.rounds.rows[micro_batch.rows])


def share_out(costs: np.ndarray, num_shares: int, places: int) -> list[list[int]]:
    """Indices into `costs` of each share, ascending; at most `places` in each.

    costs: int64 [n], n <= num_shares x places; with equality every share has `places` exactly. A
    pure function: equal costs and loads are told apart by their index.
    """
    assert len(costs) <= num_shares * places, (len(costs), num_shares, places)
    index_DA = np.full((num_shares, places), _EMPTY)
    taken = [0] * num_shares
    room = [(0, share) for share in range(num_shares)]
    heapify(room)
    for index in (-costs).argsort(kind="stable").tolist():
        load, share = room[0]
        index_DA[share, taken[share]] = index
        taken[share] += 1
        if taken[share] < places:
            heapreplace(room, (load + int(costs[index]), share))
        else:
            heappop(room)
    _swap(index_DA, np.append(costs, 0)[index_DA])  # an empty place, -1, costs the 0 at the end
    return [sorted(index for index in share if index != _EMPTY) for share in index_DA.tolist()]


def _swap(index_DA: np.ndarray, cost_DA: np.ndarray) -> None:
    """Swap places of the largest share with others, in place, while the larger of the two shrinks.

    Each swap lowers the sorted loads, so it ends; the limit only bounds the time.
    """
    num_shares, places = cost_DA.shape
    load_D = cost_DA.sum(axis=1)
    for _ in range(num_shares * places):
        top = int(load_D.argmax())
        moved_ADA = cost_DA[top][:, None, None] - cost_DA
        larger_ADA = np.maximum(load_D[top] - moved_ADA, load_D[:, None] + moved_ADA)
        best = int(larger_ADA.argmin())
        if larger_ADA.flat[best] >= load_D[top]:
            return
        mine, other, theirs = (int(i) for i in np.unravel_index(best, larger_ADA.shape))
        moved = moved_ADA[mine, other, theirs]
        load_D[top] -= moved
        load_D[other] += moved
        for table in (index_DA, cost_DA):
            here, there = table[top, mine], table[other, theirs]
            table[top, mine], table[other, theirs] = there, here
