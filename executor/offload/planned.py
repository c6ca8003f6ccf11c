"""What a plan's simulated step says of one device's copies: entries, gates, peaks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from executor.offload.lanes import Entry, Key
from simulator.actions import CopyKind, Kind, kind_of, microbatch_of, stage_of
from simulator.memory import usage
from simulator.timeline import Timeline

Int64 = NDArray[np.int64]


def row_of(timeline: Timeline, device: int) -> slice:
    """Return where a device's actions are among all."""
    offsets = timeline.schedule.offsets
    return slice(int(offsets[device]), int(offsets[device + 1]))


def entries_of(
    timeline: Timeline, device: int, floats: bool
) -> tuple[list[Entry], list[int], list[tuple[int, Key]]]:
    """Return the lane's entries, the gates of its reloads, and when the plan has each O end."""
    copies = timeline.copies
    if copies is None:
        return [], [], []
    row = row_of(timeline, device)
    starts, ends = timeline.start_ns[row], timeline.end_ns[row]
    positions = np.arange(len(starts))
    if floats:
        steady = kind_of(timeline.schedule.codes[row]) != Kind.W
        starts, ends, positions = starts[steady], ends[steady], positions[steady]
    lane = slice(int(copies.offsets[device]), int(copies.offsets[device + 1]))
    codes = copies.codes[lane]
    stages, microbatches = stage_of(codes).tolist(), microbatch_of(codes).tolist()
    back = (kind_of(codes) == CopyKind.R).tolist()
    began, ended = timeline.copy_start_ns[lane], timeline.copy_end_ns[lane]
    before = np.searchsorted(starts, began, side="right") - 1
    entries: list[Entry] = []
    gates: list[int] = []
    due: list[tuple[int, Key]] = []
    for at, code in enumerate(codes.tolist()):
        key = (stages[at], microbatches[at])
        entries.append(Entry(code, key, back[at], len(gates) if back[at] else -1))
        if back[at]:
            last = int(before[at])  # its F at least is before it
            gates.append(2 * int(positions[last]) + int(ends[last] <= began[at]))
        else:
            due.append((int(ended[at]), key))
    return entries, gates, due


def host_peak_bytes(timeline: Timeline, device: int) -> int:
    """Return the most bytes that one device's copies hold on the host."""
    copies = timeline.copies
    if copies is None or not len(copies.codes):
        return 0
    lane = slice(int(copies.offsets[device]), int(copies.offsets[device + 1]))
    codes = copies.codes[lane]
    moved = timeline.costs.offload_bytes[stage_of(codes)]
    held = np.cumsum(np.where(kind_of(codes) == CopyKind.R, -moved, moved))
    return int(held.max(initial=0))


def saved_usage(timeline: Timeline, device: int) -> tuple[Int64, Int64]:
    """Return what saved activations alone take on a device of a simulated step, over time.

    Times [n] and the bytes [n] held from each to the next, as `simulator.memory.usage`.
    """
    costs = timeline.costs
    alone = replace(
        costs,
        workspace_bytes=np.zeros_like(costs.workspace_bytes),
        held_w_bytes=np.zeros_like(costs.held_w_bytes),
        static_bytes=np.zeros_like(costs.static_bytes),
    )
    return usage(replace(timeline, costs=alone), device)


def saved_peak_bytes(timeline: Timeline, device: int) -> int:
    """Return the most that saved activations alone take on a device of a simulated step."""
    return int(saved_usage(timeline, device)[1].max())
