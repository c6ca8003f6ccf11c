"""The engine's kernel: runs a schedule over flat arrays. The one place where time passes.

The idea. A device's actions last at least 1 ns, so they end one after another, and a channel,
which has one source device, serves transfers in the order of that device's row whatever happens
elsewhere. No clock is needed to get that right: each device is run ahead until its next action
needs something that does not exist yet, and whoever makes it wakes the device. Every action is
visited once, in memory order.

Only what several devices contend for needs an order in time: the sending and receiving sides of
hosts, and host links that devices share. What they are asked for goes into a heap by the moment
of asking and the contract's ties, and the first is served when no device can be run further.
That is exact, because nothing that is caused later can ask earlier: serving what was asked at t
starts actions at t or later, so they end, and ask for transfers, after t; and a copy lasts at
least 1 ns, so what it lets start asks after t too. One thing remains: an action started by a
transfer that took no time may release, at t itself, a copy anchored to it. So among what asks at
t all transfers are served before any copy, and then all copies that ask at t have asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.actions import (
    KIND_MASK,
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    STAGE_SHIFT,
    CopyKind,
    Kind,
)
from simulator.compiled import kernel
from simulator.costs import Costs

Int64 = NDArray[np.int64]

# The stage table: one row of COLUMNS numbers a stage, flat, so that what an action needs lies in
# two cache lines. The first four columns are the durations, by Kind.
_DEVICE = 4
_FORWARD_CHANNEL, _FORWARD_HOLD, _FORWARD_LATENCY, _FORWARD_NIC = 5, 6, 7, 8
_BACKWARD_CHANNEL, _BACKWARD_HOLD, _BACKWARD_LATENCY, _BACKWARD_NIC = 9, 10, 11, 12
_REDUCE, _COPY = 13, 14
_COLUMNS = 16

# What a device waits for: the index of a transfer, or one of these.
_RUNNABLE, _RELOAD, _FINISHED = -1, -2, -3

# Ties of the heap: transfers before copies, F before I and B, then stage, then microbatch;
# copies by device.
_TIE_STAGE_SHIFT = 24
_TIE_BACKWARD = 1 << 48
_TIE_COPY = 1 << 49
_TIE_MASK = (1 << _TIE_STAGE_SHIFT) - 1

_F, _B, _I, _W = (int(kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
_R = int(CopyKind.R)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Costs laid out for the kernel: made once, used for many schedules."""

    num_microbatches: int
    num_stages: int
    num_devices: int
    stages: Int64  # [S * COLUMNS]
    host: Int64  # [D] numbered from 0 without gaps
    link: Int64  # [D] host link, numbered from 0 without gaps; -1 where no other device shares it
    exchange_stages: Int64  # [2 * T]
    exchange_ns: Int64  # [T]
    optimizer_ns: Int64  # [D]


def pack(costs: Costs) -> Packed:
    """Return the costs in the kernel's layout."""
    num_stages, num_devices = costs.num_stages, costs.num_devices
    table = np.zeros((num_stages, _COLUMNS), dtype=np.int64)
    table[:, _F] = costs.forward_ns
    table[:, _B] = costs.backward_ns
    table[:, _I] = costs.input_grad_ns
    table[:, _W] = costs.weight_grad_ns
    table[:, _DEVICE] = costs.stage_device
    table[:-1, _FORWARD_HOLD] = costs.transfer_hold_ns
    table[:-1, _FORWARD_LATENCY] = costs.transfer_latency_ns
    table[:-1, _FORWARD_NIC] = costs.transfer_uses_nic
    table[1:, _BACKWARD_HOLD] = costs.transfer_hold_ns
    table[1:, _BACKWARD_LATENCY] = costs.transfer_latency_ns
    table[1:, _BACKWARD_NIC] = costs.transfer_uses_nic
    table[:, _REDUCE] = costs.reduce_ns
    table[:, _COPY] = costs.copy_ns
    flat = table.reshape(-1)
    _number_channels(flat, num_stages, num_devices)
    links = _numbered(costs.host_link)
    shared = np.bincount(links)[links] > 1
    return Packed(
        num_microbatches=costs.num_microbatches,
        num_stages=num_stages,
        num_devices=num_devices,
        stages=flat,
        host=_numbered(costs.device_host),
        link=np.where(shared, links, -1),
        exchange_stages=_own(costs.exchange_stages.reshape(-1)),
        exchange_ns=_own(costs.exchange_ns),
        optimizer_ns=_own(costs.optimizer_ns),
    )


