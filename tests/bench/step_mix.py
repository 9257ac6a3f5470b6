"""What a step sees, by order: the planned one, a shuffle, and two that group lengths otherwise.

    python tests/bench/step_mix.py [--lengths lengths.npy] [--seeds 3] [--json]

For each corpus (or the rows of a file, as `data.lengths` takes it) and W = 28, 56 and 112: the mean
and the worst total variation of a step's mix of lengths from the corpus', over twelve classes, by
supervised tokens; the mean against the shuffle's; the mean relative error of a class's share; and
padding efficiency. All orders have as many micro-batches; the rows go round 3 times:

- planned: the default schedule
- shuffle: rows shuffled in each epoch, cut
- sorted, shuffled: rows sorted by length and cut, the micro-batches shuffled in each epoch
- megabatches: rows shuffled, sorted in groups of 50 micro-batches, longest first (transformers'
  LengthGroupedSampler)
"""

import argparse
import json
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from corpora import CORPORA

from dflashdist.config import ScheduleConfig
from dflashdist.schedule.mix import length_classes, step_shares
from dflashdist.schedule.plan import Plan
from dflashdist.schedule.report import plan_report, read_lengths
from dflashdist.schedule.stream import Steps, Stream

EPOCHS, GRID = 3, 16


def epochs_of(kind: str, lengths: np.ndarray, size: int, seed: int) -> Iterator[list[np.ndarray]]:
    """The micro-batches of each epoch, in order; `size` of them."""
    draw = np.random.default_rng(seed)
    cuts = np.arange(1, size) * len(lengths) // size
    for _ in range(EPOCHS):
        rows = draw.permutation(len(lengths))
        if kind == "sorted, shuffled":
            parts = np.split(rows[lengths[rows].argsort(kind="stable")], cuts)
            yield [parts[index] for index in draw.permutation(size)]
        elif kind == "megabatches":
            group = 50 * -(-len(lengths) // size)
            starts = range(0, len(rows), group)
            groups = [rows[start : start + group] for start in starts]
            rows = np.concatenate(
                [part[(-lengths[part]).argsort(kind="stable")] for part in groups]
            )
            yield np.split(rows, cuts)
        else:
            yield np.split(rows, cuts)


def judge(
    batches: list[np.ndarray], window: int, lengths: np.ndarray, supervised: np.ndarray
) -> dict[str, float]:
    """The figures of an order."""
    classes = length_classes(lengths)
    rows = np.concatenate(batches)
    seqs = np.repeat(np.arange(len(batches)), list(map(len, batches)))
    inside = seqs < len(batches) // window * window
    shares, corpus = step_shares(rows[inside], seqs[inside] // window, classes, supervised)
    distances = np.abs(shares - corpus).sum(axis=1) / 2
    padded = sum(len(part) * -(-int(lengths[part].max()) // GRID) * GRID for part in batches)
    return {
        "mean": float(distances.mean()),
        "worst": float(distances.max()),
        "relative_error": float((np.abs(shares - corpus) / corpus).mean()),
        "padding_efficiency": float(lengths[rows].sum() / padded),
    }


def compare(
    name: str, lengths: np.ndarray, supervised: np.ndarray, seed: int
) -> list[dict[str, Any]]:
    """All orders on one corpus at each W."""
    results = []
    for num_drafters in (7, 14, 28):
        window = 4 * num_drafters
        plan = Plan(
            lengths, supervised, ScheduleConfig(), num_anchors=512, block_size=16, seed=seed,
            min_share=Fraction(2, window),
        )  # fmt: skip
        size = plan.micro_batches_per_epoch
        steps = Steps(plan, num_drafters=num_drafters, accumulation=4, epochs=EPOCHS)
        report = plan_report(
            Stream(steps), queue_depth=64, num_states=5, hidden_size=4096, dtype="bfloat16"
        )
        ours = [plan.micro_batch(seq).rows for seq in range(EPOCHS * size)]
        orders = {"planned": ours} | {
            kind: [batch for epoch in epochs_of(kind, lengths, size, seed) for batch in epoch]
            for kind in ("shuffle", "sorted, shuffled", "megabatches")
        }
        found = {
            kind: judge(batches, window, lengths, supervised) for kind, batches in orders.items()
        }
        for kind, values in found.items():
            results.append(
                {
                    "corpus": name, "seed": seed, "W": window, "order": kind, **values,
                    "vs_shuffle": values["mean"] / found["shuffle"]["mean"],
                    "wasted_fraction": report["wasted_fraction"] if kind == "planned" else None,
                }
            )  # fmt: skip
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--lengths", help="an integer .npy file [N] or [2, N], as data.lengths")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    lines = []
    for seed in range(options.seeds):
        if options.lengths:
            corpora = {"file": read_lengths(options.lengths, ScheduleConfig().max_tokens)}
        else:
            corpora = {name: make(seed) for name, make in CORPORA.items()}
        for name, (lengths, supervised) in corpora.items():
            lines += compare(name, lengths, supervised, seed)
    if options.json:
        print(json.dumps(lines, indent=1))
        return
    print(f"{'corpus':<15} {'W':>4}  {'order':<17}{'mean TV':>8}{'vs shuffle':>11}{'worst':>7}"
          f"{'rel. error':>11}{'padding':>8}{'waste':>7}")  # fmt: skip
    keys = dict.fromkeys((line["corpus"], line["W"], line["order"]) for line in lines)
    for corpus, window, order in keys:
        key = (corpus, window, order)
        same = [line for line in lines if (line["corpus"], line["W"], line["order"]) == key]
        mean = {
            name: np.mean([line[name] for line in same])
            for name, value in same[0].items()
            if isinstance(value, float)
        }
        waste = f"{mean['wasted_fraction']:.4f}" if order == "planned" else ""
        print(f"{corpus:<15} {window:>4}  {order:<17}{mean['mean']:>8.3f}"
              f"{mean['vs_shuffle']:>11.2f}{mean['worst']:>7.3f}{mean['relative_error']:>11.2f}"
              f"{mean['padding_efficiency']:>8.3f}{waste:>7}")  # fmt: skip


if __name__ == "__main__":
    main()
