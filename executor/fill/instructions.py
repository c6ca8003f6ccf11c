"""Bubble instructions: a fill plan as one rank meets it, action by action."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from executor.errors import MismatchError
from octotune.contract import Plan
from octotune.fill.bubbles import END, OPTIMIZER
from octotune.fill.plan import FillPlan

BEFORE_OPTIMIZER, TAIL = -1, -2


@dataclass(frozen=True, slots=True, kw_only=True)
class BubbleInstruction:
    """One bubble of this rank, as the runtime meets it.

    `position` is that of the action after it in the rank's row, or BEFORE_OPTIMIZER, or TAIL.
    `index` is its number among the device's bubbles in the fill plan.
    """

    index: int
    position: int
    after: str
    before: str
    length_ns: int
    usable_ns: int
    free_bytes: int
    copy_ns: int


def bubble_instructions(
    fill: FillPlan, device: int, row: Sequence[str]
) -> tuple[BubbleInstruction, ...]:
    """Return a device's bubbles by the actions after them; `row` are the words of its actions."""
    place = {word: position for position, word in enumerate(row)}
    place |= {OPTIMIZER: BEFORE_OPTIMIZER, END: TAIL}
    return tuple(
        BubbleInstruction(
            index=index,
            position=place[bubble.before],
            after=bubble.after,
            before=bubble.before,
            length_ns=bubble.end_ns - bubble.start_ns,
            usable_ns=bubble.usable_ns,
            free_bytes=bubble.free_bytes,
            copy_ns=bubble.copy_ns,
        )
        for index, bubble in enumerate(fill.bubbles[device])
    )


def refuse_other_plan(mine: Plan, fill: FillPlan) -> None:
    """Raise MismatchError where the fill plan's main job is not the plan that runs."""
    theirs = fill.plan
    for name in ("num_microbatches", "stages", "actions", "offload", "cluster", "workload"):
        if getattr(mine, name) != getattr(theirs, name):
            what = (
                f"{name} is {theirs.num_microbatches}, the plan's {mine.num_microbatches}"
                if name == "num_microbatches"
                else f"its {name} differ"
            )
            raise MismatchError(
                f"the fill plan is for another plan: {what}; make one with "
                "python -m octotune fill --plan for this plan"
            )


def following(fill: FillPlan) -> list[tuple[int, int]]:
    """Return the runs of each job that follow each other, by number."""
    last: dict[int, int] = {}
    found: list[tuple[int, int]] = []
    for number in sorted(range(len(fill.runs)), key=lambda n: (fill.runs[n].begin, n)):
        job = fill.packings[fill.runs[number].packing].job
        if job in last:
            found.append((last[job], number))
        last[job] = number
    return found


def home(fill: FillPlan, number: int) -> tuple[int, int]:
    """Return where a run is: device, configuration."""
    packing = fill.packings[fill.runs[number].packing]
    return packing.device, packing.configuration


def moves_at_all(fill: FillPlan) -> bool:
    """Whether any job goes on elsewhere."""
    return any(home(fill, before) != home(fill, after) for before, after in following(fill))
