"""Plan the copies of a schedule, with its order kept, or bent where memory asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from octotune.offload.pages import BACKWARD, FORWARD, NEVER, WEIGHT, Pages, Rule
from octotune.offload.play import DONE, LATE, play
from simulator.actions import (
    CopySchedule,
    Kind,
    Schedule,
    kind_of,
    microbatch_of,
    stage_of,
)
from simulator.costs import Costs
from simulator.engine import simulate
from simulator.errors import ScheduleError
from simulator.memory import byte_changes, host_peak_bytes
from simulator.timeline import Timeline

Int64 = NDArray[np.int64]

_KINDS = len(Kind)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Keys:
    """When each action would like to run, by a schedule that ran once: what orders are made of.

    `times` [3, S, m]: F, backward and W, rising in the microbatch. `split` [S]: I and W, not B.
    `stays` [S]: nothing of the stage leaves.
    """

    times: Int64
    split: NDArray[np.bool_]
    stays: NDArray[np.bool_]


def keys_of(timeline: Timeline) -> Keys:
    """Return the starts of a timeline's actions as keys."""
    costs = timeline.costs
    codes = timeline.schedule.codes
    stages, kinds, microbatches = stage_of(codes), kind_of(codes), microbatch_of(codes)
    split = np.zeros(costs.num_stages, np.bool_)
    split[stages[kinds == Kind.W]] = True
    row_of = np.array([FORWARD, BACKWARD, BACKWARD, WEIGHT])
    times = np.full((3, costs.num_stages, costs.num_microbatches), NEVER, np.int64)
    times[row_of[kinds], stages, microbatches] = timeline.start_ns
    # microbatches are alike: numbered in the order in which each stage runs them, the same order
    # is first in, first out
    times.sort(axis=2)
    return Keys(times=times, split=split, stays=np.zeros(costs.num_stages, np.bool_))


