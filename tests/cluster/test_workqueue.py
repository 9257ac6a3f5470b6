"""The credit window, the order of tickets, the end of the run, and the keys that are left behind.

Dispatcher, takers and consumers are threads with clients of their own on a real TCPStore.
"""

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from dflashdist.cluster.health import Halt, Halted, Health
from dflashdist.cluster.roles import Member
from dflashdist.cluster.workqueue import Dispatcher, WorkQueue

MEMBER = Member(0, "drafter", "here", "cpu", 0, "machine")


class Queues:
    """Clients of one store, and threads that end with the test."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.threads: list[threading.Thread] = []
        self.failures: list[BaseException] = []
        made: list[Health] = []
        # not in the main thread: there it takes over the signals that stop pytest
        maker = threading.Thread(
            target=lambda: made.append(
                Health(self.store.clone(), MEMBER, silence=60, stall=60)  # never started
            )
        )
        maker.start()
        maker.join()
        self.health = made[0]

    def client(self) -> WorkQueue:
        return WorkQueue(self.store.clone(), self.health)

    def thread(self, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except Halted:
                pass
            except BaseException as error:
                self.failures.append(error)

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()
        return self.threads[-1]

    def join(self) -> None:
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive(), "waits for ever"
        assert not self.failures, self.failures


@pytest.fixture
def queues():
    made = Queues()
    yield made
    made.health.halt = Halt("done", 0, "the test is over")
    made.health.halted.set()
    for thread in made.threads:
        thread.join(5)


@pytest.mark.parametrize(("credit", "takers"), [(1, 1), (1, 3), (5, 3), (16, 4)])
def test_credit_order_and_end(queues, credit, takers):
    """At any time at most `credit` seqs are published and not consumed; every seq is taken once,
    by each taker in increasing order; every taker ends; and the keys in the store do not grow with
    the length of the run."""
    first, end = 7, 127
    outstanding: list[int] = []
    most_keys = 0
    watcher = queues.client()

    def on_publish(seq: int) -> None:  # just before the seq is published
        nonlocal most_keys
        outstanding.append(seq - first + 1 - watcher.num_consumed())
        most_keys = max(most_keys, queues.store.num_keys())

    dispatcher = Dispatcher(
        queues.client(), seqs=range(first, end), credit=credit, num_takers=takers,
        on_publish=on_publish,
    )  # fmt: skip
    taken: list[list[int]] = [[] for _ in range(takers)]

    def take(mine: list[int]) -> None:
        queue, draw = queues.client(), random.Random(takers)
        while (seq := queue.take()) is not None:
            mine.append(seq)
            if draw.random() < 0.2:
                time.sleep(0.003)
            queue.consumed()

    for mine in taken:
        queues.thread(lambda mine=mine: take(mine))
    queues.thread(dispatcher.run)
    queues.join()
    assert max(outstanding) <= credit
    assert sorted(seq for mine in taken for seq in mine) == list(range(first, end))
    assert all(mine == sorted(mine) for mine in taken)
    assert watcher.num_consumed() == dispatcher.num_published == end - first
    # counters; of each unconsumed ticket its work key; of the last `credit` consumptions theirs;
    # and a taker may be between reading a key and deleting it
    assert most_keys <= 2 + 2 * credit + takers
    assert queues.store.num_keys() <= 2 + credit


def test_the_whole_credit_is_used_and_no_more(queues):
    """Without any consumption exactly `credit` seqs can be taken; each consumption frees one."""
    credit = 6
    dispatcher = Dispatcher(queues.client(), seqs=range(100), credit=credit, num_takers=1)
    queue, taken = queues.client(), []

    def take() -> None:
        while (seq := queue.take()) is not None:
            taken.append(seq)

    queues.thread(take)
    queues.thread(dispatcher.run)
    consumer = queues.client()
    for consumed in range(4):
        if consumed:
            consumer.consumed()
        deadline = time.monotonic() + 10
        while len(taken) < credit + consumed and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.1)  # for one too many to show
        assert taken == list(range(credit + consumed))
        assert dispatcher.num_published == credit + consumed


def test_a_consumption_that_is_not_counted_yet_frees_nothing(queues):
    """Two drafters between counting and telling: index 1 told alone means that 2 were counted."""
    queue, told = queues.client(), threading.Event()
    store = queues.store.clone()
    first, second = store.add("consumed", 1) - 1, store.add("consumed", 1) - 1

    def wait() -> None:
        queue.wait_consumed(first)
        told.set()

    queues.thread(wait)
    store.set(f"consumed/{second}", "1")
    assert not told.wait(0.1)
    store.set(f"consumed/{first}", "1")
    assert told.wait(10)


def test_every_wait_ends_with_the_job(queues):
    """A taker without work and a dispatcher without credit notice the end within a second."""
    ended: list[float] = []

    def note(wait: Callable[[], object]) -> None:
        with pytest.raises(Halted, match="rank 3 is gone"):
            wait()
        ended.append(time.monotonic())

    queues.thread(lambda: note(queues.client().take))
    queues.thread(lambda: note(lambda: queues.client().wait_consumed(0)))
    time.sleep(0.2)
    assert not ended
    queues.health.halt = Halt("abort", 3, "rank 3 is gone")
    queues.health.halted.set()
    queues.join()
    assert len(ended) == 2
