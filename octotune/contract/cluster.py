"""Cluster: the devices of one pipeline, and what connects them."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from octotune.contract.quantities import (
    Amount,
    Count,
    Index,
    Name,
    Rate,
    RateOrNone,
    short,
)

UNLIMITED_BYTES = 2**60
FREE_BANDWIDTH = 10**18
_PAIR = re.compile(r"(0|[1-9][0-9]{0,18})-(0|[1-9][0-9]{0,18})", re.ASCII)


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator. `speed` divides durations; `overhead_ns` is added to every action."""

    kind: str
    memory_bytes: Amount
    reserved_bytes: Amount = 0
    speed: float = 1.0
    host: Index = 0
    overhead_ns: Amount = 0
    offload_bandwidth: RateOrNone = 0
    host_link: Name | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.speed) and self.speed > 0):
            raise ValueError(f"speed is {self.speed}; it is finite and above 0")


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One direction between two devices: bytes per second, and ns until the first arrives."""

    latency_ns: Amount
    bandwidth: Rate


class Links(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The link within a host, between hosts, and of single pairs ("0-3", both directions)."""

    intra_host: Link
    inter_host: Link | None = None
    pairs: dict[str, Link] = {}


class DataParallel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many replicas of the pipeline share their gradients, over what bandwidth."""

    size: Count
    bandwidth: Rate


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The devices of one pipeline in order of their index."""

    format: Literal["octotune-cluster"] = "octotune-cluster"
    version: Literal[1] = 1
    name: str
    devices: Annotated[tuple[Device, ...], Meta(min_length=1)]
    links: Links
    nic_bandwidth: Rate | None = None
    host_memory_bytes: Amount | None = None
    data_parallel: DataParallel | None = None

    def __post_init__(self) -> None:
        if self.links.inter_host is None and len({device.host for device in self.devices}) > 1:
            raise ValueError(
                "links.inter_host is missing; it is required as devices are on different hosts"
            )
        self.pair_links()

    def pair_links(self) -> dict[tuple[int, int], Link]:
        """Return the links of single pairs, lower device first; refuses what is no pair."""
        found: dict[tuple[int, int], Link] = {}
        for key, link in self.links.pairs.items():
            match = _PAIR.fullmatch(key)
            if match is None:
                raise ValueError(f'links.pairs has {short(key)}; write two devices, such as "0-3"')
            low, high = sorted((int(match[1]), int(match[2])))
            if low == high or high >= len(self.devices):
                raise ValueError(
                    f"links.pairs has {short(key)}; write two different devices "
                    f"below {len(self.devices)}"
                )
            if (low, high) in found:
                raise ValueError(
                    f'links.pairs has "{low}-{high}" and "{high}-{low}"; one holds for both '
                    "directions"
                )
            found[low, high] = link
        return found

    def link(self, source: int, target: int) -> Link:
        """Return the link from one device to another; a pair's own comes before the host's."""
        pair = self.pair_links().get((min(source, target), max(source, target)))
        if pair is not None:
            return pair
        if self.devices[source].host == self.devices[target].host:
            return self.links.intra_host
        assert self.links.inter_host is not None  # checked when the cluster was made
        return self.links.inter_host

    @classmethod
    def equal(
        cls,
        num_devices: int,
        *,
        memory_bytes: int = UNLIMITED_BYTES,
        latency_ns: int = 0,
        bandwidth: int = FREE_BANDWIDTH,
    ) -> Cluster:
        """Return equal devices on one host; without more, links are free and memory is endless."""
        return cls(
            name=f"{num_devices} equal devices",
            devices=(Device(kind="any", memory_bytes=memory_bytes),) * num_devices,
            links=Links(intra_host=Link(latency_ns=latency_ns, bandwidth=bandwidth)),
        )
