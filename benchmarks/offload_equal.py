"""Equal stages: against the published table, over the stages that leave, over k."""

from __future__ import annotations

import argparse
import time
from typing import Any

import msgspec

from benchmarks import record
from benchmarks.offload_points import (
    UNIT,
    equal_stages,
    read,
    record_of,
    smallest_peak,
    starts_of,
    timeline_of,
    with_memory,
)
from octotune.contract import Cluster, Workload, build_costs
from octotune.offload.bench import Found, Start
from octotune.offload.search import search_within
from octotune.offload.starts import finer
from octotune.offload.uniform import uniform_start
from octotune.offload.usage import usage_of
from octotune.schedules import FAMILIES
from octotune.schedules.group_interleaved import group_interleaved_family
from octotune.schedules.interleaved_zero_bubble import interleaved_zero_bubble_family
from octotune.schedules.pipeoffload import pipeoffload_family
from simulator.engine import simulate

UNIFORM = ("d4-v2-m16", "d8-v2-m32", "d8-v4-m32", "d16-v3-m64")


# bubbles of the published scheduler at F/B/W = 1/1.2/0.8, d = 8, v = 4, m = 32, in percent
SKEWED_BUBBLES = {"GIS": 3.9, "GIS-H": 7.7, "PO": 11.4}
LATE_SHARE = 1.02  # of the published step, which leaves late copies out


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
