"""Workload + cluster + stages -> Costs, in the contract's exact integer arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from octotune.contract.cluster import Cluster, Device
from octotune.contract.plan import Stage
from octotune.contract.workload import Layer, Workload
from octotune.errors import MalformedError
from simulator.costs import Costs

NS_PER_S = 10**9
# sums of times or bytes stay below this, so that int64 arithmetic never wraps
MAX_SUM = 2**62


def ceil_div(numerator: int, denominator: int) -> int:
    """Return ceil(numerator / denominator), exactly."""
    return -(-numerator // denominator)


def layer_times_ns(layer: Layer, device: Device) -> tuple[int, int, int]:
    """Return a layer's F, I and W time on a device: as measured there, or scaled by its speed."""
    measured = layer.times_ns.get(device.kind)
    if measured is not None:
        return measured
    times = (layer.forward_ns, layer.input_grad_ns, layer.weight_grad_ns)
    forward, input_grad, weight_grad = (scaled_ns(time, device.speed) for time in times)
    return forward, input_grad, weight_grad


def scaled_ns(time_ns: int, speed: float) -> int:
    """Return round(time / speed): floor(x + 0.5) in IEEE double. Raises MalformedError."""
    scaled = time_ns / speed + 0.5
    if scaled > MAX_SUM:
        raise MalformedError(f"times: {time_ns} ns at speed {speed} are too long; at most 2^62 ns")
    return math.floor(scaled)


