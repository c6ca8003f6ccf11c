"""Annealing over genomes: the loop that spends nearly all evaluations, compiled whole.

A slice is a fixed number of evaluations at one temperature. The limit up to which a neighbour is
accepted is drawn before it is tried, so that balance repair and the list scheduler can give up
early. Source of the acceptance rule: Kirkpatrick et al. 1983, Science 220.
"""

from __future__ import annotations

import math

import numpy as np

from octotune.tune.balance import RandomState, random, random_below, repair
from octotune.tune.genome import Float64, Genome, Run, Shape
from octotune.tune.kernel import kernel
from octotune.tune.moves import (
    NUM_MOVES,
    PHASE,
    STRUCTURAL,
    WEIGHT,
    change,
    copy_into,
    drawn,
    same_ranks,
)
from octotune.tune.problem import Int64, World
from octotune.tune.scheduler import list_schedule
from octotune.tune.shape import shape_stages

COST, BEST, EVALUATED, SCHEDULED = 0, 1, 2, 3
GAINS = 4  # from here: ns gained on the best by each move
TALLY = GAINS + NUM_MOVES
ALSO_RULES = 0.15  # how likely a change of stages comes with one of the rule
NUM_RULES = 4  # keys, limits, waiting, weight keys


@kernel
def anneal(
    world: World,
    current: Genome,
    trial: Genome,
    best: Genome,
    shape: Shape,
    run: Run,
    bound: Int64,
    rng: RandomState,
    weights: Float64,
    tally: Int64,
    temperature: float,
    slack: float,
    more_rules: float,
    evaluations: int,
) -> None:
    """Run one slice; `current`, `best` and `tally` are brought up to date.

    Args:
        world: the problem.
        current: where the walk stands, `tally[COST]` its step.
        trial: scratch.
        best: the best genome so far, `tally[BEST]` its step.
        shape: scratch.
        run: scratch.
        bound: scratch [D].
        rng: the walk's random numbers.
        weights: [NUM_MOVES] how often each move is made, up to a factor.
        tally: [TALLY] counters.
        temperature: the mean worsening accepted, as a part of the step.
        slack: repair aims at a device bound up to this part below the limit.
        more_rules: how likely a change of the rule is followed by another one. Most single ones
            change nothing, several at once change more than they should: it depends on the case.
        evaluations: how many neighbours to try.
    """
    capacity = current.device.shape[0]
    for _ in range(evaluations):
        tally[EVALUATED] += 1
        worse = -math.log(1e-12 + random(rng)) * temperature
        limit = tally[COST] + int(tally[COST] * worse)
        kind = drawn(weights, rng)
        copy_into(current, trial)
        if not change(kind, world, trial, capacity, rng):
            continue
        more = more_rules if kind >= STRUCTURAL else ALSO_RULES
        several = False
        while random(rng) < more:
            again = STRUCTURAL + random_below(rng, NUM_RULES)
            several = change(again, world, trial, capacity, rng) or several
        if kind < STRUCTURAL:
            target = limit - int(limit * slack * random(rng))
            if not repair(world, trial, shape, bound, target, 0.01, rng) and not (
                slack > 0.0 and bound.max() <= limit
            ):
                continue
        if not shape_stages(world, trial, shape):
            continue
        if kind in (PHASE, WEIGHT) and not several and same_ranks(world, shape, current, trial):
            copy_into(trial, current)  # the same order and step
            continue
        tally[SCHEDULED] += 1
        step = list_schedule(world, trial, shape, run, limit)
        if step < 0:
            continue
        copy_into(trial, current)
        tally[COST] = step
        if step < tally[BEST]:
            tally[GAINS + kind] += tally[BEST] - step
            tally[BEST] = step
            copy_into(trial, best)


def empty_tally() -> Int64:
    """Return counters for `anneal`."""
    return np.zeros(TALLY, np.int64)
