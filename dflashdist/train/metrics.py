"""What a step did: sums reduced once over the drafters, the time of each role, and how both are
shown (console, tensorboard).

Counts and sums are float64: anchors x block positions x W comes near 2^24, where float32 stops
counting. The sums of a step end with each micro-batch's own loss and weight, so the reduced vector
tells every rank alike which seq was not finite, and rank 0 the loss of each bucket.
"""

import logging
import math
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from dflashdist.model.loss import LossSums, sums_layout
from dflashdist.schedule.plan import MicroBatch, Plan
from dflashdist.schedule.stream import Steps
from dflashdist.train.gates import BY_BUCKET

log = logging.getLogger(__name__)

LINE = 100  # columns of the console
EXTRAS = ("tokens", "padded_tokens", "stop", "wait", "transfer", "total")


class Clock:
    """Cuts a thread's time into waiting, transfer and the rest, which is compute. Seconds."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.wait = self.transfer = 0.0
        self._began = time.perf_counter()

    @property
    def total(self) -> float:
        return time.perf_counter() - self._began

    def leave_out(self, seconds: float) -> None:
        """Count the last `seconds` as spent elsewhere."""
        self._began += seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.wait += time.perf_counter() - began

    @contextmanager
    def transferring(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.transfer += time.perf_counter() - began

    def reading(self) -> dict[str, float]:
        return {"wait": self.wait, "transfer": self.transfer, "total": self.total}


def fractions(spent: dict[str, float]) -> dict[str, float]:
    """Shares of wait, transfer and compute that sum to 1, from seconds of wait, transfer, total."""
    total = max(spent["total"], 1e-9)
    wait, transfer = spent["wait"] / total, spent["transfer"] / total
    return {"wait": wait, "transfer": transfer, "compute": 1.0 - wait - transfer}


class StepSums:
    """The sums of one step on one rank: float64 [LossSums, extras, (loss, weight) of each seq]."""

    def __init__(self, block_size: int, seqs: range, device: torch.device) -> None:
        self.seqs, self._block_size = seqs, block_size
        self._extras = LossSums.size(block_size)
        self._pairs = self._extras + len(EXTRAS)
        self.vector = torch.zeros(self._pairs + 2 * len(seqs), dtype=torch.float64, device=device)

    def add(self, micro_batch: MicroBatch, sums: Tensor) -> None:
        """Add a micro-batch's vector of `sums_layout`, without waiting for the device."""
        layout = sums_layout(self._block_size)
        self.vector[: self._extras] += sums
        place = self._pairs + 2 * (micro_batch.seq - self.seqs.start)
        self.vector[place : place + 1] = sums[layout["loss"]]
        self.vector[place + 1 : place + 2] = sums[layout["weight"]]
        self.add_extra("tokens", micro_batch.num_tokens)
        self.add_extra("padded_tokens", len(micro_batch.rows) * micro_batch.width)

    def add_extra(self, name: str, value: float) -> None:
        self.vector[self._extras + EXTRAS.index(name)] += value

    def all_reduce(self, group: dist.ProcessGroup) -> None:
        """One fused sum over the drafters; then `vector` is on the CPU and alike everywhere."""
        dist.all_reduce(self.vector, group=group)
        self.vector = self.vector.cpu()

    @classmethod
    def total(cls, steps: "Sequence[StepSums]") -> "StepSums":
        """The sums of several reduced steps, without their seqs'."""
        total = cls(steps[0]._block_size, range(0), torch.device("cpu"))
        for one in steps:
            total.vector += one.vector[: one._pairs]
        return total

    def extra(self, name: str) -> float:
        return float(self.vector[self._extras + EXTRAS.index(name)])

    @property
    def loss(self) -> LossSums:
        """The loss's part of the sums, by name."""
        return LossSums(self.vector[: self._extras], self._block_size)

    def pairs(self) -> list[list[float]]:
        """(loss, weight) of each seq of the step."""
        return self.vector[self._pairs :].view(-1, 2).tolist()

    def empty(self) -> list[int]:
        """The seqs without a supervised slot."""
        pairs = zip(self.seqs, self.pairs(), strict=True)
        return [seq for seq, (_, weight) in pairs if weight == 0]

    def not_finite(self) -> list[int]:
        """The seqs whose loss or weight is not finite."""
        pairs = zip(self.seqs, self.pairs(), strict=True)
        return [seq for seq, pair in pairs if not all(map(math.isfinite, pair))]


def summary(steps: Sequence[StepSums], plan: Plan) -> dict[str, float]:
    """What is shown of these steps: means over all their supervised slots and blocks, sums divided
    by sums. A step whose loss is not finite, which was skipped, counts only where there is no
    other."""
    finite = [one for one in steps if not one.not_finite()] or steps
    sums = StepSums.total(finite)
    result = {"loss": sums.loss.loss, "block_prefix": sums.loss.block_prefix}
    for position, accuracy in enumerate(sums.loss.accuracy, 1):
        result[f"accuracy/position_{position:02d}"] = accuracy
    correct, count = (float(sums.loss.part(name).sum()) for name in ("correct", "count"))
    result["accuracy/all"] = correct / max(count, 1.0)
    result["padding_efficiency"] = sums.extra("tokens") / max(sums.extra("padded_tokens"), 1.0)
    by_bucket: dict[int, list[float]] = {}
    for one in finite:
        for seq, (loss, weight) in zip(one.seqs, one.pairs(), strict=True):
            totals = by_bucket.setdefault(plan.micro_batch(seq).bucket, [0.0, 0.0, 0.0])
            for index, value in enumerate((loss, weight, 1 / len(finite))):
                totals[index] += value
    for bucket, (loss, weight, number) in sorted(by_bucket.items()):
        for kind, value in zip(BY_BUCKET, (loss / max(weight, 1e-9), number), strict=True):
            result[f"{kind}/{plan.edges[bucket]:05d}"] = value
    return result


