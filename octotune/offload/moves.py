"""How a search within memory changes a plan, one thing at a time: a rule, keys, recompute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import numpy as np
from msgspec.structs import replace as changed

from octotune.offload.bench import Bench, Found
from octotune.offload.pages import BACKWARD, FORWARD, WEIGHT, Rule
from octotune.offload.planning import Keys, keys_of
from simulator.costs import Costs
from simulator.engine import simulate

LEAST_TRIPS = (0.8, 1.0, 1.3, 2.0, 3.0)
LEADS = (0.0, 0.3, 0.7, 1.2)
NOTICES = (0, 1, 2, 3, 4, 6)
REACHES = (0.0, 0.5, 1.0, 2.0)
SLACKS = (0.3, 0.5, 0.7, 0.9, 1.0)
OVERTAKES = (0.0, 0.2, 0.5, 1.0)
WINDOWS = (0.0, 0.1, 0.3, 1.0, 3.0)  # of a period
LIVES = (0.0, 0.0, 0.5, 1.0, 2.0, 3.0, 5.0)  # periods


def first_rules(period_ns: int, offload: bool) -> Iterator[Rule]:
    """Yield the rules that every start is played under; without offload few of them differ."""
    for window, overtake in ((0.0, 0.0), (1.0, 0.3)):
        for notice in (1, 4, 0, 2) if offload else (1,):
            for lead, reach in ((0.0, 0.0), (0.7, 1.0)) if offload else ((0.0, 0.0),):
                yield Rule(
                    lead=lead,
                    notice=notice,
                    reach=reach,
                    window_ns=int(window * period_ns),
                    overtake=overtake,
                    slack=0.7,
                )


def changed_once(
    bench: Bench, found: Found, rng: Random, recompute: bool, limit_ns: int
) -> Found | None:
    """Change one thing; return the plan if it fits and ends before the limit."""
    stages, keys, rule = found.stages, found.keys, found.rule
    period = max(1, found.step_ns // bench.num_microbatches)
    dice = rng.random()
    if recompute and dice < 0.15:
        costs = bench.costs(stages)
        spot = rng.randrange(len(stages))
        if not stages[spot].recompute and costs.saved_bytes[spot] + costs.saved_w_bytes[spot] == 0:
            return None
        other = list(stages)
        other[spot] = changed(other[spot], recompute=not other[spot].recompute)
        stages = tuple(other)
    elif bench.offload and dice < 0.22:
        stays = keys.stays.copy()
        stays[rng.randrange(len(stages))] ^= True
        keys = replace(keys, stays=stays)
    elif dice < 0.45:
        rule = _other_rule(rule, rng, period, bench.offload)
    elif dice < 0.55:
        timeline = simulate(found.schedule, bench.costs(stages), found.copies)
        keys = replace(keys_of(timeline), stays=keys.stays)
        if rng.random() < 0.5:
            rule = _other_rule(rule, rng, period, bench.offload)
    else:
        keys = _shifted(keys, bench.costs(stages), rng, period)
    made = bench.try_out(found.source, stages, keys, rule, limit_ns=limit_ns)
    return None if made is None else made[0]


def _other_rule(rule: Rule, rng: Random, period_ns: int, offload: bool) -> Rule:
    dice = rng.randrange(8 if offload else 3)
    if dice == 0:
        return rule._replace(window_ns=int(rng.choice(WINDOWS) * period_ns))
    if dice == 1:
        return rule._replace(overtake=rng.choice(OVERTAKES))
    if dice == 2:
        return rule._replace(slack=rng.choice(SLACKS))
    if dice == 3:
        return rule._replace(notice=rng.choice(NOTICES))
    if dice == 4:
        return rule._replace(lead=rng.choice(LEADS))
    if dice == 5:
        return rule._replace(reach=rng.choice(REACHES))
    if dice == 6:
        return rule._replace(least_life_ns=int(rng.choice(LIVES) * period_ns))
    return rule._replace(least_trips=rng.choice(LEAST_TRIPS))


def _shifted(keys: Keys, costs: Costs, rng: Random, period_ns: int) -> Keys:
    """Move the keys of some stages, kinds and microbatches, all by one amount."""
    num_stages, m = costs.num_stages, costs.num_microbatches
    times = keys.times.copy()
    amount = int(rng.gauss(0.0, 0.4) * period_ns) or 1
    rows: Sequence[int] = rng.choice(
        ((FORWARD,), (FORWARD,), (BACKWARD,), (WEIGHT,), (BACKWARD, WEIGHT))
    )
    dice = rng.random()
    if dice < 0.3:
        which = [rng.randrange(num_stages)]
    elif dice < 0.6:
        device = rng.randrange(costs.num_devices)
        which = np.flatnonzero(costs.stage_device == device).tolist()
    elif dice < 0.9:
        low, high = sorted((rng.randrange(num_stages), rng.randrange(num_stages)))
        which = list(range(low, high + 1))
    else:
        which = list(range(num_stages))
    begin, end = 0, m
    if rng.random() < 0.5:
        begin, end = sorted((rng.randrange(m + 1), rng.randrange(m + 1)))
    for row in rows:
        for stage in which:
            if row == WEIGHT and not keys.split[stage]:
                continue
            times[row, stage, begin:end] += amount
            times[row, stage].sort()
    return replace(keys, times=times)
