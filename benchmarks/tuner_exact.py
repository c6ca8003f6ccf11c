"""How often is the tuner's order of a small instance the best one, as CP-SAT proves it?

Random instances of up to 3 devices and 4 microbatches with a fixed partition and placement, half
of them with too little memory to run everything at once. The search is ended by processor time,
so that a busy machine gives the figures of an idle one.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass

import numpy as np

from benchmarks import record
from benchmarks.random_problems import random_cluster, random_stages, random_workload
from octotune.contract import Cluster, Device, Stage, Workload, build_costs
from octotune.errors import InfeasibleError, OutOfTimeError
from octotune.exact import exact_order
from octotune.tune import tune
from octotune.tune.warm import warm_up
from simulator.costs import Costs

SEARCH_S = 10.0  # 5 s of both cores
PROOF_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """Stages on a cluster, and how many microbatches."""

    workload: Workload
    cluster: Cluster
    stages: tuple[Stage, ...]
    num_microbatches: int
    tight: bool

    @property
    def costs(self) -> Costs:
        """The costs of the stages."""
        return build_costs(self.workload, self.cluster, self.stages, self.num_microbatches)


def instance(number: int) -> Instance:
    """Return the instance of a number."""
    rng = random.Random(number)
    num_devices, num_microbatches = rng.randint(2, 3), rng.randint(1, 4)
    workload = random_workload(rng, rng.randint(num_devices, 8))
    cluster = random_cluster(rng, num_devices)
    stages = random_stages(rng, workload, num_devices)
    tight = rng.random() < 0.5
    if tight:
        costs = build_costs(workload, cluster, stages, num_microbatches)
        one = np.zeros(num_devices, np.int64)
        np.add.at(one, costs.stage_device, costs.saved_bytes + costs.saved_w_bytes)
        times = rng.uniform(1.0, max(1.0, 0.8 * num_microbatches))
        cluster = Cluster(
            name=cluster.name,
            devices=tuple(
                Device(kind=d.kind, memory_bytes=max(1, int(times * size)), host=0, speed=d.speed)
                for d, size in zip(cluster.devices, one.tolist(), strict=True)
            ),
            links=cluster.links,
        )
    return Instance(
        workload=workload,
        cluster=cluster,
        stages=stages,
        num_microbatches=num_microbatches,
        tight=tight,
    )


def main(arguments: list[str]) -> int:
    """Compare, print and write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tuner_exact")
    parser.add_argument("--instances", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=SEARCH_S, help="of processor time")
    options = parser.parse_args(arguments)
    warm_up()
    rows: dict[bool, list[float]] = {False: [], True: []}
    unproven = 0
    behind: list[tuple[record.Cell, ...]] = []
    for number in range(options.instances):
        case = instance(number)
        try:
            best = exact_order(case.costs, time_limit_s=PROOF_S)
        except (InfeasibleError, OutOfTimeError):
            unproven += 1
            continue
        if not best.optimal:
            unproven += 1
            continue
        plan = tune(
            case.workload,
            case.cluster,
            num_microbatches=case.num_microbatches,
            stages=case.stages,
            time_limit_s=options.seconds,
            clock=time.process_time,
        )
        assert plan.predicted is not None
        ratio = plan.predicted.step_ns / best.step_ns
        assert ratio >= 1.0, f"instance {number}: {plan.predicted.step_ns} < {best.step_ns}"
        rows[case.tight].append(ratio)
        if ratio > 1.0:
            behind.append((number, "tight" if case.tight else "free", round(100 * ratio - 100, 3)))
            print(*behind[-1], flush=True)
    table = tuple(
        (
            "memory binds" if tight else "free memory",
            len(ratios),
            sum(ratio == 1.0 for ratio in ratios),
            round(100 * sum(ratio == 1.0 for ratio in ratios) / max(1, len(ratios)), 1),
            round(100 * (max(ratios, default=1.0) - 1.0), 3),
        )
        for tight, ratios in (*rows.items(), (None, rows[False] + rows[True]))
    )
    table = (*table[:-1], ("all", *table[-1][1:]))
    for row in table:
        print(*row, sep="  ")
    record.write(
        record.Record(
            benchmark="tuner_exact",
            workload="small-random-instances",
            question="How often is the order of a small instance the best one?",
            command=record.command("tuner_exact", arguments),
            seed=0,
            tables=(
                record.Table(
                    title="Against the proven optimum",
                    columns=("instances", "compared", "equal", "equal %", "worst, % above"),
                    rows=table,
                ),
                record.Table(
                    title="Where the tuner was behind",
                    columns=("instance", "memory", "% above"),
                    rows=tuple(behind),
                ),
            ),
            shows=(
                f"The search had {options.seconds:g} s of processor time on all threads together.",
                "Partition and placement are given to both; the order is free, and so is whether "
                "a backward is split.",
            ),
            does_not_show=("Partitions and placements: see tuner_quality.",),
            notes=(
                f"{unproven} of {options.instances} instances were infeasible, or not proven in "
                f"{PROOF_S:g} deterministic seconds, and are left out",
            ),
        )
    )
    return 0
