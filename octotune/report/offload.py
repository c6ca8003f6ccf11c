"""The table of copies: what leaves each stage, and what its way there and back costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from octotune.offload.usage import usage_of
from octotune.report.words import milliseconds, size

if TYPE_CHECKING:
    from octotune.contract import Plan
    from simulator.timeline import Timeline


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
    table = Table(title="Offload", title_justify="left")
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
        low, high = f"{trips.min():.2f}", f"{trips.max():.2f}"
        late = usage.late_ns[stages]
        cells = [
            str(device),
            " ".join(map(str, stages.tolist()[:6])) + (" ..." if len(stages) > 6 else ""),
            f"{int(usage.copied[stages].sum())} of {every}",
            low if low == high else f"{low} to {high}",
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
