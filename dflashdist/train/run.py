"""One rank of a training job, from the command line to the end: check, join, work, leave."""

import json
import logging
from dataclasses import asdict
from pathlib import Path

from dflashdist.cluster.health import Halted
from dflashdist.cluster.roles import DRAFTER, roles_table
from dflashdist.cluster.trace import Trace
from dflashdist.cluster.world import Place, World, choose_device
from dflashdist.config import Config, InputError, dump_config
from dflashdist.files import hold, whole_file
from dflashdist.train.blueprint import Blueprint, check_first_weights, check_tokenizer, versions
from dflashdist.train.checkpoint import damage
from dflashdist.train.metrics import ConsoleHandler

log = logging.getLogger(__name__)


def train_rank(config: Config) -> None:
    """Run this rank of the job to its end.

    Raises InputError for what is refused, Halted when the job was ended by a failure.
    """
    place = Place.from_environment()
    blueprint = Blueprint(config, place)
    if place.rank == 0:
        check_tokenizer(blueprint)
        check_first_weights(blueprint)
    device = choose_device(config.train.device, place)
    lock = None
    try:
        (blueprint.folder / "logs").mkdir(parents=True, exist_ok=True)
        open_log(blueprint.folder / "logs", place.rank)
        if place.rank == 0:
            doing = "trains in it; wait for its end, or take another run.dir"
            lock = hold(blueprint.folder / ".lock", f"run.dir={blueprint.folder}", doing)
    except OSError as error:
        raise InputError(f"run.dir={config.run.dir}: cannot be written ({error})") from error
    advice = f"; details in {blueprint.folder}/logs/; train.resume=auto goes on where it was saved"
    world = World(place, blueprint.roles, device, config.pipeline, advice=advice)
    try:
        with world.health.guard():
            work(blueprint, world)
    except Halted:
        world.linger()
        raise
    world.close()
    if lock:
        lock.close()


def begin_whole(blueprint: Blueprint) -> tuple[Blueprint, dict[str, str]]:
    """The blueprint that begins from the newest checkpoint whose files, all read, are as they were
    saved; and what is wrong with newer ones, by path."""
    damaged: dict[str, str] = {}
    while blueprint.resume and (found := damage(blueprint.resume, contents=True)):
        damaged[str(blueprint.resume)] = found
        blueprint = Blueprint(blueprint.config, blueprint.place, damaged)
    return blueprint, damaged


def work(blueprint: Blueprint, world: World) -> None:
    """What this rank does once it has joined."""
    if world.rank == 0:  # which alone reads the checkpoint through; the others take its word
        world.health.phase("read the checkpoint")
        blueprint, damaged = begin_whole(blueprint)
        world.store.set("damaged", json.dumps(damaged))
    elif damaged := json.loads(world.health.wait_key(world.store, "damaged")):
        blueprint = Blueprint(blueprint.config, blueprint.place, damaged)
    world.agree(blueprint.agreement())
    if world.rank == 0:
        announce(blueprint, world)
    path = blueprint.folder / "logs" / f"trace_rank{world.rank}.jsonl"
    trace = Trace(path if blueprint.config.pipeline.trace else None)
    trace("start", step=blueprint.first_step)
    if world.role == DRAFTER:
        from dflashdist.train.drafter_rank import run_drafter_rank

        run_drafter_rank(blueprint, world, trace)
    else:  # imports transformers, which drafters never need
        from dflashdist.train.target_rank import run_target_rank

        run_target_rank(blueprint, world, trace)
    world.health.wait_end()


def announce(blueprint: Blueprint, world: World) -> None:
    """Rank 0 says who does what, and writes the resolved configuration and the plan's facts."""
    config, steps, plan = blueprint.config, blueprint.steps, blueprint.plan
    print(roles_table(world.members))
    print(
        f"{plan.num_rows:,} rows, {plan.micro_batches_per_epoch:,} micro-batches an epoch in "
        f"{plan.num_buckets} buckets; {steps.num_steps:,} steps of {steps.window} "
        f"({steps.num_drafters} drafters x {steps.accumulation}); plan {plan.fingerprint[:12]}"
    )
    if blueprint.stream.rounds:
        print(
            f"evaluation every {config.evaluate.every} steps on "
            f"{blueprint.stream.rounds.plan.num_rows:,} held-out rows in "
            f"{blueprint.stream.round_size:,} micro-batches"
        )
    if blueprint.resume:
        print(f"resuming after step {blueprint.first_step} from {blueprint.resume}")
        for change in blueprint.changes:
            print(f"  with another {change}")
    elif config.drafter.init_from:
        print(f"the first weights are those of {config.drafter.init_from}")
    if blueprint.first_step >= steps.num_steps:
        print(f"step {blueprint.first_step:,} was the last: nothing is left to train")
    for text in blueprint.checkpoints.passed_over:
        log.warning("checkpoint passed over: %s", text)
    for note in blueprint.notes:
        print(f"NOTE: {note}")
    print(f"run folder {blueprint.folder}", flush=True)
    with whole_file(blueprint.folder / "config.yaml") as file:
        file.write(dump_config(config))
    facts = blueprint.facts() | {
        "members": [asdict(member) for member in world.members],
        "micro_batches_per_epoch": plan.micro_batches_per_epoch,
        "num_steps": steps.num_steps,
        "versions": versions(),
    }
    with whole_file(blueprint.folder / "plan.json") as file:
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
