"""Local search on the order itself, as job shops do it: moves on the critical path, annealed.

An action on the critical path is moved to an earlier or later place in its row, most often where
the path comes from another device: inside a block of one device's actions a move alone shortens
nothing. What it changes is passed on as far as it reaches (`octotune.tune.ripple`); where
transfers may queue, or something follows the actions, the whole order is replayed instead. Some
trials change the partition or the placement (`octotune.tune.restructure`).

Sources: van Laarhoven, Aarts, Lenstra 1992, "Job shop scheduling by simulated annealing",
Operations Research 40; Nowicki and Smutnicki 1996, Management Science 42 (critical blocks).
"""

from __future__ import annotations

import math

from octotune.tune.balance import RandomState, random, random_below
from octotune.tune.genome import Float64, Genome
from octotune.tune.graph import (
    DEVICE,
    PLACE,
    TOKEN,
    Graph,
    copy_graph,
    critical_path,
    fill_tails,
    read_order,
    read_times,
    write_order,
)
from octotune.tune.kernel import kernel
from octotune.tune.moves import copy_into
from octotune.tune.problem import Int64, World
from octotune.tune.replay import Order, Replay, has_room, replay
from octotune.tune.restructure import regroup, restore, restructured
from octotune.tune.ripple import Ripple, hold, move, move_back, try_move
from octotune.tune.shape import REJECTED, device_bound

AT_CROSSING = 0.6  # of the moves
FAR_MEAN, FAR_MEAN_CROSSING = 3.0, 5.0  # places an action is moved, about
ANYWHERE = 0.1  # of the other moves: off the critical path
DESCENT = 400  # trials, most
WORTH_A_DESCENT = 0.02  # above the limit
# structural trials are twice as many where the step is so far above what no order can beat, and so
# many times more, at most, where it is nearer
NEAR_BOUND, MORE_STRUCTURE = 0.01, 20.0

# of the tally: the step and the best one, how many trials, and how many stages there may be
STEP, BEST, TRIALS, MOST_STAGES = 0, 1, 2, 3


@kernel
def replays(world: World) -> bool:
    """Whether more follows from a move than later starts: transfers may queue, or reductions."""
    return bool(world.has_hold or world.has_nic or world.has_tail)


@kernel
def _crossing(actions: Int64, path: Int64, length: int, rng: RandomState) -> int:
    """Return a number on the path whose action waits for the next one's device; or -1."""
    at = random_below(rng, length)
    for _ in range(length):
        if at + 1 < length and actions[path[at], DEVICE] != actions[path[at + 1], DEVICE]:
            return int(at)
        at = at + 1 if at + 1 < length else 0
    return -1


@kernel
def drawn_move(
    actions: Int64, row: Int64, begin: Int64, path: Int64, length: int, rng: RandomState
) -> tuple[int, int]:
    """Return from which place of a row an action is moved, and to which."""
    at = _crossing(actions, path, length, rng) if random(rng) < AT_CROSSING else -1
    way = random(rng)
    mean = FAR_MEAN if at < 0 else FAR_MEAN_CROSSING
    far = 1 + int(-math.log(1e-12 + random(rng)) * mean)
    if at < 0:
        p = actions[path[random_below(rng, length)], PLACE]
        if random(rng) < ANYWHERE:
            p = random_below(rng, begin[begin.shape[0] - 1])
        earlier, later = way < 0.45, 0.45 <= way < 0.75
    elif way < 0.55:  # what sends: itself earlier, or what is before it behind it
        p = actions[path[at + 1], PLACE]
        earlier, later = way < 0.3, False
        if not earlier:
            return max(begin[actions[row[p], DEVICE]], p - far), p
    else:  # what waits: later, or a later one into the gap before it
        p = actions[path[at], PLACE]
        earlier, later = False, way < 0.75
    d = actions[row[p], DEVICE]
    if earlier:
        return p, max(begin[d], p - far)
    last = min(begin[d + 1] - 1, p + far)
    return (p, last) if later else (last, p)


@kernel
def _replayed_move(
    world: World,
    graph: Graph,
    order: Order,
    trial: Replay,
    before: Int64,
    source: int,
    target: int,
    limit: int,
) -> int:
    """Do what `try_move` does where more follows from a move than later starts; no tails."""
    actions, row = graph.actions, graph.row
    low, high = min(source, target), max(source, target)
    for p in range(low, high + 1):
        before[p] = row[p]
    step = REJECTED
    if move(actions, row, order.begin, source, target):
        for p in range(low, high + 1):
            order.token[p] = actions[row[p], TOKEN]
        step = replay(world, graph.genome, graph.shape, order, trial, limit)
    if step < 0:
        move_back(actions, row, before, low, high)
        for p in range(low, high + 1):
            order.token[p] = actions[row[p], TOKEN]
        return REJECTED
    hold(actions, row, order.begin, low, high)
    read_times(world, order, trial, actions, row)
    return int(step)


