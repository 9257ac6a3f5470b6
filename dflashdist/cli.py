"""The command line: `dflashdist prepare | plan | train | evaluate`.

Errors that a user can mend are one line and exit code 2; a failed run is exit code 1. Each command
imports only what it needs, so `plan` and every `--help` start at once.
"""

import argparse
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import dflashdist
from dflashdist.config import Config, InputError, load_config, queue_depth

# All ranks refuse the same, and rank 0 says so; torchrun ends the others meanwhile. A rank that is
# alone with its trouble (a file that its host does not see) speaks after this pause.
REFUSAL_SECONDS = 6.0

EPILOG = {
    "prepare": """example:
  dflashdist prepare chats.jsonl --target Qwen/Qwen3-8B --out store data.max_length=3072""",
    "plan": """examples:
  dflashdist plan conf/demo.yaml
  dflashdist plan conf/qwen3-8b.yaml data.lengths=lengths.npy schedule.max_tokens=16384 --json""",
    "train": """examples:
  torchrun --standalone --nproc-per-node=8 -m dflashdist train CONF roles.num_targets=2
  python -m dflashdist train conf/demo.yaml roles.num_targets=null roles.num_drafters=null
                                    one process: layout colocated""",
    "evaluate": """example:
  dflashdist evaluate runs/demo/checkpoints/step_00000400 conf/demo.yaml evaluate.max_prompts=32

acceptance length: tokens emitted per target pass in greedy speculative decoding, the bonus token
counted; 1 is plain decoding, the block size is the most.""",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options, late = parser().parse_known_args(arguments)
    unknown = [item for item in late if item.startswith("-") or "=" not in item]
    if unknown:
        print(f"dflashdist {options.command}: unknown argument {unknown[0]!r}", file=sys.stderr)
        return 2
    options.overrides += late  # overrides may also follow an option
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
        "sources", nargs="+", metavar="SRC|KEY=VALUE", help="JSONL files or folders; overrides"
    )
    sub.set_defaults(overrides=[])
    sub.add_argument("--target", required=True, help="the model whose tokenizer and template count")
    sub.add_argument("--out", required=True, help="the token store to write, a folder")
    sub.add_argument("--overwrite", action="store_true", help="replace a store that is there")
    sub.add_argument("--json", action="store_true", help="print the summary as JSON")
    sub = command("plan", "Buckets, steps and their cost; no model, no GPU.", run_plan)
    sub.add_argument("conf", metavar="CONF", help="a YAML configuration")
    sub.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="dotted overrides")
    sub.add_argument("--json", action="store_true", help="print the report as JSON")
    sub = command("train", "One rank of the training job.", run_train)
    sub.add_argument("conf", metavar="CONF", help="a YAML configuration")
    sub.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="dotted overrides")
    sub = command("evaluate", "Acceptance length by speculative decoding.", run_evaluate)
    sub.add_argument(
        "checkpoints", nargs="+", metavar="CHECKPOINT|CONF|KEY=VALUE",
        help="checkpoint or drafter folders, then perhaps a YAML file and overrides",
    )  # fmt: skip
    sub.set_defaults(overrides=[])
    sub.add_argument("--json", action="store_true", help="print the report as JSON")
    return top


def run_prepare(options: argparse.Namespace) -> None:
    from dflashdist.data.prepare import format_summary, prepare

    overrides = [item for item in options.sources if "=" in item and not os.path.exists(item)]
    sources = [item for item in options.sources if item not in overrides]
    config = load_config(None, overrides + options.overrides)
    if not sources:
        raise InputError("no source: name a JSONL file or a folder of them")
    summary = prepare(sources, options.target, options.out, config.data, options.overwrite)
    print(json.dumps(summary, indent=1) if options.json else format_summary(summary))


