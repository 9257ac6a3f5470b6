"""The losses of the variants' heads against their plain formulas, values and gradients."""

import pytest
import torch
import torch.nn.functional as F
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
def test_selector_loss_by_formula(shape, chunk_size):
    drafter, states, head, previous, weights, top, labels = materials(shape, "dflash2")
    selector = drafter.candidate_selector
    assert selector is not None
    total, count = selector_loss(selector, states, top, head, previous, labels, weights, chunk_size)
    expected, found = torch.zeros(()), 0
    for m in range(SLOTS):
        place = (top[m] == labels[m]).nonzero()
        if not len(place):
            continue
        query = selector.predecessor_codebook[previous[m]] * selector.hidden_projection(states[m])
        scores = head[top[m]] @ states[m] + selector.successor_codebook[top[m]] @ query
        expected = expected + weights[m] * F.cross_entropy(scores, place[0, 0])
        found += 1
    assert count == found < SLOTS
    assert torch.isclose(total, expected, rtol=1e-5)  # float32, another order of summation
    inputs = [states, *selector.parameters()]
    ours, theirs = (torch.autograd.grad(loss, inputs) for loss in (total, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert b.any() and torch.allclose(a, b, atol=1e-5)


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
    assert torch.isclose(total, expected, rtol=1e-5)  # float32, another order of summation
    inputs = [states, markov.markov_w1.weight, *confidence.parameters()]
    ours = torch.autograd.grad(total, inputs, retain_graph=True)  # of the embedding, for both
    theirs = torch.autograd.grad(expected, inputs)
    for a, b in zip(ours, theirs, strict=True):
        assert b.any() and torch.allclose(a, b, atol=1e-5)
    total = confidence_loss(confidence, states, embedded, share, weights)
    assert torch.autograd.grad(total, share, allow_unused=True) == (None,)


def test_losses_of_no_slot_reach_every_parameter(shape):
    """0, and connected: an all-reduce of gradients waits for each of them."""
    drafter, states, head, previous, weights, top, labels = materials(shape, "dflash2")
    selector = drafter.candidate_selector
    assert selector is not None
    tensors = (states[:0], top[:0], head, previous[:0], labels[:0], weights[:0])
    total, count = selector_loss(selector, *tensors)
    assert total == 0 and count == 0
    assert all(not g.any() for g in torch.autograd.grad(total, list(selector.parameters())))
    drafter = variant_drafter(shape, "dspark")
    markov, confidence = drafter.markov_head, drafter.confidence_head
    assert markov is not None and confidence is not None
    embedded = markov.markov_w1(previous[:0])
    total = confidence_loss(confidence, states[:0], embedded, weights[:0], weights[:0])
    parameters = [markov.markov_w1.weight, *confidence.parameters()]
    assert total == 0 and all(not g.any() for g in torch.autograd.grad(total, parameters))
