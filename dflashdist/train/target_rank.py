"""A target rank, put together: load the frozen model, serve micro-batches, leave."""

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from dflashdist.cluster.health import Halted, Health
from dflashdist.cluster.trace import Trace
from dflashdist.cluster.transport import PointToPoint, Sender
from dflashdist.cluster.workqueue import WorkQueue
from dflashdist.cluster.world import World
from dflashdist.data.shards import TokenBatch
from dflashdist.model.blocks import pack
from dflashdist.model.target import Target
from dflashdist.train.blueprint import Blueprint, target_dtype
from dflashdist.train.target_loop import TargetWork, run_target


def load_target(
    blueprint: Blueprint, device: torch.device, health: Health
) -> Callable[[TokenBatch], Tensor]:
    """The frozen target as a function: padded tokens -> states of the real ones, side by side."""
    config = blueprint.config.target
    assert config.path is not None
    health.phase("load the target")
    target = Target(
        config.path,
        blueprint.shape.target_layer_ids,
        with_last=blueprint.with_last,
        dtype=target_dtype(config.dtype, device),
        device=device,
        revision=config.revision,
        attention=config.attention,
        trust_remote_code=config.trust_remote_code,
    )
    return lambda tokens: pack(target.hidden_states(tokens.ids, tokens.lengths), tokens.lengths)


def run_target_rank(blueprint: Blueprint, world: World, trace: Trace) -> None:
    """A target: serve micro-batches until the queue ends or the run is asked to stop."""
    config, health = blueprint.config, world.health
    work = TargetWork()
    health.stats = work.reading
    dtype = target_dtype(config.target.dtype, world.device)
    forward = load_target(blueprint, world.device, health)
    assert world.data is not None
    world.barrier("ready")
    delay = config.pipeline.delay_ms / 1000
    sender = Sender(
        PointToPoint(world.data, world.device, trace),
        world.clone_store(),
        health,
        blueprint.roles,
        rank=world.rank,
        drafter_of=blueprint.stream.drafter_of,
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
            prepare=blueprint.rows.tokens,
            forward=forward,
            spec_of=lambda seq: blueprint.spec_of(seq, dtype),
            kind_of=blueprint.kind_of,
            prefetch=config.pipeline.prefetch,
            delay=delay,
        )
