"""Local search on the order itself, as job shops do it: moves on the critical path, annealed.

A device's row is a sequence of tokens (3 x stage + kind); the n-th of a kind is microbatch n, so
any rearrangement is complete, and the bytes held are a prefix sum of the row, whatever the times.
An action on the critical path is moved to an earlier or later place in its row. Whatever started
before the first moved place keeps its times, so a trial replays the rest only, and gives up once a
device's time plus its remaining work exceeds the limit.

Sources: van Laarhoven, Aarts, Lenstra 1992, "Job shop scheduling by simulated annealing",
Operations Research 40; Nowicki and Smutnicki 1996, Management Science 42 (critical blocks).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from octotune.tune.balance import RandomState, random, random_below
from octotune.tune.genome import NUM_STAGES, F, Genome, I, Shape, W
from octotune.tune.kernel import kernel
from octotune.tune.problem import FAR, Int64, World
from octotune.tune.scheduler import (
    REJECTED,
    STUCK,
    device_bound,
    finish_step,
    shape_stages,
)


class Order(NamedTuple):
    """An order and its times: A tokens, device after device; S stages, m microbatches."""

    token: Int64  # [A]
    start: Int64  # [A]
    microbatch: Int64  # [A]
    held: Int64  # [A] bytes in use after it
    place: Int64  # [S, 3, m] where each action stands
    arrival: Int64  # [S, 3, m] when F's and I's input is there
    begin: Int64  # [D + 1]


class Replay(NamedTuple):
    """Scratch for a trial."""

    start: Int64  # [A]
    arrival: Int64  # [S, 3, m]
    done: Int64  # [S, 3]
    kept: Int64  # [S, 3] actions whose times stay
    next: Int64  # [D] the next place of each device
    from_: Int64  # [D] where the trial's times begin
    free: Int64  # [D]
    left: Int64  # [D]
    stack: Int64  # [2 D]
    channel: Int64  # [D, D]
    sending: Int64
    receiving: Int64
    reducing: Int64  # [D]
    last_end: Int64  # [S]
    path: Int64  # [A] places on the critical path


def empty_order(num_stages: int, num_actions: int, world: World) -> Order:
    """Return room for an order."""
    table = (num_stages, 3, world.num_microbatches)
    return Order(
        token=np.zeros(num_actions, np.int64),
        start=np.zeros(num_actions, np.int64),
        microbatch=np.zeros(num_actions, np.int64),
        held=np.zeros(num_actions, np.int64),
        place=np.zeros(table, np.int64),
        arrival=np.zeros(table, np.int64),
        begin=np.zeros(world.num_devices + 1, np.int64),
    )


def empty_replay(num_stages: int, num_actions: int, world: World) -> Replay:
    """Return scratch for trials."""
    devices, hosts = world.num_devices, int(world.host.max()) + 1
    return Replay(
        start=np.zeros(num_actions, np.int64),
        arrival=np.zeros((num_stages, 3, world.num_microbatches), np.int64),
        done=np.zeros((num_stages, 3), np.int64),
        kept=np.zeros((num_stages, 3), np.int64),
        next=np.zeros(devices, np.int64),
        from_=np.zeros(devices, np.int64),
        free=np.zeros(devices, np.int64),
        left=np.zeros(devices, np.int64),
        stack=np.zeros(2 * devices + 2, np.int64),
        channel=np.zeros((devices, devices), np.int64),
        sending=np.zeros(hosts, np.int64),
        receiving=np.zeros(hosts, np.int64),
        reducing=np.zeros(devices, np.int64),
        last_end=np.zeros(num_stages, np.int64),
        path=np.zeros(num_actions, np.int64),
    )


@kernel
def index_order(genome: Genome, shape: Shape, order: Order) -> bool:
    """Fill microbatches, places and bytes from the tokens; return whether memory suffices."""
    num_devices = shape.load.shape[0]
    count = np.zeros((genome.meta[NUM_STAGES], 3), np.int64)
    fits = True
    for d in range(num_devices):
        held = 0
        for p in range(order.begin[d], order.begin[d + 1]):
            token = order.token[p]
            s, kind = token // 3, token % 3
            n = count[s, kind]
            count[s, kind] = n + 1
            order.microbatch[p] = n
            order.place[s, kind, n] = p
            if kind == F:
                held += shape.at_forward[s]
                peak = held
            elif kind == I:
                held += shape.at_backward[s]
                peak = held
                held -= shape.off_backward[s]
            else:
                peak = held
                held -= shape.off_weight[s]
            order.held[p] = held
            if peak + shape.workspace[s] > shape.room[d]:
                fits = False
    return fits


@kernel
def replay(
    world: World,
    genome: Genome,
    shape: Shape,
    order: Order,
    trial: Replay,
    since: int,
    limit: int,
) -> int:
    """Return the step of the order's tokens, times since `since` computed anew; or REJECTED.

    Times go to `trial`; actions of `order` that start before `since` keep theirs. STUCK: the
    order waits in a ring. Transfers between hosts with limited NICs are served in the order
    that their producers end, as the contract has it, because devices are then advanced in that
    order too.
    """
    num_stages, num_devices = genome.meta[NUM_STAGES], world.num_devices
    m = world.num_microbatches
    device, duration = genome.device, shape.duration
    hold, latency, nic = shape.hold, shape.latency, shape.nic
    token, start, begin = order.token, order.start, order.begin
    done, kept, arrival, old = trial.done, trial.kept, trial.arrival, order.arrival
    free, left, following, stack = trial.free, trial.left, trial.next, trial.stack
    channel, host = trial.channel, world.host
    in_order = world.has_nic
    for d in range(num_devices):
        left[d] = m * shape.load[d] + shape.optimizer[d]
        trial.reducing[d] = 0
    if since > 0:
        for s in range(num_stages):
            d = device[s]
            for kind in range(2 + genome.split[s]):
                low, high = 0, m
                while low < high:
                    middle = (low + high) // 2
                    if start[order.place[s, kind, middle]] < since:
                        low = middle + 1
                    else:
                        high = middle
                done[s, kind] = low
                kept[s, kind] = low
                left[d] -= low * duration[s, kind]
        for d in range(num_devices):
            low, high = begin[d], begin[d + 1]
            while low < high:
                middle = (low + high) // 2
                if start[middle] < since:
                    low = middle + 1
                else:
                    high = middle
            following[d] = low
            free[d] = 0
            if low > begin[d]:
                last = token[low - 1]
                free[d] = start[low - 1] + duration[last // 3, last % 3]
    else:
        for s in range(num_stages):
            for kind in range(3):
                done[s, kind] = 0
                kept[s, kind] = 0
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
        trial.from_[d] = following[d]
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
                    at = old[s, F, n] if n < kept[s - 1, F] else arrival[s, F, n]
                    ready = max(ready, at)
            elif kind == I:
                if n >= done[s, F]:
                    break
                if s < num_stages - 1:
                    if done[s + 1, I] <= n:
                        break
                    at = old[s, I, n] if n < kept[s + 1, I] else arrival[s, I, n]
                    ready = max(ready, at)
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
                    go = max(end, channel[d, target]) if since == 0 else end
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


@kernel
def adopt(genome: Genome, order: Order, trial: Replay) -> None:
    """Take the trial's times over into the order."""
    num_stages, m = genome.meta[NUM_STAGES], order.arrival.shape[2]
    for d in range(order.begin.shape[0] - 1):
        for p in range(trial.from_[d], order.begin[d + 1]):
            order.start[p] = trial.start[p]
    for s in range(num_stages):
        if s > 0:
            for n in range(trial.kept[s - 1, F], m):
                order.arrival[s, F, n] = trial.arrival[s, F, n]
        if s + 1 < num_stages:
            for n in range(trial.kept[s + 1, I], m):
                order.arrival[s, I, n] = trial.arrival[s, I, n]


