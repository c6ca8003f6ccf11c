"""How short is a step when activations may leave, and how little memory does it take?

Parts, each a record of its own:
  uniform   equal stages against the published scheduler's table, at its peaks as memory limits
  linear    how the peak falls with the number of stages that leave
  uneven    two hybrids within 60, 45 and 35 % of 1F1B's activations: recompute, offload, both
  models    memory and throughput of the published models, from their shapes
  trips     what full offload costs as a round trip takes longer than the compute
"""

from __future__ import annotations

import argparse
import json
import time
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
from octotune.offload.pages import Rule
from octotune.offload.planning import (
    Keys,
    keys_of,
    memory_over,
    paged,
    pages_of,
    simulated,
    warm_up_paging,
)
from octotune.offload.search import search_within
from octotune.offload.starts import finer
from octotune.offload.uniform import uniform_start
from octotune.offload.usage import usage_of
from octotune.schedules import FAMILIES, plan_from
from octotune.schedules.family import Family
from octotune.schedules.group_interleaved import group_interleaved_family
from octotune.schedules.interleaved import interleaved_family
from octotune.schedules.interleaved_zero_bubble import interleaved_zero_bubble_family
from octotune.schedules.pipeoffload import pipeoffload_family
from octotune.tune.budget import Budget
from octotune.tune.search import Search
from octotune.tune.settings import SETTINGS
from simulator.engine import simulate
from simulator.memory import host_peak_bytes
from simulator.timeline import Timeline

DATA = Path(__file__).resolve().parent / "data" / "offload"
UNIT = 10**9
UNIFORM = ("d4-v2-m16", "d8-v2-m32", "d8-v4-m32", "d16-v3-m64")
UNEVEN = ("nemotron-nano-v2-9B", "jamba-52B")
UNEVEN_BARS = {0.5: (1.00, 1.03, 1.08), 1.0: (1.03, 1.08, 1.15)}
# bubbles of the published scheduler at F/B/W = 1/1.2/0.8, d = 8, v = 4, m = 32, in percent
SKEWED_BUBBLES = {"GIS": 3.9, "GIS-H": 7.7, "PO": 11.4}
LATE_SHARE = 1.02  # of the published step, which leaves late copies out


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


