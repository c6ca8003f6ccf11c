"""The list scheduler: phases -> an order that runs within memory.

Every action has a key, `beat(microbatch) + phase(stage, F or backward)`: when it would run in an
endless rhythm that takes one microbatch a period, one by one or in groups. A device runs, of its
actions whose input is there, the one with the smallest key. Phases that rise along the chain of
stages are thus a schedule: the published patterns are phases, and so is anything between them, for
stages of any length. Keys order; times come from playing the order.

- `window`: an action may overtake one that is not ready only if its key is at most this much
  larger. 0 keeps the order of the keys, a large window never waits while something is ready.
- `delay`: nor may it delay that one by more than this share of its own length, unless its
  microbatch is no younger.
- W fills, by the rules of `octotune.schedules.weights`.
- Memory cannot deadlock: a device admits an F only if every stage of its own without a microbatch
  in flight still has room for one, and the largest backward beside them. So the oldest microbatch
  can always go on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octotune.schedules.weights import (
    DONE,
    LATE,
    NO_BACKLOG,
    STUCK,
    TOO_BIG,
    Played,
)
from octotune.schedules.world import FOREVER, NEVER, World
from simulator.actions import MICROBATCH_SHIFT, STAGE_SHIFT, Kind
from simulator.compiled import kernel

Int64 = NDArray[np.int64]

_F, _B, _I, _W = int(Kind.F), int(Kind.B), int(Kind.I), int(Kind.W)

NO_LIMIT = 2**62


class Phases(NamedTuple):
    """When F and the backward of a microbatch run after its beat, and how long a period is.

    Any unit, as long as it is one: only the order of the keys counts.
    """

    forward: Int64  # [S]
    backward: Int64  # [S]
    beats: Int64  # [m] rising: when each microbatch begins
    period: int


class Rule(NamedTuple):
    """How a device chooses; see the module. `window` is in periods."""

    window: float = 1.0
    slack: float = 0.5
    delay: float = 1.0
    backlog: int = NO_BACKLOG


def list_schedule(
    phases: Phases, world: World, rule: Rule, *, split: bool = True, limit_ns: int = NO_LIMIT
) -> Played:
    """Play the rhythm as a list schedule.

    Args:
        phases: rising along the chain, forwards down the stages and backwards up.
        world: costs and limits.
        rule: how a device chooses.
        split: run I and W; otherwise B.
        limit_ns: give up (state LATE) as soon as the end cannot be below it.

    Complexity: O(actions × (devices + stages on a device)) with a small constant; deterministic.
    """
    kinds = 3 if split else 2
    counts = np.diff(world.first) * (kinds * world.num_microbatches)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    codes = np.empty(offsets[-1], np.int64)
    window = min(int(rule.window * phases.period), NEVER // 4)
    end_ns, state, device, needed = _play(
        phases.forward,
        phases.backward,
        phases.beats,
        world,
        split,
        window,
        rule.slack,
        rule.delay,
        rule.backlog,
        limit_ns,
        codes,
        offsets,
    )
    return Played(codes, offsets, int(end_ns), int(state), int(device), int(needed))


@kernel
def _play(
    forward: Int64,
    backward: Int64,
    beats: Int64,
    world: World,
    split: bool,
    window: int,
    slack: float,
    overtake: float,
    backlog: int,
    limit: int,
    out: Int64,
    offsets: Int64,
) -> tuple[int, int, int, int]:
    duration, delay, stage_device = world.duration, world.delay, world.stage_device
    rise, workspace, room, most = world.rise, world.workspace, world.room, world.most
    m = world.num_microbatches
    num_devices, num_stages = len(room), len(stage_device)
    back = _I if split else _B
    # when the input of F, and the gradient for I or B, is there; NEVER: its producer has not begun
    input_at = np.full((num_stages, m), FOREVER)
    grad_at = np.full((num_stages, m), FOREVER)
    input_at[0, :] = 0
    # a device ends its actions one after the other, and so its channels are first in, first out
    channel_free = np.zeros(2 * num_stages, np.int64)
    # how many microbatches of a stage have begun F, begun their backward, and left
    begun = np.zeros(num_stages, np.int64)
    turned = np.zeros(num_stages, np.int64)
    left = np.zeros(num_stages, np.int64)
    clock = np.zeros(num_devices, np.int64)  # when the device decides next; NEVER: it sleeps
    free = np.zeros(num_devices, np.int64)
    held = np.zeros(num_devices, np.int64)
    flying = np.zeros(num_devices, np.int64)
    pending = np.zeros(num_devices, np.int64)
    queue = np.empty(out.size, np.int32)  # stages of pending Ws, oldest first, in each row's space
    head, tail = offsets[:-1].copy(), offsets[:-1].copy()
    written = offsets[:-1].copy()
    work = np.zeros(num_devices, np.int64)  # what each device has still to run
    margin = np.zeros(num_devices, np.int64)  # what a backward may need beside what is held
    widest = np.zeros(num_devices, np.int64)  # the largest workspace
    for stage in range(num_stages):
        device = stage_device[stage]
        work[device] += m * (duration[_F, stage] + duration[back, stage])
        if split:
            work[device] += m * duration[_W, stage]
        margin[device] = max(margin[device], max(0, rise[back, stage]) + workspace[stage])
        widest[device] = max(widest[device], workspace[stage])
    remaining = out.size
    end = 0
    while remaining > 0:
        device = 0
        now = clock[0]
        for other in range(1, num_devices):
            if clock[other] < now:
                device, now = other, clock[other]
        if now == NEVER:
            for other in range(num_devices):
                if work[other] > 0:
                    device = other
            return end, STUCK, device, 0
        low, high = world.first[device], world.first[device + 1]
        # room that stages without a microbatch in flight keep for their next one
        kept_bytes, kept_count = 0, 0
        for index in range(low, high):
            stage = world.local[index]
            if begun[stage] < m and begun[stage] == left[stage]:
                kept_bytes += rise[_F, stage]
                kept_count += 1
        # the smallest key that could start now, the smallest at all, and that of an F which
        # only lacks the room that a W would free
        best_key, best_stage, best_kind = NEVER, -1, 0
        next_key, next_stage, next_kind, next_ready = NEVER, -1, 0, NEVER
        starved_key = NEVER
        # what could start now of the oldest microbatch, and the microbatch of the smallest key
        oldest, oldest_key, oldest_stage, oldest_kind, next_microbatch = m, NEVER, -1, 0, m
        wake = NEVER
        for index in range(low, high):
            stage = world.local[index]
            if turned[stage] < begun[stage]:
                key = beats[turned[stage]] + backward[stage]
                ready = grad_at[stage, turned[stage]]
                if key < next_key:
                    next_key, next_stage, next_kind, next_ready = key, stage, back, ready
                    next_microbatch = turned[stage]
                if ready > now:
                    wake = min(wake, ready)
                else:
                    if key < best_key:
                        best_key, best_stage, best_kind = key, stage, back
                    if turned[stage] < oldest:
                        oldest, oldest_key = turned[stage], key
                        oldest_stage, oldest_kind = stage, back
            if begun[stage] < m:
                key = beats[begun[stage]] + forward[stage]
                ready = input_at[stage, begun[stage]]
                own = 1 if begun[stage] == left[stage] else 0
                bytes_needed = (
                    held[device]
                    + rise[_F, stage] * (1 - own)
                    + kept_bytes
                    + max(margin[device], workspace[stage])
                )
                fits = bytes_needed <= room[device] and (
                    flying[device] + 1 - own + kept_count <= most[device]
                )
                if ready > now:
                    wake = min(wake, ready)
                if not fits:
                    if ready <= now and pending[device] > 0:
                        starved_key = min(starved_key, key)
                    continue
                if key < next_key:
                    next_key, next_stage, next_kind, next_ready = key, stage, _F, ready
                    next_microbatch = begun[stage]
                if ready <= now:
                    if key < best_key:
                        best_key, best_stage, best_kind = key, stage, _F
                    if begun[stage] < oldest:
                        oldest, oldest_key = begun[stage], key
                        oldest_stage, oldest_kind = stage, _F
        take_w = False
        if pending[device] > 0:
            take_w = pending[device] >= backlog or (
                starved_key < best_key and starved_key <= next_key + window
            )
        stage, kind = best_stage, best_kind
        known = NEVER  # when the action of the smallest key could start, as far as one can tell
        if next_stage >= 0:
            known = next_ready
            if known == NEVER:
                known = _earliest(
                    next_stage, next_kind, begun, turned, input_at, grad_at, clock, now, world
                )
        runs = best_stage >= 0 and best_key <= next_key + window
        if runs and best_key > next_key:
            length = duration[kind, stage]
            if now + length - known > overtake * length:
                # holding back the oldest microbatch could make the pipe wait for itself
                stage, kind = oldest_stage, oldest_kind
                runs = oldest <= next_microbatch and oldest_key <= next_key + window
        if not take_w and runs:
            need = held[device] + rise[kind, stage] + workspace[stage]
            if need > room[device]:
                if pending[device] == 0:
                    return end, TOO_BIG, device, need
                take_w = True
            elif pending[device] > 0:
                # the W's that wait must still have room to work in afterwards
                after = held[device] + world.change[kind, stage] + widest[device]
                take_w = after > room[device]
        elif not take_w:
            if pending[device] > 0:
                length = duration[_W, queue[head[device]]]
                take_w = now + length - known <= slack * length
            if not take_w:
                clock[device] = wake
                continue
        if take_w:
            stage, kind = int(queue[head[device]]), _W
            head[device] += 1
            pending[device] -= 1
            microbatch = left[stage]
            left[stage] += 1
            flying[device] -= 1
        elif kind == _F:
            microbatch = begun[stage]
            begun[stage] += 1
            flying[device] += 1
        else:
            microbatch = turned[stage]
            turned[stage] += 1
            if split:
                queue[tail[device]] = stage
                tail[device] += 1
                pending[device] += 1
            else:
                left[stage] += 1
                flying[device] -= 1
        finish = now + duration[kind, stage]
        work[device] -= duration[kind, stage]
        held[device] += world.change[kind, stage]
        free[device] = finish
        clock[device] = finish
        end = max(end, finish)
        if finish + work[device] >= limit:
            return finish + work[device], LATE, device, 0
        out[written[device]] = (stage << STAGE_SHIFT) | (microbatch << MICROBATCH_SHIFT) | kind
        written[device] += 1
        remaining -= 1
        if kind == _F and stage + 1 < num_stages:
            sent = max(finish, channel_free[world.down[stage]]) + world.hold[stage + 1]
            channel_free[world.down[stage]] = sent
            there = sent + delay[stage + 1] - world.hold[stage + 1]
            input_at[stage + 1, microbatch] = there
            other = stage_device[stage + 1]
            if clock[other] > there:
                clock[other] = max(free[other], now)
        elif kind == _F:
            grad_at[stage, microbatch] = finish
        elif kind != _W and stage > 0:
            sent = max(finish, channel_free[world.up[stage]]) + world.hold[stage]
            channel_free[world.up[stage]] = sent
            there = sent + delay[stage] - world.hold[stage]
            grad_at[stage - 1, microbatch] = there
            other = stage_device[stage - 1]
            if clock[other] > there:
                clock[other] = max(free[other], now)
    return end, DONE, 0, 0


@kernel
def _earliest(
    stage: int,
    kind: int,
    begun: Int64,
    turned: Int64,
    input_at: Int64,
    grad_at: Int64,
    clock: Int64,
    now: int,
    world: World,
) -> int:
    """Return the earliest moment at which the input of a stage's next action could be there.

    Follows the chain back to what has begun, and takes the rest as run at once.
    """
    duration, delay = world.duration, world.delay
    length = 0
    if kind != _F:
        microbatch = turned[stage]
        while True:
            if stage + 1 == len(delay):
                break
            stage += 1
            length += duration[kind, stage] + delay[stage]
            if grad_at[stage, microbatch] != NEVER:
                where = world.stage_device[stage]
                start = max(now, grad_at[stage, microbatch])
                if clock[where] != NEVER:
                    start = max(start, clock[where])
                return int(start + length)
        length += duration[_F, stage]
    else:
        microbatch = begun[stage]
        stage -= 1
        length += duration[_F, stage] + delay[stage + 1]
    while input_at[stage, microbatch] == NEVER:
        stage -= 1
        length += duration[_F, stage] + delay[stage + 1]
    where = world.stage_device[stage]
    start = max(now, input_at[stage, microbatch])
    if clock[where] != NEVER:
        start = max(start, clock[where])
    return int(start + length)
