"""Corrections learned from a measured step, so that the next prediction is closer.

Costs are right in their proportions more often than in their sizes: every action of a run has the
same small cost on top (launching, bookkeeping), forwards may be slower than profiled by one factor
and weight gradients by another, one device may be throttled, a link slower than its data sheet.
So a run is explained by few numbers, which then hold for other plans too:

    duration  =  overhead  +  (device's factor + kind's deviation) x modelled duration
    flight    =  latency   +  bytes x ns per byte                      for each kind of link

Both are fitted robustly: medians over the microbatches first, then regression with Huber's
weights, in which a few odd stages or messages pull little. What one measured step cannot tell
apart (with equal stages an overhead looks like a factor) is decided by how unusual each
explanation is: every number has an expected value and a spread, and the fit weighs departures
from them against the noise of the measurement (a Gaussian prior, so: ridge regression).

What is left over for a single stage is kept as its own factor, and used for the same stages only.

Source:
    Huber, "Robust Estimation of a Location Parameter", 1964; iteratively reweighted least squares
    as in Holland and Welsch, 1977.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simulator.actions import Kind, kind_of, stage_of
from simulator.calibration_links import SMALLEST_FACTOR, LinkCorrection, find_link, fit_links
from simulator.costs import Costs
from simulator.errors import MismatchError
from simulator.robust import TO_SIGMA, robust_fit
from simulator.timeline import Timeline, recorded_ns

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

# how far from what was expected an explanation typically lies, relative to a typical duration
_SPREAD_OVERHEAD = 0.05
_SPREAD_FACTOR = 0.5
_SPREAD_KIND = 0.2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corrections:
    """How a measured step departs from its costs. S stages, D devices, kinds in order F B I W.

    A factor above 1: takes longer than modelled.
    """

    costs: Costs  # those it was learned from
    overhead_ns: int  # once an action, on top of what is modelled; may be below 0
    factors: Float64  # [D, 4] of the modelled durations of a device's actions
    stage_factors: Float64  # [S, 4] what remains of each stage; for the same stages only
    links: tuple[LinkCorrection, ...]
    pair_factors: Float64  # [D, D] what remains of the flights between two devices; symmetric
    reduce_factor: float
    exchange_factor: float
    copy_factors: Float64  # [D]
    optimizer_factors: Float64  # [D]
    optimizer_extra_ns: Int64  # [D] the whole run, where none is modelled


def calibrate(
    measured: Timeline | Sequence[Timeline], *, device_class: Sequence[int] | None = None
) -> Corrections:
    """Learn corrections from measured steps of one plan.

    Args:
        measured: one step or several. What was not recorded (-1) is left out.
        device_class: a number for each device; devices of one number share their factors, so
            that what remains is the stages' own. None: each device has its own factors.

    Raises:
        MismatchError: if there is no step, the steps have different costs, or `device_class` is
            not one number a device.
    """
    steps = [measured] if isinstance(measured, Timeline) else list(measured)
    if not steps:
        raise MismatchError("nothing to calibrate from: pass at least one measured step")
    costs = steps[0].costs
    for number, step in enumerate(steps[1:], start=1):
        if not same_stages(costs, step.costs):
            raise MismatchError(
                f"measured step {number} has other stages than step 0; calibrate from steps of "
                "one plan"
            )
    classes = np.arange(costs.num_devices) if device_class is None else np.array(device_class)
    if classes.shape != (costs.num_devices,):
        raise MismatchError(
            f"device_class has {classes.size} numbers; write one for each of the "
            f"{costs.num_devices} devices"
        )
    _, classes = np.unique(classes, return_inverse=True)
    overhead, factors, stage_factors = _fit_durations(steps, costs, classes)
    links, pair_factors = fit_links(steps, costs)
    optimizer_factors, optimizer_extra_ns = _optimizer(steps, costs)
    return Corrections(
        costs=costs,
        overhead_ns=round(overhead),
        factors=factors,
        stage_factors=stage_factors,
        links=links,
        pair_factors=pair_factors,
        reduce_factor=_ratio(
            [recorded_ns(step.reduce_start_ns, step.reduce_end_ns) for step in steps],
            costs.reduce_ns,
        ),
        exchange_factor=_ratio(
            [recorded_ns(step.exchange_start_ns, step.exchange_end_ns) for step in steps],
            costs.exchange_ns,
        ),
        copy_factors=_copy_factors(steps, costs),
        optimizer_factors=optimizer_factors,
        optimizer_extra_ns=optimizer_extra_ns,
    )


def apply(costs: Costs, corrections: Corrections) -> Costs:
    """Return costs as the corrections say they really are.

    The costs may be those of another partition, placement or microbatch count on the same
    devices. For the stages that were measured their own factors are used too. Links that are not
    stated like any that was measured stay as they are.

    Raises:
        MismatchError: if the number of devices is another.
    """
    if costs.num_devices != corrections.costs.num_devices:
        raise MismatchError(
            f"the corrections are of {corrections.costs.num_devices} devices, the costs of "
            f"{costs.num_devices}; calibrate on the same cluster"
        )
    factors = corrections.factors[costs.stage_device]
    if same_stages(costs, corrections.costs):
        factors = factors * corrections.stage_factors
    durations = np.rint(corrections.overhead_ns + factors * _durations(costs))
    durations = np.maximum(durations, 1).astype(np.int64)

    hold, latency = costs.transfer_hold_ns.copy(), costs.transfer_latency_ns.copy()
    for boundary in range(costs.num_stages - 1):
        source, target = costs.stage_device[boundary : boundary + 2].tolist()
        if source == target:
            continue
        size = int(costs.transfer_bytes[boundary])
        found = find_link(corrections.links, int(latency[boundary]), size, int(hold[boundary]))
        if found is None:
            continue
        of_pair = float(corrections.pair_factors[source, target])
        hold[boundary] = int(np.ceil(size * found.ns_per_byte * of_pair))
        latency[boundary] = round(found.latency_ns * of_pair)
    return replace(
        costs,
        forward_ns=durations[:, Kind.F],
        backward_ns=durations[:, Kind.B],
        input_grad_ns=durations[:, Kind.I],
        weight_grad_ns=durations[:, Kind.W],
        transfer_hold_ns=hold,
        transfer_latency_ns=latency,
        reduce_ns=_scaled(costs.reduce_ns, corrections.reduce_factor),
        exchange_ns=_scaled(costs.exchange_ns, corrections.exchange_factor),
        optimizer_ns=_scaled(costs.optimizer_ns, corrections.optimizer_factors)
        + corrections.optimizer_extra_ns,
        copy_ns=_scaled(costs.copy_ns, corrections.copy_factors[costs.stage_device]),
    )


def _durations(costs: Costs) -> Float64:
    """Return the modelled durations [S, 4]."""
    by_kind = {
        Kind.F: costs.forward_ns,
        Kind.B: costs.backward_ns,
        Kind.I: costs.input_grad_ns,
        Kind.W: costs.weight_grad_ns,
    }
    return np.stack([by_kind[kind] for kind in Kind], axis=1).astype(np.float64)


def same_stages(first: Costs, second: Costs) -> bool:
    """Say whether two costs have the same stages, of the same durations, on the same devices."""
    return np.array_equal(first.stage_device, second.stage_device) and np.array_equal(
        _durations(first), _durations(second)
    )


def _scaled(times: Int64, factor: float | Float64) -> Int64:
    """Scale what is there; what is 0 or absent (-1) stays."""
    return np.where(times > 0, np.maximum(np.rint(times * factor), 1), times).astype(np.int64)


def _ratio(measured: list[Int64], modelled: Int64) -> float:
    """Return the median of measured / modelled over what has both; 1 where nothing has."""
    times = np.stack(measured).astype(np.float64)
    there = (times > 0) & (modelled > 0)
    if not there.any():
        return 1.0
    return float(np.median((times / np.maximum(modelled, 1))[there]))


def _optimizer(steps: list[Timeline], costs: Costs) -> tuple[Float64, Int64]:
    """Return the factor of each device's optimizer run, and its length where none is modelled."""
    factors = np.ones(costs.num_devices)
    extra = np.zeros(costs.num_devices, np.int64)
    starts, ends = (
        np.stack([getattr(step, name) for step in steps])
        for name in ("optimizer_start_ns", "optimizer_end_ns")
    )
    there = (starts >= 0) & (ends >= 0)
    for device in np.flatnonzero(there.any(axis=0)).tolist():
        rows = there[:, device]
        length = float(np.median((ends - starts)[rows, device]))
        modelled = int(costs.optimizer_ns[device])
        if modelled > 0:
            factors[device] = max(length / modelled, SMALLEST_FACTOR)
        else:
            extra[device] = round(length)
    return factors, extra


