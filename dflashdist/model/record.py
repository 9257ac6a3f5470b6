"""What a drafter's folder says of how it was made.

A checkpoint says it in trainer/state.json, an export in its config.json under `dflashdist`; a
folder from elsewhere says nothing.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dflashdist.config import InputError
from dflashdist.model.drafter import AVERAGE

STATE = "trainer/state.json"
OWN = "dflashdist"  # our key in an export's config.json
TEMPLATE = "chat_template.jinja"  # of an export: the template that is not the target's own
_SECTIONS = ("loss", "optim", "best", "versions")  # of `training`


@dataclass(frozen=True)
class Record:
    """Plain values; empty or None where nothing is recorded."""

    target: str | None = None  # folder or hub name, as training read it
    revision: str | None = None
    fingerprint: str | None = None  # of the target
    averaged: bool = False  # an export of the average of the weights
    training: dict[str, Any] = field(default_factory=dict)  # for the model card
    rendering: dict[str, Any] = field(default_factory=dict)  # template, template_sha256, ...
    template: str | None = None  # data.template: a path on the machine that trained

    def template_places(self, folder: Path) -> list[Path]:
        """Where the chat template may lie: in the folder of this record, and where training read
        it."""
        recorded = [Path(self.template).expanduser()] if self.template else []
        return [folder / TEMPLATE, *recorded]


def read_record(folder: Path) -> Record:
    """The record of a checkpoint, of the averaged weights' folder inside one, or of an export.

    Raises InputError for a file that cannot be read or holds something else.
    """
    folder = folder.expanduser().resolve()
    places = (folder, folder.parent) if folder.name == AVERAGE else (folder,)
    for place in places:
        if (place / STATE).is_file():
            return _of_state(place / STATE)
    file = folder / "config.json"
    return _of_export(file) if file.is_file() else Record()


def _of_state(file: Path) -> Record:
    state = _read(file)
    try:
        config = OmegaConf.to_container(OmegaConf.create(state.get("config") or "{}"))
    except Exception as error:  # of the YAML parser, of any kind
        reason = " ".join(str(error).split())
        raise InputError(f"{file}: its config cannot be read ({reason})") from error
    if not isinstance(config, dict):
        raise _odd(file, "config", config)
    config = {str(key): value for key, value in config.items()}
    target, data = _section(file, config, "target"), _section(file, config, "data")
    drafter = _section(file, config, "drafter")
    keys = ("step", "num_steps", "seed", "store_fingerprint", "best", "versions")
    training: dict[str, Any] = {key: state.get(key) for key in keys}
    training |= {
        "max_length": data.get("max_length"),
        "num_anchors": drafter.get("num_anchors"),
        "init_from": Path(str(drafter["init_from"])).name if drafter.get("init_from") else None,
        "loss": config.get("loss"),
        "optim": config.get("optim"),
    }
    return Record(
        target=_text(file, target, "path"),
        revision=_text(file, target, "revision"),
        fingerprint=_text(file, state, "target"),
        training=_training(file, training),
        rendering=_rendering(file, state),
        template=_text(file, data, "template"),
    )


def _of_export(file: Path) -> Record:
    config = _read(file)
    own = _section(file, config, OWN)
    target = _section(file, own, "target")
    return Record(
        target=_text(file, target, "name"),
        revision=_text(file, target, "revision"),
        fingerprint=_text(file, target, "fingerprint"),
        averaged=own.get("averaged") is True,
        training=_training(file, _section(file, own, "training")),
        rendering=_rendering(file, own),
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read ({error}); take another folder") from error
    if not isinstance(read, dict):
        raise InputError(f"{file}: not a JSON object; take another folder")
    return read


def _training(file: Path, training: dict[str, Any]) -> dict[str, Any]:
    """What is known of it, its parts being what they should be."""
    known = {key: value for key, value in training.items() if value is not None}
    for key in _SECTIONS:
        _section(file, known, key)
    best = known.get("best", {})
    if best and not isinstance(best.get("acceptance_length"), int | float):
        raise _odd(file, "best", best)
    return known


def _rendering(file: Path, of: dict[str, Any]) -> dict[str, Any]:
    rendering = _section(file, {"rendering": of.get("rendering") or {}}, "rendering")
    _section(file, {"settings": rendering.get("settings") or {}}, "settings")
    for key in ("template", "template_sha256", "date"):
        _text(file, rendering, key)
    return rendering


def _section(file: Path, of: dict[str, Any], key: str) -> dict[str, Any]:
    value = of.get(key, {})
    if not isinstance(value, dict):
        raise _odd(file, key, value)
    return value


def _text(file: Path, of: dict[str, Any], key: str) -> str | None:
    value = of.get(key)
    if value is not None and not isinstance(value, str):
        raise _odd(file, key, value)
    return value


def _odd(file: Path, key: str, value: Any) -> InputError:
    return InputError(
        f"{file}: damaged: {key} is {json.dumps(value)[:80]}; take another folder, or restore it"
    )
