"""Time and peak memory of a drafter step (forward and backward) on CPU, beside the PyPI package.

The other side is the model of the package `dflash` under one dense mask over [context; all
blocks], with a plain head and cross-entropy over the same supervised slots: same weights, same
anchors, same loss. Both are timed in one process, in turn; peak memory comes from a process each.
On a machine that others use too, trust the ratio of CPU seconds with `--threads 1`: with more
threads than free cores, both sides mostly wait for each other's.

    python tests/bench/drafter_step.py [--quick] [--json] [--threads 2]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from dflashdist.config import LossConfig
from dflashdist.model.blocks import (
    block_ids,
    block_labels,
    block_positions,
    dense_mask,
    draw_anchors,
    slot_weights,
)
from dflashdist.model.drafter import Drafter
from dflashdist.model.drafter_folder import save_drafter
from dflashdist.model.loss import DrafterBatch, DrafterLoss
from dflashdist.model.shape import DrafterShape
from dflashdist.model.target_files import TargetTensors


@dataclass(frozen=True)
class Size:
    """One line of the table."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rows: int
    width: int
    anchors: int
    block: int
    repeats: int


SIZES = (
    Size("demo", 128, 384, 2, 4, 2, 32, 2112, 4, 256, 32, 8, 9),
    Size("small", 256, 768, 5, 8, 4, 32, 32000, 1, 1024, 128, 16, 5),
    Size("long", 256, 768, 5, 8, 4, 32, 32000, 1, 2048, 256, 16, 3),
)


class Ours:
    """The step as it is trained."""

    def __init__(self, size: Size):
        self.shape, drafter, self.batch, frozen = materials(size)
        self.module = DrafterLoss(drafter, frozen, self.shape, LossConfig())

    def step(self) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss and gradients of one forward and backward."""
        self.module.zero_grad(set_to_none=True)
        loss, _ = self.module(self.batch)
        loss.backward()
        return loss.item(), gradients(self.module.drafter)


class Package:
    """The same work with the package's model, a dense mask and a plain head."""

    def __init__(self, size: Size):
        from dflash.model import DFlashDraftModel

        self.shape, drafter, self.batch, self.frozen = materials(size)
        with tempfile.TemporaryDirectory() as folder:
            save_drafter(folder, drafter, "float32")
            model = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32)
        self.model = model.train()  # attention_dropout is 0

    def step(self) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss and gradients of one forward and backward."""
        self.model.zero_grad(set_to_none=True)
        batch, shape = self.batch, self.shape
        rows, width = batch.ids.shape
        tokens = block_ids(
            batch.ids,
            batch.anchors,
            batch.keep,
            block_size=shape.block_size,
            mask_token_id=shape.mask_token_id,
        )
        context = torch.arange(width).expand(rows, -1)
        positions = torch.cat([context, block_positions(batch.anchors, shape.block_size)], 1)
        out = self.model(
            position_ids=positions,
            attention_mask=dense_mask(batch.anchors, batch.keep, width, shape.block_size),
            noise_embedding=F.embedding(tokens, self.frozen.embedding),
            target_hidden=batch.hidden,
        )
        labels, supervised = block_labels(
            batch.ids,
            batch.loss_mask,
            batch.anchors,
            batch.keep,
            block_size=shape.block_size,
            contiguous_only=True,
        )
        weights = slot_weights(shape.block_size, weights="decay", gamma=None)
        weights = weights.expand_as(supervised)[supervised]
        logits = F.linear(out[supervised.flatten(1)], self.frozen.head)
        losses = F.cross_entropy(logits, labels[supervised], reduction="none")
        loss = (losses * weights).sum()
        loss.backward()
        return loss.item(), gradients(self.model)


def materials(size: Size) -> tuple[DrafterShape, Drafter, DrafterBatch, TargetTensors]:
    """Random weights and one full micro-batch, the same for both sides."""
    shape = DrafterShape(
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        vocab_size=size.vocab,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=40960,
        block_size=size.block,
        mask_token_id=size.vocab - 1,
        target_layer_ids=(1, 2, 3),
        num_target_layers=8,
    )
    drafter = Drafter(shape)
    drafter.reset_parameters("fan_in", seed=0)
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(size.rows, size.width, dtype=torch.bool)
    rows = tuple(range(size.rows))
    anchors, keep = draw_anchors(mask, rows, seed=0, epoch=0, num_anchors=size.anchors)
    batch = DrafterBatch(
        ids=torch.randint(size.vocab - 1, (size.rows, size.width), generator=generator),
        loss_mask=mask,
        hidden=torch.randn(size.rows, size.width, 3 * size.hidden, generator=generator),
        anchors=anchors,
        keep=keep,
        lengths=torch.full((size.rows,), size.width),
    )
    # Logits of size 1, as a trained model's: far larger ones would time denormal exponentials.
    table = torch.randn(2, size.vocab, size.hidden, generator=generator) * size.hidden**-0.5
    return shape, drafter, batch, TargetTensors(table[0], table[1], torch.ones(size.hidden))


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By parameter name."""
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def peak_memory(name: str, side: str, threads: int) -> float:
    """MB that one step adds to the process's peak, in a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--memory",
        side,
        "--only",
        name,
        "--threads",
        str(threads),
    ]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_memory(size: Size, side: str) -> float:
    """The child's part: resident peak (Linux's VmHWM) of two steps, less the memory before them."""
    built = {"ours": Ours, "dflash": Package}[side](size)
    before = resident("VmRSS")
    for _ in range(2):
        built.step()
    return resident("VmHWM") - before


def resident(key: str) -> float:
    """MB of this process: VmRSS now, or VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024


