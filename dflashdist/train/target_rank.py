"""A target rank, put together: load the frozen model, serve micro-batches, leave."""

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from dflashdist.cluster.health import Halted, Health
from dflashdist.cluster.transport import PointToPoint, Sender
from dflashdist.cluster.workqueue import Trace, WorkQueue
from dflashdist.cluster.world import World
from dflashdist.data.shards import TokenBatch
from dflashdist.model.blocks import pack
from dflashdist.model.target import Target
from dflashdist.train.job import TrainingJob
from dflashdist.train.resume import Start
from dflashdist.train.sources import Rows, message_specs, states_dtype_on
from dflashdist.train.target_loop import TargetWork, run_target


def load_target(
    job: TrainingJob, device: torch.device, health: Health
) -> Callable[[TokenBatch], Tensor]:
    """The frozen target as a function: padded tokens -> states of the real ones, side by side."""
    config = job.config.target
    assert config.path is not None
    health.phase("load the target")
    target = Target(
        config.path,
        job.shape.target_layer_ids,
        with_last=job.with_last,
        dtype=states_dtype_on(job, device),
        device=device,
        revision=config.revision,
        attention=config.attention,
        trust_remote_code=config.trust_remote_code,
    )
    return lambda tokens: pack(target.hidden_states(tokens.ids, tokens.lengths), tokens.lengths)


def run_target_rank(start: Start, world: World, trace: Trace) -> None:
    """A target: serve micro-batches until the queue ends or the run is asked to stop."""
    job, config, health = start.job, start.job.config, world.health
    work = TargetWork()
    health.stats = work.reading
    rows = Rows(job)
    forward = load_target(job, world.device, health)
    if job.warms_up(world.device.type):
        health.phase("warm up")
        for seq in job.widest():
            forward(rows.tokens(seq))
    assert world.data is not None
    world.barrier("ready")
    delay = config.pipeline.delay_ms / 1000
    sender = Sender(
        PointToPoint(world.data, world.device, trace),
        world.clone_store(),
        health,
        job.roles,
        rank=world.rank,
        drafter_of=job.stream.drafter_of,
        max_unsent=config.pipeline.max_unsent,
        checksum=config.pipeline.checksum,
        delay=delay,
    )
    with suppress(Halted):  # the end, or an abort: who waits for the end tells them apart
        run_target(
            work,
            health,
            WorkQueue(world.clone_store(), health),
            sender,
            prepare=rows.tokens,
            forward=forward,
            spec_of=message_specs(job, world.device),
            kind_of=job.kind_of,
            prefetch=config.pipeline.prefetch,
            delay=delay,
        )
