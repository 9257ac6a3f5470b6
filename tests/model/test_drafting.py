"""The drafting rule of each variant, against a walk in plain Python."""

import pytest
import torch
from rounding import EXACT
from variants import variant_drafter

from dflashdist.model.drafter import greedy_drafts, sampled_drafts

pytestmark = pytest.mark.usefixtures("float64")

NAMES = ["dflash", "dflash2", "dspark"]


def materials(shape, name: str, num_blocks: int = 30):
    """A drafter, states of blocks, their anchors' tokens, and a head whose logits are of size 3."""
    drafter = variant_drafter(shape, name)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(num_blocks, shape.block_size, shape.hidden_size, generator=generator)
    head = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator) / 2
    anchors = torch.randint(shape.vocab_size, (num_blocks,), generator=generator)
    return drafter, states, anchors, head


def scores_of(drafter, state, previous: int, head) -> torch.Tensor:
    """Float32 [V] of one slot after one token, minus infinity where a token is no candidate."""
    logits = head @ state
    if drafter.candidate_selector is not None:
        selector, scores = drafter.candidate_selector, torch.full_like(logits, -torch.inf)
        for token in logits.topk(drafter.shape.selector_top_k).indices.tolist():
            query = selector.predecessor_codebook[previous] * (
                selector.hidden_projection.weight @ state
            )
            scores[token] = logits[token] + query @ selector.successor_codebook[token]
        return scores
    if drafter.markov_head is not None:
        w1, w2 = drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight
        return logits + w2 @ w1[previous]
    return logits


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_greedy_walk_by_hand(shape, name):
    drafter, states, anchors, head = materials(shape, name)
    drafts = greedy_drafts(drafter, states, anchors, head)
    first = 0 if name == "dspark" else 1
    assert drafts.dtype == torch.int64 and drafts.shape == (30, drafter.shape.num_drafts)
    assert drafter.shape.num_drafts == shape.block_size - first
    differ = 0
    for block in range(30):
        previous = int(anchors[block])
        for slot in range(first, shape.block_size):
            state = states[block, slot]
            previous = int(scores_of(drafter, state, previous, head).argmax())
            assert drafts[block, slot - first] == previous
            differ += previous != int((head @ state).argmax())
    assert (differ > 10) == (name != "dflash")  # the walk of a variant decides


@pytest.mark.parametrize("name", NAMES)
def test_chunks_and_clipped_blocks(shape, name):
    drafter, states, anchors, head = materials(shape, name)
    whole = greedy_drafts(drafter, states, anchors, head)
    for size in (1, 7, 64):
        assert torch.equal(greedy_drafts(drafter, states, anchors, head, size), whole)
    clipped = greedy_drafts(drafter, states[:, :3], anchors, head)
    assert torch.equal(clipped, whole[:, : clipped.shape[1]])
    none = greedy_drafts(drafter, states[:0], anchors[:0], head)
    assert none.shape == (0, whole.shape[1])


@pytest.mark.parametrize("name", NAMES)
def test_sampled_drafts_come_from_their_distributions(shape, name):
    """The distribution of each drawn token, given the one drawn before; and how often it comes."""
    drafter, states, anchors, head = materials(shape, name, 4)
    many = 4000
    states, anchors = states.repeat(many, 1, 1), anchors.repeat(many)
    generator = torch.Generator().manual_seed(1)
    drafts, probs = sampled_drafts(drafter, states, anchors, head, 0.8, generator)
    assert probs.shape == (*drafts.shape, shape.vocab_size)
    first = 1 - drafter.shape.ahead
    with torch.no_grad():
        for block in range(6):
            previous = int(anchors[block])
            for slot in range(drafts.shape[1]):
                scores = scores_of(drafter, states[block, slot + first], previous, head)
                expected = (scores / 0.8).softmax(-1)
                assert (probs[block, slot] - expected).abs().max() < EXACT
                previous = int(drafts[block, slot])
    # The first draft of block 0, drawn 4,000 times: within 5 standard deviations of each share.
    share = probs[0, 0]
    counts = torch.bincount(drafts[::4, 0], minlength=shape.vocab_size)
    deviation = (many * share * (1 - share)).sqrt().clamp(min=1)
    assert ((counts - many * share).abs() < 5 * deviation).all()


@pytest.mark.parametrize("name", NAMES)
def test_sampling_is_seeded_and_cold_sampling_is_greedy(shape, name):
    drafter, states, anchors, head = materials(shape, name)

    def draw(temperature: float, seed: int):
        generator = torch.Generator().manual_seed(seed)
        return sampled_drafts(drafter, states, anchors, head, temperature, generator)[0]

    assert torch.equal(draw(1.0, 2), draw(1.0, 2)) and not torch.equal(draw(1.0, 2), draw(1.0, 3))
    assert torch.equal(draw(1e-4, 2), greedy_drafts(drafter, states, anchors, head))
