"""The seeds a search starts from: every family of rules on a placement, and given stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from octotune.contract import Stage
from octotune.tune.balance import repair_memory
from octotune.tune.genome import NUM_STAGES, Genome, empty_genome, empty_run, empty_shape
from octotune.tune.plans import Candidate, order_schedule
from octotune.tune.problem import FAR, World
from octotune.tune.scheduler import list_schedule
from octotune.tune.seeds import list_rules, pattern_rules, strict_rules
from octotune.tune.shape import shape_stages
from simulator.actions import Schedule

LIST, PHASE, PATTERN = "list seeds", "phase seeds", "pattern seeds"
RULES = {LIST: list_rules, PHASE: strict_rules, PATTERN: pattern_rules}
SEED_ACTIONS = 12_000_000  # of one family on one placement: about half a second
LARGE_ACTIONS = 40_000  # of one plan; above, in proportion less: other searches gain more there


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """A genome to start from, and the step of its rule."""

    step_ns: int
    source: str
    genome: Genome

    @property
    def num_stages(self) -> int:
        """How many stages it has."""
        return int(self.genome.meta[NUM_STAGES])


def seeds_of(
    world: World, genome: Genome, *, move: bool, late: Callable[[], bool]
) -> tuple[list[Seed], int]:
    """Return the best seed of each family of rules on one placement, and how many were tried.

    In large problems only some rules of each family are run. `move` allows layers to be shifted
    until memory suffices; `late` tells that the families' first seeds must do.
    """
    capacity = len(genome.device)
    shape, run = empty_shape(world, capacity), empty_run(world, capacity)
    if move and not repair_memory(world, genome, shape, np.zeros(world.num_devices, np.int64)):
        return [], 0
    actions = 3 * int(genome.meta[NUM_STAGES]) * world.num_microbatches
    most = max(6, SEED_ACTIONS * min(LARGE_ACTIONS, actions) // actions**2)
    seeds: list[Seed] = []
    tried = 0
    for source, rules in RULES.items():
        best: Seed | None = None
        made = list(rules(world, genome))
        for ruled in made[:: max(1, -(-len(made) // most))]:
            if not shape_stages(world, ruled, shape):
                continue
            limit = FAR if best is None else best.step_ns - 1
            step = list_schedule(world, ruled, shape, run, limit)
            tried += 1
            if step >= 0:
                best = Seed(step_ns=step, source=source, genome=ruled)
            if best is not None and late():
                break
        if best is not None:
            seeds.append(best)
    return seeds, tried


def ran(world: World, genomes: Iterable[Genome], source: str) -> list[Seed]:
    """Return the genomes that fit the memory and run, as seeds, best first."""
    seeds = []
    for genome in genomes:
        capacity = len(genome.device)
        shape, run = empty_shape(world, capacity), empty_run(world, capacity)
        if shape_stages(world, genome, shape):
            step = list_schedule(world, genome, shape, run, FAR)
            if step >= 0:
                seeds.append(Seed(step_ns=step, source=source, genome=genome))
    return sorted(seeds, key=lambda seed: seed.step_ns)


def rule_schedule(world: World, genome: Genome) -> Schedule | None:
    """Return the order that a genome's rule makes; it fits the memory. None: there is no room."""
    capacity = len(genome.device)
    shape, run = empty_shape(world, capacity), empty_run(world, capacity)
    if not shape_stages(world, genome, shape):
        return None
    if list_schedule(world, genome, shape, run, FAR) < 0:
        return None
    return order_schedule(run.order, run.begin, genome.split)


def given_genome(world: World, capacity: int, stages: Sequence[Stage]) -> Genome:
    """Return a genome with these stages and the plainest rule."""
    genome = empty_genome(world, capacity)
    genome.meta[NUM_STAGES] = len(stages)
    genome.cut[: len(stages) + 1] = [*(stage.layers[0] for stage in stages), world.num_layers]
    genome.device[: len(stages)] = [stage.device for stage in stages]
    genome.recompute[: len(stages)] = [stage.recompute for stage in stages]
    return genome


def different(seeds: Sequence[Seed], count: int) -> list[Seed]:
    """Return the best seeds of different stage counts, then the best of the others."""
    first: dict[int, Seed] = {}
    for seed in seeds:
        first.setdefault(seed.num_stages, seed)
    others = [seed for seed in seeds if first[seed.num_stages] is not seed]
    return [*first.values(), *others][: max(0, count)]


def distinct(plans: Sequence[Candidate], most: int) -> list[Candidate]:
    """Return the best plans, no two of them with the same stages."""
    chosen: list[Candidate] = []
    for plan in sorted(plans, key=lambda one: (one.step_ns, one.num_stages)):
        if len(chosen) < most and all(plan.stages != one.stages for one in chosen):
            chosen.append(plan)
    return chosen
