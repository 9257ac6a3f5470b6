"""The control plane alone: how many micro-batches a second it can hand out, and to how many ranks.

    python tests/bench/dispatch.py [--quick] [--json] [--network-us 100] [--tick 0.25]

First table, measured: the dispatcher and 1 to 64 consumers on one real TCPStore, threads of one
process with clients of their own. A consumer takes a seq and counts it as consumed.

Second table, simulated: the whole protocol at 512 and 4096 ranks, three targets to a drafter, one
second a forward pass with jitter 0.3; drafters could do 10 % more. Every store operation of
dispatcher, prefetchers, senders, receivers and drafters is an event at one server, with the round
trip and the time that an operation takes as just measured; so are the waits that are repeated each
second and, in the rows with `health`, the health threads' looks and signs of life. `share` is the
throughput over min(targets, slowest drafters of each step). Two credits: twice the step's W
micro-batches, and with two more for each target, which is what it holds without having sent it.
"""

import argparse
import functools
import heapq
import itertools
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import numpy as np

from dflashdist.config import PipelineConfig, queue_depth

# ---- measured


class Control:
    """A store and what clients of it need, without a job around."""

    def __init__(self) -> None:
        import torch.distributed as dist

        from dflashdist.cluster.health import Health
        from dflashdist.cluster.roles import Member

        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.health = Health(
            self.store.clone(), Member(0, "drafter", "", "", 0, ""), silence=1e9, stall=1e9
        )

    def queue(self, run: str) -> Any:
        """A client of a queue of its own."""
        import torch.distributed as dist

        from dflashdist.cluster.workqueue import WorkQueue

        return WorkQueue(dist.PrefixStore(run, self.store.clone()), self.health)


