"""The start of a search beside its seeds: published schedules, and gaps closed.

Functions of a `Search`, whose threads, budget and best plan they use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from octotune.tune.baselines import MAIN, QUICK, Baseline, Problem, baseline_makers, untried
from octotune.tune.plans import Candidate
from octotune.tune.start import different, distinct, rule_schedule
from octotune.tune.tighten import Tighten

if TYPE_CHECKING:
    from octotune.tune.search import Search

PUBLISHED, TIGHTENED = "published schedules", "justification"
CLOSED_PLANS, CLOSED_ROUNDS = 12, 4  # whose gaps are closed at the start, and how often
FULL_EFFORT_S = 20.0  # with less time, published schedules that search do less of it


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
        name: search._pool.submit(_unless_late, search, name, makers[name]) for name in quick_first
    }
    for name in makers:
        for baseline in waiting[name].result():
            search.published.append(baseline)
            search.budget.evaluations += 1
            if baseline.candidate is not None:
                search._offer(baseline.candidate, PUBLISHED)
                search.finalists.append(baseline.candidate)
    search._tell(PUBLISHED)
    for plan in distinct(search.finalists, 4):
        search._seeds += search._rhythms(plan)
    search._seeds.sort(key=lambda seed: (seed.step_ns, seed.num_stages))


def close_gaps(search: Search) -> None:
    """Justify the best plans so far, of different kinds: none gets longer."""
    plans = distinct([search._best(), *search.finalists, *_best_seeds(search)], CLOSED_PLANS)
    islands = [search._tightened(plan) for plan in plans]
    live = [(plan, island) for plan, island in zip(plans, islands, strict=True) if island]

    def close(island: Tighten) -> None:
        if not search._late():
            island.close_gaps(CLOSED_ROUNDS)

    search._side_by_side(close, [island for _, island in live])
    for plan, island in live:
        search.budget.evaluations += island.evaluations
        if island.best_ns < plan.step_ns:
            made = search._made(*island.result(), TIGHTENED)
            if made is not None:
                search._offer(made, TIGHTENED)
                search.finalists.append(made)
    search._tell(TIGHTENED)


def _best_seeds(search: Search) -> list[Candidate]:
    """Return the best seeds of different stage counts as plans."""
    plans = []
    for seed in different(search._seeds, CLOSED_PLANS // 2):
        schedule = rule_schedule(search.world, seed.genome)
        made = None if schedule is None else search._made(seed.genome, schedule, seed.source)
        plans += [] if made is None else [made]
    return plans


def _unless_late(
    search: Search, name: str, make: Callable[[], tuple[Baseline, Baseline]]
) -> tuple[Baseline, Baseline]:
    """Make a schedule's baselines; in large problems the less known are left out when late."""
    if search._late() and search._large and name not in (*MAIN, *QUICK):
        return untried(name, "not tried: the time was short")
    return make()
