"""The published config.json of a drafter, both ways.

A Qwen3 configuration plus `block_size`, `num_target_layers` and `dflash_config`: what vLLM, SGLang
and the package `dflash` read.
"""

from typing import Any

from dflashdist.config import InputError
from dflashdist.model.shape import (
    FULL,
    PARTS,
    SLIDING,
    DrafterShape,
    default_layer_ids,
    layer_types,
)
from dflashdist.model.target_files import need

ARCHITECTURES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "Qwen3DSparkModel",
}


def write_config(shape: DrafterShape, dtype: str) -> dict[str, Any]:
    """The published config.json; `dtype` is that of model.safetensors, e.g. "bfloat16".

    Both RoPE spellings are written: transformers 5 reads `rope_parameters`, while 4.x readers
    that find no `rope_theta` fall back to 10000 in silence. No `auto_map`: it would promise a
    Python file that the folder does not have.
    """
    eos = shape.eos_token_id
    reading: dict[str, Any] = {
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(shape.target_layer_ids),
    }
    own: dict[str, Any] = {}
    if shape.variant == "dspark":  # its readers look at the top level
        own = reading | {
            "markov_rank": shape.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": shape.confidence_head,
            "confidence_head_with_markov": shape.confidence_head,
            "sample_from_anchor": True,
        }
    else:
        reading |= {key: getattr(shape, key) for key in PARTS[shape.variant]}
    if shape.is_causal is not None:
        reading["causal"] = own["is_causal"] = shape.is_causal
    return {
        "architectures": [ARCHITECTURES[shape.variant]],
        "model_type": "qwen3",
        "block_size": shape.block_size,
        "dflash_config": reading,
        "num_target_layers": shape.num_target_layers,
        "num_hidden_layers": shape.num_layers,
        "layer_types": list(shape.layer_types) or [FULL] * shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "sliding_window": shape.sliding_window,
        "use_sliding_window": shape.sliding_window is not None,
        "max_window_layers": shape.num_layers,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab_size,
        "bos_token_id": shape.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "use_cache": True,
        "dtype": dtype,
        **own,
    }


def read_config(config: dict[str, Any]) -> DrafterShape:
    """The shape in a drafter's config.json, ours or another trainer's.

    What concerns drafting is read from `dflash_config`, else from the top level.

    Raises InputError where the folder is no DFlash drafter, or one of a kind not supported
    (scaled RoPE, biases, scaled or capped logits, another Markov head, the speculators layout).
    """
    if "speculators_model_type" in config:
        raise InputError(
            "config.json is of the speculators layout, which is not read: export the drafter "
            "again with --format hf"
        )
    extra = config | (config.get("dflash_config") or {})
    if "mask_token_id" not in extra or "block_size" not in extra:
        missing = "block_size" if "mask_token_id" in extra else "dflash_config.mask_token_id"
        raise InputError(f"config.json has no {missing}: not a DFlash drafter")
    variant = _variant(config)
    _check_readable(config, extra, variant)
    types = layer_types(config.get("layer_types"))
    causal = config.get("is_causal")  # before dflash_config.causal, as in vLLM
    eos = config.get("eos_token_id")
    heads = need(config, "num_attention_heads")
    num_layers = need(config, "num_hidden_layers")
    num_target_layers = need(config, "num_target_layers")
    ids = extra.get("target_layer_ids") or default_layer_ids(num_target_layers, num_layers)
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise InputError(f"config.json has target_layer_ids {ids}: not a list of layer numbers")
    parts: dict[str, Any] = {
        key: need(extra, key) for key in PARTS[variant] if key != "confidence_head"
    }
    if variant == "dspark":
        parts["confidence_head"] = bool(extra.get("enable_confidence_head"))
    return DrafterShape(
        hidden_size=need(config, "hidden_size"),
        intermediate_size=need(config, "intermediate_size"),
        num_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or need(config, "hidden_size") // heads,
        vocab_size=need(config, "vocab_size"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=_rope_theta(config),
        max_position_embeddings=int(config.get("max_position_embeddings", 40960)),
        block_size=int(extra["block_size"]),
        mask_token_id=int(extra["mask_token_id"]),
        target_layer_ids=tuple(ids),
        num_target_layers=num_target_layers,
        bos_token_id=config.get("bos_token_id"),
        eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
        variant=variant,
        layer_types=types,
        sliding_window=config.get("sliding_window") if SLIDING in types else None,
        is_causal=extra.get("causal") if causal is None else bool(causal),
        **parts,
    )


def _variant(config: dict[str, Any]) -> str:
    name = (config.get("architectures") or ["DFlashDraftModel"])[0]
    names = {architecture: variant for variant, architecture in ARCHITECTURES.items()}
    names["DSparkDraftModel"] = "dspark"
    if name not in names:
        raise InputError(f"drafter of architecture {name}: supported are {', '.join(names)}")
    return names[name]


def _rope_theta(config: dict[str, Any]) -> float:
    """The one theta of all layers; kinds of layers may have a set of parameters each.

    Raises InputError for scaled positions, and for sets that differ in theta.
    """
    sets: list[dict[str, Any]] = []
    for key in ("rope_scaling", "rope_parameters"):
        told = config.get(key) or {}
        if not isinstance(told, dict):
            raise InputError(f"config.json has {key} {told}: not a set of parameters")
        sets += [one for one in told.values() if isinstance(one, dict)] or [told]
    for one in sets:
        if one.get("rope_type", one.get("type", "default")) != "default":
            raise InputError(f"drafter RoPE {one}: only the default kind is supported")
    thetas = {float(one["rope_theta"]) for one in sets if one.get("rope_theta")}
    if len(thetas) > 1:
        raise InputError(
            f"drafter RoPE with several rope_theta ({', '.join(f'{t:g}' for t in sorted(thetas))}):"
            " only one for all layers is supported"
        )
    return thetas.pop() if thetas else float(config.get("rope_theta") or 10000.0)


def _check_readable(config: dict[str, Any], extra: dict[str, Any], variant: str) -> None:
    """Refuse what another trainer's folder may ask for and this drafter does not do."""
    if config.get("attention_bias") or config.get("hidden_act", "silu") != "silu":
        raise InputError(
            "drafter with attention_bias or an activation other than silu: unsupported"
        )
    plain: dict[str, Any] = {
        "input_embedding_scale": 1, "output_multiplier": 1, "final_logit_softcapping": 0,
    }  # fmt: skip
    if variant == "dspark":
        plain |= {"markov_head_type": "vanilla", "sample_from_anchor": True}
        plain["draft_vocab_size"] = config.get("vocab_size")
        if extra.get("enable_confidence_head"):
            plain["confidence_head_with_markov"] = True
    for key, value in plain.items():
        if extra.get(key) not in (None, value):
            raise InputError(f"drafter with {key}={extra[key]}: only {value} is supported")
