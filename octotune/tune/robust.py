"""How a plan fares when actions take longer or shorter than planned.

The order is kept, as the executor keeps it, and every action's duration is drawn anew from
`1 - jitter` to `1 + jitter` times what the plan has. Transfers keep their channels' order; hosts'
NICs are left out here, where a run only serves to compare a plan with itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octotune.tune.balance import RandomState, island_rng, random
from octotune.tune.kernel import kernel
from octotune.tune.problem import Int64
from simulator.actions import (
    KIND_MASK,
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    STAGE_SHIFT,
    Kind,
    Schedule,
)
from simulator.costs import Costs

_F, _B, _I, _W = int(Kind.F), int(Kind.B), int(Kind.I), int(Kind.W)


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """Steps under jitter as parts of the step without."""

    mean: float
    worst: float
    samples: int


@kernel
def _step(
    stage: Int64,
    kind: Int64,
    microbatch: Int64,
    offsets: Int64,
    duration: Int64,
    device: Int64,
    hold: Int64,
    latency: Int64,
    optimizer: Int64,
    num_microbatches: int,
) -> int:
    num_devices, num_stages = len(offsets) - 1, len(device)
    arrival = np.full((num_stages, 2, num_microbatches), -1, np.int64)
    at = offsets[:-1].copy()
    free = np.zeros(num_devices, np.int64)
    channel = np.zeros((num_devices, num_devices), np.int64)
    moved = True
    while moved:
        moved = False
        for d in range(num_devices):
            while at[d] < offsets[d + 1]:
                p = at[d]
                s, n = stage[p], microbatch[p]
                ready = free[d]
                back = kind[p] == _I or kind[p] == _B
                if kind[p] == _F and s > 0:
                    if arrival[s, 0, n] < 0:
                        break
                    ready = max(ready, arrival[s, 0, n])
                elif back and s + 1 < num_stages:
                    if arrival[s, 1, n] < 0:
                        break
                    ready = max(ready, arrival[s, 1, n])
                end = ready + duration[p]
                free[d] = end
                at[d] += 1
                moved = True
                to, boundary = -1, s
                if kind[p] == _F and s + 1 < num_stages:
                    to = s + 1
                elif back and s > 0:
                    to, boundary = s - 1, s - 1
                if to >= 0:
                    e = device[to]
                    arrives = end
                    if e != d:
                        go = max(end, channel[d, e])
                        channel[d, e] = go + hold[boundary]
                        arrives = go + hold[boundary] + latency[boundary]
                    arrival[to, 1 if back else 0, n] = arrives
    step = 0
    for d in range(num_devices):
        step = max(step, free[d] + optimizer[d])
    return int(step)


@kernel
def _shake(duration: Int64, shaken: Int64, jitter: float, rng: RandomState) -> None:
    for p in range(len(duration)):
        factor = 1.0 - jitter + 2.0 * jitter * random(rng)
        shaken[p] = max(1, int(duration[p] * factor + 0.5))


def jittered(
    schedule: Schedule, costs: Costs, *, jitter: float = 0.1, samples: int = 20, seed: int = 0
) -> Jitter:
    """Return the mean and worst step under jitter of every action, relative to the plan's own."""
    codes = schedule.codes
    stage = codes >> STAGE_SHIFT
    kind = codes & KIND_MASK
    microbatch = (codes >> MICROBATCH_SHIFT) & MICROBATCH_MASK
    table = np.stack(
        [costs.forward_ns, costs.backward_ns, costs.input_grad_ns, costs.weight_grad_ns]
    )
    duration = table[kind, stage]
    hold = np.append(costs.transfer_hold_ns, 0)
    latency = np.append(costs.transfer_latency_ns, 0)
    arrays = (stage, kind, microbatch, np.array(schedule.offsets))
    world = (np.array(costs.stage_device), hold, latency, np.array(costs.optimizer_ns))

    def step(durations: Int64) -> int:
        return int(_step(*arrays, durations, *world, costs.num_microbatches))

    plain = max(1, step(duration))
    rng = island_rng(seed, 1 << 20)
    shaken = np.empty_like(duration)
    steps = []
    for _ in range(samples):
        _shake(duration, shaken, jitter, rng)
        steps.append(step(shaken) / plain)
    return Jitter(mean=float(np.mean(steps)), worst=max(steps), samples=samples)
