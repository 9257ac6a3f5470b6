"""A drafter rank, put together: load the frozen ends, build the drafter, train, save, report."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from dflashdist.cluster.dispatcher import Dispatcher
from dflashdist.cluster.health import Health
from dflashdist.cluster.roles import COLOCATED
from dflashdist.cluster.trace import Trace
from dflashdist.cluster.transport import PointToPoint, Receiver
from dflashdist.cluster.workqueue import WorkQueue
from dflashdist.cluster.world import World
from dflashdist.model.blocks import slot_weights
from dflashdist.model.drafter import Drafter, num_drafts
from dflashdist.model.initial import initialise
from dflashdist.model.loss import DrafterBatch, DrafterLoss
from dflashdist.model.target_files import TargetTensors
from dflashdist.train.after_step import AfterStep
from dflashdist.train.blueprint import Blueprint, target_dtype
from dflashdist.train.checkpoint import load_training
from dflashdist.train.drafter_loop import Job, TrainState, train
from dflashdist.train.evaluation import AVERAGED, RAW, Evaluator
from dflashdist.train.metrics import Clock
from dflashdist.train.optim import WeightAverage, build_optimizer, loss_scale
from dflashdist.train.sources import Batches, ComputedStates, ReceivedStates, StateSource


class Gradients:
    """DDP's own all-reduce, and the moment it begins: from then on this rank waits for others."""

    def __init__(self, group: dist.ProcessGroup, health: Health, clock: Clock) -> None:
        self._group, self._health, self._clock, self._began = group, health, clock, 0.0

    def hook(self, _state: None, bucket: dist.GradBucket) -> Future[Tensor]:
        if bucket.is_last():
            self._health.phase("wait for the other drafters")
            self._began = time.perf_counter()
        return allreduce_hook(self._group, bucket)

    def done(self) -> None:
        """The backward pass with the all-reduce has ended."""
        self._clock.transfer += time.perf_counter() - self._began


def run_drafter_rank(blueprint: Blueprint, world: World, trace: Trace) -> None:
    """A drafter: train to the end of the plan, or until all stop. Rank 0 also leads."""
    config, health, shape = blueprint.config, world.health, blueprint.shape
    health.phase("load the drafter")
    assert config.target.path is not None
    frozen = TargetTensors.load(
        config.target.path,
        revision=config.target.revision,
        dtype=target_dtype(config.target.dtype, world.device),
        device=world.device,
    )
    drafter = Drafter(shape)
    if not blueprint.resume:
        initialise(
            drafter,
            config.drafter,
            config.target.path,
            config.target.revision,
            seed=config.seed,
            final_norm=frozen.final_norm.float().cpu(),
        )
    drafter.to(world.device)
    optimizer = build_optimizer(config.optim, drafter)
    average = None
    if config.optim.ema is not None:
        average = WeightAverage(drafter, config.optim.ema)
    if blueprint.resume:
        load_training(blueprint.resume, drafter, optimizer, world.device, average)
    saved = blueprint.saved
    state = TrainState(
        step=blueprint.first_step,
        skipped=saved.get("skipped", 0),
        bad_in_a_row=saved.get("bad_in_a_row", 0),
        evaluated=saved.get("evaluated", 0),
        best=blueprint.best,
    )
    clock = Clock()
    gradients = Gradients(world.drafters, health, clock)
    model = data_parallel(DrafterLoss(drafter, frozen, shape, config.loss), world, gradients)
    source, lead = connect(blueprint, world, trace)
    # Positions from a block's anchor to its last draft: the block's size, but one more for DSpark.
    span = num_drafts(shape) + 1
    weight_per_anchor = float(
        slot_weights(span, weights=config.loss.weights, gamma=config.loss.gamma).sum()
    )
    job = Job(
        model=model,
        optimizer=optimizer,
        source=source,
        plan=blueprint.plan,
        steps=blueprint.steps,
        drafter=world.rank,
        group=world.drafters,
        device=world.device,
        health=health,
        clock=clock,
        block_size=span,
        empty_batch=lambda: empty_batch(
            shape.num_features * shape.hidden_size, world.device, frozen
        ),
        optim=config.optim,
        loss_scale=loss_scale(blueprint.anchors_per_window, weight_per_anchor),
        max_bad_steps=config.train.max_bad_steps,
        average=average,
        autocast=world.device.type == "cuda",
        on_reduced=gradients.done,
    )
    if trace.enabled:
        job.on_slot = lambda step, seq: trace(
            "slot", step=step, seq=seq, rows=blueprint.plan.micro_batch(seq).rows.tolist()
        )
    evaluator = None
    if blueprint.stream.rounds:
        drafters = {RAW: drafter} | ({AVERAGED: average.drafter} if average else {})
        evaluator = Evaluator(
            blueprint.stream,
            source,
            frozen,
            drafters,
            drafter=world.rank,
            group=world.drafters,
            device=world.device,
            health=health,
            trace=trace,
            max_new_tokens=config.evaluate.max_new_tokens,
            autocast=job.autocast,
        )
    after = AfterStep(blueprint, world, drafter, evaluator, lead)
    after.start(job, state)
    train(job, state, after)
    health.phase("wait for the other drafters")
    if world.rank == 0:  # the end is called when no drafter waits for anything any more
        after.close()
        world.wait_count("drafters_done", blueprint.roles.num_drafters - 1)
        health.finish(f"training ended after step {state.step}")
    else:
        world.store.add("drafters_done", 1)


