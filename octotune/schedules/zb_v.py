"""ZB-V: two stages a device in a V, B split, no more memory than 1F1B.

Device 0 holds the first and the last stage, so the loss is back where the microbatch came in.
With F = I = W nothing waits between warmup and cooldown. In the paper's order a device goes down
the V as far as its position allows, then up and back one for one, and W fills.
"""

from __future__ import annotations

from octotune.placement import v_shape
from octotune.schedules.choose import fitted
from octotune.schedules.family import (
    Family,
    Row,
    device_of_rank,
    numbered,
    require_positive,
)
from octotune.schedules.list_schedule import Rule
from octotune.schedules.rhythm import Rhythm, Trial
from simulator.actions import Kind, Schedule
from simulator.costs import Costs

# found by longer searches on equal stages
_STARTS = (
    Trial(rhythm=Rhythm.of((2, 3), (1, 1), (1, 1, 1)), rule=Rule(window=1.0, slack=0.5)),
    Trial(rhythm=Rhythm.of((2, 2), (1, 2), (1, 1, 1)), rule=Rule(window=1.0, slack=0.0)),
    Trial(rhythm=Rhythm.of((2, 4), (4, 2), (1, 1, 1)), rule=Rule(window=1.0, slack=0.5)),
    Trial(rhythm=Rhythm.of((3, 3), (3, 3), (3, 1, 1)), rule=Rule(window=0.5, slack=0.5)),
    Trial(rhythm=Rhythm.of((3, 1), (1, 3), (1, 1, 1)), rule=Rule(window=1.0, slack=0.5)),
    Trial(rhythm=Rhythm.of((2, 3.2), (1.4, 3.2), (1.2, -2, 4.6)), rule=Rule(1.5, slack=0.7)),
    Trial(
        rhythm=Rhythm.of((2, 1.8), (0.65, 3.3), (1, 1.5, 3.8), on_costs=True),
        rule=Rule(window=2.0, slack=0.7),
    ),
    Trial(rhythm=Rhythm.even(2), rule=Rule(window=100.0, slack=0.0)),
)


def zb_v(num_devices: int, num_microbatches: int) -> Schedule:
    """Return the paper's order, Ws included, on the V placement.

    Args:
        num_devices: p; device d holds stages d and 2p - 1 - d.
        num_microbatches: m. The pattern needs 2p - 1; with fewer, the surplus is struck.

    Returns:
        p rows of 6 m actions; no device has more than 2p activations in flight.

    Raises:
        ScheduleError: if an argument is below 1.

    Source:
        Qi et al. 2024, arXiv:2401.10241, section 6.
    """
    require_positive(num_devices=num_devices, num_microbatches=num_microbatches)
    p = num_devices
    full = max(2 * p - 1, num_microbatches)
    rows: list[Row] = []
    for rank in range(p):
        down, up = rank, 2 * p - 1 - rank
        words: list[tuple[int, Kind]] = [(down, Kind.F)] * (2 * (p - rank) - 1)
        words += [(up, Kind.F), (down, Kind.F)] * rank
        words += [(up, Kind.F), (up, Kind.I), (up, Kind.W)] * (p - rank)
        down_begun = 2 * p - 1 - rank
        for _ in range(p, full):
            if down_begun < full:
                words.append((down, Kind.F))
                down_begun += 1
            words += [(down, Kind.I), (down, Kind.W), (up, Kind.F), (up, Kind.I), (up, Kind.W)]
        words += [(down, Kind.I), (up, Kind.I)] * rank
        words += [(down, Kind.I), (down, Kind.W)] * (p - rank)
        words += [(up, Kind.W)] * rank
        words += [(down, Kind.W)] * rank
        rows.append(numbered(words, num_microbatches))
    return Schedule.from_codes(rows)


def _generate(costs: Costs) -> Schedule:
    devices = device_of_rank(costs, v_shape)
    order = zb_v(len(devices), costs.num_microbatches)
    return fitted(costs, devices, [order], _STARTS, most=2 * len(devices))


ZB_V = Family(
    name="zb-v",
    source="Qi et al. 2024, arXiv:2401.10241, section 6",
    placement=v_shape,
    generate=_generate,
    adapts_to_memory=True,
    claimed_peak=lambda p, m: min(m, p),
)
