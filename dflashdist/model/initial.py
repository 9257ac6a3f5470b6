"""The drafter's first weights: drawn, taken from the target's last layers, or from a drafter."""

import logging
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dflashdist.config import DrafterConfig, InputError
from dflashdist.model.drafter import Drafter
from dflashdist.model.drafter_folder import check_weights, exact_weights, read_shape, read_weights
from dflashdist.model.layers import Layer
from dflashdist.model.shape import PARTS, DrafterShape
from dflashdist.model.target_files import EMBEDDING, places_of, target_file

log = logging.getLogger(__name__)

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

    `fan_in` (or `random`), `published`: drawn, see `Drafter.reset_parameters`. `target_layers`: as
    `fan_in`, with each layer a copy of one of the target's last ones. `init_from` goes before all:
    a checkpoint of ours (its float32 weights) or a published folder, bfloat16 weights widened.

    Args:
        target_path, revision: read for `target_layers` alone.
        final_norm: [H] of the target.

    Raises InputError where the named weights do not fit, saying what differs.
    """
    init = config.init if config.init == "published" else "fan_in"
    drafter.reset_parameters(init, seed=seed, final_norm=final_norm)
    if config.init_from:
        load_weights(drafter, config.init_from)
    elif config.init == "target_layers":
        copy_target_layers(drafter, target_path, revision)


def check_initial(
    shape: DrafterShape, config: DrafterConfig, target_path: str, revision: str | None
) -> None:
    """Refuse first weights that do not fit, by configurations and headers alone, and warn of what
    else differs in a drafter to start from. Raises InputError as `initialise` would."""
    if config.init_from:
        there = read_shape(_folder(config.init_from) / "config.json")
        added = check_shapes(there, shape, config.init_from)
        with torch.device("meta"):
            drafter = Drafter(shape)
        optional = tuple(drafter.variant_parts()) if added else ()
        check_weights(exact_weights(_folder(config.init_from)), drafter, optional)
        for name in (f.name for f in fields(DrafterShape) if f.name in _MAY_CHANGE):
            old, new = getattr(there, name), getattr(shape, name)
            if old != new:
                log.warning("drafter.init_from: %s was %s there and is %s here", name, old, new)
        if shape.ahead != there.ahead:
            log.warning(
                "drafter.init_from: a slot drafted the token at its own place there and drafts the "
                "next one here, so the first acceptance is about none"
            )
    elif config.init == "target_layers" and Path(target_path).expanduser().is_dir():
        with torch.device("meta"):  # of a hub's target not: others would wait for the download
            find_target_layers(Drafter(shape), target_path, revision)


def check_shapes(there: DrafterShape, here: DrafterShape, path: str) -> tuple[str, ...]:
    """The parts that `here` adds to a plain drafter `there`. Raises InputError naming what else
    differs between the two and must not."""
    added = ()
    if there.variant != here.variant and there.variant == "dflash":
        added = ("variant", *PARTS[here.variant])
    differing = [
        f"{name} is {getattr(there, name)} there, {getattr(here, name)} here"
        for name in (f.name for f in fields(DrafterShape))
        if name not in _MAY_CHANGE
        and name not in added
        and getattr(there, name) != getattr(here, name)
    ]
    if differing:
        raise InputError(
            f"drafter.init_from={path}: another drafter ({'; '.join(differing)}); set the drafter "
            "section and target.path alike"
        )
    return added


@torch.no_grad()
def load_weights(drafter: Drafter, path: str) -> None:
    """Fine-tuning: the weights of a drafter that read the same target in the same way.

    The parts of a variant keep what they have where the folder is a plain DFlash drafter's: they
    begin without effect, so the states are those of the old drafter. A DFlash 2 drafter then also
    drafts as the old one did; DSpark's drafts are each one place further on.

    Raises InputError naming what differs or is missing.
    """
    folder = _folder(path)
    added = check_shapes(read_shape(folder / "config.json"), drafter.shape, path)
    own = drafter.state_dict()
    optional = tuple(drafter.variant_parts()) if added else ()
    for name, tensor in read_weights(exact_weights(folder), drafter, optional).items():
        own[name].copy_(tensor)


def _folder(path: str) -> Path:
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        raise InputError(f"drafter.init_from={path}: no such folder")
    return folder


@torch.no_grad()
def copy_target_layers(drafter: Drafter, path: str, revision: str | None = None) -> None:
    """Layers i = 0, 1, ... from the target's last `num_layers` decoder layers, in their order.

    Their queries, keys and MLPs already fit the target's residual stream and its head.

    Raises InputError as `find_target_layers` does.
    """
    for file, parameters in find_target_layers(drafter, path, revision).items():
        with safe_open(file, framework="pt") as tensors:
            for name, parameter in parameters.items():
                parameter.copy_(tensors.get_tensor(name))


def find_target_layers(
    drafter: Drafter, path: str, revision: str | None
) -> dict[Path, dict[str, Tensor]]:
    """File of the target -> name of a tensor in it -> the drafter's parameter that it is for.

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
    files: dict[Path, dict[str, Tensor]] = {}
    for place in sorted({places[name] for name in wanted}):
        file = target_file(path, place, revision)
        if file is None:
            raise InputError(f"{fault}: {place} is missing")
        files[file] = {name: wanted[name] for name in wanted if places[name] == place}
        with safe_open(file, framework="pt") as tensors:
            for name, parameter in files[file].items():
                shape = tuple(tensors.get_slice(name).get_shape())
                if shape != parameter.shape:
                    raise InputError(
                        f"{fault}: {name} is {shape}, the drafter's {tuple(parameter.shape)}; "
                        "leave the drafter's sizes null, or use fan_in"
                    )
    return files
