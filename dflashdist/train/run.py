"""One rank of a training job, from the command line to the end: check, join, work, leave."""

import json
import logging
from dataclasses import asdict
from pathlib import Path

from dflashdist.cluster.health import Halted
from dflashdist.cluster.roles import DRAFTER, roles_table
from dflashdist.cluster.workqueue import Trace
from dflashdist.cluster.world import Place, World, choose_device
from dflashdist.config import Config, InputError, dump_config
from dflashdist.files import hold, whole_file
from dflashdist.model.initial import check_initial
from dflashdist.train.job import TrainingJob, check_tokens
from dflashdist.train.metrics import ConsoleHandler
from dflashdist.train.resume import Start, begin_whole, versions

log = logging.getLogger(__name__)


def train_rank(config: Config) -> None:
    """Run this rank of the job to its end.

    Raises InputError for what is refused, Halted when the job was ended by a failure.
    """
    place = Place.from_environment()
    job = TrainingJob(config, place.world_size)
    start = Start(job, place)
    if place.rank == 0:
        check_tokens(job)
        if start.checkpoint is None:
            check_first_weights(job)
    device = choose_device(config.train.device, place)
    lock = None
    try:
        (start.folder / "logs").mkdir(parents=True, exist_ok=True)
        open_log(start.folder / "logs", place.rank)
        if place.rank == 0:
            doing = "trains in it; wait for its end, or take another run.dir"
            lock = hold(start.folder / ".lock", f"run.dir={start.folder}", doing)
    except OSError as error:
        raise InputError(f"run.dir={config.run.dir}: cannot be written ({error})") from error
    advice = f"; details in {start.folder}/logs/; train.resume=auto goes on where it was saved"
    world = World(place, job.roles, device, config.pipeline, advice=advice)
    try:
        with world.health.guard():
            work(start, world)
    except Halted:
        world.linger()
        raise
    world.close()
    if lock:
        lock.close()


def check_first_weights(job: TrainingJob) -> None:
    """Hold that the first weights will fit. Raises InputError."""
    target = job.config.target
    check_initial(job.shape, job.config.drafter, str(target.path), target.revision)


def work(start: Start, world: World) -> None:
    """What this rank does once it has joined."""
    if world.rank == 0:  # which alone reads the checkpoint through; the others take its word
        world.health.phase("read the checkpoint")
        start, damaged = begin_whole(start)
        world.store.set("damaged", json.dumps(damaged))
    elif damaged := json.loads(world.health.wait_key(world.store, "damaged")):
        start = Start(start.job, start.place, damaged)
    world.agree(start.agreement())
    if world.rank == 0:
        announce(start, world)
    path = start.folder / "logs" / f"trace_rank{world.rank}.jsonl"
    trace = Trace(path if start.job.config.pipeline.trace else None)
    trace("start", step=start.step)
    if world.role == DRAFTER:
        from dflashdist.train.drafter_rank import run_drafter_rank

        run_drafter_rank(start, world, trace)
    else:  # imports transformers, which drafters never need
        from dflashdist.train.target_rank import run_target_rank

        run_target_rank(start, world, trace)
    world.health.wait_end()


def announce(start: Start, world: World) -> None:
    """Rank 0 says who does what, and writes the resolved configuration and the plan's facts."""
    job = start.job
    config, steps, plan = job.config, job.steps, job.plan
    print(roles_table(world.members))
    print(
        f"{plan.num_rows:,} rows, {plan.micro_batches_per_epoch:,} micro-batches an epoch in "
        f"{plan.num_buckets} buckets; {steps.num_steps:,} steps of {steps.window} "
        f"({steps.num_drafters} drafters x {steps.accumulation}); plan {plan.fingerprint[:12]}"
    )
    if job.stream.rounds:
        print(
            f"evaluation every {config.evaluate.every} steps on "
            f"{job.stream.rounds.plan.num_rows:,} held-out rows in "
            f"{job.stream.round_size:,} micro-batches"
        )
    if start.checkpoint:
        print(f"resuming after step {start.step} from {start.checkpoint}")
        for change in start.changes:
            print(f"  with another {change}")
    elif config.drafter.init_from:
        print(f"the first weights are those of {config.drafter.init_from}")
    if start.step >= steps.num_steps:
        print(f"step {start.step:,} was the last: nothing is left to train")
    for text in start.checkpoints.passed_over:
        log.warning("checkpoint passed over: %s", text)
    for note in [*job.notes, *start.notes]:
        print(f"NOTE: {note}")
    print(f"run folder {start.folder}", flush=True)
    with whole_file(start.folder / "config.yaml") as file:
        file.write(dump_config(config))
    facts = start.facts() | {
        "members": [asdict(member) for member in world.members],
        "micro_batches_per_epoch": plan.micro_batches_per_epoch,
        "num_steps": steps.num_steps,
        "versions": versions(),
    }
    with whole_file(start.folder / "plan.json") as file:
        json.dump(facts, file, indent=1)


def open_log(folder: Path, rank: int) -> None:
    """All of this rank's log in a file; warnings of rank 0 on the console too."""
    form = f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s"
    handlers: list[logging.Handler] = [logging.FileHandler(folder / f"rank{rank}.log")]
    handlers[0].setFormatter(logging.Formatter(form))
    if rank == 0:
        handlers.append(ConsoleHandler())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(logging.INFO)
