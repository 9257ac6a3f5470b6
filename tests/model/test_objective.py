"""Terms and weights of the objective: values by hand, gradients in float64, chunks, memory."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from rounding import rounding
from torch.utils._python_dispatch import TorchDispatchMode

from dflashdist.checks import needs_last
from dflashdist.config import DrafterConfig, InputError, LossConfig
from dflashdist.model.objective import (
    Chunk,
    ChunkedObjective,
    Objective,
    Scores,
    Teacher,
    block_chunks,
    dpace_weights,
    even_chunks,
)
from dflashdist.model.target_files import check_plain_logits

LN2, LN3 = math.log(2), math.log(3)
SLOTS, HIDDEN, WORDS, RANK = 11, 6, 17, 3


def plain_terms(logits, teacher_logits, labels) -> dict[str, torch.Tensor]:
    """The definitions, [M] each, for autograd."""
    log_p, log_t = F.log_softmax(logits, -1), F.log_softmax(teacher_logits, -1)
    p, t = log_p.exp(), log_t.exp()
    return {
        "ce": F.cross_entropy(logits, labels, reduction="none"),
        "hard": F.cross_entropy(logits, teacher_logits.argmax(-1), reduction="none"),
        "kl": (t * (log_t - log_p)).sum(-1),
        "reverse_kl": (p * (log_p - log_t)).sum(-1),
        "tv": (p - t).abs().sum(-1) / 2,
    }


def fixed(weights: torch.Tensor):
    return lambda chunk, _ce: weights[chunk.slots]


# p = (1/2, 1/4, 1/4), t = (1/8, 3/8, 1/2), label 0. For tv: s = (1/2, -1/2, -1/2), sum p s = 0.
BY_HAND = {
    "ce": (LN2, [-1 / 2, 1 / 4, 1 / 4]),
    "hard": (2 * LN2, [1 / 2, 1 / 4, -3 / 4]),
    "kl": (3 / 8 * LN3 - LN2 / 8, [3 / 8, -1 / 8, -1 / 4]),
    "reverse_kl": (LN2 - LN3 / 4, [LN2 / 2 + LN3 / 8, -3 / 16 * LN3, LN3 / 16 - LN2 / 2]),
    "tv": (3 / 8, [1 / 4, -1 / 8, -1 / 8]),
}


@pytest.mark.parametrize("term", BY_HAND)
def test_values_and_gradients_by_hand(term):
    value, gradient = BY_HAND[term]
    hidden = torch.tensor([[1 / 2, 1 / 4, 1 / 4]], dtype=torch.float64).log().requires_grad_()
    states = torch.tensor([[1 / 8, 3 / 8, 1 / 2]], dtype=torch.float64).log() + 3  # any shift
    objective = Objective(
        {term: 2.0}, even_chunks(1, 8), fixed(torch.tensor([1.5]).double()), overlap=True
    )
    scores = Scores(
        *ChunkedObjective.apply(
            hidden,
            torch.eye(3, dtype=torch.float64),
            torch.tensor([0]),
            Teacher(states, torch.tensor([0])),
            None,
            None,
            objective,
        )
    )
    scores.loss.backward()
    assert hidden.grad is not None and scores.overlap is not None
    # Float64 throughout: a few roundings of 1e-16, by any library of functions.
    assert scores.losses.item() == pytest.approx(3 * value, rel=1e-12)
    assert scores.loss.item() == pytest.approx(3 * value, rel=1e-12)
    assert hidden.grad[0].tolist() == pytest.approx([3 * g for g in gradient], abs=1e-12)
    assert scores.overlap.item() == pytest.approx(5 / 8, rel=1e-12)
    assert scores.hits.tolist() == [True]


MIXTURES = [
    {"ce": 1.0},
    {"hard": 1.0},
    {"kl": 1.0},
    {"reverse_kl": 1.0},
    {"tv": 1.0},
    {"ce": 0.3, "hard": 0.7},
    {"ce": 0.1, "tv": 0.9},
    {"ce": 0.2, "hard": 0.4, "kl": 0.6, "reverse_kl": 0.8, "tv": 1.2},
]


@pytest.mark.parametrize("chunk_size", [1, 4, 100])
@pytest.mark.parametrize("low_rank", [False, True], ids=["head", "low rank"])
@pytest.mark.parametrize("terms", MIXTURES, ids=lambda terms: "+".join(terms))
def test_gradients_are_autograds(terms, low_rank, chunk_size):
    draw = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    head, states, weights = random(WORDS, HIDDEN), random(30, HIDDEN), random(SLOTS).abs()
    trained = [random(SLOTS, HIDDEN).requires_grad_()]
    if low_rank:
        trained += [random(SLOTS, RANK).requires_grad_(), random(WORDS, RANK).requires_grad_()]
    labels = torch.randint(WORDS, (SLOTS,), generator=draw)
    places = torch.randint(30, (SLOTS,), generator=draw)
    objective = Objective(
        terms, even_chunks(SLOTS, chunk_size), fixed(weights), overlap=True, top_k=4
    )
    scores = Scores(
        *ChunkedObjective.apply(
            trained[0],
            head,
            labels,
            Teacher(states, places),
            *(trained[1:] or (None, None)),
            objective,
        )
    )
    ours = torch.autograd.grad(3 * scores.loss, trained)
    logits = trained[0] @ head.T
    if low_rank:
        logits = logits + trained[1] @ trained[2].T
    plain = plain_terms(logits, states[places] @ head.T, labels)
    losses = torch.stack([share * plain[term] for term, share in terms.items()]).sum(0)
    expected = torch.autograd.grad(3 * (weights * losses).sum(), trained)
    # Float64, sums of at most 17 x 11 numbers of size 1 to 10: some 1e-15 each.
    for tensor, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(tensor, other, rtol=0, atol=1e-12)
    torch.testing.assert_close(scores.losses, weights * losses.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(scores.overlap, 1 - plain["tv"].detach(), rtol=0, atol=1e-12)
    assert torch.equal(scores.weights, weights)
    assert torch.equal(scores.hits, logits.argmax(-1) == labels)
    assert torch.equal(scores.top_ids, logits.topk(4).indices)


def test_no_gradient_without_one_asked_for():
    """Evaluation computes the same losses and keeps nothing."""
    hidden, head = torch.randn(5, 4), torch.randn(9, 4)
    teacher = Teacher(torch.randn(5, 4), torch.arange(5))
    objective = Objective({"kl": 1.0, "ce": 1.0}, even_chunks(5, 2), fixed(torch.ones(5)))
    inputs = (head, torch.arange(5), teacher, None, None, objective)
    with torch.no_grad():
        free = Scores(*ChunkedObjective.apply(hidden, *inputs))
    bound = Scores(*ChunkedObjective.apply(hidden.requires_grad_(), *inputs))
    assert not free.loss.requires_grad and bound.loss.requires_grad
    assert torch.equal(free.losses, bound.losses)
    assert bound.overlap is None and bound.top_ids is None


def test_a_coefficient_of_zero_is_no_term():
    """To the bit, and without reading the target."""
    grads = []
    for terms in ({"ce": 1.0}, {"ce": 1.0, "kl": 0.0, "hard": 0.0}):
        draw = torch.Generator().manual_seed(1)
        hidden = torch.randn(7, 4, generator=draw, requires_grad=True)
        head, weights = torch.randn(9, 4, generator=draw), torch.rand(7, generator=draw)
        objective = Objective(terms, even_chunks(7, 3), fixed(weights))
        loss, *_ = ChunkedObjective.apply(
            hidden, head, torch.arange(7), None, None, None, objective
        )
        grads.append(torch.autograd.grad(loss, hidden)[0])
    assert torch.equal(*grads)


class LargestTable(TorchDispatchMode):
    """The most numbers of any tensor that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


