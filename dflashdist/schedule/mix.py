"""What optimizer steps see: how far the mix of lengths in a step is from that of the corpus.

Judged by the rows and not by the plan's own buckets. Lengths are cut into twelve classes with
equally many rows; a mix is the share of each class in the supervised tokens; the distance of two
mixes is their total variation, half the sum of the differences: the part of the tokens that would
have to be of another class. A step of few micro-batches cannot have distance 0, so what a plain
shuffle of the rows gives, cut into as many micro-batches, is measured beside it.
"""

from typing import Any

import numpy as np

from dflashdist.schedule.stream import Steps

NUM_CLASSES = 12


def length_classes(lengths: np.ndarray) -> np.ndarray:
    """The class of each row, int64 [N]: of `NUM_CLASSES` quantiles, fewer where lengths repeat."""
    cuts = np.quantile(lengths, np.arange(1, NUM_CLASSES) / NUM_CLASSES)
    return np.searchsorted(np.unique(cuts), lengths)


def step_shares(
    rows: np.ndarray, step: np.ndarray, classes: np.ndarray, supervised: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The mix of each step, float64 [steps, classes], and that of all rows [classes].

    rows, step: int64 [M], rows that are trained on and in which step; classes, supervised: int64
    [N], of each row. A step without a supervised token has no mix: it is left out.
    """
    size, num_steps = int(classes.max()) + 1, int(step.max()) + 1
    corpus = np.bincount(classes, supervised, size)
    cell = step * size + classes[rows]
    sums_SC = np.bincount(cell, supervised[rows], num_steps * size).reshape(num_steps, size)
    sums_SC = sums_SC[sums_SC.any(axis=1)]
    return sums_SC / sums_SC.sum(axis=1, keepdims=True), corpus / corpus.sum()


def step_mix(steps: Steps) -> dict[str, Any]:
    """The distances of the first epoch's steps, 2,000 at most, and of a shuffle's as many steps.

    step_mix: the mean, the worst, and the mean over the last tenth of these steps. Values are None
    where there is nothing to compare: no supervised token, or lengths that are all alike; the ratio
    of the means also where each step of the shuffle holds whole epochs.
    """
    names = ("mean", "worst", "last_tenth", "shuffle_mean", "shuffle_worst")
    plan = steps.plan
    classes = length_classes(plan.lengths)
    if not plan.supervised.any() or not classes.any():
        return {"step_mix": dict.fromkeys(names), "step_mix_vs_shuffle": None}
    ours, plain = (
        _total_variation(*step_shares(*rows_and_steps, classes, plan.supervised))
        for rows_and_steps in (_planned(steps), _shuffled(steps))
    )
    if not (len(ours) and len(plain)):
        return {"step_mix": dict.fromkeys(names), "step_mix_vs_shuffle": None}
    tail = ours[-max(1, len(ours) // 10) :]
    values = (ours.mean(), ours.max(), tail.mean(), plain.mean(), plain.max())
    mix = dict(zip(names, map(float, values), strict=True))
    ratio = mix["mean"] / mix["shuffle_mean"] if mix["shuffle_mean"] else None
    return {"step_mix": mix, "step_mix_vs_shuffle": ratio}


def _total_variation(shares: np.ndarray, corpus: np.ndarray) -> np.ndarray:
    return np.abs(shares - corpus).sum(axis=1) / 2


def _planned(steps: Steps) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the measured steps, and each one's step."""
    rows, seqs = steps.plan.rows(range(min(steps.num_measured * steps.window, steps.end)))
    return rows, seqs // steps.window


def _shuffled(steps: Steps) -> tuple[np.ndarray, np.ndarray]:
    """The same of a shuffle of each epoch's rows, cut into as many micro-batches of equal size."""
    plan, window = steps.plan, steps.window
    size = plan.micro_batches_per_epoch
    micro_batch = np.arange(plan.num_rows) * size // plan.num_rows
    rows, seqs = [], []
    for epoch in range(-(-steps.num_measured * window // size)):
        rows.append(np.random.Philox(epoch).random_raw(plan.num_rows).argsort())
        seqs.append(epoch * size + micro_batch)
    step = np.concatenate(seqs) // window
    inside = step < steps.num_measured
    return np.concatenate(rows)[inside], step[inside]
