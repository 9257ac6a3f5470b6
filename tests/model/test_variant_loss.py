"""The loss of each variant as one plain formula: value, sums, gradients of every parameter."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from rounding import EXACT
from variants import CHANGES, variant_drafter

from dflashdist.config import LossConfig
from dflashdist.model.drafter import Drafter
from dflashdist.model.loss import DrafterBatch, DrafterLoss, LossSums
from dflashdist.model.target_files import TargetTensors

pytestmark = pytest.mark.usefixtures("float64")

NAMES = sorted(CHANGES)


def materials(shape, name: str, **settings):
    """A loss module and a batch of two rows, one with a gap and a dropped block."""
    drafter = variant_drafter(shape, name)
    if drafter.shape.selector_top_k:  # so many that about half of the labels are among them
        weights = drafter.state_dict()
        drafter = Drafter(replace(drafter.shape, selector_top_k=40))
        drafter.load_state_dict(weights)
    generator = torch.Generator().manual_seed(0)
    table, head = torch.randn(2, shape.vocab_size, shape.hidden_size, generator=generator) / 3
    loss_mask = torch.ones(2, 24, dtype=torch.bool)
    loss_mask[0, :4] = loss_mask[0, 13] = False
    anchors = torch.tensor([[4, 11, 20], [2, 21, 21]])
    batch = DrafterBatch(
        ids=torch.randint(90, (2, 24), generator=generator),
        loss_mask=loss_mask,
        hidden=torch.randn(2, 24, 2 * shape.hidden_size, generator=generator),
        anchors=anchors,
        keep=torch.tensor([[True] * 3, [True, True, False]]),
        lengths=torch.tensor([24, 24]),
        last=torch.randn(2, 24, shape.hidden_size, generator=generator),
    )
    config = LossConfig(chunk_size=5, contiguous_only=False, gamma=2.0, **settings)
    frozen = TargetTensors(table, head, torch.ones(shape.hidden_size))
    return DrafterLoss(drafter, frozen, drafter.shape, config), batch


def plain_loss(module: DrafterLoss, batch: DrafterBatch) -> torch.Tensor:
    """Slot by slot: decay x (cross-entropy + 0.5 selector + 0.25 confidence)."""
    drafter, head, shape = module.drafter, module.frozen.head, module.shape
    size, ahead = shape.block_size, shape.ahead
    tokens = torch.full((*batch.anchors.shape, size), shape.mask_token_id)
    tokens[..., 0] = torch.where(batch.keep, batch.ids.gather(1, batch.anchors), tokens[..., 0])
    embeds = module.frozen.embedding[tokens.flatten(1)]
    states = drafter(batch.hidden, embeds, batch.anchors, batch.keep)
    total = torch.zeros(())
    for b, n in batch.keep.nonzero().tolist():
        for k in range(1 - ahead, size):
            place = int(batch.anchors[b, n]) + k + ahead
            if place >= 24 or not batch.loss_mask[b, place]:
                continue
            state = states[b, n * size + k]
            label, previous = int(batch.ids[b, place]), int(batch.ids[b, place - 1])
            logits = head @ state
            if drafter.markov_head is not None:
                w1, w2 = drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight
                logits = logits + w2 @ w1[previous]
            loss = -logits.log_softmax(-1)[label]
            if (selector := drafter.candidate_selector) is not None:
                top = logits.topk(shape.selector_top_k).indices
                if label in top.tolist():
                    query = selector.predecessor_codebook[previous]
                    query = query * (selector.hidden_projection.weight @ state)
                    scores = logits[top] + selector.successor_codebook[top] @ query
                    loss = loss - 0.5 * scores.log_softmax(-1)[top.tolist().index(label)]
            if (confidence := drafter.confidence_head) is not None:
                assert drafter.markov_head is not None and batch.last is not None
                p, t = logits.softmax(-1), (head @ batch.last[b, place - 1]).softmax(-1)
                share = 1 - (p - t).abs().sum().detach() / 2
                embedded = drafter.markov_head.markov_w1.weight[previous]
                chance = confidence.proj(torch.cat([state, embedded])).squeeze()
                loss = loss + 0.25 * F.binary_cross_entropy_with_logits(chance, share)
            total = total + torch.exp(torch.tensor(-(k + ahead - 1) / 2.0)) * loss
    return total


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_by_formula(shape, name):
    module, batch = materials(shape, name, selector=0.5, confidence=0.25)
    loss, vector = module(batch)
    expected = plain_loss(module, batch)
    assert abs(loss - expected) < EXACT
    sums = LossSums(vector, module.shape.block_size + module.shape.ahead)
    assert abs(sums.part("loss") - expected) < EXACT
    parameters = dict(module.drafter.named_parameters())
    grads = torch.autograd.grad(loss, list(parameters.values()))
    wanted = torch.autograd.grad(expected, list(parameters.values()))
    for key, ours, theirs in zip(parameters, grads, wanted, strict=True):
        assert theirs.any(), key
        assert (ours - theirs).abs().max() < EXACT, key


@pytest.mark.parametrize("settings", [{}, {"selector": 0.0, "confidence": 0.0}])
@pytest.mark.parametrize("name", ["dflash2", "dspark"])
def test_every_parameter_is_connected(shape, name, settings):
    """With nothing supervised, and with the heads' losses off: an all-reduce waits for each."""
    module, batch = materials(shape, name, **settings)
    batch.loss_mask[:] = False
    loss, _ = module(batch)
    assert loss == 0
    assert all(not g.any() for g in torch.autograd.grad(loss, list(module.drafter.parameters())))
