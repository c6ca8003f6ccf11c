"""Local search on the order itself, as job shops do it: moves on the critical path, annealed.

Orders are rows of tokens (`octotune.tune.replay`). An action on the critical path is moved to an
earlier or later place in its row, most often where the path comes from another device: inside a
block of one device's actions a move alone shortens nothing. Whatever started before the first
moved place keeps its times, so a trial replays the rest only, and gives up once a device's time
plus its remaining work exceeds the limit. Some trials change the partition or the placement
instead (`octotune.tune.restructure`).

Sources: van Laarhoven, Aarts, Lenstra 1992, "Job shop scheduling by simulated annealing",
Operations Research 40; Nowicki and Smutnicki 1996, Management Science 42 (critical blocks).
"""

from __future__ import annotations

import math

from octotune.tune.balance import RandomState, random, random_below
from octotune.tune.genome import NUM_STAGES, F, Genome, I, Shape, W
from octotune.tune.kernel import kernel
from octotune.tune.moves import copy_into
from octotune.tune.problem import Int64, World
from octotune.tune.replay import Order, Replay, adopt, index_order, replay
from octotune.tune.restructure import regroup, restore, restructured
from octotune.tune.shape import REJECTED, shape_stages

AT_CROSSING = 0.6  # of the moves
FAR_MEAN, FAR_MEAN_CROSSING = 3.0, 5.0  # places an action is moved, about
ANYWHERE = 0.1  # of the other moves: off the critical path


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
def _crossing(genome: Genome, order: Order, path: Int64, length: int, rng: RandomState) -> int:
    """Return a number on the path whose place waits for the next one, on another device; or -1."""
    at = random_below(rng, length)
    for _ in range(length):
        if at + 1 < length:
            one, other = order.token[path[at]] // 3, order.token[path[at + 1]] // 3
            if genome.device[one] != genome.device[other]:
                return int(at)
        at = at + 1 if at + 1 < length else 0
    return -1


@kernel
def drawn_move(
    genome: Genome, order: Order, path: Int64, length: int, rng: RandomState
) -> tuple[int, int]:
    """Return from which place of a row an action is moved, and to which."""
    at = _crossing(genome, order, path, length, rng) if random(rng) < AT_CROSSING else -1
    way = random(rng)
    mean = FAR_MEAN if at < 0 else FAR_MEAN_CROSSING
    far = 1 + int(-math.log(1e-12 + random(rng)) * mean)
    if at < 0:
        p = path[random_below(rng, length)]
        if random(rng) < ANYWHERE:
            p = random_below(rng, order.begin[order.begin.shape[0] - 1])
        earlier, later = way < 0.45, 0.45 <= way < 0.75
    elif way < 0.55:  # what sends: itself earlier, or what is before it behind it
        p = path[at + 1]
        earlier, later = way < 0.3, False
        if not earlier:
            first = order.begin[genome.device[order.token[p] // 3]]
            return max(first, p - far), p
    else:  # what waits: later, or a later one into the gap before it
        p = path[at]
        earlier, later = False, way < 0.75
    d = genome.device[order.token[p] // 3]
    if earlier:
        return p, max(order.begin[d], p - far)
    last = min(order.begin[d + 1] - 1, p + far)
    return (p, last) if later else (last, p)


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
    best: Genome,
    best_token: Int64,
    best_begin: Int64,
    trial: Replay,
    other: Genome,
    other_shape: Shape,
    bound: Int64,
    rng: RandomState,
    tally: Int64,
    temperature: float,
    structure_share: float,
    evaluations: int,
) -> None:
    """Run one slice of annealing; `genome`, `shape`, `order` and `tally` are updated.

    `order` is indexed and timed beforehand. `tally` holds the current step, the best, the number
    of trials, and how many stages there may be; the best plan is kept in `best`, `best_token` and
    `best_begin`. A part `structure_share` of the trials changes the partition or the placement.
    `other`, `other_shape`, `bound` and `trial` are scratch.
    """
    num_devices = world.num_devices
    whole = world.has_hold or world.has_nic or world.has_tail
    path, most = trial.path, tally[3]
    length = 0
    for _ in range(evaluations):
        tally[2] += 1
        limit = tally[0] + int(-math.log(1e-12 + random(rng)) * temperature * tally[0])
        step = REJECTED
        if random(rng) < structure_share:
            at = restructured(world, genome, other, other_shape, limit, most, bound, rng)
            if at < 0:
                continue
            regroup(genome, other, order, trial, at)
            if index_order(other, other_shape, order):
                step = replay(world, other, other_shape, order, trial, 0, limit)
            if step < 0:
                restore(order, trial)
                index_order(genome, shape, order)
                continue
            adopt(other, order, trial)
            copy_into(other, genome)
            shape_stages(world, genome, shape)
        else:
            if length == 0:
                length = critical_path(genome, shape, order, path, rng)
            source, target = drawn_move(genome, order, path, length, rng)
            if order.token[source] == order.token[target]:
                continue
            s = order.token[source] // 3
            d = genome.device[s]
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
            copy_into(genome, best)
            for q in range(order.begin[num_devices]):
                best_token[q] = order.token[q]
            for d in range(num_devices + 1):
                best_begin[d] = order.begin[d]
