"""Choosing: the best of several orders of one family, by playing them.

A published schedule is an order for equal stages. For given costs a family has that order, the
same with its Ws placed anew, and what a search over its rhythm finds; the simulator, which knows
the channels and the optimizer too, decides between the best of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from octotune.schedules.family import on_devices
from octotune.schedules.rhythm import Trial, search
from octotune.schedules.weights import (
    DONE,
    TOO_BIG,
    TOO_MANY,
    Played,
    place_weights,
    without_weights,
)
from octotune.schedules.world import World, world_of
from simulator.actions import KIND_MASK, Kind, Schedule, pack
from simulator.costs import Costs
from simulator.errors import OutOfMemoryError, ScheduleError
from simulator.memory import readable

SLACKS = (0.0, 0.3, 0.5, 1.0)
FINALISTS = 5


def fitted(
    costs: Costs,
    devices: Sequence[int],
    orders: Iterable[Schedule] = (),
    starts: Iterable[Trial] = (),
    *,
    most: int | None = None,
    split: bool = True,
) -> Schedule:
    """Return the order of the shortest step that keeps within the memory.

    Args:
        costs: of the stages in the family's placement.
        devices: the device that plays each rank.
        orders: one row a rank, of F and B, or of F and I with or without W. Each is tried as it
            is and with all its Ws placed anew.
        starts: rhythms to search from.
        most: the family's own limit of activations in flight on a device.
        split: whether the rhythms run I and W, or B.

    Raises:
        OutOfMemoryError: if none of them fits into the devices' memory.
        ScheduleError: if none of them runs for another reason.
    """
    world = world_of(costs, devices, most=most)
    failed: Played | None = None
    found: list[Played] = []
    for order in orders:
        for played in _filled(order, world):
            if played.state == DONE:
                found.append(played)
            else:
                failed = played
    trials = list(starts)
    if trials:
        best = min(found, key=lambda played: played.end_ns, default=None)
        played_search = search(trials, world, split=split, incumbent=best)
        if played_search is None:
            # one microbatch after the other takes the least memory of all orders
            played_search = place_weights(_one_by_one(world, split), world)
        if played_search.state == DONE:
            found.append(played_search)
        else:
            failed = played_search
    if not found:
        assert failed is not None
        raise _error(failed, costs, devices)
    return shortest(found, costs, devices)


def shortest(found: Iterable[Played], costs: Costs, devices: Sequence[int]) -> Schedule:
    """Return, of the orders that end first, the one with the shortest simulated step."""
    from simulator.engine import simulate

    distinct: dict[bytes, Played] = {}
    for played in sorted(found, key=lambda played: played.end_ns):
        distinct.setdefault(played.codes.tobytes(), played)
        if len(distinct) == FINALISTS:
            break
    schedules = [
        on_devices(played.schedule(), devices, costs.num_devices) for played in distinct.values()
    ]
    if len(schedules) == 1:
        return schedules[0]
    return min(schedules, key=lambda schedule: simulate(schedule, costs).step_ns)


def most_in_flight(order: Schedule) -> int:
    """Return the most activations that any device has in flight: F begun, W or B not ended."""
    kinds = order.codes & KIND_MASK
    change = (kinds == Kind.F).astype(np.int64) - ((kinds == Kind.B) | (kinds == Kind.W))
    return max(
        (
            int(np.cumsum(change[begin:end]).max())
            for begin, end in pairwise(order.offsets.tolist())
            if end > begin
        ),
        default=0,
    )


def _filled(order: Schedule, world: World) -> Iterable[Played]:
    kinds = order.codes & KIND_MASK
    has_weights = bool((kinds == Kind.W).any())
    if has_weights or not (kinds == Kind.I).any():
        yield place_weights(order, world)
    if has_weights:
        order = without_weights(order)
    if (kinds == Kind.I).any():
        for slack in SLACKS:
            yield place_weights(order, world, slack=slack)


def _one_by_one(world: World, split: bool) -> Schedule:
    rows = []
    for device in range(world.num_devices):
        stages = world.local[world.first[device] : world.first[device + 1]].tolist()
        backs = (Kind.I, Kind.W) if split else (Kind.B,)
        rows.append(
            [
                code
                for microbatch in range(world.num_microbatches)
                for code in (
                    *(pack(stage, Kind.F, microbatch) for stage in stages),
                    *(
                        pack(stage, back, microbatch)
                        for stage in reversed(stages)
                        for back in backs
                    ),
                )
            ]
        )
    return Schedule.from_codes(rows)


def _error(
    failed: Played, costs: Costs, devices: Sequence[int]
) -> OutOfMemoryError | ScheduleError:
    device = devices[failed.device]
    if failed.state == TOO_BIG:
        needed = failed.needed + int(costs.static_bytes[device])
        limit = int(costs.memory_bytes[device])
        return OutOfMemoryError(
            f"device {device} needs {readable(needed)} for this schedule, it has "
            f"{readable(limit)}: {readable(needed - limit)} too little; "
            "give it fewer layers, recompute, or take a schedule with less in flight",
            f"device {device}",
            needed,
            limit,
        )
    assert failed.state == TOO_MANY, "the orders of a family can run"
    return ScheduleError(
        f"device {device} would have {failed.needed} activations in flight; "
        f"this schedule allows {failed.needed - 1}"
    )
