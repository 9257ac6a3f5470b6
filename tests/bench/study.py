"""What helps a small drafter in the same time: objectives, blocks, depth, variants, order.

    python tests/bench/study.py [--seconds 45] [--seeds 3] [--only NAME ...] [--out FILE] [--json]

Each run trains a drafter for the demo's target, alone on one thread, for so many seconds of
processor time (so that other load on the machine does not count), its learning rate annealed over
them, and measures acceptance length on the demo's held-out prompts with the answers that the target
wrote: teacher-forced, which equals decoding. Hidden states are computed once and read from a file,
so the seconds are the drafter's own. Results are added to the file `--out` run by run; a run that
is there is not repeated. The base is blocks of 8, 2 layers, decay by gamma, even order.

Orders: `even` is the plan's; `shuffle` the same micro-batches in random order; `by bucket` the
shortest rows first, bucket after bucket. They are compared on `FEW` of the rows, so
that a run sees whole epochs: on all of them, `by bucket` would never leave the shortest.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from torch import Tensor

from dflashdist.checks import needs_last
from dflashdist.config import Config, load_config
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.prepare import prepare
from dflashdist.data.shards import TokenStore, collate
from dflashdist.model.blocks import draw_anchors, pack, unpack
from dflashdist.model.drafter import Drafter
from dflashdist.model.initial import initialise
from dflashdist.model.loss import DrafterBatch, DrafterLoss, LossSums
from dflashdist.model.shape import DrafterShape
from dflashdist.model.target import Target
from dflashdist.model.target_files import TargetTensors, read_target_config
from dflashdist.model.teacher_forced import AcceptanceSums, teacher_forced
from dflashdist.schedule.plan import Plan
from dflashdist.train.optim import build_optimizer, learning_rate, scale_and_clip, set_rate

DEMO = Path(__file__).parents[2] / "launch/demo"
TARGET = str(DEMO / "target")
WINDOW = 2  # micro-batches a step, as in the demo
NUM_ORIGINAL = 3800  # conversations of original text, about as many as the target answered
FEW = 600  # rows of the runs that compare orders: about 160 steps an epoch
STEPS = 10_000  # what the learning rate counts in: shares of the time
BASE = [
    f"target.path={TARGET}", "data.max_length=256", "drafter.num_layers=2",
    "drafter.target_layer_ids=[0,2,4]", "drafter.block_size=8", "drafter.num_anchors=32",
    "drafter.selector_rank=32", "drafter.markov_rank=32", "drafter.conv_group_size=16",
    "schedule.max_tokens=1024", "schedule.max_anchors=64", "schedule.bucket_edges=[48,64,96,256]",
    "schedule.grid=16", "optim.lr=4e-3",
]  # fmt: skip
# Name: (answers, order, overrides).
RUNS: dict[str, tuple[str, str, list[str]]] = {
    "base: gamma 4, block 8, 2 layers": ("target", "even", []),
    "uniform weights": ("target", "even", ["loss.weights=uniform"]),
    "D-PACE": ("target", "even", ["loss.weights=dpace"]),
    "KL to the target": ("target", "even", ["loss.terms={kl: 1.0, ce: 0.0}"]),
    "CE + KL": ("target", "even", ["loss.terms={ce: 1.0, kl: 1.0}"]),
    "original text, not the target's": ("data", "even", []),
    "block 4": ("target", "even", ["drafter.block_size=4"]),
    "block 16": ("target", "even", ["drafter.block_size=16"]),
    "3 layers": ("target", "even", ["drafter.num_layers=3"]),
    "target's last layers as a start": ("target", "even", ["drafter.init=target_layers"]),
    "Muon": ("target", "even", ["optim.kind=muon"]),
    "DFlash 2": ("target", "even", ["drafter.variant=dflash2"]),
    "DSpark (CE and TV)": (
        "target", "even", ["drafter.variant=dspark", "loss.terms={ce: 0.1, tv: 1.8}"],
    ),
    "few rows, even order": ("few", "even", []),
    "few rows, plain shuffle": ("few", "shuffle", []),
    "few rows, bucket by bucket": ("few", "by bucket", []),
}  # fmt: skip


class States:
    """A store's rows with the target's hidden states of each, taps and last, from a file."""

    def __init__(self, folder: Path, num_taps: int) -> None:
        self.store = TokenStore.open(folder)
        self._starts = np.concatenate([[0], np.cumsum(self.store.lengths, dtype=np.int64)])
        self._values = np.load(folder / "states.npy", mmap_mode="r")  # [tokens, (K + 1) * H]
        self._taps = self._values.shape[1] // (num_taps + 1) * num_taps

    def batch(self, rows: np.ndarray, width: int) -> tuple[Any, Tensor, Tensor]:
        """Tokens, tapped states [B, S, K*H] and last states [B, S, H] of some rows."""
        tokens = collate(self.store, seq=0, epoch=0, rows=rows, width=width, pad_id=0)
        packed = np.concatenate([self._values[self._starts[r] : self._starts[r + 1]] for r in rows])
        states = unpack(torch.from_numpy(packed), tokens.lengths, width)
        return tokens, states[..., : self._taps].contiguous(), states[..., self._taps :]


def make_data(folder: Path, config: Config) -> None:
    """The stores of both kinds of answers and of the held-out ones, with states beside them."""
    sys.path.insert(0, str(DEMO))
    from corpus import conversations, library_things

    things = [thing for thing in library_things() if not thing.held_out]
    talks = [messages for thing in things for messages in conversations(thing)]
    chat = ChatTokenizer.load(TARGET)
    texts = [chat.render(messages) for messages in talks]
    lengths = [len(encoding.ids) for encoding in chat.encode(texts)]
    short = [messages for messages, n in zip(talks, lengths, strict=True) if n <= 256]
    lines = folder / "data.jsonl"
    with open(lines, "w", encoding="utf-8") as file:
        for i in range(NUM_ORIGINAL):
            messages = short[i * len(short) // NUM_ORIGINAL]
            file.write(json.dumps({"messages": messages}) + "\n")
    data = replace(config.data, workers=1, max_rejected=1.0)
    sources = {
        "target": DEMO / "train.jsonl.gz",
        "data": lines,
        "heldout": DEMO / "heldout.jsonl.gz",
    }
    ids = config.drafter.target_layer_ids
    assert ids is not None
    target = Target(TARGET, ids, with_last=True)
    for name, source in sources.items():
        prepare([source], TARGET, folder / name, data, overwrite=True)
        store = TokenStore.open(folder / name)
        out = []
        for first in range(0, store.num_rows, 32):
            rows = np.arange(first, min(first + 32, store.num_rows))
            width = int(store.lengths[rows].max())
            tokens = collate(store, seq=0, epoch=0, rows=rows, width=width, pad_id=0)
            out.append(pack(target.hidden_states(tokens.ids, tokens.lengths), tokens.lengths))
        np.save(folder / name / "states.npy", torch.cat(out).numpy())


def stream(plan: Plan, order: str, seed: int) -> Iterator[tuple[int, np.ndarray, int]]:
    """(epoch, rows, width) of micro-batches, without end."""
    draw = np.random.default_rng(seed)
    epoch = 0
    while True:
        first = epoch * plan.micro_batches_per_epoch
        batches = [plan.micro_batch(first + n) for n in range(plan.micro_batches_per_epoch)]
        if order == "shuffle":
            draw.shuffle(batches)
        elif order == "by bucket":
            batches.sort(key=lambda one: one.bucket)
        for one in batches:
            yield epoch, one.rows, one.width
        epoch += 1


def run(folder: Path, name: str, seed: int, seconds: float) -> dict[str, Any]:
    """Train and measure one drafter."""
    answers, order, overrides = RUNS[name]
    config = load_config(None, [*BASE, *overrides])
    torch.set_num_threads(1)
    chat = ChatTokenizer.load(TARGET)
    shape = DrafterShape.from_target(read_target_config(TARGET), chat.length, config.drafter)
    frozen, drafter = TargetTensors.load(TARGET), Drafter(shape)
    initialise(
        drafter, config.drafter, TARGET, None, seed=seed, final_norm=frozen.final_norm.float()
    )
    model = DrafterLoss(drafter, frozen, shape, config.loss)
    optimizer = build_optimizer(config.optim, drafter)
    states = States(folder / ("data" if answers == "data" else "target"), shape.num_features)
    some = np.arange(states.store.num_rows)
    if answers == "few":
        some = some[np.arange(FEW) * len(some) // FEW]
    plan = Plan(
        states.store.lengths[some], states.store.supervised[some], config.schedule,
        num_anchors=config.drafter.num_anchors, block_size=shape.block_size, seed=seed,
    )  # fmt: skip
    with_last = needs_last(config.loss, config.drafter)
    batches = stream(plan, order, seed)
    began, steps, epoch, spent = time.process_time(), 0, 0, 0.0
    while spent < seconds:
        total = LossSums.zeros(shape.num_drafts + 1).vector
        for _ in range(WINDOW):
            epoch, rows, width = next(batches)
            tokens, hidden, last = states.batch(some[rows], width)
            anchors, keep = draw_anchors(
                tokens.loss_mask, tokens.row_ids, seed=seed, epoch=epoch,
                num_anchors=config.drafter.num_anchors,
            )  # fmt: skip
            batch = DrafterBatch(tokens.ids, tokens.loss_mask, hidden, anchors, keep,
                                 tokens.lengths, last if with_last else None)  # fmt: skip
            loss, sums = model(batch)
            loss.backward()
            total += sums
        weight = LossSums(total, shape.num_drafts + 1).weight
        scale_and_clip(drafter, 1 / weight, config.optim.max_grad_norm)
        set_rate(optimizer, learning_rate(config.optim, int(spent / seconds * STEPS), STEPS))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1
        spent = time.process_time() - began
    found = measure(folder, drafter, frozen, chat)
    return {"name": name, "seed": seed, "seconds": seconds, "steps": steps, "epochs": epoch} | found


@torch.no_grad()
def measure(
    folder: Path, drafter: Drafter, frozen: TargetTensors, chat: ChatTokenizer
) -> dict[str, float]:
    """Acceptance length of greedy decoding on the held-out answers, pooled and mean."""
    states = States(folder / "heldout", drafter.shape.num_features)
    parts = []
    for row in range(states.store.num_rows):
        tokens, hidden, _ = states.batch(np.array([row]), int(states.store.lengths[row]))
        nothing = tokens.ids.new_zeros(1, 1)
        batch = DrafterBatch(
            tokens.ids, tokens.loss_mask, hidden, nothing, nothing.bool(), tokens.lengths
        )
        parts.append(
            teacher_forced(drafter, frozen, batch, end_ids=chat.end_ids, max_new_tokens=256)
        )
    sums = AcceptanceSums.total(parts, drafter.shape.num_drafts)
    return {
        "acceptance_length": float(sums.part("tokens") / sums.part("passes")),
        "mean_acceptance_length": float(sums.part("means") / sums.part("answers")),
    }


def table(results: list[dict[str, Any]]) -> str:
    """Mean and spread over seeds of each kind of run."""
    lines = [f"{'run':<36} {'acceptance length':>18} {'mean of answers':>16} {'steps':>6}  seeds"]
    for name in RUNS:
        found = [result for result in results if result["name"] == name]
        if not found:
            continue
        pooled = [result["acceptance_length"] for result in found]
        means = statistics.mean(result["mean_acceptance_length"] for result in found)
        spread = f"{min(pooled):.2f}-{max(pooled):.2f}"
        steps = statistics.mean(result["steps"] for result in found)
        lines.append(f"{name:<36} {statistics.mean(pooled):>7.3f} {spread:>10} {means:>16.3f} "
                     f"{steps:>6.0f}  {len(found)}")  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    """Command line: see the top of the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=45.0, help="of processor time, each run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--processes", type=int, default=2, help="runs at once")
    parser.add_argument("--out", type=Path, help="JSON Lines of results, added to")
    parser.add_argument("--data", type=Path, help="where stores and states are, or will be kept")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder, out = options.data or Path(place), options.out or Path(place) / "results.jsonl"
        if not (folder / "heldout/states.npy").exists():
            folder.mkdir(parents=True, exist_ok=True)
            make_data(folder, load_config(None, BASE))
        results = list(map(json.loads, out.read_text().splitlines())) if out.exists() else []
        done = {(result["name"], result["seed"]) for result in results}
        wanted = [(n, s) for s in range(options.seeds) for n in options.only if (n, s) not in done]
        context = multiprocessing.get_context("spawn")
        with context.Pool(options.processes, maxtasksperchild=1) as pool:
            jobs = [pool.apply_async(run, (folder, n, s, options.seconds)) for n, s in wanted]
            for job in jobs:
                results.append(job.get())
                with open(out, "a") as file:
                    file.write(json.dumps(results[-1]) + "\n")
                if not options.json:
                    print(json.dumps(results[-1]), flush=True)
    print(json.dumps(results, indent=1) if options.json else table(results))


if __name__ == "__main__":
    main()
