"""Fill plans as tables and pictures: main work, fill work, and what is still idle."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from octotune.report.words import count, duration, percent

if TYPE_CHECKING:
    from octotune.fill.plan import FillPlan
    from simulator.timeline import Timeline

_MOST_ROWS = 24
_MAIN = "#B8BEC6"
_OPTIMIZER = "#7C858F"
_KEPT = "#F4E3B2"  # of a bubble that is not handed over
# Okabe and Ito's, which people with any colour vision tell apart
_JOBS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#332288")


def job_table(fill: FillPlan) -> Table:
    """Return one row a job: where it runs, in which configuration, and when it is done."""
    table = Table(title="Fill jobs", title_justify="left", title_style="bold")
    table.add_column("job", overflow="ellipsis", no_wrap=True, max_width=28)
    table.add_column("kind")
    table.add_column("device", justify="right")
    table.add_column("configuration", overflow="ellipsis", no_wrap=True, max_width=38)
    table.add_column("samples a step", justify="right")
    table.add_column("steps", justify="right")
    table.add_column("done at", justify="right")
    table.add_column("deadline", justify="right")
    for run in fill.runs[:_MOST_ROWS]:
        packing = fill.packings[run.packing]
        job, end = fill.jobs[packing.job], fill.predicted.end_ns[packing.job]
        late = end is None or (job.deadline_ns is not None and end > job.deadline_ns)
        deadline = (
            ""
            if job.deadline_ns is None
            else f"{long_time(job.deadline_ns)}{', missed' if late else ''}"
        )
        table.add_row(
            job.name,
            job.kind,
            str(packing.device),
            fill.configuration(packing).label,
            f"{packing.samples / len(packing.steps):,.1f}",
            f"{run.begin:,} to {run.end:,}",
            "not" if end is None else long_time(end),
            deadline,
        )
    if len(fill.runs) > _MOST_ROWS:
        table.caption = f"and {count(len(fill.runs) - _MOST_ROWS, 'run')} more"
    return table


def bubble_lines(fill: FillPlan) -> list[str]:
    """Return what the bubbles come to, in two lines."""
    bubbles = [bubble for row in fill.bubbles for bubble in row]
    total = sum(bubble.end_ns - bubble.start_ns for bubble in bubbles)
    usable = sum(bubble.usable_ns for bubble in bubbles)
    longest = max((bubble.end_ns - bubble.start_ns for bubble in bubbles), default=0)
    return [
        f"{count(len(bubbles), 'bubble')} of at least {duration(fill.margins.threshold_ns)} in a "
        f"step of {duration(fill.predicted.step_ns)}, the longest {duration(longest)}; "
        f"{percent(usable, total)} of their time is handed over",
        f"{percent(fill.predicted.filled_fraction, 1)} of all idle time is fill work, over "
        f"{count(fill.predicted.steps, 'step')}",
    ]


def print_fill(fill: FillPlan) -> None:
    """Print a fill plan on standard output."""
    out = console()
    out.print(job_table(fill))
    for line in bubble_lines(fill):
        out.print(line)


def console() -> Console:
    """Return where tables go: standard output, wide enough where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def long_time(time_ns: float) -> str:
    """Return a time of up to many days: `3.2 h`."""
    for factor, unit in ((86400e9, "days"), (3600e9, "h"), (60e9, "min")):
        if time_ns >= 2 * factor:
            return f"{time_ns / factor:,.1f} {unit}"
    return duration(time_ns)


