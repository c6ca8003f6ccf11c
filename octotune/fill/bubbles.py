"""The bubbles of a plan that are worth handing over: where, how long, and with how much memory.

    device 2   [ 2F2 ][ 2F3 ]<------ bubble ------>[ 2B0 ]...[ 2B3 ]<-- -->[optimizer]<-->
                       after 2F3              before 2B0       after 2B3   after optimizer

A bubble is one whole idle interval of a device, whatever its causes (`simulator.bubbles` cuts it
by cause). It is free of main work from the end of what comes before to the start of what comes
after; its free memory is the least there is at any moment of it, so that a fill job's micro-steps
fit whenever they run. Reserved bytes are not free: the main job's transfers live there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from simulator.actions import unpack

if TYPE_CHECKING:
    from octotune.fill.state import StateMove
    from simulator.timeline import Timeline

START, OPTIMIZER, END = "start", "optimizer", "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubble:
    """One idle interval of a device.

    `after` is the action before it, or "start" or "optimizer"; `before` the action after it, or
    "optimizer" or "end". `copy_ns` is how long the device's copy lane is busy inside, at most.
    """

    device: int
    after: str
    before: str
    start_ns: int
    end_ns: int
    free_bytes: int
    copy_ns: int

    @property
    def length_ns(self) -> int:
        """How long the device idles."""
        return self.end_ns - self.start_ns


def find_bubbles(
    timeline: Timeline,
    *,
    threshold_ns: int = 1,
    moves: Sequence[StateMove | None] = (),
) -> tuple[tuple[Bubble, ...], ...]:
    """Return the bubbles of each device [D] that last at least `threshold_ns`, by time.

    The plan is within its memory (`simulator.memory.check_memory`). With `moves` [D], the bytes of
    optimizer state that are away during all of a bubble are free in it.
    """
    from simulator.memory import usage

    costs, schedule = timeline.costs, timeline.schedule
    step_ns = timeline.step_ns
    found: list[tuple[Bubble, ...]] = []
    for device in range(costs.num_devices):
        row = slice(int(schedule.offsets[device]), int(schedule.offsets[device + 1]))
        names = [str(unpack(code)) for code in schedule.row(device).tolist()]
        optimizer = (
            int(timeline.optimizer_start_ns[device]),
            int(timeline.optimizer_end_ns[device]),
        )
        busy = [
            (START, 0, 0),
            *zip(
                names,
                timeline.start_ns[row].tolist(),
                timeline.end_ns[row].tolist(),
                strict=True,
            ),
        ]
        if optimizer[1] > optimizer[0]:
            busy.append((OPTIMIZER, *optimizer))
        busy.append((END, step_ns, step_ns))
        times, held = usage(timeline, device)
        limit = int(costs.memory_bytes[device])
        lane = _lane(timeline, device)
        away = moves[device] if moves else None
        bubbles = []
        for (after, _, start), (before, end, _) in pairwise(busy):
            if end - start < max(1, threshold_ns):
                continue
            first = int(np.searchsorted(times, start, side="right")) - 1
            last = int(np.searchsorted(times, end, side="left"))
            copies = sum(max(0, min(end, stop) - max(start, begin)) for begin, stop in lane)
            bubbles.append(
                Bubble(
                    device=device,
                    after=after,
                    before=before,
                    start_ns=start,
                    end_ns=end,
                    free_bytes=max(0, limit - int(held[first:last].max()))
                    + (away.free_bytes(start, end) if away else 0),
                    copy_ns=min(end - start, copies + (away.lane_ns(start, end) if away else 0)),
                )
            )
        found.append(tuple(bubbles))
    return tuple(found)


def resting_bytes(timeline: Timeline) -> tuple[int, ...]:
    """Return what each device [D] has free at every moment of the step: there a job may rest."""
    free = timeline.costs.memory_bytes - timeline.peak_bytes
    return tuple(np.maximum(free, 0).tolist())


def _lane(timeline: Timeline, device: int) -> list[tuple[int, int]]:
    """Return start and end of each copy of a device."""
    if timeline.copies is None:
        return []
    lane = slice(int(timeline.copies.offsets[device]), int(timeline.copies.offsets[device + 1]))
    return list(
        zip(
            timeline.copy_start_ns[lane].tolist(),
            timeline.copy_end_ns[lane].tolist(),
            strict=True,
        )
    )
