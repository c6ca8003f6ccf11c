"""Compiled part of `octotune.steady`: blocks by annealing over waits.

A block is made from waits: the actions of one microbatch are placed in the order of its chain,
each at the first moment, after its input and its wait, at which its device's ring has room; Ws
follow in what is left. So every set of waits is a block, and a block without overlaps comes out
whenever the rings are not full. Times are ns; the rows of `length` and `time` are F, I, W.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.compiled import kernel

Int64 = NDArray[np.int64]

_F, _I, _W = 0, 1, 2


class Task(NamedTuple):
    """What a block is made for. S stages, D devices."""

    length: Int64  # [3, S]
    hop: Int64  # [S - 1]
    stage_device: Int64  # [S]
    first: Int64  # [D + 1] where each device's stages begin in `local`
    local: Int64  # [S] the stages by device, rising
    period: int
    num_microbatches: int
    saved: Int64  # [S] bytes from F to I
    saved_w: Int64  # [S] bytes from F to W
    held: Int64  # [S] bytes from I to W
    workspace: Int64  # [D] the most of the device's actions
    room: Int64  # [D]
    load: Int64  # [D] one microbatch
    begin: Int64  # [D] earliest start
    gradient: Int64  # [D] earliest first gradient
    after: Int64  # [D] from its last I to the end of the step, at least


@kernel
def _room_from(busy: Int64, count: int, at: int, length: int, period: int) -> int:
    """Return the first time >= `at` at which a ring with these busy parts has room; -1: none."""
    if length > period:
        return -1
    base = at // period * period
    spot = at - base
    latest = spot + period
    for _ in range(2 * count + 2):
        moved = False
        for part in range(count):
            for turn in range(-1, 3):
                begin = busy[part, 0] + turn * period
                end = busy[part, 1] + turn * period
                if begin < spot + length and spot < end:
                    spot = end
                    moved = True
        if spot >= latest:
            return -1
        if not moved:
            return int(base + spot)
    return -1


@kernel
def lay(task: Task, wait: Int64, time: Int64) -> Int64:
    """Fill `time` with the block of some waits; return [D] what found no room on the ring."""
    num_stages, num_devices = len(task.stage_device), len(task.room)
    busy = np.zeros((num_devices, 3 * num_stages, 2), np.int64)
    count = np.zeros(num_devices, np.int64)
    missing = np.zeros(num_devices, np.int64)
    at = 0
    for step in range(3 * num_stages):
        if step < num_stages:
            stage, kind = step, _F
        elif step < 2 * num_stages:
            stage, kind = 2 * num_stages - 1 - step, _I
        else:
            stage, kind = 3 * num_stages - 1 - step, _W
            at = time[_I, stage] + task.length[_I, stage]
        device, length = task.stage_device[stage], task.length[kind, stage]
        at += wait[kind, stage]
        found = _room_from(busy[device], count[device], at, length, task.period)
        if found < 0:
            missing[device] += length
            found = at
        else:
            busy[device, count[device], 0] = found % task.period
            busy[device, count[device], 1] = found % task.period + length
            count[device] += 1
        time[kind, stage] = found
        at = found + length
        if step + 1 < num_stages:
            at += task.hop[stage]
        elif num_stages <= step < 2 * num_stages and stage > 0:
            at += task.hop[stage - 1]
    return missing


@kernel
def ring_peak(task: Task, time: Int64, device: int) -> int:
    """Return the most bytes that the endless block holds on a device."""
    low, high = task.first[device], task.first[device + 1]
    moments = np.empty(6 * (high - low), np.int64)
    changes = np.empty(6 * (high - low), np.int64)
    number, held = 0, task.workspace[device]
    for index in range(low, high):
        stage = task.local[index]
        for item in range(3):
            if item == 0:
                size, since, until = task.saved[stage], _F, _I
            elif item == 1:
                size, since, until = task.saved_w[stage], _F, _W
            else:
                size, since, until = task.held[stage], _I, _W
            if size == 0:
                continue
            begin = time[since, stage]
            lifetime = time[until, stage] + task.length[until, stage] - begin
            held += size * (lifetime // task.period)
            rest = lifetime % task.period
            if rest == 0:
                continue
            start = begin % task.period
            end = start + rest
            if end > task.period:
                end -= task.period
                held += size  # it is there when the ring begins
            # what ends at a moment leaves before what starts then
            moments[number], changes[number] = 2 * start + 1, size
            moments[number + 1], changes[number + 1] = 2 * end, -size
            number += 2
    peak = held
    for event in np.argsort(moments[:number], kind="mergesort"):
        held += changes[event]
        peak = max(peak, held)
    return int(peak)


@kernel
def rate(task: Task, time: Int64, missing: Int64) -> tuple[float, float]:
    """Return what the step would be about, and by what share memory is exceeded, summed.

    Warmup: a device idles until its first gradient, but for the Fs that come before it in the
    block's order; cooldown: from its last I on, but for the Ws that come after it.
    """
    worst, total, excess = 0, 0, 0.0
    num_devices, m, period = len(task.room), task.num_microbatches, task.period
    for device in range(num_devices):
        low, high = task.first[device], task.first[device + 1]
        if low == high:
            continue
        first = time[_I, task.local[high - 1]]
        last = time[_I, task.local[low]]
        fs, ws = 0, 0
        for index in range(low, high):
            stage = task.local[index]
            turns = -(-(first - time[_F, stage]) // period)
            fs += max(0, min(m, turns)) * task.length[_F, stage]
            turns = -(-(time[_W, stage] - last) // period)
            ws += max(0, min(m, turns)) * task.length[_W, stage]
        cost = m * (task.load[device] + missing[device])
        cost += max(task.begin[device], task.gradient[device] - fs)
        cost += max(0, task.after[device] - ws)
        worst = max(worst, cost)
        total += cost
        over = ring_peak(task, time, device) - task.room[device]
        if over > 0:
            excess += over / max(1, task.room[device])
    return worst + 0.02 * total / num_devices, excess


@kernel
def anneal(task: Task, trials: int, seed: int, time: Int64) -> float:
    """Fill `time` with the best block found; return by what share it exceeds memory.

    One or two waits change at a time, to none or to a random one of the order of an action.
    """
    np.random.seed(seed)
    num_stages = len(task.stage_device)
    wait = np.zeros((3, num_stages), np.int64)
    best_wait = wait.copy()
    mean = task.length.mean()
    value, excess = rate(task, time, lay(task, wait, time))
    penalty = 0.5 * value
    here = value + penalty * excess
    best, best_excess = here, excess
    for trial in range(trials):
        heat = 0.01 * here * (1.0 - trial / trials) ** 2 + 1e-9
        kind, stage = np.random.randint(3), np.random.randint(num_stages)
        other_kind, other_stage = np.random.randint(3), np.random.randint(num_stages)
        before, other_before = wait[kind, stage], wait[other_kind, other_stage]
        choice = np.random.random()
        if choice < 0.65:
            wait[other_kind, other_stage] = 0
        if choice >= 0.3:
            wait[kind, stage] = int(-np.log(1e-9 + np.random.random()) * mean)
        value, excess = rate(task, time, lay(task, wait, time))
        there = value + penalty * excess
        if there <= here or np.random.random() < np.exp((here - there) / heat):
            here = there
            if there < best:
                best, best_excess = there, excess
                best_wait[:] = wait
        else:
            wait[kind, stage] = before
            wait[other_kind, other_stage] = other_before
    lay(task, best_wait, time)
    return float(best_excess)
