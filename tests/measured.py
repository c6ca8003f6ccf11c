"""A world to measure: the oracle runs a plan as it truly is; what it did becomes a Timeline."""

from __future__ import annotations

import numpy as np
from msgspec import structs

from octotune.contract import build_costs
from simulator.timeline import Timeline
from tests import oracle


def measure(plan, world, *, noise=0.0, rng=None):
    """Run `plan` in another workload and cluster; return its Timeline with the plan's own costs.

    Args:
        plan: what the planner believes.
        world: a plan with the same stages and orders, and the true workload and cluster.
        noise: each action takes longer by this share of its duration times |N(0, 1)|.
        rng: a numpy generator, for the noise.
    """
    longer = {}
    if noise:
        lengths = oracle.World(world).duration
        for row in plan.actions:
            for word in row:
                _, stage, kind, _, _ = oracle.split(word)
                longer[word] = round(lengths[stage, kind] * noise * abs(rng.standard_normal()))
    return timeline_of(plan, oracle.run(world, longer))


def timeline_of(plan, outcome):
    """Return what the oracle says happened as a Timeline with the plan's own costs."""
    costs = build_costs(plan.workload, plan.cluster, plan.stages, plan.num_microbatches)
    words = [word for row in plan.actions for word in row]
    copies = [word.partition("@")[0] for row in plan.offload or () for word in row]
    stages = range(len(plan.stages))

    def of(times, names):
        return np.array([times.get(name, -1) for name in names], dtype=np.int64)

    def table(times, kinds):
        return np.array(
            [
                [
                    next((times[f"{s}{k}{m}"] for k in kinds if f"{s}{k}{m}" in times), -1)
                    for m in range(plan.num_microbatches)
                ]
                for s in stages
            ],
            dtype=np.int64,
        )

    return Timeline(
        schedule=plan.schedule(),
        copies=plan.copies(),
        costs=costs,
        start_ns=of(outcome.start, words),
        end_ns=of(outcome.end, words),
        forward_sent_ns=table(outcome.sent, "F"),
        forward_arrived_ns=table(outcome.arrived, "F"),
        backward_sent_ns=table(outcome.sent, "BI"),
        backward_arrived_ns=table(outcome.arrived, "BI"),
        copy_start_ns=of(outcome.copy_start, copies),
        copy_end_ns=of(outcome.copy_end, copies),
        reduce_start_ns=of(outcome.reduce_start, stages),
        reduce_end_ns=of(outcome.reduce_end, stages),
        exchange_start_ns=np.array(list(outcome.exchange_start.values()), dtype=np.int64),
        exchange_end_ns=np.array(list(outcome.exchange_end.values()), dtype=np.int64),
        optimizer_start_ns=np.array(outcome.optimizer_start),
        optimizer_end_ns=np.array(outcome.optimizer_end),
        peak_bytes=np.array(outcome.peak_bytes),
    )


def in_world(plan, workload, cluster):
    """Return the plan as it is in the true world."""
    return structs.replace(plan, workload=workload, cluster=cluster)
