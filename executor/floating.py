"""Which W to run now: weight gradients fill the time that a rank would otherwise wait.

The order of F, I and B is the plan's, and so is the order of the W's of one stage, so that sums
keep their bits. Beyond that a W is free: it runs when the next action's input is not there, when
the next action would pass the memory limit, or when nothing else is left. Of the W's that may
run the one that the plan has first goes first. Memory is the contract's: what an action adds at
its start and takes away at its end, by `simulator.memory.byte_changes`. Had the rank run every W
that the plan has before its next action, it would hold what the plan holds there; so running W's
until the action fits always ends, at the plan's own peak at the latest.

`simulator.floating` simulates the same rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from executor.program import Op
from simulator.actions import Kind
from simulator.memory import byte_changes
from simulator.timeline import Timeline

FloatLimit = Literal["auto", "memory", "plan", "off"]


def floating_weights(
    rows: Sequence[Op], predicted: Timeline, device: int, limit: FloatLimit
) -> FloatingWeights | None:
    """Return what floats on one device; None where nothing does.

    Args:
        rows: the device's ops in the plan's order.
        predicted: the plan's step.
        device: whose.
        limit: up to the device's memory, the plan's own peak, or as `Pipeline` picks for "auto".
    """
    if limit == "off" or not any(op.kind == Kind.W for op in rows):
        return None
    costs, peaks = predicted.costs, predicted.peak_bytes
    most = int(costs.memory_bytes[device])
    if predicted.copies is not None and limit != "memory":
        # what copies have freed is not to be filled with weight gradients put off
        most = min(most, int(peaks[device]))
    elif limit == "plan":
        # the plan's peak is that of its fullest device: the others may come up to it
        most = min(most, int(peaks.max()))
    rise, fall = (changes.tolist() for changes in byte_changes(costs))
    return FloatingWeights(rows, rise, fall, most - int(costs.static_bytes[device]))


class FloatingWeights:
    """The W's of one rank's step that have not run yet.

    Args:
        rows: the rank's ops in the plan's order.
        rise: bytes that an action adds when it starts, at stage * 4 + kind.
        fall: bytes that it takes away when it ends.
        limit_bytes: what all actions together may hold, or None for no limit.
    """

    def __init__(
        self, rows: Sequence[Op], rise: Sequence[int], fall: Sequence[int], limit_bytes: int | None
    ) -> None:
        # what adds to a stage's weights, in the plan's order: its W's and its B's
        self._lanes: dict[int, list[Op]] = {}
        for op in rows:
            if op.kind in (Kind.W, Kind.B):
                self._lanes.setdefault(op.stage, []).append(op)
        self._rise = rise
        self._fall = fall
        self._limit = limit_bytes
        # whether there is room for an action; offload, which takes bytes out, puts its own here
        self.fits: Callable[[Op], bool] = self._fits
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        self._next = dict.fromkeys(self._lanes, 0)
        self._due: dict[int, set[int]] = {stage: set() for stage in self._lanes}
        self._held = 0

    def note(self, op: Op) -> None:
        """Count an action that ran: its bytes, and for an I the W that it makes due."""
        at = op.stage * 4 + op.kind
        self._held += self._rise[at] - self._fall[at]
        if op.kind == Kind.I:
            self._due[op.stage].add(op.microbatch)
        elif op.kind == Kind.B:
            self._next[op.stage] += 1

    def must_run_before(self, op: Op) -> Op | None:
        """Return a W that has to run before `op`, and count it as run; None where none has to.

        A B waits for the W's of its stage that the plan has before it: both add to the same
        weights. And an action that does not fit waits for W's that make room.
        """
        if op.kind == Kind.B:
            ahead = self._lanes[op.stage][self._next[op.stage]]
            if ahead is not op:
                return self._count(ahead)
        return None if self.fits(op) else self.take()

    def take(self) -> Op | None:
        """Return the W to run now, and count it as run; None where none may run."""
        best: Op | None = None
        for stage, due in self._due.items():
            if not due:
                continue
            op = self._lanes[stage][self._next[stage]]
            if (
                op.kind == Kind.W
                and op.microbatch in due
                and (best is None or op.position < best.position)
            ):
                best = op
        return None if best is None else self._count(best)

    def largest_rise_bytes(self) -> int:
        """Return the most that a W which is put off adds when it starts; 0 where none is."""
        return max(
            (self._rise[stage * 4 + Kind.W] for stage, due in self._due.items() if due), default=0
        )

    def _fits(self, op: Op) -> bool:
        return (
            self._limit is None or self._held + self._rise[op.stage * 4 + op.kind] <= self._limit
        )

    def _count(self, op: Op) -> Op:
        self._due[op.stage].discard(op.microbatch)
        self._next[op.stage] += 1
        return op
