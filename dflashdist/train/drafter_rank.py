"""A drafter rank, put together: load the frozen ends, build the drafter, train, save, report."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from dflashdist.cluster.health import Health
from dflashdist.cluster.roles import COLOCATED
from dflashdist.cluster.transport import PointToPoint, Receiver
from dflashdist.cluster.workqueue import Dispatcher, Trace, WorkQueue
from dflashdist.cluster.world import World
from dflashdist.data.shards import TokenBatch
from dflashdist.model.blocks import slot_weights
from dflashdist.model.drafter import Drafter
from dflashdist.model.initial import initialise
from dflashdist.model.loss import DrafterBatch, DrafterLoss
from dflashdist.model.target_files import TargetTensors
from dflashdist.train.after_step import AfterStep
from dflashdist.train.checkpoint import load_training
from dflashdist.train.drafter_loop import Training, TrainState, train
from dflashdist.train.evaluation import Evaluator
from dflashdist.train.gates import AVERAGED, RAW
from dflashdist.train.job import TrainingJob
from dflashdist.train.metrics import Clock
from dflashdist.train.optim import WeightAverage, build_optimizer, loss_scale
from dflashdist.train.resume import Start
from dflashdist.train.sources import (
    Batches,
    ComputedStates,
    ReceivedStates,
    Rows,
    StateSource,
    message_specs,
    states_dtype_on,
)


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


def run_drafter_rank(start: Start, world: World, trace: Trace) -> None:
    """A drafter: train to the end of the plan, or until all stop. Rank 0 also leads."""
    job, health = start.job, world.health
    config, shape = job.config, job.shape
    health.phase("load the drafter")
    assert config.target.path is not None
    frozen = TargetTensors.load(
        config.target.path,
        revision=config.target.revision,
        dtype=states_dtype_on(job, world.device),
        device=world.device,
    )
    drafter = Drafter(shape)
    if not start.checkpoint:
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
    if start.checkpoint:
        load_training(start.checkpoint, drafter, optimizer, world.device, average)
    saved = start.saved
    state = TrainState(
        step=start.step,
        skipped=saved.get("skipped", 0),
        bad_in_a_row=saved.get("bad_in_a_row", 0),
        empty=saved.get("empty", 0),
        evaluated=saved.get("evaluated", 0),
        best=start.best,
    )
    clock = Clock()
    gradients = Gradients(world.drafters, health, clock)
    loss = DrafterLoss(drafter, frozen, shape, config.loss)
    batches = Batches(
        Rows(job),
        seed=config.seed,
        num_anchors=config.drafter.num_anchors,
        block_size=shape.block_size,
        features=shape.num_features * shape.hidden_size,
        variable_prefix=config.loss.variable_prefix,
        device=world.device,
    )
    forward = None
    if job.roles.layout == COLOCATED:
        from dflashdist.train.target_rank import load_target  # imports transformers

        forward = load_target(job, world.device, health)
    if job.warms_up(world.device.type):
        health.phase("warm up")
        run_widest(job, loss, batches, forward or zero_states(job, world.device), world.device)
    model = data_parallel(loss, world, gradients)
    source, lead = connect(start, world, trace, batches, forward)
    # Positions from a block's anchor to its last draft: the block's size, but one more for DSpark.
    span = shape.num_drafts + 1
    weight_per_anchor = float(
        slot_weights(span, weights=config.loss.weights, gamma=config.loss.gamma).sum()
    )
    training = Training(
        model=model,
        optimizer=optimizer,
        source=source,
        plan=job.plan,
        steps=job.steps,
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
        loss_scale=loss_scale(job.anchors_per_window, weight_per_anchor),
        max_bad_steps=config.train.max_bad_steps,
        average=average,
        autocast=world.device.type == "cuda",
        on_reduced=gradients.done,
    )
    if trace.enabled:
        training.on_slot = lambda step, seq: trace(
            "slot", step=step, seq=seq, rows=job.plan.micro_batch(seq).rows.tolist()
        )
    evaluator = None
    if job.stream.rounds:
        drafters = {RAW: drafter} | ({AVERAGED: average.drafter} if average else {})
        evaluator = Evaluator(
            job.stream,
            source,
            frozen,
            drafters,
            drafter=world.rank,
            group=world.drafters,
            device=world.device,
            health=health,
            trace=trace,
            max_new_tokens=config.evaluate.max_new_tokens,
            autocast=training.autocast,
        )
    after = AfterStep(start, world, drafter, evaluator, lead)
    after.start(training, state)
    train(training, state, after)
    health.phase("wait for the other drafters")
    if world.rank == 0:  # the end is called when no drafter waits for anything any more
        after.close()
        world.wait_count("drafters_done", job.roles.num_drafters - 1)
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


def run_widest(
    job: TrainingJob,
    loss: nn.Module,
    batches: Batches,
    states_of: Callable[[TokenBatch], Tensor],
    device: torch.device,
) -> None:
    """The widest planned micro-batches forward and backward, so that memory that will not do gives
    out now; nothing of it stays."""
    for seq in job.widest():
        batch = batches.batch(seq, states_of)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss_sum, _ = loss(batch)
        loss_sum.backward()
        loss.zero_grad(set_to_none=True)


def zero_states(job: TrainingJob, device: torch.device) -> Callable[[TokenBatch], Tensor]:
    """What a target would send, in size alone."""
    width, dtype = job.num_states * job.shape.hidden_size, states_dtype_on(job, device)
    return lambda tokens: torch.zeros(int(tokens.lengths.sum()), width, dtype=dtype, device=device)


def connect(
    start: Start,
    world: World,
    trace: Trace,
    batches: Batches,
    forward: Callable[[TokenBatch], Tensor] | None,
) -> tuple[StateSource, tuple[Dispatcher, WorkQueue] | None]:
    """The source of hidden states, and on rank 0 of a split job the dispatcher, started."""
    health, roles = world.health, start.job.roles
    world.barrier("ready")
    if forward:
        return ComputedStates(batches, forward), None
    assert world.data is not None
    receiver = Receiver(
        PointToPoint(world.data, world.device, trace),
        world.clone_store(),
        health,
        roles,
        rank=world.rank,
        spec_of=message_specs(start.job, world.device),
        num_messages=start.num_messages(world.rank),
        device=world.device,
    )
    source = ReceivedStates(batches, receiver, WorkQueue(world.clone_store(), health), trace)
    if world.rank != 0:
        return source, None
    dispatcher = Dispatcher(
        WorkQueue(world.clone_store(), health),
        seqs=start.seqs(),
        credit=start.job.depth,
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
