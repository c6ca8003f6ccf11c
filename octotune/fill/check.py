"""Check a fill plan by docs/fill.md, without knowing how it was made.

The main job's plan is checked first, and its bubbles found again; then each packing is walked
through once, pass by pass, and the runs are laid side by side. The first rule broken is raised.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octotune.contract.quantities import short
from octotune.errors import BrokenPlanError
from octotune.fill.bubbles import find_bubbles, resting_bytes
from octotune.fill.plan import (
    BubbleEntry,
    FillPlan,
    FillPredicted,
    bubble_entries,
    predict,
    state_entries,
)
from octotune.fill.state import state_moves

if TYPE_CHECKING:
    from octotune.check import Checked
    from simulator.timeline import Timeline

_TOLERANCE = 1e-9  # of a fraction that comes from one division


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
    found = predict(fill.jobs, fill.packings, fill.runs, main.timeline)
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
    if fill.state != state_entries(moves):
        raise BrokenPlanError(
            f"state has {len(fill.state)} moves, which are not the {len(state_entries(moves))} "
            f"that the plan's copy lanes allow at a state_share of {fill.state_share}"
        )
    bubbles = find_bubbles(timeline, threshold_ns=fill.margins.threshold_ns, moves=moves)
    expected = bubble_entries(bubbles, fill.margins.value)
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