def target_totals(beats: dict[int, dict[str, Any]]) -> dict[str, float]:
    """The targets' counters, summed over ranks, as their signs of life last told them."""
    stats = [beat["stats"] for beat in beats.values() if beat["stats"]]
    return {
        name: sum(one[name] for one in stats) for name in ("tokens", "wait", "transfer", "total")
    }


class Reporter:
    """Rank 0's console line and tensorboard points every `every` steps, of the steps since the last
    ones: means, but learning rate and gradient norm, which are the last step's."""

    def __init__(
        self, plan: Plan, steps: Steps, *, first_step: int, tensorboard: str, every: int
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and rank 0's alone

        self._plan, self._steps, self._every = plan, steps, every
        self._writer = SummaryWriter(tensorboard, purge_step=first_step + 1)
        self._first, self._began = first_step, time.perf_counter()
        self._last = self._began
        self._steps_since: list[StepSums] = []
        self._targets = target_totals({})
        self._targets_since = self._began
        self._bar = tqdm(
            total=steps.num_steps, initial=first_step, unit="step", disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
        )  # fmt: skip

    def step(
        self,
        step: int,
        sums: StepSums,
        *,
        lr: float,
        grad_norm: float,
        skipped: int,
        empty: int,
        queue_depth: int | None,
        beats: dict[int, dict[str, Any]],
    ) -> None:
        """Show step `step` (its number after the step, so 1 is the first)."""
        self._steps_since.append(sums)
        self._bar.update(1)
        if step % self._every and step != self._steps.num_steps and step != self._first + 1:
            return
        now = time.perf_counter()
        values = summary(self._steps_since, self._plan)
        total = StepSums.total(self._steps_since)
        values |= {"lr": lr, "grad_norm": grad_norm}
        values |= {"skipped_steps": skipped, "empty_micro_batches": empty}
        values["tokens_per_second/drafters"] = total.extra("tokens") / (now - self._last)
        shares = fractions({name: total.extra(name) for name in ("wait", "transfer", "total")})
        values |= {f"time/drafters_{name}": share for name, share in shares.items()}
        targets = target_totals(beats)
        news = {name: value - self._targets[name] for name, value in targets.items()}
        if news["total"] > 0:
            seconds = max(now - self._targets_since, 1e-9)
            values["tokens_per_second/targets"] = news["tokens"] / seconds
            values |= {f"time/targets_{name}": share for name, share in fractions(news).items()}
            self._targets, self._targets_since = targets, now
        if queue_depth is not None:
            values["queue_depth"] = queue_depth
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        per_step = (now - self._began) / (step - self._first)
        eta = per_step * (self._steps.num_steps - step)
        self._say(step_line(step, self._steps.num_steps, values, eta))
        self._last, self._steps_since = now, []

    def evaluation(self, step: int, values: dict[str, float], best: bool) -> None:
        """Show the round after step `step`; its seconds are no training's."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._last += values["eval/seconds"]
        length = values.get("eval/acceptance_length", math.nan)
        averaged = ""
        if "eval_ema/acceptance_length" in values:
            averaged = f", of averaged weights {values['eval_ema/acceptance_length']:.3f}"
        shares = [f"{v:.2f}" for name, v in values.items() if name.startswith("eval/position_")]
        self._say(
            f"evaluation after step {step} | acceptance length {length:.3f}{averaged} | "
            f"{values['eval/seconds']:.1f} s" + (" | best so far" if best else "")
        )
        for line in textwrap.wrap(f"by position {' '.join(shares)}", LINE - 2):
            self._say(f"  {line}")

    def warning(self, step: int, text: str) -> None:
        """Leave a warning beside the curves."""
        self._writer.add_text("warnings", text, step)

    def _say(self, line: str) -> None:
        log.info(line)
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        self._bar.close()
        self._writer.close()


def step_line(step: int, last: int, values: dict[str, float], eta: float) -> str:
    """The console's line of a step, of at most `LINE` columns."""
    tokens = values["tokens_per_second/drafters"]
    waits = f"wait d {values['time/drafters_wait']:.0%}"
    if "time/targets_wait" in values:
        waits += f" t {values['time/targets_wait']:.0%}"
    parts = [
        f"step {step}/{last}",
        f"loss {values['loss']:.4f}",
        f"block prefix {values['block_prefix']:.2f}",
        f"{tokens:,.0f} tok/s" if tokens < 10_000 else f"{tokens / 1000:,.0f}k tok/s",
        f"eta {clock_text(eta)}",
        waits,
    ]
    line = " | ".join(parts)
    return line if len(line) <= LINE else " | ".join(parts[:-1])


class ConsoleHandler(logging.Handler):
    """Warnings on stderr, each on a line of its own beside the progress bar."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def clock_text(seconds: float) -> str:
    """h:mm:ss."""
    whole = math.ceil(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
