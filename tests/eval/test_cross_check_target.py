"""Every token of an answer is held to the target's own choice, also after a tie."""

import sys

import pytest
import torch
from demo_files import TARGET
from rounding import rounding
from variants import target_of_few_words

from dflashdist.data.chat import ChatTokenizer
from dflashdist.eval.acceptance import steady_positions
from dflashdist.eval.cross_check import (
    OutputsDiffer,
    Replayed,
    check_shares,
    equal_tokens,
    parts,
    replay,
)
from dflashdist.eval.decode import CachedTarget, Decoded, Rule, decode_plain

PROMPTS = [[3, 5, 2, 6], [1, 4], [6, 6, 1, 2, 5]]
RULE = Rule(24, end_ids=(0,))


@pytest.fixture(scope="module")
def chat():
    return ChatTokenizer.load(TARGET)


@pytest.fixture
def target():
    return CachedTarget(target_of_few_words())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_targets_own_answers_pass(chat, dtype):
    target = CachedTarget(target_of_few_words().to(dtype))
    answers, _ = decode_plain(target, PROMPTS, RULE)
    found = replay(target, chat, PROMPTS, answers, RULE, "plain")
    assert [one.tokens for one in found] == [len(answer.tokens) for answer in answers]
    if dtype == torch.float32:
        assert not any(one.other for one in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_a_few_units_in_the_last_place(chat, dtype):
    """A head of two words over one feature: their logits are x and x less n roundings, so n may
    look like n + 1 or n - 1. Of float32, whose sums round as well, a rounding is 64 eps."""
    target = CachedTarget(target_of_few_words().to(dtype))
    head, eps = target.head, torch.finfo(dtype).eps * (64 if dtype == torch.float32 else 1)

    @torch.no_grad()
    def second_best(below):
        feature = target.last_states(torch.tensor([PROMPTS[0]]))[0, -1].argmax()
        head.zero_()
        head[1, feature], head[2, feature] = 1, 1 - below * eps
        (found,) = replay(target, chat, PROMPTS[:1], [Decoded([2])], Rule(1), "speculative")
        return found

    assert second_best(0) == Replayed(1, 0)
    assert second_best(3) == Replayed(1, 1)
    assert second_best(6) == second_best(14) == Replayed(1, 1, 1)
    with pytest.raises(
        OutputsDiffer, match=r"speculative .* token 0 .* is 2, logit margin .* expl"
    ):
        second_best(18)


def test_what_follows_a_tie_is_judged_too(target, chat):
    with torch.no_grad():  # two words that the target cannot tell apart
        target.head[5] = target.head[4]
    (answer,), _ = decode_plain(target, PROMPTS[:1], RULE)
    at = answer.tokens.index(4)
    other = [*answer.tokens[:at], 5]
    rest = Rule(RULE.max_new_tokens - len(other), RULE.end_ids)
    (more,), _ = decode_plain(target, [[*PROMPTS[0], *other]], rest)
    other += more.tokens
    assert equal_tokens(answer.tokens, other) == at

    def replayed(tokens):
        (found,) = replay(target, chat, PROMPTS[:1], [Decoded(tokens)], RULE, "speculative")
        return found

    assert replayed(other) == Replayed(len(other), 0)
    wrong = len(other) - 2
    assert wrong > at
    other[wrong] = next(word for word in (1, 2, 3) if word != other[wrong])
    with pytest.raises(OutputsDiffer, match=rf"token {wrong} of the answer to .* logit margin \d"):
        replayed(other)


def test_an_answer_ends_where_the_rule_says(target, chat):
    (answer,), _ = decode_plain(target, PROMPTS[:1], RULE)
    tokens, prompt = answer.tokens, PROMPTS[:1]
    with pytest.raises(OutputsDiffer, match=rf"token {len(tokens) - 2} .* no end, and the last"):
        replay(target, chat, prompt, [Decoded(tokens[:-1])], RULE, "speculative")
    with pytest.raises(OutputsDiffer, match=r"token 3 .* an end, after which it goes on"):
        replay(target, chat, prompt, [answer], Rule(4, (0,)), "speculative")
    with pytest.raises(OutputsDiffer, match=r"token 0 .* an end, after which it goes on"):
        replay(target, chat, prompt, [answer], Rule(24, (tokens[0],)), "speculative")


def test_logits_are_the_models_own_also_where_they_are_capped():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.5,
        final_logit_softcapping=2.0, pad_token_id=0,
    )  # fmt: skip
    ids = torch.tensor([[3, 5, 2, 6, 1]])
    for model in (target_of_few_words(), Gemma2ForCausalLM(config).eval()):
        target = CachedTarget(model)
        with torch.no_grad():
            own = target.logits(target.last_states(ids))
            # The same kernels, but for the mask: up to 4 layers of some 6 sums of up to 64 terms.
            bound = rounding(4 * 6 * 64, own.abs().max().item())
            assert (own - model(input_ids=ids).logits).abs().max() < bound
    assert 1 < own.abs().max() <= 2


def test_shares_may_differ_by_a_hundredth_and_three_standard_errors():
    """Of 0 against 130 of 10,000 these are 0.01 + 3 sqrt(0.0065 0.9935 2 / 10,000) = 0.0134; of
    150, 0.0137."""
    check_shares(Replayed(10_000, 0), Replayed(10_000, 130))
    with pytest.raises(OutputsDiffer, match=r"1\.50% of its tokens .* 0\.00% of plain"):
        check_shares(Replayed(10_000, 0), Replayed(10_000, 150))
    check_shares(Replayed(10_000, 50), Replayed(10_000, 150))
    check_shares(Replayed(40, 0), Replayed(40, 3))  # too few to say
    check_shares(Replayed(10_000, 150), Replayed(10_000, 0))
    check_shares(Replayed(), Replayed())
    # Of what is unusual 0.002 + 3 sqrt(0.0016 0.9984 2 / 10,000) = 0.0037 at 32; at 45 0.0040.
    check_shares(Replayed(10_000, 90), Replayed(10_000, 90, 32))
    with pytest.raises(OutputsDiffer, match=r"0\.45% .* first choice by more than usual rounding"):
        check_shares(Replayed(10_000, 90), Replayed(10_000, 90, 45))
    check_shares(Replayed(10_000, 90, 45), Replayed(10_000, 90, 45))


def test_long_batches_are_replayed_in_parts():
    """At most so many padded tokens at once; a text that is longer is one of its own."""
    texts = [[1] * 5] * 7
    assert [texts[part] for part in parts(texts, 15)] == [texts[:3], texts[:3], texts[:1]]
    assert [len(texts[part]) for part in parts(texts, 4)] == [1] * 7
    assert list(parts([])) == []


@pytest.mark.parametrize(
    ("config", "steady"),
    [
        ({"max_position_embeddings": 9}, None),
        ({"max_position_embeddings": 9, "rope_parameters": {"rope_type": "yarn"}}, None),
        ({"max_position_embeddings": 9, "original_max_position_embeddings": 4,
          "rope_scaling": {"type": "longrope"}}, 4),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 5}}, 5),
        ({"max_position_embeddings": 9, "rope_parameters": {"rope_type": "dynamic"}}, 9),
    ],
)  # fmt: skip
def test_texts_stay_where_keys_are_rotated_alike(config, steady):
    assert steady_positions(config) == (steady or sys.maxsize)
