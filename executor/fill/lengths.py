"""How long the bubbles of one rank really are: profiled, watched, and profiled again on drift.

A wait before an action lasts from when the rank has nothing else to do to when the message is
there. Steps without fill work show it in full. With fill work a wait that ended the moment the
rank looked was at most as long; that counts, too: what is handed over errs to the short side.

Beside its usual length a wait has a latest end in the step at hand: the messages of one peer
follow each other as they usually do, so a peer that is early with one is early with the next.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from executor.program import RankProgram

_WINDOW = 12
_DRIFT = 0.15
_LEAST_DRIFT_NS = 1_000_000
_EVERY = 6  # steps between two looks for drift


def low(values: Sequence[int]) -> int:
    """Return a length that most of the values reach: their lower quartile."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]


class Lengths:
    """Measured lengths of one rank's waits, by the position of the action after them.

    Args:
        program: this rank's.
        planned_ns: position -> the plan's bubble there; what stands until steps were profiled.
    """

    def __init__(self, program: RankProgram, planned_ns: dict[int, int]) -> None:
        self._planned = dict(planned_ns)
        self._lengths: dict[int, deque[int]] = {p: deque(maxlen=_WINDOW) for p in planned_ns}
        self._came: dict[int, deque[int]] = {}
        self._before: dict[int, int] = {}
        last: dict[int, int] = {}
        for op in program.ops:
            if op.needs is None:
                continue
            self._came[op.position] = deque(maxlen=_WINDOW)
            if op.needs.source in last:
                self._before[op.position] = last[op.needs.source]
            last[op.needs.source] = op.position
        self._profile: dict[int, int] = {}
        self._usual: dict[int, int] = {}
        self._steps = 0
        self.reprofiled = 0

    @property
    def positions(self) -> Sequence[int]:
        """The actions that need a message."""
        return tuple(self._came)

    def before(self, position: int) -> int | None:
        """Return the action before, by position, whose message came from the same rank."""
        return self._before.get(position)

    def note(
        self, began_ns: Sequence[int], arrived_ns: Sequence[int], step_ns: int, full: bool
    ) -> None:
        """Learn from a step.

        Args:
            began_ns: when each wait began [positions]; -1: it did not.
            arrived_ns: when each message was taken [positions].
            step_ns: when the step began.
            full: whether the waits were left as they are.
        """
        self._steps += 1
        for position in self._came:
            if began_ns[position] < 0 or arrived_ns[position] < 0:
                continue
            if full:
                self._came[position].append(arrived_ns[position] - step_ns)
            if position in self._lengths:
                self._lengths[position].append(arrived_ns[position] - began_ns[position])
        if self._profile and self._steps % _EVERY == 0:
            self._look_for_drift()

    def settle(self, skip: int = 0) -> None:
        """Take what was noted, but for the first `skip` steps, for the profile."""
        for position, found in self._lengths.items():
            usable = list(found)[skip:]
            if usable:
                self._profile[position] = low(usable)
        for position, found in self._came.items():
            usable = list(found)[skip:]
            if usable:
                self._usual[position] = int(statistics.median(usable))
        for window in (*self._lengths.values(), *self._came.values()):
            window.clear()

    def _look_for_drift(self) -> None:
        changed = False
        for position, found in self._lengths.items():
            if len(found) < _WINDOW:
                continue
            old, new = self._profile.get(position, 0), low(found)
            if abs(new - old) > max(_LEAST_DRIFT_NS, _DRIFT * old):
                self._profile[position] = new
                changed = True
        if changed:
            self.reprofiled += 1
            for position, came in self._came.items():
                if came:
                    self._usual[position] = int(statistics.median(came))

    def length_ns(self, position: int) -> int:
        """Return how long the wait before an action usually is."""
        return self._profile.get(position, self._planned.get(position, 0))

    def gap_ns(self, position: int) -> int | None:
        """Return how long after the peer's message before this one usually comes."""
        before = self._before.get(position)
        if before is None or position not in self._usual or before not in self._usual:
            return None
        return max(0, self._usual[position] - self._usual[before])

    def profile(self) -> dict[int, int]:
        """Return position -> profiled length."""
        return dict(self._profile)
