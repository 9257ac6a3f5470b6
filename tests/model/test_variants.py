"""Each variant: training equals decoding, where it begins, and what its shape records."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from rounding import EXACT
from test_drafter import cached_decoding_error
from test_shape import QWEN3_8B
from variants import CHANGES, variant_drafter

from dflashdist.config import DrafterConfig, InputError
from dflashdist.model.drafter import Drafter, greedy_drafts
from dflashdist.model.layers import convolve
from dflashdist.model.shape import FULL, SLIDING, DrafterShape, Sight

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_cached_decoding_equals_the_training_block(shape, name):
    assert cached_decoding_error(variant_drafter(shape, name)) < EXACT


@pytest.mark.parametrize("name", ["dflash2", "dspark"])
@pytest.mark.parametrize("init", ["fan_in", "published"])
def test_a_new_variant_starts_as_the_dflash_drafter(shape, name, init):
    """Of the same seed and sight, to the bit: states and drafts."""
    own = replace(shape, **CHANGES[name])
    sight = {"layer_types": own.layer_types, "sliding_window": own.sliding_window}
    plain = Drafter(replace(shape, **sight, is_causal=own.is_causal))
    variant = Drafter(own)
    for drafter in (plain, variant):
        drafter.reset_parameters(init, seed=3, final_norm=torch.rand(shape.hidden_size))
    size = shape.block_size
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 20, shape.num_features * shape.hidden_size, generator=generator)
    embeds = torch.randn(1, 2 * size, shape.hidden_size, generator=generator)
    anchors, keep = torch.tensor([[7, 12]]), torch.ones(1, 2, dtype=torch.bool)
    with torch.no_grad():
        variant.norm.weight.copy_(plain.norm.weight)  # drawn anew for each above
        states = [one(hidden, embeds, anchors, keep) for one in (plain, variant)]
    assert torch.equal(*states)
    # Logits so small that any other score would decide.
    head = 1e-3 * torch.randn(shape.vocab_size, shape.hidden_size, generator=generator)
    blocks = states[0].unflatten(1, (2, size))[0]
    drafts = greedy_drafts(variant, blocks, torch.tensor([5, 6]), head)
    assert torch.equal(drafts, (blocks @ head.T).argmax(-1)[:, 1 - own.ahead :])


def test_initialisation_of_a_variant_is_seeded(shape):
    drawn = []
    for seed in (3, 3, 4):
        drafter = Drafter(replace(shape, **CHANGES["dflash2"]))
        drafter.reset_parameters("fan_in", seed=seed)
        selector = drafter.candidate_selector
        assert selector is not None
        drawn.append(selector.successor_codebook)
        assert abs(drawn[-1].std().item() * 5**0.5 - 1) < 0.15  # rank 5, 495 draws
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_convolution_by_hand():
    """Three taps, two groups of two channels, blocks of 2: y = (base + predicted) * earlier."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 4, generator=generator)
    predicted = torch.randn(2, 6, 3, 2, generator=generator)
    base = torch.randn(3, 4, generator=generator)
    y = convolve(x, predicted, base, 2)
    for b in range(2):
        for i in range(6):
            for c in range(4):
                expected = sum(
                    (base[t, c] + predicted[b, i, t, c // 2]) * x[b, i - t, c]
                    for t in range(min(3, i % 2 + 1))
                )
                assert abs(y[b, i, c] - expected) < EXACT


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_config_both_ways(shape, name):
    shape = replace(shape, **CHANGES[name])
    config = json.loads(json.dumps(shape.to_config("bfloat16")))
    assert DrafterShape.from_config(config) == shape
    assert config["layer_types"] == (list(shape.layer_types) or [FULL] * 2)
    assert config["use_sliding_window"] == (SLIDING in config["layer_types"])
    assert config["sliding_window"] == shape.sliding_window
    assert config.get("is_causal") == config["dflash_config"].get("causal") == shape.is_causal


def test_published_config_of_dflash2(shape):
    config = replace(shape, **CHANGES["dflash2"]).to_config("bfloat16")
    assert config["architectures"] == ["DFlash2DraftModel"] and config["is_causal"] is False
    assert config["dflash_config"] == {
        "mask_token_id": 97, "target_layer_ids": [3, 1], "causal": False,
        "conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 3,
    }  # fmt: skip


def test_which_causality_wins(shape):
    """The top level before `dflash_config`, as in vLLM; either alone; neither: the layers' kind."""
    config = replace(shape, **CHANGES["sliding"]).to_config("bfloat16")
    reading = config["dflash_config"]
    for top, nested, expected in (
        (False, True, False), (True, None, True), (None, True, True), (None, None, None),
    ):  # fmt: skip
        changed = config | {"is_causal": top, "dflash_config": reading | {"causal": nested}}
        assert DrafterShape.from_config(changed).is_causal is expected


def test_published_config_of_dspark(shape):
    """Flat, as DeepSpec writes it; and as trainers write it that keep `dflash_config`."""
    shape = replace(shape, **CHANGES["dspark"])
    config = shape.to_config("bfloat16")
    assert config["architectures"] == ["Qwen3DSparkModel"]
    flat = {
        "mask_token_id": 97, "target_layer_ids": [3, 1], "markov_rank": 4,
        "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True, "sample_from_anchor": True,
    }  # fmt: skip
    assert flat.items() <= config.items()
    del config["dflash_config"]
    assert DrafterShape.from_config(config) == shape
    nested = {k: v for k, v in config.items() if k not in flat} | {"dflash_config": flat}
    assert DrafterShape.from_config(nested | {"architectures": ["DSparkDraftModel"]}) == shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"markov_head_type": "gated"}, "markov_head_type=gated"),
        ({"sample_from_anchor": False}, "sample_from_anchor=False"),
        ({"confidence_head_with_markov": False}, "confidence_head_with_markov"),
        ({"draft_vocab_size": 10}, "draft_vocab_size=10"),
    ],
)
def test_other_kinds_of_dspark_are_refused(shape, change, message):
    config = replace(shape, **CHANGES["dspark"]).to_config("bfloat16")
    with pytest.raises(InputError, match=message):
        DrafterShape.from_config(config | change)


