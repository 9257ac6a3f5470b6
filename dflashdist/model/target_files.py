"""The target's files: config.json, and its embedding, head and final norm by their names.

A drafter rank needs these three tensors of the target and nothing else of it: no transformers, no
layers. They are never trained and never saved. Reading config.json alone loads no torch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

if TYPE_CHECKING:
    import torch
    from torch import Tensor

from dflashdist.config import InputError

# Checkpoints with a language model inside a larger one put its name before or after `model.`.
EMBEDDING = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "embed_tokens.weight",
)
_HEAD = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
_NORM = (
    "model.norm.weight",
    "model.language_model.norm.weight",
    "language_model.model.norm.weight",
    "norm.weight",
)
# Kinds of targets whose norms multiply by 1 + weight.
_ONE_MORE = ("gemma", "gemma2", "gemma3_text", "vaultgemma")
# Keys of a target's config.json by which its logits are more than the head's product, unless 1.
_RESCALED = ("final_logit_softcapping", "logit_scale", "logits_scaling")


@dataclass(frozen=True)
class TargetTensors:
    """The target's own tensors; `head` is `embedding` itself where they are tied."""

    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H]
    final_norm: Tensor  # [H], what the last norm multiplies by

    @classmethod
    def load(
        cls,
        path: str,
        *,
        revision: str | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> TargetTensors:
        """Read from a model's folder or hub name; of shards, only those that hold the three.

        dtype: None is float32.

        Raises InputError when the target has no safetensors files, or not these tensors.
        """
        import torch

        config = read_target_config(path, revision)
        places = places_of(path, revision)

        def read(names: tuple[str, ...]) -> Tensor | None:
            name = next((name for name in names if name in places), None)
            if name is None:
                return None
            file = target_file(path, places[name], revision)
            if file is None:
                raise InputError(f"{path}: {places[name]} is missing; it holds {name}")
            with safe_open(file, framework="pt") as tensors:
                return tensors.get_tensor(name).to(device, dtype or torch.float32)

        embedding, norm = read(EMBEDDING), read(_NORM)
        if embedding is None or norm is None:
            wanted = EMBEDDING if embedding is None else _NORM
            raise InputError(f"{path}: no tensor named {' or '.join(wanted)}: unsupported target")
        if config.get("model_type") in _ONE_MORE:
            norm = norm + 1
        # A file without a head means tied, whatever a config that leaves the key out defaults to.
        head = None if _text(config).get("tie_word_embeddings") else read(_HEAD)
        return cls(embedding, embedding if head is None else head, norm)


def target_fingerprint(path: str, revision: str | None = None) -> str:
    """Hex, of a target's config.json and of 16 rows of its embedding.

    Tells another model of the same shape apart, at the cost of a few kilobytes. Raises InputError
    as `TargetTensors.load` does.
    """
    import torch

    config = {k: v for k, v in read_target_config(path, revision).items() if k[:1] != "_"}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    places = places_of(path, revision)
    name = next((name for name in EMBEDDING if name in places), None)
    file = target_file(path, places[name], revision) if name else None
    if name is None or file is None:
        raise InputError(f"{path}: no tensor named {' or '.join(EMBEDDING)}: unsupported target")
    with safe_open(file, framework="pt") as tensors:
        rows = tensors.get_slice(name)[:16]
    digest.update(rows.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def places_of(path: str, revision: str | None) -> dict[str, str]:
    """Tensor name -> file name, from the index of shards or the single file's header."""
    index = target_file(path, "model.safetensors.index.json", revision)
    if index is not None:
        return json.loads(index.read_text())["weight_map"]
    single = target_file(path, "model.safetensors", revision)
    if single is None:
        raise InputError(f"{path}: no model.safetensors nor its index; other formats are not read")
    with safe_open(single, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), "model.safetensors")


def _text(config: dict[str, Any]) -> dict[str, Any]:
    return {**(config.get("text_config") or {}), **config}


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


def check_target(path: str, revision: str | None = None) -> dict[str, Any]:
    """The config.json of a target that training takes, whatever the drafter's settings.

    Raises InputError for one that it does not take, or that is not there.
    """
    config = read_target_config(path, revision)
    try:
        check_supported(config)
        for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"):
            need(config, key)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return config


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


def check_plain_logits(target_config: dict[str, Any]) -> None:
    """Raises InputError for a target whose distribution is not the softmax of its head's product.

    `target_config`: its config.json.
    """
    for key in _RESCALED:
        if target_config.get(key) not in (None, 1):
            raise InputError(
                f"loss.terms: the target rescales its logits ({key}={target_config[key]}), which "
                "terms against its distribution do not do; train on ce alone"
            )


def need(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise InputError(f"config.json of type {config.get('model_type', '?')} has no {key}")
    return value
