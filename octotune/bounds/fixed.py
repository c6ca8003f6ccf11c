"""A lower bound of the step over all orders of one partition and placement.

The device bound, a chain through all stages, a memory argument, and for each device the optimal
preemptive schedule of its actions between their heads and tails (`octotune.bounds.kernels`).
Channels count as far as one after another on each boundary; NIC sides shared by several do not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octotune.bounds.kernels import (
    NEVER,
    device_bound,
    heads_and_tails,
    most_within,
    one_machine,
)
from octotune.bounds.value import Bound
from simulator.costs import Costs

Int64 = NDArray[np.int64]


def heads_and_tails_of(costs: Costs, *, copies: bool = True) -> tuple[Int64, Int64]:
    """Return heads and tails [2, S, m] of the k-th F and the k-th I of each stage.

    A head is the earliest start, a tail the least time from an end to the end of the step.
    """
    rest = np.maximum(0, costs.backward_ns - costs.input_grad_ns)
    room = costs.memory_bytes - costs.static_bytes
    most, most_w = _most_in_flight(costs, room, *_kept_bytes(costs, copies=copies))
    found: tuple[Int64, Int64] = heads_and_tails(
        costs.forward_ns,
        costs.input_grad_ns,
        rest,
        costs.transfer_hold_ns,
        costs.transfer_latency_ns,
        costs.transfer_latency_ns,
        costs.stage_device,
        _after_ns(costs),
        most,
        most_w,
        costs.num_microbatches,
    )
    return found


def fixed_bound(costs: Costs, *, copies: bool = True) -> Bound:
    """Return a bound of `step_ns` over all orders of these stages on their devices.

    Valid whether each stage and microbatch runs B, or I and W, for every order within memory.

    Args:
        costs: of the stages in their placement.
        copies: whether stages may offload; without it the memory arguments are stronger.
    """
    forward, input_grad = costs.forward_ns, costs.input_grad_ns
    rest = np.maximum(0, costs.backward_ns - input_grad)
    hop = costs.transfer_hold_ns + costs.transfer_latency_ns
    m = costs.num_microbatches
    after = _after_ns(costs)
    devices = sorted(set(costs.stage_device.tolist()))
    least_after = {device: int(after[costs.stage_device == device].min()) for device in devices}
    room = costs.memory_bytes - costs.static_bytes
    kept, _ = _kept_bytes(costs, copies=copies)
    heads, tails = heads_and_tails_of(costs, copies=copies)
    parts = {
        "load": 0,
        "device": device_bound(
            forward,
            input_grad,
            costs.backward_ns,
            hop,
            costs.stage_device,
            costs.optimizer_ns,
            m,
        ),
        "chain": int((heads[1, :, 0] + input_grad + tails[1, :, 0]).max()),
        "memory": 0,
        "heads and tails": 0,
        "reductions": 0,
    }

    def raise_to(name: str, bound_ns: int) -> None:
        parts[name] = max(parts[name], bound_ns)

    for device in devices:
        stages = np.flatnonzero(costs.stage_device == device)
        does = m * int((forward + costs.backward_ns)[stages].sum())
        last = least_after[device]
        raise_to("load", does + last)

        # Before its first I a device runs only Fs that memory holds; after its last I only Ws
        # that memory has held back.
        begin, until = int(heads[0, stages[0], 0]), int(heads[1, stages[-1], 0])
        tail = int(tails[1, stages[0], m - 1]) - last
        spare = int(room[device] - costs.workspace_bytes[stages].min())
        fills = most_within(forward[stages], kept[stages], m, spare)
        fills_w = most_within(rest[stages], _pending_bytes(costs, stages), m, spare)
        idle = max(0, until - fills, begin) + max(0, tail - fills_w)
        raise_to("memory", does + idle + last)

        release = [heads[0, stages], heads[1, stages], heads[1, stages] + input_grad[stages, None]]
        length = np.stack([forward[stages], input_grad[stages], rest[stages]])
        left = np.arange(m - 1, -1, -1)
        after_w = left * rest[stages, None] + after[stages, None]
        tail_ns = np.stack([tails[0, stages], tails[1, stages], after_w])
        raise_to(
            "heads and tails",
            one_machine(
                np.stack(release).reshape(-1),
                np.repeat(length, m, axis=1).reshape(-1),
                np.maximum(tail_ns, last).reshape(-1),
            ),
        )

        reduces = np.maximum(0, costs.reduce_ns[stages])
        ends = heads[1, stages, m - 1] + input_grad[stages] + rest[stages]
        optimizer = int(costs.optimizer_ns[device])
        raise_to("reductions", int(ends.min()) + int(reduces.sum()) + optimizer)
    return Bound(ns=max(parts.values()), parts=parts)


def _after_ns(costs: Costs) -> Int64:
    """Return [S] the least time from a stage's last backward to the end of all its work."""
    after = np.maximum(0, costs.reduce_ns) + costs.optimizer_ns[costs.stage_device]
    for pair, exchange in zip(costs.exchange_stages, costs.exchange_ns, strict=True):
        most = int(costs.optimizer_ns[costs.stage_device[pair]].max())
        after[pair] = np.maximum(after[pair], exchange + most)
    return after


def _kept_bytes(costs: Costs, *, copies: bool) -> tuple[Int64, Int64]:
    """Return [S] the least that a microbatch keeps on its device until I ends, and until W ends.

    While no I of the stage runs: with recompute that is the stage's input alone.
    """
    kept = costs.saved_bytes + costs.saved_w_bytes
    if copies:
        kept = kept - np.where(costs.copy_ns >= 0, costs.offload_bytes, 0)
    kept = np.where(costs.recompute, costs.input_bytes, kept)
    return kept, np.minimum(kept, costs.saved_w_bytes + costs.held_w_bytes)


def _pending_bytes(costs: Costs, stages: Int64) -> Int64:
    """Return what a microbatch keeps between I and W."""
    return (costs.saved_w_bytes + costs.held_w_bytes)[stages]


def _most_in_flight(costs: Costs, room: Int64, kept: Int64, kept_w: Int64) -> tuple[Int64, Int64]:
    """Return [S] how many microbatches fit from the start of F to the end of I, and of W.

    A microbatch in flight at a stage is in flight at the device's earlier stages too, up to I.
    """
    m = costs.num_microbatches
    most, most_w = np.full(costs.num_stages, m), np.full(costs.num_stages, m)
    stacked: dict[int, int] = {}
    for stage, device in enumerate(costs.stage_device.tolist()):
        stacked[device] = stacked.get(device, 0) + int(kept[stage])
        spare = int(room[device] - costs.workspace_bytes[stage])
        if spare >= NEVER:
            continue
        if stacked[device] > 0:
            most[stage] = min(m, max(1, spare // stacked[device]))
        if kept_w[stage] > 0:
            most_w[stage] = min(m, max(1, spare // int(kept_w[stage])))
    return most, most_w
