"""Evaluation rounds inside training: acceptance on held-out rows, counted without decoding.

Each drafter takes its share of a round's micro-batches; their hidden states come from the same
source as training's, and one all-reduce adds up what was counted. A round reads weights and changes
none, draws nothing, and has seqs of its own: training is the same, to the bit, with and without.
"""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dflashdist.cluster.health import Health
from dflashdist.cluster.workqueue import Trace
from dflashdist.files import whole_file
from dflashdist.model.drafter import Drafter
from dflashdist.model.target_files import TargetTensors
from dflashdist.model.teacher_forced import AcceptanceSums, teacher_forced
from dflashdist.schedule.stream import Stream
from dflashdist.train.gates import RAW
from dflashdist.train.sources import StateSource


@dataclass(frozen=True)
class Best:
    """The best round so far."""

    step: int
    acceptance_length: float
    measured_on: str  # rounds of another `TrainingJob.measured_on` do not compare


class Evaluator:
    """The rounds of one drafter rank."""

    def __init__(
        self,
        stream: Stream,
        source: StateSource,
        frozen: TargetTensors,
        drafters: dict[str, Drafter],
        *,
        drafter: int,
        group: dist.ProcessGroup,
        device: torch.device,
        health: Health,
        trace: Trace,
        max_new_tokens: int,
        autocast: bool,
    ) -> None:
        """`drafters`: what to evaluate, by how its metrics' names begin; `RAW` is among them.
        `drafter`: this rank's index among the drafters of `group`."""
        assert stream.rounds is not None
        self._stream, self._source, self._frozen = stream, source, frozen
        self._drafters, self._drafter, self._group = drafters, drafter, group
        self._device, self._health, self._trace = device, health, trace
        self._max_new_tokens, self._autocast = max_new_tokens, autocast
        self._plan = stream.rounds.plan
        self._num_drafts = drafters[RAW].shape.num_drafts

    def round(self, step: int) -> dict[str, float]:
        """Metrics of the weights after `step` steps: reduced, so the same on every drafter."""
        began = time.perf_counter()
        sums = torch.zeros(  # [drafters, buckets, counts]
            len(self._drafters),
            self._plan.num_buckets,
            AcceptanceSums.size(self._num_drafts),
            dtype=torch.float64,
            device=self._device,
        )
        for seq in self._stream.round_share(step, self._drafter):
            self._health.phase("wait for hidden states", seq)
            batch = self._source.hidden_states(seq)
            bucket = self._stream.micro_batch(seq).bucket
            self._health.phase("evaluate", seq, bucket)
            self._trace("evaluate", step=step, seq=seq)
            for place, drafter in enumerate(self._drafters.values()):
                with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
                    counted = teacher_forced(
                        drafter, self._frozen, batch, max_new_tokens=self._max_new_tokens
                    )
                sums[place, bucket] += counted.vector
            del batch
        self._health.phase("wait for the other drafters")
        dist.all_reduce(sums, group=self._group)
        values: dict[str, float] = {}
        for name, by_bucket in zip(self._drafters, sums.cpu(), strict=True):
            total = AcceptanceSums(by_bucket.sum(0))
            values[f"{name}/acceptance_length"] = total.acceptance_length
            for k, share in enumerate(total.position_acceptance, 1):
                values[f"{name}/position_{k:02d}"] = share
            for edge, part in zip(self._plan.edges, by_bucket, strict=True):
                values[f"{name}/bucket_{edge:05d}"] = AcceptanceSums(part).acceptance_length
        values = {name: value for name, value in values.items() if not math.isnan(value)}
        return values | {f"{RAW}/seconds": time.perf_counter() - began}


class RoundLog:
    """One JSON line a round, in the run folder. Rounds that a resumed run repeats are dropped."""

    def __init__(self, file: Path, first_step: int) -> None:
        """`first_step`: rounds from this step on are still to come."""
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = file.read_text().splitlines() if file.is_file() else []
        kept = [line for line in lines if step_of(line) < first_step]
        with whole_file(file) as new:
            new.write("".join(line + "\n" for line in kept))

    def add(self, step: int, values: dict[str, float], facts: dict[str, Any]) -> None:
        """Append the round after `step`."""
        with open(self._file, "a") as file:
            file.write(json.dumps({"step": step} | facts | values) + "\n")


def step_of(line: str) -> float:
    """The step of a round's line; of one that a kill has cut short, infinity."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
