"""The values of a fleet: its devices, jobs, rules, policies, and what happened.

`simulator.fleet` plays them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

NEVER = 2**62


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fleet:
    """The devices, and what each kind of job does on each class of them.

    D devices, K classes, T kinds.
    A kind makes `cycle_samples` in `cycle_steps` main steps; only whole cycles count. 0 steps mark
    a kind that does not fit the class. `step_ns` is the main job's step while bubbles are filled.
    """

    step_ns: int
    device_class: Int64  # [D]
    cycle_samples: Int64  # [T, K]
    cycle_steps: Int64  # [T, K]

    @property
    def num_devices(self) -> int:
        """D."""
        return len(self.device_class)

    @property
    def num_classes(self) -> int:
        """K."""
        return int(self.cycle_steps.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Jobs by arrival. J jobs; NEVER where there is no deadline or cancellation."""

    arrival_ns: Int64  # [J]
    kind: Int64  # [J] row of the fleet's tables
    samples: Int64  # [J] at least 1
    deadline_ns: Int64  # [J]
    cancel_ns: Int64  # [J]

    @property
    def num_jobs(self) -> int:
        """J."""
        return len(self.arrival_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How the fleet is run.

    Args:
        checkpoint_steps: progress is saved, and the job may move, this often; 0: never.
        move_steps: what restoring a checkpoint costs, wherever a job continues.
        preempt_above: at a checkpoint a waiting job takes the device if its score is more than
            this many times the running job's; None: never.
        failures_per_hour: of a running job, exponentially distributed.
        most_failures: a job that fails more often is given up.
        horizon_ns: when the simulation stops; None: when all jobs have ended.
        seed: of the failures.
    """

    checkpoint_steps: int = 0
    move_steps: int = 0
    preempt_above: float | None = None
    failures_per_hour: float = 0.0
    most_failures: int = 3
    horizon_ns: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waiting:
    """The waiting jobs that fit a device, for a policy to score. n jobs.

    Times are what their remaining samples take: `here_ns` on this device, `best_ns` on the class
    of devices that suits them best.
    """

    job: Int64  # [n]
    here_ns: Int64  # [n]
    best_ns: Int64  # [n]
    arrival_ns: Int64  # [n]
    deadline_ns: Int64  # [n] NEVER: none
    samples: Int64  # [n] that are left
    table: Int64  # [J, K] main steps on each class of devices; NEVER: does not fit
    step_ns: int

    @property
    def proc_ns(self) -> Int64:
        """The time on each class of devices [n, K], NEVER where a job does not fit."""
        steps = self.table[self.job]
        return np.where(steps < NEVER, steps * self.step_ns, NEVER)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """What a policy may look at beside the jobs."""

    now_ns: int
    rem_ns: Int64  # [D] until each device's running job ends; 0: idle
    device_class: Int64  # [D]


# (waiting jobs, state, device) -> scores [n]; the highest gets the device
Score = Callable[[Waiting, State, int], Float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Who gets a free device. Of equal scores the shortest job here wins, or the longest."""

    name: str
    score: Score
    longest_first: bool = False


class Status(IntEnum):
    """What became of a job."""

    WAITING = 0  # when the simulation stopped, or it fits no device
    RUNNING = 1
    DONE = 2
    CANCELLED = 3
    FAILED = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FleetResult:
    """What happened. J jobs, R runs, one for each time that a job had a device."""

    fleet: Fleet
    trace: Trace
    steps: int  # when the simulation ended
    status: Int64  # [J] of Status
    end_ns: Int64  # [J] NEVER: not done
    first_ns: Int64  # [J] when it first had a device; NEVER: it had none
    samples_done: Int64  # [J]
    failures: Int64  # [J]
    moves: Int64  # [J] how often it continued after a checkpoint or failure
    run_job: Int64  # [R]
    run_device: Int64  # [R]
    run_begin: Int64  # [R] step; restoring a checkpoint included
    run_end: Int64  # [R] step
    run_samples: Int64  # [R] that count: what a failure lost does not

    @property
    def duration_ns(self) -> int:
        """How long the fleet was simulated."""
        return self.steps * self.fleet.step_ns

    @property
    def done(self) -> NDArray[np.bool_]:
        """Which jobs [J] ended with all their samples."""
        done: NDArray[np.bool_] = self.status == Status.DONE
        return done

    @property
    def mean_completion_ns(self) -> float:
        """Mean time from arrival to end of the jobs that are done."""
        done = self.done
        times = self.end_ns[done] - self.trace.arrival_ns[done]
        return float(times.mean()) if done.any() else 0.0

    @property
    def makespan_ns(self) -> int:
        """When the last job that is done ended."""
        return int(self.end_ns[self.done].max(initial=0))

    @property
    def deadlines_met(self) -> int:
        """How many jobs with a deadline were done by then."""
        has = self.trace.deadline_ns < NEVER
        return int((has & self.done & (self.end_ns <= self.trace.deadline_ns)).sum())

    @property
    def num_deadlines(self) -> int:
        """How many jobs have one."""
        return int((self.trace.deadline_ns < NEVER).sum())

    @property
    def occupied_share(self) -> float:
        """Share of device time in which a fill job had the device."""
        total = self.steps * self.fleet.num_devices
        return float((self.run_end - self.run_begin).sum()) / total if total else 0.0

    def occupied_by_time(self, num_parts: int) -> Float64:
        """Return the share of devices that had a fill job, over equal parts of the time."""
        edges = np.linspace(0, self.steps, num_parts + 1)
        shares = np.zeros(num_parts)
        if self.steps == 0:
            return shares
        begin, end = np.sort(self.run_begin), np.sort(self.run_end)

        def area(ends: Int64, upto: float) -> float:
            count = int(np.searchsorted(ends, upto, side="right"))
            return count * upto - float(ends[:count].sum())

        used = np.array([area(begin, edge) - area(end, edge) for edge in edges])
        return np.diff(used) / (np.diff(edges) * self.fleet.num_devices)
