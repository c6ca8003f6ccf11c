"""ZB-H1 and ZB-H2: one stage a device, B split into I and W, and W as the filler.

The upstream rank waits for I only, so gradients come back sooner, and W fills what is left:

    rank 0   F0 F1 F2 .. .. I0 W0 F3 I1 W1 F4 I2 W2 .. I3 ..
    rank 2   .. .. F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 F4 I4 W3

H1 keeps 1F1B's memory, p activations on any device; H2 may hold twice as many and so starts with
enough forwards that the last device never waits. Both keep within a smaller memory limit too: with
fewer forwards ahead where stages are large, and more where it pays.
"""

from __future__ import annotations

from octotune.placement import linear
from octotune.schedules.choose import fitted
from octotune.schedules.family import Family, action, device_of_rank
from octotune.schedules.list_schedule import Rule
from octotune.schedules.rhythm import Rhythm, Trial
from simulator.actions import Kind, Schedule
from simulator.costs import Costs

# found by longer searches on equal stages, at full memory and below
_H1_STARTS = (
    Trial(rhythm=Rhythm.of((0.2,), (2.8,), (0.9,)), rule=Rule(window=1.5, slack=0.0)),
    Trial(rhythm=Rhythm.of((0.5,), (2.4,), (2.6,)), rule=Rule(window=0.5, slack=0.0)),
    Trial(rhythm=Rhythm.of((1.3,), (3.5,), (-0.9,)), rule=Rule(window=1.5, slack=0.7)),
    Trial(rhythm=Rhythm.of((1.1,), (1.5,), (2.0,)), rule=Rule(window=0.25, slack=0.3)),
    Trial(
        rhythm=Rhythm.of((-0.12,), (2.88,), (-0.34,)),
        rule=Rule(window=0.25, slack=0.0, delay=0.5, backlog=2),
    ),
    Trial(
        rhythm=Rhythm.of((1.0,), (0.1,), (2.0,)),
        rule=Rule(window=100.0, slack=0.7, delay=0.0, backlog=4),
        ideal=True,
    ),
    Trial(rhythm=Rhythm.of((1.0,), (2.0,), (1.0,)), rule=Rule(window=100.0, slack=0.0)),
)
_H2_STARTS = (
    Trial(rhythm=Rhythm.of((1.5,), (7.5,), (11.9,)), rule=Rule(window=100.0, slack=0.9)),
    Trial(rhythm=Rhythm.of((2.5,), (4.3,), (8.9,)), rule=Rule(window=100.0, slack=0.3)),
    Trial(rhythm=Rhythm.of((4.3,), (1.3,), (2.9,)), rule=Rule(window=0.5, slack=0.0)),
    Trial(rhythm=Rhythm.of((2.1,), (10.3,), (2.8,)), rule=Rule(window=0.0, slack=0.9)),
)


def zb_order(num_stages: int, num_microbatches: int, *, most: int) -> Schedule:
    """Return each rank's order of F and I, without W: 1F1B's, with as many ahead as `most` lets.

    Source:
        Qi et al. 2024, arXiv:2401.10241, section 2.
    """
    extra = max(0, most - num_stages)
    rows = []
    for rank in range(num_stages):
        ahead = num_stages - 1 - rank
        # twice the distance to the loss, as far as the limit goes
        warmup = min(num_microbatches, most - 1, ahead + min(ahead, extra))
        row = [action(rank, Kind.F, microbatch) for microbatch in range(warmup)]
        for microbatch in range(num_microbatches):
            if microbatch + warmup < num_microbatches:
                row.append(action(rank, Kind.F, microbatch + warmup))
            row.append(action(rank, Kind.I, microbatch))
        rows.append(row)
    return Schedule.from_codes(rows)


def _generate(costs: Costs, depths: int) -> Schedule:
    devices = device_of_rank(costs, linear)
    p, m = len(devices), costs.num_microbatches
    orders = [zb_order(p, m, most=limit) for limit in sorted({p, depths * p})]
    starts = _H1_STARTS if depths == 1 else _H2_STARTS + _H1_STARTS
    return fitted(costs, devices, orders, starts, most=depths * p)


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