@kernel
def critical_path(
    genome: Genome, shape: Shape, order: Order, path: Int64, rng: RandomState
) -> int:
    """List the places of one longest path, last first; return how many there are."""
    num_stages = genome.meta[NUM_STAGES]
    last, at = -1, -1
    for d in range(order.begin.shape[0] - 1):
        p = order.begin[d + 1] - 1
        if p >= order.begin[d]:
            token = order.token[p]
            end = order.start[p] + shape.duration[token // 3, token % 3] + shape.optimizer[d]
            if end > last:
                last, at = end, p
    count = 0
    while at >= 0:
        path[count] = at
        count += 1
        token, n = order.token[at], order.microbatch[at]
        s, kind = token // 3, token % 3
        d = genome.device[s]
        before = -1
        if at > order.begin[d]:
            earlier = order.token[at - 1]
            end = order.start[at - 1] + shape.duration[earlier // 3, earlier % 3]
            if end == order.start[at]:
                before = at - 1
        source = -1
        if kind == F and s > 0 and order.arrival[s, F, n] == order.start[at]:
            source = order.place[s - 1, F, n]
        elif kind == I and s + 1 < num_stages and order.arrival[s, I, n] == order.start[at]:
            source = order.place[s + 1, I, n]
        at = source if before < 0 or (source >= 0 and random(rng) < 0.5) else before
    return count


@kernel
def _count_before(order: Order, s: int, kind: int, p: int, m: int) -> int:
    low, high = 0, m
    while low < high:
        middle = (low + high) // 2
        if order.place[s, kind, middle] < p:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def shift_token(order: Order, source: int, target: int) -> None:
    """Move the token at one place to another of the same row."""
    token = order.token[source]
    if source < target:
        for p in range(source, target):
            order.token[p] = order.token[p + 1]
    else:
        for p in range(source, target, -1):
            order.token[p] = order.token[p - 1]
    order.token[target] = token


@kernel
def _allowed(
    genome: Genome, shape: Shape, order: Order, d: int, low: int, high: int, s: int
) -> bool:
    """Whether places low to high, rearranged, keep stage s's own order and the memory."""
    m = order.place.shape[2]
    f = _count_before(order, s, F, low, m)
    i = _count_before(order, s, I, low, m)
    w = _count_before(order, s, W, low, m) if genome.split[s] else 0
    held = order.held[low - 1] if low > order.begin[d] else 0
    for p in range(low, high + 1):
        token = order.token[p]
        t, kind = token // 3, token % 3
        if kind == F:
            if t == s:
                f += 1
            held += shape.at_forward[t]
            peak = held
        elif kind == I:
            if t == s:
                i += 1
                if i > f:
                    return False
            held += shape.at_backward[t]
            peak = held
            held -= shape.off_backward[t]
        else:
            if t == s:
                w += 1
                if w > i:
                    return False
            peak = held
            held -= shape.off_weight[t]
        if peak + shape.workspace[t] > shape.room[d]:
            return False
    return True


@kernel
def _reindex(
    genome: Genome, shape: Shape, order: Order, trial: Replay, d: int, low: int, high: int
) -> None:
    """Bring microbatches, places and bytes between two places up to date."""
    m = order.place.shape[2]
    count = trial.done
    for p in range(low, high + 1):
        count[order.token[p] // 3, order.token[p] % 3] = -1
    held = order.held[low - 1] if low > order.begin[d] else 0
    for p in range(low, high + 1):
        s, kind = order.token[p] // 3, order.token[p] % 3
        n = count[s, kind]
        if n < 0:
            n = _count_before(order, s, kind, low, m)
        count[s, kind] = n + 1
        order.microbatch[p] = n
        order.place[s, kind, n] = p
        if kind == F:
            held += shape.at_forward[s]
        elif kind == I:
            held += shape.at_backward[s] - shape.off_backward[s]
        else:
            held -= shape.off_weight[s]
        order.held[p] = held


@kernel
def search_order(
    world: World,
    genome: Genome,
    shape: Shape,
    order: Order,
    best_token: Int64,
    best_cut: Int64,
    trial: Replay,
    rng: RandomState,
    tally: Int64,
    temperature: float,
    cut_share: float,
    evaluations: int,
) -> None:
    """Run one slice of annealing; `genome.cut`, `shape`, `order` and `tally` are updated.

    `order` is indexed and timed beforehand. `tally` holds the current step, the best, and the
    number of trials; the best order's tokens and cuts are kept in `best_token` and `best_cut`.
    A part `cut_share` of the trials moves a layer over a cut and keeps the order.
    """
    num_stages, num_devices = genome.meta[NUM_STAGES], world.num_devices
    whole = world.has_hold or world.has_nic or world.has_tail
    cut, path = genome.cut, trial.path
    length = 0
    for _ in range(evaluations):
        tally[2] += 1
        limit = tally[0] + int(-math.log(1e-12 + random(rng)) * temperature * tally[0])
        step = REJECTED
        if num_stages > 1 and random(rng) < cut_share:
            s = 1 + random_below(rng, num_stages - 1)
            by = 1 if random(rng) < 0.5 else -1
            if not cut[s - 1] < cut[s] + by < cut[s + 1]:
                continue
            cut[s] += by
            if (
                shape_stages(world, genome, shape)
                and device_bound(world, shape) <= limit
                and index_order(genome, shape, order)
            ):
                step = replay(world, genome, shape, order, trial, 0, limit)
            if step < 0:
                cut[s] -= by
                shape_stages(world, genome, shape)
                index_order(genome, shape, order)
                continue
            adopt(genome, order, trial)
        else:
            if length == 0:
                length = critical_path(genome, shape, order, path, rng)
            p = path[random_below(rng, length)]
            if random(rng) < 0.1:
                p = random_below(rng, order.token.shape[0])
            d = genome.device[order.token[p] // 3]
            far = 1 + int(-math.log(1e-12 + random(rng)) * 3.0)
            way = random(rng)
            source, target = p, p
            if way < 0.45:
                target = max(order.begin[d], p - far)
            elif way < 0.75:
                target = min(order.begin[d + 1] - 1, p + far)
            else:
                source = min(order.begin[d + 1] - 1, p + far)
            if order.token[source] == order.token[target]:
                continue
            s = order.token[source] // 3
            low, high = min(source, target), max(source, target)
            shift_token(order, source, target)
            if _allowed(genome, shape, order, d, low, high, s):
                since = 0 if whole else order.start[low]
                step = replay(world, genome, shape, order, trial, since, limit)
            if step < 0:
                shift_token(order, target, source)
                continue
            adopt(genome, order, trial)
            _reindex(genome, shape, order, trial, d, low, high)
        tally[0] = step
        length = 0
        if step < tally[1]:
            tally[1] = step
            for q in range(order.begin[num_devices]):
                best_token[q] = order.token[q]
            for t in range(num_stages + 1):
                best_cut[t] = cut[t]
