"""The plan in numbers: what a run will do, measured on the plan itself before anything is started.

Everything but the steps is measured over the whole first epoch, in integers; nothing is quoted.
A file of row lengths is enough for it, so that one can plan before preparing.
"""

from pathlib import Path
from typing import Any

import numpy as np

from dflashdist.config import InputError
from dflashdist.schedule.mix import step_mix
from dflashdist.schedule.order import deviation_bound, share_deviation
from dflashdist.schedule.stream import Steps, Stream

MESSAGE_EXTRA_BYTES = 80  # header and trailer, beside a micro-batch's hidden states
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def read_lengths(path: str | Path, max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Row lengths and supervised counts, int64 [N] each, of an integer .npy file [N] or [2, N].

    [2, N] holds lengths, then supervised tokens a row; of [N] every token counts as supervised.
    Rows over `max_length` tokens count as cut to it, and their supervised tokens likewise.
    Raises InputError naming the file and the fix.
    """
    expected = "an integer .npy array [N] of lengths, or [2, N] with the supervised counts"
    try:
        table = np.load(path, allow_pickle=False)
    except OSError as error:
        raise InputError(
            f"data.lengths={path}: {error.strerror or error}; give {expected}"
        ) from error
    except (ValueError, EOFError) as error:
        raise InputError(
            f"data.lengths={path}: not a readable .npy file; give {expected}"
        ) from error
    if not isinstance(table, np.ndarray):
        table.close()
        raise InputError(f"data.lengths={path}: an archive of arrays; give {expected}")
    if not np.issubdtype(table.dtype, np.integer):
        raise InputError(f"data.lengths={path}: dtype {table.dtype}; give {expected}")
    if table.size == 0 or not (table.ndim == 1 or (table.ndim == 2 and len(table) == 2)):
        raise InputError(f"data.lengths={path}: shape {list(table.shape)}; give {expected}")
    lengths, supervised = (table, table) if table.ndim == 1 else table
    for wrong, what, fix in (
        (lengths < 1, "a length of", "lengths are at least 1: drop such rows"),
        (supervised < 0, "a supervised count of", "counts are at least 0"),
        (supervised > lengths, "a supervised count of", "it must not exceed the row's length"),
    ):
        if wrong.any():
            row = int(wrong.argmax())
            value = (lengths if what == "a length of" else supervised)[row]
            raise InputError(f"data.lengths={path}: row {row} has {what} {value}; {fix}")
    return (
        np.minimum(lengths, max_length).astype(np.int64),
        np.minimum(supervised, max_length).astype(np.int64),
    )


def plan_report(
    stream: Stream, *, queue_depth: int, num_states: int, hidden_size: int | None, dtype: str
) -> dict[str, Any]:
    """The plan's numbers, ready for JSON; `print_report` shows them to a person.

    queue_depth: micro-batches that may be published and unconsumed. num_states: states that are
    sent of a token, of `hidden_size` numbers of `dtype`; hidden_size None: the target is unknown,
    which leaves the byte counts None. Shares, gaps and padding are those of the first epoch;
    step_imbalance, wasted_fraction and step_mix those of its steps, the first 2,000 at most.
    max_gap takes the epoch as a ring. queue_bytes is the most that `queue_depth` consecutive
    messages hold, an exact window over the epoch as a ring, or over a round of evaluation;
    queue_bytes_bound is queue_depth times the largest message, which holds in any order.
    """
    steps, plan = stream.steps, stream.steps.plan
    epoch = plan.epoch(0)
    padded, real = int(epoch.padded_tokens.sum()), int(epoch.num_tokens.sum())
    deviation = share_deviation(epoch.bucket, plan.micro_batches_per_bucket)
    return {
        "num_rows": plan.num_rows,
        "num_buckets": plan.num_buckets,
        "bucket_edges": list(plan.edges),
        "rows_per_bucket": list(plan.rows_per_bucket),
        "micro_batches_per_bucket": list(plan.micro_batches_per_bucket),
        "max_gap": plan.max_gaps,
        "micro_batches_per_epoch": plan.micro_batches_per_epoch,
        "num_tokens": real,
        "padded_tokens": padded,
        "padding_efficiency": real / padded,
        "num_anchors": int(epoch.num_anchors.sum()),
        "anchor_efficiency": int(epoch.num_anchors.sum()) / max(1, int(epoch.padded_anchors.sum())),
        "max_micro_batch": {
            "rows": int(epoch.num_rows.max()),
            "padded_tokens": int(epoch.padded_tokens.max()),
            "num_tokens": int(epoch.num_tokens.max()),
            "padded_anchors": int(epoch.padded_anchors.max()),
        },
        "max_share_deviation": float(deviation),
        "share_deviation_bound": float(deviation_bound(plan.num_buckets)),
        "num_drafters": steps.num_drafters,
        "accumulation_steps": steps.accumulation,
        "micro_batches_per_step": steps.window,
        "steps": steps.num_steps,
        "epochs": steps.end / plan.micro_batches_per_epoch,
        **_balance(steps),
        **step_mix(steps),
        "evaluation": _rounds(stream),
        **_memory(stream, queue_depth, num_states, hidden_size, dtype),
        "fingerprint": plan.fingerprint,
    }


def _balance(steps: Steps) -> dict[str, Any]:
    """How even the drafters' loads are, and what share of their time is padding and waiting.

    step_imbalance: the mean over steps of max / mean planned cost of a drafter. wasted_fraction:
    1 - work / (drafters x slowest drafter), both summed over the steps; work is a micro-batch's
    cost without its padded tokens (anchor_efficiency tells of padded anchors).
    """
    plan = steps.plan
    measured = steps.num_measured
    imbalance, slowest, real_work = 0.0, 0, 0
    for step in range(measured):
        seqs = steps.seqs(step)
        costs = plan.column("cost", seqs).tolist()
        padding = plan.column("padded_tokens", seqs) - plan.column("num_tokens", seqs)
        loads = [sum(costs[seq - seqs.start] for seq in slot) for slot in steps.slots(step)]
        imbalance += max(loads) * steps.num_drafters / sum(loads)
        slowest += max(loads)
        real_work += sum(costs) - int(padding.sum())
    return {
        "measured_steps": measured,
        "step_imbalance": imbalance / measured,
        "wasted_fraction": 1 - real_work / (steps.num_drafters * slowest),
    }


def _rounds(stream: Stream) -> dict[str, Any] | None:
    """The rounds of evaluation, if the run has any."""
    if stream.rounds is None:
        return None
    steps = range(1, stream.steps.num_steps + 1)
    return {
        "every": stream.rounds.every,
        "rounds": sum(map(stream.due, steps)),
        "num_rows": stream.rounds.plan.num_rows,
        "micro_batches": stream.round_size,
    }


def _memory(
    stream: Stream, depth: int, num_states: int, hidden_size: int | None, dtype: str
) -> dict[str, Any]:
    keys = ("max_message_bytes", "mean_message_bytes", "queue_bytes", "queue_bytes_bound")
    known = {"queue_depth": depth, "dtype": dtype}
    if hidden_size is None:
        return known | dict.fromkeys(keys)
    token_bytes = num_states * hidden_size * BYTES[dtype]
    plans = [stream.steps.plan, *([stream.rounds.plan] if stream.rounds else [])]
    messages = [plan.epoch(0).num_tokens * token_bytes + MESSAGE_EXTRA_BYTES for plan in plans]
    largest = max(int(sizes.max()) for sizes in messages)
    queued = max(_max_window(sizes, depth) for sizes in messages)
    values = (largest, float(messages[0].mean()), queued, depth * largest)
    return known | dict(zip(keys, values, strict=True))


def _max_window(values: np.ndarray, width: int) -> int:
    """The largest sum of `width` consecutive values of a ring, which it may go round many times."""
    rounds, rest = divmod(width, len(values))
    sums = np.concatenate([[0], np.cumsum(np.concatenate([values, values[:rest]]))])
    return rounds * int(values.sum()) + int((sums[rest:] - sums[: len(sums) - rest]).max())


def print_report(report: dict[str, Any]) -> str:
    """The report as text: the buckets as a table, then the totals."""
    micro_batches = report["micro_batches_per_epoch"]
    lines = [f"{'edge':>8} {'rows':>12} {'micro-batches':>14} {'share':>7} {'max gap':>8}"]
    columns = ("bucket_edges", "rows_per_bucket", "micro_batches_per_bucket", "max_gap")
    for edge, rows, count, gap in zip(*(report[name] for name in columns), strict=True):
        share = count / micro_batches
        lines.append(f"{edge:>8} {rows:>12,} {count:>14,} {share:>7.1%} {gap:>8,}")
    lines += ["", *(f"{name:<26} {value}" for name, value in _totals(report))]
    return "\n".join([*lines, *(f"NOTE: {note}" for note in report.get("notes", ()))])


def _totals(report: dict[str, Any]) -> list[tuple[str, str]]:
    largest = report["max_micro_batch"]
    drafters, each = report["num_drafters"], report["accumulation_steps"]
    queue = "unknown: target.path gives no hidden size"
    if report["queue_bytes"] is not None:
        queue = (
            f"{_size(report['queue_bytes'])} for {report['queue_depth']} micro-batches, "
            f"never over {_size(report['queue_bytes_bound'])}"
        )
    message = "unknown"
    if report["max_message_bytes"] is not None:
        mean = _size(report["mean_message_bytes"])
        message = f"{_size(report['max_message_bytes'])} at most, {mean} on average"
    return [
        *_ranks(report),
        ("rows", f"{report['num_rows']:,}"),
        ("tokens", f"{report['num_tokens']:,} real, {report['padded_tokens']:,} padded"),
        ("padding efficiency", f"{report['padding_efficiency']:.4f}"),
        ("anchors", f"{report['num_anchors']:,}, {report['anchor_efficiency']:.4f} of the padded"),
        ("micro-batches an epoch", f"{report['micro_batches_per_epoch']:,}"),
        (
            "largest micro-batch",
            f"{largest['rows']:,} rows, {largest['padded_tokens']:,} padded tokens, "
            f"{largest['padded_anchors']:,} padded anchors",
        ),
        (
            "share deviation",
            f"{report['max_share_deviation']:.4f} micro-batches at worst, "
            f"bound {report['share_deviation_bound']:.4f}",
        ),
        (
            "steps",
            f"{report['steps']:,} of {report['micro_batches_per_step']} micro-batches "
            f"({drafters} drafters x {each}), {report['epochs']:.2f} epochs",
        ),
        ("step imbalance", f"{report['step_imbalance']:.4f} max/mean cost of a drafter"),
        ("wasted", f"{report['wasted_fraction']:.2%} of the drafters' time, padding and waiting"),
        ("mix of a step", _mix(report)),
        ("evaluation", _evaluation(report["evaluation"])),
        ("message", f"{message} ({report['dtype']})"),
        ("queue", queue),
        ("fingerprint", report["fingerprint"]),
    ]


def _ranks(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The job's ranks, where the report is of a job."""
    if "num_ranks" not in report:
        return []
    number, drafters, targets = (report[f"num_{n}"] for n in ("ranks", "drafters", "targets"))
    what = f"split: {drafters} drafters, {targets} targets"
    if not targets:
        what = "colocated: each trains and runs the target itself"
    return [("ranks", f"{number} rank{'s' * (number > 1)}, {what}")]


def _evaluation(rounds: dict[str, Any] | None) -> str:
    if rounds is None:
        return "no rounds while training"
    return (
        f"{rounds['rounds']:,} rounds, every {rounds['every']:,} steps: {rounds['num_rows']:,} "
        f"held-out rows in {rounds['micro_batches']:,} micro-batches"
    )


def _mix(report: dict[str, Any]) -> str:
    mix, ratio = report["step_mix"], report["step_mix_vs_shuffle"]
    if ratio is None:
        return "nothing to compare: lengths all alike, or steps of whole epochs"
    return (
        f"{mix['mean']:.1%} off the corpus' lengths, {mix['worst']:.1%} at worst, "
        f"{mix['last_tenth']:.1%} at the end;\n{'':<27}{ratio:.2f} x what a plain shuffle of "
        f"rows gives ({mix['shuffle_mean']:.1%}, at worst {mix['shuffle_worst']:.1%})"
    )


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
