"""The rule that would make a given plan: from an order back to keys.

A plan's start times are fitted by phase[stage, kind] + rhythm[microbatch], the two-way means. Run
as a strict rule the genome gives about the same order, but over any partition: so the rhythm of a
published schedule, or of a polished order, can be carried to other cuts and placements.
"""

from __future__ import annotations

import numpy as np

from octotune.tune.genome import (
    NEVER_FIRST,
    NUM_STAGES,
    STRICT,
    F,
    Genome,
    I,
    W,
    copy_genome,
    empty_genome,
)
from octotune.tune.plans import Candidate
from octotune.tune.problem import World
from simulator.actions import KIND_MASK, MICROBATCH_MASK, MICROBATCH_SHIFT, STAGE_SHIFT, Kind
from simulator.timeline import Timeline


def fitted_genomes(
    world: World, capacity: int, candidate: Candidate, timeline: Timeline
) -> list[Genome]:
    """Return genomes that follow the plan: with W by its keys, and with W in the gaps."""
    num_stages, m = candidate.num_stages, world.num_microbatches
    if num_stages > capacity:
        return []
    codes = candidate.schedule.codes
    kinds, stages = codes & KIND_MASK, codes >> STAGE_SHIFT
    microbatches = (codes >> MICROBATCH_SHIFT) & MICROBATCH_MASK
    as_kind = np.zeros(len(Kind), np.int64)
    as_kind[int(Kind.B)] = as_kind[int(Kind.I)] = I
    as_kind[int(Kind.W)] = W
    starts = np.zeros((num_stages, 3, m))
    starts[stages, as_kind[kinds], microbatches] = timeline.start_ns
    genome = empty_genome(world, capacity)
    genome.meta[NUM_STAGES] = num_stages
    genome.meta[STRICT] = 1
    genome.cut[: num_stages + 1] = [
        *(stage.layers[0] for stage in candidate.stages),
        world.num_layers,
    ]
    genome.device[:num_stages] = [stage.device for stage in candidate.stages]
    genome.recompute[:num_stages] = [stage.recompute for stage in candidate.stages]
    genome.split[:num_stages] = 0
    genome.split[stages[kinds == int(Kind.W)]] = 1

    chain = starts[:, :W]
    column = chain.mean(axis=(0, 1))
    period = max(1.0, float(column[-1] - column[0]) / max(1, m - 1))
    genome.rhythm[:] = np.maximum.accumulate((column - column[0]) / period)
    phase = starts / period - genome.rhythm[None, None, :]
    genome.phase[:num_stages] = np.median(phase, axis=2)
    genome.phase[:num_stages] -= genome.phase[:num_stages, F].min()
    filling = copy_genome(genome)
    filling.phase[:num_stages, W] = NEVER_FIRST
    if not genome.split[:num_stages].any():
        return [filling]
    genome.phase[genome.split == 0, W] = NEVER_FIRST
    return [genome, filling]