def in_threads(number: int, work: Callable[[int], None]) -> float:
    """Seconds until all have done their work, from a common start."""
    barrier = threading.Barrier(number + 1)

    def run(index: int) -> None:
        barrier.wait()
        work(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    barrier.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def measure_store(control: Control) -> tuple[float, float]:
    """Seconds of a round trip (median of one client) and of an operation at the server."""
    client, trips = control.store.clone(), []
    for _ in range(3000):
        began = time.perf_counter()
        client.add("trip", 1)
        trips.append(time.perf_counter() - began)
    clients, each = [control.store.clone() for _ in range(8)], 2500

    def work(index: int) -> None:
        for _ in range(each):
            clients[index].add("load", 1)

    return statistics.median(trips), in_threads(8, work) / (8 * each)


def measure_queue(control: Control, consumers: int, seconds: float) -> dict[str, Any]:
    """Seqs a second with so many consumers, within a credit of max(12, 2 x consumers)."""
    from dflashdist.cluster.workqueue import Dispatcher

    def rate(number: int, run: str) -> float:
        dispatcher = Dispatcher(
            control.queue(run), seqs=range(number), credit=max(12, 2 * consumers),
            num_takers=consumers,
        )  # fmt: skip
        queues = [control.queue(run) for _ in range(consumers)]

        def work(index: int) -> None:
            if index == consumers:
                dispatcher.run()
                return
            while queues[index].take() is not None:
                queues[index].consumed()

        return number / in_threads(consumers + 1, work)

    number = max(200, round(seconds * rate(200, f"try {consumers}")))
    keys = control.store.num_keys()
    return {
        "consumers": consumers,
        "seqs": number,
        "per_second": round(rate(number, f"run {consumers}")),
        "keys_left": control.store.num_keys() - keys,
    }


# ---- simulated

MANY = 8  # keys of one multi_get that take the server as long as an operation (measured: 4 to 8)

Process = Generator[Any, Any, None]


@dataclass(frozen=True)
class Network:
    """Seconds of a store operation: at the server, and on the way there and back."""

    operation: float
    local: float  # round trip on the store's machine
    remote: float


class Simulation:
    """Processes are generators; each yields what it waits for and is sent the result.

    Operations reach the one server in the order they are issued, so that their effect can be worked
    out at once; what takes time is the reply.
    """

    def __init__(self, network: Network) -> None:
        self.network, self.now, self.operations = network, 0.0, {"work": 0, "health": 0}
        self._heap: list[tuple[float, int, Process, Any]] = []
        self._order = itertools.count()
        self._free = 0.0  # when the server has done all it was asked
        self._counters: dict[str, int] = {}
        self._set: dict[str, float] = {}  # key -> when it was set
        self._blocked: dict[str, tuple[Process, float]] = {}

    def start(self, process: Process, at: float = 0.0) -> None:
        self.wake(process, at)

    def wake(self, process: Process, at: float, value: Any = None) -> None:
        heapq.heappush(self._heap, (at, next(self._order), process, value))

    def run(self, until: Callable[[], bool], limit: float) -> None:
        while self._heap and not until() and self.now < limit:
            self.now, _, process, value = heapq.heappop(self._heap)
            try:
                wanted = process.send(value)
            except StopIteration:
                continue
            if isinstance(wanted, float):
                self.wake(process, self.now + wanted)
            else:
                wanted(process)

    def serve(self, kind: str, trip: float, number: int = 1) -> float:
        """When the server has done the operation."""
        self.operations[kind] += number
        self._free = max(self._free, self.now + trip / 2) + number * self.network.operation
        return self._free

    # what processes yield: functions that will wake them

    def add(self, key: str, trip: float) -> Callable[[Process], None]:
        def act(process: Process) -> None:
            value = self._counters.get(key, 0)
            self._counters[key] = value + 1
            self.wake(process, self.serve("work", trip) + trip / 2, value)

        return act

    def call(self, trip: float, number: int = 1, kind: str = "work") -> Callable[[Process], None]:
        """`number` operations after each other whose results do not matter."""

        def act(process: Process) -> None:
            for _ in range(number - 1):
                self.serve(kind, trip)
            self.wake(process, self.serve(kind, trip) + trip / 2 + (number - 1) * trip)

        return act

    def set(self, key: str, trip: float) -> None:
        """Sent without a reply."""
        done = self._set[key] = self.serve("work", trip)
        if key in self._blocked:
            process, way = self._blocked.pop(key)
            self.wake(process, done + way / 2, True)

    def wait_key(self, key: str, trip: float) -> Process:
        """Wait for at most a second at a time, then get and delete."""
        while True:
            came = yield functools.partial(self._wait, key, trip)
            if came:
                break
            self.serve("health", trip)  # the wait is called off
        del self._set[key]
        yield self.call(trip, 2)

    def _wait(self, key: str, trip: float, process: Process) -> None:
        done = self.serve("work", trip)
        if key in self._set:
            self.wake(process, max(done, self._set[key]) + trip / 2, True)
            return
        entry = self._blocked[key] = (process, trip)
        self.start(self._give_up(key, entry), self.now + 1.0)

    def _give_up(self, key: str, entry: tuple[Process, float]) -> Process:
        if self._blocked.get(key) is entry:
            del self._blocked[key]
            self.wake(entry[0], self.now, False)
        return
        yield


class Semaphore:
    """Room, or items; who waits is served in order."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        self._simulation, self._number, self._waiting = simulation, number, []

    def acquire(self, process: Process) -> None:
        if self._number:
            self._number -= 1
            self._simulation.wake(process, self._simulation.now)
        else:
            self._waiting.append(process)

    def release(self) -> None:
        if self._waiting:
            self._simulation.wake(self._waiting.pop(0), self._simulation.now)
        else:
            self._number += 1


@dataclass
class Job:
    """A simulated job: T targets and D drafters. Times are of each seq, in seconds."""

    simulation: Simulation
    num_targets: int
    slots: list[tuple[tuple[int, ...], ...]]  # of each step, of each drafter: its seqs
    target_seconds: np.ndarray
    drafter_seconds: np.ndarray
    credit: int
    transfer: float = 0.0  # of a message
    tick: float | None = None  # of the health threads; None without them
    slowness: float = 1.0  # of the first target

    def __post_init__(self) -> None:
        self.num_steps, self.num_drafters = len(self.slots), len(self.slots[0])
        self.end = len(self.target_seconds)
        self.drafter_of = {
            seq: drafter for step in self.slots for drafter, seqs in enumerate(step) for seq in seqs
        }
        self.step_ends: list[float] = []
        self.arrived: list[set[int]] = [set() for _ in range(self.num_drafters)]
        self.wanted: dict[int, Process] = {}
        self.inbox: dict[tuple[int, int], int] = {}  # what the values of the inbox keys say
        self._at_barrier: list[Process] = []

    # the store's machine holds the dispatcher and the first 8 ranks

    def trip(self, rank: int) -> float:
        return self.simulation.network.local if rank < 8 else self.simulation.network.remote

    def run(self, limit: float = 1e9) -> list[float]:
        """When each step ended; fewer than all where `limit` simulated seconds were too few."""
        simulation, world = self.simulation, self.num_drafters + self.num_targets
        simulation.start(self.dispatcher())
        for drafter in range(self.num_drafters):
            simulation.start(self.receiver(drafter))
            simulation.start(self.drafter(drafter))
        for target in range(self.num_drafters, world):
            self.start_target(target)
        for rank in range(world) if self.tick else ():
            simulation.start(self.health(rank, world), rank / world)
        simulation.run(lambda: len(self.step_ends) == self.num_steps, limit)
        return self.step_ends

    def slowest(self, step: int) -> float:
        """Seconds of the drafter with the most work in this step."""
        return max(float(self.drafter_seconds[list(seqs)].sum()) for seqs in self.slots[step])

    # ---- what the ranks do; compare cluster/ and train/

    def dispatcher(self) -> Process:
        for ticket in range(self.end):
            if ticket >= self.credit:
                yield from self.simulation.wait_key(f"c{ticket - self.credit}", self.trip(0))
            self.simulation.set(f"w{ticket}", self.trip(0))

    def start_target(self, rank: int) -> None:
        """Prefetcher, main thread and sender, with one seq prepared ahead and two unsent."""
        simulation, trip = self.simulation, self.trip(rank)
        asked, prepared = Semaphore(simulation, 1), Semaphore(simulation, 0)
        room, unsent = Semaphore(simulation, 2), Semaphore(simulation, 0)
        taken: list[int] = []
        computed: list[int] = []
        slowness = self.slowness if rank == self.num_drafters else 1.0

        def prefetch() -> Process:
            while True:
                yield asked.acquire
                ticket = yield simulation.add("taken", trip)
                if ticket >= self.end:
                    return
                yield from simulation.wait_key(f"w{ticket}", trip)
                taken.append(ticket)
                prepared.release()

        def forward() -> Process:
            while True:
                yield prepared.acquire
                seq = taken.pop(0)
                asked.release()
                yield slowness * float(self.target_seconds[seq])
                yield room.acquire
                computed.append(seq)
                unsent.release()

        def send() -> Process:
            while True:
                yield unsent.acquire
                seq = computed.pop(0)
                drafter = self.drafter_of[seq]
                place = yield simulation.add(f"size{drafter}", trip)
                self.inbox[(drafter, place)] = seq
                simulation.set(f"i{drafter}/{place}", trip)
                yield from simulation.wait_key(f"g{seq}", trip)
                yield self.transfer
                room.release()

        for process in (prefetch(), forward(), send()):
            simulation.start(process)

    def receiver(self, drafter: int) -> Process:
        trip = self.trip(drafter)
        for place in range(sum(len(step[drafter]) for step in self.slots)):
            yield from self.simulation.wait_key(f"i{drafter}/{place}", trip)
            seq = self.inbox.pop((drafter, place))
            self.simulation.set(f"g{seq}", trip)
            yield self.transfer
            self.arrived[drafter].add(seq)
            if seq in self.wanted:
                self.simulation.wake(self.wanted.pop(seq), self.simulation.now)

    def drafter(self, drafter: int) -> Process:
        trip = self.trip(drafter)
        for step in self.slots:
            for seq in step[drafter]:
                if seq not in self.arrived[drafter]:
                    yield functools.partial(self.wanted.__setitem__, seq)
                self.arrived[drafter].remove(seq)
                yield float(self.drafter_seconds[seq])
                index = yield self.simulation.add("consumed", trip)
                self.simulation.set(f"c{index}", trip)
            yield self._meet

    def _meet(self, process: Process) -> None:
        """The all-reduce at the end of a step."""
        self._at_barrier.append(process)
        if len(self._at_barrier) == self.num_drafters:
            self.step_ends.append(self.simulation.now)
            for each in self._at_barrier:
                self.simulation.wake(each, self.simulation.now)
            self._at_barrier = []

    def health(self, rank: int, world: int) -> Process:
        """A look at the halt key each tick; each second a sign of life and a look at rank 0's.
        Rank 0 looks at everybody's in one request, which keeps the server as long as many."""
        assert self.tick is not None
        trip, last = self.trip(rank), 0.0
        while True:
            yield self.tick
            yield self.simulation.call(trip, 1, "health")
            if self.simulation.now - last >= 1.0:
                last = self.simulation.now
                self.simulation.serve("health", trip)
                if rank == 0:
                    self.simulation.serve("health", trip, world // MANY)
                yield self.simulation.call(trip, 1, "health")


def simulate(
    ranks: int,
    network: Network,
    *,
    steps: int,
    transfer: float,
    tick: float | None,
    credit: int | None,
    limit: float = 60.0,
) -> dict[str, Any]:
    """A job of so many ranks, a quarter of them drafters; jitter 0.3 of targets, 0.03 of drafters
    (planned costs are even within a step)."""
    drafters, accumulation, sigma, draw = ranks // 4, 4, 0.3, np.random.default_rng(0)
    targets, window = ranks - drafters, drafters * accumulation
    number = steps * window
    drafter_mean = drafters / targets / 1.1
    job = Job(
        Simulation(network),
        targets,
        [
            tuple(
                tuple(range(step * window + d, (step + 1) * window, drafters))
                for d in range(drafters)
            )
            for step in range(steps)
        ],
        draw.lognormal(-(sigma**2) / 2, sigma, number),
        drafter_mean * draw.normal(1, 0.03, number).clip(0.5),
        credit or queue_depth(PipelineConfig(), window, targets),
        transfer,
        tick,
    )
    began, ends = time.perf_counter(), job.run(limit)
    operations, now = job.simulation.operations, job.simulation.now
    busy = sum(operations.values()) * network.operation / now
    facts: dict[str, Any] = {
        "ranks": ranks,
        "targets": targets,
        "credit": job.credit,
        "health": bool(tick),
        "steps": len(ends),
        "per_second": 0.0,
        "share": 0.0,
        "work_ops": round(operations["work"] / now),
        "health_ops": round(operations["health"] / now),
        "server_busy": round(busy, 3),
        "simulated_in": round(time.perf_counter() - began, 1),
    }
    first, last = len(ends) // 3, len(ends) - 2  # until the first rush has passed
    if last > first:
        slowest = sum(job.slowest(step) for step in range(first, last))
        counted = (last - first) * window
        mean = job.target_seconds[first * window : last * window].mean()
        rate = counted / (ends[last - 1] - ends[first - 1])
        share = rate / min(targets / mean, counted / slowest)
        facts |= {"per_second": round(rate, 1), "share": round(float(share), 3)}
    return facts


# ---- the tables


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few consumers, 512 ranks")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--network-us", type=float, default=100.0, help="round trip between hosts")
    parser.add_argument("--transfer-ms", type=float, default=5.0, help="of one message")
    parser.add_argument("--tick", type=float, default=0.25, help="seconds between health's looks")
    parser.add_argument("--steps", type=int, default=24, help="simulated optimizer steps")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    show = functools.partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)

    def table(columns: tuple[str, ...], rows: Any) -> list[dict[str, Any]]:
        show("".join(f"{name:>13}" for name in columns))
        shown = []
        for row in rows:
            shown.append(row)
            show("".join(f"{row[name]!s:>13}" for name in columns))
        return shown

    control = Control()
    trip, operation = measure_store(control)
    show(f"store: round trip {1e6 * trip:.0f} us, {1 / operation:,.0f} operations a second")
    consumers = (1, 16) if options.quick else (1, 4, 16, 64)
    seconds = 1.0 if options.quick else options.seconds
    measured = table(
        ("consumers", "seqs", "per_second", "keys_left"),
        (measure_queue(control, number, seconds) for number in consumers),
    )
    network = Network(operation, trip, trip + 1e-6 * options.network_us)
    simulated = table(
        ("ranks", "targets", "credit", "health", "steps", "per_second", "share", "work_ops",
         "health_ops", "server_busy", "simulated_in"),
        (
            simulate(ranks, network, steps=options.steps, transfer=1e-3 * options.transfer_ms,
                     tick=tick, credit=credit)
            for ranks in ((512,) if options.quick else (512, 4096))
            # the default credit of 2W; and one that adds what 3 targets to a drafter hold, 2 each
            for credit, tick in ((None, None), (2 * ranks + 2 * (ranks - ranks // 4), None),
                                 (2 * ranks + 2 * (ranks - ranks // 4), options.tick))
        ),
    )  # fmt: skip
    if options.json:
        store = {"round_trip_us": 1e6 * trip, "operations_per_second": 1 / operation}
        print(json.dumps({"store": store, "measured": measured, "simulated": simulated}))


if __name__ == "__main__":
    main()
