"""Small problems of offload: equal layers, devices of few activations, plans of families."""

from __future__ import annotations

from pathlib import Path

from octotune.contract import (
    Cluster,
    Device,
    Layer,
    Link,
    Links,
    Plan,
    Workload,
)
from octotune.offload.bench import Start
from octotune.offload.joint import with_more_memory
from octotune.schedules import FAMILIES, plan_from

UNIT = 1000
CASES = Path(__file__).resolve().parent.parent / "benchmarks" / "data" / "offload"


def equal_layers(count, *, offloadable=UNIT, output=0):
    return Workload(
        name=f"{count} equal layers",
        layers=tuple(
            Layer(
                name=f"layers.{index}",
                forward_ns=100,
                input_grad_ns=100,
                weight_grad_ns=100,
                param_bytes=0,
                state_bytes=0,
                saved_bytes=0,
                saved_w_bytes=UNIT,
                output_bytes=output,
                offloadable_bytes=offloadable,
            )
            for index in range(count)
        ),
    )


def devices(count, *, units, copy_ns=75, link=None, host_memory_bytes=None):
    """Devices with room for so many activations of UNIT bytes, which take copy_ns one way."""
    return Cluster(
        name="equal",
        devices=tuple(
            Device(
                kind="unit",
                memory_bytes=units * UNIT,
                offload_bandwidth=UNIT * 10**9 // copy_ns if copy_ns else 0,
                host_link=None if link is None else f"link {index // link}",
            )
            for index in range(count)
        ),
        links=Links(intra_host=Link(latency_ns=0, bandwidth=10**18)),
        host_memory_bytes=host_memory_bytes,
    )


def family_plan(name, workload, cluster, num_microbatches, **options):
    return plan_from(
        FAMILIES[name], workload, with_more_memory(cluster, None), num_microbatches, **options
    )


def as_plan(found, workload, cluster, num_microbatches):
    return Plan(
        workload=workload,
        cluster=cluster,
        num_microbatches=num_microbatches,
        stages=found.stages,
        actions=found.schedule.words(),
        offload=None if found.copies is None else found.copies.words(),
    )


def starts(workload, cluster, num_microbatches, *names):
    plans = [family_plan(name, workload, cluster, num_microbatches) for name in names]
    return [
        Start(name=name, stages=plan.stages, schedule=plan.schedule())
        for name, plan in zip(names, plans, strict=True)
    ]
