"""The optimizer step: one gradient of the whole step, scaled and clipped; the learning rate; and
an average of the weights that the steps leave behind."""

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dflashdist.config import OptimConfig
from dflashdist.model.drafter import Drafter


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


class MuonAndAdamW:
    """Muon for the layers' matrices and `fc`, AdamW for the rest; used as one optimizer is.

    Muon's momentum is orthogonalised, so that every direction of a matrix is learned alike (Jordan
    et al., 2024). Its groups' learning rate is `relative_lr` times the schedule's.
    """

    def __init__(self, config: OptimConfig, model: nn.Module) -> None:
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        matrices = [n for n, p in named.items() if p.ndim == 2 and n.startswith(("layers.", "fc."))]
        self._muon = torch.optim.Muon(
            [
                {
                    "params": [named.pop(n) for n in matrices],
                    "relative_lr": config.muon_lr / config.lr,
                }
            ],
            lr=config.muon_lr,
            weight_decay=config.weight_decay,
            momentum=config.muon_momentum,
        )
        self._adamw = build_adamw(config, named.values())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of both."""
        return self._muon.param_groups + self._adamw.param_groups

    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        self._muon.step()
        self._adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self._muon.zero_grad(set_to_none)
        self._adamw.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state of both, for `torch.save`."""
        return {"muon": self._muon.state_dict(), "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._muon.load_state_dict(state["muon"])
        self._adamw.load_state_dict(state["adamw"])


Optimizer = torch.optim.Optimizer | MuonAndAdamW


def build_optimizer(config: OptimConfig, model: nn.Module) -> Optimizer:
    """The optimizer of `optim.kind`; weight decay on matrices only."""
    if config.kind == "muon":
        return MuonAndAdamW(config, model)
    return build_adamw(config, [p for p in model.parameters() if p.requires_grad])


def build_adamw(config: OptimConfig, parameters: Iterable[Tensor]) -> torch.optim.AdamW:
    """AdamW for these parameters. Matrices decay, tables of tokens among them; norms, biases and
    the kernels of convolutions, which begin as the identity, do not."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim == 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim != 2], "weight_decay": 0.0},
    ]
    beta1, beta2 = config.betas
    fused = parameters[0].device.type == "cuda"
    return torch.optim.AdamW(groups, config.lr, (beta1, beta2), config.eps, fused=fused)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Give every group the schedule's learning rate, times its own `relative_lr` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("relative_lr", 1.0)


class WeightAverage:
    """A decayed average of a drafter's float32 weights, kept as a drafter of its own.

    The n-th update (from 1) decays by min(`decay`, n / (n + 9)), so that the first weights, which
    were drawn at random, are soon forgotten (as in TensorFlow's ExponentialMovingAverage).
    """

    def __init__(self, drafter: Drafter, decay: float) -> None:
        """The average of `drafter`, and at first its copy."""
        self._of, self._decay = drafter, decay
        self.drafter = copy.deepcopy(drafter).requires_grad_(False)

    @torch.no_grad()
    def update(self, number: int) -> None:
        """Take in the weights that the `number`-th update of them has left."""
        decay = min(self._decay, number / (number + 9))
        averages: list[Tensor] = [*self.drafter.parameters()]
        weights: list[Tensor] = [*self._of.parameters()]
        torch._foreach_lerp_(averages, weights, 1 - decay)

    def restart(self) -> None:
        """Begin again as a copy."""
        self.drafter.load_state_dict(self._of.state_dict())


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
