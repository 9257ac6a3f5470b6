"""The stream: training's seqs untouched, rounds where they are due, every seq with one owner."""

import numpy as np
import pytest

from dflashdist.config import ScheduleConfig
from dflashdist.schedule.plan import Plan
from dflashdist.schedule.stream import EVALUATION, Rounds, Steps, Stream


def plan_of(num_rows: int, seed: int) -> Plan:
    draw = np.random.default_rng(seed)
    lengths = np.clip(np.exp(draw.normal(5.0, 1.0, num_rows)), 3, 900).astype(int)
    schedule = ScheduleConfig(max_tokens=1024, max_anchors=400)
    return Plan(lengths, lengths // 2, schedule, num_anchors=64, block_size=8, seed=seed)


def stream_of(num_drafters: int, every: int | None, *, held_out: int = 60, **end) -> Stream:
    steps = Steps(
        plan_of(500, 0), num_drafters=num_drafters, accumulation=12 // num_drafters,
        **(end or {"num_steps": 10}),
    )  # fmt: skip
    if every is None:
        return Stream(steps)
    plan = plan_of(held_out, 1)
    return Stream(steps, Rounds(plan, 1000 + 2 * np.arange(held_out), every))


def test_without_rounds_it_is_the_plan_s():
    stream = stream_of(4, None)
    assert list(stream.seqs(0)) == list(range(120)) and list(stream.seqs(7)) == list(range(84, 120))
    assert not any(map(stream.due, range(11)))
    for seq in (0, 50, 119):
        assert stream.drafter_of(seq) == stream.steps.drafter_of(seq)
        assert stream.micro_batch(seq).rows is not None
        assert (stream.micro_batch(seq).rows == stream.steps.plan.micro_batch(seq).rows).all()
    assert [stream.num_messages(d, 7) for d in range(4)] == [9] * 4


def test_rounds_follow_every_steps_and_the_last():
    stream = stream_of(4, 4)
    assert [step for step in range(11) if stream.due(step)] == [4, 8, 10]
    size = stream.round_size
    assert size > 4
    assert [stream.round(step).start - EVALUATION for step in (4, 8, 10)] == [0, size, 2 * size]
    whole = list(stream.seqs(0))
    assert [seq for seq in whole if seq < EVALUATION] == list(range(120))
    assert whole[48 : 48 + size] == list(stream.round(4))
    assert whole[-size:] == list(stream.round(10))
    assert len(set(whole)) == len(whole) == 120 + 3 * size
    assert [step for step in range(11) if stream_of(4, 5).due(step)] == [5, 10], "the last once"


@pytest.mark.parametrize("first_step", [0, 3, 4, 9, 10])
def test_from_any_step_the_rest_is_the_same(first_step):
    """A resumed job goes on in the order of the unbroken one, with the round that it still owes."""
    stream = stream_of(3, 4)
    whole = list(stream.seqs(0))
    assert list(stream.seqs(first_step)) == rest_after(stream, whole, first_step)
    if stream.due(first_step):
        owed = list(stream.seqs(first_step, round_first=True))
        assert owed == [*stream.round(first_step), *stream.seqs(first_step)]


def rest_after(stream: Stream, whole: list[int], step: int) -> list[int]:
    """What follows the step before, and the round after it."""
    if step == 0:
        return whole
    last = stream.round(step)[-1] if stream.due(step) else step * stream.steps.window - 1
    return whole[whole.index(last) + 1 :]


@pytest.mark.parametrize("num_drafters", [1, 2, 3, 4])
@pytest.mark.parametrize("held_out", [1, 60])
def test_every_seq_has_one_owner_and_is_counted(num_drafters, held_out):
    """Also when a round has fewer micro-batches than there are drafters, and when the last step is
    partial: what each drafter is told to expect is what it is sent."""
    for end in ({"num_steps": 10}, {"epochs": 0.61}):
        stream = stream_of(num_drafters, 4, held_out=held_out, **end)
        assert end == {"num_steps": 10} or stream.steps.end % 12, "this last step must be partial"
        for first_step in (0, 4, 5, stream.steps.num_steps):
            for round_first in {False, stream.due(first_step)}:
                owners = [stream.drafter_of(s) for s in stream.seqs(first_step, round_first)]
                expected = [
                    stream.num_messages(drafter, first_step, round_first)
                    for drafter in range(num_drafters)
                ]
                assert expected == [owners.count(drafter) for drafter in range(num_drafters)]
        shares = [stream.round_share(4, drafter) for drafter in range(num_drafters)]
        assert sorted(seq for share in shares for seq in share) == list(stream.round(4))
        for drafter, share in enumerate(shares):
            assert list(share) == sorted(share)
            assert all(stream.drafter_of(seq) == drafter for seq in share)


def test_shares_of_a_round_cost_about_the_same():
    """To within the dearest micro-batch of the mean; share_out's own tests say how near."""
    stream = stream_of(4, 4)
    costs = [
        sum(stream.micro_batch(seq).cost for seq in stream.round_share(8, drafter))
        for drafter in range(4)
    ]
    dearest = max(stream.micro_batch(seq).cost for seq in stream.round(8))
    assert max(costs) - min(costs) <= dearest


def test_a_round_holds_every_held_out_row_once_and_each_round_the_same():
    stream = stream_of(4, 4)
    first, second = ([stream.micro_batch(seq) for seq in stream.round(step)] for step in (4, 8))
    rows = sorted(int(row) for each in first for row in each.rows)
    assert rows == list(range(1000, 1120, 2)), "numbers of the store"
    for one, other in zip(first, second, strict=True):
        assert one.seq + stream.round_size == other.seq
        assert (one.rows == other.rows).all() and one.width == other.width


@pytest.mark.parametrize("credit", [1, 2, 5, 24])
@pytest.mark.parametrize("num_drafters", [1, 2, 3, 4])
def test_no_credit_is_too_small(num_drafters, credit):
    """Drafters in their own order, who wait for each other at the end of a step or a round, and a
    dispatcher that keeps to its credit: some drafter can always go on, to the end. What is
    published arrives: a drafter takes messages as they come (cluster/transport.py)."""
    stream = stream_of(num_drafters, 4)
    parts: list[list[list[int]]] = []  # step or round -> drafter -> seqs left
    for step in range(stream.steps.num_steps):
        parts.append([list(seqs) for seqs in stream.steps.slots(step)])
        if stream.due(step + 1):
            shares = [stream.round_share(step + 1, drafter) for drafter in range(num_drafters)]
            parts.append([list(share) for share in shares])
    order, consumed = list(stream.seqs(0)), 0
    for part in parts:
        while any(part):
            published = set(order[: consumed + credit])
            ready = [seqs for seqs in part if seqs and seqs[0] in published]
            assert ready, f"all wait, at {consumed} of {len(order)} consumed"
            for seqs in ready:
                seqs.pop(0)
            consumed += len(ready)
    assert consumed == len(order)


def test_seqs_of_evaluation_come_after_any_training():
    """And fit a message's header, a signed 64-bit number."""
    stream = stream_of(1, 1)
    assert 1_000_000 * 4096 < EVALUATION < max(stream.seqs(0)) < 1 << 63
