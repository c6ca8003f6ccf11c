"""Hanayo: waves over the devices, B whole, no more memory than 1F1B.

Each pass over the devices turns where the last one ended, so a microbatch crosses no closing edge,
and a turn costs no transfer. One wave is two passes, there and back:

    placement, p = 4, one wave     stages 0 1 2 3 | 7 6 5 4 on devices 0 1 2 3

A device takes a backward as soon as there is one, else the forward that is furthest ahead in the
wave, with at most p microbatches' activations at once. The original makes that order by a greedy
pass for equal stages; here it is the rule of the list scheduler, refined for the costs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from octotune.placement import wave
from octotune.schedules.choose import fitted
from octotune.schedules.family import (
    Family,
    device_of_rank,
    refuses_indivisible,
)
from octotune.schedules.list_schedule import Rule
from octotune.schedules.rhythm import Rhythm, Trial
from simulator.actions import Schedule
from simulator.costs import Costs

# forward hop, backward hop, turn, in slots
_HOPS = (
    (1.0, 1.0, 1.0),
    (1.5, 5.0, 3.0),
    (2.0, 4.0, 1.0),
    (2.0, 5.0, 1.0),
    (2.5, 4.0, 0.0),
    (3.0, 3.0, 1.0),
)
_RULES = (Rule(window=100.0), Rule(window=100.0, delay=0.2), Rule(window=3.0, delay=0.5))


def hanayo_family(waves: int) -> Family:
    """Return Hanayo with that many waves, of two stages a device each.

    Source:
        Liu et al. 2023, arXiv:2308.15762, sections 3 and 4.
    """
    passes = 2 * waves
    placement = partial(wave, stages_per_device=passes)

    def generate(costs: Costs) -> Schedule:
        devices = device_of_rank(costs, placement)
        starts = [
            Trial(
                rhythm=replace(
                    Rhythm.even(passes, forward=forward, backward=backward, turn=turn), group=group
                ),
                rule=rule,
                ideal=ideal,
            )
            for group in sorted({1, len(devices)})
            for forward, backward, turn in _HOPS
            for rule in _RULES
            for ideal in (False, True)
        ]
        return fitted(costs, devices, starts=starts, most=len(devices) * passes, split=False)

    return Family(
        name=f"hanayo-w{waves}",
        source="Liu et al. 2023, arXiv:2308.15762",
        placement=placement,
        generate=generate,
        original_refuses=refuses_indivisible,
        adapts_to_memory=True,
        claimed_peak=lambda p, m: min(m, p),
    )
