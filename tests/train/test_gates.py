"""Gates: what breaks a bound, told once, and a run that warns or ends, on all drafters."""

import json
import math
from pathlib import Path

import pytest
from ranks import Ranks, train_overrides
from run_folder import losses

from dflashdist.config import GateConfig, InputError
from dflashdist.train.gates import Gates, broken, step_metrics

KNOWN = {"loss", "eval/acceptance_length"}


@pytest.mark.parametrize(
    ("bounds", "step", "value", "left"),
    [
        ({"below": 4.0, "step": 10}, 9, 9.0, False),
        ({"below": 4.0, "step": 10}, 10, 3.999, False),
        ({"below": 4.0, "step": 10}, 10, 4.0, True),
        ({"below": 4.0, "step": 10}, 500, 4.1, True),  # from then on
        ({"above": 2.0, "step": 10}, 9, 1.0, False),
        ({"above": 2.0, "step": 10}, 10, 2.001, False),
        ({"above": 2.0, "step": 10}, 11, 2.0, True),
        ({"not_below": 3.0, "step": 10}, 9, 2.999, True),  # too good too early
        ({"not_below": 3.0, "step": 10}, 9, 3.0, False),
        ({"not_below": 3.0, "step": 10}, 10, 0.1, False),
        ({"not_below": 3.0, "below": 4.0, "step": 10}, 9, 9.0, False),
        ({"not_below": 3.0, "below": 4.0, "step": 10}, 9, 2.0, True),
        ({"not_below": 3.0, "below": 4.0, "step": 10}, 10, 9.0, True),
        ({"above": 0.0, "below": 1.0}, 1, 0.5, False),
        ({"above": 0.0, "below": 1.0}, 1, math.inf, True),
        ({"above": 0.0, "below": 1.0}, 1, math.nan, False),  # no reading
    ],
)
def test_bounds(bounds, step, value, left):
    assert bool(broken(GateConfig("loss", **bounds), step, value)) == left


def test_each_gate_is_told_once():
    gates = Gates(
        [GateConfig("loss", below=4.0, step=2), GateConfig("eval/acceptance_length", above=1.5)],
        KNOWN,
    )
    assert gates.violated(1, {"loss": 9.0}) == []
    assert gates.violated(2, {"loss": 9.0}) == [
        "gate loss below 4 from step 2 is violated: 9 at step 2"
    ]
    assert gates.violated(3, {"loss": 9.0}) == []
    told = gates.violated(4, {"loss": 9.0, "eval/acceptance_length": 1.25})
    assert told == ["gate eval/acceptance_length above 1.5 from step 0 is violated: 1.25 at step 4"]


def test_a_gate_that_could_never_be_left_is_refused():
    with pytest.raises(
        InputError, match=r"gates\[1\]\.metric=acceptance_length: .* nearest is eval"
    ):
        Gates([GateConfig("loss", below=1.0), GateConfig("acceptance_length", above=1.0)], KNOWN)
    with pytest.raises(InputError, match=r"gates\[0\] on loss: set below, above or not_below"):
        Gates([GateConfig("loss", step=5)], KNOWN)
    with pytest.raises(
        InputError, match=r"eval_ema/acceptance_length: .* no such round .* gates=\[\]"
    ):
        Gates([GateConfig("eval_ema/acceptance_length", above=1.0)], {"loss"})
    known = step_metrics(4, [64, 128])
    assert {"accuracy/position_03", "bucket_loss/00128", "grad_norm"} <= known
    assert "queue_depth" not in known, "rank 0 alone knows it"
    assert "accuracy/position_04" not in known


def test_a_gate_after_the_end_is_told():
    bounds = [
        {"below": 1.0, "step": 50},
        {"not_below": 1.0, "step": 50},
        {"below": 1.0, "step": 49},
    ]
    gates = Gates([GateConfig("loss", **bound) for bound in bounds], KNOWN)
    assert gates.idle(49) == [
        "gate loss from step 50 cannot be violated: this run has that metric up to step 49"
    ]


# ---- in a run


def causes(folder: Path) -> list[str]:
    lines = [line for f in (folder / "logs").glob("rank*.log") for line in f.open()]
    return [line.split("the job ends: ")[1] for line in lines if "the job ends: " in line]


@pytest.fixture
def gated(tiny_overrides, tiny_store, tmp_path) -> list[str]:
    """Two drafters; the loss begins near ln 208 = 5.3 and cannot be below 1 after three steps."""
    return [
        *tiny_overrides, f"run.dir={tmp_path / 'run'}", "train.accumulation_steps=2",
        "gates=[{metric: loss, below: 1.0, step: 3}, {metric: loss, below: 9.0}]",
    ]  # fmt: skip


@pytest.mark.dist
def test_a_gate_warns(gated, tmp_path):
    """Once, in the log (and so on the console of rank 0) and in tensorboard; the run goes on."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Ranks(2, train_overrides, [*gated, "roles.layout=colocated"]).results()
    folder = tmp_path / "run"
    assert list(losses(folder)) == [1, 2, 3, 4, 5, 6]
    for rank in (0, 1):
        log = (folder / f"logs/rank{rank}.log").read_text()
        warned = [line for line in log.splitlines() if "WARNING" in line and "gate " in line]
        assert len(warned) == 1 and "gate loss below 1 from step 3 is violated" in warned[0]
        assert warned[0].endswith("at step 3")
    events = EventAccumulator(str(folder / "tb"))
    events.Reload()
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors(
        "warnings/text_summary")]  # fmt: skip
    assert len(texts) == 1 and "is violated" in texts[0]


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["step", "round"])
def test_a_gate_ends_the_run_on_all_ranks(gated, tiny_store, tmp_path, kind):
    """Naming gate, value and step; that step is saved, and nothing is trained after it."""
    job = [*gated, "gates_stop=true", "roles.num_targets=1"]
    if kind == "round":  # no drafter says 9 tokens of 4
        job += [
            "gates=[{metric: eval/acceptance_length, above: 9.0, step: 3}]",
            "evaluate.every=2",
            f"evaluate.store={tiny_store}",
            "evaluate.max_rows=8",
        ]
    assert all(Ranks(3, train_overrides, job).exit_codes(100))
    folder = tmp_path / "run"
    at = {"step": 3, "round": 4}[kind]
    metric = {"step": "loss below 1", "round": "eval/acceptance_length above 9"}[kind]
    assert causes(folder)
    for cause in causes(folder):
        assert f": gate {metric} from step 3 is violated: " in cause, cause
        assert f" at step {at} (gates_stop=true); this step is saved" in cause, cause
        assert "train.resume" not in cause, "which would end alike"
    assert list(losses(folder)) == list(range(1, at + 1)), "tensorboard has all that led to it"
    saved = sorted(path.name for path in (folder / "checkpoints").glob("step_*"))
    assert saved[-1] == f"step_{at:08d}"
    if kind == "round":
        lines = (folder / "eval/rounds.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [2, 4]
