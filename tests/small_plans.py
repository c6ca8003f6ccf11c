"""Plans small enough to follow by hand, and the way from a plan to its timeline."""

from __future__ import annotations

from octotune.contract import Cluster, Layer, Plan, Stage, Workload, build_costs
from simulator.engine import simulate


def run(plan):
    """Return the plan's simulated timeline."""
    costs = build_costs(plan.workload, plan.cluster, plan.stages, plan.num_microbatches)
    return simulate(plan.schedule(), costs, plan.copies())


def plan_of(rows, *, times, devices=None, bandwidth=10**18, latency=0, **of_layers):
    """Return a plan of one layer a stage.

    Args:
        rows: one text of actions a device.
        times: F, I and W of each stage in ns.
        devices: of each stage; by default stage s is on device s.
        bandwidth: of all links, latency too.
        of_layers: further fields of every layer.
    """
    sizes = {"param_bytes": 0, "state_bytes": 0, "saved_bytes": 10, "output_bytes": 0}
    layers = tuple(
        Layer(
            name=str(stage),
            forward_ns=f,
            input_grad_ns=i,
            weight_grad_ns=w,
            **{**sizes, **of_layers},
        )
        for stage, (f, i, w) in enumerate(times)
    )
    homes = list(range(len(times))) if devices is None else devices
    return Plan(
        workload=Workload(name="small", layers=layers),
        cluster=Cluster.equal(len(rows), bandwidth=bandwidth, latency_ns=latency),
        num_microbatches=sum(word.startswith("0F") for row in rows for word in row.split()),
        stages=tuple(Stage(layers=(s, s + 1), device=d) for s, d in enumerate(homes)),
        actions=tuple(tuple(row.split()) for row in rows),
    )


def one_f_one_b(p, m):
    """Rows of 1F1B: stage s warms up with p - 1 - s forwards."""
    rows = []
    for s in range(p):
        warmup = min(m, p - 1 - s)
        row = [f"{s}F{i}" for i in range(warmup)]
        for i in range(m):
            row += [f"{s}F{i + warmup}"] * (i + warmup < m) + [f"{s}B{i}"]
        rows.append(" ".join(row))
    return rows