def pages_of(
    costs: Costs, split: NDArray[np.bool_], *, stays: NDArray[np.bool_] | None = None
) -> Pages:
    """Return costs as the kernel takes them. Nothing of the stages that `stays` names leaves."""
    delay = np.zeros(costs.num_stages, np.int64)
    delay[1:] = costs.transfer_hold_ns + costs.transfer_latency_ns
    duration = np.empty((costs.num_stages, _KINDS), np.int64)
    duration[:, Kind.F] = costs.forward_ns
    duration[:, Kind.B] = costs.backward_ns
    duration[:, Kind.I] = costs.input_grad_ns
    duration[:, Kind.W] = costs.weight_grad_ns
    counts = np.bincount(costs.stage_device, minlength=costs.num_devices)
    rise, fall = byte_changes(costs)
    moved = np.array(costs.offload_bytes, dtype=np.int64)
    moved[(costs.copy_ns < 0) | costs.recompute] = 0
    if stays is not None:
        moved[stays] = 0
    margin = np.zeros(costs.num_devices, np.int64)
    by_kind = rise.reshape(-1, _KINDS)
    most = np.where(split, np.maximum(by_kind[:, Kind.I], by_kind[:, Kind.W]), by_kind[:, Kind.B])
    np.maximum.at(margin, costs.stage_device, np.maximum(0, most))
    _, link, shared = np.unique(costs.host_link, return_inverse=True, return_counts=True)
    hosts, host = np.unique(costs.device_host, return_inverse=True)
    limit = costs.host_memory_bytes
    return Pages(
        num_microbatches=costs.num_microbatches,
        duration=duration.reshape(-1),
        delay=delay,
        split=np.ascontiguousarray(split),
        stage_device=np.array(costs.stage_device, dtype=np.int64),
        first=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        local=np.argsort(costs.stage_device, kind="stable").astype(np.int64),
        rise=rise,
        fall=fall,
        room=(costs.memory_bytes - costs.static_bytes).astype(np.int64),
        margin=margin,
        moved=moved,
        copy=np.maximum(1, costs.copy_ns).astype(np.int64),
        link=np.where(shared[link] > 1, link, -1).astype(np.int64),
        num_links=len(shared),
        host=host.astype(np.int64),
        num_hosts=len(hosts),
        host_room=NEVER if limit is None else int(limit),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Paged:
    """Rows and lanes that the kernel played."""

    schedule: Schedule
    copies: CopySchedule | None  # None: nothing leaves
    end_ns: int
    over: Int64  # [D] bytes above the room; the order was kept where there are any
    late: Int64  # [S] ns for which backwards waited for nothing but a reload


def paged(
    pages: Pages, keys: Keys, rule: Rule, *, fixed: bool = False, limit_ns: int = NEVER
) -> Paged | None:
    """Play once; None where memory stops it, or where it ends at `limit_ns` or later.

    Complexity: O(actions x stages of a device), with a small constant.
    """
    m = pages.num_microbatches
    kinds = np.where(pages.split, 3, 2)
    num_devices = len(pages.room)
    counts = np.bincount(pages.stage_device, weights=kinds * m, minlength=num_devices)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    copy_offsets = 2 * m * pages.first
    codes = np.empty(offsets[-1], np.int64)
    copies, anchors = (np.empty(copy_offsets[-1], np.int64) for _ in range(2))
    written, over = (np.zeros(num_devices, np.int64) for _ in range(2))
    late = np.zeros(len(pages.stage_device), np.int64)
    state, end_ns = play(
        pages,
        keys.times,
        rule,
        fixed,
        limit_ns,
        codes,
        offsets,
        copies,
        anchors,
        copy_offsets,
        written,
        over,
        late,
    )
    if state != DONE:
        assert state == LATE or end_ns >= 0
        return None
    lanes = None
    if (written > copy_offsets[:-1]).any():
        kept = np.concatenate(
            [np.arange(begin, end) for begin, end in zip(copy_offsets[:-1], written, strict=True)]
        )
        bounds = np.concatenate(([0], np.cumsum(written - copy_offsets[:-1])))
        lanes = CopySchedule(copies[kept], anchors[kept], bounds)
    return Paged(
        schedule=Schedule(codes, offsets), copies=lanes, end_ns=int(end_ns), over=over, late=late
    )


@cache
def warm_up_paging() -> None:
    """Compile or load the kernel, on a stage with one microbatch."""
    one, none = np.ones(1, np.int64), np.zeros(1, np.int64)
    pages = Pages(
        num_microbatches=1,
        duration=np.ones(_KINDS, np.int64),
        delay=none,
        split=np.ones(1, np.bool_),
        stage_device=none,
        first=np.array([0, 1]),
        local=none,
        rise=np.zeros(_KINDS, np.int64),
        fall=np.zeros(_KINDS, np.int64),
        room=one,
        margin=none,
        moved=none,
        copy=one,
        link=np.full(1, -1),
        num_links=1,
        host=none,
        num_hosts=1,
        host_room=1,
    )
    times = np.array([0, 1, 2]).reshape(3, 1, 1)
    paged(pages, Keys(times=times, split=pages.split, stays=np.ones(1, np.bool_)), Rule())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planned:
    """The copies of a schedule whose order is kept, and the run with them.

    `shortfall_bytes`: by how much the worst device or host is still above its limit; 0: it fits.
    """

    copies: CopySchedule | None
    timeline: Timeline
    shortfall_bytes: int


def plan_copies(schedule: Schedule, costs: Costs) -> Planned:
    """Return the copies that bring a schedule within `costs.memory_bytes`, its order kept.

    Of the plans that fit, one with the shortest step, and of those one with the fewest copies; if
    none fits, the one that lacks least. Longest life per byte leaves first, as early as it can,
    and comes back as late as its backward allows.

    Raises:
        ScheduleError: if a stage does not run its backwards, or its Ws, in the order of its
            forwards; activations are first in, first out here.
    """
    free = simulate(schedule, costs)
    keys = keys_of(free)
    _refuse_reordered(schedule, costs)
    over = memory_over(free)
    best = Planned(copies=None, timeline=free, shortfall_bytes=over)
    if over == 0:
        return best
    pages = pages_of(costs, keys.split)
    if not pages.moved.any():
        return best
    best = _shortest(pages, keys, costs, best)
    if best.shortfall_bytes == 0:
        return best
    # what lacks least: give the planner more room until it gets through
    low, high = 0, best.shortfall_bytes
    while high - low > max(1, over // 256):
        more = (low + high) // 2
        roomier = pages._replace(room=pages.room + more)
        made = _shortest(roomier, keys, costs, best)
        if made.shortfall_bytes < best.shortfall_bytes:
            best, high = made, min(more, made.shortfall_bytes)
        else:
            low = more
    return best


def _shortest(pages: Pages, keys: Keys, costs: Costs, best: Planned) -> Planned:
    """Return the best of the copies under each rule, or the best so far."""

    def rank(plan: Planned) -> tuple[int, int, int]:
        copies = 0 if plan.copies is None else len(plan.copies.codes)
        return plan.shortfall_bytes, plan.timeline.step_ns, copies

    # with the room that any next action may need, and with none: the order is known here, and W's
    # put off can fill a device so far that no reload would ever find the first
    rooms = (pages, pages._replace(margin=np.zeros_like(pages.margin)))
    rules = (
        (room, Rule(least_trips=trips, notice=notice, lead=lead))
        for room in rooms
        for trips in (1.0, 2.0, 4.0)
        for notice in (0, 1, 2, 4)
        for lead in (0.0, 0.7)
    )
    for room, rule in rules:
        again = keys
        for _ in range(2):
            played = paged(room, again, rule, fixed=True)
            if played is None:
                break
            timeline = simulated(played, costs)
            made = Planned(
                copies=played.copies,
                timeline=timeline,
                shortfall_bytes=memory_over(timeline),
            )
            best = min(best, made, key=rank)
            again = keys_of(timeline)
    return best


def _refuse_reordered(schedule: Schedule, costs: Costs) -> None:
    stages, kinds = stage_of(schedule.codes), kind_of(schedule.codes)
    microbatches = microbatch_of(schedule.codes)
    order = np.lexsort((np.arange(len(stages)), kinds, stages))
    first = np.arange(len(stages)) % costs.num_microbatches
    wrong = np.flatnonzero(microbatches[order] != first)
    if len(wrong):
        stage = int(stages[order[wrong[0]]])
        raise ScheduleError(
            f"stage {stage} does not run its microbatches in rising order; copies are planned "
            "for schedules in which every stage runs each kind of action from 0 up"
        )


def memory_over(timeline: Timeline) -> int:
    """Return by how many bytes the worst device or host is above its limit; 0: none is."""
    costs = timeline.costs
    over = max(0, int((timeline.peak_bytes - costs.memory_bytes).max()))
    if costs.host_memory_bytes is not None and timeline.copies is not None:
        over = max(over, max(host_peak_bytes(timeline).values()) - costs.host_memory_bytes)
    return over


def simulated(paged_plan: Paged, costs: Costs) -> Timeline:
    """Return what the simulator says of a plan."""
    return simulate(paged_plan.schedule, costs, paged_plan.copies)
