"""The fleet benchmark's policies: the same jobs for each, at a low and a high load."""

from __future__ import annotations

import time

import numpy as np

from benchmarks import record
from benchmarks.fleet_job import (
    DAY_NS,
    GPUS_A_REPLICA,
    HOUR_NS,
    MARGIN,
    MEDIAN_NS,
    MIXED,
    SLOWER,
    SWITCH_NS,
    TENSOR_PARALLEL,
    THRESHOLD_NS,
    Main,
)
from octotune.fill.fleet import FleetConfig, Handover, play
from octotune.fill.models import find_hardware
from octotune.fill.policies import BUILT_IN
from octotune.fill.traces import Synthetic, draw
from simulator.fleet import FleetResult

# Without the training of large models, whose longest job alone would make the makespan.
POLICY_MIX = tuple(
    part
    for part in MIXED
    if part.kind == "inference" or part.model in ("efficientnet", "bert-base")
)
POLICY_SIGMA = 0.5


def policy_jobs(load: float, num_jobs: int, num_gpus: int, seed: int) -> Synthetic:
    """Say which jobs keep the fleet busy to a load; half of them have a deadline.

    A GPU's bubbles do about a twelfth of what a GPU of its own does at 1K GPUs.
    """
    work_hours = MEDIAN_NS / HOUR_NS * np.exp(POLICY_SIGMA**2 / 2) / 0.08
    return Synthetic(
        num_jobs=num_jobs,
        arrivals_per_hour=load * num_gpus / work_hours,
        median_ns=MEDIAN_NS,
        sigma=POLICY_SIGMA,
        deadline_share=0.5,
        slack=(14.0, 60.0),
    )


def policy_tables(
    main: Main, scale: float, num_jobs: int = 10_000, num_gpus: int = 1024, seed: int = 0
) -> tuple[record.Table, dict[str, dict[str, FleetResult]]]:
    """Give the same jobs to each policy, at a low and a high load."""
    timeline = main.timeline(num_gpus, "gpipe")
    rows, named = [], {}
    for label, load in (("low load", 1.15), ("high load", 2.5)):
        what = policy_jobs(load, num_jobs, num_gpus, seed)
        jobs = draw(what, POLICY_MIX, find_hardware("v100"), time_scale=scale, seed=seed)
        named[label] = {}
        for name in ("fifo", "sjf", "makespan", "deadline"):
            config = FleetConfig(
                plan="made here",
                replicas=num_gpus // GPUS_A_REPLICA,
                gpus_per_device=TENSOR_PARALLEL,
                hardware="v100",
                mix=POLICY_MIX,
                synthetic=what,
                handover=Handover(
                    threshold_ns=THRESHOLD_NS, switch_ns=SWITCH_NS, margin=MARGIN, slower=SLOWER
                ),
                seed=seed,
            )
            begin = time.perf_counter()
            result = play(timeline, jobs, config, BUILT_IN[name], time_scale=scale).result
            seconds = time.perf_counter() - begin
            named[label][name] = result
            rows.append(
                (
                    label,
                    name,
                    result.mean_completion_ns / HOUR_NS,
                    result.makespan_ns / DAY_NS,
                    result.deadlines_met,
                    result.num_deadlines,
                    100 * result.occupied_share,
                    seconds,
                )
            )
    table = record.Table(
        title=f"Policies, {num_jobs} jobs over {num_gpus} devices",
        columns=(
            "load",
            "policy",
            "mean completion h",
            "makespan days",
            "deadlines met",
            "of",
            "devices taken %",
            "packing and playing s",
        ),
        rows=tuple(rows),
    )
    return table, named
