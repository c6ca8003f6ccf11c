"""The plan that a search ends with, and what it says about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from octotune.contract import Plan, Predicted
from octotune.tune.plans import candidate_plan

if TYPE_CHECKING:
    from octotune.tune.search import Search


def finished_plan(search: Search) -> Plan:
    """Return the best plan with its predictions and the story of the search."""
    best = search.best
    assert best is not None
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
    }
    return replace(
        plan,
        predicted=Predicted(
            step_ns=best.step_ns,
            bubble_fraction=best.bubble_fraction,
            peak_bytes=best.peak_bytes,
            lower_bound_ns=search.lower_bound_ns,
            baselines={one.name: one.entry for one in search.published},
        ),
        search=story,
    )