def uniform_starts(workload: Workload, cluster: Cluster, num_microbatches: int) -> list[Start]:
    """Return the published orders at one layer a stage, and V-shapes cut as finely."""
    passes = len(workload.layers) // len(cluster.devices)
    families = [
        group_interleaved_family(passes),
        group_interleaved_family(passes, half=True),
        pipeoffload_family(passes),
        interleaved_zero_bubble_family(passes),
    ]
    starts = starts_of(families, workload, cluster, num_microbatches)
    uniform = uniform_start(workload, cluster, num_microbatches, passes, equal=True)
    if uniform is not None:
        starts.append(uniform)
    if passes % 2 == 0:
        wide = [FAMILIES["zb-v"], FAMILIES["v-half"], FAMILIES["v-min"]]
        for start in starts_of(wide, workload, cluster, num_microbatches):
            cut = finer(start, workload, passes // 2) if passes > 2 else start
            if cut is not None:
                starts.append(cut)
    return starts


def timeline_of(found: Found, workload: Workload, cluster: Cluster, m: int) -> Timeline:
    """Return the simulated run of a found plan."""
    costs = build_costs(workload, cluster, found.stages, m)
    return simulate(found.schedule, costs, found.copies)


def skewed(workload: Workload) -> Workload:
    """Return the workload with F/B/W = 1/1.2/0.8."""
    return msgspec.structs.replace(
        workload,
        layers=tuple(
            msgspec.structs.replace(
                layer,
                input_grad_ns=layer.input_grad_ns * 12 // 10,
                weight_grad_ns=layer.weight_grad_ns * 8 // 10,
            )
            for layer in workload.layers
        ),
    )


def uniform(options: argparse.Namespace) -> None:
    """Hold our steps against the published table."""
    for name in options.cases or UNIFORM:
        case = read(f"uniform-{name}")
        workload = msgspec.convert(case["workload"], Workload)
        m = case["num_microbatches"]
        variants = [("1/1/1", workload)]
        if name == "d8-v4-m32":
            variants.append(("1/1.2/0.8", skewed(workload)))
        rows: list[tuple[record.Cell, ...]] = []
        refused: list[tuple[record.Cell, ...]] = []
        for ratio, layers in variants:
            one, two = _uniform_rows(case, ratio, layers, m, options)
            rows += one
            refused += two
        worst = max(float(row[7]) for row in rows)  # type: ignore[arg-type]
        beyond = sum(1 for row in rows if row[-1] == "no")
        record_of(
            options,
            workload=f"uniform {name}",
            question="At each published peak as the memory limit, is our step as short?",
            tables=(
                record.Table(
                    title="Published peaks as limits",
                    columns=(
                        "F/I/W",
                        "schedule",
                        "offloaded",
                        "k",
                        "limit, units",
                        "published step, ms",
                        "our step, ms",
                        "ours / published",
                        "waits for reloads, % of device time",
                        "from",
                        "s",
                        "reached",
                    ),
                    rows=tuple(rows),
                ),
                record.Table(
                    title="Where the published scheduler refuses",
                    columns=(
                        "F/I/W",
                        "schedule",
                        "offloaded",
                        "k",
                        "smallest limit within 5 % of its step, units",
                        "our step, ms",
                    ),
                    rows=tuple(refused),
                ),
            ),
            shows=f"The largest ratio of ours to the published step is {worst:.4f}; {beyond} of "
            f"{len(rows)} points are above the published step, of which those within 2 % count "
            "as reached where reloads are late.",
            does_not_show="Times of real copies: both are schedules of equal stages.",
        )


def _uniform_rows(
    case: dict[str, Any], ratio: str, workload: Workload, m: int, options: argparse.Namespace
) -> tuple[list[tuple[record.Cell, ...]], list[tuple[record.Cell, ...]]]:
    clusters = {k: msgspec.convert(c, Cluster) for k, c in case["clusters"].items()}
    starts = uniform_starts(workload, clusters["0.5"], m)
    work = sum(one.forward_ns + one.input_grad_ns + one.weight_grad_ns for one in workload.layers)
    known: dict[tuple[float | None, int], tuple[Found | None, float]] = {}

    def ours(k: float | None, units: int, target_ns: int) -> tuple[Found | None, float]:
        if (k, units) not in known:
            cluster = with_memory(clusters["0.5" if k is None else str(k)], units * UNIT)
            begin = time.monotonic()
            found = search_within(
                workload,
                cluster,
                m,
                starts,
                offload=k is not None,
                recompute=False,
                time_limit_s=options.seconds,
                seed=options.seed,
                target_ns=target_ns,
            )
            known[k, units] = found, time.monotonic() - begin
        return known[k, units]

    rows: list[tuple[record.Cell, ...]] = []
    refused: list[tuple[record.Cell, ...]] = []
    for point in case["published"]:
        k, units, step = point["k"], point["peak_units"], point["step_ns"]
        if ratio != "1/1/1":
            bubble = (SKEWED_BUBBLES[point["schedule"]] + 0.05) / 100
            step = int(work * m / len(clusters["0.5"].devices) / (1 - bubble))
        label = (ratio, point["schedule"], point["offloaded"], "-" if k is None else k)
        if units is None:
            limit = 2
            while True:
                found, _ = ours(k, limit, int(step * 1.05))
                if found is not None and found.step_ns <= step * 1.05:
                    break
                limit += 1
            refused.append((*label, limit, round(found.step_ns / 1e6, 3)))
            print(refused[-1], flush=True)
            continue
        found, seconds = ours(k, units, 0)
        if found is None:
            rows.append((*label, units, round(step / 1e6, 3), "none", 9.0, "", "", "", "no"))
            continue
        timeline = timeline_of(found, workload, clusters["0.5" if k is None else str(k)], m)
        late = usage_of(timeline).late_ns.sum() / (timeline.step_ns * len(clusters["0.5"].devices))
        quotient = found.step_ns / step
        reached = "yes" if quotient <= 1 else "late" if quotient <= LATE_SHARE and late else "no"
        rows.append(
            (
                *label,
                units,
                round(step / 1e6, 3),
                round(found.step_ns / 1e6, 3),
                round(quotient, 4),
                round(100 * float(late), 2),
                found.source,
                round(seconds, 1),
                reached,
            )
        )
        print(rows[-1], flush=True)
    return rows, refused


def linear(options: argparse.Namespace) -> None:
    """Find the smallest peak as more stages of a device leave, d = 8 and m = 32."""
    rows: list[tuple[record.Cell, ...]] = []
    published = dict(zip(range(0, 17, 2), (71, 56, 42, 31, 21, 14, 8, 5, 3), strict=True))
    for passes in (2, 4, 8, 16):
        workload, cluster = equal_stages(8, passes, trips=0.5)
        start = uniform_start(workload, cluster, 32, passes, equal=True)
        assert start is not None
        none = 0
        for count in range(0, passes + 1, max(1, passes // 8)):
            units, step = smallest_peak(start, workload, cluster, 32, count)
            none = units if count == 0 else none
            rows.append(
                (
                    passes,
                    count,
                    units,
                    round(units / none, 3),
                    published.get(count, "-") if passes == 16 else "-",
                    round(step / 1e6, 2),
                )
            )
            print(rows[-1], flush=True)
    half = next(row for row in rows if row[:2] == (16, 8))
    record_of(
        options,
        workload="equal stages d8 m32",
        question="Does the peak fall better than linearly with the stages that leave?",
        tables=(
            record.Table(
                title="Uniform repeating, k = 0.5, at most 2 % slower than without copies",
                columns=(
                    "stages a device",
                    "of which leave",
                    "smallest peak, units",
                    "of the peak without",
                    "published peak, units",
                    "step, ms",
                ),
                rows=tuple(rows),
            ),
        ),
        shows=f"Half of the stages offloaded leaves {half[3]} of the peak at 16 stages a device; "
        "with all of them the peak does not grow with the number of stages.",
        does_not_show="Orders other than uniform repeating, which may take less.",
    )


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


def uneven(options: argparse.Namespace) -> None:
    """Hold recompute, offload and both against the step without a memory limit."""
    for name in options.cases or UNEVEN:
        case = read(name)
        workload = msgspec.convert(case["workload"], Workload)
        m, free_ns = case["num_microbatches"], case["octopipe_free_memory_ns"]
        clusters = [msgspec.convert(one["cluster"], Cluster) for one in case["limits"]]
        starts: list[Start] = []
        for times in (None, 2, 1):
            starts += tuned_starts(
                workload,
                with_more_memory(clusters[0], times),
                m,
                options.tune_seconds,
                options.seed,
            )
        cut = [finer(start, workload, pieces) for start in starts for pieces in (2, 3)]
        starts += [one for one in cut if one is not None]
        rows: list[tuple[record.Cell, ...]] = []
        places = dict.fromkeys(UNEVEN_BARS, 0)
        for one, cluster in zip(case["limits"], clusters, strict=True):
            bar = UNEVEN_BARS[one["k"]][places[one["k"]]]
            places[one["k"]] += 1

            within = partial(search_within, workload, cluster, m, starts, seed=options.seed)
            within = partial(within, time_limit_s=options.seconds)
            again = within(offload=False)
            copies = within(recompute=False)
            both = within(found=[plan for plan in (again, copies) if plan is not None])
            assert both is not None
            ratios = [
                "none" if plan is None else round(plan.step_ns / free_ns, 4)
                for plan in (again, copies, both)
            ]
            rows.append(
                (
                    one["k"],
                    one["share_of_1f1b"],
                    *ratios,
                    bar,
                    "yes" if both.step_ns <= bar * free_ns else "no",
                    len(both.stages),
                    sum(stage.recompute for stage in both.stages),
                    both.num_copies // 2,
                )
            )
            print(name, rows[-1], flush=True)
        record_of(
            options,
            workload=name,
            question="Within a part of 1F1B's memory, how far is the step from one without limit?",
            tables=(
                record.Table(
                    title="Steps over OctoPipe's without a memory limit",
                    columns=(
                        "k",
                        "limit, of 1F1B's activations",
                        "recompute only",
                        "offload only",
                        "both",
                        "bar",
                        "reached",
                        "stages",
                        "recomputed",
                        "activations that leave",
                    ),
                    rows=tuple(rows),
                ),
            ),
            shows="What recompute, offload and both reach from the same starts in the same time.",
            does_not_show="Runs: steps are simulated; OctoPipe's is as its authors publish it.",
        )


def tuned_starts(
    workload: Workload, cluster: Cluster, m: int, seconds: float, seed: int
) -> list[Start]:
    """Return the tuner's best plans of different stage counts on a cluster."""
    search = Search(workload, cluster, m, seed, Budget(seconds, None), None, None, SETTINGS)
    with search:
        search.try_seeds()
        search.try_published()
        while search.goes_on():
            diagnosis = search.diagnose()
            if search.walks_next():
                search.walk(diagnosis)
            else:
                search.polish(diagnosis)
    chosen: list[Start] = []
    plans = [search.best, *search.finalists]
    for plan in sorted((plan for plan in plans if plan), key=lambda plan: plan.step_ns):
        if len(chosen) < 4 and all(len(plan.stages) != len(one.stages) for one in chosen):
            chosen.append(Start(name=plan.source, stages=plan.stages, schedule=plan.schedule))
    return chosen


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


TRIP_EVALUATIONS = 400


def trips(options: argparse.Namespace) -> None:
    """Slow 1F1B of 8 devices down by offload within little memory, over k."""
    rows: list[tuple[record.Cell, ...]] = []
    published = {1.7: 31.1, 1.46: 20.0, 1.4: 15.0, 1.23: 6.9, 1.15: 6.2, 1.0: 0.2, 0.8: 0.0}
    for share in sorted((*published, 0.5, 0.7, 2.0)):
        workload, cluster = equal_stages(8, 4, trips=share)
        wide = starts_of([FAMILIES["1f1b"]], workload, cluster, 32)[0]
        start = finer(wide, workload, 4)
        assert start is not None
        free = simulate(start.schedule, build_costs(workload, cluster, start.stages, 32))
        cells: list[record.Cell] = []
        for units in (6, 8, 12, 16):
            found = search_within(
                workload,
                with_memory(cluster, units * UNIT),
                32,
                [start],
                recompute=False,
                max_evaluations=TRIP_EVALUATIONS,
                seed=options.seed,
                target_ns=free.step_ns,
            )
            cells.append(
                "none" if found is None else round(100 * (found.step_ns / free.step_ns - 1), 1)
            )
        rows.append((share, published.get(share, "-"), *cells))
        print(rows[-1], flush=True)
    record_of(
        options,
        workload="1f1b d8 m32",
        question="What does offload cost when a round trip takes longer than the compute?",
        tables=(
            record.Table(
                title="Slower than without offload, %, by memory limit (1F1B's peak is 32 units)",
                columns=(
                    "k",
                    "published, all leaves",
                    "6 units",
                    "8 units",
                    "12 units",
                    "16 units",
                ),
                rows=tuple(rows),
            ),
        ),
        shows="How the cost of offload grows with k and with the memory it has to free.",
        does_not_show="The published runs, which offload everything; here what does not pay "
        "stays.",
    )


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


PARTS = {
    "uniform": uniform,
    "linear": linear,
    "uneven": uneven,
    "models": models,
    "trips": trips,
}


def main(arguments: list[str]) -> None:
    """Run one part, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks offload_planning")
    parser.add_argument("part", choices=(*PARTS, "all"))
    parser.add_argument("cases", nargs="*", help="of uniform or uneven; all by default")
    parser.add_argument("--seconds", type=float, default=20.0, help="of search a point")
    parser.add_argument("--tune-seconds", type=float, default=60.0, help="of each tuner run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    options.arguments = arguments
    warm_up_paging()
    for name, part in PARTS.items():
        if options.part in (name, "all"):
            part(options)
