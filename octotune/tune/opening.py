"""The start of a search: seeds, sketches, published schedules, and their gaps closed.

Functions of a `Search`, whose threads, budget and best plan they use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import TYPE_CHECKING

from octotune.errors import InfeasibleError
from octotune.tune.balance import RandomState, island_rng, random_below
from octotune.tune.baselines import MAIN, QUICK, Baseline, Problem, baseline_makers, untried
from octotune.tune.feasible import packed_genomes, too_small
from octotune.tune.genome import Genome
from octotune.tune.plans import Candidate
from octotune.tune.seeds import placement_seeds
from octotune.tune.sketch import SKETCH, STAGE_COSTS, sketched
from octotune.tune.start import Seed, different, distinct, given_genome, rule_schedule, seeds_of
from octotune.tune.tighten import Tighten

if TYPE_CHECKING:
    from octotune.tune.search import Search

SEEDS, PUBLISHED, TIGHTENED = "seeds", "published schedules", "justification"
NUM_SKETCHES, SKETCHES_PART = 8, 0.1  # at the start; how much of the time any may take
SKETCH_EVALUATIONS, SKETCHES_SHARE = 3000, 0.15  # what one costs, and all of those left
SEEDS_LATE = 0.3  # of the time: from then on, the families' first seeds must do
CLOSED_PLANS, CLOSED_ROUNDS = 12, 4  # whose gaps are closed at the start, and how often
FULL_EFFORT_S = 20.0  # with less time, published schedules that search do less of it


def try_seeds(search: Search) -> None:
    """Run every rule on every placement seed, and keep the best of each pair."""

    def seeds_on(genome: Genome) -> tuple[list[Seed], int]:
        move, late = search.stages is None, lambda: search.late(SEEDS_LATE)
        return seeds_of(search.world, genome, move=move, late=late)

    for future in [search.pool.submit(seeds_on, genome) for genome in list(_placements(search))]:
        seeds, tried = future.result()
        search.budget.evaluations += tried
        search.seeds += seeds
        best = min(seeds, key=lambda seed: seed.step_ns, default=None)
        if best is not None and (search.best is None or best.step_ns < search.best.step_ns):
            schedule = rule_schedule(search.world, best.genome)
            assert schedule is not None  # the seed has run
            search.judge(best.genome, schedule, best.source)
        search.tell(SEEDS)
    if search.best is None and search.stages is not None:
        raise InfeasibleError(too_small(search.workload, search.cluster, search.stages))
    if search.best is None:
        for genome in packed_genomes(search.workload, search.cluster, search.world):
            schedule = rule_schedule(search.world, genome)
            if schedule is not None:
                search.judge(genome, schedule, "packing")
                break
    search.seeds.sort(key=_by_step)


def try_sketches(search: Search, count: int, part: float) -> list[Seed]:
    """Sketch partitions and placements and return them, best first.

    None is begun after `part` of the time, and they get a small share of what evaluations are
    left. They are seeds of later walks, too.
    """
    if search.stages is not None or search.large:
        return []
    if search.budget.max_evaluations is not None:
        left = search.budget.max_evaluations - search.budget.evaluations
        count = min(count, int(SKETCHES_SHARE * left / SKETCH_EVALUATIONS))
    rng = search.island_rng()
    genomes = list(placement_seeds(search.world, search.capacity, rng))
    costs = cycle(STAGE_COSTS)

    def sketch(genome: Genome, cost: float, rng: RandomState) -> tuple[Seed | None, int]:
        return (None, 0) if search.late(part) else sketched(search.world, genome, cost, rng)

    waiting = [
        search.pool.submit(sketch, genomes[int(random_below(rng, len(genomes)))], next(costs),
                           search.island_rng())
        for _ in range(count)
    ]  # fmt: skip
    seeds = []
    for future in waiting:
        seed, tried = future.result()
        search.budget.evaluations += tried
        seeds += [] if seed is None else [seed]
    seeds.sort(key=_by_step)
    search.seeds = sorted([*search.seeds, *seeds], key=_by_step)
    if seeds and (search.best is None or search.worth(seeds[0].step_ns)):
        schedule = rule_schedule(search.world, seeds[0].genome)
        assert schedule is not None  # the seed has run
        search.judge(seeds[0].genome, schedule, SKETCH)
    search.tell(SKETCH)
    return seeds


def _by_step(seed: Seed) -> tuple[int, int]:
    return seed.step_ns, seed.num_stages


def _placements(search: Search) -> Iterator[Genome]:
    if search.stages is None:
        rng = island_rng(search.seed, 0)
        yield from placement_seeds(search.world, search.capacity, rng)
    else:
        yield given_genome(search.world, search.capacity, search.stages)


def try_published(search: Search) -> None:
    """Take every published schedule as a plan, and the rhythms of the best as seeds."""
    if search.stages is not None:
        return
    problem = Problem(
        workload=search.workload,
        cluster=search.cluster,
        num_microbatches=search.num_microbatches,
        world=search.world,
        effort=min(1.0, (search.budget.time_limit_s or FULL_EFFORT_S) / FULL_EFFORT_S),
    )
    makers = dict(baseline_makers(problem))
    quick_first = sorted(makers, key=lambda name: name not in QUICK)
    waiting = {
        name: search.pool.submit(_unless_late, search, name, makers[name]) for name in quick_first
    }
    for name in makers:
        for baseline in waiting[name].result():
            search.published.append(baseline)
            search.budget.evaluations += 1
            if baseline.candidate is not None:
                search.offer(baseline.candidate, PUBLISHED)
                search.finalists.append(baseline.candidate)
    search.tell(PUBLISHED)
    for plan in distinct(search.finalists, 4):
        search.fitted += search.rhythms(plan)
    search.fitted.sort(key=_by_step)


def close_gaps(search: Search) -> None:
    """Justify the best plans so far, of different kinds: none gets longer."""
    plans = distinct([search.best_so_far(), *search.finalists, *_best_seeds(search)], CLOSED_PLANS)
    islands = [search.tightened(plan) for plan in plans]
    live = [(plan, island) for plan, island in zip(plans, islands, strict=True) if island]

    def close(island: Tighten) -> None:
        if not search.late():
            island.close_gaps(CLOSED_ROUNDS)

    search.side_by_side(close, [island for _, island in live])
    for plan, island in live:
        search.budget.evaluations += island.evaluations
        if island.best_ns < plan.step_ns:
            made = search.made(*island.result(), TIGHTENED)
            if made is not None:
                search.offer(made, TIGHTENED)
                search.finalists.append(made)
    search.tell(TIGHTENED)


def _best_seeds(search: Search) -> list[Candidate]:
    """Return the best seeds of different stage counts as plans."""
    plans = []
    for seed in different(search.seeds, CLOSED_PLANS // 2):
        schedule = rule_schedule(search.world, seed.genome)
        made = None if schedule is None else search.made(seed.genome, schedule, seed.source)
        plans += [] if made is None else [made]
    return plans


def _unless_late(
    search: Search, name: str, make: Callable[[], tuple[Baseline, Baseline]]
) -> tuple[Baseline, Baseline]:
    """Make a schedule's baselines; in large problems the less known are left out when late."""
    if search.late() and search.large and name not in (*MAIN, *QUICK):
        return untried(name, "not tried: the time was short")
    return make()
