"""What the pipeline costs: real dispatcher, queue, transport and DDP around simulated compute.

    python tests/bench/pipeline.py [--quick] [--json] [--only 2x2] [--rate 12] [--seconds 20]

Each rank sleeps where it would compute. A micro-batch's seconds follow its planned cost (log-normal
row lengths) times log-normal jitter drawn from its seq, so runs compare. Both roles have about the
same rate, which is the hard case: the drafters could do 10 % more.

`share` is the throughput over min(sum of target rates, sum of drafter rates), both as the sleeps
came out, so that a busy machine's late wake-ups do not count as the pipeline's. A step ends when
its slowest drafter does, and a credit bounds how far targets run ahead, so a part is lost whatever
the code does: share = barrier x credit_share x code. `barrier` is what the slowest drafters of each
step leave; `credit_share` what a simulation of the protocol without any latency then reaches with
the same times; `code` what the real one reaches of that. `busy` is the targets' part of the time
spent computing. The first two steps and the last two are not counted.

A fixed cost of a micro-batch or a step weighs more the shorter they are: at the default rate a step
of 2x2 takes 0.7 s, where real ones take seconds; `--rate 40 --seconds 11` shows the fixed cost.
"""

import argparse
import functools
import json
import multiprocessing
import os
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import numpy as np
from dispatch import Job, Network, Simulation

from dflashdist.config import OptimConfig, PipelineConfig, ScheduleConfig, queue_depth
from dflashdist.schedule.plan import Plan
from dflashdist.schedule.stream import Steps

ACCUMULATION, HEADROOM, SLOW = 4, 1.1, 2.0
BLOCK_SIZE, FEATURES = 4, 8  # of a tiny model; a message is 32 bytes a token, about 200 kB
SKIP = 2  # steps at either end


@dataclass(frozen=True)
class Case:
    """One run. `rate` is what all targets together could do, in micro-batches a second."""

    targets: int
    drafters: int
    jitter: float
    slow: bool  # the first target takes twice as long
    rate: float
    seconds: float
    credit: str = "auto"

    @property
    def name(self) -> str:
        return f"{self.targets}x{self.drafters}"


@dataclass
class Done:
    """What one rank did: when it computed which seq, and on rank 0 when each step ended."""

    rank: int
    computed: dict[int, tuple[float, float]] = field(default_factory=dict)
    step_ends: list[float] = field(default_factory=list)


class Work:
    """The plan of a case and how long each role takes for a micro-batch; a pure function of it."""

    def __init__(self, case: Case) -> None:
        draw = np.random.default_rng(0).lognormal(np.log(700), 1.0, 4000)
        lengths = np.clip(draw, 32, 3072).astype(np.int64)
        self.plan = Plan(
            lengths, lengths // 2, ScheduleConfig(), num_anchors=512, block_size=16, seed=0
        )
        window = case.drafters * ACCUMULATION
        num_steps = max(3 * SKIP, round(case.seconds * case.rate / window))
        self.steps = Steps(
            self.plan, num_drafters=case.drafters, accumulation=ACCUMULATION, num_steps=num_steps
        )
        self.depth = queue_depth(
            PipelineConfig(hidden_state_queue_depth=case.credit), window, case.targets
        )
        self._case, epoch = case, self.plan.epoch(0)
        self._means = {"padded_tokens": epoch.padded_tokens.mean(), "cost": epoch.cost.mean()}
        speed = case.targets - (1 - 1 / SLOW if case.slow else 0)
        self._per_target = speed / case.rate
        self._per_drafter = case.drafters / case.rate / HEADROOM

    def target_seconds(self, seq: int) -> float:
        """Without the slowness of a slow target."""
        return self._per_target * self._load(seq, "padded_tokens") * self._jitter(seq, 0)

    def drafter_seconds(self, seq: int) -> float:
        return self._per_drafter * self._load(seq, "cost") * self._jitter(seq, 1)

    def _load(self, seq: int, column: str) -> float:
        return self.plan.column(column, range(seq, seq + 1))[0] / self._means[column]

    def _jitter(self, seq: int, role: int) -> float:
        """Log-normal with mean 1."""
        sigma = self._case.jitter
        return float(np.exp(sigma * np.random.default_rng((seq, role)).normal() - sigma**2 / 2))


# ---- a rank


