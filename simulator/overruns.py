"""What fill work that ends late costs the main job.

A bubble's fill work is planned to end before the main job goes on. Both take more or less time
than planned; where the work is still there when the next action's inputs are, that action starts
late by the rest, and the whole step is played again with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.floating import jittered, simulate_floating
from simulator.timeline import Timeline

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Filled:
    """The filled bubbles of a step. N bubbles."""

    before: Int64  # [N] index in `schedule.codes` of the action that follows; -1: none does
    length_ns: Int64  # [N] as planned
    busy_ns: Int64  # [N] fill work and handing over, as planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """How much longer the main job's step takes, over the rounds: 0.01 is 1 %."""

    mean: float
    worst: float
    late_share: float  # of the bubbles


def slowdown(
    timeline: Timeline,
    filled: Filled,
    *,
    main_spread: float,
    fill_spread: float,
    rounds: int = 50,
    seed: int = 0,
) -> Slowdown:
    """Play a step with and without fill work in turns, durations drawn anew each round.

    An upper estimate: an overrun counts in full, also where the action after it is late anyway.

    Args:
        timeline: of a plan whose cluster shares no NICs.
        filled: what runs in its bubbles.
        main_spread: each (stage, microbatch) takes 1 - spread to 1 + spread of its time, evenly.
        fill_spread: so does the fill work of each bubble.
        rounds: how many steps.
        seed: of the draws.

    Raises:
        ScheduleError: if transfers share NICs.
    """
    rng = np.random.default_rng(seed)
    schedule, costs = timeline.schedule, timeline.costs
    inner = filled.before >= 0
    before = filled.before[inner]
    first = np.isin(before, schedule.offsets[:-1])
    tail_ns = timeline.step_ns - int(timeline.end_ns.max())
    ratios, late = [], 0
    for _ in range(rounds):
        durations = jittered(
            schedule,
            costs,
            kind="stage and microbatch",
            spread=main_spread,
            seed=int(rng.integers(2**31)),
        )
        plain = simulate_floating(schedule, costs, durations_ns=durations, floating=False)
        takes = filled.busy_ns * rng.uniform(1 - fill_spread, 1 + fill_spread, len(filled.busy_ns))
        ready = np.where(first, 0, plain.end_ns[np.maximum(before - 1, 0)])
        lengths = np.array(filled.length_ns, dtype=np.float64)
        lengths[inner] = plain.start_ns[before] - ready
        over = np.maximum(0.0, takes - lengths).astype(np.int64)
        late += int((over > 0).sum())
        longer = durations.copy()
        np.add.at(longer, before, over[inner])
        filled_step = simulate_floating(schedule, costs, durations_ns=longer, floating=False)
        after = int(over[~inner].max(initial=0))
        step = plain.step_ns + tail_ns
        ratios.append((filled_step.step_ns + tail_ns + after) / step - 1)
    return Slowdown(
        mean=float(np.mean(ratios)),
        worst=float(np.max(ratios)),
        late_share=late / max(1, rounds * len(filled.busy_ns)),
    )