def test_logits_of_one_chunk_at_a_time():
    """The drafter's as well as the target's, which are made beside them."""
    slots, words, chunk = 64, 500, 8
    objective = Objective(
        {"ce": 1.0, "kl": 1.0, "tv": 1.0, "hard": 1.0},
        even_chunks(slots, chunk),
        fixed(torch.ones(slots)),
    )
    hidden = torch.randn(slots, 4, requires_grad=True)
    teacher = Teacher(torch.randn(slots, 4), torch.arange(slots))
    head, labels = torch.randn(words, 4), torch.arange(slots)
    with LargestTable() as largest:
        ChunkedObjective.apply(hidden, head, labels, teacher, None, None, objective)[0].backward()
    assert largest.numbers == chunk * words


def test_dpace_weights_by_hand():
    """alpha = 1/2. Block 0, all of slots 1 to 3: q = 3/4, 5/8, 3/4, so P = 3/4, 15/32, 45/128.
    Block 1 has none. Block 2, slots 1 and 3: q = 3/4, 1, 3/4, so P = 3/4, -, 9/16."""
    places = torch.tensor([1, 2, 3, 9, 11])
    ce = torch.tensor([2.0, 4.0, 2.0, 2.0, 2.0], dtype=torch.float64).log()
    weights = dpace_weights(ce, places, (3, 4), 0.5)
    expected = [201 / 128, 105 / 128, 45 / 128, 21 / 16, 9 / 16]
    assert weights.tolist() == pytest.approx(expected, rel=1e-12)
    assert dpace_weights(ce, places, (3, 4), 1.0).tolist() == [3.0, 2.0, 1.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("ce", {"hard": 1.0}),  # its labels are the target's choices
        ("kl_div", {"kl": 1.0}),
        ('{"ce": 0.1, "tv": 0.9, "rkl": 0.4}', {"hard": 0.1, "tv": 0.9, "reverse_kl": 0.4}),
    ],
)
def test_dpace_by_terms_is_that_of_speculators(theirs, ours):
    """Loss and gradient by the package's own functions; by the data's token they are others."""
    losses = pytest.importorskip("speculators.losses", reason="pip install --no-deps speculators")
    blocks, size, alpha = 12, 5, 0.3
    draw = torch.Generator().manual_seed(3)
    hidden, last = torch.randn(2, blocks * size, HIDDEN, generator=draw).double()
    head = torch.randn(WORDS, HIDDEN, generator=draw).double()
    mask = torch.rand(blocks, size, generator=draw) < 0.8
    mask[:, 0] = False
    hidden.requires_grad_()
    total, _ = losses.compound_loss(
        (hidden @ head.T)[None], (last @ head.T)[None], mask.view(1, -1),
        torch.arange(blocks * size)[None] % size, losses.resolve_loss_config(theirs, "eager"),
        partial(losses.dpace_loss_decay, loss_mask=mask.view(1, -1), block_size=size,
                dpace_alpha=alpha),
    )  # fmt: skip
    count = mask.sum().item()
    expected = total * (count + 1e-5)  # its mean keeps off zero so
    places = mask.flatten().nonzero().squeeze(1)
    labels = torch.randint(WORDS, (count,), generator=draw)

    def weigh(chunk: Chunk, values: torch.Tensor) -> torch.Tensor:
        at = places[chunk.slots] - chunk.blocks.start * size
        return dpace_weights(values, at, (chunk.blocks.stop - chunk.blocks.start, size), alpha)

    def loss(by_term: bool) -> torch.Tensor:
        objective = Objective(ours, block_chunks(mask.sum(1).tolist(), 16), weigh, by_term)
        teacher = Teacher(last, places)
        return ChunkedObjective.apply(
            hidden[places], head, labels, teacher, None, None, objective
        )[0]  # fmt: skip

    # The package takes its logarithms in float32: sums of 17 words, of losses of up to 10.
    bound = rounding(WORDS * count, 10)
    assert abs(loss(True) - expected) < bound
    ours_, theirs_ = (torch.autograd.grad(one, hidden)[0] for one in (loss(True), expected))
    assert (ours_ - theirs_).abs().max() < rounding(WORDS, 10)
    assert abs(loss(False) - expected) > 10 * bound


