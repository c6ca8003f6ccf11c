"""What limits a plan, in words: a layer that cannot be cut, memory, a link, fill and drain."""

from __future__ import annotations

import numpy as np

from octotune.contract import Workload
from octotune.tune.plans import Candidate
from octotune.tune.problem import World
from simulator.bubbles import Cause, find_bubbles
from simulator.timeline import Timeline

WHOLE_LAYER = 0.97  # of the step, by one layer's own chain
NEAR_LIMIT = 0.95  # of a device's memory
WAITING = 0.02  # of all device time, for transfers
EDGES = 0.5  # of all idle time, for fill and drain
IDLE = 0.01  # of all device time


def limits_of(
    workload: Workload,
    world: World,
    candidate: Candidate,
    timeline: Timeline,
    lower_bound_ns: int | None,
) -> list[str]:
    """Return what keeps the step from being shorter, the strongest first; never empty."""
    step, m = candidate.step_ns, world.num_microbatches
    found: list[str] = []
    if lower_bound_ns is not None and step <= lower_bound_ns:
        found.append("nothing: the step equals the lower bound over all plans")

    fastest = world.work.min(axis=0)
    layer_work = np.diff(fastest)
    before = np.diff(world.forward, axis=1).min(axis=0)
    heads = np.concatenate(([0], np.cumsum(before)[:-1]))
    chains = heads + m * layer_work
    layer = int(np.argmax(chains))
    if chains[layer] >= WHOLE_LAYER * step:
        found.append(
            f"layer {layer} ({workload.layers[layer].name}) cannot be cut, and its work alone "
            f"takes {chains[layer] / step:.1%} of the step: only splitting that layer would help"
        )

    bubbles = find_bubbles(timeline)
    idle = {cause: int(ns.sum()) for cause, ns in bubbles.ns_by_cause().items()}
    total = step * world.num_devices
    all_idle = sum(idle.values())
    memory = timeline.costs.memory_bytes
    near = [
        device
        for device, peak in enumerate(candidate.peak_bytes)
        if peak >= NEAR_LIMIT * int(memory[device])
    ]
    if near and all_idle > IDLE * total:
        found.append(
            f"memory: device{'s' if len(near) > 1 else ''} {', '.join(map(str, near))} "
            "at its limit; recompute, offload or more stages would free some"
        )
    waiting = idle[Cause.QUEUED] + idle[Cause.IN_FLIGHT]
    if waiting > WAITING * total:
        table = np.zeros((world.num_devices,), np.int64)
        mask = (bubbles.cause == Cause.QUEUED) | (bubbles.cause == Cause.IN_FLIGHT)
        np.add.at(table, bubbles.device[mask], bubbles.duration_ns[mask])
        device = int(np.argmax(table))
        found.append(
            f"links: transfers take {waiting / total:.1%} of device time, "
            f"most before device {device}"
        )
    edges = idle[Cause.WARMUP] + idle[Cause.COOLDOWN]
    if all_idle > IDLE * total and edges > EDGES * all_idle:
        found.append(
            f"fill and drain: {edges / total:.1%} of device time; more microbatches would help"
        )
    if idle[Cause.UNUSED]:
        unused = [d for d in range(world.num_devices) if not (timeline.busy_ns[d] > 0)]
        found.append(f"devices {', '.join(map(str, unused))} hold no layer")
    if not found:
        found.append("the balance of whole layers over devices, and the order of their work")
    return found
