"""Interleaved 1F1B: several stages a rank in a loop, microbatches in groups.

Microbatches pass in groups of g: a rank runs the group through its first stage, then through its
second, and so on, before the next group; backwards the same from its last stage. Between the
warmup and the cooldown it runs one forward and one backward in turn.

                 group 0                          group 1
    forward      stage r: 0..g-1   stage r+p: 0..g-1   stage r: g..2g-1   ...
    backward     the same, with the rank's stages from last to first

The paper wants g = p and p | m. Any other m is taken as the next number of microbatches that
fits, and the surplus ones are struck from every row: what is left of an order that runs still
runs, since a microbatch waits for no other, and holds no more memory than before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from octotune.placement import Placement, loop
from octotune.schedules.family import (
    Family,
    Row,
    action,
    device_of_rank,
    on_devices,
    refuses_indivisible,
    require_positive,
)
from simulator.actions import Kind, Schedule
from simulator.costs import Costs


def interleaved(
    num_devices: int, stages_per_device: int, num_microbatches: int, *, group: int | None = None
) -> Schedule:
    """Return interleaved 1F1B on a loop placement.

    Args:
        num_devices: p.
        stages_per_device: v; stage s runs on rank s mod p.
        num_microbatches: m, any number.
        group: microbatches that pass a stage in a row, g. By default `default_group(p, m)`.

    Returns:
        p rows of 2 v m actions. Rank r starts with (v - 1) g + 2 (p - 1 - r) forwards and so has
        at most one more stage's microbatch in flight than that.

    Raises:
        ScheduleError: if an argument is below 1, or the group so small that the order cannot run.

    Source:
        Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    """
    require_positive(
        num_devices=num_devices,
        stages_per_device=stages_per_device,
        num_microbatches=num_microbatches,
    )
    p, v = num_devices, stages_per_device
    g = default_group(p, num_microbatches) if group is None else group
    return Schedule.from_codes(
        [
            interleaved_row(
                [rank + turn * p for turn in range(v)],
                num_microbatches,
                group=g,
                warmup=(v - 1) * g + 2 * (p - 1 - rank) if v > 1 else p - 1 - rank,
                backward=Kind.B,
            )
            for rank in range(p)
        ]
    )


def default_group(num_devices: int, num_microbatches: int) -> int:
    """Return the group size: p, or what cuts m into equal groups of at least p where that exists.

    With fewer microbatches than devices there is one group of all of them.
    """
    rounds = max(1, num_microbatches // num_devices)
    return num_devices if num_microbatches % rounds else num_microbatches // rounds


def interleaved_row(
    stages: list[int], num_microbatches: int, *, group: int, warmup: int, backward: Kind
) -> Row:
    """Return one rank's row: `warmup` forwards, then forward and backward in turn.

    `stages` are the rank's own, in the order its forwards take them; backwards take them from the
    end. The row is made for the next multiple of the group and the surplus is left out.
    """
    groups = -(-num_microbatches // group)
    forwards = [
        (stage, number * group + index)
        for number in range(groups)
        for stage in stages
        for index in range(group)
    ]
    backwards = [
        (stage, number * group + index)
        for number in range(groups)
        for stage in reversed(stages)
        for index in range(group)
    ]
    warmup = min(warmup, len(forwards))
    row = [
        action(stage, Kind.F, microbatch)
        for stage, microbatch in forwards[:warmup]
        if microbatch < num_microbatches
    ]
    for position, (stage, microbatch) in enumerate(backwards):
        if position + warmup < len(forwards):
            next_stage, next_microbatch = forwards[position + warmup]
            if next_microbatch < num_microbatches:
                row.append(action(next_stage, Kind.F, next_microbatch))
        if microbatch < num_microbatches:
            row.append(action(stage, backward, microbatch))
    return row


def _generate(costs: Costs, placement: Callable[[int], Placement]) -> Schedule:
    devices = device_of_rank(costs, placement)
    schedule = interleaved(len(devices), costs.num_stages // len(devices), costs.num_microbatches)
    return on_devices(
        [schedule.row(rank) for rank in range(len(devices))], devices, costs.num_devices
    )


def interleaved_family(stages_per_device: int) -> Family:
    """Return interleaved 1F1B with v stages a device."""
    v = stages_per_device
    placement = partial(loop, stages_per_device=v)
    return Family(
        name=f"interleaved-v{v}",
        source="Narayanan et al. 2021, arXiv:2104.04473",
        placement=placement,
        generate=lambda costs: _generate(costs, placement),
        original_refuses=refuses_indivisible,
        claimed_peak=lambda p, m: min(m, p + (p - 1) / v),
    )
