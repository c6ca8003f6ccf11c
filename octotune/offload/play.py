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

import numpy as np

from octotune.offload.lane import advance, decide, fetch, use_of
from octotune.offload.pages import (
    AWAY,
    BACK,
    BACKWARD,
    FORWARD,
    HERE,
    KINDS,
    NEVER,
    WEIGHT,
    Bool,
    Int64,
    Pages,
    Rule,
    State,
    fresh_state,
)
from simulator.actions import MICROBATCH_SHIFT, STAGE_SHIFT, CopyKind, Kind
from simulator.compiled import kernel

_F, _B, _I, _W = int(Kind.F), int(Kind.B), int(Kind.I), int(Kind.W)
_O = int(CopyKind.O)

# what `play` returns
DONE, STUCK, LATE = 0, 1, 2


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
    s = fresh_state(p, copies, anchors, written, over, late)
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
        work[device] += m * p.duration[stage * KINDS + _F]
        if p.split[stage]:
            work[device] += m * p.duration[stage * KINDS + _I]
            work[device] += m * p.duration[stage * KINDS + _W]
        else:
            work[device] += m * p.duration[stage * KINDS + _B]
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
            rise = p.rise[stage * KINDS + kind]
            if row == FORWARD and not fixed:
                held = s.crest[device] if ahead > start else s.held[device]
                admitted = admits(p, s, keys, rule, device, stage, start, held + rise)
                if not admitted and start > max(now, ahead) and s.running[device] >= 0:
                    advance(p, s, keys, rule, device, start, rise + p.margin[device])
                    ahead, held = start, s.held[device]
                    admitted = admits(p, s, keys, rule, device, stage, start, held + rise)
                if not admitted:
                    if weight_stage >= 0:
                        stage, row, start = weight_stage, WEIGHT, now
                        break
                    passed[3 * stage + row] = True
                    continue
            expected = start
            if row == BACKWARD and p.moved[stage] > 0:
                if s.where[stage, mb] == BACK:
                    expected = max(start, s.back_at[stage, mb])
                elif s.where[stage, mb] != HERE:
                    expected = max(start, s.lane_free[device] + p.copy[stage])
            if expected > now and not fixed:
                gap = expected - now
                if weight_stage >= 0:
                    length = p.duration[weight_stage * KINDS + _W]
                    if length * rule.slack <= gap:
                        stage, row, start = weight_stage, WEIGHT, now
                        break
                other, other_row = overtaking(
                    p, s, keys, rule, device, key, now, expected, ahead, passed
                )
                if other >= 0:
                    stage, row = other, other_row
                    mb = s.begun[stage] if row == FORWARD else s.turned[stage]
                    arrived = s.input_at if row == FORWARD else s.grad_at
                    start = max(now, arrived[stage, mb])
            if row == BACKWARD and p.moved[stage] > 0 and s.where[stage, mb] != HERE:
                advance(p, s, keys, rule, device, start, 0)
                ahead = max(ahead, start)
                fetched = s.where[stage, mb] == BACK
                if not fetched:
                    fetched = fetch(p, s, keys, rule, device, stage, mb)
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
                rise = p.rise[stage * KINDS + kind]
                held = s.crest[device] if ahead > start else s.held[device]
                if ahead < start:
                    advance(p, s, keys, rule, device, start, max(0, rise))
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
        change = stage * KINDS + kind
        length = p.duration[change]
        end = start + length
        if start > now:
            advance(p, s, keys, rule, device, start, max(0, p.rise[change]))
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
            s.where[stage, mb] = HERE
            s.forward_end[stage, mb] = end
        elif row == BACKWARD:
            s.turned[stage] += 1
        if s.running[device] < 0:
            decide(p, s, keys, rule, device, start, length, 0)
        advance(p, s, keys, rule, device, end - 1, 0)
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
        advance(p, s, keys, rule, device, end, 0)
        s.crest[device] = s.held[device]
        if s.running[device] < 0:
            decide(p, s, keys, rule, device, end, 0, 0)
        end_ns = max(end_ns, end)
        if end + work[device] >= limit_ns:
            return LATE, end + work[device]
    return DONE, end_ns


@kernel
def admits(
    p: Pages, s: State, keys: Int64, rule: Rule, device: int, stage: int, start: int, held: int
) -> bool:
    """Say whether a forward, counted in `held`, has room beside the reloads that are due."""
    held += p.margin[device]
    if s.running[device] == _O and s.lane_free[device] <= start:
        held -= p.moved[s.copied_stage[device]]
    if held > p.room[device]:
        return False
    until = start + p.duration[stage * KINDS + _F]
    until += int(rule.reach * p.copy[stage]) if p.moved[stage] > 0 else 0
    for index in range(p.first[device], p.first[device + 1]):
        one = p.local[index]
        if p.moved[one] == 0:
            continue
        mb = max(s.reload_from[one], s.turned[one])
        away = mb < s.begun[one] and s.where[one, mb] == AWAY
        if away and use_of(p, s, keys, one, mb, start, rule.notice) - p.copy[one] <= until:
            held += p.moved[one]
    return bool(held <= p.room[device])


@kernel
def overtaking(
    p: Pages,
    s: State,
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
            length = p.duration[one * KINDS + (_I if p.split[one] else _B)]
            begin = max(now, s.grad_at[one, mb])
            if p.moved[one] > 0:
                if s.where[one, mb] == BACK:
                    begin = max(begin, s.back_at[one, mb])
                elif s.where[one, mb] != HERE:
                    begin = NEVER
            if (
                key < keys[BACKWARD, one, mb] < lowest
                and begin + length <= expected + rule.overtake * length
            ):
                best, best_row, lowest = one, BACKWARD, keys[BACKWARD, one, mb]
        mb = s.begun[one]
        if mb < p.num_microbatches and not passed[3 * one]:
            length = p.duration[one * KINDS + _F]
            begin = max(now, s.input_at[one, mb])
            held = s.crest[device] if ahead > begin else s.held[device]
            if (
                key < keys[FORWARD, one, mb] < lowest
                and begin + length <= expected + rule.overtake * length
                and admits(p, s, keys, rule, device, one, begin, held + p.rise[one * KINDS + _F])
            ):
                best, best_row, lowest = one, FORWARD, keys[FORWARD, one, mb]
    return best, best_row
