"""The copy lane of a device as paging plays it: what leaves, what comes back, and when.

    lane free, or an action begins
        a reload whose backward is due          R, if memory has room; held back to this action
        otherwise, of what is here and ended    O of the longest remaining life per byte

A reload begins when the lane's last copy ends or when an action begins, the two moments that a
plan can name.
"""

from __future__ import annotations

from octotune.offload.pages import (
    AWAY,
    BACK,
    BACKWARD,
    KINDS,
    LEAVING,
    NEVER,
    Int64,
    Pages,
    Rule,
    State,
)
from simulator.actions import MICROBATCH_SHIFT, STAGE_SHIFT, CopyKind, Kind
from simulator.compiled import kernel

_B, _I = int(Kind.B), int(Kind.I)
_O, _R = int(CopyKind.O), int(CopyKind.R)


@kernel
def use_of(p: Pages, s: State, keys: Int64, stage: int, mb: int, now: int, notice: int) -> int:
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
        chain += p.duration[stage * KINDS + (_I if p.split[stage] else _B)] + p.delay[stage]
        if s.grad_at[stage, mb] != NEVER:
            return int(max(by_key, s.grad_at[stage, mb] + chain))
    return NEVER


@kernel
def next_reload(
    p: Pages, s: State, keys: Int64, rule: Rule, device: int, now: int
) -> tuple[int, int, int]:
    """Return the stage and microbatch to come back next, and when its copy must begin."""
    count = 0
    best, best_mb, soonest = -1, -1, NEVER
    for index in range(p.first[device], p.first[device + 1]):
        stage = p.local[index]
        if p.moved[stage] == 0:
            continue
        mb = max(s.reload_from[stage], s.turned[stage])
        while mb < s.begun[stage] and s.where[stage, mb] != AWAY:
            if s.where[stage, mb] == LEAVING:
                break
            mb += 1
        s.reload_from[stage] = mb
        if mb >= s.begun[stage] or s.where[stage, mb] != AWAY:
            continue
        use = use_of(p, s, keys, stage, mb, now, rule.notice)
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
def next_out(
    p: Pages, s: State, keys: Int64, rule: Rule, device: int, now: int, after: int
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
        use = use_of(p, s, keys, stage, mb, now, 0)
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
def start_copy(
    p: Pages, s: State, device: int, stage: int, mb: int, kind: int, begin: int
) -> None:
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
        s.where[stage, mb] = BACK
        s.back_at[stage, mb] = s.lane_free[device]
        s.held[device] += p.moved[stage]
        s.high[device] += p.moved[stage]
        s.crest[device] += p.moved[stage]
    else:
        s.where[stage, mb] = LEAVING
        s.host_held[p.host[device]] += p.moved[stage]
        s.top[stage] -= 1
        s.reload_from[stage] = min(s.reload_from[stage], mb)


@kernel
def start_reload(p: Pages, s: State, device: int, stage: int, mb: int, kept: int) -> bool:
    """Start a reload as early as its anchor, the last action, allows, if memory has the room."""
    if s.high[device] + p.moved[stage] + kept + p.margin[device] > p.room[device]:
        return False
    begin = max(s.lane_free[device], s.last_start[device])
    start_copy(p, s, device, stage, mb, _R, begin)
    return True


@kernel
def start_out(p: Pages, s: State, device: int, stage: int) -> None:
    mb = s.here[stage, s.top[stage] - 1]
    ended = s.forward_end[stage, mb]
    begin = max(s.lane_free[device], ended)
    if ended < s.last_start[device]:
        begin = max(begin, s.last_start[device])
    start_copy(p, s, device, stage, mb, _O, begin)


@kernel
def decide(
    p: Pages, s: State, keys: Int64, rule: Rule, device: int, now: int, gap: int, kept: int
) -> None:
    """Give an idle lane its next copy. `gap`: until it is asked again if it gets none."""
    stage, mb, latest = next_reload(p, s, keys, rule, device, now)
    out = next_out(p, s, keys, rule, device, now, -1)
    if out >= 0:
        gap = p.copy[out]
    if stage >= 0 and now + gap > latest:
        if start_reload(p, s, device, stage, mb, kept):
            return
        if out < 0:
            use = use_of(p, s, keys, stage, mb, now, 0)
            out = next_out(p, s, keys, rule, device, now, use)
    if out >= 0:
        start_out(p, s, device, out)


@kernel
def end_copy(p: Pages, s: State, device: int) -> None:
    stage, mb = s.copied_stage[device], s.copied_mb[device]
    if s.running[device] == _O:
        s.held[device] -= p.moved[stage]
        s.where[stage, mb] = AWAY
    else:
        s.host_held[p.host[device]] -= p.moved[stage]
    s.running[device] = -1
    if s.lane_free[device] >= s.free[device]:
        s.high[device] = s.held[device]


@kernel
def advance(
    p: Pages, s: State, keys: Int64, rule: Rule, device: int, until: int, kept: int
) -> None:
    """Let the lane go on to a moment at which no action begins or ends before."""
    while s.running[device] >= 0 and s.lane_free[device] <= until:
        now = s.lane_free[device]
        end_copy(p, s, device)
        decide(p, s, keys, rule, device, now, until - now, kept)


@kernel
def fetch(p: Pages, s: State, keys: Int64, rule: Rule, device: int, stage: int, mb: int) -> bool:
    """Bring an activation back now, taking others out for it; False: memory has no room."""
    use = s.grad_at[stage, mb]
    while s.where[stage, mb] != BACK:
        if s.running[device] >= 0:
            end_copy(p, s, device)
            if s.where[stage, mb] == BACK:
                break
        if start_reload(p, s, device, stage, mb, 0):
            break
        out = next_out(p, s, keys, rule, device, s.lane_free[device], use)
        if out < 0:
            return False
        start_out(p, s, device, out)
    return True
