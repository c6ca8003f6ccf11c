"""A run of fill jobs as a table and a picture: main work, fill work, and what was still idle."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from octotune.report.fill import console
from octotune.report.words import count, duration, percent
from simulator.actions import Kind, kind_of

if TYPE_CHECKING:
    from octotune.fill.outcome import FillOutcome
    from simulator.fills import FillSpan
    from simulator.timeline import Timeline

_MAIN = {Kind.F: "#C9CFD6", Kind.B: "#9AA4AE", Kind.I: "#AEB7C0", Kind.W: "#868F99"}
_WORDS = {
    Kind.F: "main job: forward",
    Kind.B: "backward",
    Kind.I: "input half",
    Kind.W: "weight half",
}
_OPTIMIZER = "#3B3B3B"
_IDLE = "#F4E3B2"
# Okabe and Ito's, which people with any colour vision tell apart
_JOBS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#332288")
_MOST_ROWS = 24


def outcome_table(outcome: FillOutcome) -> Table:
    """Return one row a job: what it did, against what was predicted and against running alone."""
    table = Table(title="Fill jobs as they ran", title_justify="left", title_style="bold")
    table.add_column("job", overflow="ellipsis", no_wrap=True, max_width=24)
    table.add_column("devices")
    table.add_column("status")
    table.add_column("samples", justify="right")
    table.add_column("predicted", justify="right")
    table.add_column("of alone's pace", justify="right")
    table.add_column("late returns", justify="right")
    table.add_column("latest", justify="right")
    for job in outcome.jobs[:_MOST_ROWS]:
        table.add_row(
            job.name,
            ", ".join(map(str, job.devices)) or "none",
            job.status,
            f"{job.samples:,}",
            f"{job.predicted_samples:,}",
            "" if job.slowdown is None else percent(1, job.slowdown),
            f"{job.late:,}",
            duration(job.worst_late_ns) if job.late else "",
        )
    if len(outcome.jobs) > _MOST_ROWS:
        table.caption = f"and {count(len(outcome.jobs) - _MOST_ROWS, 'job')} more"
    return table


def outcome_lines(outcome: FillOutcome) -> list[str]:
    """Return what it came to for the main job, and why jobs were stopped, a line each."""
    lines = [
        f"{percent(outcome.filled, 1)} of all bubble time was fill work, over "
        f"{count(outcome.filled_steps, 'filled step')}"
    ]
    slowdown = outcome.main_slowdown
    if outcome.step_ns is not None and outcome.plain_step_ns is not None and slowdown is not None:
        lines.append(
            f"main step {duration(outcome.step_ns)} with fill work, "
            f"{duration(outcome.plain_step_ns)} in {count(outcome.plain_steps, 'step')} without "
            f"({100 * slowdown:+.2f} %)"
        )
    again = sum(device.reprofiled for device in outcome.devices)
    if again:
        lines.append(f"bubbles drifted and were profiled again {count(again, 'time')}")
    lines += [f"{job.name} was stopped: {job.failure}" for job in outcome.jobs if job.failure]
    return lines


def print_outcome(outcome: FillOutcome) -> None:
    """Print a run of fill jobs on standard output."""
    out = console()
    out.print(outcome_table(outcome))
    for line in outcome_lines(outcome):
        out.print(line)


def idle_spans(
    timeline: Timeline, spans: Sequence[FillSpan], least_ns: int = 0
) -> list[tuple[int, int, int]]:
    """Return device, start and end of what neither the main job nor fill work used."""
    busy: list[list[tuple[int, int]]] = []
    end_ns = max([timeline.step_ns, *(span.end_ns for span in spans)])
    for device in range(timeline.schedule.num_devices):
        row = slice(*timeline.schedule.offsets[device : device + 2].tolist())
        found = list(
            zip(timeline.start_ns[row].tolist(), timeline.end_ns[row].tolist(), strict=True)
        )
        optimizer = int(timeline.optimizer_start_ns[device])
        found.append((optimizer, max(optimizer, int(timeline.optimizer_end_ns[device]))))
        found += [(span.start_ns, span.end_ns) for span in spans if span.device == device]
        busy.append(sorted(found))
    gaps = []
    for device, row_of in enumerate(busy):
        edges = [(0, 0), *row_of, (end_ns, end_ns)]
        reached = 0
        for (_, before), (start, _) in pairwise(edges):
            reached = max(reached, before)
            if start - reached > least_ns:
                gaps.append((device, reached, start))
    return gaps


def fill_run_picture(timeline: Timeline, spans: Sequence[FillSpan], path: str | Path) -> None:
    """Draw a measured step with the fill work in it: one row a device.

    Args:
        timeline: of the main job, measured.
        spans: fill work, from the start of the same step.
        path: the image file; the ending says which kind.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = timeline.schedule.num_devices
    end_ns = max([timeline.step_ns, *(span.end_ns for span in spans)])
    scale, unit = (1e9, "s") if end_ns >= 10**10 else (1e6, "ms")
    height = min(0.42, 12 / rows) * rows
    figure = Figure(figsize=(14, height + 1.55), dpi=150, facecolor="white")
    axes = figure.add_axes((0.055, 1.0 / (height + 1.55), 0.935, height / (height + 1.55)))

    def draw(boxes: Sequence[tuple[float, float, float]], tall: float, **style: Any) -> None:
        if not boxes:
            return
        begin, end, row = np.array(boxes, dtype=float).T
        low, high = row - tall / 2, row + tall / 2
        corners = np.stack(
            [
                np.stack(corner, axis=-1)
                for corner in (
                    (begin / scale, low),
                    (end / scale, low),
                    (end / scale, high),
                    (begin / scale, high),
                )
            ],
            axis=1,
        )
        axes.add_collection(PolyCollection(list(corners), **style))

    edge: dict[str, Any] = {"edgecolors": "white", "linewidths": 0.4}
    idle = idle_spans(timeline, spans)
    draw([(start, end, device) for device, start, end in idle], 0.3, facecolors=_IDLE, **edge)
    legend = []
    kinds = kind_of(timeline.schedule.codes)
    devices = np.repeat(np.arange(rows), np.diff(timeline.schedule.offsets))
    for kind, colour in _MAIN.items():
        chosen = np.flatnonzero(kinds == kind)
        boxes = [
            (float(timeline.start_ns[at]), float(timeline.end_ns[at]), float(devices[at]))
            for at in chosen.tolist()
        ]
        draw(boxes, 0.82, facecolors=colour, **edge)
        if boxes:
            legend.append(Patch(facecolor=colour, label=_WORDS[kind]))
    optimizer = [
        (float(start), float(end), float(device))
        for device, (start, end) in enumerate(
            zip(timeline.optimizer_start_ns, timeline.optimizer_end_ns, strict=True)
        )
        if end - start > end_ns / 2000
    ]
    draw(optimizer, 0.82, facecolors=_OPTIMIZER, edgecolors="none")
    if optimizer:
        legend.append(Patch(facecolor=_OPTIMIZER, label="optimizer"))
    names = sorted({span.job for span in spans})
    for number, name in enumerate(names):
        colour = _JOBS[number % len(_JOBS)]
        mine = [span for span in spans if span.job == name]
        boxes = [(float(s.start_ns), float(s.end_ns), float(s.device)) for s in mine]
        wide = 940 * float(np.median([s.end_ns - s.start_ns for s in mine])) / end_ns
        line = 0.4 if wide > 3 else 0.0
        draw(
            boxes, 0.62, facecolors=colour, edgecolors="white" if line else "none", linewidths=line
        )
        if number < len(_JOBS):
            legend.append(Patch(facecolor=colour, label=f"fill: {name[:24]}"))
    legend.append(Patch(facecolor=_IDLE, label="still idle"))
    idle_ns = sum(end - start for _, start, end in idle)
    fill_ns = sum(span.end_ns - span.start_ns for span in spans)
    axes.set_xlim(0, end_ns / scale)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_yticks(range(rows), [f"device {row}" for row in range(rows)], fontsize=7.5)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel(f"time in one measured step, {unit}", fontsize=8.5)
    total = rows * end_ns
    axes.set_title(
        f"{duration(timeline.step_ns)} as measured: {percent(total - idle_ns - fill_ns, total)} "
        f"main job, {percent(fill_ns, total)} fill work, {percent(idle_ns, total)} still idle",
        loc="left",
        fontsize=9.5,
    )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.legend(
        handles=legend,
        loc="lower left",
        ncols=8,
        fontsize=7.5,
        frameon=False,
        bbox_to_anchor=(0.05, 0),
    )
    figure.savefig(path)
