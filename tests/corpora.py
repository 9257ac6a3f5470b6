"""Row lengths as chat corpora have them: what tests and benchmarks of the schedule plan with."""

import numpy as np

TOP = 3072  # data.max_length by default


def log_normal(seed, num_rows=30_000, median=700.0, sigma=1.0):
    """Lengths and supervised counts, int64 [num_rows] each."""
    draw = np.random.default_rng(seed)
    lengths = np.exp(draw.normal(np.log(median), sigma, num_rows))
    return _cut(lengths, draw.beta(4, 2, num_rows))


def mixture(seed, num_rows=40_000):
    """Short questions, answers of some length, and a tail of long documents."""
    draw = np.random.default_rng(seed)
    kinds = ((0.6, 180, 0.5), (0.35, 900, 0.4), (0.05, 4000, 0.4))
    parts = [
        np.exp(draw.normal(np.log(median), sigma, int(share * num_rows)))
        for share, median, sigma in kinds
    ]
    lengths = draw.permutation(np.concatenate(parts))
    return _cut(lengths, draw.beta(3, 2, len(lengths)))


def chats(seed, num_rows=17_000):
    """Skewed to the left: p10/50/90 of about 400, 1,850 and 2,500, many of them at the cut."""
    draw = np.random.default_rng(seed)
    kind = draw.random(num_rows)
    short = np.exp(draw.normal(np.log(300), 0.6, num_rows))
    long = np.exp(draw.normal(np.log(2800), 0.3, num_rows))
    usual = draw.normal(1950, 420, num_rows)
    lengths = np.where(kind < 0.2, short, np.where(kind < 0.9, usual, long))
    return _cut(lengths, draw.beta(5, 1.5, num_rows))


def _cut(lengths, share):
    lengths = np.clip(lengths, 16, TOP).astype(np.int64)
    return lengths, (lengths * share).astype(np.int64)


CORPORA = {
    "log-normal 0.7": lambda seed: log_normal(seed, sigma=0.7),
    "log-normal 1.0": log_normal,
    "log-normal 1.3": lambda seed: log_normal(seed, sigma=1.3),
    "mixture": mixture,
    "chats": chats,
}
