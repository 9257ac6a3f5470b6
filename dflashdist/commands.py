"""What each command of the command line does; cli.py has their options.

Each imports only what it needs, so `plan` and every `--help` start at once.
"""

import argparse
import json
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

from dflashdist.config import Config, InputError, known_keys, load_config
from dflashdist.export import DTYPES as DTYPES  # for cli.py
from dflashdist.export import FORMATS as FORMATS

# A known key or section, or anything with a dot, of which load_config names the nearest known key.
_FIRST = sorted({key.partition(".")[0] for key in known_keys()})
OVERRIDE = re.compile(rf"({'|'.join(_FIRST)}|[a-z_]+\.[\w.]+)=")


def sort_out(items: list[str], late: list[str]) -> tuple[Config, list[str]]:
    """The configuration in arguments that may be a YAML file, overrides or others; and the others.

    An override has a key before its =; a path may hold an = as well.
    """
    overrides = [item for item in items if OVERRIDE.match(item) and not os.path.exists(item)]
    plain = [item for item in items if item not in overrides]
    recipes = [item for item in plain if item.endswith((".yaml", ".yml"))]
    if len(recipes) > 1:
        raise InputError(f"{recipes[1]}: a second configuration; name at most one YAML file")
    config = load_config(recipes[0] if recipes else None, overrides + late)
    return config, [item for item in plain if item not in recipes]


def run_prepare(options: argparse.Namespace) -> None:
    config, sources = sort_out(options.sources, options.overrides)
    sources = sources or config.data.sources
    target, out = options.target or config.target.path, options.out or config.data.store
    if options.inspect:
        print(inspected(options.inspect, options.row, target, config))
        return
    from dflashdist.data.prepare import format_summary, prepare

    if not sources:
        raise InputError("no source: name a file of conversations, a folder, or a data set")
    if not target or not out:
        raise InputError(f"{'--out' if target else '--target'} is missing")
    refuse_target(target, config.target.revision)
    summary = prepare(
        sources, target, out, config.data, options.overwrite, config.target.revision,
        verify_all=options.verify == "all",
    )  # fmt: skip
    print(json.dumps(summary, indent=1) if options.json else format_summary(summary))


def refuse_target(path: str, revision: str | None) -> None:
    """Raise InputError now for a target that training would refuse after hours of preparation."""
    from dflashdist.model.target_files import check_target, target_file

    if target_file(path, "config.json", revision) is None:
        print(
            f"dflashdist: {path} has no config.json: whether it can be trained for is not checked",
            file=sys.stderr,
        )
    else:
        check_target(path, revision)


def inspected(folder: str, row: int, target: str | None, config: Config) -> str:
    """A row of a store as text, by the tokenizer that the store was made with."""
    from dflashdist.data.audit import inspect_row
    from dflashdist.data.shards import TokenStore
    from dflashdist.data.tokenizer import TargetTokenizer

    store = TokenStore.open(folder)
    revision = config.target.revision if target else store.meta["revision"]
    tokenizer = TargetTokenizer.read(target or store.meta["target"], revision)
    return inspect_row(store, tokenizer, row, color=sys.stdout.isatty())


def run_regenerate(options: argparse.Namespace) -> None:
    config, sources = sort_out(options.sources, options.overrides)
    sources = sources or config.data.sources
    if not sources:
        raise InputError("no source: name a file of conversations, a folder, or a data set")
    target = options.target or config.target.path
    if target:
        refuse_target(target, config.target.revision)
    data = config.data
    shared: dict[str, Any] = {
        "limit": options.limit, "format": data.format, "fields": data.fields,
    }  # fmt: skip
    from dflashdist.regenerate.run import (
        failed_path,
        format_counts,
        refuse_ignored,
        regenerate,
    )

    served = {
        "--base-url": options.base_url, "--model": options.model, "--extra": options.extra,
        "--concurrency": options.concurrency, "--temperature": options.temperature,
        "--no-stream": options.no_stream, "--wait": options.wait,
    }  # fmt: skip
    if options.local:
        from dflashdist.eval.generate import regenerate_locally

        refuse_ignored("--local", served)
        if not target:
            raise InputError("--local needs --target, the model that answers")
        counts = regenerate_locally(
            sources, options.out, target=target, batch_size=options.batch_size or 64,
            device=config.train.device, dtype=config.target.dtype, revision=config.target.revision,
            template=data.template, template_settings=data.template_settings, date=data.date,
            max_tokens=options.max_tokens, **shared,
        )  # fmt: skip
    else:
        from dflashdist.regenerate.server import MOST_CONNECTIONS, WAIT_SECONDS, ServerAnswerer

        if not options.base_url or not options.model:
            raise InputError("name the server by --base-url and --model, or pass --local --target")
        refuse_ignored(
            "--base-url", {"--target": options.target, "--batch-size": options.batch_size}
        )
        try:
            extra = json.loads(options.extra or "{}")
        except ValueError as error:
            raise InputError(f"--extra {options.extra}: not JSON ({error})") from error
        if not isinstance(extra, dict):
            raise InputError(f"--extra {options.extra}: must be a JSON object")
        concurrency = 32 if options.concurrency is None else options.concurrency
        if concurrency > MOST_CONNECTIONS:
            raise InputError(f"--concurrency {concurrency}: at most {MOST_CONNECTIONS}")
        answerer = ServerAnswerer(
            options.base_url, options.model, temperature=options.temperature or 0.0,
            max_tokens=options.max_tokens, stream=not options.no_stream, extra=extra,
            wait=WAIT_SECONDS if options.wait is None else options.wait,
        )  # fmt: skip
        counts = regenerate(sources, options.out, answerer, concurrency=concurrency, **shared)
    print(json.dumps(counts, indent=1) if options.json else format_counts(counts))
    if counts["failed"]:
        print(
            f"dflashdist regenerate: {counts['failed']:,} of {counts['input']:,} conversations "
            f"have no usable answer, see {failed_path(Path(options.out))}; the same command asks "
            "again those that the server failed, a larger --max-tokens those that were cut off",
            file=sys.stderr,
        )
        raise SystemExit(1)


