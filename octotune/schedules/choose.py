"""Choosing: the best of several candidate orders, by playing them."""

from __future__ import annotations

from collections.abc import Iterable

from octotune.schedules.weights import DONE, STUCK, TOO_BIG, Played, World, place_weights
from simulator.actions import Schedule
from simulator.costs import Costs
from simulator.errors import OutOfMemoryError, ScheduleError

SLACKS = (0.0, 0.5, 1.0)


def best_filled(orders: Iterable[Schedule], world: World, costs: Costs) -> Schedule:
    """Return the order of F and I that ends first once its Ws are placed, Ws included.

    Every order is tried with W placement from eager to reluctant; the first of equals wins.

    Raises:
        OutOfMemoryError: if none fits into the devices' memory.
    """
    best: Played | None = None
    failed: Played | None = None
    for order in orders:
        for slack in SLACKS:
            played = place_weights(order, world, slack=slack)
            if played.state == DONE:
                if best is None or played.end_ns < best.end_ns:
                    best = played
            else:
                failed = played
                break
    if best is None:
        assert failed is not None
        raise no_room(failed, costs)
    return best.schedule()


def no_room(failed: Played, costs: Costs) -> OutOfMemoryError | ScheduleError:
    """Return the error that says why an order could not be played."""
    device = failed.device
    if failed.state == TOO_BIG:
        needed = failed.needed + int(costs.static_bytes[device])
        limit = int(costs.memory_bytes[device])
        return OutOfMemoryError(
            f"device {device} needs {needed} bytes for this schedule and has {limit}; "
            "use smaller stages, recompute, or a schedule with fewer microbatches in flight",
            f"device {device}",
            needed,
            limit,
        )
    if failed.state == STUCK:
        return ScheduleError(f"device {device} waits for an action that never comes")
    return ScheduleError(
        f"device {device} would have {failed.needed} activations in flight; "
        f"this schedule allows {failed.needed - 1}"
    )
