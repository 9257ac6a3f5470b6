"""The drafter loop alone, on 1 to 4 ranks, with a model of one layer and a source of random states:
bad steps are skipped by all together, and the gradient is that of one big batch.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from dflashdist.cluster.roles import COLOCATED, Roles
from dflashdist.cluster.world import Place, World
from dflashdist.config import OptimConfig, PipelineConfig, ScheduleConfig
from dflashdist.model.loss import LossSums, sums_layout
from dflashdist.schedule.plan import Plan
from dflashdist.schedule.stream import Steps
from dflashdist.train.drafter_loop import RunFailed, Training, TrainState, train

pytestmark = pytest.mark.dist

BLOCK, WIDTH = 4, 6
NOTHING, LOSS, GRADIENT = "no supervised slot", "loss", "gradient"  # ways to be bad


@dataclass
class States:
    """A micro-batch: a weight of 0 is a slot that is not supervised."""

    hidden: Tensor  # [n, WIDTH]
    weights: Tensor  # [n]
    steep: bool = False  # a finite loss whose gradient is not


class RandomStates:
    """A source: a seq's states are drawn from its number; their count and weights are ragged."""

    def __init__(self, bad: dict[int, str], dtype: torch.dtype) -> None:
        self._bad, self._dtype = bad, dtype

    def hidden_states(self, seq: int) -> States:
        draw = np.random.default_rng(seq)
        count = int(draw.integers(1, 40))
        hidden = torch.tensor(draw.normal(size=(count, WIDTH)), dtype=self._dtype)
        weights = torch.tensor(draw.lognormal(size=count), dtype=self._dtype)
        bad = self._bad.get(seq)
        if bad == LOSS:
            hidden[0, 0] = torch.nan
        return States(hidden, weights * (bad != NOTHING), steep=bad == GRADIENT)


class TinyLoss(nn.Module):
    """Weighted squares of a linear layer: loss sum and vector of sums, as DrafterLoss's."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3).to(dtype)
        draw = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))

    def forward(self, states: States) -> tuple[Tensor, Tensor]:
        loss = (self.layer(states.hidden).square().sum(-1) * states.weights).sum()
        if states.steep:  # the slope of a root at 0
            loss = loss + (self.layer.bias - self.layer.bias.detach()).clamp(min=0).sum().sqrt()
        sums, layout = torch.zeros(LossSums.size(BLOCK), dtype=torch.float64), sums_layout(BLOCK)
        sums[layout["loss"]] = loss.detach().double()
        sums[layout["weight"]] = states.weights.double().sum()
        return loss, sums


@dataclass
class Outcome:
    """What one rank saw."""

    failure: str = ""
    skipped: int = 0
    empty: int = 0
    in_a_row: int = 0
    seqs: list[int] = field(default_factory=list)
    reductions: int = 0  # of gradients, the one of the warm-up among them
    warnings: list[str] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)  # at the start and after each step


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def run(
    world: World,
    *,
    accumulation: int,
    num_steps: int,
    bad: dict[int, str] | None = None,
    dtype: torch.dtype = torch.float64,
    optim: OptimConfig | None = None,
    max_bad_steps: int = 3,
    loss_scale: float = 32.0,
) -> Outcome:
    """Train with plain gradient descent at rate 1, so that a step's change is its gradient."""
    plan = Plan(
        np.full(64, 8), np.full(64, 8), ScheduleConfig(max_tokens=64, grid=8),
        num_anchors=4, block_size=BLOCK, seed=0,
    )  # fmt: skip
    steps = Steps(
        plan, num_drafters=world.place.world_size, accumulation=accumulation, num_steps=num_steps
    )
    model = TinyLoss(dtype)
    source, outcome, log = RandomStates(bad or {}, dtype), Outcome(), Messages()

    def flat() -> np.ndarray:  # tensors would stay in this process, which ends
        return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()

    def after_step(job: Training, state: TrainState, *_: Any) -> bool:
        outcome.weights.append(flat())
        outcome.skipped, outcome.in_a_row = state.skipped, state.bad_in_a_row
        outcome.empty = state.empty
        return False

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        outcome.reductions += 1
        return allreduce_hook(world.drafters, bucket)

    outcome.weights.append(flat())
    wrapped = DistributedDataParallel(
        model, process_group=world.drafters, gradient_as_bucket_view=True
    )
    wrapped.register_comm_hook(None, hook)
    job = Training(
        model=wrapped,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        source=source,  # pyright: ignore[reportArgumentType], its batches are this model's
        plan=plan,
        steps=steps,
        drafter=world.rank,
        group=world.drafters,
        device=torch.device("cpu"),
        health=world.health,
        block_size=BLOCK,
        empty_batch=lambda: States(torch.zeros(1, WIDTH, dtype=dtype), torch.zeros(1, dtype=dtype)),
        optim=optim
        or OptimConfig(lr=1.0, schedule="constant", warmup_fraction=0, max_grad_norm=1e9),
        loss_scale=loss_scale,
        max_bad_steps=max_bad_steps,
        on_slot=lambda step, seq: outcome.seqs.append(seq),
    )
    logger = logging.getLogger("dflashdist.train.drafter_loop")
    logger.addHandler(log)
    try:
        train(job, TrainState(), after_step)
    except RunFailed as failure:
        outcome.failure = str(failure)
    finally:
        logger.removeHandler(log)
    outcome.warnings = log.texts
    return outcome


