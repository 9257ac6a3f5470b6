"""The order of an epoch: of buckets, and of the micro-batches inside a bucket.

Buckets: every prefix holds each bucket's share to within one.

With B_k micro-batches of bucket k, N in all, K buckets and q = 2K - 2, the bound

    |count_k(n) - n B_k / N| <= 1 - 1/q      for every bucket k and every prefix n

holds exactly if the j-th micro-batch (0-based) of each bucket stands in its window of positions
(1-based): from the first at which j + 1 are not too many to the last at which j are enough,

    release = ceil(N (q j + 1) / (q B_k))      deadline = floor(N (q (j + 1) - 1) / (q B_k)) + 1.

R. Tijdeman (The chairman assignment problem, Discrete Mathematics 32, 1980) proved that such an
order exists for all counts, and that no smaller constant does for all. Placing jobs of one unit
with integer windows by earliest deadline first succeeds whenever anything does, so it finds one.

Existence, with the weaker bound of 1: the jobs of bucket k whose windows lie inside [a, b] satisfy
j >= (a-1) p and j + 1 <= b p with p = B_k / N, so there are at most (b-a+1) p of them; over all
buckets at most b-a+1, as many as the positions. That is Hall's condition for intervals.

At an epoch's end the deviation is 0, so epochs follow each other without loss. Sorting by midpoints
(j + 1/2) / p has no such bound: many small buckets share their midpoints and pile up.

Inside a bucket: the j-th micro-batch is the one whose rank by length is the rank of the fractional
part of u + j / golden ratio. Any stretch of it visits all lengths of the bucket evenly: of the
sequences of this kind it has the smallest discrepancy for all numbers of points at once, where a
shuffle has that of chance.
"""

from collections.abc import Sequence
from fractions import Fraction
from heapq import heappop, heappush

import numpy as np


def interleave(counts: Sequence[int], ties: Sequence[int]) -> list[int]:
    """The bucket of each position of an epoch, counts[k] times bucket k.

    ties: a permutation of range(len(counts)); of equal deadlines the lower goes first. Pure Python
    integers, so every machine gives the same; O(N log K).
    """
    total = sum(counts)
    live = sorted((k for k, count in enumerate(counts) if count), key=lambda k: ties[k])
    size = len(live)
    if size <= 1:
        return live * total
    # An item is one integer, (release, deadline, rank), so that comparisons are cheap: 0.7 s for
    # a million items where tuples in two heaps take three times as long.
    base = (total + 2) * size
    quota = 2 * size - 2
    items: list[int] = []
    for rank, k in enumerate(live):
        parts = quota * counts[k]  # windows end at multiples of total / parts
        for first in range(total, total * parts, total * quota):
            last = first + total * (quota - 2)
            items.append(-(-first // parts) * base + (last // parts + 1) * size + rank)
    items.sort()  # K ascending runs, which Python's sort merges in O(N log K)

    order: list[int] = []
    ready: list[int] = []
    released = 0
    for position in range(1, total + 1):
        bound = (position + 1) * base
        while released < total and items[released] < bound:
            heappush(ready, items[released] % base)
            released += 1
        order.append(live[heappop(ready) % size])
    return order


GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: a step through all residues


def spread(count: int, start: int, first: int) -> np.ndarray:
    """A permutation of range(count) whose every stretch lies evenly in it, int64 [count].

    start: a word of 64 bits that shifts it; first: how many of the sequence came before, so that it
    goes on where an epoch has ended. Integers modulo 2^64: every machine gives the same.
    """
    begin = (start + first * GOLDEN) % (1 << 64)
    with np.errstate(over="ignore"):
        keys = np.uint64(begin) + np.arange(count, dtype=np.uint64) * np.uint64(GOLDEN)
    return keys.argsort(kind="stable").argsort(kind="stable")


def deviation_bound(num_buckets: int) -> Fraction:
    """1 - 1/(2K - 2), what `interleave` keeps to with K non-empty buckets; 0 with one."""
    return 1 - Fraction(1, 2 * num_buckets - 2) if num_buckets > 1 else Fraction(0)


def share_deviation(order: Sequence[int] | np.ndarray, counts: Sequence[int]) -> Fraction:
    """max over prefixes n and buckets k of |count_k(n) - n B_k / N|, measured exactly."""
    sequence = np.asarray(order, dtype=np.int64)
    total = len(sequence)
    assert sum(counts) == total and total < 1 << 31, (sum(counts), total)
    prefix = np.arange(1, total + 1, dtype=np.int64)
    worst = 0
    for k, count in enumerate(counts):
        deviation = np.cumsum(sequence == k) * total - prefix * count
        worst = max(worst, int(np.abs(deviation).max(initial=0)))
    return Fraction(worst, max(total, 1))


def max_gaps(order: Sequence[int] | np.ndarray, num_buckets: int) -> list[int]:
    """For each bucket the most positions from one of its micro-batches to the next.

    The epoch counts as a ring, since another follows; a bucket that does not occur has 0.
    """
    sequence = np.asarray(order, dtype=np.int64)
    gaps = []
    for k in range(num_buckets):
        places = np.flatnonzero(sequence == k)
        ring = np.append(places, places[:1] + len(sequence))
        gaps.append(int(np.diff(ring).max(initial=0)))
    return gaps
