"""What a step did: sums reduced once over the drafters, the time of each role, and how both are
shown (console, tensorboard).

Counts and sums are float64: anchors x block positions x W comes near 2^24, where float32 stops
counting. The sums of a step end with each micro-batch's own loss and weight, so the reduced vector
tells every rank alike which seq was not finite, and rank 0 the loss of each bucket.
"""

import logging
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from dflashdist.model.loss import LossSums, sums_layout
from dflashdist.schedule.plan import MicroBatch, Plan, Steps

log = logging.getLogger(__name__)

BY_BUCKET = ("bucket_loss", "bucket_micro_batches")
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

    def extra(self, name: str) -> float:
        return float(self.vector[self._extras + EXTRAS.index(name)])

    @property
    def loss(self) -> LossSums:
        """The loss's part of the sums, by name."""
        return LossSums(self.vector[: self._extras], self._block_size)

    def pairs(self) -> list[list[float]]:
        """(loss, weight) of each seq of the step."""
        return self.vector[self._pairs :].view(-1, 2).tolist()

    def not_finite(self) -> list[int]:
        """The seqs whose loss or weight is not finite."""
        pairs = zip(self.seqs, self.pairs(), strict=True)
        return [seq for seq, pair in pairs if not all(map(math.isfinite, pair))]

    def summary(self, plan: Plan) -> dict[str, float]:
        """What tensorboard shows of the step: means over its supervised slots and its blocks."""
        sums = self.loss
        result = {"loss": sums.loss, "accepted_length": sums.accept_length}
        for position, accuracy in enumerate(sums.accuracy, 1):
            result[f"accuracy/position_{position:02d}"] = accuracy
        correct, count = float(sums.part("correct").sum()), float(sums.part("count").sum())
        result["accuracy/all"] = correct / max(count, 1.0)
        result["padding_efficiency"] = self.extra("tokens") / max(self.extra("padded_tokens"), 1.0)
        by_bucket: dict[int, list[float]] = {}
        for seq, (loss, weight) in zip(self.seqs, self.pairs(), strict=True):
            totals = by_bucket.setdefault(plan.micro_batch(seq).bucket, [0.0, 0.0, 0.0])
            for index, value in enumerate((loss, weight, 1.0)):
                totals[index] += value
        for bucket, (loss, weight, number) in sorted(by_bucket.items()):
            for kind, value in zip(BY_BUCKET, (loss / max(weight, 1e-9), number), strict=True):
                result[f"{kind}/{plan.edges[bucket]:05d}"] = value
        return result


def step_metrics(block_size: int, edges: Sequence[int]) -> set[str]:
    """The names of a step's metrics that all drafters know, as they come from reduced sums."""
    names = {"loss", "accepted_length", "accuracy/all", "padding_efficiency"}
    names |= {f"accuracy/position_{position:02d}" for position in range(1, block_size)}
    names |= {f"{kind}/{edge:05d}" for kind in BY_BUCKET for edge in edges}
    return names | {"lr", "grad_norm", "skipped_steps"}


def target_totals(beats: dict[int, dict[str, Any]]) -> dict[str, float]:
    """The targets' counters, summed over ranks, as their signs of life last told them."""
    stats = [beat["stats"] for beat in beats.values() if beat["stats"]]
    return {
        name: sum(one[name] for one in stats) for name in ("tokens", "wait", "transfer", "total")
    }


class Reporter:
    """Rank 0's console line and tensorboard points, every `every` steps."""

    def __init__(
        self, plan: Plan, steps: Steps, *, first_step: int, tensorboard: str, every: int
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and rank 0's alone

        self._plan, self._steps, self._every = plan, steps, every
        self._writer = SummaryWriter(tensorboard, purge_step=first_step + 1)
        self._first, self._began = first_step, time.perf_counter()
        self._last = self._began
        self._tokens = 0.0
        self._spent = {"wait": 0.0, "transfer": 0.0, "total": 0.0}
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
        queue_depth: int | None,
        beats: dict[int, dict[str, Any]],
    ) -> None:
        """Show step `step` (its number after the step, so 1 is the first)."""
        self._tokens += sums.extra("tokens")
        for name in self._spent:
            self._spent[name] += sums.extra(name)
        self._bar.update(1)
        if step % self._every and step != self._steps.num_steps and step != self._first + 1:
            return
        now = time.perf_counter()
        values = sums.summary(self._plan)
        values |= {"lr": lr, "grad_norm": grad_norm, "skipped_steps": skipped}
        values["tokens_per_second/drafters"] = self._tokens / (now - self._last)
        shares = fractions(self._spent)
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
        eta = clock_text(per_step * (self._steps.num_steps - step))
        queue = "" if queue_depth is None else f" | queue {queue_depth}"
        waits = f" | wait d {values['time/drafters_wait']:.0%}"
        if "time/targets_wait" in values:
            waits += f" t {values['time/targets_wait']:.0%}"
        line = (
            f"step {step}/{self._steps.num_steps} | loss {values['loss']:.4f} | "
            f"accepted {values['accepted_length']:.3f} | lr {lr:.2e} | norm {grad_norm:.2f} | "
            f"{values['tokens_per_second/drafters']:,.0f} tok/s{queue}{waits} | eta {eta}"
        )
        self._say(line)
        self._last, self._tokens = now, 0.0
        self._spent = dict.fromkeys(self._spent, 0.0)

    def evaluation(self, step: int, values: dict[str, float], best: bool) -> None:
        """Show the round after step `step`; its seconds are no training's."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._last += values["eval/seconds"]
        length = values.get("eval/acceptance_length", math.nan)
        averaged = ""
        if "eval_ema/acceptance_length" in values:
            averaged = f" (of averaged weights {values['eval_ema/acceptance_length']:.3f})"
        shares = [f"{v:.2f}" for name, v in values.items() if name.startswith("eval/position_")]
        self._say(
            f"evaluation after step {step} | acceptance length {length:.3f}{averaged} | "
            f"by position {' '.join(shares)} | {values['eval/seconds']:.1f} s"
            + (" | best so far" if best else "")
        )

    def warning(self, step: int, text: str) -> None:
        """Leave a warning beside the curves."""
        self._writer.add_text("warnings", text, step)

    def _say(self, line: str) -> None:
        log.info(line)
        self._bar.write(line, file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        self._bar.close()
        self._writer.close()


def clock_text(seconds: float) -> str:
    """h:mm:ss."""
    whole = math.ceil(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
