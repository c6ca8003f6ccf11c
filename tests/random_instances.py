"""Small random workloads, clusters and stages, with every feature of the contract mixed."""

from __future__ import annotations

import random
from itertools import pairwise

from octotune.contract import Cluster, Device, Layer, Link, Links, Stage, Workload
from octotune.contract.cluster import DataParallel

FEATURES = (
    "speed", "links", "overhead", "memory", "tied", "data_parallel", "optimizer", "recompute",
    "kinds", "workspace", "held", "nic",
)  # fmt: skip


def random_instance(
    rng: random.Random, *, max_layers: int, max_devices: int = 3, max_microbatches: int = 4
) -> tuple[Workload, Cluster, int, set[str]]:
    """Return a workload, a cluster, a number of microbatches, and the features drawn."""
    num_layers, num_devices = rng.randint(1, max_layers), rng.randint(1, max_devices)
    num_microbatches = rng.randint(1, max_microbatches)
    features = {feature for feature in FEATURES if rng.random() < 0.35}
    longest = rng.choice([5, 10, 40])

    def some(feature: str, most: int) -> int:
        return rng.randint(0, most) if feature in features else 0

    def time() -> int:
        return rng.choice([0, *(rng.randint(1, longest) for _ in range(3))])

    layers = tuple(
        Layer(
            name=str(index),
            forward_ns=rng.randint(1, longest),
            input_grad_ns=time(),
            weight_grad_ns=time(),
            optimizer_ns=some("optimizer", longest),
            param_bytes=rng.randint(0, 5),
            state_bytes=some("memory", 4),
            saved_bytes=rng.choice([0, rng.randint(0, 5)]),
            saved_w_bytes=rng.randint(0, 5),
            held_w_bytes=some("held", 3),
            workspace_bytes=some("workspace", 3),
            output_bytes=some("links", 10),
            times_ns=(
                {"b": (time(), time(), time())}
                if "kinds" in features and rng.random() < 0.5
                else {}
            ),
        )
        for index in range(num_layers)
    )
    tied = ()
    if "tied" in features and num_layers > 1:
        tied = (tuple(sorted(rng.sample(range(num_layers), 2))),)
    activations = sum(layer.saved_bytes + layer.saved_w_bytes for layer in layers)
    state = sum(layer.state_bytes for layer in layers)

    def memory() -> int:
        if "memory" not in features:
            return 10**6
        most = activations * num_microbatches // num_devices + 6
        return rng.randint(state // num_devices, state + 1) + rng.randint(
            min(most, activations // 2), most
        )

    devices = tuple(
        Device(
            kind=rng.choice("ab") if "kinds" in features else "a",
            memory_bytes=memory(),
            speed=rng.choice([0.5, 1.0, 1.5, 2.0]) if "speed" in features else 1.0,
            host=index % 2 if "nic" in features else 0,
            overhead_ns=some("overhead", 3),
        )
        for index in range(num_devices)
    )
    cluster = Cluster(
        name="random",
        devices=devices,
        links=Links(
            intra_host=Link(
                latency_ns=some("links", 5), bandwidth=10**9 if "links" in features else 10**18
            ),
            inter_host=Link(latency_ns=rng.randint(0, 9), bandwidth=10**9),
        ),
        nic_bandwidth=rng.choice([5 * 10**8, 10**9]) if "nic" in features else None,
        data_parallel=(
            DataParallel(size=2, bandwidth=10**9) if "data_parallel" in features else None
        ),
    )
    workload = Workload(name="random", layers=layers, tied=tied)
    return workload, cluster, num_microbatches, features


def random_stages(
    rng: random.Random, workload: Workload, cluster: Cluster, *, recompute: bool, most: int = 5
) -> tuple[Stage, ...]:
    """Return a random partition and placement."""
    num_layers = len(workload.layers)
    num_stages = rng.randint(1, min(num_layers, most))
    cuts = [0, *sorted(rng.sample(range(1, num_layers), num_stages - 1)), num_layers]
    return tuple(
        Stage(
            layers=layers,
            device=rng.randrange(len(cluster.devices)),
            recompute=recompute and rng.random() < 0.5,
        )
        for layers in pairwise(cuts)
    )
