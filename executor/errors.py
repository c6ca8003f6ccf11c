"""What can go wrong on a rank, beside what `octotune.errors` names.

ValueError
  MalformedError           (octotune) status 2
    MismatchError          plan, model, ranks or batch do not fit each other: status 2
RuntimeError
  StepError                a step failed on some rank, and so on all of them: status 1
    PeerError              a rank is gone or did not answer in time

Every rank of a pipeline raises when one does. `rank` is the one where it began, so that one rank
prints the line and the others only leave.
"""

from __future__ import annotations

from octotune.errors import MalformedError


class MismatchError(MalformedError):
    """Plan, model, ranks or batch do not fit each other; the message says which and how."""

    def __init__(self, message: str, rank: int = 0) -> None:
        super().__init__(message)
        self.rank = rank


class StepError(RuntimeError):
    """A step failed; `rank` is where it began."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class PeerError(StepError):
    """A rank closed its connection or did not answer in time; the message names the action."""
