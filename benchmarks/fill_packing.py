"""How much does an optimal packing of fill jobs gain over the greedy one, and at what price?

Algorithm 1 of PipeFill walks through the bubbles and puts each micro-step of a pass into the first
one that it fits. CP-SAT, started from it, may keep several passes of an inference job open. Both
pack the same configuration into the same bubbles, of one device each, in three pipelines: bubbles
of 20 ms, of a second, and those that a tuned plan leaves. The bound is bubble time over the time
of a pass, rounded down for each cycle.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from benchmarks import record
from octotune.check import check
from octotune.contract import Cluster, Layer, Plan, Workload
from octotune.fill.bubbles import find_bubbles, resting_bytes
from octotune.fill.jobs import Configuration, FillJob, MicroStep
from octotune.fill.models import HARDWARE, configurations_of, models
from octotune.fill.packing import Margins, Room, best_packing, greedy_packing, optimal_packing
from octotune.schedules import find_family, plan_from

MS = 10**6


def pipeline(schedule: str, devices: int, microbatches: int, unit_ns: int, seconds: float) -> Plan:
    """Return a plan of equal layers, F of one unit and B of two; `tuned` is searched."""
    layers = tuple(
        Layer(
            name=f"layers.{i}",
            forward_ns=unit_ns // 2,
            input_grad_ns=unit_ns // 2,
            weight_grad_ns=unit_ns // 2,
            param_bytes=0,
            state_bytes=6 * 2**30,
            saved_bytes=2**24,
            output_bytes=2**20,
        )
        for i in range(2 * devices)
    )
    workload = Workload(name="even", layers=layers)
    cluster = Cluster.equal(devices, memory_bytes=16 * 2**30, bandwidth=10**11)
    if schedule != "tuned":
        return plan_from(find_family(schedule), workload, cluster, microbatches)
    from octotune.tune import tune

    return tune(workload, cluster, num_microbatches=microbatches, time_limit_s=seconds)


def rooms_of(plan: Plan, margins: Margins) -> list[Room]:
    """Return the bins of each device."""
    timeline = check(plan).timeline
    return [
        Room.of(bubbles, rests, margins)
        for bubbles, rests in zip(
            find_bubbles(timeline, threshold_ns=margins.threshold_ns),
            resting_bytes(timeline),
            strict=True,
        )
    ]


def uneven_table(
    worlds: dict[str, Plan], margins: Margins, seconds: float, seed: int
) -> record.Table:
    """Pack jobs of uneven micro-steps, each a share of the median bubble, of 1 to 60 %."""
    rng = np.random.default_rng(seed)
    rows = []
    for world, plan in worlds.items():
        rooms = rooms_of(plan, margins)
        median = statistics.median(t for room in rooms for t in room.usable_ns)
        for num in (3, 5, 8):
            gains, bounds, better = [], [], 0
            for _ in range(4):
                times = np.maximum(1, rng.uniform(0.01, 0.6, num) * median).astype(int).tolist()
                configuration = Configuration(
                    batch_size=1, micro_steps=tuple(MicroStep(time_ns=time) for time in times)
                )
                greedy_sum = optimal_sum = bound_sum = 0.0
                for room in rooms:
                    greedy = greedy_packing(configuration, room, max_cycle=2)
                    if greedy is None:
                        continue
                    optimal = optimal_packing(configuration, room, greedy, time_limit_s=seconds)
                    cycle = len(greedy.steps)
                    greedy_sum += greedy.samples_per_step
                    optimal_sum += optimal.samples_per_step
                    bound_sum += cycle * sum(room.usable_ns) // configuration.pass_ns / cycle
                gains.append(100 * (optimal_sum / greedy_sum - 1))
                bounds.append(100 * (bound_sum / greedy_sum - 1))
                better += optimal_sum > greedy_sum
            rows.append(
                (
                    world,
                    num,
                    len(gains),
                    better,
                    statistics.median(gains),
                    min(gains),
                    max(gains),
                    statistics.median(bounds),
                )
            )
    return record.Table(
        title="Uneven micro-steps",
        columns=(
            "pipeline",
            "micro-steps",
            "jobs",
            "of them better",
            "gain %, median",
            "least",
            "most",
            "bound's gain %, median",
        ),
        rows=tuple(rows),
    )


def main(arguments: list[str]) -> None:
    """Pack and record."""
    parser = argparse.ArgumentParser(prog="fill_packing", description=__doc__)
    parser.add_argument("--time-limit", type=float, default=3, help="seconds of each CP-SAT run")
    parser.add_argument("--tune-seconds", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the uneven jobs")
    options = parser.parse_args(arguments)
    margins = Margins(threshold_ns=5 * MS, switch_ns=MS, margin=0.1)
    worlds = {
        "1F1B, 4 devices, m 8, F 20 ms": pipeline("1f1b", 4, 8, 20 * MS, 0),
        "1F1B, 8 devices, m 8, F 60 ms": pipeline("1f1b", 8, 8, 60 * MS, 0),
        "tuned, 8 devices, m 16, F 60 ms": pipeline("tuned", 8, 16, 60 * MS, options.tune_seconds),
    }
    rows = []
    for world, plan in worlds.items():
        rooms = rooms_of(plan, margins)
        for name, model in models().items():
            configurations = configurations_of(model, HARDWARE["v100"], "inference")
            job = FillJob(name=name, kind="inference", samples=1, configurations=configurations)
            greedy_rate = optimal_rate = bound_rate = 0.0
            greedy_s, optimal_s = [], []
            for room in rooms:
                chosen = best_packing(job, room)
                if chosen is None:
                    continue
                configuration = configurations[chosen.configuration]
                begin = time.perf_counter()
                greedy = greedy_packing(configuration, room, chosen.configuration)
                greedy_s.append(time.perf_counter() - begin)
                assert greedy is not None
                begin = time.perf_counter()
                optimal = optimal_packing(
                    configuration, room, greedy, time_limit_s=options.time_limit
                )
                optimal_s.append(time.perf_counter() - begin)
                cycle = len(greedy.steps)
                most = cycle * sum(room.usable_ns) // configuration.pass_ns
                greedy_rate += greedy.samples_per_step
                optimal_rate += optimal.samples_per_step
                bound_rate += most * configuration.batch_size / cycle
            if not greedy_s:
                rows.append((world, name, 0, *(None,) * 6))
                continue
            rows.append(
                (
                    world,
                    name,
                    len(greedy_s),
                    greedy_rate,
                    optimal_rate,
                    100 * (optimal_rate / greedy_rate - 1),
                    100 * (bound_rate / greedy_rate - 1),
                    1000 * statistics.median(greedy_s),
                    1000 * statistics.median(optimal_s),
                )
            )
    uneven = uneven_table(worlds, margins, options.time_limit, options.seed)
    gains = [row[5] for row in rows if row[5] is not None]
    largest = max(row[6] for row in uneven.rows)
    bounds = [row[6] for row in rows if row[6] is not None]
    path, _ = record.write(
        record.Record(
            benchmark="fill_packing",
            workload="inference-v100",
            question="How much does an optimal packing of fill jobs gain over the greedy one?",
            command=record.command("fill_packing", arguments),
            seed=options.seed,
            notes=(
                "inference of the ready models on a V100; samples a main step summed over devices",
                f"bubbles of at least 5 ms, 1 ms for handing over, a margin of 0.1; CP-SAT with "
                f"one worker, {options.time_limit:.0f} s a run, started from greedy, the same "
                "cycle of main steps",
            ),
            tables=(
                record.Table(
                    title="Greedy and optimal",
                    columns=(
                        "pipeline",
                        "model",
                        "devices",
                        "greedy samples/step",
                        "optimal samples/step",
                        "gain %",
                        "bound's gain %",
                        "greedy ms",
                        "CP-SAT ms",
                    ),
                    rows=tuple(rows),
                ),
                uneven,
            ),
            shows=(
                f"For the ready models optimal packing gains {min(gains):.1f} to "
                f"{max(gains):.1f} % over greedy with its choice of configuration, and no packing "
                f"could gain more than {max(bounds):.1f} %: their layers are alike, and what is "
                "lost is whole passes at the end of a cycle.",
                f"Uneven micro-steps that are coarse against the bubbles gain up to {largest:.0f} "
                "%: a short micro-step of another pass fits where the next one does not.",
            ),
            does_not_show=(
                "What open passes cost a real job beside the bytes they carry.",
                "Training: its passes follow each other, and greedy is optimal for them.",
            ),
        )
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