def run_rank(case: Case) -> Done:
    """Join, work as target or drafter, leave."""
    import torch

    from dflashdist.cluster.roles import DRAFTER, SPLIT, Roles
    from dflashdist.cluster.transport import MessageSpec, PointToPoint
    from dflashdist.cluster.workqueue import Trace
    from dflashdist.cluster.world import Place, World

    torch.set_num_threads(1)
    roles = Roles(SPLIT, case.targets, case.drafters)
    pipeline = PipelineConfig(silence_seconds=60, stall_seconds=60)
    world = World(Place.from_environment(), roles, torch.device("cpu"), pipeline)
    work = Work(case)

    def spec_of(seq: int) -> MessageSpec:
        tokens = work.plan.micro_batch(seq).num_tokens
        return MessageSpec(seq, tokens, 1, FEATURES, torch.float32)

    assert world.data is not None
    link = PointToPoint(world.data, torch.device("cpu"), Trace(None))
    role = be_drafter if world.role == DRAFTER else be_target
    with world.health.guard():
        done = role(case, work, world, link, spec_of)
    world.close()
    return done


def be_target(case: Case, work: Work, world: Any, link: Any, spec_of: Any) -> Done:
    import torch

    from dflashdist.cluster.transport import Sender
    from dflashdist.cluster.workqueue import WorkQueue
    from dflashdist.train.target_loop import TargetWork, run_target

    defaults, done = PipelineConfig(), Done(world.rank)
    factor = SLOW if case.slow and world.rank == case.drafters else 1.0
    sender = Sender(
        link, world.clone_store(), world.health, world.roles, rank=world.rank,
        drafter_of=work.steps.drafter_of, max_unsent=defaults.max_unsent,
    )  # fmt: skip

    def forward(seq: int) -> torch.Tensor:
        began = time.perf_counter()
        time.sleep(factor * work.target_seconds(seq))
        done.computed[seq] = began, time.perf_counter()
        return torch.zeros(spec_of(seq).tokens, FEATURES)

    run_target(
        TargetWork(), world.health, WorkQueue(world.clone_store(), world.health), sender,
        prepare=lambda seq: seq, forward=forward, spec_of=spec_of, prefetch=defaults.prefetch,
    )  # fmt: skip
    return done


class ReceivedSeqs:
    """A source for the drafter loop: waits for the real message, and gives its seq to the model."""

    def __init__(self, receiver: Any, work_queue: Any) -> None:
        self._receiver, self._queue = receiver, work_queue

    def hidden_states(self, seq: int) -> int:
        self._receiver.get(seq)
        self._queue.consumed()
        return seq


def be_drafter(case: Case, work: Work, world: Any, link: Any, spec_of: Any) -> Done:
    import torch

    from dflashdist.cluster.transport import Receiver
    from dflashdist.cluster.workqueue import Dispatcher, WorkQueue
    from dflashdist.model.loss import LossSums, sums_layout
    from dflashdist.train.drafter_loop import Training, TrainState, train
    from dflashdist.train.drafter_rank import Gradients, data_parallel
    from dflashdist.train.metrics import Clock

    done, clock, health = Done(world.rank), Clock(), world.health

    class Sleeper(torch.nn.Module):
        """Sleeps for a drafter's forward and backward; the gradient of a small matrix is real."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(64, 64))

        def forward(self, seq: int | None) -> tuple[torch.Tensor, torch.Tensor]:
            if seq is not None:
                began = time.perf_counter()
                time.sleep(work.drafter_seconds(seq))
                done.computed[seq] = began, time.perf_counter()
            sums = torch.zeros(LossSums.size(BLOCK_SIZE), dtype=torch.float64)
            sums[sums_layout(BLOCK_SIZE)["weight"]] = 1.0
            return self.weight.sum() * 1e-3, sums

    gradients, model = Gradients(world.drafters, health, clock), Sleeper()
    wrapped = data_parallel(model, world, gradients)
    receiver = Receiver(
        link, world.clone_store(), health, world.roles, rank=world.rank, spec_of=spec_of,
        num_messages=work.steps.num_steps * ACCUMULATION, device=torch.device("cpu"),
    )  # fmt: skip
    if world.rank == 0:
        dispatcher = Dispatcher(
            WorkQueue(world.clone_store(), health), seqs=range(work.steps.end),
            credit=work.depth, num_takers=case.targets,
        )  # fmt: skip
        health.thread("dispatcher", dispatcher.run)

    def after_step(*_: Any) -> bool:
        done.step_ends.append(time.perf_counter())
        return False

    training = Training(
        model=wrapped,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        source=ReceivedSeqs(receiver, WorkQueue(world.clone_store(), health)),  # pyright: ignore
        plan=work.plan,
        steps=work.steps,
        drafter=world.rank,
        group=world.drafters,
        device=torch.device("cpu"),
        health=health,
        block_size=BLOCK_SIZE,
        empty_batch=lambda: None,
        optim=OptimConfig(),
        loss_scale=1.0,
        max_bad_steps=1,
        clock=clock,
        on_reduced=gradients.done,
    )
    train(training, TrainState(), after_step)
    return done


# ---- the run as a whole


def _rank_main(rank: int, world: int, port: int, answers: Any, case: Case) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    answers.put(run_rank(case))


def run_case(context: Any, case: Case) -> list[Done]:
    """All ranks as processes; their answers in rank order."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world, answers = case.targets + case.drafters, context.Queue()
    processes = [
        context.Process(target=_rank_main, args=(r, world, port, answers, case), daemon=True)
        for r in range(world)
    ]
    for process in processes:
        process.start()
    try:
        done = [answers.get(timeout=60 + 3 * case.seconds) for _ in processes]
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    return sorted(done, key=lambda each: each.rank)


