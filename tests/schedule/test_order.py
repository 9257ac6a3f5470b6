"""The order keeps every bucket within Tijdeman's bound at every prefix, exactly."""

import random
from collections import Counter
from fractions import Fraction

from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflashdist.schedule.order import deviation_bound, interleave, max_gaps, share_deviation


@st.composite
def instances(draw):
    """Counts with zeros, alike, skewed and tied, of up to 32 buckets, and a permutation for ties.

    Three draws an instance, the rest from a seeded generator: lists drawn one number at a time by
    hypothesis take ten times as long as the check.
    """
    num_buckets = draw(st.integers(1, 32))
    top = draw(st.sampled_from([1, 2, 3, 8, 40]))
    source = random.Random(draw(st.integers(0, 1 << 32)))
    counts = [source.randint(0, top) for _ in range(num_buckets)]
    if source.random() < 0.5:
        counts[source.randrange(num_buckets)] = source.randint(0, 200)
    return counts, source.sample(range(num_buckets), num_buckets)


def check(counts, order):
    assert Counter(order) == Counter({k: count for k, count in enumerate(counts) if count})
    num_buckets = sum(count > 0 for count in counts)
    assert share_deviation(order, counts) <= deviation_bound(num_buckets)


@settings(max_examples=2000, deadline=None)
@given(instances())
@example(([7], [0]))
@example(([0, 0, 5, 0], [3, 1, 0, 2]))
@example(([0, 0], [1, 0]))
@example(([1] * 15 + [187], list(range(16))))
@example(([1] * 15 + [187], list(range(15, -1, -1))))
@example(([1] * 32, list(range(32))))
@example(([329, 495, 448, 559, 555, 808, 683, 500], list(range(8))))
def test_bound_at_every_prefix_and_exact_counts(instance):
    counts, ties = instance
    check(counts, interleave(counts, ties))


def test_bound_on_a_thousand_skewed_instances():
    draw = random.Random(0)
    for _ in range(1000):
        counts = [int(draw.paretovariate(0.7)) % 300 for _ in range(draw.randint(2, 32))]
        ties = list(range(len(counts)))
        draw.shuffle(ties)
        check(counts, interleave(counts, ties))


def test_bound_is_attained():
    """So the check is as tight as the theorem: no smaller constant would pass."""
    worst = max(
        share_deviation(interleave([1] * 7 + [n], range(8)), [1] * 7 + [n]) for n in range(50, 120)
    )
    assert deviation_bound(8) - worst < Fraction(1, 50)


def test_naive_spreading_breaks_the_bound():
    counts = [1] * 15 + [187]
    middles = [(Fraction(2 * j + 1, 2 * count), k) for k, count in enumerate(counts)
               for j in range(count)]  # fmt: skip
    order = [k for _, k in sorted(middles)]
    assert Counter(order) == Counter(dict(enumerate(counts)))
    assert share_deviation(order, counts) > 5 > deviation_bound(16)


def test_deviation_is_measured_as_defined():
    counts, order = [3, 1, 2], [0, 2, 0, 1, 0, 2]
    expected = max(
        abs(order[:n].count(k) - Fraction(n * counts[k], 6)) for n in range(7) for k in range(3)
    )
    assert share_deviation(order, counts) == expected
    assert share_deviation([0, 0, 0, 1, 1], [3, 2]) == Fraction(6, 5)  # 3 - 3 x 3/5


def test_ties_change_the_order_but_not_the_counts():
    counts = [20] * 8
    orders = {tuple(interleave(counts, random.Random(s).sample(range(8), 8))) for s in range(20)}
    assert len(orders) == 20
    assert all(Counter(order) == Counter(dict(enumerate(counts))) for order in orders)


def test_gaps_go_round_the_end_of_an_epoch():
    assert max_gaps([0, 1, 0, 0, 2, 2], 4) == [3, 6, 5, 0]
