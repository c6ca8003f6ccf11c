"""What the copies of a plan do: how much of each stage leaves, how busy links are, what waits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.actions import CopyKind, Kind, kind_of, microbatch_of, stage_of
from simulator.timeline import Timeline

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Usage:
    """Copies by stage [S], device [D] and host link.

    `copied` of a stage's m microbatches leave. `trip_share` is k: a round trip over the stage's
    forward and backward; above 1 the copies cannot keep up with the stage. `moved_bytes` counts
    both ways. `late_ns`: how long backwards of a stage waited for a reload alone, with device and
    gradient ready. `lane_busy` and `link_busy` are parts of the step; a link is out and in
    together where several devices share it, each side counted for itself.
    """

    copied: Int64  # [S]
    trip_share: Float64  # [S] nan: the stage's device cannot offload
    moved_bytes: Int64  # [D]
    late_ns: Int64  # [S]
    lane_busy: Float64  # [D]
    link_busy: dict[int, tuple[float, float]]  # host link -> share out, share back


def usage_of(timeline: Timeline) -> Usage:
    """Return what the copies of a timeline do; without copies everything is 0."""
    costs, copies = timeline.costs, timeline.copies
    num_stages, num_devices = costs.num_stages, costs.num_devices
    work = costs.forward_ns + costs.input_grad_ns + costs.weight_grad_ns
    trip = np.where(costs.copy_ns < 0, np.nan, 2 * costs.copy_ns / work)
    copied, late = (np.zeros(num_stages, np.int64) for _ in range(2))
    moved, busy = (np.zeros(num_devices, np.int64) for _ in range(2))
    links = {int(link): (0.0, 0.0) for link in np.unique(costs.host_link)}
    step = max(1, timeline.step_ns)
    if copies is not None:
        stages, back = stage_of(copies.codes), kind_of(copies.codes) == CopyKind.R
        device = costs.stage_device[stages]
        length = timeline.copy_end_ns - timeline.copy_start_ns
        np.add.at(copied, stages[back], 1)
        np.add.at(moved, device, costs.offload_bytes[stages])
        np.add.at(busy, device, length)
        for link in links:
            there = costs.host_link[device] == link
            links[link] = (
                float(length[there & ~back].sum() / step),
                float(length[there & back].sum() / step),
            )
        late = _late(timeline)
    return Usage(
        copied=copied,
        trip_share=trip,
        moved_bytes=moved,
        late_ns=late,
        lane_busy=busy / step,
        link_busy=links,
    )


def _late(timeline: Timeline) -> Int64:
    """Return how long each stage's backwards waited for their reloads alone."""
    costs, copies = timeline.costs, timeline.copies
    assert copies is not None
    m = costs.num_microbatches
    back_at = np.zeros((costs.num_stages, m), np.int64)
    reloads = kind_of(copies.codes) == CopyKind.R
    codes = copies.codes[reloads]
    back_at[stage_of(codes), microbatch_of(codes)] = timeline.copy_end_ns[reloads]

    late = np.zeros(costs.num_stages, np.int64)
    codes, offsets = timeline.schedule.codes, timeline.schedule.offsets
    stages, microbatches = stage_of(codes), microbatch_of(codes)
    free = np.concatenate(([0], timeline.end_ns[:-1]))
    free[offsets[:-1][offsets[:-1] < len(free)]] = 0
    turns = np.isin(kind_of(codes), (Kind.B, Kind.I))
    # the gradient's arrival; between stages of one device it is the end of the next one's backward
    ended = np.zeros((costs.num_stages, m), np.int64)
    ended[stages[turns], microbatches[turns]] = timeline.end_ns[turns]
    arrived = np.zeros((costs.num_stages, m), np.int64)
    if costs.num_stages > 1:
        sent = timeline.backward_arrived_ns[1:]
        arrived[:-1] = np.where(sent >= 0, sent, ended[1:])
    ready = np.maximum(free[turns], arrived[stages[turns], microbatches[turns]])
    waited = np.maximum(0, back_at[stages[turns], microbatches[turns]] - ready)
    np.add.at(late, stages[turns], waited)
    return late
