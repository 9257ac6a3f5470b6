"""The drafter's loop: micro-batches by seq, one backward each, one optimizer step per W of them.

The gradient of a step is that of one big batch: losses are summed, gradients are summed over the
step's micro-batches and drafters, and divided by the step's sum of weights. DDP averages over D, so
the factor is c x D / G, with c the constant that losses were divided by before the backward pass.
"""

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dflashdist.cluster.health import Health
from dflashdist.config import InputError, OptimConfig
from dflashdist.schedule.plan import Plan
from dflashdist.schedule.stream import Steps
from dflashdist.train.evaluation import Best
from dflashdist.train.metrics import Clock, StepSums
from dflashdist.train.optim import (
    Optimizer,
    WeightAverage,
    learning_rate,
    scale_and_clip,
    set_rate,
)
from dflashdist.train.sources import StateSource

log = logging.getLogger(__name__)


class RunFailed(InputError):
    """Training cannot go on, for what is in data or settings; the message says what to do."""


@dataclass
class TrainState:
    """What a checkpoint holds beside tensors. `step` steps are done; the cursor is step x W."""

    step: int = 0
    skipped: int = 0  # steps without an update, in all
    bad_in_a_row: int = 0
    empty: int = 0  # micro-batches without a supervised slot, in all
    evaluated: int = 0  # the step of the last round of evaluation
    best: Best | None = None


@dataclass
class Training:
    """Everything that the loop needs, put together once by train/run.py."""

    model: DistributedDataParallel
    optimizer: Optimizer
    source: StateSource
    plan: Plan
    steps: Steps
    drafter: int  # this rank's index among the drafters
    group: dist.ProcessGroup
    device: torch.device
    health: Health
    block_size: int
    empty_batch: Callable[[], Any]  # a batch without a supervised slot
    optim: OptimConfig
    loss_scale: float
    max_bad_steps: int
    average: WeightAverage | None = None
    autocast: bool = False
    on_slot: Callable[[int, int], None] = lambda step, seq: None
    on_reduced: Callable[[], None] = lambda: None
    clock: Clock = field(default_factory=Clock)


AfterStep = Callable[[Training, TrainState, StepSums, float, float], bool]


def train(training: Training, state: TrainState, after_step: AfterStep) -> None:
    """Run steps until the end of the plan, or until `after_step` says that all ranks stop.

    `after_step` gets both, the reduced sums, the learning rate and the gradient norm.
    """
    warm_up(training)
    for step in range(state.step, training.steps.num_steps):
        sums = StepSums(training.block_size, training.steps.seqs(step), training.device)
        slots = training.steps.slots(step)[training.drafter]
        for seq in slots:  # my micro-batches, in seq order
            training.health.phase("wait for hidden states", seq)
            with training.clock.waiting():
                batch = training.source.hidden_states(seq)  # blocks until that very one is here
            training.on_slot(step, seq)
            micro_batch = training.plan.micro_batch(seq)
            training.health.phase("train", seq, micro_batch.bucket)
            sums.add(micro_batch, forward_backward(training, batch, is_last=seq == slots[-1]))
            del batch
        if not slots:  # a partial last step: others have micro-batches, and DDP needs everybody
            forward_backward(training, training.empty_batch(), is_last=True)
        reduce_sums(training, sums)
        rate, norm = update(training, state, sums)
        if after_step(training, state, sums, rate, norm):
            return


def warm_up(training: Training) -> None:
    """One backward pass without loss, so that DDP lays out its buckets before the first real step:
    a resumed run then adds up gradients in the same order, to the bit, as an unbroken one."""
    training.health.phase("warm up")
    for _ in range(2):  # the second forward rebuilds the buckets, which all drafters do together
        forward_backward(training, training.empty_batch(), is_last=True)
    training.optimizer.zero_grad(set_to_none=True)
    training.clock.restart()


def forward_backward(training: Training, batch: Any, is_last: bool) -> Tensor:
    """Add the batch's gradients to the step's; the last one all-reduces them. Returns its sums."""
    with nullcontext() if is_last else training.model.no_sync():
        with torch.autocast(training.device.type, torch.bfloat16, enabled=training.autocast):
            loss_sum, sums = training.model(batch)
        (loss_sum / training.loss_scale).backward()
    if is_last:
        training.on_reduced()
    return sums


def reduce_sums(training: Training, sums: StepSums) -> None:
    """One all-reduce of the step's sums; with them, whether anybody was asked to stop."""
    training.health.phase("wait for the other drafters", sums.seqs.stop - 1)
    sums.add_extra("stop", float(training.health.stop_requested.is_set()))
    spent = training.clock.reading()
    for name, seconds in spent.items():
        sums.add_extra(name, seconds)
    training.clock.restart()
    with training.clock.transferring():
        sums.all_reduce(training.group)


def update(training: Training, state: TrainState, sums: StepSums) -> tuple[float, float]:
    """Scale, clip and apply the gradient, or drop it: the same decision on every drafter, as it
    comes from reduced values. Returns the learning rate and the gradient's norm before clipping.

    Raises RunFailed after `max_bad_steps` dropped ones in a row.
    """
    rate = learning_rate(training.optim, state.step, training.steps.num_steps)
    bad, reason, norm = sums.not_finite(), "", math.nan
    if bad:
        reason = f"the loss is not finite in seq {', '.join(map(str, bad))}"
    elif sums.loss.weight == 0:
        reason = f"no supervised slot in seqs {sums.seqs.start} to {sums.seqs.stop - 1}"
    else:
        scale = training.loss_scale * training.steps.num_drafters / sums.loss.weight
        norm = scale_and_clip(training.model, scale, training.optim.max_grad_norm)
        if not math.isfinite(norm):
            reason = f"the gradient is not finite in seqs {sums.seqs.start} to {sums.seqs.stop - 1}"
    state.step += 1
    empty = sums.empty()
    if empty and not state.empty and not reason:
        log.warning(
            "seq %s: no two supervised tokens side by side, so no block to train on; told once, "
            "counted as empty_micro_batches", ", ".join(map(str, empty)),
        )  # fmt: skip
    state.empty += len(empty)
    if reason:
        state.skipped += 1
        state.bad_in_a_row += 1
        log.warning("step %d skipped: %s", state.step, reason)
        if state.bad_in_a_row >= training.max_bad_steps:
            raise RunFailed(
                f"{state.bad_in_a_row} steps in a row were skipped (train.max_bad_steps="
                f"{training.max_bad_steps}); the last, step {state.step}: {reason}"
            )
    else:
        state.bad_in_a_row = 0
        set_rate(training.optimizer, rate)
        training.optimizer.step()
        if training.average:
            training.average.update(state.step - state.skipped)
    training.optimizer.zero_grad(set_to_none=True)
    return rate, norm
