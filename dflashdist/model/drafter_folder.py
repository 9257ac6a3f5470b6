"""A drafter's folder: its weights and config.json, and what it says of how it was made.

A checkpoint says that in trainer/state.json, an export in its config.json under `dflashdist`; a
folder from elsewhere says nothing.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflashdist.config import InputError
from dflashdist.model.drafter import Drafter
from dflashdist.model.shape import DrafterShape

AVERAGE = "ema"  # the averaged weights' folder in a checkpoint
STATE = "trainer/state.json"
OWN = "dflashdist"  # our key in an export's config.json
TEMPLATE = "chat_template.jinja"  # of an export: the template that is not the target's own
_SECTIONS = ("loss", "optim", "best", "versions")  # of `training`


def save_drafter(path: str | Path, drafter: Drafter, dtype: str = "bfloat16") -> None:
    """Write config.json and model.safetensors, loadable by the serving engines, into a folder."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    to = getattr(torch, dtype)
    tensors = {
        name: tensor.detach().to("cpu", to, copy=True).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    save_tensors(tensors, folder / "model.safetensors")
    config = json.dumps(drafter.shape.to_config(dtype), indent=2)
    (folder / "config.json").write_text(config + "\n")


def save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """A safetensors file that whoever may read new files may read: the library's own is private."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)


def load_drafter(path: str | Path, *, dtype: torch.dtype = torch.float32) -> Drafter:
    """The drafter in a published folder, ours or another trainer's, on the CPU in `dtype`.

    Raises InputError naming what is missing, unexpected or of another shape.
    """
    folder = Path(path)
    shape = read_shape(folder / "config.json")
    with torch.device("meta"):
        drafter = Drafter(shape)
    tensors = read_weights(folder / "model.safetensors", drafter)
    drafter.load_state_dict({n: t.to(dtype) for n, t in tensors.items()}, assign=True)
    return drafter.requires_grad_(True)


def read_shape(file: Path) -> DrafterShape:
    """The shape in a drafter's config.json. Raises InputError if there is none that can be read."""
    if not file.is_file():
        raise InputError(
            f"{file.parent}: no {file.name}; a drafter's folder holds config.json and "
            "model.safetensors"
        )
    try:
        return DrafterShape.from_config(json.loads(file.read_text()))
    except InputError as error:
        raise InputError(f"{file.parent}: {error}") from error
    except ValueError as error:
        raise InputError(f"{file.parent}: cannot be read ({error})") from error


def exact_weights(folder: Path) -> Path:
    """The file of a drafter's weights: the float32 ones of a checkpoint or of the average in it
    (ema/), else those that are served."""
    if folder.name == AVERAGE:
        exact = folder.parent / "trainer/ema.safetensors"
    else:
        exact = folder / "trainer/weights.safetensors"
    return exact if exact.is_file() else folder / "model.safetensors"


def read_weights(file: Path, drafter: Drafter, optional: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The tensors of a safetensors file, which must be the drafter's, on the CPU.

    Raises InputError as `check_weights` does.
    """
    check_weights(file, drafter, optional)
    return load_file(file)


def check_weights(file: Path, drafter: Drafter, optional: tuple[str, ...] = ()) -> None:
    """Hold the tensors of a safetensors file to a drafter's, by its header alone.

    Args:
        optional: beginnings of names that the file may lack.

    Raises InputError naming what is missing, unexpected or of another shape.
    """
    if not file.is_file():
        raise InputError(
            f"{file.parent}: no {file.name}; a drafter's folder holds config.json and "
            "model.safetensors"
        )
    try:
        with safe_open(file, framework="pt") as tensors:
            names = list(tensors.keys())
            found = {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{file.parent}: cannot be read ({error})") from error
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    missing = [name for name in expected.keys() - found.keys() if not name.startswith(optional)]
    problems = {
        "missing": sorted(missing),
        "unexpected": sorted(found.keys() - expected.keys()),
        "of another shape": [
            f"{name} {found[name]}, not {expected[name]}"
            for name in sorted(expected.keys() & found.keys())
            if found[name] != expected[name]
        ],
    }
    told = [f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names]
    if told:
        raise InputError(f"{file} does not fit its config.json; {'; '.join(told)}")


def weights_digest(drafter: Drafter, through: torch.dtype = torch.float32) -> str:
    """Hex, of all names, shapes and values, these as bfloat16: what a measurement was made of.

    The float32 and the bfloat16 folder of one drafter have the same digest; a float16 folder has
    the one that its drafter has `through` float16, which is rounded to first.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(drafter.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        rounded = tensor.detach().cpu().to(through).to(torch.bfloat16)
        digest.update(rounded.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Provenance:
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


def read_provenance(folder: Path) -> Provenance:
    """The record of a checkpoint, of the averaged weights' folder inside one, or of an export.

    Raises InputError for a file that cannot be read or holds something else.
    """
    folder = folder.expanduser().resolve()
    places = (folder, folder.parent) if folder.name == AVERAGE else (folder,)
    for place in places:
        if (place / STATE).is_file():
            return _of_state(place / STATE)
    file = folder / "config.json"
    return _of_export(file) if file.is_file() else Provenance()


def _of_state(file: Path) -> Provenance:
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
    return Provenance(
        target=_text(file, target, "path"),
        revision=_text(file, target, "revision"),
        fingerprint=_text(file, state, "target"),
        training=_training(file, training),
        rendering=_rendering(file, state),
        template=_text(file, data, "template"),
    )


def _of_export(file: Path) -> Provenance:
    config = _read(file)
    own = _section(file, config, OWN)
    target = _section(file, own, "target")
    return Provenance(
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
