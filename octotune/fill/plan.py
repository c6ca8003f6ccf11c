"""The fill plan: which job runs on which device from which main step on, micro-step by micro-step.

One file, format `octotune-fill`, documented in docs/fill.md. It holds the main job's plan and the
jobs, so that `check_fill` recomputes all of it: the bubbles from the plan, and that every
micro-step lies inside its bubble by time and memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from octotune.contract.form import add_header
from octotune.contract.plan import Plan
from octotune.contract.quantities import Amount, Count, Index, Name, short
from octotune.errors import BrokenPlanError, InfeasibleError, MalformedError
from octotune.fill.bubbles import Bubble, find_bubbles, resting_bytes
from octotune.fill.jobs import Configuration, FillJob
from octotune.fill.packing import Margins, Packing, Room, best_packing, nearest_miss
from octotune.fill.state import StateMove, state_moves

if TYPE_CHECKING:
    from octotune.check import Checked
    from simulator.fleet import Fleet, Policy, Trace
    from simulator.timeline import Timeline

MOST_NS = 2**60
_TOLERANCE = 1e-9  # of a fraction that comes from one division


class MarginsEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of a bubble is handed over; as `octotune.fill.packing.Margins`."""

    threshold_ns: Count
    switch_ns: Amount
    margin: Annotated[float, Meta(ge=0, lt=1)]

    @property
    def value(self) -> Margins:
        """The margins that the packing works with."""
        return Margins(
            threshold_ns=self.threshold_ns, switch_ns=self.switch_ns, margin=self.margin
        )


class StateEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device's optimizer state on its way; as `octotune.fill.state.StateMove`."""

    device: Index
    num_bytes: Count
    copy_ns: Count
    out_ns: Amount
    back_ns: Amount
    by_ns: Amount


class BubbleEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One bubble of a device; as `octotune.fill.bubbles.Bubble`, and what is handed over of it."""

    after: Name
    before: Name
    start_ns: Amount
    end_ns: Amount
    usable_ns: Amount
    free_bytes: Amount
    copy_ns: Amount


class PackingEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a job runs in the bubbles of a device; `steps[s][b]` are micro-steps of bubble b."""

    job: Index
    device: Index
    configuration: Index
    samples: Count  # a cycle
    steps: Annotated[tuple[tuple[tuple[Index, ...], ...], ...], Meta(min_length=1)]


class RunEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A packing at work in the main steps `[begin, end)`."""

    packing: Index
    begin: Index
    end: Index
    samples: Amount


class FillPredicted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the plan claims.

    `end_ns` is when each job is done, none where it is not; `filled_fraction` the share of all
    idle time, over all devices up to the last run's end, that micro-steps take.
    """

    step_ns: Amount
    steps: Amount
    end_ns: tuple[Amount | None, ...]
    filled_fraction: float


class FillPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that is needed to run fill jobs beside a plan, and to check it."""

    format: Literal["octotune-fill"] = "octotune-fill"
    version: Literal[1] = 1
    plan: Plan
    jobs: tuple[FillJob, ...]
    policy: str
    margins: MarginsEntry
    state_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    state: tuple[StateEntry, ...] = ()
    bubbles: tuple[tuple[BubbleEntry, ...], ...]
    resting_bytes: tuple[Amount, ...]
    packings: tuple[PackingEntry, ...]
    runs: tuple[RunEntry, ...]
    predicted: FillPredicted

    def save(self, path: str | Path) -> None:
        """Write the fill plan as a JSON file, whole or not at all."""
        from octotune.contract.files import write_json

        write_json(self, path)

    def configuration(self, packing: PackingEntry) -> Configuration:
        """Return the configuration that a packing runs."""
        return self.jobs[packing.job].configurations[packing.configuration]


class _PlanHeader(msgspec.Struct):
    format: Literal["octotune-plan"]
    version: Literal[1]


class _Header(msgspec.Struct):
    format: Literal["octotune-fill"]
    version: Literal[1]
    plan: _PlanHeader


add_header(FillPlan, _Header)


def read_fill(source: str | Path) -> FillPlan:
    """Read a fill plan.

    Raises:
        MalformedError: if its form is wrong; one line.
        BrokenPlanError: if the plan in it breaks a rule of its stages or rows.
    """
    from octotune.contract.files import read_file

    return read_file(source, FillPlan)


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


def make_fill_plan(
    plan: Plan,
    jobs: Sequence[FillJob],
    policy: Policy,
    *,
    margins: Margins | None = None,
    state_share: float = 0.0,
    optimal: bool = False,
    time_limit_s: float = 5.0,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> FillPlan:
    """Return what fills a plan's bubbles with jobs, by a policy.

    Args:
        plan: of the main job, checked first.
        jobs: with their configurations (`octotune.fill.jobs.read_jobs`).
        policy: who gets a free device.
        margins: what of a bubble is handed over.
        state_share: of the main job's `state_bytes` that goes to the host between its updates,
            where the copy lane has room (`octotune.fill.state`); 0: none.
        optimal: pack by CP-SAT where that can help.
        time_limit_s: of each of the solver's runs.
        seed: of the solver.
        progress: told the share of the packing that is done.

    Raises:
        InfeasibleError: if a job fits in no bubble; it names the nearest miss.
        ScheduleError, OutOfMemoryError, BrokenPlanError: if the plan breaks a rule.
    """
    from octotune.check import check
    from simulator.fleet import NEVER, Trace, simulate_fleet

    margins = Margins() if margins is None else margins
    timeline = check(plan).timeline
    moves = state_moves(plan, timeline, state_share) if state_share else ()
    bubbles = find_bubbles(timeline, threshold_ns=margins.threshold_ns, moves=moves)
    resting = resting_bytes(timeline)
    rooms = [Room.of(row, rests, margins) for row, rests in zip(bubbles, resting, strict=True)]
    rates = rates_of(
        jobs,
        rooms,
        timeline.step_ns,
        optimal=optimal,
        time_limit_s=time_limit_s,
        seed=seed,
        progress=progress,
    )
    deadlines = [NEVER if job.deadline_ns is None else job.deadline_ns for job in jobs]
    trace = Trace(
        arrival_ns=np.array([job.arrival_ns for job in jobs], dtype=np.int64),
        kind=np.array(rates.kind, dtype=np.int64),
        samples=np.array([job.samples for job in jobs], dtype=np.int64),
        deadline_ns=np.array(deadlines, dtype=np.int64),
        cancel_ns=np.full(len(jobs), NEVER, dtype=np.int64),
    )
    refuse_endless(rates.fleet, trace, lambda job: f"job {short(jobs[job].name)}")
    result = simulate_fleet(rates.fleet, trace, policy)

    kept: dict[tuple[int, int], int] = {}  # (job, configuration) -> its number among those in use
    in_use: list[list[Configuration]] = [[] for _ in jobs]
    packings: list[PackingEntry] = []
    runs: list[RunEntry] = []
    order = np.lexsort((result.run_device, result.run_begin)).tolist()
    for run in order:
        job, device = int(result.run_job[run]), int(result.run_device[run])
        packing = rates.packings[rates.kind[job]][device]
        assert packing is not None  # the fleet gives no job a device that it does not fit
        key = (job, packing.configuration)
        if key not in kept:
            kept[key] = len(in_use[job])
            in_use[job].append(jobs[job].configurations[packing.configuration])
        runs.append(
            RunEntry(
                packing=len(packings),
                begin=int(result.run_begin[run]),
                end=int(result.run_end[run]),
                samples=int(result.run_samples[run]),
            )
        )
        packings.append(
            PackingEntry(
                job=job,
                device=device,
                configuration=kept[key],
                samples=packing.samples,
                steps=packing.steps,
            )
        )
    written = tuple(
        msgspec.structs.replace(job, configurations=tuple(used))
        for job, used in zip(jobs, in_use, strict=True)
    )
    entries = MarginsEntry(
        threshold_ns=margins.threshold_ns, switch_ns=margins.switch_ns, margin=margins.margin
    )
    return FillPlan(
        plan=plan,
        jobs=written,
        policy=policy.name,
        margins=entries,
        state_share=state_share,
        state=_state_entries(moves),
        bubbles=_bubble_entries(bubbles, margins),
        resting_bytes=resting,
        packings=tuple(packings),
        runs=tuple(runs),
        predicted=_predict(written, packings, runs, timeline),
    )


def _state_entries(moves: Sequence[StateMove | None]) -> tuple[StateEntry, ...]:
    return tuple(
        StateEntry(**{field: getattr(move, field) for field in StateEntry.__struct_fields__})
        for move in moves
        if move is not None
    )


def _bubble_entries(
    bubbles: Sequence[Sequence[Bubble]], margins: Margins
) -> tuple[tuple[BubbleEntry, ...], ...]:
    return tuple(
        tuple(
            BubbleEntry(
                after=bubble.after,
                before=bubble.before,
                start_ns=bubble.start_ns,
                end_ns=bubble.end_ns,
                usable_ns=margins.usable_ns(bubble),
                free_bytes=bubble.free_bytes,
                copy_ns=bubble.copy_ns,
            )
            for bubble in row
        )
        for row in bubbles
    )


def _predict(
    jobs: Sequence[FillJob],
    packings: Sequence[PackingEntry],
    runs: Sequence[RunEntry],
    timeline: Timeline,
) -> FillPredicted:
    """Return what jobs, packings and runs come to."""
    step_ns = timeline.step_ns
    made, ends = [0] * len(jobs), [0] * len(jobs)
    filled = 0
    for run in runs:
        packing = packings[run.packing]
        job = jobs[packing.job]
        made[packing.job] += run.samples
        ends[packing.job] = max(ends[packing.job], run.end)
        configuration = job.configurations[packing.configuration]
        cycles = (run.end - run.begin) // len(packing.steps)
        filled += cycles * (packing.samples // configuration.batch_size) * configuration.pass_ns
    steps = max((run.end for run in runs), default=0)
    idle_ns = step_ns * timeline.costs.num_devices - int(timeline.busy_ns.sum())
    return FillPredicted(
        step_ns=step_ns,
        steps=steps,
        end_ns=tuple(
            end * step_ns if done >= job.samples else None
            for job, done, end in zip(jobs, made, ends, strict=True)
        ),
        filled_fraction=filled / (idle_ns * steps) if idle_ns * steps else 0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFill:
    """A fill plan that obeys every rule, and the main plan's numbers."""

    fill: FillPlan
    main: Checked
    predicted: FillPredicted


