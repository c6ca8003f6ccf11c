"""Room: whether what a rank does next finds the memory that its plan has for it.

Actions take and free the contract's bytes, and the lane's copies run one after another, so how far
the lane has come says what they have taken out. Behind time, two things would pass the plan's
peak, and wait instead:

    an action    until copies out have ended that the plan has ended when it starts
    a reload     where W's float, until those have run that the plan has run when it starts

A reload that may start counts as started: else the next action would take its place.

A gate is a number that grows as the rank's row goes on: 2 * position when an action starts, one
more when it ends. Each reload has one, and may start once the row has got there and there is room.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from executor.offload.lanes import Key, Lane


class Room:
    """The memory of one rank, as far as its actions and copies change it.

    Args:
        lane: the rank's, whose entries these are.
        entry_bytes: what each of them moves.
        gates: of the reloads among them, in order.
        limit_bytes: what actions and copies together may hold.
        floats: whether W's leave the plan's order, so that reloads have to wait for them.
    """

    def __init__(
        self,
        lane: Lane,
        entry_bytes: Sequence[int],
        gates: Sequence[int],
        limit_bytes: int,
        floats: bool,
    ) -> None:
        entries = lane.entries
        self._lane = lane
        self._limit = limit_bytes
        self._floats = floats
        self._gates = tuple(gates)
        # what all entries before each of them have brought
        changes = (
            size if entry.back else -size for entry, size in zip(entries, entry_bytes, strict=True)
        )
        self._brought = list(accumulate(changes, initial=0))
        self._backs = [at for at, entry in enumerate(entries) if entry.back]
        self._back_of: dict[Key, int] = {
            entries[at].key: number for number, at in enumerate(self._backs)
        }
        self._out_at: dict[Key, int] = {
            entry.key: at for at, entry in enumerate(entries) if not entry.back
        }
        # what a W that is put off adds when it starts
        self.put_off_bytes: Callable[[], int] = lambda: 0
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self.held_bytes = 0  # by actions, as if nothing had left
        self._ending_bytes = 0  # what the action that runs takes away when it ends
        self._let = 0  # how many reloads may start
        self._gate = -1

    def start(self, rise_bytes: int, fall_bytes: int) -> None:
        """Count an action that starts."""
        self.held_bytes += rise_bytes
        self._ending_bytes = fall_bytes

    def end(self) -> None:
        """Count the action as ended."""
        self.held_bytes -= self._ending_bytes
        self._ending_bytes = 0

    def fits(self, rise_bytes: int, gate: int) -> bool:
        """Whether there is room for so much beside the reloads up to a gate."""
        settled, away = self._lane.state
        coming = self._coming(settled, bisect_right(self._gates, gate))
        return self.held_bytes - away + coming + rise_bytes <= self._limit

    def lets(self, gate: int) -> bool:
        """Whether the reloads up to a gate may start as soon as the row gets there."""
        upto = bisect_right(self._gates, gate)
        return upto <= self._let or not self._floats or self._fits_reloads(upto)

    def reach(self, gate: int = -1) -> None:
        """The row has got to a gate, or to a W between gates: let the reloads go that fit."""
        self._gate = max(self._gate, gate)
        while self._let < len(self._gates) and self._gates[self._let] <= self._gate:
            if self._floats and not self._fits_reloads(self._let + 1):
                break
            self._let += 1
        self._lane.mark(self._let - 1)

    def let(self, key: Key) -> None:
        """A backward needs its reload now: let it go, and those before it."""
        self._let = max(self._let, self._back_of[key] + 1)
        self._lane.mark(self._let - 1)

    def wait_out(self, key: Key) -> None:
        """Wait until a parcel has left; whatever the lane does before that may start."""
        self._let = max(self._let, bisect_left(self._backs, self._out_at[key]))
        self._lane.mark(self._let - 1)
        self._lane.wait_out(key)

    def _coming(self, settled: int, num_reloads: int) -> int:
        """Return the most that entries up to a reload add to what is held now."""
        first = bisect_left(self._backs, settled)
        coming = (self._added(settled, at) for at in self._backs[first:num_reloads])
        return max(0, max(coming, default=0))

    def _fits_reloads(self, num_reloads: int) -> bool:
        """Whether reloads leave room for a W that was put off, which may be what comes next."""
        settled, away = self._lane.state
        held = self.held_bytes - away + self._coming(settled, num_reloads)
        return held + max(0, self.put_off_bytes() - self._ending_bytes) <= self._limit

    def _added(self, settled: int, at: int) -> int:
        return self._brought[at + 1] - self._brought[settled]