def test_shapes_from_the_configuration():
    def made(**settings) -> DrafterShape:
        return DrafterShape.from_target(QWEN3_8B, 151669, DrafterConfig(**settings))

    plain, window = made(), made(sliding_window=2048)
    assert (plain.layer_types, plain.is_causal, plain.ahead) == ((), None, 0)
    assert window.layer_types == (SLIDING,) * 4 + (FULL,)
    assert [window.sight(i) for i in (0, 4)] == [Sight(2048, True), Sight(None, False)]
    assert made(layer_types=[FULL] * 5) == plain
    causal = made(sliding_window=2048, causal=True)
    assert [causal.sight(i) for i in (0, 4)] == [Sight(2048, True), Sight(None, True)]
    second = made(variant="dflash2", sliding_window=2048, layer_types=[SLIDING] * 5)
    assert (second.selector_rank, second.markov_rank) == (256, 0)
    assert second.sight(0) == Sight(2048, False)  # as the published ones
    spark = made(variant="dspark", block_size=7)
    assert (spark.ahead, spark.markov_rank, spark.confidence_head) == (1, 256, True)
    assert spark.conv_kernel_size == 0
    with pytest.raises(InputError, match="need each other"):
        made(num_layers=1, sliding_window=2048)  # all but the last slide: none
    with pytest.raises(InputError, match=r"conv_group_size=24: must divide"):
        made(variant="dflash2", conv_group_size=24)
    with pytest.raises(InputError, match="selector_top_k"):
        made(variant="dflash2", selector_top_k=200_000)


def test_facts_of_older_checkpoints_stay_equal(shape):
    """A checkpoint from before variants records these fields, as JSON; a new one the same."""
    older = {
        "hidden_size", "intermediate_size", "num_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "rope_theta",
        "max_position_embeddings", "block_size", "mask_token_id", "target_layer_ids",
        "num_target_layers", "bos_token_id", "eos_token_id",
    }  # fmt: skip
    everything = json.loads(json.dumps(asdict(shape)))
    assert shape.facts() == {key: everything[key] for key in older}
    facts = [json.dumps(replace(shape, **change).facts()) for change in CHANGES.values()]
    assert len(set(facts)) == len(facts)