def in_world(scenarios: list[dict[str, Any]]) -> list[Outcome]:
    """Run them one after another in one job."""
    place = Place.from_environment()
    roles = Roles(COLOCATED, num_targets=0, num_drafters=place.world_size)
    world = World(place, roles, torch.device("cpu"), PipelineConfig(silence_seconds=60))
    outcomes = [run(world, **scenario) for scenario in scenarios]
    world.barrier("finished")
    world.close()
    return outcomes


# ---- bad steps: 2 drafters x 2, so step s holds seqs 4s to 4s + 3

KINDS = {
    NOTHING: {4: NOTHING, 5: NOTHING, 6: NOTHING, 7: NOTHING},
    LOSS: {6: LOSS},
    GRADIENT: {5: GRADIENT},
}
NAMED = {
    NOTHING: "step 2 skipped: no supervised slot in seqs 4 to 7",
    LOSS: "step 2 skipped: the loss is not finite in seq 6",
    GRADIENT: "step 2 skipped: the gradient is not finite in seqs 4 to 7",
}
BREAKS = {0: LOSS, 5: LOSS, 13: GRADIENT} | {seq: NOTHING for seq in range(16, 20)}
ENDS = {seq: NOTHING for seq in range(4, 8)} | {9: LOSS, 10: LOSS, 14: GRADIENT}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    """Scenario -> outcome of both drafters; one pair of processes for all of them."""
    from ranks import Ranks

    common: dict[str, Any] = {"accumulation": 2}
    scenarios = {kind: common | {"num_steps": 4, "bad": bad} for kind, bad in KINDS.items()}
    scenarios["breaks"] = common | {"num_steps": 6, "bad": BREAKS}
    scenarios["empty"] = common | {"num_steps": 4, "bad": dict.fromkeys((5, 6, 9), NOTHING)}
    scenarios["ends"] = common | {"num_steps": 9, "bad": ENDS}
    ranks = Ranks(2, in_world, list(scenarios.values()))
    by_rank = ranks.results()
    return {name: [each[i] for each in by_rank] for i, name in enumerate(scenarios)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_step_is_skipped_by_all(outcomes, kind):
    """One micro-batch of one drafter is enough. Nothing of it stays: neither in the weights nor in
    the gradients of the steps after it."""
    for mine in outcomes[kind]:
        assert not mine.failure
        assert mine.warnings == [NAMED[kind]]
        assert (mine.skipped, mine.in_a_row) == (1, 0)
        assert mine.empty == (4 if kind == NOTHING else 0)
        assert np.array_equal(mine.weights[1], mine.weights[2]), "step 2 changed the weights"
        for before, after in ((0, 1), (2, 3), (3, 4)):
            assert not np.array_equal(mine.weights[before], mine.weights[after])
        assert np.isfinite(mine.weights[-1]).all()
    first, second = outcomes[kind]
    assert all(np.array_equal(a, b) for a, b in zip(first.weights, second.weights, strict=True))
    assert sorted(first.seqs + second.seqs) == list(range(16))


def test_nothing_of_a_bad_step_stays_behind(outcomes):
    """The steps after a skipped one give the same weights, to the bit, whatever was wrong."""
    ends = [outcomes[kind][0].weights[-1] for kind in KINDS]
    assert np.array_equal(ends[0], ends[1]) and np.array_equal(ends[0], ends[2])


def test_good_steps_in_between_reset_the_count(outcomes):
    """Four of six steps are bad, never three in a row: the run goes to its end."""
    for mine in outcomes["breaks"]:
        assert not mine.failure and len(mine.weights) == 7
        assert [text.split()[1] for text in mine.warnings] == ["1", "2", "4", "5"]
        assert (mine.skipped, mine.in_a_row) == (4, 0)


def test_micro_batches_without_a_block_are_told_once_and_counted(outcomes):
    """The others of their steps are trained on; every drafter knows, whoever had them."""
    for mine in outcomes["empty"]:
        assert len(mine.warnings) == 1 and mine.warnings[0].startswith("seq 5, 6: no two ")
        assert (mine.skipped, mine.empty) == (0, 3)
        for before, after in zip(mine.weights, mine.weights[1:], strict=False):
            assert not np.array_equal(before, after)


def test_too_many_in_a_row_end_the_run_on_all_ranks(outcomes):
    first, second = outcomes["ends"]
    assert first.failure == second.failure
    assert first.failure.startswith("3 steps in a row were skipped (train.max_bad_steps=3)")
    assert "step 4: the gradient is not finite in seqs 12 to 15" in first.failure
    for mine in (first, second):
        assert mine.warnings[1] == "step 3 skipped: the loss is not finite in seq 9, 10"
        assert len(mine.weights) == 4, "went on"  # the start, and after the steps 1 to 3
    assert sorted(first.seqs + second.seqs) == list(range(16))


# ---- the gradient of one big batch


def big_batches(num_steps: int, dtype: torch.dtype, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The weights after steps of 8 seqs, each one batch: sum of losses / sum of weights, once."""
    model, source = TinyLoss(dtype), RandomStates({}, dtype)
    for step in range(num_steps):
        each = [source.hidden_states(seq) for seq in range(8 * step, 8 * step + 8)]
        whole = States(
            torch.cat([states.hidden for states in each]),
            torch.cat([states.weights for states in each]),
        )
        loss, _ = model(whole)
        gradients = torch.autograd.grad(loss / whole.weights.sum(), list(model.parameters()))
        flat = change(torch.cat([gradient.flatten() for gradient in gradients]))
        for parameter in model.parameters():
            parameter.data -= flat[: parameter.numel()].view_as(parameter)
            flat = flat[parameter.numel() :]
    return torch.cat([p.detach().flatten() for p in model.parameters()])


CLIP = 0.01


@pytest.mark.parametrize(("drafters", "accumulation"), [(1, 8), (2, 4), (4, 2)])
def test_the_gradient_of_one_big_batch(run_ranks, drafters, accumulation):
    """Three steps of 8 ragged micro-batches however they are spread; also clipped, and whatever
    losses are divided by on the way. The tolerances are rounding: float64 has 1e-16 and float32
    6e-8 of numbers up to about 10, added up some hundred times."""
    common: dict[str, Any] = {"accumulation": accumulation, "num_steps": 3}
    small = OptimConfig(lr=0.1, schedule="constant", warmup_fraction=0, max_grad_norm=CLIP)
    scenarios = [
        common | {"loss_scale": 2.0**9},
        common | {"dtype": torch.float32},
        common | {"optim": small},
    ]
    wanted = [
        big_batches(3, torch.float64, lambda gradient: gradient),
        big_batches(3, torch.float32, lambda gradient: gradient),
        big_batches(3, torch.float64, lambda g: 0.1 * g * CLIP / (g.norm() + 1e-6)),
    ]
    start = big_batches(0, torch.float64, lambda gradient: gradient)
    by_rank = run_ranks(drafters, in_world, scenarios)
    for i, tolerance in enumerate((1e-12, 1e-5, 1e-12)):
        assert (wanted[i] - start).abs().max() > 100 * tolerance
        for outcomes in by_rank:
            assert outcomes[i].reductions == 2 + 3, "two to warm up, one a step"
            got = torch.from_numpy(outcomes[i].weights[-1])
            torch.testing.assert_close(got, wanted[i], rtol=0, atol=tolerance)
