"""The drafter's shape: what it takes from the target, and the published config.json both ways.

Field names and meanings are those of the published drafters' config.json (a Qwen3 configuration
plus `block_size`, `num_target_layers` and `dflash_config`), which vLLM, SGLang and the `dflash`
package read.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflashdist.config import DrafterConfig, InputError


@dataclass(frozen=True)
class DrafterShape:
    """Everything that fixes the drafter's tensors and its reading of the target."""

    hidden_size: int  # the target's own: embedding and head are shared
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # rows of the target's embedding
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    block_size: int
    mask_token_id: int  # a row of the target's embedding that is never emitted
    target_layer_ids: tuple[int, ...]  # 0-based; id l is the output of decoder layer l
    num_target_layers: int
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Raises InputError for ids or sizes that no drafter can have."""
        check_layer_ids(self.target_layer_ids, self.num_target_layers)
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise InputError(
                f"drafter.mask_token_id={self.mask_token_id}: the target's embedding has rows 0 to "
                f"{self.vocab_size - 1}; name one that is never emitted"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"drafter.num_attention_heads={self.num_attention_heads}: must be a multiple of "
                f"drafter.num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise InputError(f"drafter.head_dim={self.head_dim}: rotary positions need an even one")

    @property
    def num_features(self) -> int:
        """Tapped target layers, K; independent of the number of draft layers."""
        return len(self.target_layer_ids)

    @classmethod
    def from_target(
        cls, target_config: dict[str, Any], tokenizer_len: int | None, drafter: DrafterConfig
    ) -> "DrafterShape":
        """The shape for a target's config.json; what `drafter` leaves null follows the target.

        The mask token is `drafter.mask_token_id`, else the first embedding row past the tokenizer
        (Qwen3: 151669). Never a pad or eos token: those are emitted, or are one that is.

        Raises InputError for an unsupported target, bad layer ids, or when no row is free to be
        the mask token.
        """
        check_supported(target_config)
        hidden_size = _need(target_config, "hidden_size")
        heads = _need(target_config, "num_attention_heads")
        num_target_layers = _need(target_config, "num_hidden_layers")
        vocab_size = _need(target_config, "vocab_size")
        ids = drafter.target_layer_ids
        if ids is None:
            ids = default_layer_ids(num_target_layers, drafter.num_features)
        mask = drafter.mask_token_id
        if mask is None:
            if tokenizer_len is None or tokenizer_len >= vocab_size:
                raise InputError(
                    f"the tokenizer ({tokenizer_len} tokens) leaves no spare row in the target's "
                    f"embedding ({vocab_size}): set drafter.mask_token_id to a token that is never "
                    "emitted (not pad or eos)"
                )
            mask = tokenizer_len
        eos = target_config.get("eos_token_id")
        return cls(
            hidden_size=hidden_size,
            intermediate_size=drafter.intermediate_size
            or _need(target_config, "intermediate_size"),
            num_layers=drafter.num_layers,
            num_attention_heads=drafter.num_attention_heads or heads,
            num_key_value_heads=drafter.num_key_value_heads
            or target_config.get("num_key_value_heads")
            or heads,
            head_dim=drafter.head_dim or target_config.get("head_dim") or hidden_size // heads,
            vocab_size=vocab_size,
            rms_norm_eps=float(target_config.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(target_config),
            max_position_embeddings=int(target_config.get("max_position_embeddings", 40960)),
            block_size=drafter.block_size,
            mask_token_id=int(mask),
            target_layer_ids=tuple(int(i) for i in ids),
            num_target_layers=num_target_layers,
            bos_token_id=target_config.get("bos_token_id"),
            eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
        )

    def to_config(self, dtype: str) -> dict[str, Any]:
        """The published config.json; `dtype` is that of model.safetensors, e.g. "bfloat16".

        Both RoPE spellings are written: transformers 5 reads `rope_parameters`, while 4.x readers
        that find no `rope_theta` fall back to 10000 in silence. No `auto_map`: it would promise a
        Python file that the folder does not have.
        """
        eos = self.eos_token_id
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "num_target_layers": self.num_target_layers,
            "num_hidden_layers": self.num_layers,
            "layer_types": ["full_attention"] * self.num_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "sliding_window": None,
            "use_sliding_window": False,
            "max_window_layers": self.num_layers,
            "tie_word_embeddings": False,
            "vocab_size": self.vocab_size,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
            "use_cache": True,
            "dtype": dtype,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "DrafterShape":
        """The shape in a drafter's config.json, ours or another trainer's.

        Raises InputError where the folder is no DFlash drafter, or one of a kind not supported
        (sliding layers, scaled RoPE, biases).
        """
        extra = config.get("dflash_config")
        if not isinstance(extra, dict) or "mask_token_id" not in extra:
            raise InputError("config.json has no dflash_config.mask_token_id: not a DFlash drafter")
        layers = set(config.get("layer_types") or ["full_attention"])
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if layers != {"full_attention"}:
            raise InputError(
                f"drafter layer_types {sorted(layers)}: only full_attention is supported"
            )
        if scaling.get("rope_type", scaling.get("type", "default")) != "default":
            raise InputError(f"drafter RoPE {scaling}: only the default kind is supported")
        if config.get("attention_bias") or config.get("hidden_act", "silu") != "silu":
            raise InputError(
                "drafter with attention_bias or an activation other than silu: unsupported"
            )
        eos = config.get("eos_token_id")
        block_size = extra.get("block_size", config.get("block_size"))
        if block_size is None:
            raise InputError("config.json has no block_size: not a DFlash drafter")
        heads = _need(config, "num_attention_heads")
        return cls(
            hidden_size=_need(config, "hidden_size"),
            intermediate_size=_need(config, "intermediate_size"),
            num_layers=_need(config, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or _need(config, "hidden_size") // heads,
            vocab_size=_need(config, "vocab_size"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(config),
            max_position_embeddings=int(config.get("max_position_embeddings", 40960)),
            block_size=int(block_size),
            mask_token_id=int(extra["mask_token_id"]),
            target_layer_ids=tuple(extra.get("target_layer_ids", ())),
            num_target_layers=_need(config, "num_target_layers"),
            bos_token_id=config.get("bos_token_id"),
            eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
        )


def default_layer_ids(num_target_layers: int, num_features: int) -> list[int]:
    """The published rule: evenly from layer 1 to N-3, with Python's rounding; N=36: 1 9 17 25 33.

    Raises InputError when the target has too few layers for that many distinct ones.
    """
    if num_features == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    ids = [round(1 + i * span / (num_features - 1)) for i in range(num_features)]
    if len(set(ids)) < num_features or ids[0] < 0 or ids[-1] >= num_target_layers:
        raise InputError(
            f"drafter.num_features={num_features}: the published rule gives layers {ids} of "
            f"{num_target_layers}; lower it, or set drafter.target_layer_ids"
        )
    return ids


def check_layer_ids(ids: tuple[int, ...] | list[int], num_target_layers: int) -> None:
    """Raises InputError unless `ids` are distinct layers of a target with that many."""
    if not ids:
        raise InputError("drafter.target_layer_ids is empty: name at least one target layer")
    wrong = [i for i in ids if not 0 <= i < num_target_layers]
    if wrong:
        raise InputError(
            f"drafter.target_layer_ids={list(ids)}: {wrong[0]} is no layer; the target has layers "
            f"0 to {num_target_layers - 1}"
        )
    if len(set(ids)) < len(ids):
        raise InputError(f"drafter.target_layer_ids={list(ids)}: a layer is named twice")


def check_supported(target_config: dict[str, Any]) -> None:
    """Refuse targets that are not dense causal language models. Raises InputError."""
    kind = target_config.get("model_type", "?")
    for key in ("vision_config", "audio_config", "text_config"):
        if target_config.get(key):
            raise InputError(
                f"target of type {kind} is multimodal ({key}): not supported yet; "
                "take a text-only causal language model"
            )
    attention = {"full_attention", "sliding_attention", "chunked_attention"}
    other = sorted(set(target_config.get("layer_types") or ()) - attention)
    if other:
        raise InputError(
            f"target of type {kind} is a hybrid (layers of type {', '.join(other)}): not supported "
            "yet; take one with attention in every layer"
        )
    if target_config.get("is_encoder_decoder"):
        raise InputError(f"target of type {kind} has an encoder: take a causal language model")


def read_target_config(path: str, revision: str | None = None) -> dict[str, Any]:
    """config.json of a target: a folder, or a name on the model hub.

    Raises InputError when there is none, or it is not JSON.
    """
    file = target_file(path, "config.json", revision)
    if file is None:
        raise InputError(f"{path}: no config.json; target.path is a model's folder or hub name")
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise InputError(f"{file}: not JSON ({error})") from error


def target_file(path: str, name: str, revision: str | None = None) -> Path | None:
    """One file of a target, fetched from the hub if `path` is no folder; None where it has none.

    Raises InputError when the target itself cannot be found.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise InputError(f"{path}: no such folder; target.path is a model's folder or hub name")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(path, name, revision=revision))
    except LocalEntryNotFoundError as error:  # a kind of EntryNotFoundError that is none
        raise InputError(
            f"{path}: neither a folder nor in the cache, and no hub answers"
        ) from error
    except EntryNotFoundError:
        return None
    except Exception as error:  # network, rights, spelling: the library's first line says which
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise InputError(f"{path}: neither a folder nor found on the hub ({reason})") from error


def _need(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise InputError(f"config.json of type {config.get('model_type', '?')} has no {key}")
    return value


def _rope_theta(config: dict[str, Any]) -> float:
    parameters = config.get("rope_parameters") or {}
    parameters = parameters.get("full_attention", parameters)  # a set for each kind of layer
    return float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
