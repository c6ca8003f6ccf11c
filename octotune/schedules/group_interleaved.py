"""GIS and GIS-H: interleaved in groups of g microbatches, B split, W soon after I.

As interleaved 1F1B, with a warmup of (v - 1) g + p - 1 - r forwards. The smaller the group, the
shorter a stage's activations live: g (v - 1) + p of them at the peak of rank 0. Below g = p the
group is over before its first microbatch is back, and (v - 1)(p - g) slots are lost. GIS takes
g = p, GIS-H the smallest group that can run, half of it.
"""

from __future__ import annotations

from functools import partial

from octotune.placement import loop
from octotune.schedules.choose import fitted
from octotune.schedules.family import (
    Family,
    device_of_rank,
    refuses_indivisible,
    require_positive,
)
from octotune.schedules.interleaved import interleaved_row
from simulator.actions import Kind, Schedule
from simulator.costs import Costs
from simulator.errors import ScheduleError


def group_interleaved(
    num_devices: int, stages_per_device: int, num_microbatches: int, *, group: int
) -> Schedule:
    """Return the order of F and I, without W, on a loop placement.

    Args:
        num_devices: p.
        stages_per_device: v; stage s runs on rank s mod p.
        num_microbatches: m, any number.
        group: g, from ceil(p / 2) to p.

    Returns:
        p rows of 2 v m actions; with each W right after its I, rank 0 has g (v - 1) + p
        activations in flight.

    Raises:
        ScheduleError: if a count is below 1, or the group out of its range.

    Source:
        Wan et al. 2025, PipeOffload, arXiv:2503.01328, section 4.
    """
    require_positive(
        num_devices=num_devices,
        stages_per_device=stages_per_device,
        num_microbatches=num_microbatches,
    )
    p, v = num_devices, stages_per_device
    if not half_group(p) <= group <= p:
        raise ScheduleError(f"group is {group}; with p = {p} it is from {half_group(p)} to {p}")
    return Schedule.from_codes(
        [
            interleaved_row(
                [rank + turn * p for turn in range(v)],
                num_microbatches,
                group=group,
                warmup=(v - 1) * group + p - 1 - rank,
                backward=Kind.I,
            )
            for rank in range(p)
        ]
    )


def half_group(num_devices: int) -> int:
    """Return ceil(p / 2), the smallest group that does not wait for itself."""
    return -(-num_devices // 2)


def group_interleaved_family(
    stages_per_device: int, *, half: bool = False, group: int | None = None
) -> Family:
    """Return GIS with v stages a device: g = p, or half of it (GIS-H), or any other group."""
    v = stages_per_device
    placement = partial(loop, stages_per_device=v)

    def size(p: int) -> int:
        if group is not None:
            return group
        return half_group(p) if half else p

    def generate(costs: Costs) -> Schedule:
        devices = device_of_rank(costs, placement)
        p, m = len(devices), costs.num_microbatches
        # groups of almost one size, where they are not too small, beside full ones and a rest
        even = -(-m // -(-m // size(p)))
        orders = [
            group_interleaved(p, v, m, group=group)
            for group in sorted({size(p), max(half_group(p), even)})
        ]
        return fitted(costs, devices, orders, most=size(p) * (v - 1) + p)

    suffix = f"-g{group}" if group is not None else ""
    return Family(
        name=f"gis{'-h' if half else ''}-v{v}{suffix}",
        source="Wan et al. 2025, arXiv:2503.01328, section 4",
        placement=placement,
        generate=generate,
        original_refuses=refuses_indivisible,
        adapts_to_memory=True,
        claimed_peak=lambda p, m: min(m, (size(p) * (v - 1) + p) / v),
    )
