"""The search where activations may leave: within memory, beyond it, and back.

    the search as ever                    what fits without offload
    the same with more memory             what memory keeps away
    `octotune.offload.joint`              that, brought within memory by copies and recompute

The shares of the budget are fixed, so that evaluations alone as the limit give the same plan.
"""

from __future__ import annotations

from collections.abc import Callable

from octotune.contract import Cluster
from octotune.errors import InfeasibleError
from octotune.offload.joint import (
    MORE_MEMORY,
    OFFLOAD,
    Wish,
    improve_with_offload,
    with_more_memory,
)
from octotune.stopping import Stopping
from octotune.tune.budget import Budget
from octotune.tune.opening import try_published
from octotune.tune.plans import Candidate
from octotune.tune.search import Search

WITHIN, BEYOND, COPIES = 0.2, 0.2, 0.4  # of the budget; BEYOND for each of MORE_MEMORY
NUM_STARTS = 4  # plans of different stage counts taken from each search

Run = Callable[[Search], None]
Make = Callable[[Cluster, Budget], Search]


def search_with_offload(
    make: Make,
    run: Run,
    budget: Budget,
    cluster: Cluster,
    wish: Wish,
    stop: Stopping,
    *,
    keep_stages: bool,
) -> Search:
    """Return the search within memory, its best plan one with offload where that is shorter.

    Args:
        make: returns a new search on a cluster, within a budget.
        run: runs it, inside its context, to the end of its budget.
        budget: of all together.
        cluster: as it is.
        wish: "always": the plan has copies even where one without is as short.
        stop: told when nothing is left to stop.
        keep_stages: change neither the partition nor recompute.

    Raises:
        KeyboardInterrupt: if stopped before there is a plan within memory.
        InfeasibleError: if no plan fits, with offload or without.
    """
    search = make(cluster, budget.part(WITHIN))
    infeasible: InfeasibleError | None = None
    copies = budget.part(COPIES)
    try:
        with search:
            try:
                run(search)
            except InfeasibleError as error:
                infeasible = error
                try_published(search)  # for what the plan is compared with
        starts = _best_by_stage_count(search)
        budget.evaluations += search.budget.evaluations
        for times in MORE_MEMORY:
            if search.interrupted:
                raise KeyboardInterrupt
            wider = make(with_more_memory(cluster, times), budget.part(BEYOND))
            with wider:
                run(wider)
            search.interrupted |= wider.interrupted
            budget.evaluations += wider.budget.evaluations
            starts += _best_by_stage_count(wider)
        if search.interrupted:
            raise KeyboardInterrupt
        found = improve_with_offload(
            starts,
            search.workload,
            cluster,
            search.num_microbatches,
            time_limit_s=copies.time_limit_s,
            max_evaluations=copies.max_evaluations,
            seed=search.seed,
            target_ns=0 if wish == "always" else search.lower_bound_ns or 0,
            keep_stages=keep_stages,
        )
        stop.over()
    except KeyboardInterrupt:
        if search.best is None:
            raise
        search.interrupted = True
        search.budget = budget
        return search
    budget.evaluations += copies.max_evaluations or 0
    search.budget = budget
    if found is None:
        if infeasible is not None:
            raise infeasible
        return search
    if wish == "always" and found.copies is not None:
        search.best, search.finalists = found, []
    else:
        search.offer(found, OFFLOAD)
    return search


def _best_by_stage_count(search: Search) -> list[Candidate]:
    """Return the best plans of a search, each of another number of stages."""
    plans = [] if search.best is None else [search.best]
    chosen: list[Candidate] = []
    for plan in sorted([*plans, *search.finalists], key=lambda plan: plan.step_ns):
        if len(chosen) < NUM_STARTS and all(
            plan.num_stages != other.num_stages for other in chosen
        ):
            chosen.append(plan)
    return chosen
