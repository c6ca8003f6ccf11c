"""The exception tree. Each message is one line: the place, what was found, what is allowed.

ValueError
  MalformedError           an input that is not what the contract says: exit status 2
  InfeasibleError          fine input, but no feasible plan for it exists: status 1
    BrokenPlanError        a plan that can be read but breaks a rule of the contract: status 1
  OutOfTimeError           the time limit ended before any feasible plan was found: status 1
  simulator.errors.ScheduleError, DeadlockError, OutOfMemoryError: a rule broken: status 1

The border between malformed and broken: a file is malformed when its values cannot be read at all,
because it is no JSON, a field is missing, unknown, of the wrong type or out of its range, or the
workload or cluster in it breaks the rules of its own section. Once workload, cluster and plan can
be read, what the contract's sections Plan, Time, Memory and Offload demand of the plan are rules,
and a plan that does not obey them is broken: stages that do not cover the layers, devices that do
not exist, rows too many, words that are no actions, orders that cannot run, memory exceeded,
predictions that are wrong.
"""

from __future__ import annotations

from simulator.errors import DeadlockError, OutOfMemoryError, ScheduleError

__all__ = [
    "BrokenPlanError",
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
    """The input is fine but no plan for it can run."""


class BrokenPlanError(InfeasibleError):
    """A plan can be read, but breaks a rule of the contract."""


class OutOfTimeError(ValueError):
    """The time limit ended before any feasible plan was found."""
