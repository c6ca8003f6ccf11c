"""Whether any plan fits the memory, and if not, what is missing where.

Every order holds, on each device and at some moment, the static bytes of its layers and the
activations of one microbatch of them: F of the last stage on a device runs before any I of the
first. So layers with that size must pack into the devices, and where they do, a plan that runs one
microbatch at a time is feasible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from octotune.contract import Cluster, Stage, Workload
from octotune.errors import InfeasibleError
from octotune.tune.genome import NUM_STAGES, Genome, empty_genome
from octotune.tune.problem import World
from simulator.memory import readable


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Bytes of each layer on a device with one microbatch in flight, and what an action adds."""

    fixed: tuple[int, ...]  # state, and activations kept between F and I
    during: tuple[int, ...]  # most that one action of the layer alone adds


def packed_genomes(workload: Workload, cluster: Cluster, world: World) -> Iterator[Genome]:
    """Yield genomes that pack layers into devices by bytes alone, the plainest first.

    Without recompute, then with it everywhere; neighbours on a device in one stage, then a stage
    each, because a stage's backward holds what all its layers hold in it.

    Raises:
        InfeasibleError: where packing fails; it names the device or layer and the shortfall.
    """
    for recompute in (0, 1):
        where, _, _ = _pack(_sizes(workload, recompute), world)
        if where is not None:
            for merged in (True, False):
                yield _genome(world, where, recompute, merged)
    raise InfeasibleError(no_room(workload, cluster, world))


def _sizes(workload: Workload, recompute: int) -> _Sizes:
    layers = workload.layers
    inputs = [0, *(layer.output_bytes for layer in layers[:-1])]
    fixed, during = [], []
    for layer, entering in zip(layers, inputs, strict=True):
        saved = layer.saved_bytes + layer.saved_w_bytes
        kept = entering if recompute else saved
        fixed.append(layer.state_bytes + kept)
        during.append(max(0, layer.held_w_bytes + saved - kept) + layer.workspace_bytes)
    return _Sizes(fixed=tuple(fixed), during=tuple(during))


def _pack(sizes: _Sizes, world: World) -> tuple[list[int] | None, int, int]:
    """Return the device of each layer; else None, and the layer and bytes that were missing.

    Large layers first, each on the device with the least room that still takes it, and if that
    fails on the one with most; what an action adds counts once a device.
    """
    num_devices = world.num_devices
    by_size = sorted(range(len(sizes.fixed)), key=lambda i: (-sizes.fixed[i] - sizes.during[i], i))
    layer, missing = 0, 0
    for tightest in (True, False):
        used, most = [0] * num_devices, [0] * num_devices
        where = [0] * len(sizes.fixed)
        missing = 0
        for layer in by_size:
            left = [
                int(world.room[d])
                - used[d]
                - sizes.fixed[layer]
                - max(most[d], sizes.during[layer])
                for d in range(num_devices)
            ]
            fitting = [d for d in range(num_devices) if left[d] >= 0]
            if not fitting:
                missing = -max(left)
                break
            d = (min if tightest else max)(fitting, key=lambda e: (left[e], e))
            where[layer] = d
            used[d] += sizes.fixed[layer]
            most[d] = max(most[d], sizes.during[layer])
        if not missing:
            return where, 0, 0
    return None, layer, missing


def _genome(world: World, where: list[int], recompute: int, merged: bool) -> Genome:
    starts = [i for i in range(len(where)) if not (merged and i and where[i] == where[i - 1])]
    genome = empty_genome(world, max(len(starts), 1))
    genome.meta[NUM_STAGES] = len(starts)
    genome.cut[: len(starts) + 1] = [*starts, len(where)]
    genome.device[: len(starts)] = [where[start] for start in starts]
    genome.recompute[:] = recompute
    genome.limit[:] = 1
    genome.late[:] = 1
    return genome


def no_room(workload: Workload, cluster: Cluster, world: World) -> str:
    """Return the one line that says which device or layer lacks how much, and what would help."""
    plain, again = _sizes(workload, 0), _sizes(workload, 1)
    rooms = [int(room) for room in world.room]
    largest = int(np.argmax(rooms))
    needs = [
        min(sizes.fixed[i] + sizes.during[i] for sizes in (plain, again))
        for i in range(len(workload.layers))
    ]
    layer = int(np.argmax(needs))
    has = cluster.devices[largest].memory_bytes
    if needs[layer] > rooms[largest]:
        missing = needs[layer] - rooms[largest]
        return (
            f"layer {layer} ({workload.layers[layer].name}) needs {readable(needs[layer])} with "
            f"one microbatch in flight and device {largest}, the largest, has {readable(has)} of "
            "which "
            f"{readable(rooms[largest])} are free, {missing} bytes too few; split the layer, "
            "or use smaller microbatches or a larger device"
        )
    least = sum(min(a, b) for a, b in zip(plain.fixed, again.fixed, strict=True))
    _, last, missing = _pack(again, world)
    total = sum(rooms)
    if least > total:
        missing = max(missing, -(-(least - total) // len(rooms)))
    return (
        f"no plan fits: all layers with one microbatch in flight need {readable(least)}, "
        f"the devices have {readable(total)} free; at best device {largest} ({readable(has)}) "
        "still lacks "
        f"{max(1, missing)} bytes for layer {last} ({workload.layers[last].name}); use more "
        "devices or memory, smaller microbatches, recompute or offload"
    )


def too_small(workload: Workload, cluster: Cluster, stages: Sequence[Stage]) -> str:
    """Return the line that says which device has no room for one microbatch of given stages."""
    needs = [device.reserved_bytes for device in cluster.devices]
    for stage in stages:
        for layer in workload.layers[stage.layers[0] : stage.layers[1]]:
            kept = 0 if stage.recompute else layer.saved_bytes + layer.saved_w_bytes
            needs[stage.device] += layer.state_bytes + kept
    limits = [device.memory_bytes for device in cluster.devices]
    short = [need - limit for need, limit in zip(needs, limits, strict=True)]
    device = int(np.argmax(short))
    return (
        f"device {device} needs {needs[device]} bytes and more for one microbatch of its stages "
        f"and has {limits[device]}, {max(1, short[device])} bytes too few; move layers off it or "
        "use recompute"
    )
