"""The part of the model card that says how to serve: commands of vLLM and SGLang, and Python."""

import json
import shlex
from typing import Any

from dflashdist.export.origin import Origin, end_ids
from dflashdist.model.drafter_folder import TEMPLATE
from dflashdist.model.shape import SLIDING, DrafterShape

# What has each variant, by the engines' own pull requests.
_VLLM = {
    "dflash": "0.20 or newer",
    "dflash2": "with pull request #52816 (August 2026)",
    "dspark": "with pull request #46995",
}
_SGLANG = {
    "dflash": "with pull request #22077 (April 2026)",
    "dflash2": "with pull request #35371 (August 2026)",
    "dspark": "with pull request #30261 (July 2026)",
}
_SOURCES = (
    "Config and names follow what the sources of {} read in August 2026; no server was run "
    "with a folder of this kind."
)


def serve_section(name: str, origin: Origin, dtype: str, measured: dict[str, Any] | None) -> str:
    """Commands for the layout `hf`.

    Args:
        name: of the folder; the commands are run beside it.
        dtype: of its tensors.
        measured: a report of `evaluate --json`, which knows what ended an answer.
    """
    shape = origin.drafter.shape
    dspark = shape.variant == "dspark"
    settings = {
        "method": "dspark" if dspark else "dflash",
        "model": f"./{name}",
        "num_speculative_tokens": shape.num_drafts,
    }
    shared = shlex.quote(origin.target.name) + _revision(origin) + _template_option(name, origin)
    vllm = (
        f"{_runner(shape)}vllm serve {shared} --attention-backend flash_attn \\\n"
        + f"  --speculative-config {shlex.quote(json.dumps(settings))}"
    )
    block = (
        f"--speculative-dspark-block-size {shape.block_size}"
        if dspark
        else f"--speculative-num-draft-tokens {shape.block_size}"
    )
    sglang = (
        f"python -m sglang.launch_server --model-path {shared} \\\n"
        f"  --speculative-algorithm {'DSPARK' if dspark else 'DFLASH'} \\\n"
        f"  --speculative-draft-model-path {shlex.quote(f'./{name}')} {block}"
    )
    loads = "No package here has DSpark." if dspark else "The package `dflash` 0.1 loads it."
    parts = [
        f"## Serve\n\n{loads} {_SOURCES.format('vLLM and SGLang')}",
        f"vLLM {_VLLM[shape.variant]}, beside this folder:\n\n```bash\n{vllm}\n```",
        f"SGLang {_SGLANG[shape.variant]}:\n\n```bash\n{sglang}\n```",
    ]
    if shape.is_causal is not None:
        parts.append(
            "Not every version of SGLang reads `is_causal`: without it, acceptance may be "
            "lower than measured."
        )
    if dspark:
        return "\n\n".join(parts)
    python = _python(name, origin, dtype, measured)
    return "\n\n".join([*parts, f"dflash 0.1:\n\n```python\n{python}\n```"])


def serve_speculators_section(name: str, origin: Origin) -> str:
    """The command for the layout `speculators`, by which vLLM finds the target itself."""
    shape = origin.drafter.shape
    loads = "The library `speculators` 0.9 loads it."
    if shape.variant == "dflash2":
        return f"## Serve\n\n{loads} vLLM reads DFlash 2 in the layout `hf` only."
    parts = [
        f"## Serve\n\n{loads} {_SOURCES.format('vLLM')}",
        f"vLLM {_VLLM[shape.variant]}, beside this folder:",
        f"```bash\n{_runner(shape)}vllm serve {shlex.quote(f'./{name}')}{_revision(origin)}"
        f"{_template_option(name, origin)} --attention-backend flash_attn\n```",
    ]
    if origin.target.revision:
        parts.append(
            "`--revision` is the target's, for which this layout has no place; vLLM applies it to "
            "this folder as well where it reads that from the hub."
        )
    if shape.variant == "dspark":
        parts.append(
            "Versions of vLLM that take `sample_from_anchor` to be false for this layout "
            "accept next to no drafts; the layout `hf` does not depend on it."
        )
    return "\n\n".join(parts)


