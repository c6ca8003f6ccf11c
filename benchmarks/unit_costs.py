"""Costs in the units that papers on schedules use: one unit of time is 1 ms, of memory 1 GB."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from octotune.contract import Cluster, Layer, Stage, Workload, build_costs
from simulator.actions import Kind, Schedule, kind_of
from simulator.costs import Costs

UNIT_NS = 10**6
UNIT_BYTES = 10**9
UNIFORM = {"A": (1.0, 1.0, 1.0, 0.05), "B": (1.0, 1.1, 0.9, 0.1)}


def unit_costs(
    placement: Sequence[int],
    num_microbatches: int,
    *,
    times: Sequence[float] = (1.0, 1.0, 1.0),
    shares: Sequence[float] | None = None,
    transfer: float = 0.0,
    memory: float | None = None,
) -> Costs:
    """Return costs of one layer a stage, activations kept to the end of W (or B).

    Args:
        placement: the device of each stage.
        num_microbatches: m.
        times: F, I and W of a device with share 1, in units.
        shares: how much of that each device has, cut evenly into its stages; or, with one number
            a stage, how much of a device's v-th part each stage has. By default 1.
        transfer: units until a tensor has arrived.
        memory: units of activations that fit onto a device; by default endless.
    """
    p = max(placement) + 1
    v = len(placement) / p
    if shares is None:
        shares = [1.0] * len(placement)
    elif len(shares) != len(placement):
        shares = [shares[device] for device in placement]
    layers = []
    for stage in range(len(placement)):
        forward, input_grad, weight_grad = (
            round(time * shares[stage] * UNIT_NS / v) for time in times
        )
        layers.append(
            Layer(
                name=str(stage),
                forward_ns=forward,
                input_grad_ns=input_grad,
                weight_grad_ns=weight_grad,
                param_bytes=0,
                state_bytes=0,
                saved_bytes=0,
                saved_w_bytes=round(UNIT_BYTES / v),
                output_bytes=0,
            )
        )
    cluster = Cluster.equal(
        p,
        latency_ns=round(transfer * UNIT_NS),
        **({} if memory is None else {"memory_bytes": round(memory * UNIT_BYTES)}),
    )
    stages = [
        Stage(layers=(stage, stage + 1), device=device) for stage, device in enumerate(placement)
    ]
    return build_costs(
        Workload(name="units", layers=tuple(layers)), cluster, stages, num_microbatches
    )


def in_flight(schedule: Schedule) -> list[int]:
    """Return the most activations each device holds: F begun, and W or B not ended."""
    kinds = kind_of(schedule.codes)
    change = (kinds == Kind.F).astype(int) - ((kinds == Kind.B) | (kinds == Kind.W))
    return [
        int(np.cumsum(change[begin:end]).max(initial=0))
        for begin, end in pairwise(schedule.offsets.tolist())
    ]


def uneven_shares(kind: str, num_devices: int, num_stages: int) -> list[float]:
    """Return what each stage has where each device's share of the model is cut evenly, in order.

    head18: the last share is 1.8; headfirst: that, and the first 0.6; alt: 0.7 and 1.3 in turn.
    """
    p = num_devices
    shares = {
        "head18": [*[1.0] * (p - 1), 1.8],
        "headfirst": [0.6, *[1.0] * (p - 2), 1.8],
        "alt": [1.3 if device % 2 else 0.7 for device in range(p)],
    }[kind]
    return [shares[stage * p // num_stages] for stage in range(num_stages)]
