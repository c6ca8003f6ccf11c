"""Compiled parts of `octotune.partition`: the dynamic program over cuts, and a local search.

Arrays, throughout: `times` [D, 3, L + 1] prefix sums of F, I and W on each device, `sizes`
[3, L + 1] prefix sums of state, saved and held bytes, `in_flight` [S], `counts` [D] stages a
device; `tie_to` and `tie_bytes` [L] as in `octotune.partition`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.compiled import kernel

Int64 = NDArray[np.int64]

FAR = np.int64(2**62)


@kernel
def stage_load(
    times: Int64,
    device: int,
    begin: int,
    end: int,
    overhead: int,
    split: bool,
    recompute: bool,
) -> int:
    """Return F and B (or I and W) of the layers [begin, end) on a device."""
    forward = times[device, 0, end] - times[device, 0, begin]
    input_grad = times[device, 1, end] - times[device, 1, begin]
    weight_grad = times[device, 2, end] - times[device, 2, begin]
    if recompute:
        input_grad += forward
    load = max(1, int(forward) + overhead)
    if split:
        load += max(1, input_grad + overhead) + max(1, weight_grad + overhead)
    else:
        load += max(1, input_grad + weight_grad + overhead)
    return int(load)


@kernel
def even_cuts(
    stage_device: Int64,
    counts: Int64,
    in_flight: Int64,
    times: Int64,
    overhead: Int64,
    split: bool,
    recompute: bool,
    sizes: Int64,
    workspace: Int64,
    inputs: Int64,
    tie_to: Int64,
    tie_bytes: Int64,
    reserved: Int64,
    limit: Int64,
    least_excess: bool,
) -> Int64:
    """Return the S + 1 cuts of least (largest stage cost, sum of squared loads); empty if none.

    A stage costs its load times the number of stages on its device; where `least_excess`, the
    bytes by which it exceeds its device's memory. Exact with one stage a device. O(S L^2) at
    worst; as costs grow with every layer, the scan for a stage's begin mostly ends early.
    """
    num_stages, num_layers = len(stage_device), len(workspace)
    worst = np.full((num_stages + 1, num_layers + 1), FAR)
    worst[0, 0] = -FAR
    ceiling = FAR
    even = np.full((num_stages + 1, num_layers + 1), np.inf)
    came = np.full((num_stages + 1, num_layers + 1), -1)
    for sweep in range(2):
        if sweep == 1:
            ceiling = worst[num_stages, num_layers]
            if ceiling == FAR:
                return np.zeros(0, np.int64)
            even[0, 0] = 0.0
        for stage in range(num_stages):
            device = stage_device[stage]
            flight = in_flight[stage]
            for end in range(stage + 1, num_layers - (num_stages - stage - 1) + 1):
                best, least, origin = FAR, np.inf, -1
                room = limit[device] - reserved[device]
                largest = 0
                tied = 0
                for begin in range(end - 1, stage - 1, -1):
                    largest = max(largest, workspace[begin])
                    if begin < tie_to[begin] < end:
                        tied += tie_bytes[begin]
                    saved = sizes[1, end] - sizes[1, begin]
                    need = sizes[0, end] - sizes[0, begin] - tied + largest
                    need += sizes[2, end] - sizes[2, begin]
                    if recompute:
                        need += flight * inputs[begin] + max(0, saved - inputs[begin])
                    else:
                        need += flight * saved
                    load = stage_load(
                        times, device, begin, end, overhead[device], split, recompute
                    )
                    cost = load * counts[device]
                    if least_excess:
                        cost = need - room
                    elif need > room:
                        if recompute:
                            continue  # an earlier begin may keep a smaller input
                        break
                    if sweep == 0:
                        if cost >= best and not (least_excess and recompute):
                            break
                        value = max(cost, worst[stage, begin])
                        if value < best:
                            best, origin = value, begin
                    else:
                        if cost > ceiling:
                            if least_excess and recompute:
                                continue
                            break
                        total = even[stage, begin] + float(load) * float(load)
                        if total < least:
                            least, origin = total, begin
                if sweep == 0:
                    worst[stage + 1, end] = best
                else:
                    even[stage + 1, end] = least
                    came[stage + 1, end] = origin
    cuts = np.zeros(num_stages + 1, np.int64)
    cuts[num_stages] = num_layers
    for stage in range(num_stages, 0, -1):
        cuts[stage - 1] = came[stage, cuts[stage]]
    return cuts


@kernel
def _rate(
    cuts: Int64,
    stage_device: Int64,
    in_flight: Int64,
    times: Int64,
    overhead: Int64,
    split: bool,
    recompute: bool,
    sizes: Int64,
    workspace: Int64,
    inputs: Int64,
    tie_to: Int64,
    tie_bytes: Int64,
    reserved: Int64,
    limit: Int64,
    limited: bool,
) -> tuple[np.int64, np.int64, float]:
    """Return bytes beyond the limits, the largest device load, and the sum of squared stages."""
    num_devices = len(limit)
    loads = np.zeros(num_devices, np.int64)
    needs = reserved.copy()
    most = np.zeros(num_devices, np.int64)
    stage_of = np.zeros(len(workspace), np.int64)
    squares = 0.0
    for stage in range(len(stage_device)):
        device, begin, end = stage_device[stage], cuts[stage], cuts[stage + 1]
        load = stage_load(times, device, begin, end, overhead[device], split, recompute)
        loads[device] += load
        squares += float(load) * float(load)
        if not limited:
            continue
        saved = sizes[1, end] - sizes[1, begin]
        during = sizes[2, end] - sizes[2, begin]
        needs[device] += sizes[0, end] - sizes[0, begin]
        if recompute:
            needs[device] += in_flight[stage] * inputs[begin]
            during += max(0, saved - inputs[begin])
        else:
            needs[device] += in_flight[stage] * saved
        largest = 0
        for layer in range(begin, end):
            stage_of[layer] = stage
            largest = max(largest, workspace[layer])
        most[device] = max(most[device], during + largest)
    for layer in range(len(tie_to)):
        if limited and tie_to[layer] >= 0:
            device = stage_device[stage_of[layer]]
            if device == stage_device[stage_of[tie_to[layer]]]:
                needs[device] -= tie_bytes[layer]
    excess = np.int64(0)
    for device in range(num_devices):
        if limited:
            excess += max(0, needs[device] + most[device] - limit[device])
    return excess, loads.max(), squares


@kernel
def improve_cuts(
    start: Int64,
    moves: int,
    seed: int,
    stage_device: Int64,
    counts: Int64,
    in_flight: Int64,
    times: Int64,
    overhead: Int64,
    split: bool,
    recompute: bool,
    sizes: Int64,
    workspace: Int64,
    inputs: Int64,
    tie_to: Int64,
    tie_bytes: Int64,
    reserved: Int64,
    limit: Int64,
    limited: bool,
) -> Int64:
    """Return cuts improved by shifting one to three of them at a time, by a layer or a few.

    Compares (bytes beyond the limits, largest load, sum of squared stages); accepts equals, and
    now and then a slightly worse one, falling from 1 % to none.
    """
    np.random.seed(seed)
    num_stages, num_layers = len(stage_device), len(workspace)
    here, best = start.copy(), start.copy()
    excess, largest, squares = _rate(
        here, stage_device, in_flight, times, overhead, split, recompute, sizes, workspace,
        inputs, tie_to, tie_bytes, reserved, limit, limited,
    )  # fmt: skip
    best_excess, best_largest, best_squares = excess, largest, squares
    if num_stages == 1:
        return best
    for move in range(moves):
        there = here.copy()
        for _ in range(1 + np.random.randint(3)):
            cut = 1 + np.random.randint(num_stages - 1)
            shift = 1 if np.random.random() < 0.7 else 1 + np.random.randint(4)
            if np.random.random() < 0.5:
                shift = -shift
            there[cut] += shift
        ordered = True
        for stage in range(num_stages):
            if there[stage] >= there[stage + 1]:
                ordered = False
                break
        if not ordered or there[num_stages] != num_layers:
            continue
        new_excess, new_largest, new_squares = _rate(
            there, stage_device, in_flight, times, overhead, split, recompute, sizes, workspace,
            inputs, tie_to, tie_bytes, reserved, limit, limited,
        )  # fmt: skip
        slack = 0.01 * (1.0 - move / moves) * np.random.random()
        if new_excess > excess:
            continue
        if new_excess == excess and new_largest > largest * (1.0 + slack):
            continue
        if (
            new_excess == excess
            and new_largest == largest
            and new_squares > squares * (1.0 + slack)
        ):
            continue
        here, excess, largest, squares = there, new_excess, new_largest, new_squares
        if (
            excess < best_excess
            or (excess == best_excess and largest < best_largest)
            or (excess == best_excess and largest == best_largest and squares < best_squares)
        ):
            best[:] = here
            best_excess, best_largest, best_squares = excess, largest, squares
    return best
