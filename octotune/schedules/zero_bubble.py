"""ZB-H1 and ZB-H2: one stage a device, B split into I and W, and W as the filler.

The upstream rank waits for I only, so gradients come back sooner, and W fills what is left:

    rank 0   F0 F1 F2 .. .. I0 W0 F3 I1 W1 F4 I2 W2 .. I3 ..
    rank 2   .. .. F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 F4 I4 W3

H1 keeps 1F1B's memory, p activations on any device; H2 may hold twice as many and so starts with
enough forwards that the last device never waits.
"""

from __future__ import annotations

from collections.abc import Iterator

from octotune.placement import linear
from octotune.schedules.choose import best_filled
from octotune.schedules.family import (
    Family,
    action,
    device_of_rank,
    on_devices,
)
from octotune.schedules.weights import world_of
from simulator.actions import Kind, Schedule
from simulator.costs import Costs


def _orders(costs: Costs, most: int) -> Iterator[Schedule]:
    devices = device_of_rank(costs, linear)
    p, m = len(devices), costs.num_microbatches
    for extra in sorted({0, 1, 2, (most - p) // 2, most - p}):
        rows = []
        for rank in range(p):
            warmup = min(m, most - 1, p - 1 - rank + (extra if rank < p - 1 else 0))
            row = [action(rank, Kind.F, microbatch) for microbatch in range(warmup)]
            for microbatch in range(m):
                if microbatch + warmup < m:
                    row.append(action(rank, Kind.F, microbatch + warmup))
                row.append(action(rank, Kind.I, microbatch))
            rows.append(row)
        yield on_devices(rows, devices, costs.num_devices)


def _generate(costs: Costs, depths: int) -> Schedule:
    most = depths * costs.num_stages
    return best_filled(_orders(costs, most), world_of(costs, most=most), costs)


ZB_H1 = Family(
    name="zb-h1",
    source="Qi et al. 2024, arXiv:2401.10241, section 2",
    placement=linear,
    generate=lambda costs: _generate(costs, 1),
    adapts_to_memory=True,
    claimed_peak=lambda p, m: min(m, p),
)

ZB_H2 = Family(
    name="zb-h2",
    source="Qi et al. 2024, arXiv:2401.10241, section 2",
    placement=linear,
    generate=lambda costs: _generate(costs, 2),
    adapts_to_memory=True,
    claimed_peak=lambda p, m: min(m, 2 * p),
)
