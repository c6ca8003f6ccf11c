"""One tuning problem as plain arrays: what every kernel of the search reads and none writes.

A stage is a range of layers on a device, so each of its costs is the difference of two prefix
sums. Durations follow the contract to the nanosecond: they are rounded layer by layer on each
device before they are summed. The kernels' only approximation is in the order in which transfers
of different devices queue for a host's NIC; plans are judged by the simulator in the end.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octotune.contract import Cluster, Workload
from octotune.contract.costs import NS_PER_S, ceil_div, layer_times_ns, scaled_ns

Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]

# more than any time or size the contract admits, and far from overflow when added to one
FAR = 1 << 61


class World(NamedTuple):
    """L layers, D devices, m microbatches; nanoseconds and bytes."""

    num_layers: int
    num_devices: int
    num_microbatches: int

    forward: Int64  # [D, L + 1] prefix sums over layers
    input_grad: Int64  # [D, L + 1]
    weight_grad: Int64  # [D, L + 1]
    work: Int64  # [D, L + 1] all three
    overhead: Int64  # [D]
    optimizer: Int64  # [D, L + 1]
    reduction: Int64  # [L + 1] prefix sums of the gradients' reduction time (0: none)

    hold: Int64  # [link kinds, L] time a transfer of layer l's output holds the channel
    link_kind: Int64  # [D, D]
    latency: Int64  # [D, D]
    uses_nic: Bool  # [D, D]
    host: Int64  # [D]
    many_hosts: bool
    has_nic: bool
    has_hold: bool  # transfers may queue for their channel
    has_tail: bool  # something follows the actions: reductions, exchanges

    saved: Int64  # [L + 1] prefix sums
    saved_w: Int64  # [L + 1]
    held_w: Int64  # [L + 1]
    workspace: Int64  # [L]
    output: Int64  # [L]
    state: Int64  # [L + 1] prefix sums
    has_workspace: bool
    room: Int64  # [D] memory less what is reserved

    tied: Int64  # [T, 2] pairs of layers
    tied_saving: Int64  # [T] state bytes saved where both are on one device
    tied_bytes: Int64  # [T] parameter bytes exchanged where they are on two
    bandwidth: Int64  # [D, D]


def make_world(workload: Workload, cluster: Cluster, num_microbatches: int) -> World:
    """Return the arrays of one problem. Cost: devices x layers."""
    layers, devices = workload.layers, cluster.devices
    num_layers, num_devices = len(layers), len(devices)

    def prefix(values: list[int]) -> list[int]:
        return [0, *accumulate(values)]

    by_kind: dict[tuple[str, float], tuple[list[int], ...]] = {}
    for device in devices:
        key = (device.kind, device.speed)
        if key not in by_kind:
            columns = zip(*(layer_times_ns(layer, device) for layer in layers), strict=True)
            optimizer = [scaled_ns(layer.optimizer_ns, device.speed) for layer in layers]
            by_kind[key] = (*(prefix(list(column)) for column in columns), prefix(optimizer))
    of_device = [by_kind[device.kind, device.speed] for device in devices]

    pairs = cluster.pair_links()
    latency = np.zeros((num_devices, num_devices), np.int64)
    bandwidth = np.ones((num_devices, num_devices), np.int64)
    uses_nic = np.zeros((num_devices, num_devices), np.bool_)
    for source in range(num_devices):
        for target in range(num_devices):
            if source == target:
                continue
            crosses = devices[source].host != devices[target].host
            link = pairs.get((min(source, target), max(source, target)))
            if link is None:
                link = cluster.links.inter_host if crosses else cluster.links.intra_host
            assert link is not None  # a cluster across hosts has inter_host
            capped = crosses and cluster.nic_bandwidth is not None
            latency[source, target] = link.latency_ns
            bandwidth[source, target] = (
                min(link.bandwidth, cluster.nic_bandwidth or link.bandwidth)
                if capped
                else link.bandwidth
            )
            uses_nic[source, target] = capped
    rates, link_kind = np.unique(bandwidth, return_inverse=True)
    hold = [
        [min(FAR, ceil_div(layer.output_bytes * NS_PER_S, rate)) for layer in layers]
        for rate in rates.tolist()
    ]

    parallel = cluster.data_parallel
    reduction = [0] * num_layers
    if parallel is not None and parallel.size > 1:
        reduction = [
            ceil_div(
                2 * (parallel.size - 1) * layer.param_bytes * NS_PER_S,
                parallel.size * parallel.bandwidth,
            )
            for layer in layers
        ]

    def ints(values: object) -> Int64:
        return np.array(values, dtype=np.int64)

    forward = ints([columns[0] for columns in of_device])
    input_grad = ints([columns[1] for columns in of_device])
    weight_grad = ints([columns[2] for columns in of_device])
    # A channel's transfers come from one device, each after an F or I at least this long: where no
    # transfer takes longer, none ever queues.
    overhead = np.array([device.overhead_ns for device in devices])
    shortest = int(
        (np.minimum(np.diff(forward), np.diff(input_grad)).min(axis=1) + overhead).min()
    )
    longest = max(max(row[:-1], default=0) for row in hold)
    hosts = sorted({device.host for device in devices})
    return World(
        num_layers=num_layers,
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        work=forward + input_grad + weight_grad,
        overhead=ints([device.overhead_ns for device in devices]),
        optimizer=ints([columns[3] for columns in of_device]),
        reduction=ints(prefix(reduction)),
        hold=ints(hold).reshape(len(rates), num_layers),
        link_kind=link_kind.reshape(num_devices, num_devices).astype(np.int64),
        latency=latency,
        uses_nic=uses_nic,
        host=ints([hosts.index(device.host) for device in devices]),
        many_hosts=len(hosts) > 1,
        has_nic=bool(uses_nic.any()),
        has_hold=num_devices > 1 and longest > max(1, shortest),
        has_tail=bool(workload.tied) or any(reduction),
        saved=ints(prefix([layer.saved_bytes for layer in layers])),
        saved_w=ints(prefix([layer.saved_w_bytes for layer in layers])),
        held_w=ints(prefix([layer.held_w_bytes for layer in layers])),
        workspace=ints([layer.workspace_bytes for layer in layers]),
        output=ints([layer.output_bytes for layer in layers]),
        state=ints(prefix([layer.state_bytes for layer in layers])),
        has_workspace=any(layer.workspace_bytes for layer in layers),
        room=ints([device.memory_bytes - device.reserved_bytes for device in devices]),
        tied=ints(workload.tied).reshape(-1, 2),
        tied_saving=ints(
            [min(layers[i].state_bytes, layers[j].state_bytes) for i, j in workload.tied]
        ),
        tied_bytes=ints([layers[i].param_bytes for i, _ in workload.tied]),
        bandwidth=bandwidth,
    )
