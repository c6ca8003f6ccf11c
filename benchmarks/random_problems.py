"""Random problems unlike those that the benchmarks report: for proofs, and to tune settings on."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np

from octotune.contract import Cluster, Device, Layer, Link, Links, Stage, Workload, build_costs
from octotune.contract.cluster import UNLIMITED_BYTES
from octotune.schedules import FAMILIES
from simulator.memory import order_peak_bytes

MIB = 1 << 20
FREE, TIGHT, HALF = "free", "tight", "half"


def random_workload(rng: random.Random, num_layers: int) -> Workload:
    """Return layers of two or three kinds in a repeating pattern, an embedding and a head."""
    kinds = [
        (rng.randint(1000, 4000), rng.uniform(0.7, 1.3), rng.uniform(0.4, 1.2), rng.randint(8, 64))
        for _ in range(rng.randint(1, 3))
    ]
    pattern = [rng.randrange(len(kinds)) for _ in range(rng.randint(2, 6))]
    layers = []
    for index in range(num_layers):
        forward, back, weight, size = kinds[pattern[index % len(pattern)]]
        times = 1.0
        if num_layers > 3 and index == 0:
            times = rng.uniform(0.1, 1.0)
        if num_layers > 3 and index == num_layers - 1:
            times = rng.uniform(1.0, 4.0)
        forward = int(forward * times * rng.uniform(0.95, 1.05))
        layers.append(
            Layer(
                name=str(index),
                forward_ns=forward * 1000,
                input_grad_ns=int(forward * back) * 1000,
                weight_grad_ns=int(forward * weight) * 1000,
                param_bytes=0,
                state_bytes=0,
                saved_bytes=rng.choice((0, size // 4)) * MIB,
                saved_w_bytes=size * MIB,
                output_bytes=MIB,
            )
        )
    return Workload(name="random", layers=tuple(layers))


def random_cluster(rng: random.Random, num_devices: int) -> Cluster:
    """Return devices of one speed or of two, with links that take a few percent of a layer."""
    slow = rng.choice((1.0, 1.0, rng.uniform(0.5, 0.9)))
    devices = tuple(
        Device(
            kind="random",
            memory_bytes=UNLIMITED_BYTES,
            host=0,
            speed=slow if index >= num_devices // 2 else 1.0,
        )
        for index in range(num_devices)
    )
    link = Link(latency_ns=rng.randint(0, 200_000), bandwidth=10 ** rng.randint(10, 12))
    return Cluster(name="random", devices=devices, links=Links(intra_host=link, inter_host=link))


def limited(workload: Workload, cluster: Cluster, num_microbatches: int, cap: str) -> Cluster:
    """Return the cluster with the memory that 1F1B takes, or half of it and one microbatch."""
    if cap == FREE:
        return cluster
    num_devices, num_layers = len(cluster.devices), len(workload.layers)
    cuts = np.linspace(0, num_layers, num_devices + 1).astype(int).tolist()
    stages = [Stage(layers=(a, b), device=d) for d, (a, b) in enumerate(pairwise(cuts))]
    costs = build_costs(workload, cluster, stages, num_microbatches)
    peak = int(order_peak_bytes(FAMILIES["1f1b"].generate(costs), costs).max())
    room = peak if cap == TIGHT else int(peak * (0.5 + 1.0 / num_devices))
    return Cluster(
        name=cluster.name,
        devices=tuple(
            Device(kind=d.kind, memory_bytes=room, host=d.host, speed=d.speed)
            for d in cluster.devices
        ),
        links=cluster.links,
    )


def random_stages(rng: random.Random, workload: Workload, num_devices: int) -> tuple[Stage, ...]:
    """Return a random partition and placement in which every device has a stage."""
    num_layers = len(workload.layers)
    num_stages = rng.randint(min(num_devices, num_layers), min(num_layers, 2 * num_devices))
    cuts = [0, *sorted(rng.sample(range(1, num_layers), num_stages - 1)), num_layers]
    placed = [s % num_devices for s in range(num_stages)]
    if rng.random() < 0.5:
        rng.shuffle(placed)
    return tuple(
        Stage(layers=layers, device=device)
        for layers, device in zip(pairwise(cuts), placed, strict=True)
    )
