"""Gates: bounds on what a healthy run shows. A loss that does not fall says that something is
broken, one that falls too early that something leaks."""

import difflib
import math
from collections.abc import Collection, Sequence

from dflashdist.config import GateConfig, InputError

BY_BUCKET = ("bucket_loss", "bucket_micro_batches")
RAW, AVERAGED = "eval", "eval_ema"  # how metrics of the weights, and of their average, begin


def step_metrics(block_size: int, edges: Sequence[int]) -> set[str]:
    """The names of a step's metrics that all drafters know, as they come from reduced sums."""
    names = {"loss", "block_prefix", "accuracy/all", "padding_efficiency"}
    names |= {f"accuracy/position_{position:02d}" for position in range(1, block_size)}
    names |= {f"{kind}/{edge:05d}" for kind in BY_BUCKET for edge in edges}
    return names | {"lr", "grad_norm", "skipped_steps", "empty_micro_batches"}


def round_metrics(num_drafts: int, edges: Sequence[int], averaged: bool) -> set[str]:
    """The names of a round's metrics that all drafters know."""
    parts = ["acceptance_length", *(f"position_{k:02d}" for k in range(1, num_drafts + 1))]
    parts += [f"bucket_{edge:05d}" for edge in edges]
    return {f"{name}/{part}" for name in (RAW, AVERAGED)[: 1 + averaged] for part in parts}


class Gates:
    """The gates of a run, each told once. Values are reduced ones, so all drafters agree."""

    def __init__(self, gates: Sequence[GateConfig], known: Collection[str]) -> None:
        """`known`: names of the metrics that all drafters have alike. Raises InputError for a gate
        on another one, or without a bound."""
        for number, gate in enumerate(gates):
            if gate.metric not in known and gate.metric.startswith("eval"):
                raise InputError(
                    f"gates[{number}].metric={gate.metric}: this run has no such round of "
                    "evaluation; set evaluate.every, or gates=[]"
                )
            if gate.metric not in known:
                near = difflib.get_close_matches(gate.metric, known, n=1, cutoff=0.0)
                raise InputError(
                    f"gates[{number}].metric={gate.metric}: not a metric of this run that all "
                    f"drafters know; the nearest is {near[0]}"
                )
            if gate.below is None and gate.above is None and gate.not_below is None:
                raise InputError(f"gates[{number}] on {gate.metric}: set below, above or not_below")
        self._gates = list(gates)

    def idle(self, last: int) -> list[str]:
        """What to say of gates that begin after the `last` step, which has all metrics."""
        return [
            f"gate {gate.metric} from step {gate.step} cannot be violated: this run has that "
            f"metric up to step {last}"
            for gate in self._gates
            if gate.not_below is None and gate.step > last
        ]

    def violated(self, step: int, values: dict[str, float]) -> list[str]:
        """What to say of each gate that `values`, known after `step` steps, violate for the
        first time. A metric that `values` lack, or that is not a number, is no reading."""
        told, staying = [], []
        for gate in self._gates:
            value = values.get(gate.metric, math.nan)
            bound = broken(gate, step, value)
            if bound:
                told.append(f"gate {gate.metric} {bound} is violated: {value:.6g} at step {step}")
            else:
                staying.append(gate)
        self._gates = staying
        return told


def broken(gate: GateConfig, step: int, value: float) -> str:
    """The bound of a gate that `value` after `step` steps breaks, in words; empty if none."""
    if math.isnan(value):
        return ""
    if step < gate.step:
        if gate.not_below is not None and value < gate.not_below:
            return f"not below {gate.not_below:g} before step {gate.step}"
        return ""
    if gate.below is not None and not value < gate.below:
        return f"below {gate.below:g} from step {gate.step}"
    if gate.above is not None and not value > gate.above:
        return f"above {gate.above:g} from step {gate.step}"
    return ""
