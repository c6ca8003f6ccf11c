"""1F1B: warmup forwards, then one forward and one backward in turn.

    rank 0   F0 F1 F2 .. .. B0 F3 B1 F4 B2 .. B3 .. B4
    rank 1   .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 .. B4 ..
    rank 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 .. ..

Rank r has at most p - r microbatches in flight: enough to keep it busy while the first comes back,
where transfers are free. The eager variant lets every rank but the last hold one more, so that a
slow transfer hides behind it.
"""

from __future__ import annotations

from octotune.placement import linear
from octotune.schedules.family import (
    Family,
    Row,
    action,
    device_of_rank,
    on_devices,
    refuses_fewer_microbatches,
    require_positive,
)
from simulator.actions import Kind, Schedule
from simulator.costs import Costs
from simulator.errors import ScheduleError


def one_f_one_b(num_stages: int, num_microbatches: int, *, extra_warmup: int = 0) -> Schedule:
    """Return the 1F1B schedule: warmup forwards, then one F and one B in turn.

    Args:
        num_stages: pipeline depth p; stage s runs on rank s.
        num_microbatches: microbatches per step, m.
        extra_warmup: further forwards before the first backward, on every rank but the last.

    Returns:
        p rows of 2 m actions. Row s never has more than min(m, p - s + extra) in flight.

    Raises:
        ScheduleError: if a count is below 1, or the extra below 0.

    Source:
        Narayanan et al. 2021, arXiv:2104.04473, section 2.2; the extra warmup: Zhuang et al. 2023,
        "On optimizing the communication of model parallelism", arXiv:2211.05322, section 4.
    """
    require_positive(num_stages=num_stages, num_microbatches=num_microbatches)
    if extra_warmup < 0:
        raise ScheduleError(f"extra_warmup is {extra_warmup}; it is at least 0")
    last = num_stages - 1
    rows = []
    for stage in range(num_stages):
        warmup = last - stage + (extra_warmup if stage < last else 0)
        rows.append(_row(stage, min(warmup, num_microbatches), num_microbatches))
    return Schedule.from_codes(rows)


def _row(stage: int, warmup: int, num_microbatches: int) -> Row:
    row = [action(stage, Kind.F, microbatch) for microbatch in range(warmup)]
    for microbatch in range(num_microbatches):
        if microbatch + warmup < num_microbatches:
            row.append(action(stage, Kind.F, microbatch + warmup))
        row.append(action(stage, Kind.B, microbatch))
    return row


def _generate(costs: Costs, extra_warmup: int) -> Schedule:
    devices = device_of_rank(costs, linear)
    schedule = one_f_one_b(costs.num_stages, costs.num_microbatches, extra_warmup=extra_warmup)
    return on_devices(schedule, devices, costs.num_devices)


ONE_F_ONE_B = Family(
    name="1f1b",
    source="Narayanan et al. 2021, arXiv:2104.04473",
    placement=linear,
    generate=lambda costs: _generate(costs, 0),
    original_refuses=refuses_fewer_microbatches,
    claimed_peak=lambda p, m: min(m, p),
)

EAGER_ONE_F_ONE_B = Family(
    name="1f1b-eager",
    source="Zhuang et al. 2023, arXiv:2211.05322",
    placement=linear,
    generate=lambda costs: _generate(costs, 1),
    original_refuses=refuses_fewer_microbatches,
    claimed_peak=lambda p, m: min(m, p + 1 if p > 1 else 1),
)
