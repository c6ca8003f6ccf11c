"""Costs in the units that papers on schedules use: one unit of time is 1 ms, of memory 1 GB."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from octotune.contract import Cluster, Layer, Stage, Workload, build_costs
from simulator.actions import Kind, kind_of

UNIT_NS = 10**6
UNIT_BYTES = 10**9
UNIFORM = {"A": (1.0, 1.0, 1.0, 0.05), "B": (1.0, 1.1, 0.9, 0.1)}


def unit_costs(
    placement, num_microbatches, *, times=(1.0, 1.0, 1.0), shares=None, transfer=0.0, memory=None
):
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
    layers = tuple(
        Layer(
            name=str(stage),
            **{
                field: round(time * shares[stage] * UNIT_NS / v)
                for field, time in zip(
                    ("forward_ns", "input_grad_ns", "weight_grad_ns"), times, strict=True
                )
            },
            param_bytes=0,
            state_bytes=0,
            saved_bytes=0,
            saved_w_bytes=round(UNIT_BYTES / v),
            output_bytes=0,
        )
        for stage in range(len(placement))
    )
    cluster = Cluster.equal(
        p,
        latency_ns=round(transfer * UNIT_NS),
        **({} if memory is None else {"memory_bytes": round(memory * UNIT_BYTES)}),
    )
    stages = [
        Stage(layers=(stage, stage + 1), device=device) for stage, device in enumerate(placement)
    ]
    return build_costs(Workload(name="units", layers=layers), cluster, stages, num_microbatches)


def with_memory(costs, limits):
    """Return the costs with another limit a device."""
    return replace(costs, memory_bytes=np.array(limits, dtype=np.int64))


def in_flight(schedule):
    """Return the most activations each device holds: F begun, and W or B not ended."""
    kinds = kind_of(schedule.codes)
    change = (kinds == Kind.F).astype(int) - ((kinds == Kind.B) | (kinds == Kind.W))
    return [
        int(np.cumsum(change[begin:end]).max(initial=0))
        for begin, end in pairwise(schedule.offsets.tolist())
    ]
