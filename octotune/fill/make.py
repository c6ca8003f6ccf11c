"""Making a fill plan: pack every kind of job onto every device, and let a policy hand them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from octotune.contract.plan import Plan
from octotune.contract.quantities import short
from octotune.fill.bubbles import find_bubbles, resting_bytes
from octotune.fill.jobs import Configuration, FillJob
from octotune.fill.packing import Margins, Room
from octotune.fill.plan import (
    FillPlan,
    MarginsEntry,
    PackingEntry,
    RunEntry,
    bubble_entries,
    predict,
    state_entries,
)
from octotune.fill.rates import rates_of, refuse_endless
from octotune.fill.state import state_moves

if TYPE_CHECKING:
    from simulator.fleet import Policy


def make_fill_plan(
    plan: Plan,
    jobs: Sequence[FillJob],
    policy: Policy,
    *,
    margins: Margins | None = None,
    state_share: float = 0.0,
    optimal: bool = False,
    time_limit_s: float = 5.0,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> FillPlan:
    """Return what fills a plan's bubbles with jobs, by a policy.

    Args:
        plan: of the main job, checked first.
        jobs: with their configurations (`octotune.fill.jobs_file.read_jobs`).
        policy: who gets a free device.
        margins: what of a bubble is handed over.
        state_share: of the main job's `state_bytes` that goes to the host between its updates,
            where the copy lane has room (`octotune.fill.state`); 0: none.
        optimal: pack by CP-SAT where that can help.
        time_limit_s: of each of the solver's runs.
        seed: of the solver.
        progress: told the share of the packing that is done.

    Raises:
        InfeasibleError: if a job fits in no bubble; it names the nearest miss.
        ScheduleError, OutOfMemoryError, BrokenPlanError: if the plan breaks a rule.
    """
    from octotune.check import check
    from simulator.fleet import NEVER, Trace, simulate_fleet

    margins = Margins() if margins is None else margins
    timeline = check(plan).timeline
    moves = state_moves(plan, timeline, state_share) if state_share else ()
    bubbles = find_bubbles(timeline, threshold_ns=margins.threshold_ns, moves=moves)
    resting = resting_bytes(timeline)
    rooms = [Room.of(row, rests, margins) for row, rests in zip(bubbles, resting, strict=True)]
    rates = rates_of(
        jobs,
        rooms,
        timeline.step_ns,
        optimal=optimal,
        time_limit_s=time_limit_s,
        seed=seed,
        progress=progress,
    )
    deadlines = [NEVER if job.deadline_ns is None else job.deadline_ns for job in jobs]
    trace = Trace(
        arrival_ns=np.array([job.arrival_ns for job in jobs], dtype=np.int64),
        kind=np.array(rates.kind, dtype=np.int64),
        samples=np.array([job.samples for job in jobs], dtype=np.int64),
        deadline_ns=np.array(deadlines, dtype=np.int64),
        cancel_ns=np.full(len(jobs), NEVER, dtype=np.int64),
    )
    refuse_endless(rates.fleet, trace, lambda job: f"job {short(jobs[job].name)}")
    result = simulate_fleet(rates.fleet, trace, policy)

    kept: dict[tuple[int, int], int] = {}  # (job, configuration) -> its number among those in use
    in_use: list[list[Configuration]] = [[] for _ in jobs]
    packings: list[PackingEntry] = []
    runs: list[RunEntry] = []
    order = np.lexsort((result.run_device, result.run_begin)).tolist()
    for run in order:
        job, device = int(result.run_job[run]), int(result.run_device[run])
        packing = rates.packings[rates.kind[job]][device]
        assert packing is not None  # the fleet gives no job a device that it does not fit
        key = (job, packing.configuration)
        if key not in kept:
            kept[key] = len(in_use[job])
            in_use[job].append(jobs[job].configurations[packing.configuration])
        runs.append(
            RunEntry(
                packing=len(packings),
                begin=int(result.run_begin[run]),
                end=int(result.run_end[run]),
                samples=int(result.run_samples[run]),
            )
        )
        packings.append(
            PackingEntry(
                job=job,
                device=device,
                configuration=kept[key],
                samples=packing.samples,
                steps=packing.steps,
            )
        )
    written = tuple(
        msgspec.structs.replace(job, configurations=tuple(used))
        for job, used in zip(jobs, in_use, strict=True)
    )
    entries = MarginsEntry(
        threshold_ns=margins.threshold_ns, switch_ns=margins.switch_ns, margin=margins.margin
    )
    return FillPlan(
        plan=plan,
        jobs=written,
        policy=policy.name,
        margins=entries,
        state_share=state_share,
        state=state_entries(moves),
        bubbles=bubble_entries(bubbles, margins),
        resting_bytes=resting,
        packings=tuple(packings),
        runs=tuple(runs),
        predicted=predict(written, packings, runs, timeline),
    )