def _copy_factors(steps: list[Timeline], costs: Costs) -> Float64:
    factors = np.ones(costs.num_devices)
    found: list[list[float]] = [[] for _ in range(costs.num_devices)]
    for step in steps:
        if step.copies is None:
            continue
        stages = stage_of(step.copies.codes)
        lengths = recorded_ns(step.copy_start_ns, step.copy_end_ns)
        for stage, length in zip(stages.tolist(), lengths.tolist(), strict=True):
            if length > 0:
                found[int(costs.stage_device[stage])].append(length / int(costs.copy_ns[stage]))
    for device, ratios in enumerate(found):
        if ratios:
            factors[device] = float(np.median(ratios))
    return factors


def _fit_durations(
    steps: list[Timeline], costs: Costs, classes: NDArray[np.intp]
) -> tuple[float, Float64, Float64]:
    """Return overhead, factors [D, 4] and stage factors [S, 4]."""
    num_kinds = len(Kind)
    size = costs.num_stages * num_kinds
    place = np.concatenate(
        [
            stage_of(step.schedule.codes) * num_kinds + kind_of(step.schedule.codes)
            for step in steps
        ]
    )
    length = np.concatenate([recorded_ns(step.start_ns, step.end_ns) for step in steps])
    place, length = place[length > 0], length[length > 0].astype(np.float64)
    order = np.argsort(place, kind="stable")
    counts = np.bincount(place, minlength=size)
    cells = np.split(length[order], np.cumsum(counts)[:-1])
    seen = np.flatnonzero(counts)
    factors = np.ones((costs.num_devices, num_kinds))
    stage_factors = np.ones((costs.num_stages, num_kinds))
    if not len(seen):
        return 0.0, factors, stage_factors

    y = np.array([np.median(cells[cell]) for cell in seen])
    spread = np.array([np.median(np.abs(cells[cell] - np.median(cells[cell]))) for cell in seen])
    x = _durations(costs).reshape(-1)[seen]
    stage, kind = seen // num_kinds, seen % num_kinds
    of_class = classes[costs.stage_device[stage]]
    typical = float(np.median(x))
    scale = np.maximum(x, 0.1 * typical)
    noise = float(np.median(TO_SIGMA * spread / np.sqrt(counts[seen]) / scale))

    num_classes = int(classes.max()) + 1
    matrix = np.zeros((len(seen), 1 + num_classes + num_kinds))
    matrix[:, 0] = typical
    matrix[np.arange(len(seen)), 1 + of_class] = x
    matrix[np.arange(len(seen)), 1 + num_classes + kind] = x
    expected = np.concatenate(([0.0], np.ones(num_classes), np.zeros(num_kinds)))
    spreads = np.concatenate(
        (
            [_SPREAD_OVERHEAD],
            np.full(num_classes, _SPREAD_FACTOR),
            np.full(num_kinds, _SPREAD_KIND),
        )
    )
    fitted = robust_fit(matrix / scale[:, None], y / scale, expected, spreads, noise)
    overhead = fitted[0] * typical
    deviations = _complete_kinds(fitted[1 + num_classes :], np.unique(kind), x, kind)
    factors = fitted[1 : 1 + num_classes][classes][:, None] + deviations[None, :]
    factors = np.maximum(factors, SMALLEST_FACTOR)

    left = (y - overhead) / (factors[costs.stage_device[stage], kind] * x)
    stage_factors[stage, kind] = np.maximum(left, SMALLEST_FACTOR)
    known = np.zeros((costs.num_stages, num_kinds), dtype=np.bool_)
    known[stage, kind] = True
    for row, there in zip(stage_factors, known, strict=True):
        _complete_stage(row, there)
    return float(overhead), factors, stage_factors


def _complete_kinds(deviations: Float64, seen: Int64, x: Float64, kind: Int64) -> Float64:
    """Fill in kinds that did not run: B is I and W in one."""
    there = set(seen.tolist())
    full = deviations.copy()
    parts = [part for part in (Kind.I, Kind.W) if part in there]
    if Kind.B not in there and parts:
        weights = np.array([x[kind == part].sum() for part in parts])
        full[Kind.B] = float(np.average([full[part] for part in parts], weights=weights))
    for part in (Kind.I, Kind.W):
        if part not in there:
            full[part] = full[Kind.B] if Kind.B in there or parts else 0.0
    return full


def _complete_stage(row: Float64, there: NDArray[np.bool_]) -> None:
    parts = [part for part in (Kind.I, Kind.W) if there[part]]
    if not there[Kind.B] and parts:
        row[Kind.B] = float(np.mean([row[part] for part in parts]))
    for part in (Kind.I, Kind.W):
        if not there[part]:
            row[part] = row[Kind.B]
