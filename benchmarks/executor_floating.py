"""What are floating W's worth when layers' times vary, simulated and measured?

Stages' times vary by 30 % from microbatch to microbatch, evenly and by seed. 200 seeds are
simulated; some are run on four gloo ranks with sleeping layers at 30 ms units, the W's in the
plan's order and floating in turns.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from benchmarks import ranks, record
from benchmarks.models import SleepingLayer, sleeping_loss
from benchmarks.sleeping_plans import RANKS, clocked, plan_of, workload
from octotune.contract import Cluster, Plan, Stage, build_costs
from octotune.schedules.zb_v import zb_v
from simulator.floating import jittered, simulate_floating
from simulator.floating_bound import least_step_ns
from simulator.memory import order_peak_bytes

UNIT_MS = 30.0
SPREAD = 0.3


def adjacent(num_microbatches: int) -> Plan:
    """Return 1F1B on four stages whose W's come right after their I's."""
    rows = []
    for device in range(RANKS):
        warmup = min(num_microbatches, RANKS - device - 1)
        words = [f"{device}F{m}" for m in range(warmup)]
        for m in range(num_microbatches):
            if warmup + m < num_microbatches:
                words.append(f"{device}F{warmup + m}")
            words += [f"{device}I{m}", f"{device}W{m}"]
        rows.append(tuple(words))
    return Plan(
        workload=workload([(UNIT_MS,) * 3] * RANKS),
        cluster=Cluster.equal(RANKS),
        num_microbatches=num_microbatches,
        stages=tuple(Stage(layers=(d, d + 1), device=d) for d in range(RANKS)),
        actions=tuple(rows),
    )


def plans(num_microbatches: int) -> dict[str, Plan]:
    """Return the orders compared: 1F1B, ZB-V as our generator fits it and as it was published."""
    times = [(UNIT_MS,) * 3] * (2 * RANKS)
    fitted = plan_of("zb-v", num_microbatches, times)
    words = zb_v(RANKS, num_microbatches).words()
    return {
        "1F1B, W right after I": adjacent(num_microbatches),
        "ZB-V": fitted,
        "ZB-V as published": msgspec.structs.replace(fitted, actions=words, predicted=None),
    }


def factors(plan: Plan, seed: int) -> np.ndarray:
    """Return the factor of each stage and microbatch, as `jittered` draws them."""
    shape = (len(plan.stages), plan.num_microbatches)
    return np.random.default_rng(seed).uniform(1 - SPREAD, 1 + SPREAD, shape)


def costs_of(plan: Plan) -> Any:
    """Return a plan's costs."""
    return build_costs(plan.workload, plan.cluster, plan.stages, plan.num_microbatches)


def simulated(plan: Plan, seed: int | None, limit: Any = None) -> float:
    """Return the change of the step by floating; None: without jitter."""
    schedule, costs = plan.schedule(), costs_of(plan)
    durations = None
    if seed is not None:
        durations = jittered(
            schedule, costs, kind="stage and microbatch", spread=SPREAD, seed=seed
        )
    static = simulate_floating(schedule, costs, durations_ns=durations, floating=False)
    floats = simulate_floating(schedule, costs, durations_ns=durations, limit_bytes=limit)
    return floats.step_ns / static.step_ns - 1


def bound(plan: Plan, seed: int) -> float:
    """Return the change that no rule could beat without a memory limit."""
    schedule, costs = plan.schedule(), costs_of(plan)
    durations = jittered(schedule, costs, kind="stage and microbatch", spread=SPREAD, seed=seed)
    static = simulate_floating(schedule, costs, durations_ns=durations, floating=False)
    return least_step_ns(schedule, costs, durations_ns=durations) / static.step_ns - 1


