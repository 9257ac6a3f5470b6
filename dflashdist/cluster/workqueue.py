"""The work queue: sequence numbers published in the job's order inside a credit window; the
dispatcher, which publishes them, and the trace of what each rank did with them.

Invariants
- Ticket n carries the n-th seq of the job's order. A target takes the next ticket from one atomic
  counter, so a fast target takes more; who takes it changes nothing in what is trained on.
- At most `credit` seqs are published and not consumed: ticket n is published only after
  n - credit + 1 consumptions were counted. A drafter counts a seq when its message is unpacked.
- Keys are deleted by who reads them last; a run of any length leaves a bounded number of keys.
- Clients are not shared: the dispatcher, each target's prefetcher and each drafter have their own.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dflashdist.cluster.health import Health

END = "end"


class WorkQueue:
    """One client's view of the queue. Every method may block and then notices a halt."""

    def __init__(self, store: dist.Store, health: Health) -> None:
        self._store, self._health = store, health

    def publish(self, ticket: int, seq: int) -> None:
        self._store.set(f"work/{ticket}", str(seq))

    def end(self, ticket: int) -> None:
        self._store.set(f"work/{ticket}", END)

    def take(self) -> int | None:
        """The next seq, or None at the end of the run."""
        key = f"work/{self._store.add('taken', 1) - 1}"
        value = self._health.wait_key(self._store, key)
        self._store.delete_key(key)
        return None if value == END.encode() else int(value)

    def consumed(self) -> None:
        """Count one micro-batch as consumed: its memory is free."""
        index = self._store.add("consumed", 1) - 1
        self._store.set(f"consumed/{index}", "1")

    def wait_consumed(self, index: int) -> None:
        """Block until `index + 1` micro-batches have been consumed."""
        key = f"consumed/{index}"
        self._health.wait_key(self._store, key)
        self._store.delete_key(key)

    def num_consumed(self) -> int:
        return self._store.add("consumed", 0)


class Dispatcher:
    """Publishes `seqs` in order, never more than `credit` ahead of consumption, and then one end
    mark for each of `num_takers` targets. Run `run` in a thread of rank 0."""

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


class Trace:
    """The trace of a rank: one JSON line an event, with the machine's monotonic clock, for tests of
    order and for finding faults. Safe to call from several threads.

    Times of ranks on one machine compare. Without a path it does nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = open(path, "a", buffering=1) if path else None  # noqa: SIM115, open for life
        self._lock = threading.Lock()

    @property
    def enabled(self) -> bool:
        """Whether events go anywhere: facts that cost something need not be gathered otherwise."""
        return self._file is not None

    def __call__(self, event: str, **facts: Any) -> None:
        if self._file is None:
            return
        with self._lock:
            self._file.write(json.dumps({"event": event, "ns": time.monotonic_ns()} | facts) + "\n")
