"""The drafter's variants, as changes to a small shape, and drafters of them with random weights."""

from dataclasses import replace

import torch

from dflashdist.model.drafter import Drafter
from dflashdist.model.shape import FULL, SLIDING, DrafterShape

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
