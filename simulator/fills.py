"""Fill work in a main job's step: what ran in whose bubble, and how much a device gets done.

`filled_passes` follows the rule by which a runtime hands waits over when the main job's steps
differ: a wait is believed to last as its lower quartile did lately, and to end no later than
messages of the same peer usually follow each other; what is kept of it, and what a micro-step is
given beyond its time, is lost. So jittered steps get less work done than a plan of even ones has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.actions import Kind, Schedule
from simulator.costs import Costs

Int64 = NDArray[np.int64]
_NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class FillSpan:
    """One micro-step of a fill job, or one stretch of a job in a process of its own.

    Times are nanoseconds from the start of the step, as in its Timeline.
    """

    device: int
    job: str
    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverRule:
    """How waits are handed over.

    Args:
        switch_ns: lost at each wait.
        kept: share of the rest that is kept.
        spread: share of its time that a micro-step is given beyond it.
        enter_ns: what passes of what is handed over before the first micro-step.
        ahead: whether time that is left goes to later bubbles' work.
        profile: steps at the start that say how long waits are; the first is no example.
        window: later steps whose waits are remembered.
        every: steps between two looks at a full window.
        drift: share by which a wait's lower quartile must have moved to be believed.
        least_drift_ns: how far it must have moved at least.
    """

    switch_ns: int
    kept: float
    spread: float = 0.06
    enter_ns: int = 0
    ahead: bool = False
    profile: int = 4
    window: int = 12
    every: int = 6
    drift: float = 0.15
    least_drift_ns: int = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waits:
    """One device's waits before some of its actions, in several steps; from each step's start.

    `taken_ns` is when a wait's message is taken: at once where it is there before the wait
    begins. `before_ns` is when the same peer's message before was taken; -1 where there is none.
    """

    began_ns: Int64  # [steps, waits]
    taken_ns: Int64  # [steps, waits]
    before_ns: Int64  # [steps, waits]

    @property
    def length_ns(self) -> Int64:
        """Return how long each wait is [steps, waits]."""
        return self.taken_ns - self.began_ns

    def beside(self, lengths_ns: Sequence[int]) -> Waits:
        """Return these waits and further ones, of the same lengths in each step."""
        fixed = np.tile(np.array(lengths_ns, dtype=np.int64), (len(self.began_ns), 1))
        return Waits(
            began_ns=np.hstack((self.began_ns, np.zeros_like(fixed))),
            taken_ns=np.hstack((self.taken_ns, fixed)),
            before_ns=np.hstack((self.before_ns, np.full_like(fixed, _NONE))),
        )


def waits_before(
    schedule: Schedule,
    costs: Costs,
    starts_ns: Int64,
    ends_ns: Int64,
    device: int,
    positions: Sequence[int],
) -> Waits:
    """Return a device's waits before the actions at some positions of its row.

    Args:
        schedule: what ran.
        costs: whose placement says which messages a device gets.
        starts_ns: of each action [steps, A], in the order of `Schedule.codes`.
        ends_ns: of each action [steps, A].
        device: whose.
        positions: in its row.
    """
    first = int(schedule.offsets[device])
    before: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, action in enumerate(schedule.rows[device]):
        peer = action.stage + (-1 if action.kind is Kind.F else 1)
        comes = action.kind is not Kind.W and 0 <= peer < costs.num_stages
        source = int(costs.stage_device[peer]) if comes else device
        if source == device:
            continue
        if source in last:
            before[position] = last[source]
        last[source] = position
    never = np.full(len(starts_ns), _NONE, dtype=np.int64)
    at_once = np.zeros(len(starts_ns), dtype=np.int64)
    found = [
        (
            ends_ns[:, first + position - 1] if position else at_once,
            starts_ns[:, first + position],
            starts_ns[:, first + before[position]] if position in before else never,
        )
        for position in positions
    ]
    began, taken, peers = (
        np.stack(part, axis=1).astype(np.int64) for part in zip(*found, strict=True)
    )
    return Waits(began_ns=began, taken_ns=taken, before_ns=peers)


class _Beliefs:
    """How long each wait of a device is believed to last, as a runtime learns it."""

    def __init__(self, waits: Waits, rule: HandoverRule) -> None:
        self._waits, self._rule = waits, rule
        num = waits.began_ns.shape[1]
        self._lengths: list[deque[int]] = [deque(maxlen=rule.window) for _ in range(num)]
        self._taken: list[deque[int]] = [deque(maxlen=rule.window) for _ in range(num)]
        self._before: list[deque[int]] = [deque(maxlen=rule.window) for _ in range(num)]
        self._usual_ns = [0] * num
        self._gap_ns = [0] * num  # between the message before and this one

    def length_ns(self, step: int, wait: int) -> int:
        """Return how long a wait is believed to last: no longer than its peer's lead says."""
        before = int(self._waits.before_ns[step, wait])
        usual = self._usual_ns[wait]
        if before == _NONE:
            return usual
        return min(usual, before + self._gap_ns[wait] - int(self._waits.began_ns[step, wait]))

    def note(self, step: int, lengths_ns: Sequence[int], full: bool) -> None:
        """Learn from a step; `full`: nothing was handed over in it."""
        waits, rule = self._waits, self._rule
        for wait, length in enumerate(lengths_ns):
            self._lengths[wait].append(int(length))
            if full:
                self._taken[wait].append(int(waits.taken_ns[step, wait]))
                self._before[wait].append(int(waits.before_ns[step, wait]))
        if step + 1 == rule.profile:
            skip = 1 if rule.profile > 1 else 0
            self._usual_ns = [_low(list(found)[skip:]) for found in self._lengths]
            self._learn_gaps(skip)
            for window in (*self._lengths, *self._taken, *self._before):
                window.clear()
        elif step >= rule.profile and (step + 1) % rule.every == 0:
            self._look_for_drift()

    def _look_for_drift(self) -> None:
        rule, changed = self._rule, False
        for wait, found in enumerate(self._lengths):
            if len(found) < rule.window:
                continue
            old, new = self._usual_ns[wait], _low(found)
            if abs(new - old) > max(rule.least_drift_ns, rule.drift * old):
                self._usual_ns[wait] = new
                changed = True
        if changed:
            self._learn_gaps(0)

    def _learn_gaps(self, skip: int) -> None:
        for wait, (taken, before) in enumerate(zip(self._taken, self._before, strict=True)):
            if len(taken) > skip:
                mine, peers = (np.median(list(found)[skip:]) for found in (taken, before))
                self._gap_ns[wait] = max(0, int(mine) - int(peers))