def data_parallel(loss: nn.Module, world: World, gradients: Gradients) -> DistributedDataParallel:
    """DDP over the drafters. `static_graph` stays off: it breaks with a first `no_sync`."""
    model = DistributedDataParallel(
        loss,
        process_group=world.drafters,
        gradient_as_bucket_view=True,
    )
    model.register_comm_hook(None, gradients.hook)
    return model


def connect(
    blueprint: Blueprint, world: World, trace: Trace
) -> tuple[StateSource, tuple[Dispatcher, WorkQueue] | None]:
    """The source of hidden states, and on rank 0 of a split job the dispatcher, started."""
    config, health, roles = blueprint.config, world.health, blueprint.roles
    batches = Batches(
        blueprint.rows,
        seed=config.seed,
        num_anchors=config.drafter.num_anchors,
        block_size=blueprint.shape.block_size,
        features=blueprint.shape.num_features * blueprint.shape.hidden_size,
        variable_prefix=config.loss.variable_prefix,
        device=world.device,
    )
    if roles.layout == COLOCATED:
        from dflashdist.train.target_rank import load_target  # imports transformers

        source = ComputedStates(batches, load_target(blueprint, world.device, health))
        world.barrier("ready")
        return source, None
    assert world.data is not None
    world.barrier("ready")
    dtype = target_dtype(config.target.dtype, world.device)
    receiver = Receiver(
        PointToPoint(world.data, world.device, trace),
        world.clone_store(),
        health,
        roles,
        rank=world.rank,
        spec_of=lambda seq: blueprint.spec_of(seq, dtype),
        num_messages=blueprint.num_messages(world.rank),
        device=world.device,
    )
    source = ReceivedStates(batches, receiver, WorkQueue(world.clone_store(), health), trace)
    if world.rank != 0:
        return source, None
    dispatcher = Dispatcher(
        WorkQueue(world.clone_store(), health),
        seqs=blueprint.seqs(),
        credit=blueprint.depth,
        num_takers=roles.num_targets,
        on_publish=lambda seq: trace("publish", seq=seq),
    )
    health.thread("dispatcher", dispatcher.run)
    return source, (dispatcher, WorkQueue(world.clone_store(), health))


def empty_batch(features: int, device: torch.device, frozen: TargetTensors) -> DrafterBatch:
    """A batch with one dropped block: no loss, yet connected to every parameter."""

    def zeros(*shape: int, dtype: Any) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    return DrafterBatch(
        ids=zeros(1, 2, dtype=torch.int64),
        loss_mask=zeros(1, 2, dtype=torch.bool),
        hidden=zeros(1, 2, features, dtype=frozen.embedding.dtype),
        anchors=zeros(1, 1, dtype=torch.int64),
        keep=zeros(1, 1, dtype=torch.bool),
        lengths=zeros(1, dtype=torch.int64) + 2,
    )
