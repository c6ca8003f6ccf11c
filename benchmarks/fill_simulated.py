"""What fill work the simulator says a case's ranks do, on the times that its layers draw."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from benchmarks.fill_cases import (
    ENTER_NS,
    PROFILE_STEPS,
    Case,
)
from executor.fill.instructions import bubble_instructions
from executor.fill.run import KEPT_OF_MARGIN
from octotune.contract import Plan, build_costs
from octotune.fill.plan import FillPlan
from simulator.actions import microbatch_of, stage_of
from simulator.fills import HandoverRule, filled_passes, waits_before
from simulator.floating import nominal_durations, simulate_floating


def factors_of(rounds: int, plan: Plan, jitter: float) -> np.ndarray[Any, Any]:
    """Return by what layers' times are scaled [turn, stage, microbatch], profiling included."""
    shape = (PROFILE_STEPS + rounds, len(plan.stages), plan.num_microbatches)
    return np.random.default_rng(0).uniform(1 - jitter, 1 + jitter, shape)


def simulated(case: Case, fill: FillPlan, rounds: int) -> tuple[float, int]:
    """Return samples of a filled step, and a step, of a run whose layers vary as the case's do."""
    plan = fill.plan
    schedule = plan.schedule()
    costs = build_costs(plan.workload, plan.cluster, plan.stages, plan.num_microbatches)
    nominal = nominal_durations(schedule, costs)
    stages, microbatches = stage_of(schedule.codes), microbatch_of(schedule.codes)
    ran = [
        simulate_floating(
            schedule,
            costs,
            durations_ns=np.rint(nominal * factors[stages, microbatches]).astype(np.int64),
            floating=False,
        )
        for factors in factors_of(rounds, plan, case.jitter)
    ]
    # as measured: each of the later steps twice, the second time filled
    order = [*range(PROFILE_STEPS), *np.repeat(np.arange(PROFILE_STEPS, len(ran)), 2)]
    filled = [number >= PROFILE_STEPS and number % 2 == 0 for number in range(len(order))]
    starts = np.stack([ran[at].start_ns for at in order])
    ends = np.stack([ran[at].end_ns for at in order])
    rule = HandoverRule(
        switch_ns=fill.margins.switch_ns,
        kept=KEPT_OF_MARGIN * fill.margins.margin,
        enter_ns=ENTER_NS,
        ahead=case.ahead,
        profile=PROFILE_STEPS,
    )
    samples = 0.0
    for packing in fill.packings:
        device = packing.device
        instructions = bubble_instructions(fill, device, plan.actions[device])
        # what follows the row's actions is handed over at the plan's length
        at = [i.position for i in instructions if i.position >= 0]
        waits = waits_before(schedule, costs, starts, ends, device, at)
        rest = [i.length_ns for i in instructions if i.position < 0]
        configuration = fill.configuration(packing)
        samples += configuration.batch_size * filled_passes(
            waits.beside(rest),
            filled,
            packing.steps,
            [step.time_ns for step in configuration.micro_steps],
            rule,
        )
    return samples, int(statistics.median(each.step_ns for each in ran[PROFILE_STEPS:]))
