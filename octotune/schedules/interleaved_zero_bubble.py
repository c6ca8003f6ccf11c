"""Interleaved zero bubble: interleaved 1F1B with B split and half the warmup.

A gradient is upstream after I only, so a rank needs p - 1 - r forwards ahead of the groups where
interleaved 1F1B needs twice that. In the published order W follows its I at a distance of r
microbatches, which keeps all ranks at the memory of the first.
"""

from __future__ import annotations

from functools import partial

from octotune.placement import loop
from octotune.schedules.choose import fitted
from octotune.schedules.family import (
    Family,
    Row,
    device_of_rank,
    require_positive,
)
from octotune.schedules.interleaved import default_group, interleaved_row
from simulator.actions import KIND_MASK, Kind, Schedule
from simulator.costs import Costs


def interleaved_zero_bubble(
    num_devices: int, stages_per_device: int, num_microbatches: int
) -> Schedule:
    """Return the interleaved zero-bubble order on a loop placement, Ws included.

    Args:
        num_devices: p.
        stages_per_device: v; stage s runs on rank s mod p.
        num_microbatches: m, any number; groups as in interleaved 1F1B.

    Returns:
        p rows of 3 v m actions. Rank r starts with (v - 1) g + p - 1 - r forwards and keeps the
        last r Is back from their Ws.

    Raises:
        ScheduleError: if an argument is below 1.

    Source:
        Qi et al. 2024, arXiv:2401.10241, with the loop of Narayanan et al. 2021, arXiv:2104.04473,
        as torch.distributed.pipelining combines them.
    """
    require_positive(
        num_devices=num_devices,
        stages_per_device=stages_per_device,
        num_microbatches=num_microbatches,
    )
    group = default_group(num_devices, num_microbatches)
    return Schedule.from_codes(
        [
            _with_weights(
                interleaved_row(
                    [rank + turn * num_devices for turn in range(stages_per_device)],
                    num_microbatches,
                    group=group,
                    warmup=(stages_per_device - 1) * group + num_devices - 1 - rank,
                    backward=Kind.I,
                ),
                rank,
            )
            for rank in range(num_devices)
        ]
    )


def _with_weights(row: Row, lag: int) -> Row:
    """Return the row with a W after each I but the first `lag`, and the rest at the end."""
    halves = [code for code in row if code & KIND_MASK == Kind.I]
    filled: Row = []
    done = 0
    for code in row:
        filled.append(code)
        if code & KIND_MASK == Kind.I:
            done += 1
            if done > lag:
                filled.append(halves[done - lag - 1] - Kind.I + Kind.W)
    filled += [code - Kind.I + Kind.W for code in halves[max(0, len(halves) - lag) :]]
    return filled


def refuses_uneven_rounds(num_devices: int, num_microbatches: int) -> str | None:
    """Return why an original that cuts m into equal rounds of at least p cannot run, or None."""
    rounds = max(1, num_microbatches // num_devices)
    if num_microbatches % rounds:
        return f"m = {num_microbatches} is not divisible into {rounds} equal rounds"
    return None


def interleaved_zero_bubble_family(stages_per_device: int) -> Family:
    """Return interleaved zero bubble with v stages a device."""
    v = stages_per_device
    placement = partial(loop, stages_per_device=v)

    def generate(costs: Costs) -> Schedule:
        devices = device_of_rank(costs, placement)
        p, m = len(devices), costs.num_microbatches
        order = interleaved_zero_bubble(p, v, m)
        return fitted(costs, devices, [order], most=max(p, default_group(p, m)) * v)

    return Family(
        name=f"interleaved-zb-v{v}",
        source="Qi et al. 2024, arXiv:2401.10241; Narayanan et al. 2021, arXiv:2104.04473",
        placement=placement,
        generate=generate,
        original_refuses=refuses_uneven_rounds,
        adapts_to_memory=True,
        claimed_peak=lambda p, m: min(m, max(p, default_group(p, m))),
    )
