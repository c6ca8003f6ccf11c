"""The tuner: partition, placement and schedule searched together.

    seeds and published schedules        a good plan in a second, its gaps closed
    sketches                             partitions and placements annealed by their bound
    then, in cycles, a quick one first, until the budget is spent or the bound is met:
        diagnose    where does the time of the best plan go?
        walk        anneal partitions, placements and rules, the moves chosen by the diagnosis
        polish      anneal the order itself, and under it the partition and placement, from the
                    best plans of different kinds; once that finds nothing, hand over to new walks
        begin anew  in long searches, with other parameters, as optuna proposes them; where memory
                    binds, such a cycle polishes its own walks and sketches alone

Walks and polishes run on islands, in rounds: every live island makes one slice of a fixed number
of evaluations, and between rounds the best is judged by the simulator, the worst islands are
given up, and the clock is looked at. Whatever ends the search, the best plan so far is returned.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from octotune.contract import Cluster, Plan, Stage, build_costs
from octotune.errors import MalformedError
from octotune.offload.joint import memory_may_bind, why_not, wish_of
from octotune.offload.planning import warm_up_paging
from octotune.stopping import stopping
from octotune.tune.budget import Budget
from octotune.tune.inputs import cluster_of, workload_of
from octotune.tune.offloading import search_with_offload
from octotune.tune.opening import (
    NUM_SKETCHES,
    SKETCHES_PART,
    close_gaps,
    try_published,
    try_seeds,
    try_sketches,
)
from octotune.tune.result import finished_plan
from octotune.tune.rounds import Rounds
from octotune.tune.search import Search
from octotune.tune.settings import SETTINGS, Settings
from octotune.tune.warm import warm_up

Progress = Callable[[str, int, float], None]


def tune(
    model: Any,
    cluster: Any,
    *,
    num_microbatches: int,
    seed: int = 0,
    time_limit_s: float | None = None,
    max_evaluations: int | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    example_input: Any = None,
    loss_fn: Any = None,
    example_target: Any = None,
    stages: Sequence[Stage] | None = None,
    offload: str = "auto",
    settings: Settings = SETTINGS,
    clock: Callable[[], float] = time.monotonic,
) -> Plan:
    """Return the best plan found for a model on a cluster.

    Args:
        model: a Workload, a workload file or bundled name, or a sequence of torch modules.
        cluster: a Cluster, a cluster file or bundled name, or a number of equal devices.
        num_microbatches: m, microbatches a step.
        seed: of all random choices.
        time_limit_s: seconds to search; by default 20 where `max_evaluations` is not given, and
            else no limit. Ctrl-C ends the search early and keeps the best plan.
        max_evaluations: plans to try. With it and no time limit, the same input and seed give the
            same plan, whatever the machine and the number of workers.
        workers: threads; by default the machine's cores. They change the speed only.
        progress: called between rounds with the phase, the best step in ns, and the seconds spent.
        example_input: one microbatch for the first module, where the model is modules.
        loss_fn: `loss_fn(output, target) -> scalar`, where the model is modules.
        example_target: what `loss_fn` gets as target for it.
        stages: keep this partition and placement, and search the order alone. The lower bound is
            then that of these stages.
        offload: "auto": activations go to the host where memory does not suffice without, or where
            that buys a shorter step; "never"; "always": also where neither is so. Where nothing
            can be offloaded the plan is made without, and `search` says why.
        settings: the search's own parameters.
        clock: what the time limit is measured by, in seconds. `time.process_time` counts the work
            of all threads rather than the time that passes.

    Returns:
        A plan that `octotune.check` accepts, with `predicted` (the simulated step, bubbles and
        peaks, a lower bound over all plans, and the baselines) and `search` (seed, limits,
        evaluations, what each phase gained, the step under jitter, what limits the plan).

    Raises:
        MalformedError: if an argument is not as above.
        InfeasibleError: if no plan fits the memory; it names the place and the shortfall.
    """
    if num_microbatches < 1:
        raise MalformedError(f"num_microbatches is {num_microbatches}; it is at least 1")
    wish = wish_of(offload)
    workload, target = (
        workload_of(model, example_input, loss_fn, example_target),
        cluster_of(cluster),
    )
    Budget(time_limit_s, max_evaluations)  # refuses bad limits before anything is compiled
    for device in range(len(target.devices)):  # refuses times and sizes that add up to too much
        whole = Stage(layers=(0, len(workload.layers)), device=device)
        build_costs(workload, target, [whole], num_microbatches)
    reason = why_not(workload, target)
    binds = memory_may_bind(workload, target, num_microbatches)
    offloads = wish != "never" and reason is None and (binds or wish == "always")
    warm_up()
    if offloads:
        warm_up_paging()
    budget = Budget(time_limit_s, max_evaluations, clock)

    def make(on: Cluster, within: Budget) -> Search:
        return Search(
            workload, on, num_microbatches, seed, within, workers, progress, settings, stages
        )

    with stopping(signal.SIGINT) as stop:
        if offloads:
            search = search_with_offload(
                make, _run, budget, target, wish, stop, keep_stages=stages is not None
            )
        else:
            search = make(target, budget)
            with search:
                _run(search)
                stop.over()
        stop.over()
        plan = finished_plan(search)
    if wish == "always" and plan.offload is None:
        said = reason or "no plan with offload was found"
        plan = replace(plan, search={**plan.search, "offload": f"none: {said}"})
    return plan


def _run(search: Search) -> None:
    """Search until the budget is spent or the bound is met."""
    try_seeds(search)
    try_sketches(search, NUM_SKETCHES, SKETCHES_PART)
    try_published(search)
    close_gaps(search)
    with Rounds(search) as rounds:
        while search.goes_on() and rounds.can_try():
            if rounds.walks_next():
                rounds.walk(search.diagnose())
            else:
                rounds.polish()
