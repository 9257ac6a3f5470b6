"""Published configurations that this drafter is not, which must not be read as if it were."""

import pytest

from dflashdist.config import InputError
from dflashdist.model.shape import DrafterShape

CONFIG = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 4,
    "dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 2]}, "num_target_layers": 6,
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip


def kinds(full: dict, sliding: dict) -> dict:
    return {"full_attention": full, "sliding_attention": sliding}


@pytest.mark.parametrize(
    ("rope", "theta"),
    [
        ({}, 1e4),
        ({"rope_theta": 7e4}, 7e4),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": None, "rope_theta": 1e4}, 5e5),
        ({"rope_parameters": kinds({"rope_theta": 5e5}, {"rope_theta": 5e5})}, 5e5),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 5e5}}}, 5e5),
        ({"rope_parameters": kinds({"rope_type": "default"}, {}), "rope_theta": 6e4}, 6e4),
    ],
)
def test_theta_is_found_wherever_it_stands(rope, theta):
    assert DrafterShape.from_config(CONFIG | rope).rope_theta == theta


@pytest.mark.parametrize(
    ("rope", "fault"),
    [
        ({"rope_parameters": kinds({"rope_type": "yarn", "factor": 4}, {})}, "yarn"),
        ({"rope_parameters": kinds({}, {"rope_type": "linear", "factor": 4})}, "linear"),
        ({"rope_scaling": {"type": "yarn"}, "rope_parameters": {"rope_theta": 1e4}}, "yarn"),
        ({"rope_scaling": {"rope_theta": 1e4}, "rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"rope_parameters": kinds({"rope_theta": 1e6}, {"rope_theta": 1e4})}, "10000, 1e.06"),
        ({"rope_parameters": "yarn"}, "not a set of parameters"),
    ],
)
def test_positions_of_another_kind_are_refused(rope, fault):
    with pytest.raises(InputError, match=fault):
        DrafterShape.from_config(CONFIG | rope)


@pytest.mark.parametrize("ids", [["1", "2"], [1.0, 2.0], [None], 3, {"a": 1}, [True, 2]])
def test_layers_that_are_no_numbers_are_refused(ids):
    told = CONFIG["dflash_config"] | {"target_layer_ids": ids}
    with pytest.raises(InputError, match="not a list of layer numbers"):
        DrafterShape.from_config(CONFIG | {"dflash_config": told})


def test_the_speculators_layout_is_named():
    with pytest.raises(InputError, match="again with --format hf"):
        DrafterShape.from_config({"speculators_model_type": "dflash"})
