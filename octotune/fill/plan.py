"""The fill plan: which job runs on which device from which main step on, micro-step by micro-step.

One file, format `octotune-fill`, documented in docs/fill.md. It holds the main job's plan and the
jobs, so that `octotune.fill.check` recomputes all of it: the bubbles from the plan, and that every
micro-step lies inside its bubble by time and memory. `octotune.fill.make` makes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from octotune.contract.form import add_header
from octotune.contract.plan import Plan
from octotune.contract.quantities import Amount, Count, Index, Name
from octotune.fill.bubbles import Bubble
from octotune.fill.jobs import Configuration, FillJob
from octotune.fill.packing import Margins
from octotune.fill.state import StateMove

if TYPE_CHECKING:
    from simulator.timeline import Timeline


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


def state_entries(moves: Sequence[StateMove | None]) -> tuple[StateEntry, ...]:
    """Return moves as they stand in a file."""
    return tuple(
        StateEntry(**{field: getattr(move, field) for field in StateEntry.__struct_fields__})
        for move in moves
        if move is not None
    )


def bubble_entries(
    bubbles: Sequence[Sequence[Bubble]], margins: Margins
) -> tuple[tuple[BubbleEntry, ...], ...]:
    """Return bubbles as they stand in a file, with what is handed over of them."""
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


def predict(
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
