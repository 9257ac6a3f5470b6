"""The model card: what the drafter is, what was measured, and the commands that serve it."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflashdist.config import InputError
from dflashdist.export.origin import Origin, is_hub_name
from dflashdist.model.drafting import num_drafts
from dflashdist.model.shape import SLIDING, DrafterShape

_VARIANTS = {
    "dflash": "DFlash (arXiv 2602.06036)",
    "dflash2": "DFlash 2: DFlash with dynamic convolutions and a candidate selector",
    "dspark": "DSpark (arXiv 2607.05147): DFlash with a Markov head that follows the token before",
}
Measured = dict[str, Any]


def model_card(
    name: str, origin: Origin, *, layout: str, dtype: str, report: Measured | None
) -> str:
    """README.md of an exported folder.

    Args:
        name: of the folder; the commands are run beside it.
        layout: "hf" or "speculators"; dtype: of model.safetensors.
        report: of `dflashdist evaluate --json`; None leaves the measurements out.
    """
    shape = origin.drafter.shape
    parts = [
        _front_matter(origin),
        f"# {name}\n\n"
        f"A drafter for speculative decoding with `{origin.target}`"
        + (f" at revision `{origin.revision}`" if origin.revision else "")
        + f". {_VARIANTS[shape.variant]}. Of no use alone: embedding and head are the target's, "
        "whose weights are not in this folder. The output stays the target's own.",
        _shape_table(shape, dtype),
        _caution(shape),
        _measured(report) if report else "",
        _trained(origin),
        _rendered(origin.rendering),
        _served(name, origin, dtype) if layout == "hf" else _served_speculators(name, shape),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def read_report(path: str | Path, folder: Path) -> Measured:
    """The report of this drafter in a file that `dflashdist evaluate --json` wrote.

    Raises InputError where there is none, or only of other checkpoints.
    """
    file = Path(path).expanduser()
    try:
        read = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a report of `evaluate --json` ({error})") from error
    reports = read if isinstance(read, list) else [read]
    if not all(
        isinstance(one, dict) and {"checkpoint", "all", "clean"} <= one.keys() for one in reports
    ):
        raise InputError(f"{path}: not a report of `evaluate --json`")
    for one in reports:
        place = Path(one["checkpoint"]).expanduser()
        # A report from elsewhere names a folder that is not here: its last names must do.
        elsewhere = not place.exists() and place.parts[-2:] == folder.parts[-2:]
        if elsewhere or place.resolve() == folder:
            return one
    told = ", ".join(str(one["checkpoint"]) for one in reports)
    raise InputError(f"{path}: measured of {told}, not of {folder}")


def _front_matter(origin: Origin) -> str:
    lines = ["---", "tags: [speculative-decoding, dflash]"]
    if is_hub_name(origin.target) and not Path(origin.target).is_dir():
        lines.append(f"base_model: {origin.target}")
    return "\n".join([*lines, "---"])


def _shape_table(shape: DrafterShape, dtype: str) -> str:
    types = shape.layer_types
    layers = f"{shape.num_layers}"
    if types:
        layers += f", {types.count(SLIDING)} with a sliding window of {shape.sliding_window}"
    causal = {None: "sliding layers only", True: "all layers", False: "no layer"}[shape.is_causal]
    rows = {
        "block size": shape.block_size,
        "drafts a pass": num_drafts(shape),
        "layers": layers,
        "causal inside a block": causal if types or shape.is_causal else "no layer",
        "target layers read": ", ".join(map(str, shape.target_layer_ids))
        + f" of 0 to {shape.num_target_layers - 1}",
        "mask token": shape.mask_token_id,
        "dtype": dtype,
    }
    return _table(["", ""], [[key, str(value)] for key, value in rows.items()])


def _caution(shape: DrafterShape) -> str:
    if shape.num_target_layers - 1 not in shape.target_layer_ids:
        return ""
    return (
        "**It reads the output of the target's last layer before the final norm.** The package "
        "`dflash` gives it what comes after the norm, and so do some servers: compare the "
        "acceptance length with the one measured here."
    )


def _measured(report: Measured) -> str:
    def row(name: str, form: Callable[[Measured], str], part: Measured) -> list[str]:
        return [name, form(part["all"]), form(part["clean"])]

    def ratio(key: str) -> Callable[[Measured], str]:
        return lambda one: _number(one.get(key), one.get(f"{key}_interval"))

    def share(k: int) -> Callable[[Measured], str]:
        intervals = "position_acceptance_interval"
        return lambda one: _number(
            one["position_acceptance"][k], (one.get(intervals) or {k: None})[k]
        )

    greedy = not report.get("temperature")
    how = "greedy" if greedy else f"sampled at temperature {report['temperature']:g}"
    length = ratio("acceptance_length")
    rows = [
        row("answers", lambda one: f"{one['num_answers']:,}", report),
        row("acceptance length, pooled", length, report),
        row("acceptance length, mean of answers", ratio("mean_acceptance_length"), report),
    ]
    rows += [row(f"task {task}", length, part) for task, part in _parts(report, "by_task")]
    rows += [
        row(f"draft {k + 1} accepted", share(k), report)
        for k in range(len(report["all"]["position_acceptance"]))
    ]
    told = [
        f"Prompts: {report.get('prompts')}; {how}, at most {report.get('max_new_tokens')} new "
        f"tokens, {report.get('dtype')} on {report.get('device')}.",
        "Acceptance length: tokens emitted per pass of the target, the bonus token counted; 1 is "
        "plain decoding. Clean: answers that end by themselves and do not loop. In brackets: 95 % "
        "intervals by bootstrap over prompts.",
    ]
    if greedy:
        told.append("The output was equal to the target's own, token by token.")
    return "\n\n".join(["## Measured", _table(["", "all", "clean"], rows), " ".join(told)])


def _parts(report: Measured, key: str) -> list[tuple[str, Measured]]:
    return [(name, part) for name, part in (report.get(key) or {}).items() if name]


def _trained(origin: Origin) -> str:
    training = origin.training
    if not training:
        return ""
    weights = ", the average of the weights that training kept" if origin.averaged else ""
    lines = [f"step {training.get('step')} of {training.get('num_steps')}{weights}"]
    for name in ("max_length", "num_anchors", "seed", "store_fingerprint"):
        if name in training:
            lines.append(f"{name}: {training[name]}")
    for name in ("loss", "optim", "best", "versions"):
        if name in training:
            said = {key: value for key, value in training[name].items() if value is not None}
            lines.append(f"{name}: `{json.dumps(said)}`")
    if origin.fingerprint:
        lines.append(f"fingerprint of the target: {origin.fingerprint}")
    return "## Trained with dflashdist\n\n" + "\n".join(f"- {line}" for line in lines)


def _rendered(rendering: dict[str, Any]) -> str:
    if not rendering:
        return ""
    own = rendering.get("template") == "own"
    template = "the target's own chat template" if own else f"`{rendering.get('template')}`"
    settings = rendering.get("settings") or {}
    lines = [
        f"Trained on conversations rendered by {template} "
        f"(sha256 `{rendering.get('template_sha256')}`). Servers must render alike, or "
        "fewer drafts are accepted.",
    ]
    if settings:
        lines.append(f'Send with each request: `"chat_template_kwargs": {json.dumps(settings)}`.')
    if not own:
        lines.append("Give the server that template (`--chat-template`).")
    if rendering.get("date"):
        lines.append(f"Date in the template: {rendering['date']}.")
    return "## Rendering\n\n" + " ".join(lines)


def _served(name: str, origin: Origin, dtype: str) -> str:
    shape = origin.drafter.shape
    dspark = shape.variant == "dspark"
    target, folder = shlex.quote(origin.target), shlex.quote(f"./{name}")
    revision = f" --revision {shlex.quote(origin.revision)}" if origin.revision else ""
    settings = {
        "method": "dspark" if dspark else "dflash",
        "model": f"./{name}",
        "num_speculative_tokens": num_drafts(shape),
    }
    mixed = SLIDING in shape.layer_types and len(set(shape.layer_types)) > 1
    vllm = (
        ("VLLM_USE_V2_MODEL_RUNNER=1 " if mixed else "")
        + f"vllm serve {target}{revision} --attention-backend flash_attn \\\n"
        + f"  --speculative-config {shlex.quote(json.dumps(settings))}"
    )
    block = (
        f"--speculative-dspark-block-size {shape.block_size}"
        if dspark
        else f"--speculative-num-draft-tokens {shape.block_size}"
    )
    sglang = (
        f"python -m sglang.launch_server --model-path {target}{revision} \\\n"
        f"  --speculative-algorithm {'DSPARK' if dspark else 'DFLASH'} \\\n"
        f"  --speculative-draft-model-path {folder} {block}"
    )
    parts = [f"## Serve\n\nBeside this folder. vLLM:\n\n```bash\n{vllm}\n```"]
    parts.append(f"SGLang:\n\n```bash\n{sglang}\n```")
    if shape.is_causal is not None:
        parts.append(
            "Not every version of SGLang reads `is_causal`: without it, acceptance may be "
            "lower than measured."
        )
    if dspark:
        return "\n\n".join([*parts, "The package `dflash` has no DSpark."])
    return "\n\n".join([*parts, f"dflash 0.1:\n\n```python\n{_python(name, origin, dtype)}\n```"])


def _python(name: str, origin: Origin, dtype: str) -> str:
    shape = origin.drafter.shape
    model = "DFlash2DraftModel" if shape.variant == "dflash2" else "DFlashDraftModel"
    revision = f', revision="{origin.revision}"' if origin.revision else ""
    ends = shape.eos_token_id
    stop = list(ends) if isinstance(ends, tuple) else "[tokenizer.eos_token_id]"
    settings = "".join(
        f", {key}={value!r}" for key, value in (origin.rendering.get("settings") or {}).items()
    )
    return f"""\
