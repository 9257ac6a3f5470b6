"""The two loops emit the same tokens, and the passes account for every one of them."""

import pytest
import torch
from rounding import EXACT, in_float64

from dflashdist.config import DrafterConfig, LossConfig
from dflashdist.eval.decode import (
    CachedTarget,
    Rule,
    decode_plain,
    decode_speculative,
    verify,
)
from dflashdist.eval.generate import is_looping
from dflashdist.model.blocks import draw_anchors
from dflashdist.model.drafter import Drafter
from dflashdist.model.loss import DrafterBatch, DrafterLoss
from dflashdist.model.shape import DrafterShape
from dflashdist.model.target_files import TargetTensors

PROMPT = [5, 9, 2, 7, 11, 3]
OTHERS = [[10, *PROMPT], [11, 4], [12, *PROMPT, *PROMPT], PROMPT]
NEVER = (-1,)  # no token ends the answer
LAYERS, BLOCK, MASK = (0, 2), 4, 95


@pytest.fixture(scope="module")
def model():
    """A random Qwen3 target whose greedy answers wander instead of repeating one token. In float64:
    equal tokens must not hang on how a processor rounds."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        initializer_range=0.2, tie_word_embeddings=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return in_float64(Qwen3ForCausalLM(config)).eval()


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
    drafter = Drafter(shape).double()
    drafter.reset_parameters("fan_in", seed=0)
    return drafter.eval()


@pytest.fixture(scope="module")
def trained(model, target, shape):
    """A drafter that has learned the target's answer to PROMPT by heart, or nearly."""
    drafter = Drafter(shape).double()
    drafter.reset_parameters("fan_in", seed=0)
    ids = torch.tensor([PROMPT + plain(target, PROMPT, 64, NEVER).tokens])
    with torch.no_grad():
        target.prefill(ids.tolist(), 0)
    hidden = target.hidden().clone()
    frozen = TargetTensors(target.embedding.detach(), target.head.detach(), model.model.norm.weight)
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


def plain(target, prompt, max_new_tokens, end_ids):
    return decode_plain(target, [prompt], Rule(max_new_tokens, end_ids))[0][0]


def check(target, drafter, prompts, max_new_tokens, end_ids):
    """Both loops agree and account for their tokens; returns the speculative answers."""
    rule = Rule(max_new_tokens, end_ids)
    slow, _ = decode_plain(target, prompts, rule)
    fast, _ = decode_speculative(target, drafter, prompts, rule)
    assert [one.tokens for one in fast] == [one.tokens for one in slow]
    for decoded in (*slow, *fast):
        assert sum(decoded.emitted) == len(decoded.tokens) - 1
        assert max(decoded.emitted, default=1) <= BLOCK
    for one in fast:
        assert len(one.emitted) == len(one.offered) == len(one.accepted)
        for emitted, offered, accepted in zip(one.emitted, one.offered, one.accepted, strict=True):
            assert accepted <= offered and emitted - 1 <= accepted <= emitted
    return fast


def test_plain_is_generate(model, target):
    answer = plain(target, PROMPT, 48, NEVER)
    ids = torch.tensor([PROMPT])
    whole = model.generate(ids, max_new_tokens=48, do_sample=False, attention_mask=ids > 0)
    assert answer.tokens == whole[0, len(PROMPT) :].tolist()
    assert len(set(answer.tokens)) > 10  # or equality would say little


def test_taps_are_the_layers_outputs(model, target):
    with torch.no_grad():
        target.prefill([PROMPT[:4]], 2)
        first = target.hidden()
        target.forward(torch.tensor([PROMPT[4:]]))
        second = target.hidden()
        states = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer + 1] for layer in LAYERS], -1)
    assert (torch.cat([first, second], 1) - expected).abs().max() < EXACT


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 5, 8, 33])
def test_equal_with_an_untrained_drafter(target, untrained, max_new_tokens):
    for prompts in ([PROMPT], OTHERS):
        for answer in check(target, untrained, prompts, max_new_tokens, NEVER):
            assert len(answer.tokens) == max_new_tokens