def test_chunks_of_whole_blocks():
    counts = [3, 0, 3, 2, 0, 5, 1, 0]
    assert block_chunks(counts, 5) == [
        Chunk(slice(0, 3), slice(0, 2)),
        Chunk(slice(3, 8), slice(2, 5)),
        Chunk(slice(8, 13), slice(5, 6)),
        Chunk(slice(13, 14), slice(6, 8)),
    ]
    assert [chunk.slots for chunk in block_chunks(counts, 1)] == [
        slice(0, 3), slice(3, 6), slice(6, 8), slice(8, 13), slice(13, 14),
    ]  # fmt: skip
    assert block_chunks(counts, 100) == [Chunk(slice(0, 14), slice(0, 8))]
    assert block_chunks([0, 0], 5) == block_chunks([], 5) == []


def test_when_the_last_state_is_needed():
    plain, dspark = DrafterConfig(), DrafterConfig(variant="dspark")
    assert not needs_last(LossConfig(), plain)
    assert not needs_last(LossConfig(terms={"ce": 1.0, "kl": 0.0}), plain)
    for term in ("hard", "kl", "reverse_kl", "tv"):
        assert needs_last(LossConfig(terms={"ce": 1.0, term: 0.1}), plain)
    assert needs_last(LossConfig(), dspark)
    assert not needs_last(LossConfig(confidence=0.0), dspark)
    assert not needs_last(LossConfig(), DrafterConfig(variant="dspark", confidence_head=False))


def test_a_target_that_rescales_its_logits_is_refused():
    check_plain_logits({"logits_scaling": 1.0, "final_logit_softcapping": None})
    with pytest.raises(InputError, match=r"final_logit_softcapping=30\.0.*ce alone"):
        check_plain_logits({"final_logit_softcapping": 30.0})
    with pytest.raises(InputError, match=r"logit_scale=0\.0625"):
        check_plain_logits({"logit_scale": 0.0625})
