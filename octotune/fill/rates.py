"""What each kind of job makes on each device, by its best packing there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from octotune.contract.quantities import short
from octotune.errors import InfeasibleError, MalformedError
from octotune.fill.jobs import Configuration, FillJob
from octotune.fill.packing import Packing, Room, best_packing, nearest_miss

if TYPE_CHECKING:
    from simulator.fleet import Fleet, Trace

MOST_NS = 2**60


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rates:
    """What each kind of job makes on each device, and the packing that does it."""

    packings: tuple[tuple[Packing | None, ...], ...]  # [T][D]
    kind: tuple[int, ...]  # [J] of each job
    fleet: Fleet


def rates_of(
    jobs: Sequence[FillJob],
    rooms: Sequence[Room],
    step_ns: int,
    *,
    optimal: bool = False,
    time_limit_s: float = 5.0,
    seed: int = 0,
    misfits: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Rates:
    """Pack every kind of job onto every device; jobs of equal configurations are of one kind.

    Raises:
        InfeasibleError: if a job fits in no bubble; it names the nearest miss. With `misfits` it
            is left without a device instead.
    """
    from simulator.fleet import Fleet

    kinds: dict[tuple[str, tuple[Configuration, ...]], int] = {}
    kind = tuple(kinds.setdefault((job.kind, job.configurations), len(kinds)) for job in jobs)
    found: dict[tuple[int, Room], Packing | None] = {}
    table: list[tuple[Packing | None, ...]] = []
    for number in range(len(kinds)):
        job = jobs[kind.index(number)]
        row = []
        for device, room in enumerate(rooms):
            if (number, room) not in found:
                found[number, room] = best_packing(
                    job, room, optimal=optimal, time_limit_s=time_limit_s, seed=seed
                )
            row.append(found[number, room])
            if progress is not None:
                progress((number + (device + 1) / len(rooms)) / len(kinds))
        if not any(row) and not misfits:
            misses = [nearest_miss(job, room) for room in rooms]
            misses.sort(key=lambda miss: (miss.startswith("no bubble"), miss.rpartition("(")[2]))
            raise InfeasibleError(f"job {short(job.name)} fits in no bubble; {misses[0]}")
        table.append(tuple(row))
    return Rates(
        packings=tuple(table),
        kind=kind,
        fleet=Fleet(
            step_ns=step_ns,
            device_class=np.arange(len(rooms), dtype=np.int64),
            cycle_samples=np.array(
                [[p.samples if p else 0 for p in row] for row in table], dtype=np.int64
            ),
            cycle_steps=np.array(
                [[len(p.steps) if p else 0 for p in row] for row in table], dtype=np.int64
            ),
        ),
    )


def refuse_endless(fleet: Fleet, trace: Trace, name: Callable[[int], str]) -> None:
    """Raise MalformedError where a job would come or end after 2^60 ns, which is 36 years."""
    fits = fleet.cycle_steps > 0
    rates = fleet.cycle_samples / np.maximum(1, fleet.cycle_steps)
    slowest = np.where(fits, rates, np.inf).min(axis=1)[trace.kind]  # samples a step
    steps = trace.samples / slowest
    ends = trace.arrival_ns + (steps + 64.0) * fleet.step_ns
    late = np.flatnonzero(ends > MOST_NS)
    if len(late):
        job = int(late[0])
        raise MalformedError(
            f"{name(job)}: arrives at {int(trace.arrival_ns[job])} ns with "
            f"{int(trace.samples[job])} samples, and ends later than {MOST_NS} ns; make it smaller"
        )