def check_fill(fill: FillPlan) -> CheckedFill:
    """Recompute a fill plan from the main job's plan and the jobs in it.

    Raises:
        ScheduleError, OutOfMemoryError, BrokenPlanError: if the main plan breaks a rule.
        BrokenPlanError: if bubbles are not those of the plan, a micro-step does not lie inside its
            bubble by time or memory, passes are not whole, runs overlap or claim too much, or a
            prediction is wrong. The first that is found.
    """
    from octotune.check import check

    main = check(fill.plan)
    _check_bubbles(fill, main.timeline)
    for index in range(len(fill.packings)):
        _check_packing(fill, index)
    _check_runs(fill, main.step_ns)
    found = _predict(fill.jobs, fill.packings, fill.runs, main.timeline)
    for name in ("step_ns", "steps", "end_ns"):
        if getattr(found, name) != getattr(fill.predicted, name):
            raise BrokenPlanError(
                f"predicted.{name} is {short(str(getattr(fill.predicted, name)))[1:-1]}; it is "
                f"{short(str(getattr(found, name)))[1:-1]}"
            )
    if not abs(found.filled_fraction - fill.predicted.filled_fraction) <= _TOLERANCE:
        raise BrokenPlanError(
            f"predicted.filled_fraction is {fill.predicted.filled_fraction!r}; it is "
            f"{found.filled_fraction!r}"
        )
    return CheckedFill(fill=fill, main=main, predicted=found)


