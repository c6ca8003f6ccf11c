"""What the parts of `offload_planning` share: cases, limits, smallest peaks, records."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks import record
from octotune.contract import Cluster, Device, Layer, Link, Links, Workload, build_costs
from octotune.offload.bench import Found, Start
from octotune.offload.joint import with_more_memory
from octotune.offload.moves import first_rules
from octotune.offload.planning import (
    Keys,
    keys_of,
    memory_over,
    paged,
    pages_of,
    simulated,
)
from octotune.schedules import plan_from
from octotune.schedules.family import Family
from simulator.engine import simulate
from simulator.timeline import Timeline

DATA = Path(__file__).resolve().parent / "data" / "offload"
UNIT = 10**9


def with_memory(cluster: Cluster, num_bytes: int) -> Cluster:
    """Return the cluster with the same memory on every device."""
    return msgspec.structs.replace(
        cluster,
        devices=tuple(
            msgspec.structs.replace(device, memory_bytes=num_bytes) for device in cluster.devices
        ),
    )


def read(name: str) -> dict[str, Any]:
    """Return one file of the data folder."""
    found: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return found


def starts_of(
    families: Sequence[Family], workload: Workload, cluster: Cluster, num_microbatches: int
) -> list[Start]:
    """Return the families' plans without a memory limit."""
    free = with_more_memory(cluster, None)
    plans = [plan_from(family, workload, free, num_microbatches) for family in families]
    return [
        Start(name=family.name, stages=plan.stages, schedule=plan.schedule())
        for family, plan in zip(families, plans, strict=True)
    ]


def timeline_of(found: Found, workload: Workload, cluster: Cluster, m: int) -> Timeline:
    """Return the simulated run of a found plan."""
    costs = build_costs(workload, cluster, found.stages, m)
    return simulate(found.schedule, costs, found.copies)


def equal_stages(num_devices: int, passes: int, *, trips: float) -> tuple[Workload, Cluster]:
    """Return one unit an activation, F = I = W = 1 ms, and a round trip of `trips` x 3 ms."""
    layers = tuple(
        Layer(
            name=f"layers.{index}",
            forward_ns=1_000_000,
            input_grad_ns=1_000_000,
            weight_grad_ns=1_000_000,
            param_bytes=0,
            state_bytes=0,
            saved_bytes=0,
            saved_w_bytes=UNIT,
            output_bytes=0,
            offloadable_bytes=UNIT,
        )
        for index in range(num_devices * passes)
    )
    bandwidth = round(UNIT / (trips * 1.5e-3))
    device = Device(kind="unit", memory_bytes=1 << 60, offload_bandwidth=bandwidth)
    cluster = Cluster(
        name=f"{num_devices} devices, k={trips}",
        devices=(device,) * num_devices,
        links=Links(intra_host=Link(latency_ns=0, bandwidth=10**18)),
    )
    return Workload(name=f"{num_devices * passes} equal layers", layers=layers), cluster


def smallest_peak(
    start: Start,
    workload: Workload,
    cluster: Cluster,
    m: int,
    leaving: int,
    within: Callable[[int], Cluster] | None = None,
) -> tuple[int, int]:
    """Return the smallest limit, in units, within which the first stages of a device leave.

    And the step there, at most 2 % longer than without copies and limit. `within` returns the
    cluster with a limit; by default a unit is UNIT bytes.
    """
    if within is None:
        within = partial(_with_units, cluster)
    free = simulate(start.schedule, build_costs(workload, cluster, start.stages, m))
    keys = keys_of(free)
    stays = np.arange(len(start.stages)) // len(cluster.devices) >= leaving
    keys = Keys(times=keys.times, split=keys.split, stays=stays)
    limit_ns = int(free.step_ns * 1.02) + 1
    size = int(free.costs.saved_w_bytes.max())
    low, high = 1, int((free.peak_bytes - free.costs.static_bytes).max()) // size
    step = free.step_ns
    while low < high:
        middle = (low + high) // 2
        fits = _fits(keys, start, workload, within(middle), m, limit_ns)
        if fits is None:
            low = middle + 1
        else:
            high, step = middle, fits
    return high, step


def _with_units(cluster: Cluster, units: int) -> Cluster:
    return with_memory(cluster, units * UNIT)


def _fits(
    keys: Keys, start: Start, workload: Workload, cluster: Cluster, m: int, limit_ns: int
) -> int | None:
    costs = build_costs(workload, cluster, start.stages, m)
    pages = pages_of(costs, keys.split, stays=keys.stays)
    for rule in first_rules(limit_ns // m, True):
        again = keys
        for _ in range(2):
            played = paged(pages, again, rule, limit_ns=limit_ns)
            if played is None:
                break
            timeline = simulated(played, costs)
            if memory_over(timeline) == 0:
                return timeline.step_ns
            fresh = keys_of(timeline)
            again = Keys(times=fresh.times, split=keys.split, stays=keys.stays)
    return None


def record_of(
    options: argparse.Namespace,
    *,
    workload: str,
    question: str,
    tables: tuple[record.Table, ...],
    shows: str,
    does_not_show: str,
) -> None:
    """Write one record and say where."""
    path, _ = record.write(
        record.Record(
            benchmark="offload_planning",
            workload=workload,
            question=question,
            command=record.command("offload_planning", options.arguments),
            seed=options.seed,
            tables=tables,
            shows=(shows,),
            does_not_show=(does_not_show,),
            notes=(f"at most {options.seconds} s of search a point on one thread",),
        )
    )
    print(path)
