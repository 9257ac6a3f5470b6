"""What is exported: a drafter's weights, the target it drafts for, and how it was trained."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflashdist.config import InputError
from dflashdist.data.chat import OWN as OWN_TEMPLATE
from dflashdist.data.tokenizer import template_file
from dflashdist.export.target import NamedTarget, check_target, find_target
from dflashdist.model.drafter import Drafter
from dflashdist.model.drafter_folder import (
    AVERAGE,
    STATE,
    Provenance,
    exact_weights,
    read_provenance,
    read_shape,
    read_weights,
)


@dataclass(frozen=True)
class Origin:
    """A drafter and what is known of it."""

    folder: Path  # whose config.json describes it: a checkpoint, its `ema`, a published folder
    averaged: bool  # the weights are the average that optim.ema kept
    drafter: Drafter  # on the CPU, float32
    target: NamedTarget
    fingerprint: str | None  # of the target that it was trained for
    training: dict[str, Any]  # plain values; empty for a folder from elsewhere
    rendering: dict[str, Any]  # how the conversations became text; empty where not recorded
    template: bytes | None  # the chat template's file, where it is at hand and not the target's own

    @property
    def own_template(self) -> bool:
        """Whether the target's own chat template serves."""
        return self.rendering.get("template", OWN_TEMPLATE) == OWN_TEMPLATE

    def facts(self) -> dict[str, Any]:
        """All but the weights, as plain values."""
        named = self.target
        target = {"name": named.name, "revision": named.revision, "fingerprint": self.fingerprint}
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
    """A checkpoint of ours, its float32 weights or their average, an export, or a published folder.

    Args:
        checkpoint: its folder, or the folder `ema` inside.
        ema: take the averaged weights.
        target, revision: what to name as the target, by default what training read.

    Raises:
        InputError: no drafter, no average, no name of a target, or a target whose files are on this
            machine and that is not the one of this drafter.
    """
    folder = Path(checkpoint).expanduser().resolve()
    if folder.name == AVERAGE and (folder.parent / STATE).is_file():
        folder, ema = folder.parent, True
    record = read_provenance(folder)
    drafter, place = _read_drafter(folder, ema)
    name = target or record.target
    if not name:
        raise InputError(f"{checkpoint} does not say which target it is for: name it (--target)")
    if target is None:
        revision = revision or record.revision
    named = find_target(name, revision, given=target is not None)
    check_target(named, drafter.shape, record.fingerprint)
    return Origin(
        folder=place,
        averaged=ema or record.averaged,
        drafter=drafter,
        target=named,
        fingerprint=record.fingerprint,
        training=record.training,
        rendering=record.rendering,
        template=_template(record, folder),
    )


def _read_drafter(folder: Path, ema: bool) -> tuple[Drafter, Path]:
    """The drafter in float32, and the folder whose config.json describes it."""
    place = folder / AVERAGE if ema else folder
    if ema and not place.is_dir():
        raise InputError(f"{folder} has no averaged weights ({AVERAGE}/): train with optim.ema")
    with torch.device("meta"):
        drafter = Drafter(read_shape(place / "config.json"))
    tensors = read_weights(exact_weights(place), drafter)
    drafter.load_state_dict({name: t.float() for name, t in tensors.items()}, assign=True)
    return drafter, place


def _template(record: Provenance, folder: Path) -> bytes | None:
    """The recorded template's file, from where training read it or from an earlier export."""
    if record.rendering.get("template", OWN_TEMPLATE) == OWN_TEMPLATE:
        return None
    wanted = record.rendering.get("template_sha256")
    file = template_file(record.template_places(folder), wanted)
    return file.read_bytes() if file else None
