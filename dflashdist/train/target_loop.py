"""The target's loop: take the next seq, pad, run the frozen model, send the real tokens' states."""

import queue
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from dflashdist.cluster.health import Health
from dflashdist.cluster.transport import MessageSpec, Sender, pause
from dflashdist.cluster.workqueue import WorkQueue
from dflashdist.train.metrics import Clock


class TargetWork:
    """Counters of a target rank; its signs of life carry them to rank 0."""

    def __init__(self) -> None:
        self.clock, self.tokens = Clock(), 0

    def reading(self) -> dict[str, float]:
        return {"tokens": self.tokens} | self.clock.reading()


def run_target(
    work: TargetWork,
    health: Health,
    work_queue: WorkQueue,
    sender: Sender,
    *,
    prepare: Callable[[int], Any],
    forward: Callable[[Any], Tensor],
    spec_of: Callable[[int], MessageSpec],
    kind_of: Callable[[int], Any] = lambda seq: None,
    prefetch: int = 1,
    delay: float = 0.0,
) -> None:
    """Serve micro-batches until the queue ends.

    `prepare`: seq -> padded tokens, run ahead in a thread; `forward`: padded tokens -> hidden
    states [tokens, K*H]; `kind_of`: what tells shapes apart (the bucket), for the first slow one.
    """
    batches = prefetched(work_queue, prepare, health, prefetch, delay)
    while True:
        health.phase("wait for work")
        with work.clock.waiting():
            item = next(batches, None)
        if item is None:
            break
        seq, tokens = item
        health.phase("forward", seq, kind_of(seq))
        pause(delay)
        packed = forward(tokens)
        spec = spec_of(seq)
        health.phase("wait for room to send", seq)
        with work.clock.waiting():
            sender.wait_for_room()
        with work.clock.transferring():
            sender.put(spec, packed)
        work.tokens += spec.tokens
    health.phase("wait for the last sends")
    with work.clock.waiting():
        sender.close()


def prefetched(
    work_queue: WorkQueue, prepare: Callable[[int], Any], health: Health, depth: int, delay: float
) -> Iterator[tuple[int, Any]]:
    """(seq, prepared) of the seqs this target takes, `depth` of them prepared ahead in a thread."""
    items: queue.Queue[Any] = queue.Queue()
    asked: queue.Queue[None] = queue.Queue()

    def work() -> None:
        while True:
            health.take(asked)
            seq = work_queue.take()
            if seq is None:
                items.put(None)
                return
            pause(delay)
            items.put((seq, prepare(seq)))

    health.thread("prefetch", work)
    for _ in range(depth):
        asked.put(None)
    while True:
        item = health.take(items)
        if item is None:
            return
        asked.put(None)
        yield item
