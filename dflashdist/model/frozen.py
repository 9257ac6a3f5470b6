"""The target's embedding, head and final norm, read by name from its safetensors files alone.

A drafter rank needs these three tensors of the target and nothing else of it: no transformers, no
layers. They are never trained and never saved.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dflashdist.config import InputError
from dflashdist.model.shape import read_target_config, target_file

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


@dataclass(frozen=True)
class Frozen:
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
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> "Frozen":
        """Read from a model's folder or hub name; of shards, only those that hold the three.

        Raises InputError when the target has no safetensors files, or not these tensors.
        """
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
                return tensors.get_tensor(name).to(device, dtype)

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
    """Hex, of a target's config.json and of 16 rows of its embedding: tells another model of the
    same shape apart, at the cost of a few kilobytes. Raises InputError as `Frozen.load` does."""
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
