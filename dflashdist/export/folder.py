"""A drafter as a folder that serves.

    OUT/model.safetensors   the drafter alone; embedding and head are the target's
    OUT/config.json         what the readers of the layout look for, and `dflashdist`: target,
                            training, rendering, which they pass over
    OUT/README.md           the model card
    OUT/chat_template.jinja where training used a template that is not the target's own

Two layouts: `hf`, the published one, which the package `dflash` loads and which follows what the
sources of vLLM and SGLang read, and `speculators`, of the library of that name, which loads it. No
server was run. Our own loader reads `hf`.

Written aside and renamed, the one before moved aside meanwhile: what carries the name is complete,
and whatever kills the export, an old or a new folder is.
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch

import dflashdist
from dflashdist.config import InputError
from dflashdist.export import DTYPES, FORMATS
from dflashdist.export.card import model_card, read_report
from dflashdist.export.origin import Origin, read_origin
from dflashdist.export.speculators import speculators_config
from dflashdist.files import new_folder, put_in_place, restore
from dflashdist.model.drafter import Drafter
from dflashdist.model.drafter_folder import OWN, TEMPLATE, save_drafter

log = logging.getLogger(__name__)

WRITTEN = ("config.json", "model.safetensors", "README.md", TEMPLATE)


def export_drafter(
    checkpoint: str | Path,
    out: str | Path,
    *,
    format: str = "hf",
    dtype: str = "bfloat16",
    ema: bool = False,
    report: str | Path | None = None,
    target: str | None = None,
    revision: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the drafter of a checkpoint into the folder `out`, which is returned.

    Args:
        checkpoint: a checkpoint's folder, or any folder that `load_drafter` reads.
        format: "hf" or "speculators". dtype: of the tensors, rounded from float32.
        ema: the averaged weights that optim.ema kept.
        report: a file of `dflashdist evaluate --json` on these weights, for the model card.
        target, revision: named in the folder, by default as training named them.
        overwrite: replace an export that is there.

    Raises InputError for anything that cannot be read, does not fit, or cannot be said in `format`.
    """
    if format not in FORMATS:
        raise InputError(f"format {format!r}: one of {', '.join(FORMATS)}")
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r}: one of {', '.join(DTYPES)}")
    place = Path(out).expanduser().resolve()
    restore(place)
    _check_place(place, overwrite)
    origin = read_origin(checkpoint, ema=ema, target=target, revision=revision)
    _check_finite(origin.drafter, dtype, origin.folder)
    measured = read_report(report, origin.drafter, origin.folder) if report else None
    shape = origin.drafter.shape
    if shape.num_target_layers - 1 in shape.target_layer_ids:
        log.warning(
            "it reads the target's last layer before the final norm, which not every server gives"
        )
    if not origin.own_template and origin.template is None:
        log.warning(
            "the chat template that training used, %s (sha256 %s), is not at hand: add it to the "
            "folder as %s",
            origin.rendering.get("template"),
            origin.rendering.get("template_sha256"),
            TEMPLATE,
        )
    config = exported_config(origin, format, dtype)
    card = model_card(place.name, origin, layout=format, dtype=dtype, report=measured)
    aside = new_folder(place)
    save_drafter(aside, origin.drafter, dtype)
    (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (aside / "README.md").write_text(card, encoding="utf-8")
    if origin.template is not None:
        (aside / TEMPLATE).write_bytes(origin.template)
    put_in_place(aside, place)
    return place


def exported_config(origin: Origin, format: str, dtype: str) -> dict[str, Any]:
    """config.json: the layout's keys, and `dflashdist` with where the drafter comes from."""
    shape = origin.drafter.shape
    if format == "speculators":
        config = speculators_config(shape, dtype, origin.target)
    else:
        config = shape.to_config(dtype)
        # Readers of newer published folders look for it here, those of older ones at the top.
        config["dflash_config"] = {"block_size": shape.block_size} | config["dflash_config"]
    return config | {OWN: {"version": dflashdist.__version__} | origin.facts()}


def _taken(place: Path) -> bool:
    """Whether anything but an empty folder has the name."""
    return place.exists() and not (place.is_dir() and not any(place.iterdir()))


def _check_place(place: Path, overwrite: bool) -> None:
    """Refuse to replace anything but an earlier export. Raises InputError."""
    if not place.parent.is_dir():
        raise InputError(f"{place.parent}: no such folder")
    if not _taken(place):
        return
    try:
        ours = OWN in json.loads((place / "config.json").read_text())
    except (OSError, ValueError):
        ours = False
    if not ours:
        raise InputError(f"{place} is there and is no export: name another folder")
    if not overwrite:
        raise InputError(f"{place} is there: name another folder, or replace it with --overwrite")
    more = sorted(path.name for path in place.iterdir() if path.name not in WRITTEN)
    if more:
        raise InputError(
            f"{place} holds what no export wrote ({', '.join(more[:5])}): move it, or name another "
            "folder"
        )


def _check_finite(drafter: Drafter, dtype: str, folder: Path) -> None:
    """Refuse weights that are not numbers in `dtype`. Raises InputError naming the first tensor."""
    for name, tensor in drafter.state_dict().items():
        if not tensor.to(getattr(torch, dtype)).isfinite().all():
            wide = tensor.isfinite().all()
            cause = (
                f"too large for {dtype}: take bfloat16" if wide else "not finite: broken weights"
            )
            raise InputError(f"{folder}: {name} is {cause}")
