"""The command line: `dflashdist prepare | regenerate | plan | train | evaluate |
export`.

Errors that a user can mend are one line and exit code 2; a failed run is exit code 1.
"""

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import dflashdist
from dflashdist.commands import (
    DTYPES,
    FORMATS,
    run_evaluate,
    run_export,
    run_plan,
    run_prepare,
    run_regenerate,
    run_train,
)
from dflashdist.config import InputError

# All ranks refuse the same, and rank 0 says so; torchrun ends the others meanwhile. A rank that is
# alone with its trouble (a file that its host does not see) speaks after this pause.
REFUSAL_SECONDS = 6.0

EPILOG = {
    "prepare": """examples:
  dflashdist prepare chats.jsonl --target Qwen/Qwen3-8B --out store data.max_length=3072
  dflashdist prepare 'chats/*.parquet' org/name,split=train,cap=100000 conf/qwen3-8b.yaml \\
      --out store data.validation=0.01 data.template_settings.enable_thinking=false
  dflashdist prepare --inspect store --row 17

Sources are files (.jsonl, .json, .parquet; .gz and .zst of the first two), folders and globs of
them, and names that `datasets` loads, each with options behind commas: split, revision,
streaming=true, cap (rows read at most), weight (0.5 = every second row, 2 = each twice). A YAML
file among them is a configuration; data.sources and target.path may stand in it.""",
    "regenerate": """examples:
  dflashdist regenerate chats.jsonl --out answers.jsonl --base-url http://localhost:8000/v1 \\
      --model Qwen/Qwen3-8B --concurrency 64 --max-tokens 4096
  dflashdist regenerate chats.jsonl --out answers.jsonl --local --target Qwen/Qwen3-0.6B

The questions of each conversation are asked anew, each after the target's own earlier answers. The
output only grows: a killed command goes on where it was, and a larger --max-tokens asks again for
the answers that were cut off, whose rows `prepare` then leaves out. The key is read from
OPENAI_API_KEY. Exit code: 0 where each question has its answer, 1 where conversations have none
(OUT.failed.jsonl has the reasons), 2 for what must be mended first, a server that is gone too.""",
    "plan": """examples:
  dflashdist plan conf/demo.yaml
  dflashdist plan conf/qwen3-8b.yaml data.lengths=lengths.npy schedule.max_tokens=16384 --json""",
    "train": """examples:
  torchrun --standalone --nproc-per-node=8 -m dflashdist train CONF roles.num_targets=2
  python -m dflashdist train conf/demo.yaml roles.num_targets=null roles.num_drafters=null
                                    one process: layout colocated""",
    "evaluate": """examples:
  dflashdist evaluate runs/demo --figure acceptance.png
  dflashdist evaluate DRAFTER conf/qwen3-8b.yaml evaluate.prompts=gsm8k.jsonl evaluate.task=gsm8k \\
      evaluate.max_prompts=128 evaluate.max_new_tokens=2048 --json

A run folder means its checkpoints/best, else its newest complete checkpoint, and its own settings
where no YAML file is named.

Acceptance length: tokens that a target pass of real speculative decoding gives, the target's own
(bonus) token counted: 1 is plain decoding, one more than the drafts of a pass the most. It is what
serving gains. The `block prefix` that training shows is another number: how far blocks are right
against the data's tokens, at anchors that decoding need not come by.

Pooled: all tokens over all passes; mean: the mean of the answers' own values; the prefill, which
gives an answer's first token, is no pass. Draft k accepted: of the passes that offered a k-th
draft; where an accepted draft ends the answer no bonus token follows, so their sum may be a little
above the length. Clean: without answers that loop or were cut. [low, high]: 95 % bootstrap over
prompts, of 5 or more.

Greedily, every token is held to the target's own choice over the finished text, always; and the
text is counted again by training's code, prompt by prompt: where the interval of the ratio lies
beyond 1 % it says IT DOES NOT SERVE AS IT TRAINS. With evaluate.temperature=1 drafts are taken by
rejection sampling. Prompts: a file of conversations, a token store (its validation part), or
builtin; tasks: gsm8k, math500, humaneval, mbpp, mtbench, alpaca, as published, from your own
copies.""",
    "export": """examples:
  dflashdist evaluate runs/qwen3-8b/checkpoints/step_00010000 conf/qwen3-8b.yaml \\
      evaluate.prompts=builtin --json >report.json
  dflashdist export runs/qwen3-8b/checkpoints/step_00010000 drafter --target Qwen/Qwen3-8B \\
      --report report.json
  dflashdist export runs/qwen3-8b/checkpoints/step_00010000 drafter-spec --format speculators \\
      --ema                         the average of the weights, of a run with optim.ema set

--target says which name the card gives, where training read a local folder. A target that is a
folder here or in the hub's cache is held to the drafter. --report is taken of these weights alone,
whatever folder they were measured in: for --ema, evaluate the folder ema in the checkpoint. The
package dflash loads the layout hf (but DSpark), the library speculators the other; what vLLM and
SGLang load was read in their sources, and neither was run. The card names no licence: add
`license: ...` to the block at its top.""",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options, late = parser().parse_known_args(arguments)
    more = getattr(options, "sources", getattr(options, "checkpoints", None))
    unknown = [item for item in late if item.startswith("-") or (more is None and "=" not in item)]
    if unknown:
        print(f"dflashdist {options.command}: unknown argument {unknown[0]!r}", file=sys.stderr)
        return 2
    (options.overrides if more is None else more).extend(late)  # they may also follow an option
    try:
        options.run(options)
    except InputError as error:
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            time.sleep(REFUSAL_SECONDS)
        where = "" if rank == "0" else f" (rank {rank} on {socket.gethostname()})"
        print(f"dflashdist {options.command}{where}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(f"dflashdist {options.command}: interrupted", file=sys.stderr)
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = argparse.ArgumentParser(
        prog="dflashdist", description=dflashdist.__doc__,
        epilog="`dflashdist COMMAND --help` shows a command's options and an example.",
    )  # fmt: skip
    top.add_argument("--version", action="version", version=dflashdist.__version__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, about: str, run: Callable[[Any], None]) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=about, description=about, epilog=EPILOG[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        sub.set_defaults(run=run)
        return sub

    sub = command("prepare", "Conversations to a token store.", run_prepare)
    sub.add_argument(
        "sources", nargs="*", metavar="SRC|CONF|KEY=VALUE",
        help="files, folders, globs, names of data sets; perhaps a YAML file; overrides",
    )  # fmt: skip
    sub.set_defaults(overrides=[])
    sub.add_argument("--target", help="the model whose tokenizer and template count [target.path]")
    sub.add_argument("--out", help="the token store to write, a folder [data.store]")
    sub.add_argument("--overwrite", action="store_true", help="replace a store that is there")
    sub.add_argument(
        "--verify", choices=("some", "all"), default="some",
        help="rows whose mask is held to the answer by decoding: a random sample, or all",
    )  # fmt: skip
    sub.add_argument("--json", action="store_true", help="print the summary as JSON")
    sub.add_argument("--inspect", metavar="STORE", help="print one row of a store instead")
    sub.add_argument("--row", type=int, default=0, help="which, from 0 [%(default)s]")
    sub = command("regenerate", "Answers written by the target itself.", run_regenerate)
    sub.add_argument(
        "sources",
        nargs="+",
        metavar="SRC|KEY=VALUE",
        help="as for prepare; data.format, data.fields",
    )
    sub.set_defaults(overrides=[])
    sub.add_argument("--out", required=True, help="JSON Lines, appended to")
    sub.add_argument("--base-url", help="an OpenAI-compatible server, .../v1")
    sub.add_argument("--model", help="the model's name there")
    sub.add_argument("--concurrency", type=int, help="requests at once [32]")
    sub.add_argument("--temperature", type=float, help="[0]")
    sub.add_argument("--max-tokens", type=int, default=2048, help="of an answer [%(default)s]")
    sub.add_argument("--limit", type=int, help="conversations at most")
    sub.add_argument("--no-stream", action="store_true", default=None, help="ask for whole answers")
    sub.add_argument(
        "--wait", type=float, metavar="SECONDS",
        help="for a server that does not answer, before the command ends [600]",
    )  # fmt: skip
    sub.add_argument(
        "--extra", metavar="JSON",
        help="added to the request's body, e.g. chat_template_kwargs",
    )  # fmt: skip
    sub.add_argument(
        "--local", action="store_true", help="answer here, with transformers, greedily"
    )
    sub.add_argument("--target", help="with --local: the model")
    sub.add_argument("--batch-size", type=int, help="with --local [64]")
    sub.add_argument("--json", action="store_true", help="print the counts as JSON")
    sub = command("plan", "Buckets, steps and their cost; no model, no GPU.", run_plan)
    sub.add_argument("conf", metavar="CONF", help="a YAML configuration")
    sub.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="dotted overrides")
    sub.add_argument("--ranks", type=int, help="of the job [as many as roles names]")
    sub.add_argument("--json", action="store_true", help="print the report as JSON")
    sub = command("train", "One rank of the training job.", run_train)
    sub.add_argument("conf", metavar="CONF", help="a YAML configuration")
    sub.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="dotted overrides")
    sub = command("evaluate", "Acceptance length by speculative decoding.", run_evaluate)
    sub.add_argument(
        "checkpoints", nargs="+", metavar="RUN|CHECKPOINT|CONF|KEY=VALUE",
        help="run, checkpoint or drafter folders, then perhaps a YAML file and overrides",
    )  # fmt: skip
    sub.set_defaults(overrides=[])
    sub.add_argument("--figure", metavar="PNG", help="draw acceptance by position and by length")
    sub.add_argument("--json", action="store_true", help="print the report as JSON")
    sub = command("export", "A checkpoint to a folder in a published layout.", run_export)
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint's or drafter's folder")
    sub.add_argument("out", metavar="OUT", help="the folder to write")
    sub.set_defaults(overrides=[])
    sub.add_argument(
        "--format", choices=FORMATS, default="hf",
        help="hf: the published layout; speculators: of the library of that name",
    )  # fmt: skip
    sub.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the weights")
    sub.add_argument("--ema", action="store_true", help="the average of the weights (optim.ema)")
    sub.add_argument("--report", metavar="FILE", help="of `evaluate --json`, for the model card")
    sub.add_argument("--target", help="the target's name [as training named it]")
    sub.add_argument("--revision", help="of the target")
    sub.add_argument("--overwrite", action="store_true", help="replace an export that is there")
    return top
