"""Rhythms: the few numbers that a schedule's phases are made of, and a small search over them.

Stages lie in passes of p ranks each. A rhythm says, pass by pass, how long a hop to the next stage
takes, forwards and backwards, and how long each turn between two passes, all in slots: one slot is
a third of a stage's share of the period, the F of an equal stage with F = I = W.

    V, p = 4        F down, hop 1           turn        F up, hop 1
    rank 0          F0 .  .  .  .  .  .  .  f0 b0 ...                 f, b: the second pass
    rank 1          .  F0 .  .  .  .  f0 .  .  .  b0
    rank 2          .  .  F0 .  .  f0 .  ...
    rank 3          .  .  .  F0 f0 ...

Longer hops keep a microbatch in flight for longer and leave more room to run others in between:
memory against waiting. That is the whole difference between V-Min, V-Half and ZB-V. A turn may be
negative: then it only says whose action comes first.

- `on_costs` stretches each hop by what the stage really takes, so that a rhythm for equal stages
  is one for uneven stages too.
- `spaced` delays what would fall onto another action of its device in the endless rhythm, so that
  a device never has two things to do at once.
- With a `group` of g, microbatches come g at a time, v times as fast, and then none until the next
  group.

The search starts from given rhythms and changes one number at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from random import Random

import numpy as np
from numpy.typing import NDArray

from octotune.schedules.list_schedule import NO_LIMIT, Phases, Rule, list_schedule
from octotune.schedules.weights import (
    DONE,
    NO_BACKLOG,
    Played,
    place_weights,
    without_weights,
)
from octotune.schedules.world import World
from simulator.actions import Kind
from simulator.compiled import kernel

Int64 = NDArray[np.int64]

UNIT = 1000  # how finely a slot is cut where costs do not matter

# what one search may spend, in actions played: about half a second
MAX_ACTIONS = 6_000_000
MIN_TRIALS, MAX_TRIALS = 40, 600

EFFORT: ContextVar[float] = ContextVar("EFFORT", default=1.0)
"""The part of its trials that a search makes; below 1 where time is short."""

WINDOWS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 100.0)
SLACKS = (0.0, 0.3, 0.5, 0.7, 0.9, 1.0)
DELAYS = (0.0, 0.2, 0.5, 1.0)
BACKLOGS = (2, 3, 4, 6, NO_BACKLOG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """Hops and turns of v passes, in slots.

    `turns` are the v - 1 turns of the forwards, the turn at the loss, and the v - 1 turns of the
    backwards, in the order in which a microbatch takes them.
    """

    forward_hops: tuple[float, ...]  # [v] by pass
    backward_hops: tuple[float, ...]  # [v] by pass
    turns: tuple[float, ...]  # [2 v - 1]
    on_costs: bool = False
    spaced: bool = False
    group: int = 1

    @classmethod
    def of(
        cls,
        forward: Sequence[float],
        backward: Sequence[float],
        turns: Sequence[float],
        *,
        on_costs: bool = False,
    ) -> Rhythm:
        """Return the rhythm of these hops and turns."""
        return cls(
            forward_hops=tuple(forward),
            backward_hops=tuple(backward),
            turns=tuple(turns),
            on_costs=on_costs,
        )

    @classmethod
    def even(
        cls, passes: int, *, forward: float = 1, backward: float = 1, turn: float = 1
    ) -> Rhythm:
        """Return the rhythm with the same hop everywhere."""
        return cls(
            forward_hops=(forward,) * passes,
            backward_hops=(backward,) * passes,
            turns=(turn,) * (2 * passes - 1),
        )

    def numbers(self) -> list[float]:
        """Return all its numbers in a row."""
        return [*self.forward_hops, *self.backward_hops, *self.turns]

    def with_numbers(self, numbers: list[float]) -> Rhythm:
        """Return the rhythm with other numbers."""
        v = len(self.forward_hops)
        return replace(
            self,
            forward_hops=tuple(numbers[:v]),
            backward_hops=tuple(numbers[v : 2 * v]),
            turns=tuple(numbers[2 * v :]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A rhythm and the rule it is played by.

    `ideal`: the order is made for equal stages without delays, where nothing is late by a little,
    and then kept for the real ones, Ws aside.
    """

    rhythm: Rhythm
    rule: Rule
    ideal: bool = False


