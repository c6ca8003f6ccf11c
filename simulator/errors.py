"""What a schedule can do wrong.

ValueError
  ScheduleError            a schedule breaks a rule of order or completeness
    DeadlockError          an order that cannot run: the cycle is spelled out
  OutOfMemoryError         a device or host needs more bytes than it has
  TraceError               a text is no trace of a timeline, or a broken one
  MismatchError            timelines or costs that are laid side by side are of different plans
"""

from __future__ import annotations


class ScheduleError(ValueError):
    """A schedule breaks a rule; the message shows the row and the spot."""


class DeadlockError(ScheduleError):
    """An order that cannot run. `cycle` holds the actions and transfers that wait in a ring."""

    def __init__(self, message: str, cycle: tuple[str, ...]) -> None:
        super().__init__(message)
        self.cycle = cycle


class OutOfMemoryError(ValueError):
    """A device or a host needs more bytes than it has.

    `place` is "device 3" or "host 0"; `needed_bytes` and `limit_bytes` say by how much.
    """

    def __init__(self, message: str, place: str, needed_bytes: int, limit_bytes: int) -> None:
        super().__init__(message)
        self.place = place
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes


class TraceError(ValueError):
    """A text is no trace of a timeline; the message is one line and names the spot."""


class MismatchError(ValueError):
    """Timelines or costs that are laid side by side do not belong to the same plan or cluster."""
