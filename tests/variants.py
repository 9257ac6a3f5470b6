"""The drafter's variants, as changes to a small shape, drafters of them with random weights, and a
target of so few words that such a drafter is right now and then."""

from dataclasses import replace

import torch

from dflashdist.model.drafter import Drafter
from dflashdist.model.shape import FULL, SLIDING, DrafterShape

WORDS = 8
WINDOW = 6
SLIDES = {"layer_types": (SLIDING, SLIDING), "sliding_window": WINDOW}
CONVOLVED = {"variant": "dflash2", "conv_kernel_size": 2, "conv_group_size": 8}
CHANGES = {
    "dflash": {},
    "one sliding layer": {"layer_types": (SLIDING, FULL), "sliding_window": WINDOW},
    "sliding": SLIDES,
    "sliding both ways": SLIDES | {"is_causal": False},
    "causal": {"is_causal": True},
    "causal sliding": {"layer_types": (SLIDING, FULL), "sliding_window": 9, "is_causal": True},
    "dflash2": CONVOLVED | SLIDES | {"is_causal": False, "selector_rank": 5, "selector_top_k": 3},
    "dflash2 full": CONVOLVED | {"conv_kernel_size": 3, "selector_rank": 4, "selector_top_k": 7},
    "dspark": {"variant": "dspark", "markov_rank": 4, "confidence_head": True},
}


def variant_drafter(shape: DrafterShape, name: str, seed: int = 1) -> Drafter:
    """Random weights: norms away from 1, and every part of the variant with an effect."""
    drafter = Drafter(replace(shape, **CHANGES[name]))
    drafter.reset_parameters("fan_in", seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.2, generator=generator)
        for part in drafter.variant_parts().values():
            for parameter in part.parameters():
                parameter.normal_(0.0, 0.5, generator=generator)
    return drafter


def target_of_few_words():
    """A random Qwen3 of 4 layers with `WORDS` words; 0 ends an answer and pads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(4)
    config = Qwen3Config(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        initializer_range=0.2, tie_word_embeddings=False, eos_token_id=0, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()