def _low(values: Sequence[int] | deque[int]) -> int:
    """Return a length that most of the values reach: their lower quartile."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]


def filled_passes(
    waits: Waits,
    filled: Sequence[bool],
    planned: Sequence[Sequence[Sequence[int]]],
    times_ns: Sequence[int],
    rule: HandoverRule,
    *,
    skip: int = 0,
) -> float:
    """Return how many passes of a job a device ends in a filled step, on average.

    Args:
        waits: of the device, each of the bubbles of `planned`.
        filled: of each step, whether it is filled; the others only show their waits.
        planned: micro-steps of each bubble in each step of the plan's cycle.
        times_ns: of each micro-step.
        rule: how waits are handed over.
        skip: filled steps at the beginning that do not count.

    Raises:
        ValueError: if no step counts.
    """
    lengths = waits.length_ns
    num = lengths.shape[1]
    beliefs = _Beliefs(waits, rule)
    pending: deque[int] = deque()
    given = steps = ended = 0
    last = len(times_ns) - 1
    for step, fills in enumerate(filled):
        steps += bool(fills)
        seen = lengths[step].tolist()
        for b in range(num) if fills else ():
            at = (steps - 1) * num + b
            while given <= at:
                pending.extend(planned[given // num % len(planned)][given % num])
                given += 1
            handed = (beliefs.length_ns(step, b) - rule.switch_ns) * (1.0 - rule.kept)
            spent = rule.enter_ns
            while spent < lengths[step, b]:
                tried = 0
                while not pending and rule.ahead and tried < num * len(planned):
                    pending.extend(planned[given // num % len(planned)][given % num])
                    given, tried = given + 1, tried + 1
                if not pending or spent + times_ns[pending[0]] * (1.0 + rule.spread) > handed:
                    break
                k = pending.popleft()
                spent += times_ns[k]
                ended += k == last and steps > skip
            seen[b] = max(seen[b], spent)  # the message is seen after a micro-step
        beliefs.note(step, seen, not fills)
    if steps <= skip:
        raise ValueError(f"{steps} filled steps, {skip} of them do not count; give more")
    return ended / (steps - skip)
