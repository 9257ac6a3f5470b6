"""What is exported: a drafter's weights, the target it drafts for, and how it was trained."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from dflashdist.config import InputError
from dflashdist.model.drafter import Drafter, read_shape, read_weights
from dflashdist.model.frozen import target_fingerprint
from dflashdist.model.shape import DrafterShape, read_target_config

STATE = "trainer/state.json"
AVERAGE = "ema"  # of a checkpoint: the folder of the averaged weights


@dataclass(frozen=True)
class Origin:
    """A drafter and what is known of it."""

    folder: Path  # whose config.json describes it: a checkpoint, its `ema`, a published folder
    averaged: bool  # the weights are the average that optim.ema kept
    drafter: Drafter  # on the CPU, float32
    target: str  # folder or hub name, as users are told to load it
    revision: str | None
    fingerprint: str | None  # of the target that it was trained for
    training: dict[str, Any]  # plain values; empty for a folder from elsewhere
    rendering: dict[str, Any]  # how the conversations became text; empty where not recorded

    def facts(self) -> dict[str, Any]:
        """All but the weights, as plain values."""
        target = {"name": self.target, "revision": self.revision, "fingerprint": self.fingerprint}
        facts: dict[str, Any] = {"target": target, "averaged": self.averaged}
        if self.training:
            facts["training"] = self.training
        if self.rendering:
            facts["rendering"] = self.rendering
        return facts


def read_origin(
    checkpoint: str | Path,
    *,
    ema: bool = False,
    target: str | None = None,
    revision: str | None = None,
) -> Origin:
    """A checkpoint of ours, its float32 weights or their average, or a published folder.

    Args:
        checkpoint: its folder, or the folder `ema` inside.
        ema: take the averaged weights.
        target, revision: what to name as the target, by default what training read.

    Raises:
        InputError: no drafter, no average, no name of a target, or a target in a local folder that
            is not the one of this drafter.
    """
    folder = Path(checkpoint).expanduser().resolve()
    if folder.name == AVERAGE and (folder.parent / STATE).is_file():
        folder, ema = folder.parent, True
    state = _read_state(folder)
    config = _read_config(state, folder)
    drafter, place = _read_drafter(folder, ema)
    trained = config.get("target", {})
    if target is None:
        target, revision = trained.get("path"), revision or trained.get("revision")
    if not target:
        raise InputError(f"{checkpoint} does not say which target it is for: name it (--target)")
    fingerprint = state.get("target")
    _check_target(target, drafter.shape, fingerprint)
    return Origin(
        folder=place,
        averaged=ema,
        drafter=drafter,
        target=target,
        revision=revision,
        fingerprint=fingerprint,
        training=_training(state, config),
        rendering=state.get("rendering") or {},
    )


def is_hub_name(target: str) -> bool:
    """Whether a target is named as on the model hub, owner/name."""
    return target.count("/") == 1 and not target.startswith((".", "/", "~"))


def _read_drafter(folder: Path, ema: bool) -> tuple[Drafter, Path]:
    """The drafter in float32, and the folder whose config.json describes it."""
    place = folder / AVERAGE if ema else folder
    if ema and not place.is_dir():
        raise InputError(f"{folder} has no averaged weights ({AVERAGE}/): train with optim.ema")
    with torch.device("meta"):
        drafter = Drafter(read_shape(place / "config.json"))
    exact = folder / "trainer" / ("ema.safetensors" if ema else "weights.safetensors")
    tensors = read_weights(exact if exact.is_file() else place / "model.safetensors", drafter)
    drafter.load_state_dict({name: t.float() for name, t in tensors.items()}, assign=True)
    return drafter, place


def _read_state(folder: Path) -> dict[str, Any]:
    file = folder / STATE
    if not file.is_file():
        return {}
    try:
        state = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: not a checkpoint's state ({error})") from error
    if not isinstance(state, dict):
        raise InputError(f"{file}: not a checkpoint's state")
    return state


def _read_config(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The resolved configuration as plain values; empty where none was recorded."""
    try:
        config = OmegaConf.to_container(OmegaConf.create(state.get("config") or "{}"))
    except Exception as error:  # of the YAML parser, of any kind
        raise InputError(f"{folder / STATE}: its config cannot be read ({error})") from error
    return config if isinstance(config, dict) else {}  # type: ignore[return-value]


def _check_target(path: str, shape: DrafterShape, fingerprint: str | None) -> None:
    """Hold a target in a local folder to the drafter; a hub name is taken as it is."""
    if not Path(path).expanduser().is_dir():
        return
    config = read_target_config(path)
    config = {**(config.get("text_config") or {}), **config}
    for key, expected in (
        ("hidden_size", shape.hidden_size),
        ("vocab_size", shape.vocab_size),
        ("num_hidden_layers", shape.num_target_layers),
    ):
        if config.get(key) != expected:
            raise InputError(
                f"{path}: {key} is {config.get(key)}, the drafter was made for a target with "
                f"{expected}"
            )
    if fingerprint and (found := target_fingerprint(path)) != fingerprint:
        raise InputError(
            f"{path}: another target (fingerprint {found}) than the drafter was trained for "
            f"({fingerprint})"
        )


def _training(state: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """What a reader of the model card wants to know; no path of the machine that trained it."""
    keys = ("step", "num_steps", "seed", "store_fingerprint", "best", "versions")
    summary: dict[str, Any] = {key: state.get(key) for key in keys}
    summary |= {
        "max_length": config.get("data", {}).get("max_length"),
        "num_anchors": config.get("drafter", {}).get("num_anchors"),
        "loss": config.get("loss"),
        "optim": config.get("optim"),
    }
    return {key: value for key, value in summary.items() if value is not None}
