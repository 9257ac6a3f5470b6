"""The shape: from a target, to and from config.json, and what is refused."""

import json

import pytest

from dflashdist.config import DrafterConfig, InputError
from dflashdist.model.shape import DrafterShape, default_layer_ids
from dflashdist.model.target_files import read_target_config

QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


def test_shape_of_qwen3_8b_gives_the_published_config():
    shape = DrafterShape.from_target(QWEN3_8B, 151669, DrafterConfig())
    config = shape.to_config("bfloat16")
    assert config["dflash_config"] == {
        "mask_token_id": 151669,
        "target_layer_ids": [1, 9, 17, 25, 33],
    }
    assert config["block_size"] == 16 and config["num_target_layers"] == 36
    assert config["num_hidden_layers"] == 5 and config["layer_types"] == ["full_attention"] * 5
    # Readers of transformers 4 take rope_theta, those of 5 rope_parameters.
    assert config["rope_theta"] == 1e6 == config["rope_parameters"]["rope_theta"]
    assert "auto_map" not in config
    assert DrafterShape.from_config(json.loads(json.dumps(config))) == shape


def test_either_rope_spelling_and_either_place_of_block_size_is_read():
    shape = DrafterShape.from_target(QWEN3_8B, 151669, DrafterConfig())
    config = shape.to_config("bfloat16")
    del config["rope_parameters"]
    config["dflash_config"]["block_size"] = config.pop("block_size")
    assert DrafterShape.from_config(config) == shape
    config = shape.to_config("bfloat16")
    del config["rope_theta"]
    assert DrafterShape.from_config(config) == shape
    config = shape.to_config("bfloat16")
    del config["dflash_config"]["target_layer_ids"]  # as many features as layers, by the rule
    assert DrafterShape.from_config(config) == shape
    by_kind = {"full_attention": {"rope_theta": 7e5}, "sliding_attention": {"rope_theta": 1e4}}
    target = {**QWEN3_8B, "rope_parameters": by_kind}
    assert DrafterShape.from_target(target, 151669, DrafterConfig()).rope_theta == 7e5


def test_drafter_settings_win_over_the_target():
    drafter = DrafterConfig(
        num_layers=2, head_dim=64, num_key_value_heads=4, target_layer_ids=[7, 3], mask_token_id=5
    )
    shape = DrafterShape.from_target(QWEN3_8B, None, drafter)
    assert (shape.num_layers, shape.head_dim, shape.num_key_value_heads) == (2, 64, 4)
    assert shape.target_layer_ids == (7, 3) and shape.mask_token_id == 5


@pytest.mark.parametrize(
    ("layers", "ids"),
    [
        (28, [1, 7, 13, 19, 25]),
        (32, [1, 8, 15, 22, 29]),
        (36, [1, 9, 17, 25, 33]),
        (40, [1, 10, 19, 28, 37]),
        (64, [1, 16, 31, 46, 61]),
    ],
)
def test_default_layers_are_the_published_ones(layers, ids):
    assert default_layer_ids(layers, 5) == ids


def test_too_few_layers_for_the_features():
    with pytest.raises(InputError, match="lower it, or set drafter"):
        default_layer_ids(6, 5)


@pytest.mark.parametrize(
    ("settings", "tokenizer_len", "message"),
    [
        ({"target_layer_ids": [1, 36]}, 151669, "36 is no layer; the target has layers 0 to 35"),
        ({"target_layer_ids": [-1, 3]}, 151669, "-1 is no layer"),
        ({"target_layer_ids": [3, 3]}, 151669, "named twice"),
        ({"mask_token_id": 151936}, 151669, "rows 0 to 151935"),
        ({}, 151936, "leaves no spare row"),
        ({"num_key_value_heads": 5}, 151669, "must be a multiple"),
    ],
)
def test_impossible_shapes_are_refused(settings, tokenizer_len, message):
    with pytest.raises(InputError, match=message):
        DrafterShape.from_target(QWEN3_8B, tokenizer_len, DrafterConfig(**settings))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "hybrid .*not supported yet"),
        ({"vision_config": {"depth": 2}}, "multimodal .*not supported yet"),
        ({"is_encoder_decoder": True}, "encoder"),
    ],
)
def test_unsupported_targets_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        DrafterShape.from_target({**QWEN3_8B, **change}, 151669, DrafterConfig())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["linear_attention"]}, "supported are full_attention, sliding_attention"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 64}, "5 layers need as many"),
        ({"layer_types": ["sliding_attention"] * 5}, "need each other"),
        ({"layer_types": ["sliding_attention"] * 5, "sliding_window": 8}, "less than a block"),
        ({"architectures": ["DominoDraftModel"]}, "architecture DominoDraftModel"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"input_embedding_scale": 2.0}, "input_embedding_scale"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "only the default kind"),
        ({"attention_bias": True}, "attention_bias"),
        ({"dflash_config": {}}, "not a DFlash drafter"),
    ],
)
def test_unsupported_drafters_are_refused(change, message):
    config = DrafterShape.from_target(QWEN3_8B, 151669, DrafterConfig()).to_config("bfloat16")
    with pytest.raises(InputError, match=message):
        DrafterShape.from_config({**config, **change})


def test_read_target_config_names_what_is_missing(tmp_path):
    with pytest.raises(InputError, match=r"no config\.json"):
        read_target_config(str(tmp_path))
    with pytest.raises(InputError, match="no such folder"):
        read_target_config(str(tmp_path / "absent"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        read_target_config(str(tmp_path))
