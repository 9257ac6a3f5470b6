"""The cache is invisible: logits of ragged rows, rejected tokens and sliding windows are those of
the model's own forward over each row's tokens, for several families of models."""

import pytest
import torch
from rounding import rounding

from dflashdist.config import InputError
from dflashdist.eval.decode import CachedTarget, KeyValueCache, attention_masks

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention"] * 2
FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": 4},
    "Qwen2": {"layer_types": MIXED, "use_sliding_window": True, "sliding_window": 4},
    "Qwen3": {"tie_word_embeddings": True},
    "Gemma2": {"sliding_window": 4, "layer_types": MIXED, "query_pre_attn_scalar": 8},
    "GptOss": {
        "sliding_window": 4, "layer_types": MIXED, "num_local_experts": 2, "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },  # its attention has sinks, so it runs the eager one
}  # fmt: skip


def build(family: str):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL | FAMILIES[family])
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_are_the_models_own(family):
    model = build(family)
    target = CachedTarget(model)
    rows = [[5, 9, 2, 7, 11, 3, 8, 30], [40, 4, 6]]
    first = target.prefill(rows, room=12)
    for step, kept in enumerate(([1, 3], [2, 2], [3, 1])):
        new = torch.tensor([[12, 13 + step, 14], [20 + step, 21, 22]])
        logits = target.forward(new)
        expected = [
            model(torch.tensor([[*row, *more]])).logits[0]
            for row, more in zip(rows, new, strict=True)
        ]
        for row in range(2):
            own = expected[row][len(rows[row]) - 1 :]
            if step == 0:
                assert differ(first[row], own[0]) < 1
            assert differ(logits[row], own[1:]) < 1
        target.cache.advance(kept)
        rows = [[*row, *more[:n].tolist()] for row, more, n in zip(rows, new, kept, strict=True)]
    target.cache.select([1])
    logits = target.forward(torch.tensor([[33]]))
    expected = model(torch.tensor([[*rows[1], 33]])).logits[0, -1]
    assert differ(logits[0, 0], expected) < 1


def differ(logits, expected) -> float:
    """By how much of what float32 may do through 4 layers of some 6 sums of up to 48 terms."""
    bound = rounding(4 * 6 * 48, expected.abs().max().item())
    return (logits - expected).abs().max().item() / bound


def test_what_was_not_kept_has_no_effect():
    """To the bit: a rejected token's keys and values are overwritten, or seen by nobody."""
    results = []
    for junk in (1.0, 1e30):
        cache = KeyValueCache(2, 8, "cpu")
        cache.begin(3)
        new = torch.arange(2 * 3 * 2.0).view(2, 1, 3, 2)
        new[0, :, 1:] = junk  # row 0 keeps 1 of 3, row 1 all
        cache.update(new, new, 0)
        cache.advance([1, 3])
        assert cache.begin(1).tolist() == [[1], [3]]
        keys, values = cache.update(new[:, :, :1], new[:, :, :1], 0)
        seen = cache.visible()
        assert keys.shape == (2, 1, 4, 2) and seen.shape == (2, 1, 1, 4)
        assert seen[:, 0, 0].tolist() == [[True, True, False, False], [True] * 4]
        query = torch.ones(2, 1, 1, 2)
        attend = torch.nn.functional.scaled_dot_product_attention
        results.append(attend(query, keys, values, attn_mask=seen))
    assert torch.equal(*results)


def test_a_window_counts_the_token_itself():
    cache = KeyValueCache(1, 6, "cpu")
    cache.begin(4)
    assert cache.visible(2)[0, 0].long().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]


def test_an_unknown_type_of_attention_is_refused():
    class Config:
        layer_types = ("full_attention", "chunked_attention")

    with pytest.raises(InputError, match="layers of type chunked_attention"):
        attention_masks(Config, KeyValueCache(1, 1, "cpu"), torch.float32)
