"""The tuner: partition, placement and schedule searched together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from octotune.contract import Plan, Predicted
from octotune.errors import MalformedError
from octotune.tune.balance import repair_memory
from octotune.tune.baselines import Baseline, baselines
from octotune.tune.feasible import packed_genome
from octotune.tune.genome import capacity_for, empty_run, empty_shape
from octotune.tune.inputs import cluster_of, workload_of
from octotune.tune.plans import Candidate, candidate_plan, genome_stages, judge, run_schedule
from octotune.tune.problem import FAR, make_world
from octotune.tune.scheduler import list_schedule, shape_stages
from octotune.tune.seeds import list_rules, pattern_rules, placement_seeds, strict_rules

Progress = Callable[[str, int, float], None]


def tune(
    model: Any,
    cluster: Any,
    *,
    num_microbatches: int,
    seed: int = 0,
    time_limit_s: float = 20.0,
    max_evaluations: int | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    example_input: Any = None,
    loss_fn: Any = None,
) -> Plan:
    """Return the best plan found."""
    if num_microbatches < 1:
        raise MalformedError(f"num_microbatches is {num_microbatches}; it is at least 1")
    deadline = time.monotonic() + time_limit_s
    workload, target = workload_of(model, example_input, loss_fn), cluster_of(cluster)
    world = make_world(workload, target, num_microbatches)
    found = list(baselines(workload, target, num_microbatches))
    best: Candidate | None = min(
        (one.candidate for one in found if one.candidate is not None),
        key=lambda one: (one.step_ns, one.num_stages),
        default=None,
    )
    capacity = capacity_for(world)
    shape, run = empty_shape(world, capacity), empty_run(world, capacity)
    rng = np.array([seed], dtype=np.uint64)
    bound = np.zeros(world.num_devices, np.int64)
    evaluations = 0
    for genome in placement_seeds(world, capacity, rng):
        if not repair_memory(world, genome, shape, bound):
            continue
        for family, rules in (
            ("list", list_rules),
            ("phase", strict_rules),
            ("pattern", pattern_rules),
        ):
            for one in rules(world, genome):
                if not shape_stages(world, one, shape):
                    continue
                limit = best.step_ns - 1 if best is not None else FAR
                step = list_schedule(world, one, shape, run, limit)
                evaluations += 1
                if step >= 0:
                    candidate = judge(
                        workload,
                        target,
                        num_microbatches,
                        genome_stages(one),
                        run_schedule(one, run),
                        family,
                    )
                    if candidate is not None and (
                        best is None or candidate.step_ns < best.step_ns
                    ):
                        best = candidate
                if time.monotonic() > deadline and best is not None:
                    break
        if progress is not None and best is not None:
            progress("seeds", best.step_ns, time_limit_s - (deadline - time.monotonic()))
    if best is None:
        genome = packed_genome(workload, target, world)
        shape, run = (
            empty_shape(world, len(genome.device)),
            empty_run(world, len(genome.device)),
        )
        assert shape_stages(world, genome, shape)
        list_schedule(world, genome, shape, run, FAR)
        best = judge(
            workload,
            target,
            num_microbatches,
            genome_stages(genome),
            run_schedule(genome, run),
            "packed",
        )
        assert best is not None
    return _with_predictions(
        candidate_plan(best, workload, target, num_microbatches),
        best,
        found,
        {"seed": seed, "time_limit_s": time_limit_s, "evaluations": evaluations},
    )


def _with_predictions(
    plan: Plan, best: Candidate, found: list[Baseline], search: dict[str, Any]
) -> Plan:
    from msgspec.structs import replace

    return replace(
        plan,
        predicted=Predicted(
            step_ns=best.step_ns,
            bubble_fraction=best.bubble_fraction,
            peak_bytes=best.peak_bytes,
            baselines={one.name: one.entry for one in found},
        ),
        search=search,
    )
