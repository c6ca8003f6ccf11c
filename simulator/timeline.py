"""Timeline: when everything in one step happened, simulated or measured alike.

Times are nanoseconds from the start of the step; -1 marks what does not exist (no transfer between
stages of one device) or, in a measured run, what was not recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simulator.actions import CopySchedule, Schedule
from simulator.costs import Costs

if TYPE_CHECKING:
    from simulator.bubbles import Bubbles, Cause

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """One step: every action, transfer, copy, reduction, exchange and optimizer run.

    A actions in the order of `schedule.codes`, C copies in the order of `copies.codes`, S stages,
    m microbatches, D devices, T tied pairs. Row s of the forward arrays is the activation that
    stage s sends on to s + 1, row s of the backward arrays the gradient s sends back to s - 1.
    Two timelines are equal when all they hold is, the costs included.
    """

    schedule: Schedule
    copies: CopySchedule | None
    costs: Costs

    start_ns: Int64  # [A]
    end_ns: Int64  # [A]
    forward_sent_ns: Int64  # [S, m] when the transfer begins to hold its channel
    forward_arrived_ns: Int64  # [S, m]
    backward_sent_ns: Int64  # [S, m]
    backward_arrived_ns: Int64  # [S, m]
    copy_start_ns: Int64  # [C]
    copy_end_ns: Int64  # [C]
    reduce_start_ns: Int64  # [S]
    reduce_end_ns: Int64  # [S]
    exchange_start_ns: Int64  # [T]
    exchange_end_ns: Int64  # [T]
    optimizer_start_ns: Int64  # [D] when the device's actions, reductions and exchanges have ended
    optimizer_end_ns: Int64  # [D]
    peak_bytes: Int64  # [D]

    @property
    def step_ns(self) -> int:
        """When every device has ended."""
        # in a measured run the optimizer may be unrecorded; else it is the last of a device
        ends = (self.end_ns, self.reduce_end_ns, self.exchange_end_ns, self.optimizer_end_ns)
        return max(int(times.max(initial=0)) for times in ends)

    @property
    def busy_ns(self) -> Int64:
        """Per device [D]: all actions and the optimizer, as far as they were recorded."""
        lengths = recorded_ns(self.start_ns, self.end_ns)
        sums = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        offsets = self.schedule.offsets
        busy: Int64 = sums[offsets[1:]] - sums[offsets[:-1]]
        busy += recorded_ns(self.optimizer_start_ns, self.optimizer_end_ns)
        return busy

    @property
    def bubble_fraction(self) -> float:
        """1 - busy summed over devices / (devices x step)."""
        total = self.schedule.num_devices * self.step_ns
        return 1.0 - int(self.busy_ns.sum()) / total

    def bubbles(self) -> Bubbles:
        """Return every idle interval, cut into pieces with one cause each.

        `simulator.bubbles.Cause` defines the causes and their order of precedence.
        """
        # numba loads with it; who only asks for the step does not wait for that
        from simulator.bubbles import find_bubbles

        return find_bubbles(self)

    def idle_by_cause(self) -> dict[Cause, Int64]:
        """Return how long each device [D] idles for each cause.

        The causes of a device add up to its idle time, `step_ns - busy_ns`, exactly (where
        nothing was left unrecorded and no two measured actions of a device overlap).
        """
        return self.bubbles().ns_by_cause()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Timeline):
            return NotImplemented
        return (
            self.schedule == other.schedule
            and self.copies == other.copies
            and _same(self.costs, other.costs)
            and _same(self, other, skip=("schedule", "copies", "costs"))
        )

    def __hash__(self) -> int:
        return hash((self.schedule, self.start_ns.tobytes(), self.end_ns.tobytes()))


def recorded_ns(start: Int64, end: Int64) -> Int64:
    """Return how long each thing lasted; 0 where its start or end was not recorded."""
    return np.where((start >= 0) & (end >= 0), end - start, 0)


def _same(first: Timeline | Costs, second: Timeline | Costs, skip: tuple[str, ...] = ()) -> bool:
    """Say whether two values of one dataclass of arrays and numbers hold the same."""
    names = [field.name for field in fields(first) if field.name not in skip]
    return all(np.array_equal(getattr(first, name), getattr(second, name)) for name in names)
