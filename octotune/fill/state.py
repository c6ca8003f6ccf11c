"""The main job's optimizer state, away on the host while fill jobs run.

Between two updates Adam's moments lie idle. They leave the device while the step begins and are
back before its optimizer runs, on the same copy lane and host link as offloaded activations, which
come first: state moves in the gaps they leave.

    lane      [out ][O2][ out ]   [O3]        [R2][R3]   [ back ][R4][back]
    free bytes ................+state+state+state+state...................   [optimizer]

From the end of the way out to the start of the way back, all of the moved bytes are free; before
and after, none of them count as free. A device whose lane has no room for both ways keeps its
state. Devices that share a host link take its sides in turn, the lower device first.

Source:
    Arfeen et al. 2024, arXiv:2410.07192, main job offloading; the joint use of the link is ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from octotune.contract.costs import NS_PER_S, ceil_div
from simulator.actions import CopyKind, kind_of

if TYPE_CHECKING:
    from octotune.contract.plan import Plan
    from simulator.timeline import Timeline

Spans = list[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMove:
    """What moves of one device's state: away from 0 to `out_ns`, back from `back_ns` on.

    `copy_ns` is how long each way keeps the lane busy, in the gaps of other copies; it is back at
    `by_ns`, where the optimizer starts.
    """

    device: int
    num_bytes: int
    copy_ns: int
    out_ns: int
    back_ns: int
    by_ns: int

    def free_bytes(self, start_ns: int, end_ns: int) -> int:
        """Return what is free of the state during all of an interval."""
        return self.num_bytes if self.out_ns <= start_ns and end_ns <= self.back_ns else 0

    def lane_ns(self, start_ns: int, end_ns: int) -> int:
        """Return for how much of an interval either way may keep the lane busy, at most."""
        ways = ((0, self.out_ns), (self.back_ns, self.by_ns))
        return sum(max(0, min(end_ns, end) - max(start_ns, start)) for start, end in ways)


def state_moves(plan: Plan, timeline: Timeline, share: float) -> tuple[StateMove | None, ...]:
    """Return each device's move [D], None where its state stays.

    Args:
        plan: its cluster says how fast the devices' links are.
        timeline: its step.
        share: of the layers' `state_bytes` that only the optimizer needs; with fp32 moments and
            master weights beside 16-bit weights and gradients, 0.75.
    """
    costs = timeline.costs
    taken: dict[tuple[int, CopyKind], Spans] = {}  # (host link, side) -> when it is busy
    lanes: list[Spans] = []
    for device in range(costs.num_devices):
        copies = _copies(timeline, device)
        lanes.append([(start, end) for start, end, _ in copies])
        for start, end, kind in copies:
            taken.setdefault((int(costs.host_link[device]), kind), []).append((start, end))
    found: list[StateMove | None] = []
    for device, hardware in enumerate(plan.cluster.devices):
        state = int(costs.static_bytes[device]) - hardware.reserved_bytes
        num_bytes = int(state * share)
        if num_bytes <= 0 or hardware.offload_bandwidth == 0:
            found.append(None)
            continue
        link = int(costs.host_link[device])
        out_side = taken.setdefault((link, CopyKind.O), [])
        back_side = taken.setdefault((link, CopyKind.R), [])
        copy_ns = ceil_div(num_bytes * NS_PER_S, hardware.offload_bandwidth)
        by_ns = int(timeline.optimizer_start_ns[device])
        away = _first_gaps(_gaps([*lanes[device], *out_side], by_ns), copy_ns)
        back = _last_gaps(_gaps([*lanes[device], *back_side], by_ns), copy_ns)
        if not away or not back or away[-1][1] > back[0][0]:
            found.append(None)
            continue
        out_side += away
        back_side += back
        found.append(
            StateMove(
                device=device,
                num_bytes=num_bytes,
                copy_ns=copy_ns,
                out_ns=away[-1][1],
                back_ns=back[0][0],
                by_ns=by_ns,
            )
        )
    return tuple(found)


def _copies(timeline: Timeline, device: int) -> list[tuple[int, int, CopyKind]]:
    if timeline.copies is None:
        return []
    lane = slice(int(timeline.copies.offsets[device]), int(timeline.copies.offsets[device + 1]))
    kinds = kind_of(timeline.copies.codes[lane])
    return [
        (start, end, CopyKind(kind))
        for start, end, kind in zip(
            timeline.copy_start_ns[lane].tolist(),
            timeline.copy_end_ns[lane].tolist(),
            np.asarray(kinds).tolist(),
            strict=True,
        )
    ]


def _gaps(busy: Iterable[tuple[int, int]], end_ns: int) -> Spans:
    """Return the free intervals from 0 to an end."""
    gaps: Spans = []
    free_from = 0
    for start, end in sorted(busy):
        if start > free_from:
            gaps.append((free_from, min(start, end_ns)))
        free_from = max(free_from, end)
        if free_from >= end_ns:
            break
    if free_from < end_ns:
        gaps.append((free_from, end_ns))
    return [(start, end) for start, end in gaps if end > start]


def _first_gaps(gaps: Sequence[tuple[int, int]], length_ns: int) -> Spans:
    """Return the earliest intervals that make up a length, or none."""
    used: Spans = []
    for start, end in gaps:
        part = min(length_ns, end - start)
        used.append((start, start + part))
        length_ns -= part
        if length_ns == 0:
            return used
    return []


def _last_gaps(gaps: Sequence[tuple[int, int]], length_ns: int) -> Spans:
    """Return the latest intervals that make up a length, by time, or none."""
    used: Spans = []
    for start, end in reversed(gaps):
        part = min(length_ns, end - start)
        used.append((end - part, end))
        length_ns -= part
        if length_ns == 0:
            return used[::-1]
    return []
