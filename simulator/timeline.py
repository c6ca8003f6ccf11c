"""Timeline: when everything in one step happened, simulated or measured alike.

Times are nanoseconds from the start of the step; -1 marks what does not exist (no transfer between
stages of one device) or, in a measured run, what was not recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.actions import CopySchedule, Schedule
from simulator.costs import Costs

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """One step: every action, transfer, copy, reduction, exchange and optimizer run.

    A actions in the order of `schedule.codes`, C copies in the order of `copies.codes`, S stages,
    m microbatches, D devices, T tied pairs. Row s of the forward arrays is the activation that
    stage s sends on to s + 1, row s of the backward arrays the gradient s sends back to s - 1.
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
        return int(self.optimizer_end_ns.max())

    @property
    def busy_ns(self) -> Int64:
        """Per device [D]: all actions and the optimizer."""
        lengths = self.end_ns - self.start_ns
        sums = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        offsets = self.schedule.offsets
        busy: Int64 = sums[offsets[1:]] - sums[offsets[:-1]]
        busy += self.optimizer_end_ns - self.optimizer_start_ns
        return busy

    @property
    def bubble_fraction(self) -> float:
        """1 - busy summed over devices / (devices x step)."""
        total = self.schedule.num_devices * self.step_ns
        return 1.0 - int(self.busy_ns.sum()) / total
