"""The links' part of calibration: latency and speed of each kind of link from measured flights.

A kind of link is what its data sheet says, latency and bandwidth; the costs hold no more than
that of it. Where the kind is measured on some device pairs, its correction holds for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.actions import Kind, kind_of, microbatch_of, stage_of
from simulator.costs import Costs
from simulator.robust import TO_SIGMA, robust_fit
from simulator.timeline import Timeline

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

SMALLEST_FACTOR = 0.01
_SPREAD_LINK = 1.0  # how far a typical flight lies from what was expected, relative


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCorrection:
    """What the links stated to have one latency and speed really have."""

    stated_latency_ns: int
    stated_ns_per_byte: float
    latency_ns: int
    ns_per_byte: float

    def is_stated(self, latency_ns: int, size_bytes: int, hold_ns: int) -> bool:
        """Say whether a boundary's costs, rounded up to whole ns, are those of such a link."""
        expected = size_bytes * self.stated_ns_per_byte
        return latency_ns == self.stated_latency_ns and abs(hold_ns - expected) <= (
            1 + 0.01 * max(hold_ns, expected)
        )


def find_link(
    links: Sequence[LinkCorrection], latency_ns: int, size_bytes: int, hold_ns: int
) -> LinkCorrection | None:
    """Return the correction of links that are stated so, if any was measured."""
    for link in links:
        if link.is_stated(latency_ns, size_bytes, hold_ns):
            return link
    return None


def fit_links(steps: list[Timeline], costs: Costs) -> tuple[tuple[LinkCorrection, ...], Float64]:
    """Return the corrections of each kind of link, and what remains of device pairs [D, D]."""
    pair_factors = np.ones((costs.num_devices, costs.num_devices))
    boundary, flight, trust = _flights(steps, costs)
    if not len(boundary):
        return (), pair_factors
    stated = _stated_links(costs, np.unique(boundary))
    of_link = np.array([stated[at][0] for at in boundary.tolist()])
    best = np.zeros(int(of_link.max()) + 1, dtype=np.int64)
    np.maximum.at(best, of_link, trust)
    keep = trust == best[of_link]
    boundary, flight, of_link = boundary[keep], flight[keep], of_link[keep]
    size = costs.transfer_bytes[boundary]
    ends = costs.stage_device[boundary], costs.stage_device[boundary + 1]
    low, high = np.minimum(*ends), np.maximum(*ends)
    links: list[LinkCorrection] = []
    for number in np.unique(of_link):
        rows = of_link == number
        _, latency, ns_per_byte = stated[int(boundary[rows][0])]
        link = _fit_link(size[rows], flight[rows], latency, ns_per_byte)
        links.append(link)
        predicted = link.latency_ns + size * link.ns_per_byte
        for pair in np.unique(low[rows] * costs.num_devices + high[rows]).tolist():
            source, target = divmod(pair, costs.num_devices)
            of_pair = rows & (low == source) & (high == target)
            if of_pair.sum() >= 3:  # with fewer, its own noise
                factor = float(np.median(flight[of_pair] / np.maximum(predicted[of_pair], 1.0)))
                factor = max(factor, SMALLEST_FACTOR)
                pair_factors[source, target] = pair_factors[target, source] = factor
    return tuple(links), pair_factors


def _flights(steps: list[Timeline], costs: Costs) -> tuple[Int64, Float64, Int64]:
    """Return boundary and duration of every flight that was recorded, and how far to trust it.

    3: the next action of the target waited for it, and it had the channel to itself. 2: waited
    for only. A runtime may notice an arrival only when it comes to need the tensor, so a flight
    that nothing waited for may look longer than it was: 1, had the channel to itself; 0. Where
    two are on a channel at once, the later one's flight may hold some queueing.
    """
    columns: list[list[Int64]] = []
    for step in steps:
        waits = _waits(step)
        for backward, sent, arrived in (
            (0, step.forward_sent_ns, step.forward_arrived_ns),
            (1, step.backward_sent_ns, step.backward_arrived_ns),
        ):
            left = np.where(sent >= 0, sent, waits.ended_ns[backward])
            stage, microbatch = np.nonzero((left >= 0) & (arrived >= 0))
            target = stage + (-1 if backward else 1)
            source_device, target_device = costs.stage_device[stage], costs.stage_device[target]
            remote = source_device != target_device
            stage, microbatch, target = stage[remote], microbatch[remote], target[remote]
            left, arrived = left[stage, microbatch], arrived[stage, microbatch]
            channel = (source_device * costs.num_devices + target_device)[remote]
            waited = arrived > waits.free_ns[backward][target, microbatch]
            columns.append([np.minimum(stage, target), channel, left, arrived, waited * 2])
        # channels of different steps are different
        for column in columns[-2:]:
            column[1] = column[1] + len(columns) * costs.num_devices**2
    boundary, channel, left, arrived, trust = (
        np.concatenate(parts) for parts in zip(*columns, strict=True)
    )
    order = np.lexsort((left, channel))
    boundary, channel, trust = boundary[order], channel[order], trust[order]
    left, arrived = left[order], arrived[order]
    alone = np.ones(len(order), dtype=np.bool_)
    alone[1:] = (channel[1:] != channel[:-1]) | (left[1:] >= arrived[:-1])
    keep = arrived >= left
    flight = (arrived - left)[keep].astype(np.float64)
    return boundary[keep], flight, (trust + alone)[keep]


