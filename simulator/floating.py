"""Floating: a step whose W's leave the plan's order to fill the time their device would wait.

The order of F, I and B is the schedule's, and so is the order of what adds to one stage's weights
(its W's and B's), so that sums keep their bits. Beyond that a device decides when it is free: does
the next F, I or B fit into the memory limit, and is its input there? If not, and a W may run, the
W that the schedule has first runs; it is not interrupted. What is left runs at the end. The
executor follows the same rule, so this says what floating is worth, under durations that differ
from the plan's.

Decisions are made in the order of time: when one is made, every action that ended before has been
scheduled, so what has arrived is known. Transfers are those of the contract without shared NICs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from simulator.actions import Kind, Schedule, kind_of, microbatch_of, stage_of
from simulator.compiled import kernel
from simulator.costs import Costs
from simulator.errors import DeadlockError, ScheduleError
from simulator.memory import byte_changes

Int64 = NDArray[np.int64]
Jitter = Literal["microbatch", "stage and microbatch", "action", "stage"]

_F, _B, _I, _W = (int(kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Floated:
    """When each action ran, in the order of `Schedule.codes`, and how many W's were put off."""

    start_ns: Int64  # [A]
    end_ns: Int64  # [A]
    most_pending: Int64  # [D] the most W's whose I had run and they had not

    @property
    def step_ns(self) -> int:
        """When the last action ended."""
        return int(self.end_ns.max())


def nominal_durations(schedule: Schedule, costs: Costs) -> Int64:
    """Return each action's duration [A] by its stage and kind."""
    stages, kinds = stage_of(schedule.codes), kind_of(schedule.codes)
    table = np.stack(
        [costs.forward_ns, costs.backward_ns, costs.input_grad_ns, costs.weight_grad_ns]
    )
    found: Int64 = table[kinds, stages]
    return found


def jittered(schedule: Schedule, costs: Costs, *, kind: Jitter, spread: float, seed: int) -> Int64:
    """Return durations [A] scaled by factors drawn evenly from 1 - spread to 1 + spread.

    One factor a microbatch, a (stage, microbatch), an action, or a stage.
    """
    rng = np.random.default_rng(seed)
    stages, microbatches = stage_of(schedule.codes), microbatch_of(schedule.codes)
    if kind == "microbatch":
        factors = rng.uniform(1 - spread, 1 + spread, costs.num_microbatches)[microbatches]
    elif kind == "stage":
        factors = rng.uniform(1 - spread, 1 + spread, costs.num_stages)[stages]
    elif kind == "action":
        factors = rng.uniform(1 - spread, 1 + spread, len(schedule.codes))
    else:
        shape = (costs.num_stages, costs.num_microbatches)
        factors = rng.uniform(1 - spread, 1 + spread, shape)[stages, microbatches]
    scaled = np.floor(nominal_durations(schedule, costs) * factors + 0.5)
    durations: Int64 = np.maximum(1, scaled).astype(np.int64)
    return durations


def simulate_floating(
    schedule: Schedule,
    costs: Costs,
    *,
    durations_ns: Int64 | None = None,
    floating: bool = True,
    limit_bytes: Int64 | None = None,
    grace_ns: int = 0,
) -> Floated:
    """Run a valid schedule with floating W's.

    Args:
        schedule: obeys `simulator.validate`, has an end.
        costs: links, memory, and the durations where `durations_ns` gives none.
        durations_ns: of each action [A], each at least 1.
        floating: False keeps W's in the schedule's order, for comparison.
        limit_bytes: [D] the most each device may hold, static bytes included; without, no limit.
        grace_ns: how long an input may be late before a W runs in its place.

    Raises:
        ScheduleError: if transfers share NICs, which this does not simulate.
        DeadlockError: if the order cannot run.
    """
    if costs.transfer_uses_nic.any():
        raise ScheduleError("floating is not simulated on clusters with nic_bandwidth")
    if durations_ns is None:
        durations_ns = nominal_durations(schedule, costs)
    if limit_bytes is None:
        limit_bytes = np.full(costs.num_devices, NO_LIMIT, dtype=np.int64)
    rise, fall = byte_changes(costs)
    start = np.full(len(schedule.codes), -1, dtype=np.int64)
    end = np.full(len(schedule.codes), -1, dtype=np.int64)
    pending = np.zeros(costs.num_devices, dtype=np.int64)
    done = _run(
        stage_of(schedule.codes),
        kind_of(schedule.codes),
        microbatch_of(schedule.codes),
        np.array(schedule.offsets, dtype=np.int64),
        np.array(costs.stage_device, dtype=np.int64),
        np.array(costs.transfer_hold_ns, dtype=np.int64),
        np.array(costs.transfer_latency_ns, dtype=np.int64),
        costs.num_microbatches,
        np.ascontiguousarray(durations_ns, dtype=np.int64),
        rise,
        fall,
        np.array(costs.static_bytes, dtype=np.int64),
        np.array(limit_bytes, dtype=np.int64),
        floating,
        grace_ns,
        start,
        end,
        pending,
    )
    if done < len(schedule.codes):
        raise DeadlockError(
            f"the order cannot run: {len(schedule.codes) - done} actions wait for each other", ()
        )
    return Floated(start_ns=start, end_ns=end, most_pending=pending)


