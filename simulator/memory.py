"""Bytes on each device and host over time, and the peaks.

An action changes what its device holds at its start and at its end by amounts that depend on its
stage and kind only, so each row is one running sum. What ends at a moment leaves before what
starts then, and everything lasts at least 1 ns: the bytes held are a step function of time, and
its value at a moment is the sum of all changes up to and including that moment. Without offload
even the order of the changes follows from the row alone, so peaks need no times.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.actions import (
    KIND_MASK,
    STAGE_SHIFT,
    CopyKind,
    CopySchedule,
    Kind,
    Schedule,
    kind_of,
    stage_of,
)
from simulator.compiled import kernel
from simulator.costs import Costs
from simulator.errors import OutOfMemoryError
from simulator.timeline import Timeline

Int64 = NDArray[np.int64]

_KINDS = len(Kind)
_R = int(CopyKind.R)
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def byte_changes(costs: Costs) -> tuple[Int64, Int64]:
    """Return what each action adds at its start and takes away at its end.

    Two arrays [S * 4], at stage * 4 + kind. Workspace is in both. What an action adds can be
    negative where recomputed activations take less than the input they take the place of.
    """
    rise = np.empty((costs.num_stages, _KINDS), dtype=np.int64)
    fall = np.empty((costs.num_stages, _KINDS), dtype=np.int64)
    saved = costs.saved_bytes + costs.saved_w_bytes
    workspace = costs.workspace_bytes
    again = np.where(costs.recompute, saved - costs.input_bytes, 0)
    rise[:, Kind.F] = np.where(costs.recompute, costs.input_bytes, saved) + workspace
    fall[:, Kind.F] = workspace
    rise[:, Kind.B] = rise[:, Kind.I] = again + costs.held_w_bytes + workspace
    fall[:, Kind.B] = saved + costs.held_w_bytes + workspace
    fall[:, Kind.I] = costs.saved_bytes + workspace
    rise[:, Kind.W] = workspace
    fall[:, Kind.W] = costs.saved_w_bytes + costs.held_w_bytes + workspace
    return rise.reshape(-1), fall.reshape(-1)


def order_peak_bytes(schedule: Schedule, costs: Costs) -> Int64:
    """Return the most bytes each device [D] holds, without offload: the order decides, not time.

    The schedule is valid (`simulator.validate`).
    """
    rise, fall = byte_changes(costs)
    peaks = np.array(costs.static_bytes, dtype=np.int64)
    order_peaks(schedule.codes, schedule.offsets, rise, fall, peaks)
    return peaks


def peak_bytes(
    schedule: Schedule,
    costs: Costs,
    copies: CopySchedule | None,
    start_ns: Int64,
    end_ns: Int64,
    copy_start_ns: Int64,
    copy_end_ns: Int64,
) -> Int64:
    """Return the most bytes each device [D] holds, static bytes included."""
    if copies is None or len(copies.codes) == 0:
        return order_peak_bytes(schedule, costs)
    rise, fall = byte_changes(costs)
    peaks = np.array(costs.static_bytes, dtype=np.int64)
    _timed_peaks(
        schedule.codes,
        schedule.offsets,
        rise,
        fall,
        start_ns,
        end_ns,
        copies.codes,
        copies.offsets,
        np.array(costs.offload_bytes, dtype=np.int64),
        copy_start_ns,
        copy_end_ns,
        peaks,
    )
    return peaks


def usage(timeline: Timeline, device: int) -> tuple[Int64, Int64]:
    """Return the bytes a device holds over time, as a step function.

    Returns:
        Times [n], strictly increasing from 0, and the bytes [n] held from each of them to the
        next; the last holds to the end of the step.
    """
    costs = timeline.costs
    rise, fall = byte_changes(costs)
    row = slice(timeline.schedule.offsets[device], timeline.schedule.offsets[device + 1])
    codes = timeline.schedule.codes[row]
    change = stage_of(codes) * _KINDS + kind_of(codes)
    times = [timeline.start_ns[row], timeline.end_ns[row]]
    changes = [rise[change], -fall[change]]
    if timeline.copies is not None:
        lane = slice(timeline.copies.offsets[device], timeline.copies.offsets[device + 1])
        copies = timeline.copies.codes[lane]
        moved = costs.offload_bytes[stage_of(copies)]
        back = kind_of(copies) == _R
        times.append(np.where(back, timeline.copy_start_ns[lane], timeline.copy_end_ns[lane]))
        changes.append(np.where(back, moved, -moved))
    return _step_function(times, changes, int(costs.static_bytes[device]))


def host_usage(timeline: Timeline, host: int) -> tuple[Int64, Int64]:
    """Return the offloaded bytes a host holds over time, as `usage` does for a device."""
    copies = timeline.copies
    if copies is None:
        return _step_function([], [], 0)
    stages = stage_of(copies.codes)
    there = timeline.costs.device_host[timeline.costs.stage_device[stages]] == host
    moved = timeline.costs.offload_bytes[stages]
    back = kind_of(copies.codes) == _R
    time = np.where(back, timeline.copy_end_ns, timeline.copy_start_ns)
    change = np.where(back, -moved, moved)
    return _step_function([time[there]], [change[there]], 0)


def host_peak_bytes(timeline: Timeline) -> dict[int, int]:
    """Return the most offloaded bytes each host holds, of all its devices."""
    return {
        int(host): int(host_usage(timeline, int(host))[1].max())
        for host in np.unique(timeline.costs.device_host)
    }


def check_memory(timeline: Timeline) -> None:
    """Raise OutOfMemoryError for the device or host that lacks most, naming what helps."""
    costs = timeline.costs
    lacks = timeline.peak_bytes - costs.memory_bytes
    device = int(lacks.argmax())
    if lacks[device] > 0:
        needed, limit = int(timeline.peak_bytes[device]), int(costs.memory_bytes[device])
        static = int(costs.static_bytes[device])
        helps = (
            "its layers' state and reserved bytes alone take more: give it fewer layers"
            if static > limit
            else "give it fewer layers or microbatches in flight, recompute, or offload"
        )
        raise OutOfMemoryError(
            f"device {device} needs {readable(needed)}, it has {readable(limit)}: "
            f"{readable(needed - limit)} too little; {helps}",
            f"device {device}",
            needed,
            limit,
        )
    if costs.host_memory_bytes is None or timeline.copies is None:
        return
    peaks = host_peak_bytes(timeline)
    host = max(peaks, key=lambda number: peaks[number])
    limit = costs.host_memory_bytes
    if peaks[host] > limit:
        raise OutOfMemoryError(
            f"host {host} needs {readable(peaks[host])} for offloaded activations, it has "
            f"{readable(limit)}: {readable(peaks[host] - limit)} too little; "
            "offload fewer microbatches, or bring them back earlier",
            f"host {host}",
            peaks[host],
            limit,
        )


def readable(size: int) -> str:
    """Return bytes with a unit a person reads: `91.2 GiB`. Below 1 KiB they are exact."""
    if size < 1024:
        return f"{size} B"
    power = min((size.bit_length() - 1) // 10, len(_UNITS))
    value = size / 1024**power
    return f"{value:.1f} {_UNITS[power - 1]}"


def _step_function(times: list[Int64], changes: list[Int64], static: int) -> tuple[Int64, Int64]:
    """Sum up changes by the moment they happen; moments that change nothing are left out."""
    time = np.concatenate([np.zeros(1, np.int64), *times])
    change = np.concatenate([np.array([static], dtype=np.int64), *changes])
    order = np.argsort(time, kind="stable")
    time, change = time[order], change[order]
    last = np.flatnonzero(np.append(time[1:] != time[:-1], True))
    moments, held = time[last], np.cumsum(change)[last]
    keep = np.append(True, held[1:] != held[:-1])
    return moments[keep], held[keep]


@kernel
def order_peaks(codes: Int64, offsets: Int64, rise: Int64, fall: Int64, peaks: Int64) -> None:
    """Raise `peaks` [D], the static bytes when called, to the most each device holds."""
    for device in range(len(offsets) - 1):
        held = peak = peaks[device]
        for at in range(offsets[device], offsets[device + 1]):
            code = codes[at]
            change = (code >> STAGE_SHIFT) * _KINDS + (code & KIND_MASK)
            held += rise[change]
            peak = max(peak, held)
            held -= fall[change]
        peaks[device] = peak


@kernel
def _timed_peaks(
    codes: Int64,
    offsets: Int64,
    rise: Int64,
    fall: Int64,
    start: Int64,
    end: Int64,
    copy_codes: Int64,
    copy_offsets: Int64,
    offload_bytes: Int64,
    copy_start: Int64,
    copy_end: Int64,
    peaks: Int64,
) -> None:
    """Raise `peaks` as `order_peaks` does, merging each row with its lane by time.

    Both are sorted: a row changes bytes at start, end, start, end...; a lane at the end of each
    O and the start of each R.
    """
    never = np.iinfo(np.int64).max
    for device in range(len(offsets) - 1):
        held = peak = peaks[device]
        at, stop = offsets[device], offsets[device + 1]
        copy, last_copy = copy_offsets[device], copy_offsets[device + 1]
        running = False  # action `at` has started
        while at < stop:
            of_row = end[at] if running else start[at]
            of_lane = never
            if copy < last_copy:
                back = copy_codes[copy] & KIND_MASK == _R
                of_lane = copy_start[copy] if back else copy_end[copy]
            moment = min(of_row, of_lane)
            while at < stop and (end[at] if running else start[at]) == moment:
                code = codes[at]
                change = (code >> STAGE_SHIFT) * _KINDS + (code & KIND_MASK)
                if running:
                    held -= fall[change]
                    at += 1
                else:
                    held += rise[change]
                running = not running
            while copy < last_copy:
                code = copy_codes[copy]
                back = code & KIND_MASK == _R
                if (copy_start[copy] if back else copy_end[copy]) != moment:
                    break
                moved = offload_bytes[code >> STAGE_SHIFT]
                held += moved if back else -moved
                copy += 1
            peak = max(peak, held)
        peaks[device] = peak