def compare(size: Size, threads: int) -> dict[str, float | str]:
    """One line of the table; also the largest relative difference of any gradient."""
    sides = {"ours": Ours(size), "dflash": Package(size)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    cpu_times: dict[str, list[float]] = {name: [] for name in sides}
    results = {name: side.step() for name, side in sides.items()}  # warm-up, and the same work?
    (our_loss, ours), (their_loss, theirs) = results["ours"], results["dflash"]
    difference = max(
        ((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item() for name in ours
    )
    assert ours.keys() == theirs.keys()
    for _ in range(size.repeats):
        for name, side in sides.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            side.step()
            times[name].append(time.perf_counter() - start)
            cpu_times[name].append(time.process_time() - cpu_start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    cpu = {name: statistics.median(values) for name, values in cpu_times.items()}
    return {
        "size": size.name,
        "ours_s": medians["ours"],
        "dflash_s": medians["dflash"],
        "speedup": medians["dflash"] / medians["ours"],
        "cpu_speedup": cpu["dflash"] / cpu["ours"],
        "ours_mb": peak_memory(size.name, "ours", threads),
        "dflash_mb": peak_memory(size.name, "dflash", threads),
        "loss_difference": abs(our_loss - their_loss) / their_loss,
        "gradient_difference": difference,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the first two sizes, 3 repeats")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", help="one size by name")
    parser.add_argument("--memory", choices=("ours", "dflash"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sizes = [size for size in SIZES if options.only in (None, size.name)]
    if options.memory:
        print(measure_memory(sizes[0], options.memory))
        return
    if options.quick:
        sizes = [Size(**{**vars(size), "repeats": 3}) for size in sizes if size.name != "long"]
    lines = []
    for size in sizes:
        lines.append(compare(size, options.threads))
        if not options.json:
            print_line(size, lines[-1], header=len(lines) == 1)
    if options.json:
        print(json.dumps(lines, indent=2))


def print_line(size: Size, line: dict, *, header: bool) -> None:
    """One size, as soon as it is measured."""
    if header:
        print(f"{'size':34}{'ours s':>8}{'dflash s':>9}{'ratio':>7}{'of CPU s':>9}"
              f"{'ours MB':>9}{'dflash MB':>10}{'grad diff':>11}")  # fmt: skip
    what = f"{size.name} H{size.hidden} L{size.layers} {size.rows}x{size.width}"
    print(
        f"{what + f' {size.anchors}x{size.block}':34}{line['ours_s']:8.3f}{line['dflash_s']:9.3f}"
        f"{line['speedup']:7.2f}{line['cpu_speedup']:9.2f}{line['ours_mb']:9.0f}{line['dflash_mb']:10.0f}"
        f"{line['gradient_difference']:11.1e}",
        flush=True,
    )


if __name__ == "__main__":
    main()
