"""Plan: partition, placement and schedule of one workload on one cluster, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octotune.contract.cluster import Cluster
from octotune.contract.quantities import Amount, Index, Microbatches
from octotune.contract.workload import Workload
from octotune.errors import BrokenPlanError
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
    baselines: dict[str, Annotated[int, Meta(ge=0)] | str] = {}


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that is needed to run a step, and to check it.

    A Plan that exists has stages that cover each layer once, on devices of its cluster, and one
    row a device; making any other raises BrokenPlanError. Whether its orders can run and fit the
    memory is `octotune.check`'s to say.
    """

    format: Literal["octotune-plan"] = "octotune-plan"
    version: Literal[1] = 1
    workload: Workload
    cluster: Cluster
    num_microbatches: Microbatches
    stages: tuple[Stage, ...]
    actions: tuple[tuple[str, ...], ...]
    offload: tuple[tuple[str, ...], ...] | None = None
    predicted: Predicted | None = None
    search: dict[str, Any] = {}

    def __post_init__(self) -> None:
        num_layers, num_devices = len(self.workload.layers), len(self.cluster.devices)
        covered = 0
        for index, stage in enumerate(self.stages):
            begin, end = stage.layers
            if begin != covered or not begin < end <= num_layers:
                raise BrokenPlanError(
                    f"stages[{index}].layers is [{begin}, {end}]; stages are consecutive and not "
                    f"empty, so it is [{covered}, end] with end from {covered + 1} to {num_layers}"
                    if covered < num_layers
                    else f"stages[{index}].layers is [{begin}, {end}]; the stages before it "
                    f"hold all {num_layers} layers"
                )
            if stage.device >= num_devices:
                raise BrokenPlanError(
                    f"stages[{index}].device is {stage.device}; the cluster has the devices "
                    f"0 to {num_devices - 1}"
                )
            covered = end
        if covered < num_layers:
            raise BrokenPlanError(
                f"stages hold {covered} of {num_layers} layers; each layer is in exactly one stage"
            )
        rows = (("actions", self.actions), ("offload", self.offload))
        for field, found in rows:
            if found is not None and len(found) != num_devices:
                raise BrokenPlanError(
                    f"{field} has {len(found)} rows; it has one a device, so {num_devices}"
                )

    def schedule(self) -> Schedule:
        """Return the order of actions. Raises ScheduleError at a word that is no action."""
        return Schedule.from_words(self.actions)

    def copies(self) -> CopySchedule | None:
        """Return the copy lanes. Raises ScheduleError at a word that is no copy."""
        return None if self.offload is None else CopySchedule.from_words(self.offload)

    @property
    def num_offloaded(self) -> int:
        """How many of the stages' microbatches leave for the host and come back."""
        return sum(len(lane) for lane in self.offload or ()) // 2

    def save(self, path: str | Path) -> None:
        """Write the plan as a JSON file, whole or not at all."""
        from octotune.contract.files import write_json

        write_json(self, path)
