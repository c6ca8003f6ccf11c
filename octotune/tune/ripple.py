"""An action moved in its row, felt only where that changes something.

A moved action changes starts on its device, then those of what waits for these; what starts as
before passes nothing on. An action that no moved one waits for keeps its tail, so as soon as its
new start plus its tail is above the limit, the step is: most trials end after a few actions.

Sources: heads and tails as Taillard 1994 uses them, ORSA Journal on Computing 6; longest paths
brought up to date in place, Michel and Van Hentenryck 2003, CP-AI-OR ("Maintaining longest paths
incrementally").
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from octotune.tune.graph import (
    DEVICE,
    EARLIER,
    FOLLOWER,
    GROWS,
    HELD,
    LAG,
    LENGTH,
    MOST,
    PLACE,
    SHRINKS,
    SOURCE,
    START,
    STATE,
    TAIL,
    TOKEN,
    WAS,
    tail_of,
)
from octotune.tune.kernel import kernel
from octotune.tune.problem import FAR, Int64, World
from octotune.tune.shape import REJECTED

# an action's state in a trial
DIRTY = 1  # its time is to be looked at
CHANGED = 2  # its start is another one than before
MOVED = 4
TURNS = 4  # so often as many actions as there are may be looked at in one trial: else it is a ring


class Ripple(NamedTuple):
    """Scratch of a trial."""

    next: Int64  # [D] each device's first dirty place, or last
    dirty: Int64  # [D] how many it has
    changed: Int64  # [A]
    row: Int64  # [A] a part of a row, as it was
    tail: Int64  # [A] at least what the tails of this part become


def empty_ripple(num_actions: int, world: World) -> Ripple:
    """Return scratch for an order of up to so many actions."""
    return Ripple(
        next=np.zeros(world.num_devices, np.int64),
        dirty=np.zeros(world.num_devices, np.int64),
        changed=np.zeros(num_actions, np.int64),
        row=np.zeros(num_actions, np.int64),
        tail=np.zeros(num_actions, np.int64),
    )


@kernel
def move(actions: Int64, row: Int64, begin: Int64, source: int, target: int) -> bool:
    """Move an action to another place of its row; return whether stages and memory allow it.

    Microbatches stay in order: where it passes its own kind, they change roles.
    """
    way = 1 if source < target else -1
    low, high = min(source, target), max(source, target)
    moved = row[source]
    token = actions[moved, TOKEN]
    p = source
    while p != target:
        a = row[p + way]
        if actions[a, TOKEN] == token:
            a, moved = moved, a
        row[p] = a
        p += way
    row[target] = moved
    for p in range(low, high + 1):
        actions[row[p], PLACE] = p
    held = actions[row[low - 1], HELD] if low > begin[actions[moved, DEVICE]] else 0
    for p in range(low, high + 1):
        a = row[p]
        held += actions[a, GROWS]
        earlier = actions[a, EARLIER]
        if held > actions[a, MOST] or (earlier >= 0 and actions[earlier, PLACE] > p):
            return False
        held -= actions[a, SHRINKS]
    return True


@kernel
def move_back(actions: Int64, row: Int64, before: Int64, low: int, high: int) -> None:
    """Put a part of a row back as it was."""
    for p in range(low, high + 1):
        a = before[p]
        row[p] = a
        actions[a, PLACE] = p


@kernel
def hold(actions: Int64, row: Int64, begin: Int64, low: int, high: int) -> None:
    """Bring the bytes in use after each of these places up to date."""
    held = actions[row[low - 1], HELD] if low > begin[actions[row[low], DEVICE]] else 0
    for p in range(low, high + 1):
        a = row[p]
        held += actions[a, GROWS] - actions[a, SHRINKS]
        actions[a, HELD] = held


@kernel
def try_move(
    actions: Int64,
    row: Int64,
    begin: Int64,
    optimizer: Int64,
    ripple: Ripple,
    source: int,
    target: int,
    limit: int,
) -> int:
    """Move an action to another place of its row; return the step, or REJECTED.

    Where the step is within the limit, everything is brought up to date; else it is as it was. No
    transfer queues, and nothing follows the actions but the optimizer.
    """
    low, high = min(source, target), max(source, target)
    before = ripple.row
    for p in range(low, high + 1):
        before[p] = row[p]
    # what starts no earlier, and is not moved, no moved action waits for
    late = actions[row[high], START]
    if not move(actions, row, begin, source, target):
        move_back(actions, row, before, low, high)
        return REJECTED
    _mark_moved(actions, row, begin, optimizer, ripple, low, high, late)
    num_changed, within = _spread(actions, row, begin, ripple, late, limit)
    step = 0
    for d in range(begin.shape[0] - 1):
        p = begin[d + 1] - 1
        if p >= begin[d]:
            step = max(step, actions[row[p], START] + actions[row[p], LENGTH] + optimizer[d])
    within = within and step <= limit
    for i in range(num_changed):
        a = ripple.changed[i]
        actions[a, STATE] = 0
        if not within:
            actions[a, START] = actions[a, WAS]
    for p in range(low, high + 1):
        actions[row[p], STATE] = 0
    if not within:
        move_back(actions, row, before, low, high)
        return REJECTED
    hold(actions, row, begin, low, high)
    _bring_tails(actions, row, begin, optimizer, ripple, low, high)
    return int(step)


@kernel
def _mark_moved(
    actions: Int64,
    row: Int64,
    begin: Int64,
    optimizer: Int64,
    ripple: Ripple,
    low: int,
    high: int,
    late: int,
) -> None:
    """Have moved actions looked at, and say what their tails become at least."""
    following, count = ripple.next, ripple.dirty
    d = actions[row[low], DEVICE]
    for e in range(begin.shape[0] - 1):
        count[e] = 0
    following[d], count[d] = low, high - low + 1
    after = optimizer[d]
    if high + 1 < begin[d + 1]:  # it comes after another action now
        count[d] += 1
        actions[row[high + 1], STATE] = DIRTY
        after = actions[row[high + 1], TAIL]
    for p in range(low, high + 1):
        actions[row[p], STATE] = DIRTY | MOVED
    for p in range(high, low - 1, -1):
        a = row[p]
        b = actions[a, FOLLOWER]
        if b >= 0 and actions[b, START] >= late and actions[b, STATE] & MOVED == 0:
            after = max(after, actions[b, LAG] + actions[b, TAIL])
        after += actions[a, LENGTH]
        ripple.tail[p] = after


@kernel
def _spread(
    actions: Int64, row: Int64, begin: Int64, ripple: Ripple, late: int, limit: int
) -> tuple[int, bool]:
    """Time what is to be looked at, and what changes with it, the soonest first.

    Return how many actions start at another time, and whether the step may be within the limit;
    if not, the times are not complete.
    """
    following, count = ripple.next, ripple.dirty
    num_devices = begin.shape[0] - 1
    num_changed, turns = 0, TURNS * begin[num_devices]
    while True:
        e, was = -1, FAR
        for c in range(num_devices):
            if count[c] > 0:
                start = actions[row[following[c]], START]
                if start < was:
                    e, was = c, start
        if e < 0:
            return num_changed, True
        p = following[e]
        a = row[p]
        actions[a, STATE] &= ~DIRTY
        count[e] -= 1
        ready = 0
        if p > begin[e]:
            ready = actions[row[p - 1], START] + actions[row[p - 1], LENGTH]
        b = actions[a, SOURCE]
        if b >= 0:
            ready = max(ready, actions[b, START] + actions[b, LENGTH] + actions[a, LAG])
        turns -= 1
        if ready != was:
            state, length = actions[a, STATE], actions[a, LENGTH]
            if state & CHANGED == 0:
                ripple.changed[num_changed] = a
                num_changed += 1
                actions[a, STATE] = state | CHANGED
                actions[a, WAS] = was
            actions[a, START] = ready
            if state & MOVED:
                rest = ripple.tail[p]
            else:
                rest = actions[a, TAIL] if actions[a, WAS] >= late else length
            if ready + rest > limit or turns < 0:
                break
            # what waits for it changes if it starts too early now, or waited for just this
            if p + 1 < begin[e + 1]:
                b = row[p + 1]
                start = actions[b, START]
                if (ready + length > start if ready > was else was + length == start) and (
                    actions[b, STATE] & DIRTY == 0
                ):
                    actions[b, STATE] |= DIRTY
                    if count[e] == 0 or p + 1 < following[e]:
                        following[e] = p + 1
                    count[e] += 1
            b = actions[a, FOLLOWER]
            if b >= 0:
                start = actions[b, START] - actions[b, LAG]
                if (ready + length > start if ready > was else was + length == start) and (
                    actions[b, STATE] & DIRTY == 0
                ):
                    actions[b, STATE] |= DIRTY
                    c, q = actions[b, DEVICE], actions[b, PLACE]
                    if count[c] == 0 or q < following[c]:
                        following[c] = q
                    count[c] += 1
        if count[e] > 0:
            p = following[e]
            while actions[row[p], STATE] & DIRTY == 0:
                p += 1
            following[e] = p
    for e in range(num_devices):
        p = following[e]
        while count[e] > 0:
            if actions[row[p], STATE] & DIRTY:
                actions[row[p], STATE] &= ~DIRTY
                count[e] -= 1
            p += 1
    return num_changed, False


@kernel
def _look_late(actions: Int64, following: Int64, count: Int64, a: int) -> None:
    """An action's tail is to be looked at."""
    if actions[a, STATE] == 0:
        actions[a, STATE] = DIRTY
        d, p = actions[a, DEVICE], actions[a, PLACE]
        if count[d] == 0 or p > following[d]:
            following[d] = p
        count[d] += 1


