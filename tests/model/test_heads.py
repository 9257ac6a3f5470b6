"""The losses of the variants' heads against their plain formulas, values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from rounding import EXACT, rounding
from variants import variant_drafter

from dflashdist.model.heads import confidence_loss, selector_loss

SLOTS, TOP = 23, 3


def materials(shape, name: str):
    """A drafter, states that need gradients, and random tokens, weights and head."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(SLOTS, shape.hidden_size, generator=generator).requires_grad_()
    head = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator) / 3
    previous = torch.randint(shape.vocab_size, (SLOTS,), generator=generator)
    weights = torch.rand(SLOTS, generator=generator)
    top = (states.detach() @ head.T).topk(TOP).indices
    labels = top[:, 1].clone()
    labels[::4] = (top[::4].amax(1) + 1) % shape.vocab_size  # mostly no candidates
    return variant_drafter(shape, name), states, head, previous, weights, top, labels


@pytest.mark.parametrize("chunk_size", [5, 1024])
@pytest.mark.usefixtures("float64")
def test_selector_loss_by_formula(shape, chunk_size):
    drafter, states, head, previous, weights, top, labels = materials(shape, "dflash2")
    selector = drafter.candidate_selector
    assert selector is not None
    total, hits = selector_loss(selector, states, top, head, previous, labels, weights, chunk_size)
    expected, found, right = torch.zeros(()), 0, []
    for m in range(SLOTS):
        query = selector.predecessor_codebook[previous[m]] * selector.hidden_projection(states[m])
        scores = head[top[m]] @ states[m] + selector.successor_codebook[top[m]] @ query
        right.append(bool(top[m][scores.argmax()] == labels[m]))
        place = (top[m] == labels[m]).nonzero()
        if not len(place):
            continue
        expected = expected + weights[m] * F.cross_entropy(scores, place[0, 0])
        found += 1
    assert found < SLOTS
    assert hits.tolist() == right and 0 < sum(right) < found
    assert abs(total - expected) < EXACT
    inputs = [states, *selector.parameters()]
    ours, theirs = (torch.autograd.grad(loss, inputs) for loss in (total, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert b.any() and (a - b).abs().max() < EXACT


def test_selector_learns_the_successor(shape):
    """Where the true token follows its predecessor but not from the logits, the loss falls."""
    drafter, states, head, previous, weights, top, labels = materials(shape, "dflash2")
    selector = drafter.candidate_selector
    assert selector is not None
    states = states.detach()
    optimizer = torch.optim.Adam(selector.parameters(), lr=0.03)
    losses = []
    for _ in range(60):
        loss, _ = selector_loss(selector, states, top, head, previous, labels, weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.usefixtures("float64")
def test_confidence_loss_by_formula(shape):
    drafter, states, _, previous, weights, *_ = materials(shape, "dspark")
    markov, confidence = drafter.markov_head, drafter.confidence_head
    assert markov is not None and confidence is not None
    embedded = markov.markov_w1(previous)
    share = torch.rand(SLOTS, generator=torch.Generator().manual_seed(2)).requires_grad_()
    total = confidence_loss(confidence, states, embedded, share, weights)
    chance = torch.sigmoid(confidence.proj(torch.cat([states, embedded], -1))).squeeze(-1)
    losses = -share.detach() * chance.log() - (1 - share.detach()) * (1 - chance).log()
    expected = (losses * weights).sum()
    assert abs(total - expected) < EXACT
    inputs = [states, markov.markov_w1.weight, *confidence.parameters()]
    ours = torch.autograd.grad(total, inputs, retain_graph=True)  # of the embedding, for both
    theirs = torch.autograd.grad(expected, inputs)
    for a, b in zip(ours, theirs, strict=True):
        assert b.any() and (a - b).abs().max() < EXACT
    total = confidence_loss(confidence, states, embedded, share, weights)
    assert torch.autograd.grad(total, share, allow_unused=True) == (None,)


def test_losses_of_no_slot_reach_every_parameter(shape):
    """0, and connected: an all-reduce of gradients waits for each of them."""
    drafter, states, head, previous, weights, top, labels = materials(shape, "dflash2")
    selector = drafter.candidate_selector
    assert selector is not None
    tensors = (states[:0], top[:0], head, previous[:0], labels[:0], weights[:0])
    total, hits = selector_loss(selector, *tensors)
    assert total == 0 and len(hits) == 0
    assert all(not g.any() for g in torch.autograd.grad(total, list(selector.parameters())))
    drafter = variant_drafter(shape, "dspark")
    markov, confidence = drafter.markov_head, drafter.confidence_head
    assert markov is not None and confidence is not None
    embedded = markov.markov_w1(previous[:0])
    total = confidence_loss(confidence, states[:0], embedded, weights[:0], weights[:0])
    parameters = [markov.markov_w1.weight, *confidence.parameters()]
    assert total == 0 and all(not g.any() for g in torch.autograd.grad(total, parameters))


def test_sums_stay_exact_under_autocast(shape):
    """A product with the weights would be of bfloat16, and round them by up to 2^-9."""
    for name in ("dflash2", "dspark"):
        drafter, states, head, previous, weights, top, labels = materials(shape, name)
        with torch.autocast("cpu", torch.bfloat16):
            if name == "dflash2":
                assert drafter.candidate_selector is not None
                tensors = (states, top, head, previous, labels)
                total, _ = selector_loss(drafter.candidate_selector, *tensors, weights)
                ones = [
                    selector_loss(drafter.candidate_selector, *(
                        t if t is head else t[m : m + 1] for t in tensors), weights[:1] * 0 + 1)[0]
                    for m in range(SLOTS)
                ]  # fmt: skip
            else:
                assert drafter.markov_head is not None and drafter.confidence_head is not None
                embedded = drafter.markov_head.markov_w1(previous)
                share = torch.rand(SLOTS, generator=torch.Generator().manual_seed(2))
                total = confidence_loss(drafter.confidence_head, states, embedded, share, weights)
                ones = [
                    confidence_loss(drafter.confidence_head, states[m : m + 1],
                                    embedded[m : m + 1], share[m : m + 1], weights[:1] * 0 + 1)
                    for m in range(SLOTS)
                ]  # fmt: skip
        assert total.dtype == torch.float32
        expected = (torch.stack(ones).double() * weights.double()).sum()
        # With products of bfloat16 the error is some 1e-3.
        assert abs(total.double() - expected) < rounding(SLOTS, torch.stack(ones).max().item())
