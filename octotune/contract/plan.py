"""Plan: partition, placement and schedule of one workload on one cluster, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octotune.contract.cluster import Cluster
from octotune.contract.quantities import Amount, Count, Index
from octotune.contract.workload import Workload
from simulator.actions import CopySchedule, Schedule


class Stage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Consecutive layers `[begin, end)` on one device."""

    layers: tuple[Index, Index]
    device: Index
    recompute: bool = False


class Predicted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the plan claims. `lower_bound_ns` holds over all plans for the same input.

    `baselines` maps a schedule's name to its `step_ns`, or to the reason why it cannot run.
    """

    step_ns: Amount | None = None
    bubble_fraction: float | None = None
    peak_bytes: tuple[Amount, ...] | None = None
    lower_bound_ns: Amount | None = None
    baselines: dict[str, int | str] = {}


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that is needed to run a step, and to check it."""

    format: Literal["octotune-plan"] = "octotune-plan"
    version: Literal[1] = 1
    workload: Workload
    cluster: Cluster
    num_microbatches: Count
    stages: Annotated[tuple[Stage, ...], Meta(min_length=1)]
    actions: tuple[tuple[str, ...], ...]
    offload: tuple[tuple[str, ...], ...] | None = None
    predicted: Predicted | None = None
    search: dict[str, Any] = {}

    def schedule(self) -> Schedule:
        """Return the order of actions. Raises ScheduleError at a word that is no action."""
        return Schedule.from_words(self.actions)

    def copies(self) -> CopySchedule | None:
        """Return the copy lanes. Raises ScheduleError at a word that is no copy."""
        return None if self.offload is None else CopySchedule.from_words(self.offload)

    def save(self, path: str | Path) -> None:
        """Write the plan as a JSON file, whole or not at all."""
        from octotune.contract.files import write_json

        write_json(self, path)
