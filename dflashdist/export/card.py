"""The model card: what the drafter is, what was measured, and the commands that serve it."""

import json
from typing import Any

from dflashdist.export.markdown import table
from dflashdist.export.measured import Measured, measured_section
from dflashdist.export.origin import Origin
from dflashdist.export.serve import serve_section, serve_speculators_section
from dflashdist.model.drafter_folder import TEMPLATE
from dflashdist.model.shape import SLIDING, DrafterShape

_VARIANTS = {
    "dflash": "DFlash (arXiv 2602.06036)",
    "dflash2": "DFlash 2: DFlash with dynamic convolutions and a candidate selector",
    "dspark": "DSpark (arXiv 2607.05147): DFlash with a Markov head that follows the token before",
}


def model_card(
    name: str, origin: Origin, *, layout: str, dtype: str, report: Measured | None
) -> str:
    """README.md of an exported folder.

    Args:
        name: of the folder; the commands are run beside it.
        layout: "hf" or "speculators"; dtype: of model.safetensors.
        report: of `dflashdist evaluate --json`; None leaves the measurements out.
    """
    shape, target = origin.drafter.shape, origin.target
    parts = [
        _front_matter(origin),
        f"# {name}\n\n"
        f"A drafter for speculative decoding with `{target.name}`"
        + (f" at revision `{target.revision}`" if target.revision else "")
        + f". {_VARIANTS[shape.variant]}. Of no use alone: embedding and head are the target's, "
        "whose weights are not in this folder. The output stays the target's own.",
        _shape_table(shape, dtype),
        _caution(shape),
        measured_section(report) if report else "",
        _trained(origin),
        _rendered(origin),
        serve_section(name, origin, dtype, report)
        if layout == "hf"
        else serve_speculators_section(name, origin),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(origin: Origin) -> str:
    lines = ["---", "tags: [speculative-decoding, dflash]"]
    if origin.target.is_hub:
        lines.append(f"base_model: {origin.target.name}")
    return "\n".join([*lines, "---"])


def _shape_table(shape: DrafterShape, dtype: str) -> str:
    types = shape.layer_types
    layers = f"{shape.num_layers}"
    if types:
        layers += f", {types.count(SLIDING)} with a sliding window of {shape.sliding_window}"
    causal = {None: "sliding layers only", True: "all layers", False: "no layer"}[shape.is_causal]
    rows = {
        "block size": shape.block_size,
        "drafts a pass": shape.num_drafts,
        "layers": layers,
        "causal inside a block": causal if types or shape.is_causal else "no layer",
        "target layers read": ", ".join(map(str, shape.target_layer_ids))
        + f" of 0 to {shape.num_target_layers - 1}",
        "mask token": shape.mask_token_id,
        "dtype": dtype,
    }
    return table(["", ""], [[key, str(value)] for key, value in rows.items()])


def _caution(shape: DrafterShape) -> str:
    if shape.num_target_layers - 1 not in shape.target_layer_ids:
        return ""
    return (
        "**It reads the output of the target's last layer before the final norm.** The package "
        "`dflash` gives it what comes after the norm, and so do some servers: compare the "
        "acceptance length with the one measured here."
    )


def _trained(origin: Origin) -> str:
    training = origin.training
    if not training:
        return ""
    weights = ", the average of the weights that training kept" if origin.averaged else ""
    lines = [f"step {training.get('step')} of {training.get('num_steps')}{weights}"]
    if begun := training.get("init_from"):
        lines.append(f"begun from the weights of `{begun}`")
    for name in ("max_length", "num_anchors", "seed", "store_fingerprint"):
        if name in training:
            lines.append(f"{name}: {training[name]}")
    for name in ("loss", "optim", "versions"):
        if name in training:
            said = {key: value for key, value in training[name].items() if value is not None}
            lines.append(f"{name}: `{json.dumps(said)}`")
    if best := training.get("best"):
        lines.append(
            f"best round of evaluation so far: step {best.get('step')}, acceptance length "
            f"{best['acceptance_length']:.2f} (teacher-forced"
            + ("" if best.get("step") == training.get("step") else "; not of this folder's step")
            + ")"
        )
    if origin.fingerprint:
        lines.append(f"fingerprint of the target: {origin.fingerprint}")
    return "## Trained with dflashdist\n\n" + "\n".join(f"- {line}" for line in lines)


def _rendered(origin: Origin) -> str:
    rendering: dict[str, Any] = origin.rendering
    if not rendering:
        return ""
    own = origin.own_template
    name = "the target's own chat template" if own else f"`{rendering.get('template')}`"
    lines = [
        f"Trained on conversations rendered by {name} "
        f"(sha256 `{rendering.get('template_sha256')}`). Servers must render alike, or "
        "fewer drafts are accepted.",
    ]
    if settings := rendering.get("settings"):
        lines.append(f'Send with each request: `"chat_template_kwargs": {json.dumps(settings)}`.')
    if not own and origin.template is not None:
        lines.append(f"That template is `{TEMPLATE}` here, which the commands below give.")
    elif not own:
        lines.append(
            f"**That template is not in this folder: add the file as `{TEMPLATE}`, which the "
            "commands below give.**"
        )
    if rendering.get("date"):
        lines.append(f"Date in the template: {rendering['date']}; servers write the day's own.")
    return "## Rendering\n\n" + " ".join(lines)
