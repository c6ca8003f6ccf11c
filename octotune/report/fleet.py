"""Fleets as tables and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from octotune.report.fill import console, long_time
from octotune.report.words import duration, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from octotune.fill.fleet import FleetReport
    from simulator.fleet import FleetResult

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#332288")
_MAIN, _IDLE = "#B8BEC6", "#EFEFEF"
_PARTS = 120


def numbers(report: FleetReport) -> dict[str, Any]:
    """Return what a fleet came to, as plain numbers with their units in the names."""
    from simulator.fleet import Status

    result = report.result
    found: dict[str, Any] = {
        "name": report.name,
        "policy": report.policy,
        "gpus": report.num_gpus,
        "step_ns": result.fleet.step_ns,
        "duration_ns": result.duration_ns,
        "main_share": report.main_share,
        "fill_share": report.fill_share,
        "filled_fraction": report.filled_fraction,
        "occupied_share": result.occupied_share,
        "main_slowdown": report.slowdown.mean if report.slowdown else None,
        "gpus_saved": report.gpus_saved,
        "jobs": result.trace.num_jobs,
        "mean_completion_ns": round(result.mean_completion_ns),
        "makespan_ns": result.makespan_ns,
        "deadlines": result.num_deadlines,
        "deadlines_met": result.deadlines_met,
        "failures": int(result.failures.sum()),
        "moves": int(result.moves.sum()),
    }
    for status in Status:
        found[status.name.lower()] = int((result.status == status).sum())
    return found


def fleet_table(report: FleetReport) -> Table:
    """Return what a fleet came to, a line each."""
    result, found = report.result, numbers(report)
    table = Table(
        title=report.name or "Fleet", title_justify="left", title_style="bold", show_header=False
    )
    table.add_column()
    table.add_column(justify="right")
    slow = report.slowdown
    rows = [
        ("GPUs", f"{report.num_gpus:,}"),
        ("main step", duration(result.fleet.step_ns)),
        ("simulated", long_time(result.duration_ns)),
        ("main job computes", percent(report.main_share, 1)),
        ("fill jobs compute", percent(report.fill_share, 1)),
        ("of the bubbles filled", percent(report.filled_fraction, 1)),
        (
            "main job slower by",
            f"{100 * slow.mean:.2f} %" if slow else "not known with shared NICs",
        ),
        ("GPUs saved", f"{report.gpus_saved:,.0f}"),
        ("policy", report.policy),
        ("jobs done", f"{found['done']:,} of {found['jobs']:,}"),
        ("cancelled, given up", f"{found['cancelled']:,}, {found['failed']:,}"),
        ("failures, moves", f"{found['failures']:,}, {found['moves']:,}"),
        ("mean completion", long_time(result.mean_completion_ns)),
        ("makespan", long_time(result.makespan_ns)),
        ("deadlines met", f"{result.deadlines_met:,} of {result.num_deadlines:,}"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def kind_table(report: FleetReport) -> Table:
    """Return one row a kind of job: what it makes in bubbles against a GPU of its own."""
    from simulator.fleet import Status

    table = Table(title="Kinds of jobs", title_justify="left", title_style="bold")
    for name in ("kind", "stages it fits", "of a GPU alone", "jobs done", "mean completion"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    result = report.result
    step_ns = result.fleet.step_ns
    for number, (model, kind) in enumerate(report.jobs.kinds):
        row = report.packings[number]
        rates = [p.samples_per_step * report.alone_ns[number] / step_ns for p in row if p]
        of = result.trace.kind == number
        done = of & (result.status == Status.DONE)
        times = (result.end_ns - result.trace.arrival_ns)[done]
        table.add_row(
            f"{model.name} {kind}",
            f"{len(rates)} of {len(row)}",
            f"{percent(min(rates), 1)} to {percent(max(rates), 1)}" if rates else "",
            f"{int(done.sum()):,} of {int(of.sum()):,}",
            long_time(float(times.mean())) if len(times) else "",
        )
    return table


def print_fleet(report: FleetReport) -> None:
    """Print a fleet on standard output."""
    out = console()
    out.print(fleet_table(report))
    out.print(kind_table(report))


def fleet_picture(report: FleetReport, path: str | Path) -> None:
    """Draw where GPU time goes by stage, occupancy over time, and completion times by kind."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.6), dpi=130, facecolor="white", layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _draw_stages(left, report)
    result = report.result
    hours = result.duration_ns / 3600e9
    shares = 100 * result.occupied_by_time(_PARTS)
    middle.fill_between(np.linspace(0, hours, _PARTS), shares, color=_COLOURS[0], alpha=0.35)
    middle.plot(np.linspace(0, hours, _PARTS), shares, color=_COLOURS[0], lw=1.2)
    middle.set(xlim=(0, max(hours, 1e-9)), ylim=(0, 103), xlabel="hours", ylabel="% of GPUs")
    middle.set_title("GPUs with a fill job", loc="left", fontsize=10)
    colours = list(dict.fromkeys(model.name for model, _ in report.jobs.kinds))
    for number, (model, kind) in enumerate(report.jobs.kinds):
        _draw_completion(
            right,
            result,
            result.trace.kind == number,
            f"{model.name} {kind}",
            colours.index(model.name),
            "-" if kind == "inference" else "--",
        )
    right.set(xlabel="hours from arrival to end", ylabel="% of the jobs done", ylim=(0, 102))
    right.set_xscale("log")
    right.set_title("Completion times", loc="left", fontsize=10)
    right.legend(fontsize=6.5, frameon=False)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.suptitle(
        f"{report.name or 'fleet'}: {report.num_gpus:,} GPUs, {report.policy}", fontsize=11
    )
    figure.savefig(path)


