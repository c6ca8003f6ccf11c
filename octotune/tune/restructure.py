"""Another partition or placement for an order that stays: what the list scheduler would forget.

After a move of layers or stages each action keeps its place in time, and so most of what an
order has gained under tight memory; the list scheduler would decide all of it anew. Where memory
binds, what is recomputed changes, too.
"""

from __future__ import annotations

import numpy as np

from octotune.tune.balance import RandomState, repair
from octotune.tune.genome import NUM_STAGES, F, Float64, Genome, Shape
from octotune.tune.kernel import kernel
from octotune.tune.moves import STRUCTURAL, change, copy_into, drawn
from octotune.tune.problem import Int64, World
from octotune.tune.replay import Order, Replay
from octotune.tune.shape import REJECTED, device_bound, shape_stages

# shift a cut, hand layers on, move a stage, swap two, exchange devices, split, merge, recompute
WEIGHTS = np.array([0.28, 0.24, 0.1, 0.2, 0.05, 0.065, 0.065, 0.0])
WEIGHTS_BINDING = np.array([0.28, 0.24, 0.1, 0.2, 0.05, 0.065, 0.065, 0.1])
assert len(WEIGHTS) == len(WEIGHTS_BINDING) == STRUCTURAL


@kernel
def restructured(
    world: World,
    genome: Genome,
    other: Genome,
    shape: Shape,
    limit: int,
    most: int,
    weights: Float64,
    bound: Int64,
    rng: RandomState,
) -> int:
    """Make `other` a neighbour of `genome` with another partition or placement, balanced again.

    It has at most `most` stages. Return REJECTED where it cannot be within the limit; else where
    it was split or merged. `shape` becomes the neighbour's; `bound` is scratch.
    """
    copy_into(genome, other)
    kind = drawn(weights, rng)
    if not change(kind, world, other, most, rng):
        return REJECTED
    num_stages = min(genome.meta[NUM_STAGES], other.meta[NUM_STAGES])
    changed = 0
    while changed < num_stages - 1 and other.cut[changed + 1] == genome.cut[changed + 1]:
        changed += 1
    if other.meta[NUM_STAGES] < genome.meta[NUM_STAGES]:
        other.split[changed] = genome.split[2 * changed + 1 - _dropped(genome, other, changed)]
    if not repair(world, other, shape, bound, limit, 0.01, rng):
        return REJECTED
    if not shape_stages(world, other, shape) or device_bound(world, shape) > limit:
        return REJECTED
    return changed


@kernel
def _dropped(genome: Genome, other: Genome, at: int) -> int:
    """Return whose actions go where stages `at` and `at + 1` are merged: not on its device."""
    return at if other.device[at] == genome.device[at + 1] else at + 1


@kernel
def regroup(genome: Genome, other: Genome, order: Order, trial: Replay, at: int) -> None:
    """Rearrange the rows of `genome` for `other`, whose devices or stage count differ.

    Each action stays where it was in time, so that no row can wait in a ring: of a stage split at
    stage `at`, the second half follows the first; of two stages merged there, those actions stay
    that are on the merged stage's device. Only tokens and row ends are written; both are kept in
    `trial`.
    """
    num_devices = order.begin.shape[0] - 1
    more = other.meta[NUM_STAGES] - genome.meta[NUM_STAGES]
    dropped = _dropped(genome, other, at) if more < 0 else -1
    row, old_begin, filled, time = trial.token, trial.begin, trial.next, trial.start
    for d in range(num_devices + 1):
        old_begin[d] = order.begin[d]
    for d in range(num_devices):
        filled[d] = 0
    for p in range(old_begin[num_devices]):
        row[p] = order.token[p]
        s = row[p] // 3
        if s == dropped:
            continue
        new = s + more if s > at else s
        filled[other.device[new]] += 1
        if more > 0 and s == at:
            filled[other.device[new + 1]] += 1
    for d in range(num_devices):
        order.begin[d + 1] = order.begin[d] + filled[d]
        filled[d] = order.begin[d]
    for p in range(old_begin[num_devices]):
        s, kind = row[p] // 3, row[p] % 3
        if s == dropped:
            continue
        new = s + more if s > at else s
        second = -1
        if more > 0 and s == at:
            second = new + 1
            if kind != F:
                new, second = second, new
        while new >= 0:
            d = other.device[new]
            q, start = filled[d], order.start[p]
            filled[d] += 1
            while q > order.begin[d] and time[q - 1] > start:
                time[q] = time[q - 1]
                order.token[q] = order.token[q - 1]
                q -= 1
            time[q] = start
            order.token[q] = 3 * new + kind
            new, second = second, -1


@kernel
def restore(order: Order, trial: Replay) -> None:
    """Take back what `regroup` did."""
    for d in range(order.begin.shape[0]):
        order.begin[d] = trial.begin[d]
    for p in range(order.begin[order.begin.shape[0] - 1]):
        order.token[p] = trial.token[p]
