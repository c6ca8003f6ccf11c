"""An order played again: rows of tokens -> start times.

A device's row is a sequence of tokens (3 x stage + kind); the n-th of a kind is microbatch n, so
any rearrangement is complete, and the bytes held are a prefix sum of the row, whatever the times.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from octotune.tune.genome import NUM_STAGES, F, Genome, I, Shape, W
from octotune.tune.kernel import kernel
from octotune.tune.problem import FAR, Int64, World
from octotune.tune.shape import REJECTED, STUCK, finish_step


class Order(NamedTuple):
    """An order and its times: A tokens, device after device."""

    token: Int64  # [A]
    start: Int64  # [A]
    begin: Int64  # [D + 1]


class Replay(NamedTuple):
    """Scratch for a trial."""

    start: Int64  # [A]
    arrival: Int64  # [S, 3, m] when F's and I's input is there
    done: Int64  # [S, 3]
    next: Int64  # [D] the next place of each device
    free: Int64  # [D]
    left: Int64  # [D]
    stack: Int64  # [2 D]
    channel: Int64  # [D, D]
    sending: Int64
    receiving: Int64
    reducing: Int64  # [D]
    last_end: Int64  # [S]
    token: Int64  # [A] the rows before a stage changed devices
    begin: Int64  # [D + 1]


def empty_order(capacity: int, world: World) -> Order:
    """Return room for an order of up to `capacity` stages."""
    num_actions = 3 * capacity * world.num_microbatches
    return Order(
        token=np.zeros(num_actions, np.int64),
        start=np.zeros(num_actions, np.int64),
        begin=np.zeros(world.num_devices + 1, np.int64),
    )


def empty_replay(capacity: int, world: World) -> Replay:
    """Return scratch for trials."""
    num_actions = 3 * capacity * world.num_microbatches
    devices, hosts = world.num_devices, int(world.host.max()) + 1
    return Replay(
        start=np.zeros(num_actions, np.int64),
        arrival=np.zeros((capacity, 3, world.num_microbatches), np.int64),
        done=np.zeros((capacity, 3), np.int64),
        next=np.zeros(devices, np.int64),
        free=np.zeros(devices, np.int64),
        left=np.zeros(devices, np.int64),
        stack=np.zeros(2 * devices + 2, np.int64),
        channel=np.zeros((devices, devices), np.int64),
        sending=np.zeros(hosts, np.int64),
        receiving=np.zeros(hosts, np.int64),
        reducing=np.zeros(devices, np.int64),
        last_end=np.zeros(capacity, np.int64),
        token=np.zeros(num_actions, np.int64),
        begin=np.zeros(devices + 1, np.int64),
    )


@kernel
def has_room(shape: Shape, order: Order) -> bool:
    """Return whether memory suffices."""
    for d in range(shape.load.shape[0]):
        held = 0
        for p in range(order.begin[d], order.begin[d + 1]):
            s, kind = order.token[p] // 3, order.token[p] % 3
            freed = 0
            if kind == F:
                held += shape.at_forward[s]
            elif kind == I:
                held += shape.at_backward[s]
                freed = shape.off_backward[s]
            else:
                freed = shape.off_weight[s]
            if held + shape.workspace[s] > shape.room[d]:
                return False
            held -= freed
    return True


@kernel
def replay(
    world: World,
    genome: Genome,
    shape: Shape,
    order: Order,
    trial: Replay,
    limit: int,
) -> int:
    """Return the step of the order's tokens, or REJECTED; times go to `trial`.

    STUCK: the order waits in a ring. Transfers between hosts with limited NICs are served in the
    order that their producers end, as the contract has it, because devices are then advanced in
    that order too.
    """
    num_stages, num_devices = genome.meta[NUM_STAGES], world.num_devices
    m = world.num_microbatches
    device, duration = genome.device, shape.duration
    hold, latency, nic = shape.hold, shape.latency, shape.nic
    token, begin = order.token, order.begin
    done, arrival = trial.done, trial.arrival
    free, left, following, stack = trial.free, trial.left, trial.next, trial.stack
    channel, host = trial.channel, world.host
    in_order = world.has_nic
    for d in range(num_devices):
        left[d] = m * shape.load[d] + shape.optimizer[d]
        trial.reducing[d] = 0
    for s in range(num_stages):
        for kind in range(3):
            done[s, kind] = 0
    for d in range(num_devices):
        following[d] = begin[d]
        free[d] = 0
        for e in range(num_devices):
            channel[d, e] = 0
    for h in range(trial.sending.shape[0]):
        trial.sending[h] = 0
        trial.receiving[h] = 0
    remaining = 0
    depth = 0
    for d in range(num_devices):
        remaining += begin[d + 1] - following[d]
        stack[depth] = d
        depth += 1
    while True:
        if in_order:
            # the device whose next action ends first, among those that can run
            d, soonest, soonest_tie = -1, FAR, FAR
            for e in range(num_devices):
                p = following[e]
                if p == begin[e + 1]:
                    continue
                s, kind = token[p] // 3, token[p] % 3
                n = done[s, kind]
                ready = 0
                if kind == F:
                    if s > 0:
                        if done[s - 1, F] <= n:
                            continue
                        ready = arrival[s, F, n]
                elif kind == I:
                    if n >= done[s, F]:
                        continue
                    if s < num_stages - 1:
                        if done[s + 1, I] <= n:
                            continue
                        ready = arrival[s, I, n]
                elif n >= done[s, I]:
                    continue
                end = max(free[e], ready) + duration[s, kind]
                tie = kind * num_stages + s
                if end < soonest or (end == soonest and tie < soonest_tie):
                    d, soonest, soonest_tie = e, end, tie
            if d < 0:
                break
        else:
            if depth == 0:
                break
            depth -= 1
            d = stack[depth]
        while following[d] < begin[d + 1]:
            p = following[d]
            s, kind = token[p] // 3, token[p] % 3
            n = done[s, kind]
            ready = free[d]
            if kind == F:
                if s > 0:
                    if done[s - 1, F] <= n:
                        break
                    ready = max(ready, arrival[s, F, n])
            elif kind == I:
                if n >= done[s, F]:
                    break
                if s < num_stages - 1:
                    if done[s + 1, I] <= n:
                        break
                    ready = max(ready, arrival[s, I, n])
            elif n >= done[s, I]:
                break
            trial.start[p] = ready
            end = ready + duration[s, kind]
            free[d] = end
            left[d] -= duration[s, kind]
            if end + left[d] > limit:
                return REJECTED
            done[s, kind] = n + 1
            following[d] = p + 1
            remaining -= 1
            if n == m - 1:
                trial.last_end[s] = end
                if kind == W or (kind == I and genome.split[s] == 0):
                    trial.reducing[d] = max(trial.reducing[d], end) + shape.reduction[s]
            target, boundary, to = -1, s, s
            if kind == F:
                if s + 1 < num_stages:
                    target, to = device[s + 1], s + 1
            elif kind == I and s > 0:
                target, boundary, to = device[s - 1], s - 1, s - 1
            if target >= 0:
                arrives = end
                if target != d:
                    go = max(end, channel[d, target])
                    if nic[boundary]:
                        go = max(go, max(trial.sending[host[d]], trial.receiving[host[target]]))
                        trial.sending[host[d]] = go + hold[boundary]
                        trial.receiving[host[target]] = go + hold[boundary]
                    channel[d, target] = go + hold[boundary]
                    arrives = go + hold[boundary] + latency[boundary]
                    q = following[target]
                    if (
                        not in_order
                        and q < begin[target + 1]
                        and token[q] == 3 * to + kind
                        and done[to, kind] == n
                    ):
                        stack[depth] = target
                        depth += 1
                arrival[to, kind, n] = arrives
            if in_order:
                break
    if remaining > 0:
        return STUCK
    step = finish_step(world, genome, shape.optimizer, free, trial.reducing, trial.last_end)
    return step if step <= limit else REJECTED
