"""The job's order of micro-batches: the plan's, step by step, and rounds of evaluation in between.

- A round's micro-batches have seqs of their own: round r of M micro-batches has EVALUATION + r M
  and the M - 1 that follow. Training's seqs are the same with rounds and without.
- The order and who computes what are pure functions of the steps, the held-out rows' plan and
  `every`: all ranks know them, from any step on.
- A drafter consumes its seqs in this order, and waits for other drafters only where a step or a
  round ends, so only for what comes earlier. So the least seq that is not consumed is always
  published, and its drafter waits for exactly it: no credit is too small.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from dflashdist.schedule.plan import MicroBatch, Plan, Steps
from dflashdist.schedule.steps import share_out

EVALUATION = 1 << 40  # the first seq of evaluation; training ends long before


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