def evaluate(case: Case, done: list[Done]) -> dict[str, Any]:
    """Throughput between the ends of two steps, beside what the sleeps would have allowed."""
    work, ends = Work(case), done[0].step_ends
    drafters, targets = done[: case.drafters], done[case.drafters :]
    first, last = SKIP, len(ends) - SKIP  # steps [first, last) are counted
    begin, end = ends[first - 1], ends[last - 1]
    seqs = [seq for step in range(first, last) for seq in work.steps.seqs(step)]
    throughput = len(seqs) / (end - begin)

    # What a target needs more than was drawn is its own speed; which seqs it got is chance.
    drawn = np.array([work.target_seconds(seq) for seq in range(work.steps.end)])
    mean = drawn[seqs].mean()
    speeds = [
        drawn[list(each.computed)].sum() / sum(b - a for a, b in each.computed.values())
        for each in targets
    ]
    target_rate = sum(speeds) / mean
    busy = sum(
        max(0.0, min(b, end) - max(a, begin)) for t in targets for a, b in t.computed.values()
    )

    spent = {seq: b - a for drafter in drafters for seq, (a, b) in drafter.computed.items()}
    drafter_rate = case.drafters / float(np.mean([spent[seq] for seq in seqs]))
    model = Job(
        Simulation(Network(0.0, 0.0, 0.0)),
        case.targets,
        [work.steps.slots(step) for step in range(len(ends))],
        drawn / max(speeds),
        np.array([spent[seq] for seq in range(work.steps.end)]),
        work.depth,
        slowness=SLOW if case.slow else 1.0,
    )
    slowest = sum(model.slowest(step) for step in range(first, last))
    ideal, reachable = min(target_rate, drafter_rate), min(target_rate, len(seqs) / slowest)
    model_ends = model.run()
    model_rate = len(seqs) / (model_ends[last - 1] - model_ends[first - 1])
    return {
        "ranks": case.name,
        "jitter": case.jitter,
        "slow_target": case.slow,
        "credit": work.depth,
        "micro_batches": len(seqs),
        "per_second": round(throughput, 2),
        "target_rate": round(target_rate, 2),
        "drafter_rate": round(drafter_rate, 2),
        "barrier_rate": round(len(seqs) / slowest, 2),
        "share": round(throughput / ideal, 3),
        "barrier": round(reachable / ideal, 3),
        "credit_share": round(model_rate / reachable, 3),
        "code": round(throughput / model_rate, 3),
        "busy": round(busy / (end - begin) / case.targets, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2x2 at jitter 0.3 alone")
    parser.add_argument("--only", help="one layout, targets x drafters, for example 6x2")
    parser.add_argument("--credit", default="auto", help="hidden_state_queue_depth")
    parser.add_argument("--rate", type=float, default=12.0, help="micro-batches a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    layouts = [options.only] if options.only else ["2x2", "3x2", "2x4", "6x2"]
    variants = [(0.0, False), (0.3, False), (0.6, False), (0.3, True)]
    if options.quick:
        layouts, variants = layouts[:1], variants[1:2]
    cases = [
        Case(*map(int, layout.split("x")), jitter, slow, options.rate, options.seconds,
             options.credit)
        for layout in layouts
        for jitter, slow in variants
    ]  # fmt: skip
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["dflashdist.train.drafter_rank", "dflashdist.train.target_loop"]
    )
    show = functools.partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
    columns = (
        "ranks", "jitter", "slow_target", "credit", "per_second", "target_rate", "drafter_rate",
        "barrier_rate", "share", "barrier", "credit_share", "code", "busy",
    )  # fmt: skip
    show("".join(f"{name:>13}" for name in columns))
    results = []
    for case in cases:
        results.append(evaluate(case, run_case(context, case)))
        show("".join(f"{results[-1][name]!s:>13}" for name in columns))
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
