"""The exception tree. Each message is one line: the place, what was found, what is allowed.

ValueError
  MalformedError           an input that is not what the contract says: exit status 2
  InfeasibleError          fine input, but no feasible plan, or a plan breaks a rule: status 1
  OutOfTimeError           the time limit ended before any feasible plan was found: status 1
  simulator.errors.ScheduleError, DeadlockError, OutOfMemoryError: a rule broken: status 1
"""

from __future__ import annotations

from simulator.errors import DeadlockError, OutOfMemoryError, ScheduleError

__all__ = [
    "DeadlockError",
    "InfeasibleError",
    "MalformedError",
    "OutOfMemoryError",
    "OutOfTimeError",
    "ScheduleError",
]


class MalformedError(ValueError):
    """An input breaks the contract's form; the message names file and field."""


class InfeasibleError(ValueError):
    """The input is fine but no plan for it can run, or a plan breaks a rule."""


class OutOfTimeError(ValueError):
    """The time limit ended before any feasible plan was found."""