@kernel
def _bring_tails(
    actions: Int64,
    row: Int64,
    begin: Int64,
    optimizer: Int64,
    ripple: Ripple,
    low: int,
    high: int,
) -> None:
    """Bring the tails up to date: those of the moved actions, then of what these wait for."""
    following, count = ripple.next, ripple.dirty
    num_devices = begin.shape[0] - 1
    for e in range(num_devices):
        count[e] = 0
    for p in range(low, high + 1):
        _look_late(actions, following, count, row[p])
    if low > begin[actions[row[low], DEVICE]]:
        _look_late(actions, following, count, row[low - 1])
    while True:
        e, latest = -1, -1
        for c in range(num_devices):
            if count[c] > 0:
                start = actions[row[following[c]], START]
                if start > latest:
                    e, latest = c, start
        if e < 0:
            break
        p = following[e]
        a = row[p]
        actions[a, STATE] = 0
        count[e] -= 1
        tail = tail_of(actions, row, begin, optimizer, a)
        was = actions[a, TAIL]
        if tail != was:
            actions[a, TAIL] = tail
            more = tail > was
            if p > begin[e]:
                b = row[p - 1]
                rest = actions[b, TAIL] - actions[b, LENGTH]
                if tail > rest if more else was == rest:
                    _look_late(actions, following, count, b)
            b = actions[a, SOURCE]
            if b >= 0:
                rest = actions[b, TAIL] - actions[b, LENGTH] - actions[a, LAG]
                if tail > rest if more else was == rest:
                    _look_late(actions, following, count, b)
        if count[e] > 0:
            p = following[e]
            while actions[row[p], STATE] == 0:
                p -= 1
            following[e] = p
