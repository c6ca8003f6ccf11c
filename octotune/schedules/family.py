"""Family: one published schedule, as something that turns costs into an order of actions.

A generator thinks in *ranks*: position 0 .. p - 1 in the pipeline. Which device plays which rank
is read off the costs, so the same generator serves a pipeline whose devices were reordered and a
cluster some of whose devices hold nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octotune.placement import Placement
from simulator.actions import MICROBATCH_SHIFT, STAGE_SHIFT, Kind, Schedule
from simulator.costs import Costs
from simulator.errors import ScheduleError

Int64 = NDArray[np.int64]

Row = list[int]
"""One rank's packed actions."""

Refusal = Callable[[int, int], str | None]


def never_refuses(num_devices: int, num_microbatches: int) -> str | None:
    """Return None: the original runs with any number of devices and microbatches."""
    return None


def refuses_fewer_microbatches(num_devices: int, num_microbatches: int) -> str | None:
    """Return why an original that needs m >= p cannot run, or None."""
    if num_microbatches < num_devices:
        return f"m = {num_microbatches} is below p = {num_devices}"
    return None


def refuses_indivisible(num_devices: int, num_microbatches: int) -> str | None:
    """Return why an original that needs p | m cannot run, or None."""
    if num_microbatches % num_devices:
        return f"m = {num_microbatches} is not divisible by p = {num_devices}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A published schedule.

    `generate` takes costs whose stages lie on `placement(p)`, p the devices in use, up to a
    renumbering of devices, and returns an order that runs for any number of microbatches.
    `adapts_to_memory`: it keeps within `costs.memory_bytes` where it can and raises
    OutOfMemoryError where it cannot; otherwise its order is what the paper says, and its peak too.
    `claimed_peak(p, m)`, where the source states one: the most microbatches of a whole device's
    activations in flight on any device, for equal stages.
    """

    name: str
    source: str
    placement: Callable[[int], Placement]
    generate: Callable[[Costs], Schedule]
    original_refuses: Refusal = never_refuses
    adapts_to_memory: bool = False
    claimed_peak: Callable[[int, int], float] | None = None


def action(stage: int, kind: Kind, microbatch: int) -> int:
    """Return a packed action."""
    return (stage << STAGE_SHIFT) | (microbatch << MICROBATCH_SHIFT) | kind


def device_of_rank(costs: Costs, placement: Callable[[int], Placement]) -> tuple[int, ...]:
    """Return the device that plays each rank of a placement.

    Raises:
        ScheduleError: if the costs' stages do not lie as the placement has them.
    """
    found = costs.stage_device.tolist()
    wanted = placement(len(set(found)))
    devices: dict[int, int] = {}
    fits = len(found) == len(wanted) and all(
        devices.setdefault(rank, device) == device
        for rank, device in zip(wanted, found, strict=True)
    )
    if not fits or len(set(devices.values())) != len(devices):
        raise ScheduleError(
            f"stages lie on devices {_short(found)}; this schedule wants {_short(wanted)}, "
            "up to the devices' numbers"
        )
    return tuple(devices[rank] for rank in range(len(devices)))


def on_devices(schedule: Schedule, devices: Sequence[int], num_devices: int) -> Schedule:
    """Return the schedule with rank r's row on `devices[r]`, and nothing on the others."""
    rows: list[Sequence[int] | Int64] = [[] for _ in range(num_devices)]
    for rank, device in enumerate(devices):
        rows[device] = schedule.row(rank)
    return Schedule.from_codes(rows)


def numbered(words: Iterable[tuple[int, Kind]], num_microbatches: int) -> Row:
    """Return the actions of a row whose (stage, kind) pairs each count their microbatches up.

    Microbatches that do not exist are struck.
    """
    counts: dict[tuple[int, Kind], int] = {}
    row: Row = []
    for word in words:
        microbatch = counts.get(word, 0)
        counts[word] = microbatch + 1
        if microbatch < num_microbatches:
            row.append(action(word[0], word[1], microbatch))
    return row


def require_positive(**counts: int) -> None:
    """Raise ScheduleError if a count is below 1."""
    for name, count in counts.items():
        if count < 1:
            raise ScheduleError(f"{name} is {count}; it is at least 1")


def _short(devices: Sequence[int]) -> str:
    text = " ".join(map(str, devices[:24]))
    return f"({text}{' ...' if len(devices) > 24 else ''})"