@kernel
def _run(
    stages: Int64,
    kinds: Int64,
    microbatches: Int64,
    offsets: Int64,
    stage_device: Int64,
    hold: Int64,
    latency: Int64,
    num_microbatches: int,
    durations: Int64,
    rise: Int64,
    fall: Int64,
    static: Int64,
    limit: Int64,
    floating: bool,
    grace: int,
    start: Int64,
    end: Int64,
    most_pending: Int64,
) -> int:
    """Fill `start` and `end`; return how many actions ran."""
    num_devices, num_stages = len(offsets) - 1, len(stage_device)
    total = len(stages)
    far = np.int64(2**62)

    # each device's main row (all but W, or all), and each stage's W's and B's, in order
    row = np.empty(total, dtype=np.int64)
    row_begin = np.zeros(num_devices + 1, dtype=np.int64)
    count = 0
    for device in range(num_devices):
        row_begin[device] = count
        for at in range(offsets[device], offsets[device + 1]):
            if not floating or kinds[at] != _W:
                row[count] = at
                count += 1
    row_begin[num_devices] = count
    lane = np.empty((num_stages, num_microbatches), dtype=np.int64)
    lane_size = np.zeros(num_stages, dtype=np.int64)
    for at in range(total):
        if kinds[at] in (_W, _B):
            stage = stages[at]
            if lane_size[stage] < num_microbatches:
                lane[stage, lane_size[stage]] = at
                lane_size[stage] += 1

    row_at = row_begin[:num_devices].copy()
    lane_at = np.zeros(num_stages, dtype=np.int64)
    due = np.zeros((num_stages, num_microbatches), dtype=np.bool_)
    num_due = np.zeros(num_devices, dtype=np.int64)
    # when what F and what I or B of (stage, microbatch) wait for from elsewhere is there
    forward = np.full((num_stages, num_microbatches), far, dtype=np.int64)
    backward = np.full((num_stages, num_microbatches), far, dtype=np.int64)
    forward[0, :] = 0
    backward[num_stages - 1, :] = 0
    channel = np.zeros((num_devices, num_devices), dtype=np.int64)
    free = np.zeros(num_devices, dtype=np.int64)  # when the device's last action ends
    decide = np.zeros(num_devices, dtype=np.int64)  # when it looks again; far: when told
    waited = np.zeros(num_devices, dtype=np.bool_)
    held = static.copy()
    done = 0

    while True:
        device = 0
        for other in range(1, num_devices):
            if decide[other] < decide[device]:
                device = other
        now = decide[device]
        if now == far:
            return done
        chosen = np.int64(-1)
        ready = np.int64(0)
        upcoming = np.int64(-1)
        if row_at[device] < row_begin[device + 1]:
            upcoming = row[row_at[device]]
            stage, microbatch = stages[upcoming], microbatches[upcoming]
            if kinds[upcoming] == _F:
                ready = forward[stage, microbatch]
            elif kinds[upcoming] != _W:
                ready = backward[stage, microbatch]
        if floating:
            must = False
            late = upcoming == -1 or ready > now
            if upcoming != -1:
                at_kind = stages[upcoming] * 4 + kinds[upcoming]
                if kinds[upcoming] == _B and lane[stages[upcoming], lane_at[stages[upcoming]]] != (
                    upcoming
                ):
                    chosen = lane[stages[upcoming], lane_at[stages[upcoming]]]
                elif held[device] + rise[at_kind] > limit[device]:
                    must = True
            if chosen == -1 and (late or must):
                for stage in range(num_stages):
                    if stage_device[stage] != device or lane_at[stage] >= lane_size[stage]:
                        continue
                    head = lane[stage, lane_at[stage]]
                    if (
                        kinds[head] == _W
                        and due[stage, microbatches[head]]
                        and (chosen == -1 or head < chosen)
                    ):
                        chosen = head
                idle = chosen != -1 and not must and upcoming != -1
                if idle and grace > 0 and not waited[device]:
                    # give a late input a moment before a whole W goes in its place
                    waited[device] = True
                    decide[device] = min(ready, now + grace)
                    continue
        if chosen == -1:
            if upcoming == -1:
                decide[device] = far
                continue
            if ready > now:
                decide[device] = ready  # far where its producer has not started
                continue
            chosen = upcoming

        waited[device] = False
        stage, microbatch, kind = stages[chosen], microbatches[chosen], kinds[chosen]
        start[chosen] = now
        end[chosen] = now + durations[chosen]
        done += 1
        held[device] += rise[stage * 4 + kind] - fall[stage * 4 + kind]
        free[device] = decide[device] = end[chosen]
        if chosen == upcoming:
            row_at[device] += 1
        if kind in (_W, _B):
            lane_at[stage] += 1
        if kind == _I:
            due[stage, microbatch] = True
            num_due[device] += 1
            most_pending[device] = max(most_pending[device], num_due[device])
        elif kind == _W:
            due[stage, microbatch] = False
            num_due[device] -= 1
        if kind == _W:
            continue
        target = stage + 1 if kind == _F else stage - 1
        if target < 0 or target >= num_stages:
            continue
        boundary = min(stage, target)
        there = stage_device[target]
        arrival = end[chosen]
        if there != device:
            leaves = max(arrival, channel[device, there])
            channel[device, there] = leaves + hold[boundary]
            arrival = leaves + hold[boundary] + latency[boundary]
        if kind == _F:
            forward[target, microbatch] = arrival
        else:
            backward[target, microbatch] = arrival
        # a device that waits for just this looks again when it is there
        if there != device and row_at[there] < row_begin[there + 1]:
            wanted = row[row_at[there]]
            wants = kinds[wanted] == _F if kind == _F else kinds[wanted] in (_B, _I)
            if (
                wants
                and stages[wanted] == target
                and microbatches[wanted] == microbatch
                and free[there] <= now
                and decide[there] > max(arrival, free[there])
            ):
                decide[there] = max(arrival, free[there])