def run_plan(options: argparse.Namespace) -> None:
    from dflashdist.cluster.roles import assign_roles
    from dflashdist.schedule.plan import Plan, Steps
    from dflashdist.schedule.report import plan_report, print_report, read_lengths

    config = load_config(options.conf, options.overrides)
    if config.data.lengths:
        lengths, supervised = read_lengths(config.data.lengths, config.data.max_length)
    elif config.data.store:
        from dflashdist.data.shards import TokenStore

        store = TokenStore.open(config.data.store)
        lengths, supervised = store.lengths, store.supervised
    else:
        raise InputError("set data.store (of `dflashdist prepare`) or data.lengths (a .npy file)")
    drafter = config.drafter
    features, hidden_size = message_shape(config)
    roles = assign_roles(config.roles, config.target.tensor_parallel, None)
    plan = Plan(
        lengths,
        supervised,
        config.schedule,
        num_anchors=drafter.num_anchors,
        block_size=drafter.block_size,
        seed=config.seed,
    )
    steps = Steps(
        plan,
        num_drafters=roles.num_drafters,
        accumulation=config.train.accumulation_steps,
        num_steps=config.train.max_steps,
        epochs=config.train.epochs or (None if config.train.max_steps else 1.0),
    )
    report = plan_report(
        plan,
        steps,
        queue_depth=queue_depth(config.pipeline, steps.window, roles.num_targets),
        num_features=features,
        hidden_size=hidden_size,
        bytes_per_value=4 if config.target.dtype == "float32" else 2,
    )
    print(json.dumps(report, indent=1) if options.json else print_report(report))


def message_shape(config: Config) -> tuple[int, int | None]:
    """Tapped layers and the target's hidden size (None without target.path). Raises InputError."""
    ids = config.drafter.target_layer_ids
    features = config.drafter.num_features if ids is None else len(ids)
    if not config.target.path:
        return features, None
    from dflashdist.model.shape import (
        check_layer_ids,
        check_supported,
        default_layer_ids,
        read_target_config,
    )

    try:
        target = read_target_config(config.target.path, config.target.revision)
    except InputError as error:
        raise InputError(f"{error}; target.path=null plans without message sizes") from error
    check_supported(target)
    num_layers = target["num_hidden_layers"]
    check_layer_ids(default_layer_ids(num_layers, features) if ids is None else ids, num_layers)
    return features, target["hidden_size"]


def run_train(options: argparse.Namespace) -> None:
    # torch's C++ side warns on every wait that ends without news; set before torch is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    config = load_config(options.conf, options.overrides)
    from dflashdist.cluster.health import Halted
    from dflashdist.train.run import train_rank

    try:
        train_rank(config)
    except Halted as halted:
        leave(2 if isinstance(halted.__cause__, InputError) else 1)
    leave(0)


def run_evaluate(options: argparse.Namespace) -> None:
    overrides = [item for item in options.checkpoints if "=" in item] + options.overrides
    plain = [item for item in options.checkpoints if "=" not in item]
    recipes = [item for item in plain if item.endswith((".yaml", ".yml"))]
    checkpoints = [item for item in plain if item not in recipes]
    if len(recipes) > 1 or not checkpoints:
        raise InputError("name at least one checkpoint folder, and at most one YAML file")
    config = load_config(recipes[0] if recipes else None, overrides)
    if not config.target.path:
        raise InputError("target.path is not set: name the model that the drafter was trained for")
    if not config.evaluate.prompts:
        raise InputError("evaluate.prompts is not set: name a JSONL file with `messages`")
    from dflashdist.eval.acceptance import evaluate_drafters, format_report

    reports = evaluate_drafters(
        checkpoints,
        config.target.path,
        config.evaluate.prompts,
        config.evaluate,
        device=config.train.device,
        revision=config.target.revision,
    )
    if options.json:
        print(json.dumps(reports[0] if len(reports) == 1 else reports, indent=1))
    else:
        print("\n\n".join(map(format_report, reports)))


def leave(code: int) -> None:
    """End the process at once: a thread may be inside a receive that will never be answered."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