def _check_bubbles(fill: FillPlan, timeline: Timeline) -> None:
    moves = state_moves(fill.plan, timeline, fill.state_share) if fill.state_share else ()
    if fill.state != _state_entries(moves):
        raise BrokenPlanError(
            f"state has {len(fill.state)} moves, which are not the {len(_state_entries(moves))} "
            f"that the plan's copy lanes allow at a state_share of {fill.state_share}"
        )
    bubbles = find_bubbles(timeline, threshold_ns=fill.margins.threshold_ns, moves=moves)
    expected = _bubble_entries(bubbles, fill.margins.value)
    if len(fill.bubbles) != len(expected):
        raise BrokenPlanError(
            f"bubbles has {len(fill.bubbles)} rows; it has one a device, so {len(expected)}"
        )
    for device, (found, right) in enumerate(zip(fill.bubbles, expected, strict=True)):
        if len(found) != len(right):
            raise BrokenPlanError(
                f"bubbles[{device}] has {len(found)} bubbles; the plan leaves {len(right)} of at "
                f"least {fill.margins.threshold_ns} ns there"
            )
        for index, (one, other) in enumerate(zip(found, right, strict=True)):
            for field in BubbleEntry.__struct_fields__:
                if getattr(one, field) != getattr(other, field):
                    raise BrokenPlanError(
                        f"bubbles[{device}][{index}].{field} is {getattr(one, field)}; by the "
                        f"plan it is {getattr(other, field)}"
                    )
    rests = resting_bytes(timeline)
    if fill.resting_bytes != rests:
        raise BrokenPlanError(
            f"resting_bytes is {list(fill.resting_bytes)}; by the plan it is {list(rests)}"
        )


