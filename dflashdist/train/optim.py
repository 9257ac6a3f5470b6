"""The optimizer step: one gradient of the whole step, scaled and clipped; the learning rate."""

import math

import torch
from torch import nn

from dflashdist.config import OptimConfig


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """The rate of 0-based step `step`: linear warm-up, then cosine, flat with a linear end (wsd),
    or constant. A pure function, so resuming needs no scheduler state."""
    warmup = max(1, round(config.warmup_fraction * num_steps)) if config.warmup_fraction else 0
    if step < warmup:
        return config.lr * (step + 1) / warmup
    floor = config.min_lr_fraction
    if config.schedule == "cosine":
        done = (step - warmup) / max(1, num_steps - warmup)
        factor = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    elif config.schedule == "wsd":
        decay = max(1, round(config.decay_fraction * num_steps))
        factor = floor + (1 - floor) * min(1.0, max(0.0, (num_steps - step) / decay))
    else:
        factor = 1.0
    return config.lr * factor


def build_optimizer(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only, norms and biases without."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    beta1, beta2 = config.betas
    fused = parameters[0].device.type == "cuda"
    return torch.optim.AdamW(groups, config.lr, (beta1, beta2), config.eps, fused=fused)


def scale_and_clip(model: nn.Module, scale: float, max_norm: float) -> float:
    """Multiply the gradients by `scale`, clip them to `max_norm`, return the norm before clipping.

    The norm comes from reduced gradients, so it is the same on every drafter. When it is not
    finite the gradients are left as they are, for the caller to drop.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(gradients)) * scale
    if math.isfinite(norm):
        torch._foreach_mul_(gradients, scale * min(1.0, max_norm / (norm + 1e-6)))
    return norm


def loss_scale(anchors_per_step: float, weight_per_anchor: float) -> float:
    """The constant c that losses are divided by before the backward pass, to keep gradients near 1:
    the planned weight of a drafter's step. A power of two, so it changes no mantissa."""
    return 2.0 ** round(math.log2(max(1.0, anchors_per_step * weight_per_anchor)))
