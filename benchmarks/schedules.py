"""Do our generators reach the makespan and peak of the published schedules, and how fast?

Every published number in `tests/data/published_schedules.json` beside ours on the same costs, for
equal and uneven stages, then how long each generator takes at 64 devices and 256 microbatches.
Each schedule is simulated by the engine, its peak counted in microbatches of a whole device.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import record
from benchmarks.unit_costs import UNIFORM, UNIT_NS, in_flight, uneven_shares, unit_costs
from octotune.schedules import FAMILIES
from simulator.costs import Costs
from simulator.engine import simulate

PUBLISHED = record.ROOT / "tests" / "data" / "published_schedules.json"
LARGE = (64, 256)


def main(arguments: list[str]) -> None:
    """Generate, simulate, print and record."""
    parser = argparse.ArgumentParser("schedules", description=__doc__)
    parser.parse_args(arguments)
    data = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    tables = [
        against_published(f"Uniform {kind}", data, "uniform", kind) for kind in sorted(UNIFORM)
    ]
    tables += [
        against_published(f"Uneven, {kind}", data, "uneven", kind)
        for kind in ("head18", "headfirst", "alt")
    ]
    tables.append(speed())
    path, _ = record.write(
        record.Record(
            benchmark="schedules",
            workload="published",
            question="Do our generators reach the makespan and peak of the published schedules, "
            "and how fast?",
            command=record.command("schedules", arguments),
            seed=0,
            tables=tuple(tables),
            shows=(
                "Makespan in units (a device's F of one microbatch is 1) and peak in microbatches "
                "of a whole device, ours / published, on equal costs.",
                "Orders that do not depend on costs give the published makespan; the others may "
                "be shorter, within the published peak.",
            ),
            does_not_show=(
                "Real models: stages here are synthetic, memory is activations only.",
                "The best possible order: see the bounds and the tuner.",
            ),
            notes=(data["note"], "generation: CPU seconds of one call, code compiled before"),
        )
    )
    print(path.read_text(encoding="utf-8"))


def costs_of(name: str, table: str, kind: str, p: int, m: int) -> Costs:
    """Return the costs that a cell of a table was measured on."""
    placement = FAMILIES[name].placement(p)
    if table == "uniform":
        *times, transfer = UNIFORM[kind]
        return unit_costs(placement, m, times=times, transfer=transfer)
    shares = uneven_shares(kind, p, len(placement))
    return unit_costs(placement, m, shares=shares, transfer=0.05)


def against_published(title: str, data: dict[str, Any], table: str, kind: str) -> record.Table:
    """Return ours beside published, one row a schedule."""
    sizes = data["sizes"][table]

    def cells(name: str, published: list[Any]) -> Iterator[record.Cell]:
        for (p, m), cell in zip(sizes, published, strict=True):
            costs = costs_of(name, table, kind, p, m)
            schedule = FAMILIES[name].generate(costs)
            makespan = simulate(schedule, costs).step_ns / UNIT_NS
            peak = max(in_flight(schedule)) * p / costs.num_stages
            yield f"{makespan:.2f}, {peak:g} / " + (
                "refused" if cell is None else f"{cell[0]:.2f}, {cell[1]:g}"
            )

    return record.Table(
        title=f"{title}: makespan and peak, ours / published",
        columns=("schedule", *(f"p {p}, m {m}" for p, m in sizes)),
        rows=tuple((name, *cells(name, by_kind[kind])) for name, by_kind in data[table].items()),
    )


def speed() -> record.Table:
    """Return how long each generator takes on a large pipeline."""
    p, m = LARGE
    rows: list[tuple[record.Cell, ...]] = []
    for name, family in FAMILIES.items():
        family.generate(unit_costs(family.placement(3), 4))
        costs = unit_costs(family.placement(p), m, transfer=0.05)
        begin = time.process_time()
        schedule = family.generate(costs)
        seconds = time.process_time() - begin
        makespan = simulate(schedule, costs).step_ns / UNIT_NS
        peak = max(in_flight(schedule)) * p / costs.num_stages
        rows.append((name, schedule.num_actions, seconds, makespan, peak))
    return record.Table(
        title=f"Generation on uniform A, p {p}, m {m}",
        columns=("schedule", "actions", "CPU seconds", "makespan", "peak"),
        rows=tuple(rows),
    )
