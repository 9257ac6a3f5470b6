"""The layout of the library `speculators` (0.9): the same tensors, another config.json.

Layer ids are vLLM's, one more than ours: id l + 1 is what enters decoder layer l + 1. The library
reads embedding and head from the target that the file names. Its training code gives a sliding
layer a slightly wider window (all keys from anchor - window on) than its servers and we do.
"""

from typing import Any

from dflashdist.config import InputError
from dflashdist.export.origin import NamedTarget, architectures
from dflashdist.model.shape import FULL, PARTS, DrafterShape

VERSION = "0.9.0"  # the layout's
_CLASSES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
}
# Of the published config.json, what describes the drafter's layers.
_LAYERS = (
    "model_type", "num_hidden_layers", "layer_types", "hidden_size", "intermediate_size",
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps",
    "attention_bias", "attention_dropout", "initializer_range", "max_position_embeddings",
    "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window",
    "max_window_layers", "tie_word_embeddings", "vocab_size", "bos_token_id", "eos_token_id",
    "use_cache", "dtype", "is_causal",
)  # fmt: skip


def speculators_config(shape: DrafterShape, dtype: str, target: NamedTarget) -> dict[str, Any]:
    """The config.json of a drafter in this layout.

    Args:
        dtype: of model.safetensors, e.g. "bfloat16".
        target: the layout calls it the verifier. Its architecture is noted where its config.json
            is on this machine.

    Raises InputError for layers that the layout's readers would see otherwise.
    """
    _check_layers(shape)
    layers = shape.to_config(dtype)
    config: dict[str, Any] = {
        "architectures": [_CLASSES[shape.variant]],
        "speculators_model_type": shape.variant,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": shape.variant,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": shape.num_drafts,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": target.name,
                "architectures": architectures(target),
            },
        },
        "transformer_layer_config": {key: layers[key] for key in _LAYERS if key in layers},
        "draft_vocab_size": shape.vocab_size,
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "aux_hidden_state_layer_ids": [i + 1 for i in shape.target_layer_ids],
        # vLLM's causality of all layers is the opposite of this, whether they slide or not.
        "sliding_window_non_causal": not shape.sight(0).causal,
        "sample_from_anchor": shape.variant == "dspark",
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
    config |= {key: getattr(shape, key) for key in PARTS[shape.variant] if key != "confidence_head"}
    if shape.variant == "dspark":
        config |= {
            "markov_head_type": "vanilla",
            "enable_confidence_head": shape.confidence_head,
            "confidence_head_with_markov": shape.confidence_head,
        }
    return config


def _check_layers(shape: DrafterShape) -> None:
    """The library's full layers look both ways, and vLLM reads one causality for all layers."""
    types = shape.layer_types or (FULL,) * shape.num_layers
    causal = [shape.sight(i).causal for i in range(shape.num_layers)]
    if any(causal) and (FULL in types or not all(causal)):
        raise InputError(
            "the drafter's layers are causal in part, or full and causal: of the speculators "
            "layout vLLM reads one causality for all layers, and the library has no causal full "
            "ones; take --format hf"
        )
