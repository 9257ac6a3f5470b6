"""The two loops emit the same tokens, and the passes account for every one of them."""

import pytest
import torch

from dflashdist.config import DrafterConfig, LossConfig
from dflashdist.eval.decode import CachedTarget, is_looping, plain_greedy, speculative_greedy
from dflashdist.model.blocks import draw_anchors
from dflashdist.model.drafter import Drafter
from dflashdist.model.frozen import Frozen
from dflashdist.model.loss import DrafterBatch, DrafterLoss
from dflashdist.model.shape import DrafterShape

PROMPT = [5, 9, 2, 7, 11, 3]
NEVER = (-1,)  # no token ends the answer
LAYERS, BLOCK, MASK = (0, 2), 4, 95


@pytest.fixture(scope="module")
def model():
    """A random Qwen3 target whose greedy answers wander instead of repeating one token."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        initializer_range=0.2, tie_word_embeddings=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def shape(model):
    drafter = DrafterConfig(
        num_layers=2, block_size=BLOCK, target_layer_ids=list(LAYERS), mask_token_id=MASK
    )
    return DrafterShape.from_target(model.config.to_dict(), None, drafter)


@pytest.fixture(scope="module")
def target(model):
    return CachedTarget(model, LAYERS)


@pytest.fixture(scope="module")
def untrained(shape):
    drafter = Drafter(shape)
    drafter.reset_parameters("fan_in", seed=0)
    return drafter.eval()


@pytest.fixture(scope="module")
def trained(model, target, shape):
    """A drafter that has learned the target's answer to PROMPT by heart, or nearly."""
    drafter = Drafter(shape)
    drafter.reset_parameters("fan_in", seed=0)
    ids = torch.tensor([PROMPT + plain_greedy(target, PROMPT, 64, NEVER).tokens])
    target.start()
    with torch.no_grad():
        target.forward(ids[0])
    hidden = target.hidden().clone()
    frozen = Frozen(
        model.get_input_embeddings().weight.detach(),
        model.get_output_embeddings().weight.detach(),
        model.model.norm.weight.detach(),
    )
    loss = DrafterLoss(drafter, frozen, shape, LossConfig())
    mask = torch.ones_like(ids, dtype=torch.bool)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for step in range(60):
        anchors, keep = draw_anchors(mask, (0,), seed=0, epoch=step, num_anchors=32)
        total, sums = loss(DrafterBatch(ids, mask, hidden, anchors, keep, torch.tensor([70])))
        optimizer.zero_grad()
        (total / sums[1]).backward()
        optimizer.step()
    return drafter.eval()


def check(target, drafter, prompt, max_new_tokens, end_ids):
    """Both loops agree and account for their tokens; returns the speculative answer."""
    plain = plain_greedy(target, prompt, max_new_tokens, end_ids)
    fast = speculative_greedy(target, drafter, prompt, max_new_tokens, end_ids)
    assert fast.tokens == plain.tokens
    for decoded in (plain, fast):
        assert sum(decoded.emitted) == len(decoded.tokens) - 1
    assert max(fast.emitted, default=1) <= BLOCK
    assert len(fast.emitted) == len(fast.offered) == len(fast.accepted)
    for emitted, offered, accepted in zip(fast.emitted, fast.offered, fast.accepted, strict=True):
        assert accepted <= offered and emitted - 1 <= accepted <= emitted
    return fast


def test_plain_is_generate(model, target):
    plain = plain_greedy(target, PROMPT, 48, NEVER)
    ids = torch.tensor([PROMPT])
    whole = model.generate(ids, max_new_tokens=48, do_sample=False, attention_mask=ids > 0)
    assert plain.tokens == whole[0, len(PROMPT) :].tolist()
    assert len(set(plain.tokens)) > 10  # or equality would say little


def test_taps_are_the_layers_outputs(model, target):
    target.start()
    with torch.no_grad():
        target.forward(PROMPT[:4])
        first = target.hidden()
        target.forward(PROMPT[4:])
        second = target.hidden()
        states = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer + 1] for layer in LAYERS], -1)
    # float32 sums in another order; the states are of order 1.
    torch.testing.assert_close(first, expected[:, :4], atol=1e-5, rtol=0)
    torch.testing.assert_close(second, expected[:, 4:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 5, 8, 33])
def test_equal_with_an_untrained_drafter(target, untrained, max_new_tokens):
    fast = check(target, untrained, PROMPT, max_new_tokens, NEVER)
    assert len(fast.tokens) == max_new_tokens


def test_a_trained_drafter_is_faster_and_as_exact(target, untrained, trained):
    fast = check(target, trained, PROMPT, 64, NEVER)
    slow = check(target, untrained, PROMPT, 64, NEVER)
    assert 63 / len(slow.emitted) < 1.5
    assert 63 / len(fast.emitted) > 2.5  # of at most 4
    for first in range(10, 14):  # prompts it has not seen: more rejections and rollbacks
        check(target, trained, [first, *PROMPT], 24, NEVER)


def test_an_end_inside_a_block_stops_there(target, trained):
    whole = check(target, trained, PROMPT, 20, NEVER)
    stops = set()
    for end in dict.fromkeys(whole.tokens):
        fast = check(target, trained, PROMPT, 20, (end,))
        assert fast.tokens == whole.tokens[: whole.tokens.index(end) + 1]
        if fast.emitted and fast.accepted[-1] == fast.emitted[-1]:
            stops.add(end)  # the end was a draft, so the bonus token after it was thrown away
    assert stops


def test_a_clipped_last_block(target, trained):
    for max_new_tokens in range(2, 10):
        fast = check(target, trained, PROMPT, max_new_tokens, NEVER)
        assert len(fast.tokens) == max_new_tokens
        assert fast.offered[-1] <= max_new_tokens - (len(fast.tokens) - fast.emitted[-1]) - 1


@pytest.mark.parametrize(
    ("tokens", "looping"),
    [
        (list(range(40)), False),
        ([1] * 11, False),
        ([1] * 12, True),
        ([9, 8, *[1, 2, 3, 4, 5] * 3, 7], True),
        ([9, 8, *[1, 2, 3, 4, 5] * 3][:-1], True),
        ([9, 8, *[1, 2, 3, 4, 5] * 3][:-2], False),
        (list(range(33)) * 3, False),
        ([], False),
        ([3], False),
    ],
)
def test_loops(tokens, looping):
    assert is_looping(tokens) is looping