def _numbered(names: Int64) -> Int64:
    """Return the names as numbers from 0 without gaps; quicker than `np.unique` for a few."""
    numbers: dict[int, int] = {}
    return np.array(
        [numbers.setdefault(name, len(numbers)) for name in names.tolist()], dtype=np.int64
    )


def _own(array: Int64) -> Int64:
    """Return a writable contiguous copy, so that the kernel is compiled for one type only."""
    return np.array(array, dtype=np.int64, order="C")


@kernel
def _number_channels(stages: Int64, num_stages: int, num_devices: int) -> None:
    """Give each directed device pair that transfers use its own number, from 0; -1: no transfer.

    The stages are visited device by device (a linked list each), so that one array over the
    targets is enough to see which pairs have a number: linear, however many devices there are.
    """
    first = np.full(num_devices, -1, dtype=np.int64)
    following = np.empty(num_stages, dtype=np.int64)
    for stage in range(num_stages - 1, -1, -1):
        device = stages[stage * _COLUMNS + _DEVICE]
        following[stage] = first[device]
        first[device] = stage
    numbered_for = np.full(num_devices, -1, dtype=np.int64)
    number = np.empty(num_devices, dtype=np.int64)
    count = 0
    for device in range(num_devices):
        stage = first[device]
        while stage >= 0:
            row = stage * _COLUMNS
            for step, column in ((1, _FORWARD_CHANNEL), (-1, _BACKWARD_CHANNEL)):
                stages[row + column] = -1
                if stage + step < 0 or stage + step >= num_stages:
                    continue
                target = stages[row + step * _COLUMNS + _DEVICE]
                if target == device:
                    continue
                if numbered_for[target] != device:
                    numbered_for[target] = device
                    number[target] = count
                    count += 1
                stages[row + column] = number[target]
            stage = following[stage]


@kernel
def _push(times: Int64, ties: Int64, size: int, time: int, tie: int) -> None:
    """Add to a binary heap of `size` entries, ordered by time, then tie."""
    at = size
    while at > 0:
        parent = (at - 1) >> 1
        if times[parent] < time or (times[parent] == time and ties[parent] < tie):
            break
        times[at] = times[parent]
        ties[at] = ties[parent]
        at = parent
    times[at] = time
    ties[at] = tie


@kernel
def _drop_first(times: Int64, ties: Int64, size: int) -> None:
    """Take the first of a heap of `size` entries out."""
    size -= 1
    time, tie = times[size], ties[size]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        other = child + 1
        if other < size and (
            times[other] < times[child]
            or (times[other] == times[child] and ties[other] < ties[child])
        ):
            child = other
        if time < times[child] or (time == times[child] and tie < ties[child]):
            break
        times[at] = times[child]
        ties[at] = ties[child]
        at = child
    times[at] = time
    ties[at] = tie


