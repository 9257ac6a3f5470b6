"""Learning-rate curves, clipping of the scaled gradient, and what weight decay touches."""

import math

import pytest
import torch
from torch import nn

from dflashdist.config import OptimConfig
from dflashdist.train.optim import build_optimizer, learning_rate, loss_scale, scale_and_clip

STEPS = 100


def curve(num_steps: int = STEPS, **changes) -> list[float]:
    config = OptimConfig(**{"lr": 2.0, "warmup_fraction": 0.1, **changes})
    return [learning_rate(config, step, num_steps) for step in range(num_steps)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warm_up_is_linear_and_starts_above_zero(schedule):
    rates = curve(schedule=schedule)
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert max(rates) == rates[9] == pytest.approx(2.0)
    assert min(rates) > 0, "a step that learns nothing"


def test_cosine_ends_at_its_floor():
    rates = curve(schedule="cosine")
    assert rates[10] == pytest.approx(2.0)
    assert rates[55] == pytest.approx(1.0)  # half-way between warm-up and end
    assert rates[10:] == sorted(rates[10:], reverse=True)
    # the rate after the last step is the floor; the last step itself is one step above
    assert rates[-1] == pytest.approx(1 + math.cos(math.pi * 89 / 90))
    floor = curve(schedule="cosine", min_lr_fraction=0.25)
    assert 0.5 < floor[-1] < 0.501 and floor[10] == pytest.approx(2.0)


def test_wsd_is_flat_and_falls_in_a_line():
    rates = curve(schedule="wsd", decay_fraction=0.2)
    assert rates[9:81] == pytest.approx([2.0] * 72)
    assert rates[80:] == pytest.approx([2.0 * (20 - step) / 20 for step in range(20)])
    floor = curve(schedule="wsd", decay_fraction=0.2, min_lr_fraction=0.5)
    assert floor[80:] == pytest.approx([1.0 + (20 - step) / 20 for step in range(20)])


def test_constant_and_without_warm_up():
    assert curve(schedule="constant")[10:] == [2.0] * 90
    assert curve(schedule="cosine", warmup_fraction=0.0)[0] == 2.0


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_the_shortest_runs_have_a_rate(schedule, num_steps):
    assert all(0 < rate <= 2.0 for rate in curve(num_steps, schedule=schedule))


def test_decay_on_matrices_only():
    """With zero gradients AdamW only decays: w <- w (1 - lr x decay)."""
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(OptimConfig(lr=0.1, weight_decay=0.5), model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 0.95 if name == "0.weight" else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor, rtol=1e-6, atol=0)
    decayed = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(decayed) == len(before), "a parameter is not trained"


def with_gradients(*values: float) -> nn.Module:
    model = nn.Module()
    for index, value in enumerate(values):
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = torch.tensor([value])
        model.register_parameter(f"p{index}", parameter)
    model.register_parameter("unused", nn.Parameter(torch.zeros(1)))
    return model


def gradients(model: nn.Module) -> list[float]:
    return [p.grad.item() for p in model.parameters() if p.grad is not None]


def test_scaled_then_clipped():
    """A gradient (3, 4) has the norm 5: 10 after scaling by 2, which is what clips and is told."""
    model = with_gradients(3.0, 4.0)
    assert scale_and_clip(model, 2.0, max_norm=1.0) == pytest.approx(10.0)
    # to max_norm / (norm + 1e-6), as torch's own clip does
    assert gradients(model) == pytest.approx([0.6, 0.8], rel=1e-6)
    model = with_gradients(3.0, 4.0)
    assert scale_and_clip(model, 0.1, max_norm=1.0) == pytest.approx(0.5)
    assert gradients(model) == pytest.approx([0.3, 0.4], rel=1e-6)  # short enough: as it is


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_left_alone(bad):
    model = with_gradients(3.0, bad)
    assert not math.isfinite(scale_and_clip(model, 2.0, max_norm=1.0))
    assert gradients(model)[0] == 3.0


def test_loss_scale_is_a_power_of_two_near_the_planned_weight():
    for anchors, weight in ((1.0, 0.1), (100.0, 3.3), (65536.0, 4.6)):
        scale = loss_scale(anchors, weight)
        assert math.frexp(scale)[0] == 0.5
        assert 0.7 < scale / max(1.0, anchors * weight) < 1.5
