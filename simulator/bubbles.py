"""Bubbles: every idle interval of every device, cut into pieces that each have one cause.

A device idles because its next action's inputs are not there. What that action waits for passes
through phases: the producer is still computed, then its tensor waits in the channel's queue, then
it flies, then activations come back from the host. The idle interval is cut where one phase ends
and the next begins, so that the pieces of a device add up to its idle time to the nanosecond:

    producer   [ 2F7 computed ............]
    channel                  (2F6)         (queued)[ 2F7 flies ..]
    device     3F6 ]<  input               ><queued><  in flight ><late>[ 3F7

Everything but the walk that finds which stage an input was really waiting for works on whole
arrays; that walk is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.actions import CopyKind, Kind, kind_of, microbatch_of, stage_of
from simulator.blame import root_stages

if TYPE_CHECKING:
    from simulator.timeline import Timeline

Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]


class Cause(IntEnum):
    """Why a device idles. An instant has the first of these that holds, in this order.

    Of a device without actions all idle time is UNUSED. Before a device's first action it is
    WARMUP, whatever that action waits for. Between two actions, with a the later one:

    INPUT: another device still computes (or has not begun) the action that a needs a tensor of.
    QUEUED: that tensor is made, but waits behind others for its channel or network card.
    IN_FLIGHT: it is on its way.
    RELOAD: it is there, but a's own activations are not yet back from the host.
    LATE: all is there and a has not begun. Never in a simulated timeline; in a measured one it is
    the runtime's own delay.

    After a device's last action, its optimizer run aside, all is cooldown, in three parts:
    REDUCTION: its optimizer waits for a reduction of the device's gradients.
    EXCHANGE: it waits for the exchange of tied layers' gradients (and nothing above).
    COOLDOWN: the rest, up to the end of the step.

    UNKNOWN, in measured timelines only: an interval whose cause was not recorded. It takes the
    place of the causes between which the missing time would decide: the whole interval where an
    action inside it was not recorded; up to the tensor's departure or arrival where the
    producer's end is missing; from the producer's end where the arrival is missing; from the
    tensor's arrival where the reload's end is missing. A missing departure alone is taken to be
    the producer's end.
    """

    WARMUP = 0
    INPUT = 1
    QUEUED = 2
    IN_FLIGHT = 3
    RELOAD = 4
    LATE = 5
    REDUCTION = 6
    EXCHANGE = 7
    COOLDOWN = 8
    UNUSED = 9
    UNKNOWN = 10

    @property
    def words(self) -> str:
        """The cause as people read it."""
        return _WORDS[self]


COOLDOWN_CAUSES = (Cause.REDUCTION, Cause.EXCHANGE, Cause.COOLDOWN)  # after the last action

_WORDS = {
    Cause.WARMUP: "warmup",
    Cause.INPUT: "input",
    Cause.QUEUED: "queued",
    Cause.IN_FLIGHT: "transfer",
    Cause.RELOAD: "reload",
    Cause.LATE: "late start",
    Cause.REDUCTION: "reduction",
    Cause.EXCHANGE: "tied exchange",
    Cause.COOLDOWN: "cooldown",
    Cause.UNUSED: "unused",
    Cause.UNKNOWN: "unknown",
}


class Bubble(NamedTuple):
    """One piece of a device's idle time.

    `before` is the packed action that the device goes on with, or -1. `waits_for` is the packed
    action whose tensor is missing (INPUT, QUEUED, IN_FLIGHT), or the packed copy (RELOAD), or -1.
    `root_stage`, where the cause is INPUT, is the stage to blame, as `simulator.blame` finds it,
    or -1 where nothing but the depth of the pipeline is; -1 for other causes.
    """

    device: int
    start_ns: int
    end_ns: int
    cause: Cause
    before: int
    waits_for: int
    root_stage: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bubbles:
    """All bubbles of a timeline as arrays, by device, then by time. Iterating yields `Bubble`s.

    No piece is empty, and the pieces of a device do not overlap. N pieces, D devices.
    """

    num_devices: int
    device: Int64  # [N]
    start_ns: Int64  # [N]
    end_ns: Int64  # [N]
    cause: Int64  # [N] of Cause
    before: Int64  # [N] packed action or -1
    waits_for: Int64  # [N] packed action or copy, or -1
    root_stage: Int64  # [N] stage or -1

    def __len__(self) -> int:
        return len(self.device)

    def __iter__(self) -> Iterator[Bubble]:
        columns = (
            self.device,
            self.start_ns,
            self.end_ns,
            self.cause,
            self.before,
            self.waits_for,
            self.root_stage,
        )
        lists = (column.tolist() for column in columns)
        for device, start, end, cause, before, waits_for, root in zip(*lists, strict=True):
            yield Bubble(device, start, end, Cause(cause), before, waits_for, root)

    @property
    def duration_ns(self) -> Int64:
        """How long each piece is [N]."""
        return self.end_ns - self.start_ns

    def ns_by_cause(self) -> dict[Cause, Int64]:
        """Return the idle time of each device [D] by cause, in the order of `Cause`."""
        table = np.zeros((len(Cause), self.num_devices), np.int64)
        np.add.at(table, (self.cause, self.device), self.duration_ns)
        return {cause: table[cause] for cause in Cause}

    def input_ns_by_stage(self, num_stages: int) -> Int64:
        """Return how long each device waited for inputs, by the stage to blame [D, num_stages].

        Each INPUT piece counts wholly for its `root_stage`; those without are left out.
        """
        table = np.zeros((self.num_devices, num_stages), np.int64)
        rows = self.root_stage >= 0
        np.add.at(table, (self.device[rows], self.root_stage[rows]), self.duration_ns[rows])
        return table


def find_bubbles(timeline: Timeline) -> Bubbles:
    """Return the idle intervals of every device, cut into pieces with one cause each.

    Where measured actions of a device overlap, the overlap is no idle time and counts once.
    Linear in the number of actions and devices, but for the walks to the stages to blame, which
    are no longer than twice the number of stages each.
    """
    links = _links(timeline)
    codes = timeline.schedule.codes
    pieces = [_between_actions(timeline, links), _after_actions(timeline)]
    columns = [np.concatenate(parts) for parts in zip(*pieces, strict=True)]
    device, start, end = columns[:3]
    rows = np.flatnonzero(end > start)
    rows = rows[np.lexsort((start[rows], device[rows]))]
    device, start, end, cause, before, waits_for = (column[rows] for column in columns)
    root = np.full(len(rows), -1, np.int64)
    inputs = np.flatnonzero(cause == Cause.INPUT)
    root[inputs] = root_stages(
        (end - start)[inputs],
        links.producer[before[inputs]],
        timeline.start_ns,
        timeline.end_ns,
        links.needs,
        links.ready_ns,
        links.reload_ns,
        timeline.schedule.offsets,
        links.device,
        stage_of(codes),
        timeline.costs.num_stages,
    )
    return Bubbles(
        num_devices=timeline.schedule.num_devices,
        device=device,
        start_ns=start,
        end_ns=end,
        cause=cause,
        before=_at(codes, before),
        waits_for=waits_for,
        root_stage=root,
    )


# device, start, end, cause, index of the action that follows (or -1), what is waited for
_Columns = tuple[Int64, Int64, Int64, Int64, Int64, Int64]


class _Links(NamedTuple):
    """What each action [A] waits for."""

    device: Int64
    needs: Int64  # index of the action whose result it needs, on whatever device; or -1
    ready_ns: Int64  # when that result is there; -1: unknown, or nothing needed
    producer: Int64  # index of the action on another device it needs the tensor of, or -1
    sent_ns: Int64  # when that tensor leaves; -1: unknown
    arrived_ns: Int64  # when it is there; -1: unknown
    reload: Int64  # index of the copy that brings its activations back, or -1
    reload_ns: Int64  # when that has ended; -1: unknown


def action_devices(timeline: Timeline) -> Int64:
    """Return the device of each action [A]."""
    schedule = timeline.schedule
    return np.repeat(
        np.arange(schedule.num_devices, dtype=np.int64), np.diff(schedule.offsets)
    ).astype(np.int64)


def _action_tables(timeline: Timeline) -> tuple[Int64, Int64]:
    """Return where the F and the I or B of each stage and microbatch stand [S, m]."""
    codes = timeline.schedule.codes
    stage, kind, microbatch = stage_of(codes), kind_of(codes), microbatch_of(codes)
    shape = (timeline.costs.num_stages, timeline.costs.num_microbatches)
    forward = np.full(shape, -1, np.int64)
    backward = np.full(shape, -1, np.int64)
    index = np.arange(len(codes), dtype=np.int64)
    rows = kind == Kind.F
    forward[stage[rows], microbatch[rows]] = index[rows]
    rows = (kind == Kind.B) | (kind == Kind.I)
    backward[stage[rows], microbatch[rows]] = index[rows]
    return forward, backward


def _at(codes: Int64, index: Int64) -> Int64:
    """Return the packed words at the given places, -1 where a place is -1."""
    return np.append(codes, -1)[index]


def _links(timeline: Timeline) -> _Links:
    codes = timeline.schedule.codes
    stage, kind, microbatch = stage_of(codes), kind_of(codes), microbatch_of(codes)
    num_stages = timeline.costs.num_stages
    device = action_devices(timeline)
    forward, backward = _action_tables(timeline)
    needs, producer, sent, arrived = (np.full(len(codes), -1, np.int64) for _ in range(4))
    gradients = (kind == Kind.B) | (kind == Kind.I)
    rows = np.flatnonzero(gradients)
    needs[rows] = forward[stage[rows], microbatch[rows]]
    rows = np.flatnonzero(kind == Kind.W)
    needs[rows] = backward[stage[rows], microbatch[rows]]
    for rows, step, table, sent_table, arrived_table in (
        (
            np.flatnonzero((kind == Kind.F) & (stage > 0)),
            -1,
            forward,
            timeline.forward_sent_ns,
            timeline.forward_arrived_ns,
        ),
        (
            np.flatnonzero(gradients & (stage < num_stages - 1)),
            1,
            backward,
            timeline.backward_sent_ns,
            timeline.backward_arrived_ns,
        ),
    ):
        source = stage[rows] + step
        found = table[source, microbatch[rows]]
        needs[rows] = found
        remote = (found >= 0) & (device[found] != device[rows])
        rows, source, found = rows[remote], source[remote], found[remote]
        producer[rows] = found
        sent[rows] = sent_table[source, microbatch[rows]]
        arrived[rows] = arrived_table[source, microbatch[rows]]

    ready = np.where(needs >= 0, timeline.end_ns[needs], -1)
    ready = np.where(arrived >= 0, arrived, ready)

    reload = np.full(len(codes), -1, np.int64)
    reload_ns = np.full(len(codes), -1, np.int64)
    if timeline.copies is not None and len(timeline.copies.codes):
        copies = timeline.copies.codes
        back = np.flatnonzero(kind_of(copies) == CopyKind.R)
        table = np.full(forward.shape, -1, np.int64)
        table[stage_of(copies[back]), microbatch_of(copies[back])] = back
        rows = np.flatnonzero(gradients)
        reload[rows] = table[stage[rows], microbatch[rows]]
        rows = rows[reload[rows] >= 0]
        reload_ns[rows] = timeline.copy_end_ns[reload[rows]]
    return _Links(device, needs, ready, producer, sent, arrived, reload, reload_ns)


def _free_since(timeline: Timeline, device: Int64, known: Int64) -> Int64:
    """Return when the device of each known action last became free before it."""
    offsets = timeline.schedule.offsets
    ends = timeline.end_ns[known]
    free = np.zeros(len(known), np.int64)
    first = np.searchsorted(known, offsets)
    for row in range(timeline.schedule.num_devices):
        begin, end = first[row], first[row + 1]
        if end - begin > 1:
            free[begin + 1 : end] = np.maximum.accumulate(ends[begin : end - 1])
    return free


def _between_actions(timeline: Timeline, links: _Links) -> _Columns:
    """Cut the interval before each recorded action into its pieces, empty ones included."""
    recorded = (timeline.start_ns >= 0) & (timeline.end_ns >= 0)
    known = np.flatnonzero(recorded)
    device = links.device[known]
    g1 = timeline.start_ns[known]
    g0 = np.minimum(_free_since(timeline, device, known), g1)

    # an action that was not recorded lies directly before this one, on its device
    previous = np.concatenate(([-1], known[:-1]))
    same_row = np.concatenate(([False], device[1:] == device[:-1]))
    expected = np.where(same_row, previous, timeline.schedule.offsets[device] - 1) + 1
    skipped = expected != known
    first = ~same_row & ~skipped

    producer = links.producer[known]
    remote = producer >= 0
    end = np.where(remote, timeline.end_ns[producer], g0)
    sent = np.where(remote, links.sent_ns[known], g0)
    arrived = np.where(remote, links.arrived_ns[known], g0)
    reload = links.reload[known]
    reload_ns = np.where(reload >= 0, links.reload_ns[known], g0)

    no_end = end < 0
    no_arrival = arrived < 0
    # one phase of unknown cause up to the first time that is known
    first_known = np.where(sent >= 0, sent, np.where(no_arrival, g1, arrived))
    end = np.where(no_end, first_known, end)
    sent = np.where(sent < 0, end, sent)
    arrived = np.where(no_arrival, g1, arrived)
    reload_missing = reload_ns < 0
    reload_ns = np.where(reload_missing, g1, reload_ns)

    c1 = np.where(first, g1, np.where(skipped, g1, np.clip(end, g0, g1)))
    c2 = np.clip(np.where(no_arrival & ~no_end, c1, sent), c1, g1)
    c3 = np.clip(arrived, c2, g1)
    c4 = np.clip(reload_ns, c3, g1)

    nothing = np.full(len(known), -1, np.int64)
    waits_for = _at(timeline.schedule.codes, producer)
    copy = nothing if timeline.copies is None else _at(timeline.copies.codes, reload)

    def constant(cause: Cause) -> Int64:
        return np.full(len(known), cause, np.int64)

    unknown = constant(Cause.UNKNOWN)
    phase_1 = np.where(first, Cause.WARMUP, np.where(skipped | no_end, unknown, Cause.INPUT))
    waits_1 = np.where(first | skipped, nothing, waits_for)
    phases = (
        (g0, c1, phase_1, waits_1),
        (c1, c2, constant(Cause.QUEUED), waits_for),
        (c2, c3, np.where(no_arrival, unknown, Cause.IN_FLIGHT), waits_for),
        (c3, c4, np.where(reload_missing, unknown, Cause.RELOAD), copy),
        (c4, g1, constant(Cause.LATE), nothing),
    )
    columns = [(device, *phase[:3], known, phase[3]) for phase in phases]
    return _stack(columns)


def _after_actions(timeline: Timeline) -> _Columns:
    """Cut what comes after each device's last recorded action, the optimizer run left out."""
    num_devices = timeline.schedule.num_devices
    offsets = timeline.schedule.offsets
    recorded = (timeline.start_ns >= 0) & (timeline.end_ns >= 0)
    devices = np.arange(num_devices, dtype=np.int64)
    step = np.full(num_devices, timeline.step_ns, np.int64)

    last = np.zeros(num_devices, np.int64)
    at = action_devices(timeline)
    np.maximum.at(last, at[recorded], timeline.end_ns[recorded])
    unused = offsets[1:] == offsets[:-1]
    # the row's last action was not recorded
    cut = ~unused & ~np.append(recorded, False)[np.maximum(offsets[1:] - 1, 0)]

    reduced = np.zeros(num_devices, np.int64)
    np.maximum.at(reduced, timeline.costs.stage_device, timeline.reduce_end_ns)
    exchanged = np.zeros(num_devices, np.int64)
    for side in range(2):
        of_side = timeline.costs.stage_device[timeline.costs.exchange_stages[:, side]]
        np.maximum.at(exchanged, of_side, timeline.exchange_end_ns)

    ran = (timeline.optimizer_start_ns >= 0) & (timeline.optimizer_end_ns >= 0)
    begin = np.clip(np.where(ran, timeline.optimizer_start_ns, step), last, step)
    finish = np.clip(np.where(ran, timeline.optimizer_end_ns, step), begin, step)

    c1 = np.where(cut | unused, begin, np.clip(reduced, last, begin))
    c2 = np.clip(exchanged, c1, begin)
    cause_1 = np.where(unused, Cause.UNUSED, np.where(cut, Cause.UNKNOWN, Cause.REDUCTION))
    rest = np.where(unused, Cause.UNUSED, Cause.COOLDOWN)
    nothing = np.full(num_devices, -1, np.int64)
    columns = [
        (devices, start, end, cause.astype(np.int64), nothing, nothing)
        for start, end, cause in (
            (last, c1, cause_1),
            (c1, c2, np.full(num_devices, Cause.EXCHANGE)),
            (c2, begin, rest),
            (finish, step, rest),
        )
    ]
    return _stack(columns)


def _stack(columns: list[_Columns]) -> _Columns:
    parts = [np.concatenate(part).astype(np.int64) for part in zip(*columns, strict=True)]
    device, start, end, cause, before, waits_for = parts
    return device, start, end, cause, before, waits_for
