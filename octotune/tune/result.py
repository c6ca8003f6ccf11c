"""The plan that a search ends with, and what it says about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from octotune.contract import Plan, Predicted, build_costs
from octotune.tune.limits import limits_of
from octotune.tune.plans import Candidate, candidate_plan
from octotune.tune.robust import jittered
from simulator.engine import simulate

if TYPE_CHECKING:
    from octotune.tune.search import Search


def finished_plan(search: Search) -> Plan:
    """Return the best plan with its predictions and the story of the search."""
    best = preferred(search)
    costs = build_costs(search.workload, search.cluster, best.stages, search.num_microbatches)
    timeline = simulate(best.schedule, costs, best.copies)
    jitter = jittered(best.schedule, costs, seed=search.seed)
    bound = search.lower_bound_ns
    plan = candidate_plan(best, search.workload, search.cluster, search.num_microbatches)
    budget = search.budget
    story: dict[str, Any] = {
        "seed": search.seed,
        "time_limit_s": budget.time_limit_s,
        "max_evaluations": budget.max_evaluations,
        "evaluations": budget.evaluations,
        "seconds": round(budget.elapsed_s, 3),
        "interrupted": search.interrupted,
        "found_by": best.source,
        "gains_ns": search.gains_ns,
        "gains_by_move_ns": search.move_gains_ns,
        "optimal": bound is not None and best.step_ns <= bound,
        "bound_by": search.bound_reason,
        "jitter_10_percent": {"mean": round(jitter.mean, 4), "worst": round(jitter.worst, 4)},
        "limited_by": limits_of(search.workload, search.world, best, timeline, bound),
    }
    return replace(
        plan,
        predicted=Predicted(
            step_ns=best.step_ns,
            bubble_fraction=best.bubble_fraction,
            peak_bytes=best.peak_bytes,
            lower_bound_ns=bound,
            baselines={one.name: one.entry for one in search.published},
        ),
        search=story,
    )


def preferred(search: Search) -> Candidate:
    """Return the plan with the fewest stages among those about as good as the best.

    Never one that is slower than a published schedule, and none that is more than twice as far
    above the bound as the best is: what is proven is not given away. So where the best is proven
    optimal, none that is not.
    """
    best = search.best
    assert best is not None
    most = best.step_ns * (1.0 + search.settings.stage_tolerance)
    for one in search.published:
        if one.candidate is not None:
            most = min(most, one.candidate.step_ns)
    if search.lower_bound_ns is not None:
        most = min(most, 2 * best.step_ns - search.lower_bound_ns)
    return min(
        (best, *(plan for plan in search.finalists if plan.step_ns <= most)),
        key=lambda plan: (plan.num_stages, plan.step_ns),
    )
