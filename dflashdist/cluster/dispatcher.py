"""The dispatcher: a thread of rank 0 that publishes the job's seqs inside the credit window."""

from collections.abc import Callable, Iterable

from dflashdist.cluster.workqueue import WorkQueue


class Dispatcher:
    """Publishes `seqs` in order, never more than `credit` ahead of consumption, and then one end
    mark for each of `num_takers` targets. Run `run` in a thread of its own."""

    def __init__(
        self,
        queue: WorkQueue,
        *,
        seqs: Iterable[int],
        credit: int,
        num_takers: int,
        on_publish: Callable[[int], None] = lambda seq: None,
    ) -> None:
        self.num_published = 0
        self._queue, self._on_publish = queue, on_publish
        self._seqs, self._credit, self._num_takers = seqs, credit, num_takers

    def run(self) -> None:
        for ticket, seq in enumerate(self._seqs):
            if ticket >= self._credit:
                self._queue.wait_consumed(ticket - self._credit)
            self._on_publish(seq)
            self._queue.publish(ticket, seq)
            self.num_published = ticket + 1
        for taker in range(self._num_takers):
            self._queue.end(self.num_published + taker)
