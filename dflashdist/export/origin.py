"""What is exported: a drafter's weights, the target it drafts for, and how it was trained."""

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflashdist.config import InputError
from dflashdist.data.chat import OWN as OWN_TEMPLATE
from dflashdist.data.tokenizer import TargetTokenizer, template_file
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
from dflashdist.model.shape import DrafterShape, check_sizes
from dflashdist.model.target_files import places_of, read_target_config, target_fingerprint

log = logging.getLogger(__name__)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class NamedTarget:
    """A target as users are told to load it."""

    name: str  # on the hub, or a local folder
    revision: str | None
    is_hub: bool
    folder: Path | None  # its files on this machine
    cached: bool = False  # that folder is the hub's cache, which may lack some of them


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


def is_hub_name(target: str) -> bool:
    """Whether a target is named as on the model hub, owner/name."""
    return _HUB_NAME.fullmatch(target) is not None


def find_target(name: str, revision: str | None, *, given: bool) -> NamedTarget:
    """A target by name; nothing is fetched.

    Args:
        given: by the user now, who means the hub by owner/name; a name that training recorded may
            as well be a local folder.

    Warns of a name that only this machine can read. Raises InputError where it is neither a folder
    nor a name on the hub.
    """
    folder = Path(name).expanduser()
    is_hub = is_hub_name(name)
    if folder.is_dir():
        if is_hub and given:
            return NamedTarget(name, revision, True, folder)
        log.warning(
            "the card names a local folder, %s; give --target OWNER/NAME before publishing", folder
        )
        return NamedTarget(str(folder), revision, False, folder)
    if not is_hub:
        raise InputError(
            f"{name}: no such folder, and no name on the hub: name the target by --target "
            "OWNER/NAME or its folder"
        )
    cached = _cached_folder(name, revision)
    if cached is None:
        log.warning(
            "not checked: %s is not in the hub's cache"
            + ("" if given else "; if training read a local folder of that name, give --target"),
            name,
        )
    return NamedTarget(name, revision, True, cached, cached=True)


def check_target(target: NamedTarget, shape: DrafterShape, fingerprint: str | None) -> None:
    """Hold a target whose files are here to the drafter, and to the one that it was trained for.

    Args:
        fingerprint: see `target_fingerprint`; None where training recorded none.

    Raises InputError for another target. Warns where the cache has too little of it to tell.
    """
    if target.folder is None:
        return
    folder = str(target.folder)
    config = read_target_config(folder)
    config = {**(config.get("text_config") or {}), **config}
    check_sizes(target.name, config, shape)
    if not fingerprint:
        return
    if target.cached and not _has_weights(folder):
        log.warning(
            "not checked: the hub's cache has no weights of %s, only their sizes", target.name
        )
        return
    if (found := target_fingerprint(folder)) != fingerprint:
        raise InputError(
            f"{target.name}: another target (fingerprint {found}) than the drafter was trained for "
            f"({fingerprint})"
        )


def end_ids(target: NamedTarget) -> list[int] | None:
    """The tokens that end a turn, as `evaluate` finds them; None where the files are not here."""
    wanted = ["tokenizer.json"] + ["generation_config.json"] * target.cached
    if target.folder is None or not all((target.folder / name).is_file() for name in wanted):
        return None
    return list(TargetTokenizer.read(target.folder).end_ids)


def architectures(target: NamedTarget) -> list[str]:
    """Of the target's config.json; empty where it is not here."""
    if target.folder is None:
        return []
    return list(read_target_config(str(target.folder)).get("architectures") or [])


def _cached_folder(name: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    file: Any = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(file).parent if isinstance(file, str) else None


def _has_weights(folder: str) -> bool:
    """Whether the file that holds the embedding is there, as far as names tell."""
    try:
        files = places_of(folder, None)
    except InputError:
        return False
    return all((Path(folder) / file).is_file() for name, file in files.items() if "embed" in name)