def policies_picture(named: Mapping[str, Mapping[str, FleetResult]], path: str | Path) -> None:
    """Draw policies against each other: a row for each load, by policy.

    Completion times as shares of all jobs, and mean completion, makespan and deadlines as bars
    relative to the best.
    """
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(13, 3.4 * len(named)), dpi=130, facecolor="white", layout="constrained"
    )
    grid = figure.subplots(len(named), 2, squeeze=False, width_ratios=(1.2, 1))
    for (load, results), (left, right) in zip(named.items(), grid, strict=True):
        for number, (policy, result) in enumerate(results.items()):
            _draw_completion(left, result, result.done, policy, number, "-")
        left.set_xscale("log")
        left.set(xlabel="hours from arrival to end", ylabel="% of the jobs", ylim=(0, 102))
        left.set_title(f"{load}: completion times", loc="left", fontsize=10)
        left.legend(fontsize=8, frameon=False)
        measures: dict[str, list[float]] = {
            "mean completion": [r.mean_completion_ns for r in results.values()],
            "makespan": [float(r.makespan_ns) for r in results.values()],
            "deadlines missed": [
                float(r.num_deadlines - r.deadlines_met) for r in results.values()
            ],
        }
        width = 0.8 / len(results)
        for place, values in enumerate(measures.values()):
            most = max(*values, 1e-9)
            for number, value in enumerate(values):
                x = place + (number - (len(values) - 1) / 2) * width
                right.bar(x, value / most, width * 0.92, color=_COLOURS[number])
                label = f"{value:.0f}" if place == 2 else long_time(value)
                right.text(
                    x,
                    value / most + 0.02,
                    label,
                    ha="center",
                    va="bottom",
                    fontsize=6.5,
                    rotation=90,
                )
        right.set_xticks(range(len(measures)), list(measures), fontsize=8.5)
        right.set(ylim=(0, 1.35), yticks=[])
        right.set_title(f"{load}: shorter is better", loc="left", fontsize=10)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=8)
    figure.savefig(path)


def _draw_completion(
    axes: Axes, result: FleetResult, which: Any, label: str, colour: int, style: str
) -> None:
    done = which & result.done
    if not done.any():
        return
    hours = np.sort((result.end_ns - result.trace.arrival_ns)[done]) / 3600e9
    axes.plot(
        np.maximum(hours, 1e-4),
        100 * np.arange(1, len(hours) + 1) / int(which.sum()),
        style,
        color=_COLOURS[colour % len(_COLOURS)],
        lw=1.3,
        label=label,
    )


def _draw_stages(axes: Axes, report: FleetReport) -> None:
    """Draw how each stage's devices spend the time: main job, fill jobs, nothing."""
    result, timeline = report.result, report.timeline
    stages = result.fleet.num_classes
    main = 100 * timeline.busy_ns / timeline.step_ns
    per_sample = np.array(
        [[p.busy_ns / p.samples if p else 0.0 for p in row] for row in report.packings]
    )
    of = result.fleet.device_class[result.run_device]
    filled = np.zeros(stages)
    kind = result.trace.kind[result.run_job]
    np.add.at(filled, of, result.run_samples * per_sample[kind, of])
    devices = np.bincount(result.fleet.device_class, minlength=stages)
    filled *= 100 / np.maximum(1, devices * result.duration_ns)
    x = np.arange(stages)
    axes.bar(x, main, color=_MAIN, label="main job")
    axes.bar(x, filled, bottom=main, color=_COLOURS[0], label="fill jobs")
    axes.bar(x, 100 - main - filled, bottom=main + filled, color=_IDLE, label="idle")
    axes.set(xlabel="device of the pipeline", ylabel="% of the time", ylim=(0, 118))
    axes.set_yticks(range(0, 101, 20))
    axes.set_title("Where the time goes", loc="left", fontsize=10)
    axes.legend(fontsize=7.5, ncols=3, frameon=False, loc="upper left")
