"""The dispatcher: a thread of rank 0 that publishes the plan's seqs inside the credit window."""

from collections.abc import Callable

from dflashdist.cluster.workqueue import WorkQueue


class Dispatcher:
    """Publishes seqs [first, end) in order, never more than `credit` ahead of consumption, and then
    one end mark for each of `num_takers` targets. Run `run` in a thread of its own."""

    def __init__(
        self,
        queue: WorkQueue,
        *,
        first: int,
        end: int,
        credit: int,
        num_takers: int,
        on_publish: Callable[[int], None] = lambda seq: None,
    ) -> None:
        self.num_published = 0
        self._queue, self._on_publish = queue, on_publish
        self._first, self._end, self._credit, self._num_takers = first, end, credit, num_takers

    def run(self) -> None:
        for ticket, seq in enumerate(range(self._first, self._end)):
            if ticket >= self._credit:
                self._queue.wait_consumed(ticket - self._credit)
            self._on_publish(seq)
            self._queue.publish(ticket, seq)
            self.num_published = ticket + 1
        for taker in range(self._num_takers):
            self._queue.end(self._end - self._first + taker)
