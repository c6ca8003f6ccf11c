"""A measured step -> the workload and cluster as they really are, ready to be tuned again.

`simulator.calibration` learns what a run says about stages, devices and links. Here that is
written back to where it came from: a stage's times to its layers, overhead and speed of copies to
the devices, latency and bandwidth to the links. Devices of one kind and speed are taken to be
alike, so what differs between their stages is the layers' own, and moves with them when the next
plan puts them elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import structs

from octotune.contract.cluster import Cluster, DataParallel, Device, Link, Links
from octotune.contract.costs import build_costs, layer_times_ns
from octotune.contract.plan import Plan
from octotune.contract.workload import Layer, Times, Workload

if TYPE_CHECKING:
    from simulator.calibration import Corrections
    from simulator.timeline import Timeline

NS_PER_S = 10**9
# a device pair whose flights depart from its kind of link by more than this gets its own link
PAIR_DEPARTURE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A workload and a cluster corrected by a measured step, and the corrections themselves."""

    workload: Workload
    cluster: Cluster
    corrections: Corrections


def calibrated(plan: Plan, measured: Timeline | Sequence[Timeline]) -> Calibrated:
    """Return the plan's workload and cluster, corrected by one or several measured steps of it.

    Layer times are given as measured (`times_ns`) for every kind of device in the cluster; kinds
    that come in several speeds are told apart by name ("h100 x0.5").

    Raises:
        MismatchError: if the steps are not of this plan's stages.
        MalformedError: if the plan's times or sizes add up to more than 2^62.
    """
    from simulator.actions import Kind
    from simulator.calibration import calibrate, same_stages
    from simulator.errors import MismatchError

    devices = plan.cluster.devices
    sorts = sorted({(device.kind, device.speed) for device in devices})
    device_class = [sorts.index((device.kind, device.speed)) for device in devices]
    corrections = calibrate(measured, device_class=device_class)
    costs = build_costs(plan.workload, plan.cluster, plan.stages, plan.num_microbatches)
    if not same_stages(costs, corrections.costs):
        raise MismatchError(
            "the measured step is of other stages than the plan's; calibrate with the plan that "
            "ran"
        )

    kind_names = _kind_names(sorts)
    example = dict(zip(device_class, devices, strict=True))
    factors = {sort: corrections.factors[device_class.index(sort)] for sort in range(len(sorts))}
    kinds = (Kind.F, Kind.I, Kind.W)
    layers: list[Layer] = []
    for number, stage in enumerate(plan.stages):
        of_stage = corrections.stage_factors[number]
        optimizer = float(corrections.optimizer_factors[stage.device])
        for layer in plan.workload.layers[slice(*stage.layers)]:
            times: dict[str, Times] = {}
            for sort, device in example.items():
                base = layer_times_ns(layer, device)
                forward, input_grad, weight_grad = (
                    round(time * float(factors[sort][kind]) * float(of_stage[kind]))
                    for time, kind in zip(base, kinds, strict=True)
                )
                times[kind_names[sort]] = (forward, input_grad, weight_grad)
            layers.append(
                structs.replace(
                    layer,
                    times_ns=times,
                    optimizer_ns=round(layer.optimizer_ns * optimizer),
                )
            )

    def corrected_device(index: int, device: Device) -> Device:
        # the stated overhead was part of what the factors scale
        factor = float(corrections.factors[index].mean())
        overhead = corrections.overhead_ns + factor * device.overhead_ns
        copy = float(corrections.copy_factors[index])
        return structs.replace(
            device,
            kind=kind_names[device_class[index]],
            overhead_ns=max(0, round(overhead)),
            offload_bandwidth=_slowed(device.offload_bandwidth, copy),
        )

    parallel = plan.cluster.data_parallel
    cluster = structs.replace(
        _corrected_links(plan.cluster, corrections),
        devices=tuple(corrected_device(index, device) for index, device in enumerate(devices)),
        data_parallel=parallel
        and DataParallel(
            size=parallel.size, bandwidth=_slowed(parallel.bandwidth, corrections.reduce_factor)
        ),
    )
    return Calibrated(
        workload=structs.replace(plan.workload, layers=tuple(layers)),
        cluster=cluster,
        corrections=corrections,
    )


def _kind_names(sorts: Sequence[tuple[str, float]]) -> list[str]:
    kinds = [kind for kind, _ in sorts]
    return [kind if kinds.count(kind) == 1 else f"{kind} x{speed:g}" for kind, speed in sorts]


def _slowed(bandwidth: int, factor: float) -> int:
    """Return a bandwidth at which things take `factor` times as long; 0 stays 0: there is none."""
    return max(1, round(bandwidth / factor)) if bandwidth else 0


def _corrected_links(cluster: Cluster, corrections: Corrections) -> Cluster:
    """Return the cluster with the links that were measured as they are."""
    nic = cluster.nic_bandwidth
    fastest_nic = nic or 0

    def correct(link: Link, *, through_nic: bool, factor: float = 1.0) -> Link:
        nonlocal fastest_nic
        bandwidth = min(link.bandwidth, nic) if through_nic and nic is not None else link.bandwidth
        for found in corrections.links:
            stated = NS_PER_S / bandwidth
            same_speed = abs(found.stated_ns_per_byte - stated) <= 0.01 * stated
            if found.stated_latency_ns == link.latency_ns and same_speed:
                rate = found.ns_per_byte * factor
                measured = round(NS_PER_S / rate) if rate > 0 else bandwidth
                measured = min(max(1, measured), 2**63 - 1)
                if through_nic and nic is not None:
                    fastest_nic = max(fastest_nic, measured)
                return Link(latency_ns=round(found.latency_ns * factor), bandwidth=measured)
        return link

    stated = cluster.links
    links = Links(
        intra_host=correct(stated.intra_host, through_nic=False),
        inter_host=stated.inter_host and correct(stated.inter_host, through_nic=True),
    )
    pairs = dict[str, Link]()
    own = cluster.pair_links()
    for low in range(len(cluster.devices)):
        for high in range(low + 1, len(cluster.devices)):
            factor = float(corrections.pair_factors[low, high])
            if (low, high) in own or abs(factor - 1) > PAIR_DEPARTURE:
                crosses = cluster.devices[low].host != cluster.devices[high].host
                link = cluster.link(low, high)
                pairs[f"{low}-{high}"] = correct(link, through_nic=crosses, factor=factor)
    return structs.replace(
        cluster,
        links=structs.replace(links, pairs=pairs),
        nic_bandwidth=None if nic is None else max(nic, fastest_nic),
    )