def test_a_trained_drafter_is_faster_and_as_exact(target, untrained, trained):
    (fast,) = check(target, trained, [PROMPT], 64, NEVER)
    (slow,) = check(target, untrained, [PROMPT], 64, NEVER)
    assert 63 / len(slow.emitted) < 1.5
    assert 63 / len(fast.emitted) > 2.5  # of at most 4


def test_a_batch_is_its_rows(target, trained):
    """Of unequal prompts, acceptance and ends: each row as if it were alone."""
    ends = plain(target, PROMPT, 24, NEVER).tokens[9:10]
    for end_ids in (NEVER, ends):
        together = check(target, trained, OTHERS, 24, end_ids)
        alone = [check(target, trained, [prompt], 24, end_ids)[0] for prompt in OTHERS]
        assert together == alone
        assert len({len(one.emitted) for one in alone}) > 1
    assert min(len(one.tokens) for one in alone) < 24 == max(len(one.tokens) for one in alone)


def test_an_end_inside_a_block_stops_there(target, trained):
    (whole,) = check(target, trained, [PROMPT], 20, NEVER)
    stops = set()
    for end in dict.fromkeys(whole.tokens):
        (fast,) = check(target, trained, [PROMPT], 20, (end,))
        assert fast.tokens == whole.tokens[: whole.tokens.index(end) + 1]
        if fast.emitted and fast.accepted[-1] == fast.emitted[-1]:
            stops.add(end)  # the end was a draft, so the bonus token after it was thrown away
    assert stops


def test_a_clipped_last_block(target, trained):
    for max_new_tokens in range(2, 10):
        (fast,) = check(target, trained, [PROMPT], max_new_tokens, NEVER)
        assert len(fast.tokens) == max_new_tokens
        assert fast.offered[-1] <= max_new_tokens - (len(fast.tokens) - fast.emitted[-1]) - 1


def test_rejection_sampling_leaves_the_targets_distribution():
    """`verify` alone, on 4 words, 200,000 times, with drafts from another distribution than the
    target's: the first token, and the second given the first."""
    torch.manual_seed(0)
    words, times = 4, 200_000
    generator = torch.Generator().manual_seed(1)
    rule = Rule(9, temperature=0.7, generator=generator)
    # The target's logits depend on the token before, the drafter's on the slot alone.
    table, first = torch.randn(words, words) * 2, 1
    q = (torch.randn(2, words) * 2).softmax(-1)
    drafts = torch.multinomial(q, times, True, generator=generator).T
    logits = table[torch.cat([torch.full((times, 1), first), drafts], 1)]
    limits = torch.full((times,), 2)
    agreed, bonus = verify(logits, drafts, q.expand(times, -1, -1), limits, rule)
    assert set(agreed.tolist()) == {0, 1, 2}
    p = rule.probs(table).double()
    one = torch.where(agreed > 0, drafts[:, 0], bonus)
    two = torch.where(agreed > 1, drafts[:, 1], bonus)
    counts = [torch.bincount(one, minlength=words)]
    counts += [
        torch.bincount(two[(agreed > 0) & (one == i)], minlength=words) for i in range(words)
    ]
    for count, expected in zip(counts, [p[first], *p], strict=True):
        expected = expected * count.sum()
        # 3 degrees of freedom: 16.3 is passed once in 1,000 seeds, and this seed is fixed.
        assert ((count - expected) ** 2 / expected).sum() < 16.3
    # A clipped row takes no draft past its limit, and its token is the target's own again.
    agreed, bonus = verify(logits, drafts, q.expand(times, -1, -1), limits * 0, rule)
    assert agreed.max() == 0
    count, expected = torch.bincount(bonus, minlength=words), p[first] * times
    assert ((count - expected) ** 2 / expected).sum() < 16.3


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
