"""Acceptance as a picture: by position in the block, by prompt length and by task."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflashdist.config import InputError
from dflashdist.eval.report import format_number
from dflashdist.files import whole_file

_MADE_BY = b"dflashdist evaluate"  # in the file: another is not replaced


def check_figure(path: str | Path) -> None:
    """Raises InputError where matplotlib is missing, or a figure could not be written there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError("a figure needs matplotlib: pip install matplotlib") from error
    file = Path(path)
    folder = file.resolve().parent
    if file.is_dir():
        raise InputError(f"{path}: the figure cannot be written: it is a folder")
    if not folder.is_dir():
        raise InputError(f"{path}: the figure cannot be written: make the folder {folder} first")
    if file.is_file() and file.stat().st_size and _MADE_BY not in file.read_bytes()[:1024]:
        raise InputError(f"{path}: is there and no figure of `evaluate`: name another file")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise InputError(f"{path}: the figure cannot be written: no permission")


def draw_figure(reports: Sequence[dict[str, Any]], path: str | Path) -> None:
    """`make_figure` as a PNG. Raises InputError where it cannot be written."""
    check_figure(path)
    try:
        with whole_file(Path(path), "wb") as file:
            make_figure(reports).savefig(
                file, format="png", dpi=150, metadata={"Software": _MADE_BY.decode()}
            )
    except OSError as error:
        raise InputError(f"{path}: the figure cannot be written ({error})") from error


def make_figure(reports: Sequence[dict[str, Any]]) -> Any:
    """Acceptance by position in the block, by prompt length and, of several, by task.

    Of each drafter's clean answers, with their 95 % intervals; of all where none is clean. What no
    drafter has such answers of has no place in it, and is named below. Returns a matplotlib Figure,
    which must be there.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = ["clean" if report["clean"]["passes"] else "all" for report in reports]
    pairs = list(zip(reports, kinds, strict=True))
    by_length = [
        {(one["from"], one["to"]): one[kind] for one in report["by_prompt_length"]}
        for report, kind in pairs
    ]
    by_task = [
        {task: one[kind] for task, one in report["by_task"].items()} for report, kind in pairs
    ]
    groups = [("prompt length [tokens]", by_length)]
    if len({task for tasks in by_task for task in tasks}) > 1:
        groups.append(("task", by_task))
    figure = Figure(figsize=(5.2 * (1 + len(groups)), 4.9), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(reports[0]))
    panels = figure.subplots(1, 1 + len(groups))
    shifts = [0.1 * (i - (len(reports) - 1) / 2) for i in range(len(reports))]  # none hides another
    for i, (report, kind) in enumerate(pairs):
        part = report[kind]
        length = format_number(part["acceptance_length"], part["acceptance_length_interval"])
        name = "/".join(Path(report["checkpoint"]).parts[-3:])
        values, intervals = part["position_acceptance"], part["position_acceptance_interval"]
        points = dict(enumerate(zip(values, intervals, strict=True), 1))
        label = f"{name}: {length}, {part['num_answers']} {kind} answers"
        _draw(panels[0], points, shifts[i], f"C{i}o-", label)
    most = max(report["num_drafts"] for report in reports)
    panels[0].set(xlabel="draft in the block", ylabel="share accepted, all before it too")
    panels[0].set(xticks=range(1, 1 + most), xlim=(0.5, 0.5 + most), ylim=(-0.05, 1.05))
    for panel, (axis, parts) in zip(panels[1:], groups, strict=True):
        known = {
            key for of_one in parts for key, one in of_one.items()
            if one["acceptance_length"] is not None
        }  # fmt: skip
        names = sorted(known)
        missing = sorted({key for of_one in parts for key in of_one} - known)
        for i, of_one in enumerate(parts):
            points = {
                names.index(key): (one["acceptance_length"], one["acceptance_length_interval"])
                for key, one in of_one.items()
                if key in known
            }
            _draw(panel, points, shifts[i], f"C{i}o")
        without = f"\nno such answers: {', '.join(map(_written, missing))}" * bool(missing)
        panel.set(xlabel=axis + without, ylabel="acceptance length [tokens a target pass]")
        panel.set_xticks(range(len(names)), [*map(_written, names)], rotation=30)
        panel.set_xlim(-0.5, max(1, len(names)) - 0.5)
        panel.axhline(1, color="grey", linestyle="--", linewidth=1)  # plain decoding
        panel.margins(y=0.1)
        panel.set_ylim(bottom=0.9)
    for panel in panels:
        panel.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize="small")
    return figure


def _title(report: dict[str, Any]) -> str:
    """What was asked of which target, the same for all drafters of one evaluation."""
    target, prompts = (
        text if len(text) <= 50 else f".../{Path(text).name}"
        for text in (report["target"], report["prompts"])
    )
    temperature = report["temperature"]
    how = "greedy" if temperature == 0 else f"sampled at temperature {temperature:g}"
    return (
        f"Acceptance of drafts by {target}\n{report['num_prompts']} prompts of {prompts}, {how}, "
        f"answers of up to {report['max_new_tokens']} tokens"
    )


def _written(key: Any) -> str:
    return key if isinstance(key, str) else f"{key[0]}-{key[1]}"


Point = tuple[float | None, Sequence[float] | None]  # value and interval


def _draw(
    panel: Any, points: dict[int, Point], shift: float, form: str, label: str | None = None
) -> None:
    """Values with their intervals as error bars; those that are not known are left out."""
    known = {x: (y, low_high or (y, y)) for x, (y, low_high) in points.items() if y is not None}
    below = [max(0.0, y - low) for y, (low, _) in known.values()]
    above = [max(0.0, high - y) for y, (_, high) in known.values()]
    panel.errorbar(
        [x + shift for x in known],
        [y for y, _ in known.values()],
        yerr=[below, above],
        fmt=form,
        capsize=3,
        label=label,
    )