@kernel
def run(
    codes: Int64,  # [A] packed actions
    offsets: Int64,  # [D + 1]
    num_microbatches: int,
    stages: Int64,  # [S * COLUMNS] the stage table
    host: Int64,  # [D]
    link: Int64,  # [D]
    exchange_stages: Int64,  # [2 * T]
    exchange_ns: Int64,  # [T]
    optimizer_ns: Int64,  # [D]
    copy_codes: Int64,  # [C] packed copies
    copy_offsets: Int64,  # [D + 1]
    copy_after: Int64,  # [C] position of the F before an O; -1 for R
    copy_anchor: Int64,  # [C] position of the anchor; -1: none
    start: Int64,  # [A] from here on: results
    end: Int64,  # [A]
    forward_sent: Int64,  # [S * m] this and the next three: -1 when called
    forward_arrived: Int64,  # [S * m]
    backward_sent: Int64,  # [S * m]
    backward_arrived: Int64,  # [S * m]
    copy_start: Int64,  # [C]
    copy_end: Int64,  # [C]
    reduce_start: Int64,  # [S] this and the next: -1 when called
    reduce_end: Int64,  # [S]
    exchange_start: Int64,  # [T]
    exchange_end: Int64,  # [T]
    optimizer_start: Int64,  # [D]
    optimizer_end: Int64,  # [D]
    next_action: Int64,  # [D] offsets[:-1] when called; how far each row got
    next_copy: Int64,  # [D] copy_offsets[:-1] when called; how far each lane got
) -> bool:
    """Run a valid schedule; return whether it ran to its end.

    The arrays of arrivals double as what the devices wait for: -1 is "not there yet". Between
    stages of one device they hold the producer's end meanwhile and are put back to -1 at the end.
    """
    m = num_microbatches
    num_stages = len(stages) // _COLUMNS
    num_devices = len(host)
    total = num_stages * m
    has_copies = len(copy_codes) > 0

    num_channels = 0
    num_hosts = 0
    num_links = 0
    queued = num_devices  # an upper bound of what the heap ever holds
    for stage in range(num_stages):
        row = stage * _COLUMNS
        num_channels = max(
            num_channels, stages[row + _FORWARD_CHANNEL] + 1, stages[row + _BACKWARD_CHANNEL] + 1
        )
        queued += m * (stages[row + _FORWARD_NIC] + stages[row + _BACKWARD_NIC])
    for device in range(num_devices):
        num_hosts = max(num_hosts, host[device] + 1)
        num_links = max(num_links, link[device] + 1)
    channel_free = np.zeros(num_channels, dtype=np.int64)
    sending_free = np.zeros(num_hosts, dtype=np.int64)
    receiving_free = np.zeros(num_hosts, dtype=np.int64)
    link_free = np.zeros(2 * num_links, dtype=np.int64)
    times = np.empty(queued, dtype=np.int64)
    ties = np.empty(queued, dtype=np.int64)
    size = 0

    device_free = np.zeros(num_devices, dtype=np.int64)
    waits_for = np.full(num_devices, _RUNNABLE, dtype=np.int64)
    lane_free = np.zeros(num_devices, dtype=np.int64)
    asking = np.zeros(num_devices, dtype=np.bool_)
    reduction_free = np.zeros(num_devices, dtype=np.int64)
    left = np.full(num_stages, m, dtype=np.int64)  # microbatches whose W or B is still to come
    last_end = np.zeros(num_stages, dtype=np.int64)
    # when R of a (stage, microbatch) has ended: -1 not yet, 0 where nothing was taken out
    reloaded = np.zeros(total if has_copies else 0, dtype=np.int64)
    for copy in range(len(copy_codes)):
        code = copy_codes[copy]
        microbatch = (code >> MICROBATCH_SHIFT) & MICROBATCH_MASK
        reloaded[(code >> STAGE_SHIFT) * m + microbatch] = -1

    stack = np.empty(num_devices, dtype=np.int64)
    for device in range(num_devices):
        stack[device] = num_devices - 1 - device
    height = num_devices

    while True:
        while height > 0:
            height -= 1
            device = stack[height]
            now = device_free[device]
            position = next_action[device]
            stop = offsets[device + 1]
            while True:
                waits = _FINISHED
                while position < stop:
                    code = codes[position]
                    kind = code & KIND_MASK
                    stage = code >> STAGE_SHIFT
                    at = stage * m + ((code >> MICROBATCH_SHIFT) & MICROBATCH_MASK)
                    row = stage * _COLUMNS
                    begin = now
                    if kind == _F:
                        if stage > 0:
                            ready = forward_arrived[at - m]
                            if ready < 0:
                                waits = at - m
                                break
                            begin = max(begin, ready)
                    elif kind != _W:
                        if stage < num_stages - 1:
                            ready = backward_arrived[at + m]
                            if ready < 0:
                                waits = total + at + m
                                break
                            begin = max(begin, ready)
                        if has_copies:
                            ready = reloaded[at]
                            if ready < 0:
                                waits = _RELOAD
                                break
                            begin = max(begin, ready)
                    now = begin + stages[row + kind]
                    start[position] = begin
                    end[position] = now
                    position += 1

                    if kind == _F:
                        if stage < num_stages - 1:
                            channel = stages[row + _FORWARD_CHANNEL]
                            if channel < 0:
                                forward_arrived[at] = now
                            elif stages[row + _FORWARD_NIC]:
                                tie = (stage << _TIE_STAGE_SHIFT) | (at - stage * m)
                                _push(times, ties, size, now, tie)
                                size += 1
                            else:
                                sent = max(now, channel_free[channel])
                                done = sent + stages[row + _FORWARD_HOLD]
                                channel_free[channel] = done
                                forward_sent[at] = sent
                                forward_arrived[at] = done + stages[row + _FORWARD_LATENCY]
                                target = stages[row + _COLUMNS + _DEVICE]
                                if waits_for[target] == at:
                                    waits_for[target] = _RUNNABLE
                                    stack[height] = target
                                    height += 1
                        continue
                    if kind != _W and stage > 0:
                        channel = stages[row + _BACKWARD_CHANNEL]
                        if channel < 0:
                            backward_arrived[at] = now
                        elif stages[row + _BACKWARD_NIC]:
                            tie = _TIE_BACKWARD | (stage << _TIE_STAGE_SHIFT) | (at - stage * m)
                            _push(times, ties, size, now, tie)
                            size += 1
                        else:
                            sent = max(now, channel_free[channel])
                            done = sent + stages[row + _BACKWARD_HOLD]
                            channel_free[channel] = done
                            backward_sent[at] = sent
                            backward_arrived[at] = done + stages[row + _BACKWARD_LATENCY]
                            target = stages[row - _COLUMNS + _DEVICE]
                            if waits_for[target] == total + at:
                                waits_for[target] = _RUNNABLE
                                stack[height] = target
                                height += 1
                    if kind != _I:
                        left[stage] -= 1
                        if left[stage] == 0:
                            last_end[stage] = now
                            if stages[row + _REDUCE] >= 0:
                                reduce_start[stage] = max(now, reduction_free[device])
                                reduce_end[stage] = reduce_start[stage] + stages[row + _REDUCE]
                                reduction_free[device] = reduce_end[stage]
                if not has_copies:
                    break

                # The lane: each copy waits for actions of its own row only.
                reloads = False
                while next_copy[device] < copy_offsets[device + 1] and not asking[device]:
                    copy = next_copy[device]
                    after, anchor = copy_after[copy], copy_anchor[copy]
                    if after >= position or anchor >= position:
                        break
                    asked = lane_free[device]
                    if after >= 0:
                        asked = max(asked, end[after])
                    if anchor >= 0:
                        asked = max(asked, start[anchor])
                    if link[device] >= 0:
                        _push(times, ties, size, asked, _TIE_COPY | device)
                        size += 1
                        asking[device] = True
                        break
                    code = copy_codes[copy]
                    stage = code >> STAGE_SHIFT
                    copy_start[copy] = asked
                    lane_free[device] = asked + stages[stage * _COLUMNS + _COPY]
                    copy_end[copy] = lane_free[device]
                    next_copy[device] += 1
                    if code & KIND_MASK == _R:
                        microbatch = (code >> MICROBATCH_SHIFT) & MICROBATCH_MASK
                        reloaded[stage * m + microbatch] = lane_free[device]
                        reloads = True
                if not (reloads and waits == _RELOAD):
                    break
            device_free[device] = now
            next_action[device] = position
            waits_for[device] = waits

        if size == 0:
            break
        asked, tie = times[0], ties[0]
        _drop_first(times, ties, size)
        size -= 1
        if tie & _TIE_COPY:
            device = tie & (_TIE_COPY - 1)
            copy = next_copy[device]
            code = copy_codes[copy]
            stage = code >> STAGE_SHIFT
            side = 2 * link[device] + (1 if code & KIND_MASK == _R else 0)
            copy_start[copy] = max(asked, link_free[side])
            lane_free[device] = copy_start[copy] + stages[stage * _COLUMNS + _COPY]
            link_free[side] = lane_free[device]
            copy_end[copy] = lane_free[device]
            next_copy[device] += 1
            asking[device] = False
            if code & KIND_MASK == _R:
                microbatch = (code >> MICROBATCH_SHIFT) & MICROBATCH_MASK
                reloaded[stage * m + microbatch] = lane_free[device]
            waits_for[device] = _RUNNABLE
            stack[height] = device
            height += 1
            continue
        stage = (tie >> _TIE_STAGE_SHIFT) & _TIE_MASK
        at = stage * m + (tie & _TIE_MASK)
        row = stage * _COLUMNS
        source = stages[row + _DEVICE]
        if tie & _TIE_BACKWARD:
            target = stages[row - _COLUMNS + _DEVICE]
            channel = stages[row + _BACKWARD_CHANNEL]
            hold, latency = stages[row + _BACKWARD_HOLD], stages[row + _BACKWARD_LATENCY]
            waited = total + at
        else:
            target = stages[row + _COLUMNS + _DEVICE]
            channel = stages[row + _FORWARD_CHANNEL]
            hold, latency = stages[row + _FORWARD_HOLD], stages[row + _FORWARD_LATENCY]
            waited = at
        sent = max(
            asked, channel_free[channel], sending_free[host[source]], receiving_free[host[target]]
        )
        channel_free[channel] = sent + hold
        sending_free[host[source]] = sent + hold
        receiving_free[host[target]] = sent + hold
        if tie & _TIE_BACKWARD:
            backward_sent[at] = sent
            backward_arrived[at] = sent + hold + latency
        else:
            forward_sent[at] = sent
            forward_arrived[at] = sent + hold + latency
        if waits_for[target] == waited:
            waits_for[target] = _RUNNABLE
            stack[height] = target
            height += 1

    for device in range(num_devices):
        if next_action[device] < offsets[device + 1]:
            return False
        if next_copy[device] < copy_offsets[device + 1]:
            return False
        optimizer_start[device] = device_free[device]
    for stage in range(num_stages):
        row = stage * _COLUMNS
        device = stages[row + _DEVICE]
        optimizer_start[device] = max(optimizer_start[device], reduce_end[stage])
        if stages[row + _FORWARD_CHANNEL] < 0:
            forward_arrived[stage * m : (stage + 1) * m] = -1
        if stages[row + _BACKWARD_CHANNEL] < 0:
            backward_arrived[stage * m : (stage + 1) * m] = -1
    for pair in range(len(exchange_ns)):
        first, second = exchange_stages[2 * pair], exchange_stages[2 * pair + 1]
        exchange_start[pair] = max(last_end[first], last_end[second])
        exchange_end[pair] = exchange_start[pair] + exchange_ns[pair]
        for stage in (first, second):
            device = stages[stage * _COLUMNS + _DEVICE]
            optimizer_start[device] = max(optimizer_start[device], exchange_end[pair])
    for device in range(num_devices):
        optimizer_end[device] = optimizer_start[device] + optimizer_ns[device]
    return True