import torch
from dflash.model import {model}, dflash_generate
from transformers import AutoModelForCausalLM, AutoTokenizer

device, dtype = "cuda", torch.{dtype}
target = AutoModelForCausalLM.from_pretrained("{origin.target}"{revision}, dtype=dtype).to(device)
drafter = {model}.from_pretrained("./{name}", dtype=dtype).to(device)
tokenizer = AutoTokenizer.from_pretrained("{origin.target}"{revision})
prompt = [{{"role": "user", "content": "Hello"}}]
text = tokenizer.apply_chat_template(
    prompt, add_generation_prompt=True, tokenize=False{settings}
)
ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids.to(device)
answer = dflash_generate(drafter, target, ids, max_new_tokens=64, stop_token_ids={stop})
print(tokenizer.decode(answer[0, ids.shape[1] :]))"""


def _served_speculators(name: str, shape: DrafterShape) -> str:
    vllm = f"vllm serve {shlex.quote(f'./{name}')} --attention-backend flash_attn"
    told = {
        "dflash": "",
        "dflash2": "vLLM reads DFlash 2 in the layout `hf` only; this one is for `speculators`.",
        "dspark": "Versions of vLLM that take `sample_from_anchor` to be false for this layout "
        "accept next to no drafts; the layout `hf` does not depend on it.",
    }[shape.variant]
    command = f"Beside this folder:\n\n```bash\n{vllm}\n```" if shape.variant != "dflash2" else ""
    return "\n\n".join(part for part in ("## Serve", command, told) if part)


def _number(value: float | None, interval: list[float] | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