def fill_picture(
    fill: FillPlan, path: str | Path, *, timeline: Timeline | None = None, step: int = 0
) -> None:
    """Draw one main step with its fill work: one row a device, fill work over the bubbles.

    Args:
        fill: a fill plan.
        path: the image file; the ending says which kind.
        timeline: of the main plan, where it is known already.
        step: which main step.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    if timeline is None:
        from octotune.check import check

        timeline = check(fill.plan).timeline
    rows = timeline.schedule.num_devices
    scale, unit = (1e9, "s") if timeline.step_ns >= 10**10 else (1e6, "ms")
    height = min(0.36, 12 / rows) * rows
    figure = Figure(figsize=(14, height + 1.5), dpi=150, facecolor="white")
    axes = figure.add_axes((0.055, 0.95 / (height + 1.5), 0.935, height / (height + 1.5)))

    def draw(boxes: list[tuple[float, float, float]], tall: float, **style: Any) -> None:
        if boxes:
            array = np.array(boxes)
            begin, end, row = array.T
            low, high = row - tall / 2, row + tall / 2
            corners = np.stack(
                [
                    np.stack(corner, axis=-1)
                    for corner in ((begin, low), (end, low), (end, high), (begin, high))
                ],
                axis=1,
            )
            axes.add_collection(PolyCollection(list(corners), **style))

    main: list[tuple[float, float, float]] = []
    optimizer: list[tuple[float, float, float]] = []
    for device in range(rows):
        row = slice(
            int(timeline.schedule.offsets[device]), int(timeline.schedule.offsets[device + 1])
        )
        main += [
            (start / scale, end / scale, float(device))
            for start, end in zip(
                timeline.start_ns[row].tolist(), timeline.end_ns[row].tolist(), strict=True
            )
        ]
        start, end = (
            int(timeline.optimizer_start_ns[device]),
            int(timeline.optimizer_end_ns[device]),
        )
        if end > start:
            optimizer.append((start / scale, end / scale, float(device)))
    kept = [
        (bubble.start_ns / scale, bubble.end_ns / scale, float(device))
        for device, bubbles in enumerate(fill.bubbles)
        for bubble in bubbles
    ]
    edge: dict[str, Any] = {"edgecolors": "white", "linewidths": 0.3}
    draw(kept, 0.82, facecolors=_KEPT, edgecolors="none")
    draw(main, 0.82, facecolors=_MAIN, **edge)
    draw(optimizer, 0.82, facecolors=_OPTIMIZER, **edge)
    legend = [
        Patch(facecolor=_MAIN, label="main job"),
        Patch(facecolor=_KEPT, label="bubble: margin, or no job"),
        Patch(facecolor="white", edgecolor="#888888", label="idle, too short"),
    ]
    if optimizer:
        legend.insert(1, Patch(facecolor=_OPTIMIZER, label="optimizer"))
    by_job: dict[int, list[tuple[float, float, float]]] = {}
    for run in fill.runs:
        if not run.begin <= step < run.end:
            continue
        packing = fill.packings[run.packing]
        micro = fill.configuration(packing).micro_steps
        orders = packing.steps[(step - run.begin) % len(packing.steps)]
        for bubble, order in zip(fill.bubbles[packing.device], orders, strict=True):
            at = bubble.start_ns + fill.margins.switch_ns // 2
            for k in order:
                box = (at / scale, (at + micro[k].time_ns) / scale, float(packing.device))
                by_job.setdefault(packing.job, []).append(box)
                at += micro[k].time_ns
    for number, (job, boxes) in enumerate(sorted(by_job.items())):
        colour = _JOBS[number % len(_JOBS)]
        # an outline that is as wide as the box would leave nothing of its colour
        width = 900 * float(np.median([end - start for start, end, _ in boxes]))
        line = 0.3 if width * scale > 4 * timeline.step_ns else 0.0
        draw(
            boxes, 0.62, facecolors=colour, edgecolors="white" if line else "none", linewidths=line
        )
        if number < len(_JOBS):
            legend.append(Patch(facecolor=colour, label=fill.jobs[job].name[:24]))
    axes.set_xlim(0, timeline.step_ns / scale)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_yticks(range(rows), [f"device {row}" for row in range(rows)], fontsize=7.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time in step {step}, {unit}", fontsize=8.5)
    axes.set_title(
        f"{duration(timeline.step_ns)}, {percent(timeline.bubble_fraction, 1)} bubbles, "
        f"{percent(fill.predicted.filled_fraction, 1)} of them filled over "
        f"{count(fill.predicted.steps, 'step')}",
        loc="left",
        fontsize=9.5,
    )
    figure.legend(
        handles=legend,
        loc="lower left",
        ncols=6,
        fontsize=7.5,
        frameon=False,
        bbox_to_anchor=(0.05, 0),
    )
    figure.savefig(path)
