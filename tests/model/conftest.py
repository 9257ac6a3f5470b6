"""A tiny random Qwen3 target on disk, and drafters small enough for any test."""

import pytest
import torch

from dflashdist.config import DrafterConfig
from dflashdist.model.drafter import Drafter
from dflashdist.model.shape import DrafterShape

TINY_DRAFTER = DrafterConfig(
    num_layers=2, block_size=4, num_anchors=6, target_layer_ids=[3, 1], mask_token_id=97
)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory) -> str:
    """Six layers of a Qwen3 with random weights, written by transformers (float32, untied)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        # Norms of 1 and weights of std 0.02 would hide a norm applied twice, or not at all.
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def shape() -> DrafterShape:
    """A drafter of two layers for such a target: 2 features, blocks of 4."""
    config = {
        "model_type": "qwen3",
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "eos_token_id": 2,
    }
    return DrafterShape.from_target(config, 99, TINY_DRAFTER)


@pytest.fixture
def drafter(shape) -> Drafter:
    """Random weights, and norms away from 1."""
    drafter = Drafter(shape)
    drafter.reset_parameters("fan_in", seed=1)
    generator = torch.Generator().manual_seed(2)
    for parameter in drafter.parameters():
        if parameter.dim() == 1:
            parameter.data.normal_(1.0, 0.2, generator=generator)
    return drafter