def measured(rank: int, cases: list[tuple[Plan, int]], rounds: int) -> list[float]:
    """Return the change of the step by floating of each (plan, seed)."""
    from executor import Pipeline

    answer = []
    for plan, seed in cases:
        table = factors(plan, seed)
        stage_of = [index for index, stage in enumerate(plan.stages) for _ in range(*stage.layers)]

        def pipe_of(limit: Any, plan: Plan = plan, table: Any = table, homes: Any = stage_of):
            layers = [
                SleepingLayer((UNIT_MS,) * 3, factors=table[stage].tolist()) for stage in homes
            ]
            return Pipeline(plan, layers, sleeping_loss, timeout_s=60, float_limit=limit)

        pipes = {"off": pipe_of("off"), "memory": pipe_of("memory")}
        numbers = torch.arange(plan.num_microbatches, dtype=torch.float32)
        inputs = numbers.view(-1, 1).repeat(1, 256)  # 1 KiB, the microbatch's number in it
        targets = torch.zeros(plan.num_microbatches, 1)
        steps: dict[str, list[float]] = {name: [] for name in pipes}
        for turn in range(rounds + 1):
            for name, pipe in pipes.items():
                length, _ = clocked(lambda p=pipe, i=inputs, t=targets: p.step(i, t))
                if turn:
                    steps[name].append(length)
        pairs = zip(steps["memory"], steps["off"], strict=True)
        answer.append(statistics.median(a / b for a, b in pairs) - 1)
        dist.barrier()
    return answer


def measured_table(num_seeds: int, rounds: int) -> record.Table:
    """Run seeds on real ranks, and lay the simulation beside."""
    cases = [
        (name, plan, seed) for name, plan in plans(8).items() for seed in range(1, num_seeds + 1)
    ]
    real = ranks.run(RANKS, measured, [(plan, seed) for _, plan, seed in cases], rounds)
    return record.Table(
        title=f"Measured at {UNIT_MS:g} ms units, 8 microbatches, median of {rounds} rounds",
        columns=("order", "seed", "measured %", "simulated %"),
        rows=tuple(
            (name, seed, round(100 * change, 2), round(100 * simulated(plan, seed), 2))
            for (name, plan, seed), change in zip(cases, real, strict=True)
        ),
    )


def main(arguments: list[str]) -> None:
    """Simulate, measure, write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--measured", type=int, default=3, help="seeds to measure; 0: none")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    rows = []
    for count in (8, 16):
        for name, plan in plans(count).items():
            peak = order_peak_bytes(plan.schedule(), costs_of(plan)).max()
            least = 100 * np.array([bound(plan, seed) for seed in range(options.seeds)])
            for limit, most in (("unlimited", None), ("the plan's peak", np.full(RANKS, peak))):
                found = 100 * np.array(
                    [simulated(plan, seed, most) for seed in range(options.seeds)]
                )
                rows.append(
                    (
                        *(name, count, limit, round(float(found.mean()), 2)),
                        *(round(float(found.min()), 2), round(float(found.max()), 2)),
                        round(100 * float((found > 0).mean()), 1),
                        round(float(least.mean()), 2),
                    )
                )
    tables = [
        record.Table(
            title=f"Simulated change of the step, {options.seeds} seeds, F = I = W",
            columns=(
                *("order", "microbatches", "limit", "mean %", "best %", "worst %"),
                *("seeds longer %", "no rule below, mean %"),
            ),
            rows=tuple(rows),
        )
    ]
    if options.measured:
        tables.append(measured_table(options.measured, options.rounds))
    path, _ = record.write(
        record.Record(
            benchmark="executor_floating",
            workload="sleeping layers" if options.measured else "sleeping layers, simulated",
            question="What are floating W's worth when times vary by 30 %?",
            command=record.command("executor_floating", arguments),
            seed=0,
            tables=tuple(tables),
            shows=(
                "A negative change is a shorter step. The limit is per device, in bytes.",
                "No rule for W's, not even one that knew all durations, could have a step shorter "
                "than the last column's by its mean, whatever memory allows; F's and I's order "
                "holds the rest.",
            ),
            does_not_show=("Times that vary by anything but stage and microbatch; GPUs.",),
            notes=(f"{RANKS} gloo ranks, 1 KiB messages, one thread each.",),
        )
    )
    print(path.read_text())
