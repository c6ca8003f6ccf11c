"""Sketches: partitions and placements annealed by what tells of their orders, before any order.

The device bound (`octotune.tune.shape`) knows loads, how late a device can begin and how early it
must end, and what memory lets it do meanwhile; it costs a fiftieth of an order. Many stages lower
it and make orders harder, so each sketch pays for its stages, some little and some much. So do
stages whose activations wait long for their gradients on one device: each pays for how crowded
its memory is on the way. The list scheduler then tells which sketches are worth a walk.
"""

from __future__ import annotations

import math

import numpy as np

from octotune.tune.balance import RandomState, random, random_below, repair_memory
from octotune.tune.genome import (
    NUM_STAGES,
    F,
    Genome,
    I,
    Shape,
    W,
    copy_genome,
    empty_genome,
    empty_run,
    empty_shape,
)
from octotune.tune.kernel import kernel
from octotune.tune.moves import RELAY, SHIFT, STRUCTURAL, change, copy_into, drawn
from octotune.tune.problem import FAR, World
from octotune.tune.scheduler import list_schedule
from octotune.tune.seeds import list_rules
from octotune.tune.shape import device_bound, shape_stages
from octotune.tune.start import Seed

SKETCH = "sketches"
STAGE_COSTS = (0.006, 0.003, 0.01, 0.001)  # of one stage, as a part of the step; in turn
STAGES_SHAPED = 1_500_000  # by one sketch: about a tenth of a second
MOST_TRIALS = 60_000
TRIALS_AN_EVALUATION = 20  # what a trial costs, against an order
HOT, COLD = 0.02, 0.0003
CROWDING = 4.0  # twice as much leads to orders about as short
# shift a cut, hand layers on, move a stage, swap two, exchange devices, split, merge; recompute
# lowers no bound
WEIGHTS = np.array([0.28, 0.2, 0.14, 0.2, 0.06, 0.06, 0.06, 0.0])
assert len(WEIGHTS) == STRUCTURAL


@kernel
def crowding(world: World, shape: Shape, step_ns: int) -> float:
    """Return how crowded memory is at least, from 0; 1 where no device has any to spare.

    A microbatch stays with a stage at least while it goes through all later ones and back. What it
    takes times how long, summed, is held against a device's room times the step. Where all devices
    are less than half full by that measure, memory seldom holds up an order; a fuller one does,
    and ever more: so the mean is of fourth powers.
    """
    total = 0.0
    for d in range(world.num_devices):
        if not shape.tight[d]:
            continue
        area = 0.0
        for i in range(shape.first[d], shape.first[d + 1]):
            s = shape.member[i]
            back = shape.turn[s] + shape.duration[s, F] + shape.duration[s, I]
            area += shape.at_forward[s] * float(back)
            area += shape.off_weight[s] * float(shape.duration[s, W])
        whole = float(max(1, shape.room[d])) * float(step_ns)
        total += (area * world.num_microbatches / whole) ** 4
    return float(total / world.num_devices)


@kernel
def sketch_cost(world: World, genome: Genome, shape: Shape, stage_cost: float) -> float:
    """Return the device bound, raised for each stage and for memory that will be waited for."""
    bound = device_bound(world, shape)
    crowded = CROWDING * crowding(world, shape, bound)
    return float(bound * (1.0 + stage_cost * genome.meta[NUM_STAGES] + crowded))


@kernel
def anneal_sketch(
    world: World,
    current: Genome,
    trial: Genome,
    best: Genome,
    shape: Shape,
    rng: RandomState,
    stage_cost: float,
    trials: int,
) -> None:
    """Anneal from `current`, which fits the memory; `best` becomes the cheapest.

    `trial` and `shape` are scratch.
    """
    shape_stages(world, current, shape)
    cost = sketch_cost(world, current, shape, stage_cost)
    least = cost
    copy_into(current, best)
    for number in range(trials):
        temperature = HOT * (COLD / HOT) ** (number / trials)
        limit = cost * (1.0 - math.log(1e-12 + random(rng)) * temperature)
        copy_into(current, trial)
        kind = drawn(WEIGHTS, rng)
        if not change(kind, world, trial, current.device.shape[0], rng):
            continue
        if random(rng) < 0.3:
            change(SHIFT if random_below(rng, 2) else RELAY, world, trial, 0, rng)
        if not shape_stages(world, trial, shape):
            continue
        value = sketch_cost(world, trial, shape, stage_cost)
        if value <= limit:
            cost = value
            copy_into(trial, current)
            if value < least:
                least = value
                copy_into(trial, best)


def sketched(
    world: World, genome: Genome, stage_cost: float, rng: RandomState
) -> tuple[Seed | None, int]:
    """Return a sketch begun from a placement, with its best rule, and what it cost in evaluations.

    None: nothing like it fits the memory.
    """
    capacity = len(genome.device)
    shape, run = empty_shape(world, capacity), empty_run(world, capacity)
    current, trial = copy_genome(genome), empty_genome(world, capacity)
    copy_into(genome, trial)
    if not repair_memory(world, current, shape, np.zeros(world.num_devices, np.int64)):
        return None, 0
    best = copy_genome(current)
    trials = min(MOST_TRIALS, STAGES_SHAPED // int(current.meta[NUM_STAGES]))
    anneal_sketch(world, current, trial, best, shape, rng, stage_cost, trials)
    seed: Seed | None = None
    tried = trials // TRIALS_AN_EVALUATION
    for ruled in list_rules(world, best):
        shape_stages(world, ruled, shape)
        limit = FAR if seed is None else seed.step_ns - 1
        step = list_schedule(world, ruled, shape, run, limit)
        tried += 1
        if step >= 0:
            seed = Seed(step_ns=step, source=SKETCH, genome=ruled)
    return seed, tried
