"""Memory and throughput of the published models, from their shapes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from benchmarks import record
from benchmarks.offload_points import (
    record_of,
    smallest_peak,
    with_memory,
)
from octotune.contract import Cluster, Device, Layer, Link, Links, Workload, build_costs
from octotune.offload.joint import with_more_memory
from octotune.offload.pages import Rule
from octotune.offload.planning import (
    keys_of,
    memory_over,
    paged,
    pages_of,
    simulated,
)
from octotune.offload.uniform import uniform_start
from octotune.schedules import FAMILIES, plan_from
from octotune.schedules.group_interleaved import group_interleaved_family
from octotune.schedules.interleaved import interleaved_family
from simulator.engine import simulate
from simulator.memory import host_peak_bytes
from simulator.timeline import Timeline


def models(options: argparse.Namespace) -> None:
    """Reproduce memory and throughput of the published models from their shapes."""
    rows: list[tuple[record.Cell, ...]] = []
    for name, hidden, num_layers, num_devices, m, lengths in (
        ("10.5B", 5120, 38, 8, 64, (4096, 8192, 16384, 32768)),
        ("18.1B", 6144, 46, 16, 128, (4096, 8192, 16384, 32768)),
        ("42.9B", 8192, 62, 32, 256, (4096, 8192, 16384, 32768)),
    ):
        for length in lengths:
            row = _model_row(name, hidden, num_layers, num_devices, m, length)
            rows.append(row)
            print(row, flush=True)
    record_of(
        options,
        workload="published models",
        question="Do the models' shapes alone give the published memory and throughput?",
        tables=(
            record.Table(
                title="Model FLOPS utilisation % / activation GiB, simulated (published)",
                columns=("model", "sequence", "k", *(title for title, _ in MODEL_SCHEDULES)),
                rows=tuple(rows),
            ),
        ),
        shows="Order and rough size of each schedule's memory and throughput, and which run out "
        "of memory, from shapes: 12 b s h (6 h + s) FLOP a layer at 220 of 312 TFLOPS, 20 b s h "
        "bytes less what eight groups of keys and values save, copies at the k of the published "
        "formula, 18 bytes of state a parameter, 80 GiB of which 6 are reserved, 2 TiB a host; "
        "embedding and head count as one layer's time. GB are read as GiB.",
        does_not_show="Kernels, caches and interference of the published runs; nothing is fitted.",
    )


MODEL_SCHEDULES = (
    ("1F1B-I", "interleaved"),
    ("GIS", "gis"),
    ("GIS-H", "gis-h"),
    ("PO-H", "po-h"),
    ("PO-F", "po-f"),
    ("1F1B", "1f1b"),
)
PUBLISHED_MODELS = {
    ("10.5B", 4096): ("65/15", "65/13", "63/8", "59/3", "skip", "57/12"),
    ("10.5B", 8192): ("68/30", "68/27", "65/16", "61/6", "skip", "59/24"),
    ("10.5B", 16384): ("OOM", "OOM", "68/32", "63/12", "59/9", "62/48"),
    ("10.5B", 32768): ("OOM", "OOM", "OOM", "65/24", "64/14", "OOM"),
    ("18.1B", 4096): ("64/24", "65/19", "63/13", "59/4", "skip", "56/18"),
    ("18.1B", 8192): ("66/49", "67/38", "66/25", "62/8", "skip", "58/37"),
    ("18.1B", 16384): ("OOM", "OOM", "59/51", "64/15", "61/9", "OOM"),
    ("18.1B", 32768): ("OOM", "OOM", "OOM", "65/27", "65/15", "OOM"),
    ("42.9B", 4096): ("63/49", "65/34", "64/25", "62/10", "58/5", "55/33"),
    ("42.9B", 8192): ("OOM", "OOM", "62/51", "63/20", "60/8", "OOM"),
    ("42.9B", 16384): ("OOM", "OOM", "OOM", "63/41", "65/12", "OOM"),
    ("42.9B", 32768): ("OOM", "OOM", "OOM", "OOM", "host OOM", "OOM"),
}
GIB = 2**30
RESERVED_BYTES = 6 * GIB
HOST_BYTES = 2048 * GIB  # of a host of 8 devices


def _model_row(
    name: str, hidden: int, num_layers: int, num_devices: int, m: int, length: int
) -> tuple[record.Cell, ...]:
    flop = 4 * length * hidden * (6 * hidden + length)  # of a forward
    part = round(flop / 220e12 * 1e9)
    # of 20 b s h, 4 are keys and values, which eight groups of heads of 128 make smaller
    activation = int((16 + 4 * 8 * 128 / hidden) * length * hidden)
    state = int(float(name[:-1]) * 1e9 * 18) // (num_layers + 2)

    def layer(index: int) -> Layer:
        inner = 0 < index <= num_layers
        return Layer(
            name=f"layers.{index}",
            forward_ns=part,
            input_grad_ns=part,
            weight_grad_ns=part,
            param_bytes=0,
            state_bytes=state,
            saved_bytes=0,
            saved_w_bytes=activation if inner else 0,
            output_bytes=0,
            offloadable_bytes=activation if inner else 0,
        )

    k = 10 / (3 * (6 * hidden + length)) * 220e12 / 15e9
    workload = Workload(name=name, layers=tuple(layer(i) for i in range(num_layers + 2)))
    device = Device(
        kind="A100",
        memory_bytes=80 * GIB,
        reserved_bytes=RESERVED_BYTES,
        offload_bandwidth=round(2 * activation * 1e9 / (k * 3 * part)),
    )
    link = Link(latency_ns=0, bandwidth=10**18)
    cluster = Cluster(
        name=f"{num_devices} A100",
        devices=tuple(
            msgspec.structs.replace(device, host=index // 8) for index in range(num_devices)
        ),
        links=Links(intra_host=link, inter_host=link),
    )
    cells = []
    for spot, (_, kind) in enumerate(MODEL_SCHEDULES):
        said = PUBLISHED_MODELS[name, length][spot]
        ours = _model_cell(kind, workload, cluster, m, flop * num_layers)
        cells.append(f"{ours} ({said})")
    return (name, length, round(k, 2), *cells)


def _model_cell(kind: str, workload: Workload, cluster: Cluster, m: int, flop: int) -> str:
    passes = len(workload.layers) // len(cluster.devices)
    free = with_more_memory(cluster, None)
    if kind in ("po-h", "po-f"):
        timeline = _offloaded(workload, free, m, -(-passes // 2) if kind == "po-h" else passes)
    else:
        family = {
            "interleaved": interleaved_family(passes),
            "gis": group_interleaved_family(passes),
            "gis-h": group_interleaved_family(passes, half=True),
            "1f1b": FAMILIES["1f1b"],
        }[kind]
        plan = plan_from(family, workload, free, m)
        costs = build_costs(workload, free, plan.stages, m)
        timeline = simulate(plan.schedule(), costs)
    static = timeline.costs.static_bytes
    utilisation = 3 * flop * m / (timeline.step_ns / 1e9 * len(cluster.devices) * 312e12)
    activations = int((timeline.peak_bytes - static).max())
    text = f"{100 * utilisation:.0f}/{activations / GIB:.0f}"
    if timeline.peak_bytes.max() > cluster.devices[0].memory_bytes:
        return f"OOM {text}"
    return f"host OOM {text}" if max(host_peak_bytes(timeline).values()) > HOST_BYTES else text


def _offloaded(workload: Workload, free: Cluster, m: int, leaving: int) -> Timeline:
    """Run uniform repeating with the first stages of each device offloaded, in little memory.

    The least limit that costs at most 2 % is looked for with three microbatches a device.
    """
    passes = len(workload.layers) // len(free.devices)
    size = workload.layers[1].saved_w_bytes

    def with_units(units: int, stages: Sequence[Any]) -> Cluster:
        static = build_costs(workload, free, stages, 1).static_bytes.max()
        return with_memory(free, int(static) + units * size)

    few = 3 * len(free.devices)
    start = uniform_start(workload, free, few, passes, equal=True)
    assert start is not None
    units, _ = smallest_peak(
        start, workload, free, few, leaving, within=lambda n: with_units(n, start.stages)
    )
    start = uniform_start(workload, free, m, passes, equal=True)
    assert start is not None
    while True:
        costs = build_costs(workload, with_units(units, start.stages), start.stages, m)
        alone = simulate(start.schedule, costs)
        keys = keys_of(alone)
        stays = np.arange(costs.num_stages) // costs.num_devices >= leaving
        made = [paged(pages_of(costs, keys.split, stays=stays), keys, rule) for rule in SOME_RULES]
        runs = [simulated(one, costs) for one in made if one is not None]
        runs = [run for run in runs if memory_over(run) == 0]
        if any(run.step_ns <= 1.02 * alone.step_ns for run in runs):
            return min(runs, key=lambda run: run.step_ns)
        units += 1


SOME_RULES = (Rule(notice=1), Rule(notice=2, lead=0.7, reach=1.0), Rule(notice=4))
