"""The work queue: sequence numbers published in the job's order inside a credit window.

Invariants
- Ticket n carries the n-th seq of the job's order. A target takes the next ticket from one atomic
  counter, so a fast target takes more; who takes it changes nothing in what is trained on.
- At most `credit` seqs are published and not consumed: ticket n is published only after
  n - credit + 1 consumptions were counted. A drafter counts a seq when its message is unpacked.
- Keys are deleted by who reads them last; a run of any length leaves a bounded number of keys.
- Clients are not shared: the dispatcher, each target's prefetcher and each drafter have their own.
"""

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