def _check_packing(fill: FillPlan, index: int) -> None:
    """Refuse a packing that breaks a rule of docs/fill.md, going through its cycle once."""
    packing, place = fill.packings[index], f"packings[{index}]"
    for field, number, most in (
        ("job", packing.job, len(fill.jobs)),
        ("device", packing.device, len(fill.bubbles)),
    ):
        if number >= most:
            raise BrokenPlanError(f"{place}.{field} is {number}; allowed: 0 to {most - 1}")
    job, bubbles = fill.jobs[packing.job], fill.bubbles[packing.device]
    if packing.configuration >= len(job.configurations):
        raise BrokenPlanError(
            f"{place}.configuration is {packing.configuration}; job {short(job.name)} has "
            f"{len(job.configurations)}"
        )
    configuration = fill.configuration(packing)
    resting = fill.resting_bytes[packing.device] - configuration.resident_bytes
    if resting < 0:
        raise BrokenPlanError(
            f"{place}: {configuration.resident_bytes} bytes stay on device {packing.device} "
            f"between bubbles; {fill.resting_bytes[packing.device]} are free all the time"
        )
    at: Counter[int] = Counter()  # how many passes wait for each micro-step
    num, complete = len(configuration.micro_steps), 0
    for step, row in enumerate(packing.steps):
        if len(row) != len(bubbles):
            raise BrokenPlanError(
                f"{place}.steps[{step}] has {len(row)} bubbles; device {packing.device} has "
                f"{len(bubbles)}"
            )
        for b, (order, bubble) in enumerate(zip(row, bubbles, strict=True)):
            spot = f"{place}.steps[{step}][{b}]"
            taken = copies = 0
            for k in order:
                if k >= num:
                    raise BrokenPlanError(f"{spot} has micro-step {k}; there are 0 to {num - 1}")
                if k and not at[k]:
                    raise BrokenPlanError(
                        f"{spot} has micro-step {k}; no pass has come to it, they take their "
                        "micro-steps in order"
                    )
                if job.kind == "training" and k == 0 and at.total():
                    raise BrokenPlanError(
                        f"{spot} begins a pass while another is open; training's follow each other"
                    )
                micro = configuration.micro_steps[k]
                others = at.total() - (1 if k else 0)
                needs = micro.memory_bytes + others * configuration.carried_bytes
                if needs > bubble.free_bytes:
                    raise BrokenPlanError(
                        f"{spot}: micro-step {k} needs {needs} bytes, {others} other open passes "
                        f"included; the bubble has {bubble.free_bytes}"
                    )
                taken, copies = taken + micro.time_ns, copies + micro.copy_ns
                at[k] -= 1 if k else 0
                if k + 1 < num:
                    at[k + 1] += 1
                else:
                    complete += 1
            if taken > bubble.usable_ns:
                raise BrokenPlanError(
                    f"{spot} takes {taken} ns; {bubble.usable_ns} of the bubble are handed over"
                )
            if copies > bubble.end_ns - bubble.start_ns - bubble.copy_ns:
                raise BrokenPlanError(
                    f"{spot} keeps the copy lane busy for {copies} ns; "
                    f"{bubble.end_ns - bubble.start_ns - bubble.copy_ns} are left of it"
                )
            if at.total() * configuration.carried_bytes > resting:
                raise BrokenPlanError(
                    f"{spot} leaves {at.total()} passes open, which keep "
                    f"{at.total() * configuration.carried_bytes} bytes between bubbles; "
                    f"{max(0, resting)} are free all the time"
                )
    if at.total():
        raise BrokenPlanError(f"{place} leaves {at.total()} passes open at the end of its cycle")
    if complete * configuration.batch_size != packing.samples:
        raise BrokenPlanError(
            f"{place}.samples is {packing.samples}; a cycle makes "
            f"{complete * configuration.batch_size}"
        )


def _check_runs(fill: FillPlan, step_ns: int) -> None:
    busy_until: dict[int, tuple[int, int]] = {}  # device -> end, run
    job_until: dict[int, tuple[int, int]] = {}
    made: Counter[int] = Counter()
    for index in sorted(range(len(fill.runs)), key=lambda i: (fill.runs[i].begin, i)):
        run, place = fill.runs[index], f"runs[{index}]"
        if run.packing >= len(fill.packings):
            raise BrokenPlanError(
                f"{place}.packing is {run.packing}; there are {len(fill.packings)} packings"
            )
        packing = fill.packings[run.packing]
        job = fill.jobs[packing.job]
        if run.end < run.begin:
            raise BrokenPlanError(f"{place} is [{run.begin}, {run.end}); it ends after it begins")
        if run.begin * step_ns < job.arrival_ns:
            raise BrokenPlanError(
                f"{place}.begin is step {run.begin}, at {run.begin * step_ns} ns; job "
                f"{short(job.name)} arrives at {job.arrival_ns} ns"
            )
        for taken, number, what in (
            (busy_until, packing.device, f"device {packing.device}"),
            (job_until, packing.job, f"job {short(job.name)}"),
        ):
            before, other = taken.get(number, (0, -1))
            if run.begin < before:
                raise BrokenPlanError(
                    f"{place} begins at step {run.begin}; runs[{other}] has {what} until {before}"
                )
            taken[number] = (run.end, index)
        most = (run.end - run.begin) // len(packing.steps) * packing.samples
        if run.samples > most:
            raise BrokenPlanError(
                f"{place}.samples is {run.samples}; its whole cycles make {most}"
            )
        made[packing.job] += run.samples
        if made[packing.job] > job.samples:
            raise BrokenPlanError(
                f"{place}.samples bring job {short(job.name)} to {made[packing.job]}; it has "
                f"{job.samples}"
            )