def _runner(shape: DrafterShape) -> str:
    """What vLLM needs in its environment where a build may take a runner that cannot."""
    mixed = SLIDING in shape.layer_types and len(set(shape.layer_types)) > 1
    return "VLLM_USE_V2_MODEL_RUNNER=1 " if mixed or shape.variant == "dflash2" else ""


def _revision(origin: Origin) -> str:
    revision = origin.target.revision
    return f" --revision {shlex.quote(revision)}" if revision else ""


def _template_option(name: str, origin: Origin) -> str:
    if origin.own_template:
        return ""
    return f" --chat-template {shlex.quote(f'./{name}/{TEMPLATE}')}"


def _python(name: str, origin: Origin, dtype: str, measured: dict[str, Any] | None) -> str:
    shape, named = origin.drafter.shape, origin.target
    model = "DFlash2DraftModel" if shape.variant == "dflash2" else "DFlashDraftModel"
    target, drafter = json.dumps(named.name), json.dumps(f"./{name}")
    revision = f", revision={json.dumps(named.revision)}" if named.revision else ""
    arguments = ["prompt", "add_generation_prompt=True", "tokenize=False"]
    if settings := origin.rendering.get("settings"):
        arguments.append(f"**{settings!r}")
    template, first = _python_template(name, origin)
    if template:
        arguments.append("chat_template=template")
    asked = ",\n    ".join(arguments)
    return f"""\
{first}import torch
from dflash.model import {model}, dflash_generate
from transformers import AutoModelForCausalLM, AutoTokenizer

device, dtype = "cuda", torch.{dtype}
target = AutoModelForCausalLM.from_pretrained({target}{revision}, dtype=dtype).to(device)
drafter = {model}.from_pretrained({drafter}, dtype=dtype).to(device)
tokenizer = AutoTokenizer.from_pretrained({target}{revision})
prompt = [{{"role": "user", "content": "Hello"}}]
{template}text = tokenizer.apply_chat_template(
    {asked},
)
ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids.to(device)
{_stop(origin, measured)}
answer = dflash_generate(drafter, target, ids, max_new_tokens=64, stop_token_ids=stop)
print(tokenizer.decode(answer[0, ids.shape[1] :]))"""


def _python_template(name: str, origin: Origin) -> tuple[str, str]:
    """Lines of Python for a template that is not the target's own or writes the date, and those of
    their imports; transformers itself takes no other day than today."""
    date = origin.rendering.get("date")
    if origin.own_template and not date:
        return "", ""
    read = "tokenizer.get_chat_template()"
    if not origin.own_template:
        read = f'open({json.dumps(f"./{name}/{TEMPLATE}")}, encoding="utf-8").read()'
    lines = f"template = {read}\n"
    if not date:
        return lines, ""
    lines += f'''\
day = datetime.fromisoformat({json.dumps(date)})
template = re.sub(
    r"""strftime_now\\((['"])(.*?)\\1\\)""", lambda found: repr(day.strftime(found[2])), template
)
'''
    return lines, "import re\nfrom datetime import datetime\n\n"


def _stop(origin: Origin, measured: dict[str, Any] | None) -> str:
    """A line of Python: the tokens that end an answer, as `evaluate` takes them."""
    known = (measured or {}).get("end_ids") or end_ids(origin.target)
    if known:
        return f"stop = {known}"
    # config.json alone may lack the one that the template writes.
    ids = origin.drafter.shape.eos_token_id
    told = list(ids) if isinstance(ids, tuple) else ids
    return f"""\
ends = [{told}, tokenizer.eos_token_id, target.generation_config.eos_token_id]
ends = [end for one in ends for end in (one if isinstance(one, list) else [one])]
stop = sorted({{end for end in ends if end is not None}})"""
