"""Does a measured step take what the simulator says?

Four gloo ranks on this machine run sleeping layers, so that ranks do not fight for the cores and
bubbles are real. Each plan's measured step stands beside two simulations: of the nominal
durations, and of the measured ones (a sleep always lasts a little longer than asked). What is left
beside the second is what the executor adds: host work between actions, and messages.
"""

from __future__ import annotations

import argparse

import torch.distributed as dist

from benchmarks import ranks, record
from benchmarks.models import sleeping_batch, sleeping_layers, sleeping_loss
from benchmarks.sleeping_plans import RANKS, Times, plan_of, uneven, workload
from octotune import tune
from octotune.check import check
from octotune.contract import Cluster, Plan, Stage
from octotune.partition import balanced_cuts
from octotune.placement import v_shape
from simulator.floating import simulate_floating
from simulator.timeline import Timeline

NUM_MICROBATCHES = 8
UNIT_MS = 30


def tuned_v(times_ms: Times) -> Plan:
    """Return the best partition on a V (each rank an early and a late stage), its order tuned."""
    layers, cluster, homes = workload(times_ms), Cluster.equal(RANKS), v_shape(RANKS)
    cuts = balanced_cuts(layers, cluster, homes, num_microbatches=NUM_MICROBATCHES).cuts
    stages = [
        Stage(layers=(begin, end), device=home)
        for begin, end, home in zip(cuts, cuts[1:], homes, strict=False)
    ]
    return tune(layers, cluster, num_microbatches=NUM_MICROBATCHES, time_limit_s=5, stages=stages)


def measured(rank: int, cases: list[tuple[Plan, Times]], rounds: int) -> list[list[Timeline]]:
    """Return each plan's timelines, in the plan's own order; the plans take turns."""
    from executor import Pipeline

    pipes = [
        Pipeline(plan, sleeping_layers(times), sleeping_loss, timeout_s=60, float_limit="off")
        for plan, times in cases
    ]
    batch = sleeping_batch(NUM_MICROBATCHES, 1024)
    found: list[list[Timeline]] = [[] for _ in pipes]
    for turn in range(rounds + 1):
        for pipe, timelines in zip(pipes, found, strict=True):
            dist.barrier()
            pipe.step(*batch)
            timeline = pipe.timeline()
            if turn:
                timelines.append(timeline)
    return found


def main(arguments: list[str]) -> None:
    """Measure the plans in turns and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    equal: Times = [(UNIT_MS,) * 3] * 8
    unequal = uneven(UNIT_MS)
    plans = {
        "1F1B, equal layers": (plan_of("1f1b", NUM_MICROBATCHES, equal), equal),
        "ZB-V, equal layers": (plan_of("zb-v", NUM_MICROBATCHES, equal), equal),
        "1F1B, unequal layers": (plan_of("1f1b", NUM_MICROBATCHES, unequal), unequal),
        "tuned V, unequal layers": (tuned_v(unequal), unequal),
        "tuned freely, unequal layers": (plan_of("tuned", NUM_MICROBATCHES, unequal), unequal),
    }
    found = ranks.run(RANKS, measured, list(plans.values()), options.rounds)
    rows = []
    for (name, (plan, _)), timelines in zip(plans.items(), found, strict=True):
        timelines.sort(key=lambda timeline: timeline.step_ns)
        timeline = timelines[len(timelines) // 2]
        nominal = check(plan).step_ns
        fed = simulate_floating(
            timeline.schedule,
            timeline.costs,
            durations_ns=timeline.end_ns - timeline.start_ns,
            floating=False,
        ).step_ns
        rows.append(
            (
                name,
                " ".join(str(stage.device) for stage in plan.stages),
                round(nominal / 1e6, 1),
                round(fed / 1e6, 1),
                round(timeline.step_ns / 1e6, 1),
                round(100 * (timeline.step_ns / nominal - 1), 2),
                round(100 * (timeline.step_ns / fed - 1), 2),
            )
        )
    path, _ = record.write(
        record.Record(
            benchmark="executor_prediction",
            workload="sleeping layers",
            question="Does a measured step take what the simulator says?",
            command=record.command("executor_prediction", arguments),
            seed=0,
            tables=(
                record.Table(
                    title=f"Measured against simulated, {UNIT_MS} ms units, {NUM_MICROBATCHES} "
                    f"microbatches, median of {options.rounds} steps in turns",
                    columns=(
                        *("plan", "stages' devices", "nominal ms"),
                        *("fed with measured durations ms", "measured ms"),
                        *("error to nominal %", "error to fed %"),
                    ),
                    rows=tuple(rows),
                ),
            ),
            shows=(
                f"The measured step is within {max(abs(row[-1]) for row in rows):.2f} % of the "
                "simulation fed with the measured durations of the actions, and within "
                f"{max(abs(row[-2]) for row in rows):.2f} % of the nominal durations.",
            ),
            does_not_show=("Ranks that compute: these sleep, so that cores are free.",),
            notes=(
                f"{RANKS} gloo ranks on loopback, one thread each, 1 KiB messages; F = I = W; "
                "weights in the plan's order.",
            ),
        )
    )
    print(path.read_text())
