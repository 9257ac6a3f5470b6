"""The layout of the library `speculators` (0.9): the same tensors, another config.json.

Layer ids are vLLM's, one more than ours: id l + 1 is what enters decoder layer l + 1. The library
reads embedding and head from the target that the file names. Its training code gives a sliding
layer a slightly wider window (all keys from anchor - window on) than its servers and we do.
"""

import json
from pathlib import Path
from typing import Any

from dflashdist.config import InputError
from dflashdist.export.origin import is_hub_name
from dflashdist.model.drafting import num_drafts
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


def speculators_config(
    shape: DrafterShape, dtype: str, target: str, revision: str | None
) -> dict[str, Any]:
    """The config.json of a drafter in this layout.

    Args:
        dtype: of model.safetensors, e.g. "bfloat16".
        target, revision: the layout calls it the verifier. Its architecture is noted where its
            config.json is on this machine.

    Raises InputError for layers that the layout cannot describe.
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
                    "speculative_tokens": num_drafts(shape),
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": target,
                "architectures": _architectures(target, revision),
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
            "the speculators layout cannot describe full_attention layers that are causal, or lie "
            "beside causal ones: take --format hf"
        )


def _architectures(target: str, revision: str | None) -> list[str]:
    """Of a folder or of what the hub's cache holds: nothing is fetched, and no loader needs it."""
    from huggingface_hub import try_to_load_from_cache

    file: Any = Path(target).expanduser() / "config.json"
    if not file.is_file() and is_hub_name(target):
        file = try_to_load_from_cache(target, "config.json", revision=revision)
    if not isinstance(file, (str, Path)) or not Path(file).is_file():
        return []
    return list(json.loads(Path(file).read_text()).get("architectures") or [])
