"""Play the actions of a schedule and the copies of its activations together, within memory.

It is paging with a known future. Each action has a key, the time at which it ran in a schedule
that was given; a device runs its actions in the order of their keys. An activation in memory is a
page: its next use is its backward, whose time the key tells, shifted by how late the device is.

    lane free, or an action begins
        a reload whose backward is due          R, if memory has room; held back to this action
        otherwise, of what is here and ended    O of the longest remaining life per byte
    a forward without room                      is passed over, for a W, or for the next key

A forward cannot wait: by the contract an action starts as soon as its device and its input are
there, whatever the memory. So where a forward lacks room another action takes its place, and only
after that one it is looked at again. For the same reason a reload begins when the lane's last copy
ends or when an action begins, the two moments that a plan can name.

All decisions of a device depend on that device and on what has arrived there, so each device plays
on by itself until it waits for another. Only a host link that devices share is approximate: its
sides are given out in the order of asking as devices are played. The simulator has the last word.

Source:
    Wan et al. 2025, PipeOffload, arXiv:2503.01328, section 3 (longest life first, earliest O,
    latest R); Belady 1966 (the page used last leaves first).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.actions import MICROBATCH_SHIFT, STAGE_SHIFT, CopyKind, Kind
from simulator.compiled import kernel

Int64 = NDArray[np.int64]
Int8 = NDArray[np.int8]
Bool = NDArray[np.bool_]

_F, _B, _I, _W = int(Kind.F), int(Kind.B), int(Kind.I), int(Kind.W)
_O, _R = int(CopyKind.O), int(CopyKind.R)
_KINDS = len(Kind)
FORWARD, BACKWARD, WEIGHT = 0, 1, 2  # rows of the keys

NEVER = 2**62
_FOREVER = np.int64(NEVER)  # the same, for arrays

# what `play` returns
DONE, STUCK, LATE = 0, 1, 2

# where an activation is
_ABSENT, _HERE, _LEAVING, _AWAY, _BACK = 0, 1, 2, 3, 4


class Pages(NamedTuple):
    """Costs as the kernel takes them: S stages, D devices, m microbatches."""

    num_microbatches: int
    duration: Int64  # [S * 4] ns
    delay: Int64  # [S] ns from the end of an action of stage s - 1 to its arrival; [0] is 0
    split: Bool  # [S] I and W in place of B
    stage_device: Int64  # [S]
    first: Int64  # [D + 1] where each device's stages begin in `local`
    local: Int64  # [S] the stages by device, rising
    rise: Int64  # [S * 4] bytes an action adds at its start
    fall: Int64  # [S * 4] and takes away at its end
    room: Int64  # [D] bytes beside what is always held
    margin: Int64  # [D] the most that a backward or W adds at its start
    moved: Int64  # [S] bytes of a copy; 0: nothing of the stage leaves
    copy: Int64  # [S] ns one way
    link: Int64  # [D] the host link a device shares; -1: its own
    num_links: int
    host: Int64  # [D]
    num_hosts: int
    host_room: int


class Rule(NamedTuple):
    """How copies and forwards weigh. Copy times are those of one way."""

    least_trips: float = 1.0  # round trips that a life must last to be worth a copy
    least_life_ns: int = 0  # lives shorter than this stay, too
    lead: float = 0.0  # copy times that a reload begins before it must
    notice: int = 1  # stages further on whose backward must have begun before a reload is due
    reach: float = 0.0  # copy times beyond a forward's end whose reloads keep their room from it
    window_ns: int = 0  # how much later an action's key may be that overtakes one not ready
    overtake: float = 0.0  # of its own length, that it may delay the other
    slack: float = 1.0  # of its length, that must be idle for a W to come early


class _State(NamedTuple):
    held: Int64  # [D] bytes now
    high: Int64  # [D] the most since the last action began or the last copy ended
    crest: Int64  # [D] the most since the last action ended
    free: Int64  # [D] when the last action ended
    last_start: Int64  # [D]
    last_code: Int64  # [D] the last action, or -1
    lag: Int64  # [D] how much later than its key the last action began
    lane_free: Int64  # [D]
    running: Int64  # [D] kind of the copy that runs, or -1
    copied_stage: Int64  # [D]
    copied_mb: Int64  # [D]
    where: Int8  # [S, m]
    begun: Int64  # [S]
    turned: Int64  # [S]
    left: Int64  # [S]
    input_at: Int64  # [S, m]
    grad_at: Int64  # [S, m]
    forward_end: Int64  # [S, m]
    back_at: Int64  # [S, m] when a reload ends
    here: Int64  # [S, m] microbatches that are here, rising, from bottom to top
    bottom: Int64  # [S]
    top: Int64  # [S]
    reload_from: Int64  # [S] no microbatch below it is away
    link_free: Int64  # [2 * links]
    host_held: Int64  # [hosts]
    copies: Int64  # [2 * S * m] packed
    anchors: Int64  # [2 * S * m]
    written: Int64  # [D]
    needs: Int64  # [S] scratch
    costs: Int64  # [S] scratch
    over: Int64  # [D] bytes above the room, where the order is fixed
    late: Int64  # [S] ns that backwards of a stage waited for reloads alone


@kernel
def _use(p: Pages, s: _State, keys: Int64, stage: int, mb: int, now: int, notice: int) -> int:
    """Return when the backward of an activation is expected to begin.

    `notice` > 0: NEVER if none of as many stages further on has begun its own.
    """
    known = s.grad_at[stage, mb]
    if known != NEVER:
        return int(max(known, now))
    by_key = max(now, keys[BACKWARD, stage, mb] + s.lag[p.stage_device[stage]])
    if notice == 0:
        return int(by_key)
    chain = 0
    last = min(stage + notice, len(p.delay)) - 1
    while stage < last:
        stage += 1
        chain += p.duration[stage * _KINDS + (_I if p.split[stage] else _B)] + p.delay[stage]
        if s.grad_at[stage, mb] != NEVER:
            return int(max(by_key, s.grad_at[stage, mb] + chain))
    return NEVER


@kernel
def _next_reload(
    p: Pages, s: _State, keys: Int64, rule: Rule, device: int, now: int
) -> tuple[int, int, int]:
    """Return the stage and microbatch to come back next, and when its copy must begin."""
    count = 0
    best, best_mb, soonest = -1, -1, NEVER
    for index in range(p.first[device], p.first[device + 1]):
        stage = p.local[index]
        if p.moved[stage] == 0:
            continue
        mb = max(s.reload_from[stage], s.turned[stage])
        while mb < s.begun[stage] and s.where[stage, mb] != _AWAY:
            if s.where[stage, mb] == _LEAVING:
                break
            mb += 1
        s.reload_from[stage] = mb
        if mb >= s.begun[stage] or s.where[stage, mb] != _AWAY:
            continue
        use = _use(p, s, keys, stage, mb, now, rule.notice)
        if use == NEVER:
            continue
        if use < soonest:
            soonest, best, best_mb = use, stage, mb
        # insert, latest use first
        at = count
        while at > 0 and s.needs[at - 1] < use:
            s.needs[at] = s.needs[at - 1]
            s.costs[at] = s.costs[at - 1]
            at -= 1
        s.needs[at] = use
        s.costs[at] = p.copy[stage]
        count += 1
    latest = NEVER
    for at in range(count):
        latest = min(latest, s.needs[at]) - s.costs[at]
    if best >= 0:
        latest -= int(rule.lead * p.copy[best])
    return best, best_mb, latest


@kernel
def _next_out(
    p: Pages, s: _State, keys: Int64, rule: Rule, device: int, now: int, after: int
) -> int:
    """Return the stage whose newest activation should leave, or -1.

    `after` >= 0: any activation whose use is later than that; otherwise one worth the trip.
    """
    best, most = -1, -1.0
    for index in range(p.first[device], p.first[device + 1]):
        stage = p.local[index]
        if s.top[stage] <= s.bottom[stage]:
            continue
        mb = s.here[stage, s.top[stage] - 1]
        ended = s.forward_end[stage, mb]
        use = _use(p, s, keys, stage, mb, now, 0)
        life = use - now
        if after >= 0:
            if use <= after:
                continue
        elif life < rule.least_trips * 2 * p.copy[stage] or use - ended < rule.least_life_ns:
            continue
        if s.host_held[p.host[device]] + p.moved[stage] > p.host_room:
            continue
        worth = life / p.moved[stage]
        if worth > most:
            best, most = stage, worth
    return best


@kernel
def _copy(p: Pages, s: _State, device: int, stage: int, mb: int, kind: int, begin: int) -> None:
    """Start a copy at `begin`, or when the shared link is free; note its anchor."""
    asked = begin
    if p.link[device] >= 0:
        side = 2 * p.link[device] + (1 if kind == _R else 0)
        begin = max(begin, s.link_free[side])
        s.link_free[side] = begin + p.copy[stage]
    anchored = s.last_code[device] >= 0 and (
        kind == _R or s.forward_end[stage, mb] < s.last_start[device]
    )
    at = s.written[device]
    s.copies[at] = (stage << STAGE_SHIFT) | (mb << MICROBATCH_SHIFT) | kind
    s.anchors[at] = s.last_code[device] if anchored and asked >= s.last_start[device] else -1
    s.written[device] += 1
    s.lane_free[device] = begin + p.copy[stage]
    s.running[device] = kind
    s.copied_stage[device] = stage
    s.copied_mb[device] = mb
    if kind == _R:
        s.where[stage, mb] = _BACK
        s.back_at[stage, mb] = s.lane_free[device]
        s.held[device] += p.moved[stage]
        s.high[device] += p.moved[stage]
        s.crest[device] += p.moved[stage]
    else:
        s.where[stage, mb] = _LEAVING
        s.host_held[p.host[device]] += p.moved[stage]
        s.top[stage] -= 1
        s.reload_from[stage] = min(s.reload_from[stage], mb)


@kernel
def _reload(p: Pages, s: _State, device: int, stage: int, mb: int, kept: int) -> bool:
    """Start a reload as early as its anchor, the last action, allows, if memory has the room."""
    if s.high[device] + p.moved[stage] + kept + p.margin[device] > p.room[device]:
        return False
    begin = max(s.lane_free[device], s.last_start[device])
    _copy(p, s, device, stage, mb, _R, begin)
    return True


@kernel
def _out(p: Pages, s: _State, device: int, stage: int) -> None:
    mb = s.here[stage, s.top[stage] - 1]
    ended = s.forward_end[stage, mb]
    begin = max(s.lane_free[device], ended)
    if ended < s.last_start[device]:
        begin = max(begin, s.last_start[device])
    _copy(p, s, device, stage, mb, _O, begin)


@kernel
def _decide(
    p: Pages, s: _State, keys: Int64, rule: Rule, device: int, now: int, gap: int, kept: int
) -> None:
    """Give an idle lane its next copy. `gap`: until it is asked again if it gets none."""
    stage, mb, latest = _next_reload(p, s, keys, rule, device, now)
    out = _next_out(p, s, keys, rule, device, now, -1)
    if out >= 0:
        gap = p.copy[out]
    if stage >= 0 and now + gap > latest:
        if _reload(p, s, device, stage, mb, kept):
            return
        if out < 0:
            use = _use(p, s, keys, stage, mb, now, 0)
            out = _next_out(p, s, keys, rule, device, now, use)
    if out >= 0:
        _out(p, s, device, out)


@kernel
def _end_copy(p: Pages, s: _State, device: int) -> None:
    stage, mb = s.copied_stage[device], s.copied_mb[device]
    if s.running[device] == _O:
        s.held[device] -= p.moved[stage]
        s.where[stage, mb] = _AWAY
    else:
        s.host_held[p.host[device]] -= p.moved[stage]
    s.running[device] = -1
    if s.lane_free[device] >= s.free[device]:
        s.high[device] = s.held[device]


@kernel
def _advance(
    p: Pages, s: _State, keys: Int64, rule: Rule, device: int, until: int, kept: int
) -> None:
    """Let the lane go on to a moment at which no action begins or ends before."""
    while s.running[device] >= 0 and s.lane_free[device] <= until:
        now = s.lane_free[device]
        _end_copy(p, s, device)
        _decide(p, s, keys, rule, device, now, until - now, kept)


@kernel
def _fetch(p: Pages, s: _State, keys: Int64, rule: Rule, device: int, stage: int, mb: int) -> bool:
    """Bring an activation back now, taking others out for it; False: memory has no room."""
    use = s.grad_at[stage, mb]
    while s.where[stage, mb] != _BACK:
        if s.running[device] >= 0:
            _end_copy(p, s, device)
            if s.where[stage, mb] == _BACK:
                break
        if _reload(p, s, device, stage, mb, 0):
            break
        out = _next_out(p, s, keys, rule, device, s.lane_free[device], use)
        if out < 0:
            return False
        _out(p, s, device, out)
    return True


@kernel
def play(
    p: Pages,
    keys: Int64,  # [3, S, m] rising in m
    rule: Rule,
    fixed: bool,  # keep the order of the keys whatever memory it takes
    limit_ns: int,  # give up once the end cannot be below it
    out: Int64,  # [A] results from here on: packed actions
    offsets: Int64,  # [D + 1]
    copies: Int64,  # [2 * S * m] device d's begin at copy_offsets[d]
    anchors: Int64,  # [2 * S * m] -1: none
    copy_offsets: Int64,  # [D + 1]
    written: Int64,  # [D] where each device's copies end
    over: Int64,  # [D] bytes above the room, where the order is fixed
    late: Int64,  # [S] ns for which backwards waited for nothing but their reload
) -> tuple[int, int]:
    """Fill in rows and lanes; return the state and when the last action ends."""
    m = p.num_microbatches
    num_devices, num_stages = len(p.room), len(p.stage_device)
    s = _State(
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices, np.int64),
        np.full(num_devices, -1),
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices, np.int64),
        np.full(num_devices, -1),
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices, np.int64),
        np.zeros((num_stages, m), np.int8),
        np.zeros(num_stages, np.int64),
        np.zeros(num_stages, np.int64),
        np.zeros(num_stages, np.int64),
        np.full((num_stages, m), _FOREVER),
        np.full((num_stages, m), _FOREVER),
        np.zeros((num_stages, m), np.int64),
        np.zeros((num_stages, m), np.int64),
        np.zeros((num_stages, m), np.int64),
        np.zeros(num_stages, np.int64),
        np.zeros(num_stages, np.int64),
        np.zeros(num_stages, np.int64),
        np.zeros(2 * p.num_links, np.int64),
        np.zeros(p.num_hosts, np.int64),
        copies,
        anchors,
        written,
        np.zeros(num_stages, np.int64),
        np.zeros(num_stages, np.int64),
        over,
        late,
    )
    s.input_at[0, :] = 0
    sleeps = np.zeros(num_devices, np.bool_)
    passed = np.zeros(3 * num_stages, np.bool_)
    placed = offsets[:-1].copy()
    work = np.zeros(num_devices, np.int64)
    for device in range(num_devices):
        written[device] = copy_offsets[device]
        over[device] = 0
    for stage in range(num_stages):
        late[stage] = 0
        device = p.stage_device[stage]
        work[device] += m * p.duration[stage * _KINDS + _F]
        if p.split[stage]:
            work[device] += m * p.duration[stage * _KINDS + _I]
            work[device] += m * p.duration[stage * _KINDS + _W]
        else:
            work[device] += m * p.duration[stage * _KINDS + _B]
    remaining = len(out)
    end_ns = 0
    desperate = False
    while remaining > 0:
        device, now = -1, NEVER
        for other in range(num_devices):
            if not sleeps[other] and work[other] > 0 and s.free[other] < now:
                device, now = other, s.free[other]
        if device < 0:
            if desperate:
                return STUCK, end_ns
            desperate = True
            sleeps[:] = False
            continue
        low, high = p.first[device], p.first[device + 1]
        for index in range(low, high):
            passed[3 * p.local[index] : 3 * p.local[index] + 3] = False
        stage, row, start = -1, -1, 0
        ahead = now  # how far the lane has been played while the device chose
        while True:
            # the lowest key that is not passed over, and the lowest W that could run
            key, stage, row = NEVER, -1, -1
            weight_key, weight_stage = NEVER, -1
            for index in range(low, high):
                one = p.local[index]
                mb = s.begun[one]
                if mb < m and not passed[3 * one] and keys[FORWARD, one, mb] < key:
                    key, stage, row = keys[FORWARD, one, mb], one, FORWARD
                mb = s.turned[one]
                waits = mb < s.begun[one] and not passed[3 * one + 1]
                if waits and keys[BACKWARD, one, mb] < key:
                    key, stage, row = keys[BACKWARD, one, mb], one, BACKWARD
                mb = s.left[one]
                waits = p.split[one] and mb < s.turned[one]
                if waits and keys[WEIGHT, one, mb] < weight_key:
                    weight_key, weight_stage = keys[WEIGHT, one, mb], one
            if weight_key < key:
                key, stage, row = weight_key, weight_stage, WEIGHT
            if stage < 0:
                break
            start = now
            if row == WEIGHT:
                break
            mb = s.begun[stage] if row == FORWARD else s.turned[stage]
            ready = s.input_at[stage, mb] if row == FORWARD else s.grad_at[stage, mb]
            if ready == NEVER:
                if desperate:
                    passed[3 * stage + row] = True
                    continue
                stage = -1
                break
            start = max(now, ready)
            kind = _F if row == FORWARD else (_I if p.split[stage] else _B)
            rise = p.rise[stage * _KINDS + kind]
            if row == FORWARD and not fixed:
                held = s.crest[device] if ahead > start else s.held[device]
                admitted = _admits(p, s, keys, rule, device, stage, start, held + rise)
                if not admitted and start > max(now, ahead) and s.running[device] >= 0:
                    _advance(p, s, keys, rule, device, start, rise + p.margin[device])
                    ahead, held = start, s.held[device]
                    admitted = _admits(p, s, keys, rule, device, stage, start, held + rise)
                if not admitted:
                    if weight_stage >= 0:
                        stage, row, start = weight_stage, WEIGHT, now
                        break
                    passed[3 * stage + row] = True
                    continue
            expected = start
            if row == BACKWARD and p.moved[stage] > 0:
                if s.where[stage, mb] == _BACK:
                    expected = max(start, s.back_at[stage, mb])
                elif s.where[stage, mb] != _HERE:
                    expected = max(start, s.lane_free[device] + p.copy[stage])
            if expected > now and not fixed:
                gap = expected - now
                if weight_stage >= 0:
                    length = p.duration[weight_stage * _KINDS + _W]
                    if length * rule.slack <= gap:
                        stage, row, start = weight_stage, WEIGHT, now
                        break
                other, other_row = _overtaking(
                    p, s, keys, rule, device, key, now, expected, ahead, passed
                )
                if other >= 0:
                    stage, row = other, other_row
                    mb = s.begun[stage] if row == FORWARD else s.turned[stage]
                    arrived = s.input_at if row == FORWARD else s.grad_at
                    start = max(now, arrived[stage, mb])
            if row == BACKWARD and p.moved[stage] > 0 and s.where[stage, mb] != _HERE:
                _advance(p, s, keys, rule, device, start, 0)
                ahead = max(ahead, start)
                fetched = s.where[stage, mb] == _BACK
                if not fetched:
                    fetched = _fetch(p, s, keys, rule, device, stage, mb)
                    ahead = max(ahead, s.lane_free[device])
                if not fetched:
                    if fixed:
                        return STUCK, end_ns
                    if weight_stage >= 0:
                        stage, row, start = weight_stage, WEIGHT, now
                        break
                    passed[3 * stage + row] = True
                    continue
                if s.back_at[stage, mb] > start:
                    late[stage] += s.back_at[stage, mb] - start
                    start = s.back_at[stage, mb]
            if row == BACKWARD:
                # from here on it stays
                while s.bottom[stage] < s.top[stage] and s.here[stage, s.bottom[stage]] <= mb:
                    s.bottom[stage] += 1
            if row == BACKWARD and not fixed:
                kind = _I if p.split[stage] else _B
                rise = p.rise[stage * _KINDS + kind]
                held = s.crest[device] if ahead > start else s.held[device]
                if ahead < start:
                    _advance(p, s, keys, rule, device, start, max(0, rise))
                    ahead, held = start, s.held[device]
                if held + rise > p.room[device]:
                    if weight_stage >= 0:
                        stage, row, start = weight_stage, WEIGHT, now
                        break
                    passed[3 * stage + row] = True
                    continue
            break
        if stage < 0:
            sleeps[device] = True
            continue
        desperate = False
        if row == FORWARD:
            kind, mb = _F, s.begun[stage]
        elif row == BACKWARD:
            kind, mb = (_I if p.split[stage] else _B), s.turned[stage]
        else:
            kind, mb = _W, s.left[stage]
        change = stage * _KINDS + kind
        length = p.duration[change]
        end = start + length
        if start > now:
            _advance(p, s, keys, rule, device, start, max(0, p.rise[change]))
        s.held[device] += p.rise[change]
        s.high[device] = s.held[device]
        over[device] = max(over[device], s.held[device] - p.room[device])
        code = (stage << STAGE_SHIFT) | (mb << MICROBATCH_SHIFT) | kind
        s.last_start[device] = start
        s.last_code[device] = code
        s.lag[device] = start - keys[row, stage, mb]
        out[placed[device]] = code
        placed[device] += 1
        remaining -= 1
        work[device] -= length
        if row == FORWARD:
            s.begun[stage] += 1
            s.where[stage, mb] = _HERE
            s.forward_end[stage, mb] = end
        elif row == BACKWARD:
            s.turned[stage] += 1
        if s.running[device] < 0:
            _decide(p, s, keys, rule, device, start, length, 0)
        _advance(p, s, keys, rule, device, end - 1, 0)
        s.held[device] -= p.fall[change]
        if row == FORWARD:
            if p.moved[stage] > 0:
                s.here[stage, s.top[stage]] = mb
                s.top[stage] += 1
            there = end + (p.delay[stage + 1] if stage + 1 < num_stages else 0)
            if stage + 1 < num_stages:
                s.input_at[stage + 1, mb] = there
                sleeps[p.stage_device[stage + 1]] = False
            else:
                s.grad_at[stage, mb] = end
        elif row == BACKWARD:
            if stage > 0:
                s.grad_at[stage - 1, mb] = end + p.delay[stage]
                sleeps[p.stage_device[stage - 1]] = False
            if not p.split[stage]:
                s.left[stage] += 1
        else:
            s.left[stage] += 1
        s.free[device] = end
        _advance(p, s, keys, rule, device, end, 0)
        s.crest[device] = s.held[device]
        if s.running[device] < 0:
            _decide(p, s, keys, rule, device, end, 0, 0)
        end_ns = max(end_ns, end)
        if end + work[device] >= limit_ns:
            return LATE, end + work[device]
    return DONE, end_ns


@kernel
def _admits(
    p: Pages, s: _State, keys: Int64, rule: Rule, device: int, stage: int, start: int, held: int
) -> bool:
    """Say whether a forward, counted in `held`, has room beside the reloads that are due."""
    held += p.margin[device]
    if s.running[device] == _O and s.lane_free[device] <= start:
        held -= p.moved[s.copied_stage[device]]
    if held > p.room[device]:
        return False
    until = start + p.duration[stage * _KINDS + _F]
    until += int(rule.reach * p.copy[stage]) if p.moved[stage] > 0 else 0
    for index in range(p.first[device], p.first[device + 1]):
        one = p.local[index]
        if p.moved[one] == 0:
            continue
        mb = max(s.reload_from[one], s.turned[one])
        away = mb < s.begun[one] and s.where[one, mb] == _AWAY
        if away and _use(p, s, keys, one, mb, start, rule.notice) - p.copy[one] <= until:
            held += p.moved[one]
    return bool(held <= p.room[device])


@kernel
def _overtaking(
    p: Pages,
    s: _State,
    keys: Int64,
    rule: Rule,
    device: int,
    key: int,
    now: int,
    expected: int,
    ahead: int,
    passed: Bool,
) -> tuple[int, int]:
    """Return the action of the lowest key that may run before one that is not ready, or -1."""
    best, best_row, lowest = -1, -1, key + rule.window_ns + 1
    for index in range(p.first[device], p.first[device + 1]):
        one = p.local[index]
        mb = s.turned[one]
        if mb < s.begun[one] and not passed[3 * one + 1]:
            length = p.duration[one * _KINDS + (_I if p.split[one] else _B)]
            begin = max(now, s.grad_at[one, mb])
            if p.moved[one] > 0:
                if s.where[one, mb] == _BACK:
                    begin = max(begin, s.back_at[one, mb])
                elif s.where[one, mb] != _HERE:
                    begin = NEVER
            if (
                key < keys[BACKWARD, one, mb] < lowest
                and begin + length <= expected + rule.overtake * length
            ):
                best, best_row, lowest = one, BACKWARD, keys[BACKWARD, one, mb]
        mb = s.begun[one]
        if mb < p.num_microbatches and not passed[3 * one]:
            length = p.duration[one * _KINDS + _F]
            begin = max(now, s.input_at[one, mb])
            held = s.crest[device] if ahead > begin else s.held[device]
            if (
                key < keys[FORWARD, one, mb] < lowest
                and begin + length <= expected + rule.overtake * length
                and _admits(p, s, keys, rule, device, one, begin, held + p.rise[one * _KINDS + _F])
            ):
                best, best_row, lowest = one, FORWARD, keys[FORWARD, one, mb]
    return best, best_row
