"""V-Min, V-Half and 1F1B-V: the V placement with as much in flight as one can pay for.

A device of a V holds one early and one late stage: a microbatch that stays long in the one stays
short in the other, so all devices hold the same. How long it stays is the length of the hops of
the repeated block, in slots:

    V-Min     1 1 | 1 1      4 p slots in flight of every 6: a third of 1F1B's memory
    V-Half    1 2 | 1 2      6 p slots: half of it
    1F1B-V    1 1 | 3 3      8 p slots, B whole: two thirds of it

The squeezed block is the paper's order. It assumes slots of one length; where F, I and W differ,
or stages do, a search over hops, turns and the rule finds better ones within the same limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octotune.placement import v_shape
from octotune.schedules.choose import fitted
from octotune.schedules.family import Family, device_of_rank
from octotune.schedules.list_schedule import Rule
from octotune.schedules.rhythm import Rhythm, Trial
from octotune.schedules.squeeze import block_of, squeezed
from octotune.schedules.world import world_of
from simulator.actions import Schedule
from simulator.costs import Costs

_SAFE = Trial(rhythm=Rhythm.even(2), rule=Rule(window=100.0, slack=0.0))

V_MIN_BLOCKS = (
    Rhythm.of((1, 1), (1, 1), (1, 1, 1)),
    Rhythm.of((1, 1), (1, 1), (2, 1, 2)),
    Rhythm.of((1, 1), (1, 1), (2, 1, 1)),
)
_V_MIN_STARTS = (
    Trial(rhythm=Rhythm.of((1, 1), (1, 1), (1, 1, 1)), rule=Rule(window=0.0, slack=0.0)),
    Trial(rhythm=Rhythm.of((1, 1), (1, 1), (1, 1, 1)), rule=Rule(window=0.25, slack=0.3)),
    Trial(rhythm=Rhythm.of((1, 1), (1, 1), (1, 5, 3)), rule=Rule(window=0.5, slack=0.0)),
    Trial(rhythm=Rhythm.of((1, 1), (1, 1), (1, 5, 1)), rule=Rule(window=0.5, slack=0.0)),
    Trial(rhythm=Rhythm.of((1, 1), (1, 1), (3, 3, 3)), rule=Rule(window=0.25, slack=0.0)),
    Trial(rhythm=Rhythm.of((1, 1), (1, 1), (3, 3, 5)), rule=Rule(window=0.5, slack=0.0)),
    _SAFE,
)

V_HALF_BLOCKS = (
    Rhythm.of((1, 2), (1, 2), (1, 2, 2)),
    Rhythm.of((1, 2), (1, 2), (2, 3, 1)),
    Rhythm.of((1, 2), (1, 2), (4, 1, 4)),
    Rhythm.of((1, 2), (1, 2), (3, 1, 1)),
)
# found by longer searches on equal stages, p = 8 to 32
_V_HALF_STARTS = (
    Trial(
        rhythm=Rhythm.of((1, 1.87), (1.74, 1.78), (-3.5, 1.5, 5.1)),
        rule=Rule(window=3.0, slack=0.0, backlog=4),
    ),
    Trial(
        rhythm=Rhythm.of((1.11, 1.87), (1.76, 1.78), (-3.35, -0.7, 5.3), on_costs=True),
        rule=Rule(window=2.0, slack=0.0, backlog=3),
    ),
    Trial(
        rhythm=Rhythm.of((3.53, 0.21), (1.44, 3.47), (-3.17, 0.15, 6.4)),
        rule=Rule(window=2.0, slack=0.3),
    ),
    Trial(
        rhythm=Rhythm.of((1.41, 1.46), (1.05, 1.53), (-2.8, -0.4, 5.2), on_costs=True),
        rule=Rule(window=2.0, slack=0.3, backlog=3),
    ),
    Trial(
        rhythm=Rhythm.of((1.86, 1.19), (1.18, 1.77), (0.7, 4.3, 3.0)),
        rule=Rule(window=0.5, slack=0.3),
    ),
    Trial(rhythm=Rhythm.of((1, 2), (1, 2), (1, 2, 1)), rule=Rule(window=1.0, slack=0.5)),
    _SAFE,
)

ONE_F_ONE_B_V_BLOCKS = (Rhythm.of((1, 1), (2, 2), (1, 1, 2)),)
_ONE_F_ONE_B_V_STARTS = (
    Trial(rhythm=Rhythm.of((1, 1), (2, 2), (1, 1, 2)), rule=Rule(window=100.0, delay=0.2)),
    Trial(rhythm=Rhythm.of((1, 1), (3, 3), (1, 1, 2)), rule=Rule(window=4.0, delay=0.0)),
    Trial(rhythm=Rhythm.of((1, 1), (2, 2), (1, 1, 2)), rule=Rule(window=100.0)),
)


def v_min_limit(num_devices: int) -> int:
    """Return the most activations a device holds under V-Min: about 2/3 p stages."""
    return 2 * ((num_devices + 4) // 3)


def v_half_limit(num_devices: int) -> int:
    """Return the most activations a device holds under V-Half: p stages and two more."""
    return 2 * ((num_devices + 2) // 2)


def one_f_one_b_v_limit(num_devices: int) -> int:
    """Return the most activations a device holds under 1F1B-V: 4/3 p stages, rounded up."""
    return 2 * -(-2 * num_devices // 3)


def _generate(
    costs: Costs,
    limit: Callable[[int], int],
    blocks: Sequence[Rhythm],
    starts: Sequence[Trial],
    split: bool,
) -> Schedule:
    devices = device_of_rank(costs, v_shape)
    world = world_of(costs, devices)
    return fitted(
        costs,
        devices,
        [squeezed(block_of(block, world, split=split), world) for block in blocks],
        starts,
        most=limit(len(devices)),
        split=split,
    )


def _family(
    name: str,
    limit: Callable[[int], int],
    blocks: Sequence[Rhythm],
    starts: Sequence[Trial],
    *,
    split: bool = True,
) -> Family:
    return Family(
        name=name,
        source="Qi et al. 2024, arXiv:2405.15362",
        placement=v_shape,
        generate=lambda costs: _generate(costs, limit, blocks, starts, split),
        adapts_to_memory=True,
        claimed_peak=lambda p, m: min(m, limit(p) / 2),
    )


V_MIN = _family("v-min", v_min_limit, V_MIN_BLOCKS, _V_MIN_STARTS)
V_HALF = _family("v-half", v_half_limit, V_HALF_BLOCKS, _V_HALF_STARTS)
ONE_F_ONE_B_V = _family(
    "1f1b-v", one_f_one_b_v_limit, ONE_F_ONE_B_V_BLOCKS, _ONE_F_ONE_B_V_STARTS, split=False
)
