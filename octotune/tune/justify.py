"""Forward and backward justification: a whole order made tighter, in time linear in its length.

Played backwards from its end, every action of an order starts as late as it can; played forwards
again, every action starts as soon as it can. In each direction a device that would have to wait
runs a later action of its row instead, if that one's input is there, memory suffices whatever
follows, and the action it waits for still starts no later than the play before had it. So no play
is longer than the last one, and gaps close: weight gradients that nothing waits for move to the
end, forwards into the holes of the warmup. A play costs some 100 ns an action, so that orders of
hundreds of thousands of actions, too long for moves one by one, still gain.

A search repeats it and lets some gaps, chosen at random, be filled by actions that are too long
for them. Transfers are played as if each had its channel for itself; whoever asks has the
simulator judge the order.

Sources:
    Li and Willis 1992, EJOR 56(3), and Valls, Ballestin and Quintanilla 2005, EJOR 165(2), on
    justification in resource-constrained project scheduling.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from octotune.tune.balance import RandomState, random
from octotune.tune.kernel import kernel
from octotune.tune.problem import FAR, Int64
from simulator.actions import (
    KIND_MASK,
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    STAGE_SHIFT,
    Kind,
    Schedule,
)
from simulator.costs import Costs
from simulator.memory import byte_changes

_F, _B, _I, _W = int(Kind.F), int(Kind.B), int(Kind.I), int(Kind.W)

LOOKAHEAD = 48
STUCK = -1


class Way(NamedTuple):
    """The graph of A actions on D devices in one direction of time."""

    begin: Int64  # [D + 1] where each device's row begins
    device: Int64  # [A]
    kind: Int64  # [A]
    duration: Int64  # [A]
    before: Int64  # [A, 2] the actions it waits for; -1: none
    lag: Int64  # [A, 2] and how long after their ends
    after: Int64  # [A, 2] the actions that wait for it; -1: none
    peak: Int64  # [A] bytes more while it runs
    change: Int64  # [A] bytes more once it has run
    room: Int64  # [D]
    lead: Int64  # [D] when the device is free at first
    tail: Int64  # [D] and what follows its last action


class Scratch(NamedTuple):
    """What one play writes."""

    start: Int64  # [A]
    row: Int64  # [A] the actions in the order in which each device ran them
    ready: Int64  # [A]
    missing: Int64  # [A]
    follow: Int64  # [A]
    latest: Int64  # [A]


class Disturbed(NamedTuple):
    """Which waits may be filled by what does not fit, times being parts of the step."""

    share: float  # of the waits below
    reach: int  # ns, at most
    kind: int  # of the action that is kept waiting; -1: any
    since: float
    until: float


UNDISTURBED = Disturbed(0.0, 0, -1, 0.0, 0.0)


@kernel
def play(
    way: Way,
    order: Int64,
    scratch: Scratch,
    disturbed: Disturbed,
    since: int,
    until: int,
    rng: RandomState,
) -> int:
    """Play an order, filling gaps; return when its actions end, or STUCK.

    No action is kept waiting beyond `scratch.latest`, but that from `since` until `until` some
    are disturbed.
    """
    share, reach, kind = disturbed.share, disturbed.reach, disturbed.kind
    begin, duration, before, lag, after = way.begin, way.duration, way.before, way.lag, way.after
    peak, change, room = way.peak, way.change, way.room
    start, row, ready, missing, follow, latest = (
        scratch.start,
        scratch.row,
        scratch.ready,
        scratch.missing,
        scratch.follow,
        scratch.latest,
    )
    num_devices, num_actions = len(begin) - 1, len(duration)
    for a in range(num_actions):
        ready[a] = 0
        missing[a] = (1 if before[a, 0] >= 0 else 0) + (1 if before[a, 1] >= 0 else 0)
    free = way.lead.copy()
    held = np.zeros(num_devices, np.int64)
    wake = np.full(num_devices, FAR, np.int64)
    head = np.full(num_devices, -1, np.int64)
    filled = begin[:-1].copy()
    for d in range(num_devices):
        low, high = begin[d], begin[d + 1]
        for p in range(low, high):
            follow[order[p]] = order[p + 1] if p + 1 < high else -1
        if low < high:
            head[d] = order[low]
            wake[d] = free[d]
    remaining = num_actions
    while remaining > 0:
        d = 0
        for e in range(1, num_devices):
            if wake[e] < wake[d]:
                d = e
        now = wake[d]
        if now >= FAR:
            return STUCK
        first = head[d]
        chosen, previous, soonest = -1, -1, FAR
        if missing[first] == 0:
            if ready[first] <= now:
                chosen = first
            else:
                soonest = ready[first]
        if chosen < 0:
            limit = latest[first]
            if missing[first] == 0:
                limit = max(limit, ready[first])
            if (
                share > 0.0
                and since <= now < until
                and (kind < 0 or way.kind[first] == kind)
                and random(rng) < share
            ):
                limit += int(reach * random(rng))
            level, most = held[d], -FAR  # of what is overtaken
            last = at = first
            for _ in range(LOOKAHEAD):
                most = max(most, level + peak[at])
                level += change[at]
                last = at
                at = follow[at]
                if at < 0:
                    break
                if missing[at] > 0:
                    continue
                if ready[at] > now:
                    soonest = min(soonest, ready[at])
                elif (
                    now + duration[at] <= limit
                    and held[d] + peak[at] <= room[d]
                    and (change[at] <= 0 or most + change[at] <= room[d])
                ):
                    chosen, previous = at, last
                    break
        if chosen < 0:
            wake[d] = soonest
            continue
        if previous < 0:
            head[d] = follow[chosen]
        else:
            follow[previous] = follow[chosen]
        end = now + duration[chosen]
        start[chosen] = now
        row[filled[d]] = chosen
        filled[d] += 1
        free[d] = end
        held[d] += change[chosen]
        remaining -= 1
        wake[d] = end if head[d] >= 0 else FAR
        for i in range(2):
            other = after[chosen, i]
            if other < 0:
                continue
            for j in range(2):
                if before[other, j] == chosen:
                    ready[other] = max(ready[other], end + lag[other, j])
                    missing[other] -= 1
            e = way.device[other]
            if missing[other] == 0 and e != d:
                wake[e] = min(wake[e], max(free[e], ready[other]))
    return int((free + way.tail).max())


@kernel
def justify(
    forward: Way,
    backward: Way,
    order: Int64,
    start: Int64,
    best: Int64,
    scratch: Scratch,
    tally: Int64,
    rounds: int,
    disturbed: Disturbed,
    tolerance: float,
    rng: RandomState,
) -> None:
    """Play an order backwards and forwards, `rounds` times; `order` and `start` go along.

    `tally` holds the current step, the best and the number of plays; `best` the best order.
    A round that ends more than `tolerance` above the best is undone.
    """
    num_actions, num_devices = len(order), len(forward.begin) - 1
    turned = np.empty(num_actions, np.int64)
    latest = scratch.latest
    for _ in range(rounds):
        for d in range(num_devices):
            low, high = forward.begin[d], forward.begin[d + 1]
            for p in range(low, high):
                turned[low + high - 1 - p] = order[p]
        step = tally[0]
        for a in range(num_actions):
            latest[a] = step - start[a] - forward.duration[a]
        since, until = int(disturbed.since * step), int(disturbed.until * step)
        step = play(backward, turned, scratch, disturbed, step - until, step - since, rng)
        tally[2] += 1
        if step < 0:
            continue
        for d in range(num_devices):
            low, high = forward.begin[d], forward.begin[d + 1]
            for p in range(low, high):
                turned[low + high - 1 - p] = scratch.row[p]
        for a in range(num_actions):
            latest[a] = step - scratch.start[a] - forward.duration[a]
        step = play(forward, turned, scratch, disturbed, since, until, rng)
        tally[2] += 1
        if step < 0 or step > tally[1] * (1.0 + tolerance):
            continue
        tally[0] = step
        order[:] = scratch.row
        start[:] = scratch.start
        if step < tally[1]:
            tally[1] = step
            best[:] = order


def ways_of(schedule: Schedule, costs: Costs) -> tuple[Way, Way]:
    """Return an order's graph forwards and backwards; actions are numbered as they are listed."""
    codes = schedule.codes
    stage, kind = codes >> STAGE_SHIFT, codes & KIND_MASK
    microbatch = (codes >> MICROBATCH_SHIFT) & MICROBATCH_MASK
    num_stages, m, num_actions = costs.num_stages, costs.num_microbatches, len(codes)
    numbers = np.arange(num_actions)
    # at stage + 1, so that there is none before the first and after the last
    place = np.full((num_stages + 2, len(Kind), m), -1, np.int64)
    place[stage + 1, kind, microbatch] = numbers
    back = np.maximum(place[:, _B], place[:, _I])
    hop = np.zeros(num_stages + 1, np.int64)  # from stage - 1
    hop[1:num_stages] = costs.transfer_hold_ns + costs.transfer_latency_ns
    before, after, lag, lag_after = (np.full((num_actions, 2), -1, np.int64) for _ in range(4))
    lag[:], lag_after[:] = 0, 0

    f = kind == _F
    s, n = stage[f], microbatch[f]
    before[f, 0], lag[f, 0] = place[s, _F, n], hop[s]
    after[f, 0], lag_after[f, 0] = place[s + 2, _F, n], hop[s + 1]
    after[f, 1] = back[s + 1, n]
    b = (kind == _B) | (kind == _I)
    s, n = stage[b], microbatch[b]
    before[b, 0], lag[b, 0] = back[s + 2, n], hop[s + 1]
    before[b, 1] = place[s + 1, _F, n]
    after[b, 0], lag_after[b, 0] = back[s, n], hop[s]
    after[b, 1] = place[s + 1, _W, n]
    w = kind == _W
    before[w, 0] = back[stage[w] + 1, microbatch[w]]

    rise, fall = byte_changes(costs)
    table = np.stack(
        [costs.forward_ns, costs.backward_ns, costs.input_grad_ns, costs.weight_grad_ns]
    )
    begin = np.asarray(schedule.offsets, np.int64)
    device = np.repeat(np.arange(costs.num_devices), np.diff(begin))
    duration = table[kind, stage]
    at = stage * len(Kind) + kind
    rises, falls = rise[at], fall[at]
    room = costs.memory_bytes - costs.static_bytes
    zero = np.zeros(costs.num_devices, np.int64)
    tail = np.array(costs.optimizer_ns, np.int64)
    common = {"begin": begin, "device": device, "kind": kind, "duration": duration, "room": room}
    return (
        Way(before=before, lag=lag, after=after, peak=rises, change=rises - falls,
            lead=zero, tail=tail, **common),
        Way(before=after, lag=lag_after, after=before, peak=falls, change=falls - rises,
            lead=tail, tail=zero, **common),
    )  # fmt: skip
