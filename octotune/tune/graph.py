"""An order as a graph: every action with its times, and with what it waits for.

Action n of a token (3 x stage + kind) is number token x m + n, whatever its place: what moves in a
row is the number alone. A row of the table is one action, so that what a trial needs of it lies
together, and kernels hand on one array.

    waits for   the action before it in its device's row, and its source's output: F of the stage
                before, I of the stage after; `LAG` is how long that travels
    tail        the least time from its start to the end of the step, the optimizer included
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from octotune.tune.balance import RandomState, random
from octotune.tune.genome import NUM_STAGES, F, Genome, I, Shape, empty_shape
from octotune.tune.kernel import kernel
from octotune.tune.moves import copy_into
from octotune.tune.problem import Int64, World
from octotune.tune.replay import Order, Replay
from octotune.tune.shape import shape_stages

START, TAIL, LENGTH, LAG = 0, 1, 2, 3
SOURCE, FOLLOWER = 4, 5  # the action whose output it takes in, and that takes in its own; -1: none
DEVICE, PLACE, TOKEN = 6, 7, 8
EARLIER = 9  # the same microbatch's action on the same stage that comes first; -1: none
GROWS, SHRINKS, MOST = 10, 11, 12  # bytes at its start, at its end, and most in use while it runs
HELD = 13  # bytes in use after it
WAS = 14  # scratch of a trial: its start before
STATE = 15  # scratch of a trial
NUM_FIELDS = 16


class Graph(NamedTuple):
    """A partition, a placement and an order, with all that follows from them."""

    genome: Genome
    shape: Shape
    actions: Int64  # [A, NUM_FIELDS]
    row: Int64  # [A] the actions as they run, device after device


def empty_graph(genome: Genome, world: World) -> Graph:
    """Return room for a genome and its order; the genome is taken over."""
    capacity = len(genome.device)
    num_actions = 3 * capacity * world.num_microbatches
    return Graph(
        genome=genome,
        shape=empty_shape(world, capacity),
        actions=np.zeros((num_actions, NUM_FIELDS), np.int64),
        row=np.zeros(num_actions, np.int64),
    )


@kernel
def read_times(world: World, order: Order, trial: Replay, actions: Int64, row: Int64) -> None:
    """Take starts and ways from a replay; a transfer that queued has a longer way."""
    num_actions, m = order.begin[world.num_devices], world.num_microbatches
    for p in range(num_actions):
        actions[row[p], START] = trial.start[p]
    for p in range(num_actions):
        a = row[p]
        source = actions[a, SOURCE]
        if source >= 0:
            token = actions[a, TOKEN]
            arrives = trial.arrival[token // 3, token % 3, a - token * m]
            actions[a, LAG] = arrives - actions[source, START] - actions[source, LENGTH]


@kernel
def read_order(world: World, graph: Graph, order: Order, trial: Replay) -> None:
    """Fill the table, but for tails, and the row; `trial` is how the order was replayed."""
    genome, shape, actions, row = graph.genome, graph.shape, graph.actions, graph.row
    num_stages, m = genome.meta[NUM_STAGES], world.num_microbatches
    count = np.zeros(3 * num_stages, np.int64)
    for d in range(world.num_devices):
        held = 0
        for p in range(order.begin[d], order.begin[d + 1]):
            token = order.token[p]
            a = token * m + count[token]
            count[token] += 1
            row[p] = a
            s, kind = token // 3, token % 3
            one = actions[a]
            one[LENGTH] = shape.duration[s, kind]
            one[DEVICE], one[PLACE], one[TOKEN] = d, p, token
            one[SOURCE] = one[FOLLOWER] = one[EARLIER] = -1
            one[STATE] = 0
            one[MOST] = shape.room[d] - shape.workspace[s]
            one[GROWS] = one[SHRINKS] = 0
            if kind == F:
                one[GROWS] = shape.at_forward[s]
                if s > 0:
                    one[SOURCE] = a - 3 * m
                if s + 1 < num_stages:
                    one[FOLLOWER] = a + 3 * m
            elif kind == I:
                one[GROWS], one[SHRINKS] = shape.at_backward[s], shape.off_backward[s]
                one[EARLIER] = a - m
                if s + 1 < num_stages:
                    one[SOURCE] = a + 3 * m
                if s > 0:
                    one[FOLLOWER] = a - 3 * m
            else:
                one[SHRINKS] = shape.off_weight[s]
                one[EARLIER] = a - m
            held += one[GROWS] - one[SHRINKS]
            one[HELD] = held
    read_times(world, order, trial, actions, row)


@kernel
def write_order(actions: Int64, row: Int64, order: Order) -> None:
    """Write tokens and starts, place by place."""
    for p in range(order.begin[order.begin.shape[0] - 1]):
        order.token[p] = actions[row[p], TOKEN]
        order.start[p] = actions[row[p], START]


@kernel
def copy_graph(world: World, source: Graph, target: Graph, num_actions: int) -> None:
    """Make `target` the same as `source`, which has so many actions."""
    copy_into(source.genome, target.genome)
    shape_stages(world, target.genome, target.shape)
    for p in range(num_actions):
        a = source.row[p]
        target.row[p] = a
        for field in range(NUM_FIELDS):
            target.actions[a, field] = source.actions[a, field]


@kernel
def tail_of(actions: Int64, row: Int64, begin: Int64, optimizer: Int64, a: int) -> int:
    """Return an action's tail by those of what waits for it."""
    p, d = actions[a, PLACE] + 1, actions[a, DEVICE]
    after = actions[row[p], TAIL] if p < begin[d + 1] else optimizer[d]
    follower = actions[a, FOLLOWER]
    if follower >= 0:
        after = max(after, actions[follower, LAG] + actions[follower, TAIL])
    return int(actions[a, LENGTH] + after)


@kernel
def fill_tails(
    actions: Int64, row: Int64, begin: Int64, optimizer: Int64, following: Int64
) -> None:
    """Compute all tails from the starts; `following` is scratch."""
    num_devices = begin.shape[0] - 1
    for d in range(num_devices):
        following[d] = begin[d + 1] - 1
    while True:
        d, latest = -1, -1
        for e in range(num_devices):
            if following[e] >= begin[e] and actions[row[following[e]], START] > latest:
                d, latest = e, actions[row[following[e]], START]
        if d < 0:
            break
        a = row[following[d]]
        following[d] -= 1
        actions[a, TAIL] = tail_of(actions, row, begin, optimizer, a)


@kernel
def critical_path(
    actions: Int64, row: Int64, begin: Int64, optimizer: Int64, path: Int64, rng: RandomState
) -> int:
    """List the actions of one longest path, last first; return how many there are."""
    last, a = -1, -1
    for d in range(begin.shape[0] - 1):
        p = begin[d + 1] - 1
        if p >= begin[d]:
            end = actions[row[p], START] + actions[row[p], LENGTH] + optimizer[d]
            if end > last:
                last, a = end, row[p]
    count = 0
    while a >= 0:
        path[count] = a
        count += 1
        start, p = actions[a, START], actions[a, PLACE]
        before, source = -1, actions[a, SOURCE]
        if p > begin[actions[a, DEVICE]]:
            before = row[p - 1]
        if before >= 0 and actions[before, START] + actions[before, LENGTH] != start:
            before = -1
        if source >= 0 and (
            actions[source, START] + actions[source, LENGTH] + actions[a, LAG] != start
        ):
            source = -1
        a = source if before < 0 or (source >= 0 and random(rng) < 0.5) else before
    return count
