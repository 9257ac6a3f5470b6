"""Acceptance as a picture: by position in the block, by prompt length and by task."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflashdist.config import InputError
from dflashdist.eval.report import format_number


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
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise InputError(f"{path}: the figure cannot be written: no permission")


def draw_figure(reports: Sequence[dict[str, Any]], path: str | Path) -> None:
    """`make_figure` as a PNG. Raises InputError where it cannot be written."""
    check_figure(path)
    try:
        make_figure(reports).savefig(path, format="png", dpi=150)
    except OSError as error:
        raise InputError(f"{path}: the figure cannot be written ({error})") from error


def make_figure(reports: Sequence[dict[str, Any]]) -> Any:
    """Acceptance by position in the block, by prompt length and, of several, by task.

    Of each drafter's clean answers, with their 95 % intervals; of all where none is clean. Returns
    a matplotlib Figure, which must be there.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lengths = {(one["from"], one["to"]) for report in reports for one in report["by_prompt_length"]}
    buckets = [f"{low}-{high}" for low, high in sorted(lengths)]
    tasks = sorted({task for report in reports for task in report["by_task"]})
    num_panels = 3 if len(tasks) > 1 else 2
    figure = Figure(figsize=(5.2 * num_panels, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, num_panels)
    for i, report in enumerate(reports):
        kind = "clean" if report["clean"]["passes"] else "all"
        part, drafts = report[kind], range(1, report["num_drafts"] + 1)
        length = format_number(part["acceptance_length"], part["acceptance_length_interval"])
        name = f"{Path(report['checkpoint']).name}: {length}, {kind} answers"
        shift = 0.1 * (i - (len(reports) - 1) / 2)  # so that drafters do not hide each other
        values, intervals = part["position_acceptance"], part["position_acceptance_interval"]
        points = {k: (values[k - 1], intervals[k - 1]) for k in drafts}
        _draw(panels[0], points, shift, f"C{i}o-", name)
        by_bucket = {f"{one['from']}-{one['to']}": one[kind] for one in report["by_prompt_length"]}
        by_task = {task: one[kind] for task, one in report["by_task"].items()}
        for panel, names, groups in zip(
            panels[1:], (buckets, tasks), (by_bucket, by_task), strict=False
        ):
            points = {
                names.index(name): (one["acceptance_length"], one["acceptance_length_interval"])
                for name, one in groups.items()
            }
            _draw(panel, points, shift, f"C{i}o")
    panels[0].set(
        xlabel="draft in the block", ylabel="share accepted, all before it too", ylim=(-0.02, 1.02)
    )
    panels[0].set_xticks(range(1, 1 + max(report["num_drafts"] for report in reports)))
    panels[0].legend(fontsize="small")
    for panel, names, axis in zip(
        panels[1:], (buckets, tasks), ("prompt length [tokens]", "task"), strict=False
    ):
        panel.set(xlabel=axis, ylabel="acceptance length [tokens a pass]")
        panel.set_xticks(range(len(names)), names, rotation=30)
        panel.set_xlim(-0.5, len(names) - 0.5)
        panel.axhline(1, color="grey", linestyle="--", linewidth=1)  # plain decoding
        panel.set_ylim(bottom=0.9)
    for panel in panels:
        panel.grid(alpha=0.3)
    return figure


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