@kernel
def _descend(
    graph: Graph,
    begin: Int64,
    ripple: Ripple,
    path: Int64,
    rng: RandomState,
    tally: Int64,
    step: int,
    enough: int,
) -> int:
    """Move actions as long as that makes the step no longer; return it once it is short enough."""
    actions, row, optimizer = graph.actions, graph.row, graph.shape.optimizer
    first, length = step, 0
    for number in range(DESCENT):
        # what has not gone this part of the way by now will not go all of it
        if number == DESCENT // 4 and first - step < (first - enough) // 4:
            break
        tally[TRIALS] += 1
        if length == 0:
            length = critical_path(actions, row, begin, optimizer, path, rng)
        source, target = drawn_move(actions, row, begin, path, length, rng)
        if actions[row[source], TOKEN] == actions[row[target], TOKEN]:
            continue
        shorter = try_move(actions, row, begin, optimizer, ripple, source, target, step)
        if shorter >= 0:
            step, length = shorter, 0
            if step <= enough:
                return step
    return REJECTED


@kernel
def _restructure(
    world: World,
    graph: Graph,
    other: Graph,
    order: Order,
    trial: Replay,
    ripple: Ripple,
    path: Int64,
    weights: Float64,
    bound: Int64,
    rng: RandomState,
    tally: Int64,
    limit: int,
) -> int:
    """Change the partition or placement; return the step within the limit, or REJECTED.

    An order made for other stages is seldom as short for these: if it is a little too long, a
    short descent tells whether it can be short enough.
    """
    begin, optimizer = order.begin, other.shape.optimizer
    most_stages = tally[MOST_STAGES]
    at = restructured(
        world, graph.genome, other.genome, other.shape, limit, most_stages, weights, bound, rng
    )
    if at < 0:
        return REJECTED
    write_order(graph.actions, graph.row, order)
    regroup(graph.genome, other.genome, order, trial, at)
    whole = replays(world)
    step = REJECTED
    if has_room(other.shape, order):
        most = limit if whole else int(limit * (1.0 + WORTH_A_DESCENT))
        step = replay(world, other.genome, other.shape, order, trial, most)
    if step >= 0:
        read_order(world, other, order, trial)
        if not whole:
            fill_tails(other.actions, other.row, begin, optimizer, ripple.next)
            if step > limit:
                step = _descend(other, begin, ripple, path, rng, tally, step, limit)
    if step < 0:
        restore(order, trial)
        return REJECTED
    copy_graph(world, other, graph, begin[world.num_devices])
    return int(step)


@kernel
def search_order(
    world: World,
    graph: Graph,
    order: Order,
    best: Genome,
    best_token: Int64,
    best_begin: Int64,
    other: Graph,
    trial: Replay,
    ripple: Ripple,
    path: Int64,
    weights: Float64,
    bound: Int64,
    rng: RandomState,
    tally: Int64,
    temperature: float,
    structure_share: float,
    trials: int,
) -> None:
    """Run one slice of annealing; `graph`, `order` and `tally` are updated.

    `order` has the ends of the graph's rows, and its tokens where they are replayed. The best plan
    is kept in `best`, `best_token` and `best_begin`. A part `structure_share` of the trials, and
    more the nearer the step is to what no order can beat, changes the partition or the placement.
    `other`, `trial`, `ripple`, `path` and `bound` are scratch.
    """
    begin, actions, row, shape = order.begin, graph.actions, graph.row, graph.shape
    whole = replays(world)
    length, least = 0, device_bound(world, shape)
    last = tally[TRIALS] + trials
    while tally[TRIALS] < last:
        tally[TRIALS] += 1
        now = tally[STEP]
        limit = now + int(-math.log(1e-12 + random(rng)) * temperature * now)
        above = max(0, now - least) / (NEAR_BOUND * now)
        if random(rng) < structure_share * (1.0 + 1.0 / (above + 1.0 / MORE_STRUCTURE)):
            step = _restructure(
                world, graph, other, order, trial, ripple, path, weights, bound, rng, tally, limit
            )
            length = 0
            if step < 0:
                continue
            least = device_bound(world, shape)
        else:
            if length == 0:
                length = critical_path(actions, row, begin, shape.optimizer, path, rng)
            source, target = drawn_move(actions, row, begin, path, length, rng)
            if actions[row[source], TOKEN] == actions[row[target], TOKEN]:
                continue
            if whole:
                step = _replayed_move(
                    world, graph, order, trial, ripple.row, source, target, limit
                )
            else:
                step = try_move(
                    actions, row, begin, shape.optimizer, ripple, source, target, limit
                )
            if step < 0:
                continue
            length = 0
        tally[STEP] = step
        if step < tally[BEST]:
            tally[BEST] = step
            copy_into(graph.genome, best)
            for p in range(begin[world.num_devices]):
                best_token[p] = actions[row[p], TOKEN]
            for d in range(world.num_devices + 1):
                best_begin[d] = begin[d]
