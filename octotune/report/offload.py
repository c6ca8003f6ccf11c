"""The table of copies: what leaves each stage, and what its way there and back costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from octotune.offload.usage import usage_of
from octotune.report.fill import console
from octotune.report.style import plain_table
from octotune.report.words import count, milliseconds, size

if TYPE_CHECKING:
    from octotune.contract import Plan
    from octotune.offload.measured import MeasuredOffload
    from simulator.timeline import Timeline


_MOST_NOTES = 12


def offload_table(plan: Plan, timeline: Timeline) -> Table | None:
    """Return one row a device with copies; None where the plan has none.

    k is a round trip over a stage's forward and backward, smallest and largest of the device;
    "late" is how long backwards waited for reloads with everything else there. Where devices
    share a link, its two sides are shown.
    """
    if timeline.copies is None or not len(timeline.copies.codes):
        return None
    usage = usage_of(timeline)
    costs = timeline.costs
    shared = np.bincount(costs.host_link).max() > 1
    table = plain_table("Offload")
    for name in ("device", "stages", "copied", "k", "moved", "lane busy"):
        table.add_column(name, justify="right", no_wrap=True)
    if shared:
        table.add_column("link out, back", justify="right", no_wrap=True)
    table.add_column("late ms", justify="right", no_wrap=True)
    table.add_column("waits for", justify="right", no_wrap=True)
    for device in np.flatnonzero(usage.moved_bytes).tolist():
        stages = np.flatnonzero((costs.stage_device == device) & (usage.copied > 0))
        trips = usage.trip_share[stages]
        every = int((costs.stage_device == device).sum()) * costs.num_microbatches
        late = usage.late_ns[stages]
        cells = [
            str(device),
            " ".join(map(str, stages.tolist()[:6])) + (" ..." if len(stages) > 6 else ""),
            f"{int(usage.copied[stages].sum())} of {every}",
            _range(trips.tolist()),
            size(int(usage.moved_bytes[device])),
            f"{usage.lane_busy[device]:.0%}",
        ]
        if shared:
            out, back = usage.link_busy[int(costs.host_link[device])]
            cells.append(f"{out:.0%}, {back:.0%}")
        cells.append(milliseconds(int(late.sum())))
        cells.append(f"stage {stages[late.argmax()]}" if late.any() else "nothing")
        table.add_row(*cells)
    return table


def measured_offload_tables(devices: Sequence[MeasuredOffload]) -> list[Table]:
    """Return what copies did in real steps: a row a device, and what was late or stayed."""
    table = plain_table("Offload as measured")
    names = ("device", "saved peak", "plan", "copied", "k", "plan", "moved", "lane busy", "host")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for found in devices:
        moving = [stage for stage in found.stages if stage.copied]
        table.add_row(
            str(found.device),
            size(found.saved_peak_bytes),
            size(found.planned_saved_peak_bytes),
            f"{sum(s.copied for s in found.stages)} of {sum(s.planned for s in found.stages)}",
            _range([stage.k for stage in moving if stage.k is not None]),
            _range([stage.planned_k for stage in moving]),
            size(found.moved_bytes),
            f"{found.lane_busy:.0%}",
            size(found.host_peak_bytes),
        )
    tables = [table]
    rows = [
        (
            str(found.device),
            late.copy,
            str(late.steps),
            f"late by up to {milliseconds(late.most_ns)} ms",
        )
        for found in devices
        for late in found.late
    ] + [
        (str(found.device), kept.copy, str(kept.steps), f"stayed: {kept.why}")
        for found in devices
        for kept in found.kept
    ]
    if rows:
        notes = plain_table("Copies late or not made")
        for name in ("device", "copy", "steps"):
            notes.add_column(name, justify="right", no_wrap=True)
        notes.add_column("what")
        for row in rows[:_MOST_NOTES]:
            notes.add_row(*row)
        if len(rows) > _MOST_NOTES:
            notes.add_row("", "", "", f"and {len(rows) - _MOST_NOTES} more (report.json)")
        tables.append(notes)
    return tables


def print_measured_offload(devices: Sequence[MeasuredOffload]) -> None:
    """Print what copies did in real steps."""
    out = console()
    for table in measured_offload_tables(devices):
        out.print(table)


def _range(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def print_host_link(facts: Mapping[str, float]) -> None:
    """Print what `octotune.model.host_link.link_facts` gives, a line each."""
    others = count(int(facts["neighbours"]), "neighbour")
    words = {
        "out": "out, alone",
        "back": "back, alone",
        "both": "each of both at once",
        "out_beside": f"out, {others} copying",
        "back_beside": f"back, {others} copying",
        "offload_bandwidth": "offload_bandwidth",
    }
    for name, said in words.items():
        print(f"{said:<28} {facts[name] / 1e9:8.2f} GB/s")
    if "offloadable_share" in facts:
        print(f"{'saved bytes that may leave':<28} {100 * facts['offloadable_share']:8.1f} %")