class _Waits(NamedTuple):
    """By direction (F, or I and B), [S, m] each; -1: unknown."""

    ended_ns: tuple[Int64, Int64]  # when the action ended
    free_ns: tuple[Int64, Int64]  # when its device had ended the action before it


def _waits(step: Timeline) -> _Waits:
    codes = step.schedule.codes
    stage, kind, microbatch = stage_of(codes), kind_of(codes), microbatch_of(codes)
    before = np.concatenate((np.zeros(1, np.int64), step.end_ns))[:-1]
    first = step.schedule.offsets[:-1]
    before[first[first < len(codes)]] = 0
    ended, free = (
        tuple(np.full_like(step.forward_sent_ns, -1) for _ in range(2)) for _ in range(2)
    )
    for backward, kinds in enumerate(((Kind.F,), (Kind.I, Kind.B))):
        rows = np.isin(kind, kinds)
        ended[backward][stage[rows], microbatch[rows]] = step.end_ns[rows]
        free[backward][stage[rows], microbatch[rows]] = before[rows]
    return _Waits((ended[0], ended[1]), (free[0], free[1]))


def _stated_links(costs: Costs, boundaries: Int64) -> dict[int, tuple[int, int, float]]:
    """Return, by boundary, the number, latency and ns per byte of the link it is stated to have.

    The largest tensors come first: what is rounded up to whole ns tells most there.
    """
    kinds: list[LinkCorrection] = []
    found: dict[int, tuple[int, int, float]] = {}
    for boundary in boundaries[np.argsort(-costs.transfer_bytes[boundaries])].tolist():
        size = int(costs.transfer_bytes[boundary])
        hold = int(costs.transfer_hold_ns[boundary])
        latency = int(costs.transfer_latency_ns[boundary])
        link = find_link(kinds, latency, size, hold)
        if link is None:
            rate = hold / size if size else 0.0
            link = LinkCorrection(
                stated_latency_ns=latency,
                stated_ns_per_byte=rate,
                latency_ns=latency,
                ns_per_byte=rate,
            )
            kinds.append(link)
        found[boundary] = (kinds.index(link), link.stated_latency_ns, link.stated_ns_per_byte)
    return found


def _fit_link(size: Int64, flight: Float64, latency_ns: int, ns_per_byte: float) -> LinkCorrection:
    """Fit latency and speed to flights of one kind of link.

    Messages of one size tell only the sum; then the stated latency stands as far as it can.
    """
    typical = float(np.median(flight))
    bytes_typical = float(np.median(size))
    base = float(latency_ns)
    if bytes_typical == 0:
        base, rate = typical, ns_per_byte
    elif typical > latency_ns:
        rate = (typical - latency_ns) / bytes_typical
    else:
        stated = max(latency_ns + bytes_typical * ns_per_byte, 1.0)
        base, rate = latency_ns * typical / stated, ns_per_byte * typical / stated
    if typical > 0 and bytes_typical > 0 and len(np.unique(size)) > 1:
        scale = max(typical, 1.0)
        matrix = np.stack((np.ones(len(size)), size / bytes_typical), axis=1)
        expected = np.array([base, rate * bytes_typical]) / scale
        centres = {each: np.median(flight[size == each]) for each in np.unique(size)}
        centre = np.array([centres[each] for each in size])
        noise = TO_SIGMA * float(np.median(np.abs(flight - centre))) / scale
        spreads = np.full(2, _SPREAD_LINK)
        fitted = robust_fit(matrix, flight / scale, expected, spreads, noise)
        base, rate = fitted[0] * scale, fitted[1] * scale / bytes_typical
        if base < 0:
            base, rate = 0.0, float(np.median(flight[size > 0] / size[size > 0]))
        elif rate < 0:
            base, rate = typical, 0.0
    return LinkCorrection(
        stated_latency_ns=latency_ns,
        stated_ns_per_byte=ns_per_byte,
        latency_ns=round(base),
        ns_per_byte=rate,
    )
