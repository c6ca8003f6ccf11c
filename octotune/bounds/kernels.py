"""Compiled parts of the bounds for a fixed partition and placement.

S stages, D devices, m microbatches. Throughout, a backward counts as its input half followed by
the rest of B: the same for a stage that splits its backward, whose I and W together are no
shorter, and for one that does not, whose B cannot be torn apart. So every bound holds whatever
each stage and microbatch chooses.

The k-th F of a stage, in the order they run, needs k Fs of the stage before; likewise for I. So
heads (earliest starts) and tails (least time from an end to the end of the step) obey the
recursions of a flow shop in which the microbatches do not matter, only their counts.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from simulator.compiled import kernel

Int64 = NDArray[np.int64]

NEVER = 2**62


@kernel
def device_bound(
    forward_ns: Int64,
    input_grad_ns: Int64,
    backward_ns: Int64,
    hop_ns: Int64,
    stage_device: Int64,
    optimizer_ns: Int64,
    num_microbatches: int,
) -> int:
    """Return a bound of the step in O(S + D), for pruning.

    Each device does all its work after the forward chain has reached its first stage, all its
    backwards after the first gradient has come to its last stage, and all its Fs and Is before
    the last gradient goes on from its first stage down to stage 0; and one microbatch passes all
    stages twice.

    Args:
        forward_ns: [S] duration of F.
        input_grad_ns: [S] duration of I.
        backward_ns: [S] duration of B; of I and W together where a stage is sure to be split.
        hop_ns: [S - 1] from the end of a stage to the arrival at the next, either way.
        stage_device: [S]
        optimizer_ns: [D]
        num_microbatches: m.
    """
    num_stages, num_devices = len(forward_ns), len(optimizer_ns)
    head = np.full(num_devices, -1)
    tail = np.zeros(num_devices, np.int64)
    work = np.zeros((3, num_devices), np.int64)
    arrives = 0
    leaves = backward_ns[0] - input_grad_ns[0] + optimizer_ns[stage_device[0]]
    for stage in range(num_stages):
        device = stage_device[stage]
        if head[device] < 0:
            head[device], tail[device] = arrives, leaves
        work[0, device] += forward_ns[stage]
        work[1, device] += input_grad_ns[stage]
        work[2, device] += backward_ns[stage]
        arrives += forward_ns[stage]
        leaves += input_grad_ns[stage]
        if stage + 1 < num_stages:
            arrives += hop_ns[stage]
            leaves += hop_ns[stage]
    bound = arrives + leaves
    back = np.full(num_devices, -1)
    for stage in range(num_stages - 1, -1, -1):
        device = stage_device[stage]
        if back[device] < 0:
            back[device] = arrives
        arrives += input_grad_ns[stage]
        if stage:
            arrives += hop_ns[stage - 1]
    for device in range(num_devices):
        if head[device] >= 0:
            does_f, does_i, does_b = work[:, device] * num_microbatches
            bound = max(
                bound,
                head[device] + does_f + does_b + optimizer_ns[device],
                head[device] + does_f + does_i + tail[device],
                back[device] + does_b + optimizer_ns[device],
            )
    return int(bound)


@kernel
def heads_and_tails(
    forward_ns: Int64,
    input_grad_ns: Int64,
    rest_ns: Int64,
    hold_ns: Int64,
    latency_ns: Int64,
    latency_back_ns: Int64,
    stage_device: Int64,
    after_ns: Int64,
    most: Int64,
    most_w: Int64,
    num_microbatches: int,
) -> tuple[Int64, Int64]:
    """Return heads and tails [2, S, m] of the k-th F and the k-th I of each stage, k from 0.

    A head is an earliest start, a tail the least time from an end to the end of the step.

    Args:
        forward_ns: [S] duration of F.
        input_grad_ns: [S] duration of I.
        rest_ns: [S] B beyond I.
        hold_ns: [S - 1] how long a transfer keeps its channel, one after another.
        latency_ns: [S - 1] from there to the arrival, of activations.
        latency_back_ns: [S - 1] the same of gradients.
        stage_device: [S]
        after_ns: [S] from a stage's last backward to the end of its device's optimizer.
        most: [S] microbatches between the start of F and the end of I that memory has room for.
        most_w: [S] the same up to the end of the whole backward.
        num_microbatches: m.
    """
    num_stages, m = len(forward_ns), num_microbatches
    # on the same device: F of earlier stages, F and I of later ones, whole backwards of either
    f_before, f_after, i_after, b_before, b_after = np.zeros((5, num_stages), np.int64)
    first = np.arange(num_stages)  # the device's first stage
    after_all = after_ns.copy()  # least `after_ns` of the device's stages
    for stage in range(num_stages):
        for other in range(num_stages):
            if stage_device[other] != stage_device[stage]:
                continue
            first[stage] = min(first[stage], other)
            after_all[stage] = min(after_all[stage], after_ns[other])
            if other < stage:
                f_before[stage] += forward_ns[other]
                b_before[stage] += input_grad_ns[other] + rest_ns[other]
            elif other > stage:
                f_after[stage] += forward_ns[other]
                i_after[stage] += input_grad_ns[other]
                b_after[stage] += input_grad_ns[other] + rest_ns[other]

    heads = np.zeros((2, num_stages, m), np.int64)
    sent = np.zeros((2, num_stages, m), np.int64)  # when a transfer leaves its channel
    for k in range(m):
        for stage in range(num_stages):
            f = forward_ns[stage]
            start = heads[0, stage, k - 1] + f if k else 0
            if stage:
                leaves = heads[0, stage - 1, k] + forward_ns[stage - 1]
                if k:
                    leaves = max(leaves, sent[0, stage, k - 1])
                sent[0, stage, k] = leaves + hold_ns[stage - 1]
                start = max(start, sent[0, stage, k] + latency_ns[stage - 1])
            # k + 1 microbatches have passed the device's earlier stages, k this one
            origin = heads[0, first[stage], 0]
            start = max(start, origin + (k + 1) * f_before[stage] + k * f)
            if k >= most[stage]:
                start = max(start, heads[1, stage, k - most[stage]] + input_grad_ns[stage])
            if k >= most_w[stage]:
                freed = heads[1, stage, k - most_w[stage]] + input_grad_ns[stage]
                start = max(start, freed + rest_ns[stage])
            heads[0, stage, k] = start
        for stage in range(num_stages - 1, -1, -1):
            i = input_grad_ns[stage]
            start = heads[1, stage, k - 1] + i if k else 0
            start = max(start, heads[0, stage, k] + forward_ns[stage])
            if stage + 1 < num_stages:
                leaves = heads[1, stage + 1, k] + input_grad_ns[stage + 1]
                if k:
                    leaves = max(leaves, sent[1, stage, k - 1])
                sent[1, stage, k] = leaves + hold_ns[stage]
                start = max(start, sent[1, stage, k] + latency_back_ns[stage])
            through = (k + 1) * (
                f_before[stage] + forward_ns[stage] + f_after[stage] + i_after[stage]
            )
            start = max(start, heads[0, first[stage], 0] + through + k * i)
            heads[1, stage, k] = start

    tails = np.zeros((2, num_stages, m), np.int64)
    for k in range(m - 1, -1, -1):
        left = m - 1 - k  # how many of the same come after
        for stage in range(num_stages):
            i, rest = input_grad_ns[stage], rest_ns[stage]
            tail = left * (i + rest) + rest + after_ns[stage]
            through = (left + 1) * (rest + b_before[stage]) + left * i
            tail = max(tail, through + after_all[stage])
            if left:
                tail = max(tail, tails[1, stage, k + 1] + i)
            if stage:
                # the k-th gradient reaches stage - 1, whose I then has its tail
                hop = hold_ns[stage - 1] + latency_back_ns[stage - 1]
                tail = max(tail, hop + input_grad_ns[stage - 1] + tails[1, stage - 1, k])
            if k + most[stage] < m:
                tail = max(tail, forward_ns[stage] + tails[0, stage, k + most[stage]])
            if k + most_w[stage] < m:
                again = forward_ns[stage] + tails[0, stage, k + most_w[stage]]
                tail = max(tail, rest + again)
            tails[1, stage, k] = tail
        for stage in range(num_stages - 1, -1, -1):
            f, i = forward_ns[stage], input_grad_ns[stage]
            tail = i + tails[1, stage, k]
            whole = i + rest_ns[stage]
            tail = max(tail, left * f + (left + 1) * whole + after_ns[stage])
            through = (left + 1) * (f_after[stage] + b_after[stage] + whole + b_before[stage])
            tail = max(tail, through + left * f + after_all[stage])
            if left:
                tail = max(tail, tails[0, stage, k + 1] + f)
            if stage + 1 < num_stages:
                hop = hold_ns[stage] + latency_ns[stage]
                tail = max(tail, hop + forward_ns[stage + 1] + tails[0, stage + 1, k])
            tails[0, stage, k] = tail
    return heads, tails


@kernel
def work_between(
    release_ns: Int64, length_ns: Int64, tail_ns: Int64, after_start: int, before_end: int
) -> int:
    """Return the least work of all jobs between `after_start` and `before_end` before the end.

    A job that cannot be torn runs outside of the interval at most as far as it reaches when it
    starts at its release, or ends at its tail; the interval is at least as long as any job.
    """
    total = np.int64(0)
    for job in range(len(length_ns)):
        length = length_ns[job]
        outside = max(after_start - release_ns[job], before_end - tail_ns[job])
        if outside <= 0:
            total += length
        elif outside < length:
            total += length - outside
    return int(total)


@kernel
def energetic_bound(
    release_ns: Int64, length_ns: Int64, tail_ns: Int64, num_machines: int, least_ns: int
) -> int:
    """Return a bound of the makespan of jobs with heads and tails on equal machines.

    Whatever must lie between a moment and a moment before the end fits into the machines. Tries a
    grid of pairs whose interval is not empty, as the makespan is at least `least_ns`, and then
    closes in around the best of them.

    Source:
        Lopez, Erschler and Esquirol 1992, energetic reasoning.
    """
    room = int(least_ns - length_ns.max())
    best = at_a = at_b = 0
    if room <= 0:
        return 0
    # as many pairs as a fraction of a second allows
    side = min(48, max(8, int(np.sqrt(4e8 / len(length_ns)))))
    pitch = max(room // side, 1)
    for a in range(0, room, pitch):
        for b in range(0, room - a, pitch):
            work = int(work_between(release_ns, length_ns, tail_ns, a, b))
            bound = a + b - (-work // num_machines)
            if bound > best:
                best, at_a, at_b = bound, a, b
    for _ in range(400):
        moved = False
        for step_a in range(-1, 2):
            for step_b in range(-1, 2):
                a, b = at_a + step_a * pitch, at_b + step_b * pitch
                if a < 0 or b < 0 or a + b >= room:
                    continue
                work = int(work_between(release_ns, length_ns, tail_ns, a, b))
                bound = a + b - (-work // num_machines)
                if bound > best:
                    best, at_a, at_b, moved = bound, a, b, True
        if not moved:
            if pitch == 1:
                break
            pitch = max(pitch // 3, 1)
    return int(best)


@kernel
def one_machine(release_ns: Int64, length_ns: Int64, tail_ns: Int64) -> int:
    """Return the least makespan of jobs with heads and tails on one machine, with preemption.

    Jackson's rule: at every moment the released job of largest tail runs. O(n log n).

    Source:
        Carlier 1982, The one-machine sequencing problem, section 4.
    """
    order = np.argsort(release_ns, kind="mergesort")
    ready = [(np.int64(0), np.int64(0))]
    ready.clear()
    now = made = np.int64(0)
    following = 0
    while following < len(order) or len(ready):
        if not len(ready):
            now = max(now, release_ns[order[following]])
        while following < len(order) and release_ns[order[following]] <= now:
            job = order[following]
            heapq.heappush(ready, (-tail_ns[job], length_ns[job]))
            following += 1
        negative_tail, length = heapq.heappop(ready)
        until = now + length
        if following < len(order):
            until = min(until, release_ns[order[following]])
        length -= until - now
        now = until
        if length > 0:
            heapq.heappush(ready, (negative_tail, length))
        else:
            made = max(made, np.int64(now - negative_tail))
    return int(made)


@kernel
def most_within(value: Int64, size: Int64, count: int, room: int) -> int:
    """Return a bound of the value of up to `count` of each item within `room`, parts allowed."""
    if room < 0:
        room = 0
    total = 0
    free = size <= 0
    for item in range(len(value)):
        if free[item]:
            total += value[item] * count
    density = value / np.maximum(size, 1)
    for item in np.argsort(-density):
        if free[item]:
            continue
        taken = min(count, room // size[item])
        total += taken * value[item]
        room -= taken * size[item]
        if taken < count:
            # a part of the next one, rounded up; in floating point, as the product is too large
            total += np.int64(value[item] * (room / size[item])) + 1
            break
    return int(total)
