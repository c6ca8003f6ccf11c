"""Looped BFS: every microbatch through one stage before the next, stages in a loop.

    rank 0   0F0 0F1 0F2 2F0 2F1 2F2 .. .. .. .. 2B2 2B1 2B0 .. .. 0B2 0B1 0B0
    rank 1   .. 1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 .. .. 1B2 1B1 1B0

Breadth first: all forwards before any backward, as in GPipe, but a stage's gradients are complete
early, so that their reduction hides behind the stages still to come. Backwards take the
microbatches from the last to the first.
"""

from __future__ import annotations

from functools import partial

from octotune.placement import loop
from octotune.schedules.family import (
    Family,
    action,
    device_of_rank,
    on_devices,
    require_positive,
)
from simulator.actions import Kind, Schedule
from simulator.costs import Costs


def looped_bfs(num_devices: int, stages_per_device: int, num_microbatches: int) -> Schedule:
    """Return looped breadth-first on a loop placement.

    Returns:
        p rows of 2 v m actions; every rank holds all v m activations at the turn.

    Raises:
        ScheduleError: if an argument is below 1.

    Source:
        Lamy-Poirier 2023, arXiv:2211.05953, section 4.
    """
    require_positive(
        num_devices=num_devices,
        stages_per_device=stages_per_device,
        num_microbatches=num_microbatches,
    )
    rows = []
    for rank in range(num_devices):
        stages = range(rank, num_devices * stages_per_device, num_devices)
        rows.append(
            [action(stage, Kind.F, mb) for stage in stages for mb in range(num_microbatches)]
            + [
                action(stage, Kind.B, mb)
                for stage in reversed(stages)
                for mb in reversed(range(num_microbatches))
            ]
        )
    return Schedule.from_codes(rows)


def looped_bfs_family(stages_per_device: int) -> Family:
    """Return looped BFS with v stages a device."""
    placement = partial(loop, stages_per_device=stages_per_device)

    def generate(costs: Costs) -> Schedule:
        devices = device_of_rank(costs, placement)
        schedule = looped_bfs(len(devices), stages_per_device, costs.num_microbatches)
        return on_devices(schedule, devices, costs.num_devices)

    return Family(
        name=f"looped-bfs-v{stages_per_device}",
        source="Lamy-Poirier 2023, arXiv:2211.05953",
        placement=placement,
        generate=generate,
        claimed_peak=lambda p, m: m,
    )
