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
_NEVER = 2**62


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
        ahead: whether time that is left goes to later bubbles' work.
        profile: steps at the start that say how long waits are; the first is no example.
        window: later steps whose waits are remembered.
        every: steps between two looks at a full window.
        drift: share by which a wait's lower quartile must have moved to be believed.
    """

    switch_ns: int
    kept: float
    spread: float = 0.06
    ahead: bool = False
    profile: int = 4
    window: int = 12
    every: int = 6
    drift: float = 0.15


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waits:
    """One device's waits before some of its actions, in several steps."""

    length_ns: Int64  # [steps, waits]
    latest_ns: Int64  # [steps, waits] by when the peer's message before says that it ends


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
        costs: whose placement says which messages a device gets, and their latency.
        starts_ns: of each action [steps, A], in the order of `Schedule.codes`.
        ends_ns: of each action [steps, A].
        device: whose.
        positions: in its row.
    """
    place = {action: at for at, action in enumerate(a for row in schedule.rows for a in row)}
    first = int(schedule.offsets[device])
    came: dict[int, Int64] = {}
    before: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, action in enumerate(schedule.rows[device]):
        if action.kind is Kind.W:
            continue
        peer = action.stage + (-1 if action.kind is Kind.F else 1)
        if not 0 <= peer < costs.num_stages or costs.stage_device[peer] == device:
            continue
        makers = (Kind.F,) if action.kind is Kind.F else (Kind.B, Kind.I)
        maker = next(
            at
            for kind in makers
            if (at := place.get(type(action)(peer, kind, action.microbatch))) is not None
        )
        came[position] = ends_ns[:, maker]
        source = int(costs.stage_device[peer])
        if source in last:
            before[position] = last[source]
        last[source] = position
    lengths, latest = [], []
    for position in positions:
        now = ends_ns[:, first + position - 1] if position else np.zeros(len(starts_ns), np.int64)
        lengths.append(starts_ns[:, first + position] - now)
        if position in before:
            peer_ns = came[before[position]]
            gap = int(np.median(came[position])) - int(np.median(peer_ns))
            latest.append(peer_ns + max(0, gap) - now)
        else:
            latest.append(np.full(len(starts_ns), _NEVER, dtype=np.int64))
    return Waits(
        length_ns=np.stack(lengths, axis=1).astype(np.int64),
        latest_ns=np.stack(latest, axis=1).astype(np.int64),
    )


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
    num = waits.length_ns.shape[1]
    believed = np.zeros(num, dtype=np.int64)
    seen: list[deque[int]] = [deque(maxlen=rule.window) for _ in range(num)]
    pending: deque[int] = deque()
    given = steps = ended = 0
    last = len(times_ns) - 1
    for step, fills in enumerate(filled):
        lengths = waits.length_ns[step]
        steps += bool(fills)
        for b in range(num) if fills else ():
            at = (steps - 1) * num + b
            while given <= at:
                pending.extend(planned[given // num % len(planned)][given % num])
                given += 1
            usual = min(int(believed[b]), int(waits.latest_ns[step, b]))
            handed = (usual - rule.switch_ns) * (1.0 - rule.kept)
            spent = 0
            while spent < lengths[b]:
                tried = 0
                while not pending and rule.ahead and tried < num * len(planned):
                    pending.extend(planned[given // num % len(planned)][given % num])
                    given, tried = given + 1, tried + 1
                if not pending or spent + times_ns[pending[0]] * (1.0 + rule.spread) > handed:
                    break
                k = pending.popleft()
                spent += times_ns[k]
                ended += k == last and steps > skip
        for b in range(num):
            seen[b].append(int(lengths[b]))
        profiled = step + 1 == rule.profile
        looks = step >= rule.profile and (step + 1) % rule.every == 0
        for b in range(num) if profiled or looks else ():
            found = sorted(list(seen[b])[1:] or seen[b]) if profiled else sorted(seen[b])
            low = found[(len(found) - 1) // 4]
            full = len(found) == rule.window
            if profiled or (full and abs(low - believed[b]) > rule.drift * believed[b]):
                believed[b] = low
            if profiled:
                seen[b].clear()
    if steps <= skip:
        raise ValueError(f"{steps} filled steps, {skip} of them do not count; give more")
    return ended / (steps - skip)