def build_costs(
    workload: Workload, cluster: Cluster, stages: Sequence[Stage], num_microbatches: int
) -> Costs:
    """Return what the simulator needs to know of a plan's stages.

    The stages are valid: consecutive, covering every layer, on devices that exist.

    Raises:
        MalformedError: if times or sizes add up to more than 2^62.

    Source:
        docs/contract.md, sections Time, Memory and Offload.
    """
    devices = cluster.devices
    layers = [workload.layers[begin:end] for begin, end in (stage.layers for stage in stages)]
    stage_device = [stage.device for stage in stages]
    num_stages = len(stages)
    pair_links = cluster.pair_links()

    def link_of(source: int, target: int) -> tuple[int, int, bool]:
        """Return latency, effective bandwidth, and whether the NIC is used."""
        link = pair_links.get((min(source, target), max(source, target)))
        crosses = devices[source].host != devices[target].host
        if link is None:
            link = cluster.links.inter_host if crosses else cluster.links.intra_host
        assert link is not None  # a cluster across hosts has inter_host
        if crosses and cluster.nic_bandwidth is not None:
            return link.latency_ns, min(link.bandwidth, cluster.nic_bandwidth), True
        return link.latency_ns, link.bandwidth, False

    forward: list[int] = []
    input_grad: list[int] = []
    weight_grad: list[int] = []
    backward: list[int] = []
    for stage, of_stage in zip(stages, layers, strict=True):
        device = devices[stage.device]
        times = [layer_times_ns(layer, device) for layer in of_stage]
        f, i, w = (sum(column) for column in zip(*times, strict=True))
        again = f if stage.recompute else 0
        forward.append(max(1, f + device.overhead_ns))
        input_grad.append(max(1, i + again + device.overhead_ns))
        weight_grad.append(max(1, w + device.overhead_ns))
        backward.append(max(1, i + w + again + device.overhead_ns))

    transfer_bytes: list[int] = []
    hold: list[int] = []
    latency: list[int] = []
    uses_nic: list[bool] = []
    for boundary in range(num_stages - 1):
        source, target = stage_device[boundary], stage_device[boundary + 1]
        if source == target:
            transfer_bytes.append(0)
            hold.append(0)
            latency.append(0)
            uses_nic.append(False)
            continue
        size = layers[boundary][-1].output_bytes
        link_latency, bandwidth, nic = link_of(source, target)
        transfer_bytes.append(size)
        hold.append(ceil_div(size * NS_PER_S, bandwidth))
        latency.append(link_latency)
        uses_nic.append(nic)

    parallel = cluster.data_parallel
    reduces = parallel is not None and parallel.size > 1
    reduce_ns: list[int] = []
    for of_stage in layers:
        if not reduces:
            reduce_ns.append(-1)
            continue
        assert parallel is not None
        size = sum(layer.param_bytes for layer in of_stage)
        reduce_ns.append(
            ceil_div(2 * (parallel.size - 1) * size * NS_PER_S, parallel.size * parallel.bandwidth)
        )

    stage_of_layer = [index for index, stage in enumerate(stages) for _ in range(*stage.layers)]
    exchange_stages: list[tuple[int, int]] = []
    exchange_ns: list[int] = []
    static = [device.reserved_bytes for device in devices]
    optimizer = [0] * len(devices)
    for index, layer in enumerate(workload.layers):
        where = stage_device[stage_of_layer[index]]
        static[where] += layer.state_bytes
        optimizer[where] += scaled_ns(layer.optimizer_ns, devices[where].speed)
    for first, second in workload.tied:
        first_stage, second_stage = stage_of_layer[first], stage_of_layer[second]
        source, target = stage_device[first_stage], stage_device[second_stage]
        if source == target:
            twice = (workload.layers[first].state_bytes, workload.layers[second].state_bytes)
            static[source] -= min(twice)
            continue
        link_latency, bandwidth, _ = link_of(source, target)
        size = workload.layers[first].param_bytes
        exchange_stages.append((first_stage, second_stage))
        exchange_ns.append(ceil_div(size * NS_PER_S, bandwidth) + link_latency)

    def summed(field: str) -> list[int]:
        return [sum(getattr(layer, field) for layer in of_stage) for of_stage in layers]

    saved, saved_w, held_w = map(summed, ("saved_bytes", "saved_w_bytes", "held_w_bytes"))
    workspace = [max(layer.workspace_bytes for layer in of_stage) for of_stage in layers]
    inputs = [0, *(of_stage[-1].output_bytes for of_stage in layers[:-1])]
    offload = summed("offloadable_bytes")
    copy_ns = [
        max(1, ceil_div(size * NS_PER_S, bandwidth)) if bandwidth else -1
        for size, bandwidth in zip(
            offload, (devices[where].offload_bandwidth for where in stage_device), strict=True
        )
    ]

    _refuse_overflow(
        "times",
        num_microbatches
        * (
            sum(forward)
            + sum(input_grad)
            + sum(weight_grad)
            + sum(backward)
            + 2 * (sum(hold) + sum(latency))
            + 2 * sum(max(0, copy) for copy in copy_ns)
        )
        + sum(max(0, reduce) for reduce in reduce_ns)
        + sum(exchange_ns)
        + sum(optimizer),
    )
    _refuse_overflow(
        "bytes",
        sum(static)
        + num_microbatches * (sum(saved) + sum(saved_w) + sum(held_w) + sum(inputs))
        + sum(workspace),
    )

    link_numbers: dict[str, int] = {}
    host_link = [
        link_numbers.setdefault(
            f"named {device.host_link}" if device.host_link is not None else f"own {index}",
            len(link_numbers),
        )
        for index, device in enumerate(devices)
    ]

    def ints(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array(values, dtype=np.int64)

    return Costs(
        num_microbatches=num_microbatches,
        stage_device=ints(stage_device),
        forward_ns=ints(forward),
        backward_ns=ints(backward),
        input_grad_ns=ints(input_grad),
        weight_grad_ns=ints(weight_grad),
        transfer_bytes=ints(transfer_bytes),
        transfer_hold_ns=ints(hold),
        transfer_latency_ns=ints(latency),
        transfer_uses_nic=np.array(uses_nic, dtype=np.bool_),
        reduce_ns=ints(reduce_ns),
        exchange_stages=np.array(exchange_stages, dtype=np.int64).reshape(-1, 2),
        exchange_ns=ints(exchange_ns),
        optimizer_ns=ints(optimizer),
        saved_bytes=ints(saved),
        saved_w_bytes=ints(saved_w),
        held_w_bytes=ints(held_w),
        workspace_bytes=ints(workspace),
        input_bytes=ints(inputs),
        recompute=np.array([stage.recompute for stage in stages], dtype=np.bool_),
        static_bytes=ints(static),
        memory_bytes=ints([device.memory_bytes for device in devices]),
        offload_bytes=ints(offload),
        copy_ns=ints(copy_ns),
        host_link=ints(host_link),
        device_host=ints([device.host for device in devices]),
        host_memory_bytes=cluster.host_memory_bytes,
    )


def _refuse_overflow(what: str, total: int) -> None:
    if total > MAX_SUM:
        raise MalformedError(
            f"{what} of all microbatches add up to {total}; at most 2^62 = {MAX_SUM}"
        )
