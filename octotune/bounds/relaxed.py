"""What holds for every plan: the joint problem with all freedom left in it, as plain numbers.

Nothing is known of stages here. Each layer counts as if it were a stage of its own, at its least
time on any device; a device counts at its best link; overhead counts once per device. Whatever
stages, recompute and split backwards add on top only takes longer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from octotune.contract import Cluster, Workload
from octotune.contract.costs import NS_PER_S, ceil_div, layer_times_ns, scaled_ns

Int64 = NDArray[np.int64]
Pair = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Relaxed:
    """L layers of K types, D devices of C classes, m microbatches.

    Two layers of one type have equal times and bytes, two devices of one class everything alike
    but for host and links.
    """

    num_microbatches: int
    class_of: tuple[int, ...]  # [D]
    times: Int64  # [C, 3, L] F, I, W
    least: Int64  # [3, L]
    overhead: Int64  # [C]
    optimizer: Int64  # [C, L]
    room: tuple[int, ...]  # [C] memory beside what is reserved
    offload_bandwidth: tuple[int, ...]  # [C]

    type_of: tuple[int, ...]  # [L]
    example: tuple[int, ...]  # [K] a layer of each type
    count: tuple[int, ...]  # [K]
    kept: Int64  # [L] bytes from F to I at most: saved and saved_w
    pending: Int64  # [L] bytes from I to W
    offloadable: Int64  # [L]
    state: Int64  # [L]
    tie_bytes: int  # that tied layers may save on one device

    # the k-th device to begin, and the k-th to end its backwards, counted from 0; in [0] where it
    # holds the k-th layer (from the end, for `back`), in [1] where its first layer is another
    begin: Pair  # [2][D] earliest start
    leave: Pair  # [2][D] least from its last I to the end
    back: Pair  # [2][D] from the forward chain's end to its I
    cross: tuple[int, ...]  # [D] transfers on the way through k + 1 devices

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.type_of)

    @property
    def num_devices(self) -> int:
        """D."""
        return len(self.class_of)

    @property
    def forward_ns(self) -> int:
        """The forward chain of one microbatch, without transfers and overhead."""
        return int(self.least[0].sum())

    @property
    def unlimited(self) -> bool:
        """Whether every device could hold all activations of all layers at once."""
        most = self.num_microbatches * int((self.kept + self.pending).sum())
        return min(self.room) >= most + int(self.state.sum())

    def in_units(self, most: int) -> tuple[Relaxed, int]:
        """Return the problem in units that keep its sums small, and the unit of time in ns.

        The units are the greatest common divisors of all times and of all bytes: nothing is lost.
        Where the sums over all microbatches are above `most` even so, larger units, rounded so
        that nothing gets harder. Either way a step below T ns in the one is a step of at most
        floor(T / unit) in the other.
        """
        times = [self.times, self.overhead, self.optimizer]
        times += [np.array(pair) for pair in (self.begin, self.leave, self.back)]
        times.append(np.array(self.cross))
        sizes = [self.kept, self.pending, self.state, self.offloadable, np.array([self.tie_bytes])]
        time_unit, byte_unit = (
            max(1, int(np.gcd.reduce(np.concatenate([part.reshape(-1) for part in parts]))))
            for parts in (times, sizes)
        )
        m = self.num_microbatches
        longest = m * int(self.times.max(axis=0).sum())
        largest = m * int((self.kept + self.pending).sum()) + int(self.state.sum())
        room = self.room
        if largest // byte_unit <= most:
            # sums are whole units, so a part of one more is of no use
            room = tuple(each // byte_unit * byte_unit for each in room)
        time_unit *= max(1, ceil_div(longest, time_unit * most))
        byte_unit *= max(1, ceil_div(largest, byte_unit * most))

        def down(pair: Pair) -> Pair:
            first, second = (tuple(time // time_unit for time in times) for times in pair)
            return first, second

        reduced = replace(
            self,
            times=self.times // time_unit,
            least=self.least // time_unit,
            overhead=self.overhead // time_unit,
            optimizer=self.optimizer // time_unit,
            begin=down(self.begin),
            leave=down(self.leave),
            back=down(self.back),
            cross=tuple(time // time_unit for time in self.cross),
            kept=self.kept // byte_unit,
            pending=self.pending // byte_unit,
            state=self.state // byte_unit,
            offloadable=-(-self.offloadable // byte_unit),
            room=tuple(ceil_div(each, byte_unit) for each in room),
            tie_bytes=ceil_div(self.tie_bytes, byte_unit),
            # bytes per second, of new units both
            offload_bandwidth=tuple(
                ceil_div(rate * time_unit, byte_unit) for rate in self.offload_bandwidth
            ),
        )
        return reduced, time_unit


def relax(workload: Workload, cluster: Cluster, num_microbatches: int) -> Relaxed:
    """Return the joint problem of a workload on a cluster."""
    layers, devices = workload.layers, cluster.devices
    keys = [
        (
            device.kind,
            device.speed,
            device.overhead_ns,
            device.memory_bytes - device.reserved_bytes,
            device.offload_bandwidth,
        )
        for device in devices
    ]
    classes = list(dict.fromkeys(keys))
    first = [devices[keys.index(key)] for key in classes]
    times = np.array(
        [
            [[times[kind] for times in per_layer] for kind in range(3)]
            for per_layer in (
                [layer_times_ns(layer, device) for layer in layers] for device in first
            )
        ],
        dtype=np.int64,
    )
    optimizer = np.array(
        [[scaled_ns(layer.optimizer_ns, device.speed) for layer in layers] for device in first],
        dtype=np.int64,
    )

    def ints(name: str) -> Int64:
        return np.array([getattr(layer, name) for layer in layers], dtype=np.int64)

    kept = ints("saved_bytes") + ints("saved_w_bytes")
    pending = ints("saved_w_bytes") + ints("held_w_bytes")
    columns = [
        *times.reshape(-1, len(layers)),
        *optimizer,
        kept,
        pending,
        ints("offloadable_bytes"),
        ints("state_bytes"),
    ]
    looks = list(zip(*(column.tolist() for column in columns), strict=True))
    types = list(dict.fromkeys(looks))

    least = times.min(axis=0)
    overhead = min(device.overhead_ns for device in devices)
    hops = _Hops(workload, cluster)
    forward, input_grad = least[0], least[1]
    last_rest = int(least[2, 0])
    begin = hops.along(forward, overhead)
    leave = hops.along(input_grad, overhead)
    return Relaxed(
        num_microbatches=num_microbatches,
        class_of=tuple(classes.index(key) for key in keys),
        times=times,
        least=least,
        overhead=np.array([device.overhead_ns for device in first], dtype=np.int64),
        optimizer=optimizer,
        room=tuple(device.memory_bytes - device.reserved_bytes for device in first),
        offload_bandwidth=tuple(device.offload_bandwidth for device in first),
        type_of=tuple(types.index(look) for look in looks),
        example=tuple(looks.index(look) for look in types),
        count=tuple(looks.count(look) for look in types),
        kept=kept,
        pending=pending,
        offloadable=ints("offloadable_bytes"),
        state=ints("state_bytes"),
        tie_bytes=sum(
            min(layers[one].state_bytes, layers[two].state_bytes) for one, two in workload.tied
        ),
        begin=begin,
        # the device that begins first ends with its own W, which is part of its work
        leave=(
            (0, *(time + last_rest for time in leave[0][1:])),
            tuple(time + last_rest for time in leave[1]),
        ),
        back=hops.along(input_grad[::-1], overhead, backwards=True),
        cross=hops.cross,
    )


class _Hops:
    """The least that transfers take on the way through several devices."""

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        devices = cluster.devices
        self.num_devices = len(devices)
        links: dict[bool, set[tuple[int, int]]] = {False: set(), True: set()}
        for source in range(len(devices)):
            for target in range(len(devices)):
                if source == target:
                    continue
                link = cluster.link(source, target)
                crosses = devices[source].host != devices[target].host
                bandwidth = link.bandwidth
                if crosses and cluster.nic_bandwidth is not None:
                    bandwidth = min(bandwidth, cluster.nic_bandwidth)
                links[crosses].add((link.latency_ns, bandwidth))

        def least(kinds: set[tuple[int, int]], size: int) -> int:
            return min(
                (latency + ceil_div(size * NS_PER_S, rate) for latency, rate in kinds), default=0
            )

        every = links[False] | links[True]
        sizes = [layer.output_bytes for layer in workload.layers[:-1]]
        self.any = [least(every, size) for size in sizes]
        # what a hop between hosts takes at least beyond any hop
        self.beyond = min(
            (
                least(links[True], size) - hop
                for size, hop in zip(sizes, self.any, strict=True)
                if links[True]
            ),
            default=0,
        )
        # k + 1 devices are on at least so many hosts
        hosts = sorted(
            (sum(other.host == host for other in devices) for host in {d.host for d in devices}),
            reverse=True,
        )
        reach = np.cumsum(hosts)
        self.changes = [int(np.searchsorted(reach, k + 1)) for k in range(len(devices))]
        ordered = np.cumsum([0, *sorted(self.any)])
        self.cross = tuple(
            int(ordered[min(k, len(sizes))]) + self.changes[k] * self.beyond
            for k in range(len(devices))
        )

    def along(
        self, times: Int64, overhead: int, *, backwards: bool = False
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return when the k-th new device can be reached when layers follow one another.

        It takes at least k layers on k other devices, and k transfers on the way: the k smallest
        among those passed. In [1] it takes at least k + 1 layers, as the k-th is not on it.
        """
        hops = self.any[::-1] if backwards else self.any
        reached: tuple[list[int], list[int]] = ([], [])
        for k in range(self.num_devices):
            fixed = self.changes[k] * self.beyond + k * overhead
            for more in range(2):
                best: int | None = None
                passed = int(times[: k + more].sum())
                for position in range(k + more, len(times)):
                    total = passed + sum(sorted(hops[:position])[:k]) + fixed
                    best = total if best is None else min(best, total)
                    passed += int(times[position])
                    if passed + fixed > best:
                        break
                if best is None:  # fewer layers than devices: this one stays empty
                    best = reached[more][-1] if reached[more] else 0
                reached[more].append(best)
        return tuple(reached[0]), tuple(reached[1])
