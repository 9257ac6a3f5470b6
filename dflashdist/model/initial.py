"""The drafter's first weights: drawn, taken from the target's last layers, or from a drafter."""

from dataclasses import fields
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dflashdist.config import DrafterConfig, InputError
from dflashdist.model.drafter import Drafter, read_shape, read_weights
from dflashdist.model.frozen import EMBEDDING, places_of
from dflashdist.model.layers import Layer
from dflashdist.model.shape import PARTS, DrafterShape, target_file

# What a drafter may be fine-tuned to although it was trained otherwise: the tensors stay the same,
# and so does what the target's features and the mask token mean to them.
_MAY_CHANGE = {
    "block_size", "layer_types", "sliding_window", "is_causal", "selector_top_k",
    "max_position_embeddings", "bos_token_id", "eos_token_id",
}  # fmt: skip


def initialise(
    drafter: Drafter,
    config: DrafterConfig,
    target_path: str,
    revision: str | None,
    *,
    seed: int,
    final_norm: Tensor,
) -> None:
    """Set the weights as `drafter.init` and `drafter.init_from` say, the same on every rank.

    `fan_in`, `published`: drawn, see `Drafter.reset_parameters`. `target_layers`: as `fan_in`, with
    each layer a copy of one of the target's last ones. `init_from` goes before all: a checkpoint of
    ours (its float32 weights) or a published folder, bfloat16 weights widened.

    Args:
        target_path, revision: read for `target_layers` alone.
        final_norm: [H] of the target.

    Raises InputError where the named weights do not fit, saying what differs.
    """
    init = "fan_in" if config.init == "target_layers" else config.init
    drafter.reset_parameters(init, seed=seed, final_norm=final_norm)
    if config.init_from:
        if config.init == "target_layers":
            raise InputError(
                "drafter.init=target_layers and drafter.init_from are both set: give one"
            )
        load_weights(drafter, config.init_from)
    elif config.init == "target_layers":
        copy_target_layers(drafter, target_path, revision)


@torch.no_grad()
def load_weights(drafter: Drafter, path: str) -> None:
    """Fine-tuning: the weights of a drafter that read the same target in the same way.

    The parts of a variant keep what they have where the folder is a plain DFlash drafter's: they
    begin without effect, so the new drafter starts as the old one.

    Raises InputError naming what differs or is missing.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise InputError(f"drafter.init_from={path}: no such folder")
    shape = read_shape(folder / "config.json")
    added = ()
    if shape.variant != drafter.shape.variant and shape.variant == "dflash":
        added = ("variant", *PARTS[drafter.shape.variant])
    differing = [
        f"{name} is {getattr(shape, name)} there, {getattr(drafter.shape, name)} here"
        for name in (f.name for f in fields(DrafterShape))
        if name not in _MAY_CHANGE
        and name not in added
        and getattr(shape, name) != getattr(drafter.shape, name)
    ]
    if differing:
        raise InputError(
            f"drafter.init_from={path}: another drafter ({'; '.join(differing)}); set the drafter "
            "section and target.path alike"
        )
    file = folder / "trainer/weights.safetensors"
    if not file.is_file():
        file = folder / "model.safetensors"
    own = drafter.state_dict()
    tensors = read_weights(file, drafter, tuple(drafter.variant_parts()) if added else ())
    for name, tensor in tensors.items():
        own[name].copy_(tensor)


@torch.no_grad()
def copy_target_layers(drafter: Drafter, path: str, revision: str | None = None) -> None:
    """Layers i = 0, 1, ... from the target's last `num_layers` decoder layers, in their order.

    Their queries, keys and MLPs already fit the target's residual stream and its head.

    Raises InputError unless a layer of the target has the drafter's tensors, all and only those:
    one of Qwen3's kind, and no size changed.
    """
    num_layers, num_target_layers = drafter.shape.num_layers, drafter.shape.num_target_layers
    fault = f"drafter.init=target_layers: {path}"
    if num_layers > num_target_layers:
        raise InputError(f"{fault} has {num_target_layers} layers, the drafter {num_layers}")
    places = places_of(path, revision)
    embedding = next((name for name in EMBEDDING if name in places), "embed_tokens.weight")
    prefix = embedding.removesuffix("embed_tokens.weight") + "layers."
    added = tuple(drafter.variant_parts())
    wanted: dict[str, Tensor] = {}
    for i, layer in enumerate(drafter.layers):
        assert isinstance(layer, Layer)
        begin = f"{prefix}{num_target_layers - num_layers + i}."
        own = {
            name: parameter
            for name, parameter in layer.named_parameters()
            if not f"layers.{i}.{name}".startswith(added)
        }
        found = {name.removeprefix(begin) for name in places if name.startswith(begin)}
        if found != own.keys():
            names = ", ".join(sorted(found ^ own.keys()))
            raise InputError(f"{fault} has other layers than the drafter ({names}); use fan_in")
        wanted |= {begin + name: parameter for name, parameter in own.items()}
    for place in sorted({places[name] for name in wanted}):
        file = target_file(path, place, revision)
        if file is None:
            raise InputError(f"{fault}: {place} is missing")
        with safe_open(file, framework="pt") as tensors:
            for name in (name for name in wanted if places[name] == place):
                tensor, parameter = tensors.get_tensor(name), wanted[name]
                if tensor.shape != parameter.shape:
                    raise InputError(
                        f"{fault}: {name} is {tuple(tensor.shape)}, the drafter's "
                        f"{tuple(parameter.shape)}; leave the drafter's sizes null, or use fan_in"
                    )
                parameter.copy_(tensor)
