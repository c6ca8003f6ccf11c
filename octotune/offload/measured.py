"""What copies did in real steps, as a rank reports it: values, to write down and to show."""

from __future__ import annotations

import msgspec


class MeasuredStage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a device that offloads.

    `copied` microbatches left in the last step, of `planned` ones. `bytes` is what one of them
    moved each way and `planned_bytes` the plan's; `offered_bytes` is what could have left: saved
    storages that nobody else holds. `k` is a round trip over the stage's forward and backward in
    the last step, null where nothing was copied.
    """

    stage: int
    copied: int
    planned: int
    bytes: int
    planned_bytes: int
    offered_bytes: int
    k: float | None
    planned_k: float


class LateCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A reload that a backward waited for with everything else there, in so many steps."""

    copy: str
    steps: int
    most_ns: int


class KeptActivation(msgspec.Struct, frozen=True, kw_only=True):
    """An activation that stayed on the device, or a part of it, in so many steps, and why."""

    copy: str
    steps: int
    why: str


class MeasuredOffload(msgspec.Struct, frozen=True, kw_only=True):
    """One device over all steps.

    `saved_peak_bytes` is the most that autograd's saved storages held, by their lifetimes, and
    `planned_saved_peak_bytes` the plan's (saved bytes alone: no state, workspace or gradients).
    `moved_bytes`, `lane_busy` and `waited_for_room_ns` (an action needed memory that copies out
    were to free) are of the last step, both ways together; `host_peak_bytes` is the most that was
    in use on the host, `host_reserved_bytes` what that took.
    """

    device: int
    saved_peak_bytes: int
    planned_saved_peak_bytes: int
    moved_bytes: int
    waited_for_room_ns: int
    lane_busy: float
    host_peak_bytes: int
    host_reserved_bytes: int
    stages: list[MeasuredStage]
    late: list[LateCopy]
    kept: list[KeptActivation]
