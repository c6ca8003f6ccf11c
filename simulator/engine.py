"""The engine: schedule + costs -> Timeline, exactly by the contract.

`simulator.kernel` says how time passes. Here a schedule is held against the rules, costs are laid
out for the kernel, and what it computed becomes a Timeline, or the error that names the cycle.
"""

from __future__ import annotations

import numpy as np

from simulator.actions import CopySchedule, Schedule
from simulator.costs import Costs
from simulator.kernel import pack, run
from simulator.memory import peak_bytes
from simulator.timeline import Timeline
from simulator.validate import action_positions, copy_positions


def simulate(schedule: Schedule, costs: Costs, copies: CopySchedule | None = None) -> Timeline:
    """Run one step and return when everything happened and how much memory it took.

    Linear in the number of actions, but for a heap of the transfers between hosts where the
    cluster limits the NIC, and of the copies where devices share a host link. Too little memory
    is no error here: `simulator.memory.check_memory` says so.

    Raises:
        ScheduleError: if the schedule is incomplete or breaks a rule of order.
        DeadlockError: if the order cannot run; it holds the cycle.

    Source:
        docs/contract.md, sections Time, Memory and Offload.
    """
    positions = action_positions(schedule, costs)
    packed = pack(costs)
    num_stages, num_devices = packed.num_stages, packed.num_devices
    shape = (num_stages, packed.num_microbatches)
    forward_sent, forward_arrived, backward_sent, backward_arrived = (
        np.full(shape, -1, dtype=np.int64) for _ in range(4)
    )
    start, end = (np.empty(schedule.num_actions, dtype=np.int64) for _ in range(2))
    if copies is None:
        lanes = CopySchedule(_NOTHING, _NOTHING, np.zeros(num_devices + 1, dtype=np.int64))
        copy_after = copy_anchor = _NOTHING
    else:
        lanes = copies
        resolved = copy_positions(copies, costs, schedule, positions)
        copy_after, copy_anchor = resolved.after, resolved.anchor
    copy_start, copy_end = (np.full(len(lanes.codes), -1, dtype=np.int64) for _ in range(2))
    reduce_start, reduce_end = (np.full(num_stages, -1, dtype=np.int64) for _ in range(2))
    exchange_start, exchange_end = (np.empty_like(packed.exchange_ns) for _ in range(2))
    optimizer_start, optimizer_end = (np.empty(num_devices, dtype=np.int64) for _ in range(2))
    next_action, next_copy = schedule.offsets[:-1].copy(), lanes.offsets[:-1].copy()
    done = run(
        schedule.codes,
        schedule.offsets,
        packed.num_microbatches,
        packed.stages,
        packed.host,
        packed.link,
        packed.exchange_stages,
        packed.exchange_ns,
        packed.optimizer_ns,
        lanes.codes,
        lanes.offsets,
        copy_after,
        copy_anchor,
        start,
        end,
        forward_sent.reshape(-1),
        forward_arrived.reshape(-1),
        backward_sent.reshape(-1),
        backward_arrived.reshape(-1),
        copy_start,
        copy_end,
        reduce_start,
        reduce_end,
        exchange_start,
        exchange_end,
        optimizer_start,
        optimizer_end,
        next_action,
        next_copy,
    )
    if not done:
        from simulator.deadlock import deadlock

        raise deadlock(schedule, costs, copies, next_action, next_copy)
    return Timeline(
        schedule=schedule,
        copies=copies,
        costs=costs,
        start_ns=start,
        end_ns=end,
        forward_sent_ns=forward_sent,
        forward_arrived_ns=forward_arrived,
        backward_sent_ns=backward_sent,
        backward_arrived_ns=backward_arrived,
        copy_start_ns=copy_start,
        copy_end_ns=copy_end,
        reduce_start_ns=reduce_start,
        reduce_end_ns=reduce_end,
        exchange_start_ns=exchange_start,
        exchange_end_ns=exchange_end,
        optimizer_start_ns=optimizer_start,
        optimizer_end_ns=optimizer_end,
        peak_bytes=peak_bytes(schedule, costs, copies, start, end, copy_start, copy_end),
    )


_NOTHING = np.zeros(0, dtype=np.int64)