def phases_of(rhythm: Rhythm, world: World, *, split: bool) -> Phases:
    """Return the phases of a rhythm for stages that lie in passes over the ranks."""
    num_stages = world.num_stages
    passes = len(rhythm.forward_hops)
    ranks = num_stages // passes
    back = Kind.I if split else Kind.B
    if rhythm.on_costs:
        lengths = world.duration[[Kind.F, back]]
        load = np.zeros(world.num_devices, np.int64)
        total = lengths.sum(axis=0) + (world.duration[Kind.W] if split else 0)
        np.add.at(load, world.stage_device, total)
        period = max(1, int(load.max()))
        down = lengths[0, :-1] + world.delay[1:]
        up = lengths[1, 1:] + world.delay[1:]
    else:
        lengths = np.full((2, num_stages), UNIT, np.int64)
        if not split:
            lengths[1] *= 2
        period = 3 * passes * UNIT
        down = up = np.full(num_stages - 1, UNIT, np.int64)
    slot = period / (3 * passes)
    boundary = np.arange(1, num_stages)
    turning = boundary % ranks == 0
    into = boundary // ranks  # the pass that a boundary leads into, forwards
    turns = np.array(rhythm.turns) * slot
    steps = np.zeros((2, num_stages))
    steps[0, 1:] = np.where(
        turning, turns[np.maximum(0, into - 1)], np.array(rhythm.forward_hops)[into] * down
    )
    steps[1, -1] = turns[passes - 1]
    steps[1, :-1] = np.where(
        turning,
        turns[np.minimum(2 * passes - 2, 2 * passes - 1 - into)],
        np.array(rhythm.backward_hops)[(boundary - 1) // ranks] * up,
    )
    if rhythm.spaced:
        forward, backward = _spaced(
            np.rint(steps).astype(np.int64), lengths, world.stage_device, period
        )
    else:
        forward = np.rint(np.cumsum(steps[0])).astype(np.int64)
        backward = forward[-1] + np.rint(np.cumsum(steps[1, ::-1])[::-1]).astype(np.int64)
    microbatches = np.arange(world.num_microbatches)
    groups, within = np.divmod(microbatches, rhythm.group)
    beats = groups * (rhythm.group * period) + within * (
        period if rhythm.group == 1 else period // passes
    )
    return Phases(forward, backward, beats, period)


@kernel
def _spaced(steps: Int64, lengths: Int64, stage_device: Int64, period: int) -> tuple[Int64, Int64]:
    """Walk the chain down and up, moving each action past those that its device has already."""
    num_stages = len(stage_device)
    phases = np.zeros((2, num_stages), np.int64)
    at = 0
    for step in range(2 * num_stages):
        way = 0 if step < num_stages else 1
        stage = step if way == 0 else 2 * num_stages - 1 - step
        length = lengths[way, stage]
        at += steps[way, stage]
        checked = 0
        # past one action at a time; a period that is full after all leaves it where it ends up
        while checked < 4 * num_stages:
            moved = False
            for before in range(step):
                other_way = 0 if before < num_stages else 1
                other = before if other_way == 0 else 2 * num_stages - 1 - before
                if stage_device[other] != stage_device[stage]:
                    continue
                gap = (at - phases[other_way, other]) % period
                if gap < lengths[other_way, other]:
                    at += lengths[other_way, other] - gap
                    moved = True
                elif gap + length > period:
                    at += period - gap + lengths[other_way, other]
                    moved = True
            checked += 1
            if not moved:
                break
        phases[way, stage] = at
    return phases[0], phases[1]


def play(trial: Trial, world: World, *, split: bool = True, limit_ns: int = NO_LIMIT) -> Played:
    """Return the order of a trial; see `list_schedule`."""
    phases = phases_of(trial.rhythm, world, split=split)
    if not trial.ideal:
        return list_schedule(phases, world, trial.rule, split=split, limit_ns=limit_ns)
    order = list_schedule(phases, _ideal(world), trial.rule, split=split)
    if order.state != DONE:
        return order
    return place_weights(
        without_weights(order.schedule()),
        world,
        slack=trial.rule.slack,
        backlog=trial.rule.backlog,
    )


def _ideal(world: World) -> World:
    duration = np.full_like(world.duration, UNIT)
    duration[Kind.B] = 2 * UNIT
    nothing = np.zeros_like(world.delay)
    return world._replace(duration=duration, delay=nothing, hold=nothing)


def search(
    starts: Iterable[Trial],
    world: World,
    *,
    split: bool = True,
    incumbent: Played | None = None,
    seed: int = 0,
) -> Played | None:
    """Return the order that ends first among the starts and what a short search makes of them.

    Each start is played; then the best is changed in one number at a time and kept when it is no
    worse. The number of trials follows from the number of actions, so that the result does not
    depend on the machine.

    Args:
        starts: where to begin.
        world: costs and limits.
        split: run I and W; otherwise B.
        incumbent: an order already known; only what ends before it counts.
        seed: of the changes.

    Returns:
        The incumbent if nothing ends before it; None if there is none and nothing runs.
    """
    rng = Random(seed)
    best = incumbent
    lowest: tuple[int, Trial] | None = None  # where to go on from if no start beats the incumbent
    actions = (3 if split else 2) * world.num_stages * world.num_microbatches
    budget = max(MIN_TRIALS, int(EFFORT.get() * min(MAX_TRIALS, MAX_ACTIONS // actions)))
    for trial in starts:
        budget -= 1
        order = play(trial, world, split=split)
        if order.state != DONE:
            continue
        if lowest is None or order.end_ns < lowest[0]:
            lowest = order.end_ns, trial
        if best is None or order.end_ns < best.end_ns:
            best = order
    if lowest is None:
        return best
    end_ns, trial = lowest
    bound = _bound_ns(world, split)
    while budget > 0 and (best is None or best.end_ns > bound):
        budget -= 1
        changed = _changed(trial, rng, split)
        order = play(changed, world, split=split, limit_ns=end_ns + 1)
        if order.state == DONE and order.end_ns <= end_ns:
            end_ns, trial = order.end_ns, changed
            if best is None or end_ns < best.end_ns:
                best = order
    return best


def _bound_ns(world: World, split: bool) -> int:
    """Return a time before which no order ends: when a device can begin, and all its work."""
    back = Kind.I if split else Kind.B
    work = world.duration[Kind.F] + world.duration[back]
    if split:
        work = work + world.duration[Kind.W]
    arrives = np.cumsum(world.delay)
    arrives[1:] += np.cumsum(world.duration[Kind.F])[:-1]
    bound = 0
    for device in range(world.num_devices):
        stages = world.local[world.first[device] : world.first[device + 1]]
        if len(stages):
            load = int(work[stages].sum()) * world.num_microbatches
            bound = max(bound, int(arrives[stages[0]]) + load)
    return bound


def _changed(trial: Trial, rng: Random, split: bool) -> Trial:
    rhythm, rule = trial.rhythm, trial.rule
    numbers = rhythm.numbers()
    spot = _below(len(numbers), rng)
    is_hop = spot < 2 * len(rhythm.forward_hops)
    # the sum of uniforms is bell-shaped enough
    bell = sum(rng.random() for _ in range(4)) - 2.0
    numbers[spot] += bell * (0.35 if is_hop else 1.7)
    if rng.random() < 0.1:
        rhythm = replace(rhythm, on_costs=not rhythm.on_costs)
    if rng.random() < 0.2:
        rule = rule._replace(window=WINDOWS[_below(len(WINDOWS), rng)])
    if rng.random() < 0.1:
        rule = rule._replace(delay=DELAYS[_below(len(DELAYS), rng)])
    if split and rng.random() < 0.2:
        rule = rule._replace(slack=SLACKS[_below(len(SLACKS), rng)])
    if split and rng.random() < 0.1:
        rule = rule._replace(backlog=BACKLOGS[_below(len(BACKLOGS), rng)])
    if rng.random() < 0.05:
        rhythm = replace(rhythm, spaced=not rhythm.spaced)
    ideal = trial.ideal != (rng.random() < 0.1)
    return Trial(rhythm=rhythm.with_numbers(numbers), rule=rule, ideal=ideal)


def _below(count: int, rng: Random) -> int:
    return int(rng.random() * count)
