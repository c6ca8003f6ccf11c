"""Interleaved 1F1B: several stages a rank in a loop, microbatches in groups.

Microbatches pass in groups of g: a rank runs the group through its first stage, then through its
second, and so on, before the next group; backwards the same from its last stage. Between the
warmup and the cooldown it runs one forward and one backward in turn.

                 group 0                          group 1
    forward      stage r: 0..g-1   stage r+p: 0..g-1   stage r: g..2g-1   ...
    backward     the same, with the rank's stages from last to first

The paper wants g = p and p | m. Any other m is cut into m // p groups of almost one size, so that
no short group at the end has to wait for itself; a row is made for groups of the larger size, and
the microbatches that do not exist are struck. What is left of an order that runs still runs, since
a microbatch waits for no other, and holds no more memory than before.
"""

from __future__ import annotations

from functools import partial

from octotune.placement import loop
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
from simulator.memory import order_peak_bytes


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
        p rows of 2 v m actions. Rank r starts with (v - 1) g + 2 (p - 1 - r) forwards, fewer for a
        group below p, and has at most one more stage's microbatch in flight than that.

    Raises:
        ScheduleError: if an argument is below 1.

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
    require_positive(group=g)
    return Schedule.from_codes(
        [
            interleaved_row(
                [rank + turn * p for turn in range(v)],
                num_microbatches,
                group=g,
                warmup=(v - 1) * g + _ahead(p - 1 - rank, p, v, g if g < num_microbatches else p),
                backward=Kind.B,
            )
            for rank in range(p)
        ]
    )


def _ahead(hops: int, p: int, v: int, group: int) -> int:
    """Return how many forwards a rank runs ahead of the last one: two a hop, as far as that runs.

    The first rank waits for a forward of the last one a group earlier, which stands behind a
    backward that waits for one of the first rank another group earlier: with 2 g or more forwards
    between the two ranks, the first would wait for itself. A single group waits for no other.
    """
    if v == 1:
        return hops
    return min(2 * hops, hops * (2 * group - 1) // max(1, p - 1))


def default_group(num_devices: int, num_microbatches: int) -> int:
    """Return the group size: p where p | m, else the larger of almost equal groups of at least p.

    With fewer microbatches than devices there is one group of all of them.
    """
    rounds = max(1, num_microbatches // num_devices)
    return -(-num_microbatches // rounds)


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


def interleaved_family(stages_per_device: int) -> Family:
    """Return interleaved 1F1B with v stages a device.

    Where p does not divide m, the group is p if the larger one would not fit into memory.
    """
    v = stages_per_device
    placement = partial(loop, stages_per_device=v)

    def generate(costs: Costs) -> Schedule:
        devices = device_of_rank(costs, placement)
        p, m = len(devices), costs.num_microbatches
        schedule = on_devices(interleaved(p, v, m), devices, costs.num_devices)
        if m > p and m % p and (order_peak_bytes(schedule, costs) > costs.memory_bytes).any():
            return on_devices(interleaved(p, v, m, group=p), devices, costs.num_devices)
        return schedule

    def peak(p: int, m: int) -> float:
        return min(m, ((v - 1) * default_group(p, m) + (2 * p if v > 1 else p + 1) - 1) / v)

    return Family(
        name=f"interleaved-v{v}",
        source="Narayanan et al. 2021, arXiv:2104.04473",
        placement=placement,
        generate=generate,
        original_refuses=refuses_indivisible,
        claimed_peak=peak,
    )
