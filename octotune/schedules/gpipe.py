"""GPipe: all forwards, then all backwards.

    rank 0   F0 F1 F2 F3 .. .. .. .. .. .. B0 B1 B2 B3
    rank 1   .. F0 F1 F2 F3 .. .. .. B0 B1 B2 B3 ..

Every rank holds all m microbatches at the turn; nothing is kept shorter.
"""

from __future__ import annotations

from octotune.placement import linear
from octotune.schedules.family import (
    Family,
    action,
    device_of_rank,
    on_devices,
    require_positive,
)
from simulator.actions import Kind, Schedule
from simulator.costs import Costs


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Return GPipe's order; stage s runs on rank s, backwards in the order of the forwards.

    Raises:
        ScheduleError: if either argument is below 1.

    Source:
        Huang et al. 2019, arXiv:1811.06965, section 2.3.
    """
    require_positive(num_stages=num_stages, num_microbatches=num_microbatches)
    microbatches = range(num_microbatches)
    return Schedule.from_codes(
        [
            [action(stage, Kind.F, microbatch) for microbatch in microbatches]
            + [action(stage, Kind.B, microbatch) for microbatch in microbatches]
            for stage in range(num_stages)
        ]
    )


def _generate(costs: Costs) -> Schedule:
    devices = device_of_rank(costs, linear)
    schedule = gpipe(costs.num_stages, costs.num_microbatches)
    return on_devices(schedule, devices, costs.num_devices)


GPIPE = Family(
    name="gpipe",
    source="Huang et al. 2019, arXiv:1811.06965",
    placement=linear,
    generate=_generate,
    claimed_peak=lambda p, m: m,
)
