"""A drafter rank, put together: load the frozen ends, build the drafter, train, save, report."""

import logging
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
from dflashdist.config import dump_config
from dflashdist.model.blocks import decay_weights
from dflashdist.model.drafter import Drafter
from dflashdist.model.frozen import Frozen
from dflashdist.model.loss import DrafterBatch, DrafterLoss
from dflashdist.train.blueprint import Blueprint, target_dtype, versions
from dflashdist.train.checkpoint import load_training
from dflashdist.train.drafter_loop import Job, TrainState, train
from dflashdist.train.metrics import Clock, Reporter, StepSums
from dflashdist.train.optim import build_optimizer, loss_scale
from dflashdist.train.sources import Batches, ComputedStates, ReceivedStates, Source

log = logging.getLogger(__name__)


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
    frozen = Frozen.load(
        config.target.path,
        revision=config.target.revision,
        dtype=target_dtype(config.target.dtype, world.device),
        device=world.device,
    )
    drafter = Drafter(shape)
    drafter.reset_parameters(
        config.drafter.init, seed=config.seed, final_norm=frozen.final_norm.float().cpu()
    )
    drafter.to(world.device)
    optimizer = build_optimizer(config.optim, drafter)
    if blueprint.resume:
        load_training(blueprint.resume, drafter, optimizer, world.device)
    saved = blueprint.saved
    state = TrainState(blueprint.first_step, saved.get("skipped", 0), saved.get("bad_in_a_row", 0))
    clock = Clock()
    gradients = Gradients(world.drafters, health, clock)
    model = data_parallel(DrafterLoss(drafter, frozen, shape, config.loss), world, gradients)
    source, lead = connect(blueprint, world, trace)
    weight_per_anchor = float(
        decay_weights(shape.block_size, decay=config.loss.decay, gamma=config.loss.gamma).sum()
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
        block_size=shape.block_size,
        empty_batch=lambda: empty_batch(
            shape.num_features * shape.hidden_size, world.device, frozen
        ),
        optim=config.optim,
        loss_scale=loss_scale(blueprint.anchors_per_window, weight_per_anchor),
        max_bad_steps=config.train.max_bad_steps,
        autocast=world.device.type == "cuda",
        on_reduced=gradients.done,
    )
    if trace.enabled:
        job.on_slot = lambda step, seq: trace(
            "slot", step=step, seq=seq, rows=blueprint.plan.micro_batch(seq).rows.tolist()
        )
    after = AfterStep(blueprint, world, drafter, lead)
    if config.checkpoint.at_start and state.step == 0:
        after.save(job, state)
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
) -> tuple[Source, tuple[Dispatcher, WorkQueue] | None]:
    """The source of hidden states, and on rank 0 of a split job the dispatcher, started."""
    config, health, roles = blueprint.config, world.health, blueprint.roles
    batches = Batches(
        blueprint.rows,
        seed=config.seed,
        num_anchors=config.drafter.num_anchors,
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
        first=blueprint.first_seq,
        end=blueprint.steps.end,
        credit=blueprint.depth,
        num_takers=roles.num_targets,
        on_publish=lambda seq: trace("publish", seq=seq),
    )
    health.thread("dispatcher", dispatcher.run)
    return source, (dispatcher, WorkQueue(world.clone_store(), health))


class AfterStep:
    """What follows a step: report, checkpoint, the decision to stop; alike on all drafters."""

    def __init__(
        self,
        blueprint: Blueprint,
        world: World,
        drafter: Drafter,
        lead: tuple[Dispatcher, WorkQueue] | None,
    ) -> None:
        self._blueprint, self._world, self._drafter, self._lead = blueprint, world, drafter, lead
        self._reporter: Reporter | None = None
        self._saved = "saved/none"
        if world.rank == 0:
            self._reporter = Reporter(
                blueprint.plan,
                blueprint.steps,
                first_step=blueprint.first_step,
                tensorboard=str(blueprint.folder / "tb"),
                every=blueprint.config.train.log_every,
            )

    def __call__(
        self, job: Job, state: TrainState, sums: StepSums, rate: float, norm: float
    ) -> bool:
        """Report and save where it is time. Returns whether all ranks stop now."""
        if self._reporter:
            depth = None
            if self._lead:
                dispatcher, queue = self._lead
                depth = dispatcher.num_published - queue.num_consumed()
            self._reporter.step(
                state.step,
                sums,
                lr=rate,
                grad_norm=norm,
                skipped=state.skipped,
                queue_depth=depth,
                beats=self._world.health.beats,
            )
        stop = sums.extra("stop") > 0
        last = state.step == job.steps.num_steps
        if stop or last or state.step % self._blueprint.config.checkpoint.every == 0:
            self.save(job, state)
        if stop and self._world.rank == 0:
            log.warning("asked to stop: saved after step %d; train.resume=auto goes on", state.step)
        return stop

    def save(self, job: Job, state: TrainState) -> None:
        """The lead writes; the others wait for it, so that nobody takes the pause for a fault."""
        key = f"saved/{state.step}"
        if self._world.rank != 0:
            job.health.phase("wait for the checkpoint")
            job.health.wait_key(self._world.store, key)
            return
        job.health.phase("save the checkpoint", kind=state.step)
        facts = self._blueprint.facts() | {
            "cursor": min(state.step * job.steps.window, job.steps.end),
            "skipped": state.skipped,
            "bad_in_a_row": state.bad_in_a_row,
            "num_steps": job.steps.num_steps,
            "config": dump_config(self._blueprint.config),
            "versions": versions(),
        }
        place = self._blueprint.checkpoints.save(state.step, self._drafter, job.optimizer, facts)
        log.info("saved %s", place)
        self._world.store.set(key, "1")
        self._world.store.delete_key(self._saved)  # all have read it: a step was reduced since
        self._saved = key

    def close(self) -> None:
        if self._reporter:
            self._reporter.close()


def empty_batch(features: int, device: torch.device, frozen: Frozen) -> DrafterBatch:
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
