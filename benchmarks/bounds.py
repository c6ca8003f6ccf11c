"""How far can a plan still be from the best? Joint lower bounds against published steps.

For every public point and case: the bound that is easy to state (load and chain, or load alone),
the joint bound of `octotune.bounds.joint`, and the best published step. Published step over bound
is the largest ratio by which any plan can be faster.

    python -m benchmarks bounds [--limit 5.0]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

from benchmarks import record
from octotune.bounds import Bound
from octotune.bounds.joint import lower_bound
from octotune.contract import Cluster, Workload, read_cluster, read_workload

DATA = Path(__file__).parent / "data"
MS = 1e6


def timed(
    workload: Workload, cluster: Cluster, num_microbatches: int, limit_s: float
) -> tuple[Bound, float]:
    """Return the bound and the seconds it took."""
    begin = time.perf_counter()
    bound = lower_bound(workload, cluster, num_microbatches, time_limit_s=limit_s)
    return bound, time.perf_counter() - begin


def points(limit_s: float) -> list[tuple[record.Cell, ...]]:
    """Return a row for each public point, memory free."""
    rows: list[tuple[record.Cell, ...]] = []
    for path in sorted((DATA / "octopipe").glob("*.json")):
        workload = read_workload(f"{path}#workload")
        for point in json.loads(path.read_text())["points"]:
            devices, m = point["devices"], point["num_microbatches"]
            bound, seconds = timed(workload, Cluster.equal(devices), m, limit_s)
            published = point["published"]["octopipe"]
            rows.append(
                (
                    workload.name,
                    devices,
                    m,
                    round(point["bound_ns"] / MS, 2),
                    round(bound.ns / MS, 2),
                    bound.reason,
                    round(published / MS, 2),
                    round(published / bound.ns, 4),
                    bound.finished,
                    round(seconds, 2),
                )
            )
    return rows


def cases(limit_s: float) -> list[tuple[record.Cell, ...]]:
    """Return a row for each scheduler case at each of its memory limits."""
    rows: list[tuple[record.Cell, ...]] = []
    for path in sorted((DATA / "cases").glob("*.json")):
        workload = read_workload(f"{path}#workload")
        found = json.loads(path.read_text())
        for cap, limits in found["caps"].items():
            cluster = read_cluster(f"{path}#caps.{cap}.cluster")
            bound, seconds = timed(workload, cluster, found["num_microbatches"], limit_s)
            published = (limits["best_published"] or {}).get("step_ns")
            rows.append(
                (
                    path.stem,
                    cap,
                    round(bound.parts["load"] / MS, 2),
                    round(bound.ns / MS, 2),
                    bound.reason,
                    None if published is None else round(published / MS, 2),
                    None if published is None else round(published / bound.ns, 4),
                    bound.finished,
                    round(seconds, 2),
                )
            )
    return rows


def by_devices(rows: list[tuple[record.Cell, ...]]) -> list[tuple[record.Cell, ...]]:
    """Return mean and largest published step over bound for each number of devices."""
    table: list[tuple[record.Cell, ...]] = []
    for devices in sorted({int(row[1] or 0) for row in rows}):
        ratios = [float(row[7] or 0) for row in rows if row[1] == devices]
        easy = [float(row[6] or 0) / float(row[3] or 1) for row in rows if row[1] == devices]
        table.append(
            (
                devices,
                len(ratios),
                round(sum(easy) / len(easy), 4),
                round(sum(ratios) / len(ratios), 4),
                max(ratios),
                round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 4),
            )
        )
    return table


def main(arguments: list[str]) -> None:
    """Bound everything, and write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks bounds")
    parser.add_argument("--limit", type=float, default=5.0, help="solver seconds a bound")
    limit_s = parser.parse_args(arguments).limit
    warm = read_workload(f"{DATA / 'octopipe' / 'llama3-8B.json'}#workload")
    timed(warm, Cluster.equal(2), 2, 0.1)  # compiles
    of_points = points(limit_s)
    of_cases = cases(limit_s)
    below = all(float(row[7] or 1) >= 1 for row in of_points) and all(
        float(row[6] or 1) >= 1 for row in of_cases
    )
    path, _ = record.write(
        record.Record(
            benchmark="bounds",
            workload="published-points",
            question="How much faster than the published steps can any plan be?",
            command=f"python -m benchmarks bounds --limit {limit_s}",
            seed=0,
            tables=(
                record.Table(
                    title="Public points by number of devices: published step / bound",
                    columns=(
                        "devices", "points", "mean over load and chain", "mean", "largest",
                        "geometric mean",
                    ),
                    rows=tuple(by_devices(of_points)),
                ),
                record.Table(
                    title="Public points, memory free",
                    columns=(
                        "model", "devices", "m", "load and chain, ms", "joint bound, ms",
                        "argument", "OctoPipe, ms", "OctoPipe / bound", "finished", "seconds",
                    ),
                    rows=tuple(of_points),
                ),
                record.Table(
                    title="Scheduler cases",
                    columns=(
                        "case", "memory", "load, ms", "joint bound, ms", "argument",
                        "best published, ms", "published / bound", "finished", "seconds",
                    ),
                    rows=tuple(of_cases),
                ),
            ),
            shows=(
                "No bound is above a published step."
                if below
                else "A bound is above a published step: one of the two is wrong.",
                "Published / bound is the largest factor any plan can gain on the published one.",
            ),
            does_not_show=(
                "How close to the bound plans exist: the bound may be below every plan.",
                "That bounds are valid: the tests compare them with exact optima.",
            ),
            notes=(f"solver limit {limit_s} s a bound, deterministic; one worker",),
        )
    )  # fmt: skip
    print(path.read_text(encoding="utf-8"))
