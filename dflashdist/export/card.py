"""The model card: what the drafter is, what `evaluate --json` measured, how it was trained."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dflashdist.config import InputError
from dflashdist.export.origin import Origin
from dflashdist.export.serve import serve_section, serve_speculators_section
from dflashdist.model.drafter import Drafter
from dflashdist.model.drafter_folder import TEMPLATE, weights_digest
from dflashdist.model.shape import SLIDING, DrafterShape

Measured = dict[str, Any]  # a report of `evaluate --json`
_LICENCE = (
    "## Licence\n\nNone is named. To name one, add `license: ...` to the block at the top of this "
    "file; what the target's and the data's allow is for you to find out."
)
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
        _LICENCE,
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


def read_report(path: str | Path, drafter: Drafter, folder: Path) -> Measured:
    """The report of this drafter's weights in a file that `dflashdist evaluate --json` wrote.

    Args:
        drafter: whose weights those must be, also where they lay in bfloat16 or float16.
        folder: of the drafter, for messages.

    Raises InputError where there is none, or only of other weights.
    """
    file = Path(path).expanduser()
    try:
        read = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a report of `evaluate --json` ({error})") from error
    reports = read if isinstance(read, list) else [read]
    if not reports or not all(_is_report(one) for one in reports):
        raise InputError(f"{path}: not a report of `evaluate --json`")
    if not all(isinstance(one.get("digest"), str) for one in reports):
        raise InputError(f"{path}: made by an older version, which did not say of which weights: "
                         "evaluate again")  # fmt: skip
    digests = {weights_digest(drafter, through) for through in (torch.float32, torch.float16)}
    for one in reports:
        if one["digest"] in digests:
            return one
    told = ", ".join(one["checkpoint"] for one in reports)
    raise InputError(f"{path}: measured of other weights ({told}) than {folder} has: evaluate this")


def measured_section(report: Measured) -> str:
    """The table, how it was made, and what about it is doubtful."""

    def row(name: str, form: Callable[[Measured], str], part: Measured) -> list[str]:
        return [name, form(part["all"]), form(part["clean"])]

    def ratio(key: str) -> Callable[[Measured], str]:
        return lambda one: _number(one[key], one.get(f"{key}_interval"))

    def share(k: int) -> Callable[[Measured], str]:
        intervals = "position_acceptance_interval"
        return lambda one: _number(
            one["position_acceptance"][k], (one.get(intervals) or {k: None})[k]
        )

    greedy = not report["temperature"]
    how = "greedy" if greedy else f"sampled at temperature {report['temperature']:g}"
    length = ratio("acceptance_length")
    rows = [
        row("answers", lambda one: f"{one['num_answers']:,}", report),
        row("acceptance length, pooled", length, report),
        row("acceptance length, mean of answers", ratio("mean_acceptance_length"), report),
    ]
    rows += [row(f"task {task}", length, part) for task, part in _tasks(report).items() if task]
    rows += [
        row(f"draft {k + 1} accepted", share(k), report)
        for k in range(len(report["all"]["position_acceptance"]))
    ]
    told = [
        f"Prompts: {Path(report['prompts']).name}; {how}, at most {report['max_new_tokens']} new "
        f"tokens, {report['dtype']} on {report['device']}.",
        "Acceptance length: tokens emitted per pass of the target, the bonus token counted; 1 is "
        "plain decoding. Draft k accepted: the share of the passes that offered a k-th draft in "
        "which it and all before it were taken. Clean: answers that end by themselves and do not "
        "loop. In brackets: 95 % intervals by bootstrap over prompts.",
    ]
    if greedy:
        told.append(_equality(report["rounding_ties"]))
    parts = ["## Measured", _doubt(report), table(["", "all", "clean"], rows), " ".join(told)]
    return "\n\n".join(part for part in parts if part)


def _equality(ties: int) -> str:
    if not ties:
        return "The output was equal to the target's own, token by token."
    answers = "1 answer that parts" if ties == 1 else f"{ties} answers that part"
    return (
        f"The output was equal to the target's own but for {answers} where two logits are closer "
        "than rounding."
    )


def _doubt(report: Measured) -> str:
    """Where decoding and training's count of the same text disagree: loud, before the table."""
    if report.get("serves_as_trained") is not False:
        return ""
    served = _number(report["all"]["acceptance_length"])
    forced = _number(report.get("teacher_forced_acceptance_length"))
    return (
        f"**WARNING: IT DOES NOT SERVE AS IT TRAINS.** Decoding accepted {served} tokens a pass, "
        f"training's code counts {forced} of the same text: a fault of the code, or rounding in "
        "bfloat16, and not of the drafter. Do not rely on these numbers."
    )


def _tasks(report: Measured) -> dict[str, Measured]:
    return report.get("by_task") or {}


def _is_report(one: Any) -> bool:
    """Whether all that the card shows of a report is there."""
    if not isinstance(one, dict) or not _has_parts(one) or not isinstance(_tasks(one), dict):
        return False
    words = ("checkpoint", "prompts", "dtype", "device")
    numbers = ("temperature", "max_new_tokens", "rounding_ties")
    drafts = {len(one[kind]["position_acceptance"]) for kind in ("all", "clean")}
    return (
        all(isinstance(one.get(key), str) for key in words)
        and all(_is_number(one.get(key)) for key in numbers)
        and _is_value(one.get("teacher_forced_acceptance_length"), None)
        and len(drafts) == 1
        and _are_tokens(one.get("end_ids", []))
        and all(isinstance(part, dict) and _has_parts(part) for part in _tasks(one).values())
    )


def _has_parts(one: Measured) -> bool:
    return all(isinstance(one.get(kind), dict) and _is_part(one[kind]) for kind in ("all", "clean"))


def _is_part(part: Measured) -> bool:
    shares = part.get("position_acceptance")
    if not _is_number(part.get("num_answers")) or not isinstance(shares, list):
        return False
    values = [(share, None) for share in shares]
    for key in ("acceptance_length", "mean_acceptance_length"):
        values.append((part.get(key), part.get(f"{key}_interval")))
    intervals = part.get("position_acceptance_interval")
    if intervals is not None:
        if not isinstance(intervals, list) or len(intervals) != len(shares):
            return False
        values += [(None, interval) for interval in intervals]
    return all(_is_value(value, interval) for value, interval in values)


def _is_value(value: Any, interval: Any) -> bool:
    if interval is not None:
        ends = interval if isinstance(interval, list) else []
        if len(ends) != 2 or not all(map(_is_number, ends)):
            return False
    return value is None or _is_number(value)


def _are_tokens(ids: Any) -> bool:
    return isinstance(ids, list) and all(type(i) is int for i in ids)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: float | None, interval: list[float] | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table with this head."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