def run_plan(options: argparse.Namespace) -> None:
    from dflashdist.schedule.report import print_report
    from dflashdist.train.job import TrainingJob, check_tokens

    config = load_config(options.conf, options.overrides)
    if options.ranks is not None and options.ranks < 1:
        raise InputError(f"--ranks {options.ranks}: at least 1")
    job = TrainingJob(config, options.ranks, planning=True)
    if job.store_if_any and job.shape_if_known:
        check_tokens(job)
    report = job.report()
    print(json.dumps(report, indent=1) if options.json else print_report(report))


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
    items = list(options.checkpoints)
    settings = os.path.join(items[0], "config.yaml")  # of a run folder
    if os.path.isfile(settings) and not any(item.endswith((".yaml", ".yml")) for item in items):
        items.append(settings)
        print(f"dflashdist evaluate: with the settings in {settings}", file=sys.stderr)
    config, named = sort_out(items, options.overrides)
    if not named:
        raise InputError("name at least one run, checkpoint or drafter folder")
    from dflashdist.eval.acceptance import evaluate_drafters, find_drafter

    checkpoints = [find_drafter(Path(folder).expanduser()) for folder in named]
    for folder, found in zip(named, checkpoints, strict=True):
        if found != Path(folder).expanduser():
            print(
                f"dflashdist evaluate: {folder}: takes {found} ({found.resolve().name})",
                file=sys.stderr,
            )
    if not config.target.path:
        raise InputError("target.path is not set: name the model that the drafter was trained for")
    if not config.evaluate.prompts:
        raise InputError(
            "evaluate.prompts is not set: name a file of conversations or a token store, or builtin"
        )
    from dflashdist.cluster.world import Place, choose_device
    from dflashdist.eval.cross_check import OutputsDiffer
    from dflashdist.eval.figure import check_figure, draw_figure
    from dflashdist.eval.prompts import chat_of, training_rows
    from dflashdist.eval.report import format_report, warnings_of

    device = choose_device(config.train.device, Place())
    if options.figure:
        check_figure(options.figure)
    store = training_rows(config.evaluate.prompts)
    if store:
        text = "WARNING: a token store without a validation part: training may have seen these rows"
        print(f"{text} ({store})", file=sys.stderr)
    try:
        reports = evaluate_drafters(
            checkpoints,
            config.target.path,
            config.evaluate.prompts,
            config.evaluate,
            device=device.type,
            dtype=config.target.dtype,
            attention=config.target.attention,
            revision=config.target.revision,
            trust_remote_code=config.target.trust_remote_code,
            chat=chat_of(checkpoints, config.target.path, config.target.revision, config.data),
        )
    except OutputsDiffer as error:
        print(f"dflashdist evaluate: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    if options.json:
        print(json.dumps(reports[0] if len(reports) == 1 else reports, indent=1))
    else:
        print("\n\n".join(map(format_report, reports)))
    for line in (line for report in reports for line in warnings_of(report)):
        print(line, file=sys.stderr)
    if options.figure:
        draw_figure(reports, options.figure)


def run_export(options: argparse.Namespace) -> None:
    if options.overrides:
        raise InputError(f"{options.overrides[0]}: export takes no overrides")
    from dflashdist.export.folder import export_drafter

    place = export_drafter(
        options.checkpoint, options.out, format=options.format, dtype=options.dtype,
        ema=options.ema, report=options.report, target=options.target,
        revision=options.revision, overwrite=options.overwrite,
    )  # fmt: skip
    print(f"{place}: {', '.join(sorted(path.name for path in place.iterdir()))}")


def leave(code: int) -> None:
    """End the process at once: a thread may be inside a receive that will never be answered."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
