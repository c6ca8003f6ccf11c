"""Modulo schedules: one microbatch's actions laid out so that copies of it, a period apart, fit.

Each device's period is a ring. The actions of one microbatch are placed in the order of the chain,
each at the first time after its input at which the device's ring has room; W takes what is left.
Repeating the layout every period gives a steady state without conflicts whose memory is the
layout's lifetimes, so that fill, drain and memory stay small however many microbatches follow.
Random delays before some actions give different layouts; the list scheduler runs them, keys in
place of times, with warmup and cooldown as they come.

Sources: Rau 1994, "Iterative modulo scheduling", MICRO-27; Qi et al. 2024, arXiv:2405.15362, whose
building blocks for two stages a device in a V are of this form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from octotune.tune.balance import RandomState, random
from octotune.tune.genome import (
    NEVER_FIRST,
    NUM_STAGES,
    STRICT,
    F,
    Genome,
    I,
    Shape,
    W,
    copy_genome,
    empty_shape,
)
from octotune.tune.kernel import kernel
from octotune.tune.moves import keep_monotone
from octotune.tune.problem import Int64, World
from octotune.tune.scheduler import shape_stages


@kernel
def _first_room(begins: Int64, ends: Int64, count: int, at: int, time: int, period: int) -> int:
    """Return the first time >= `at` at which the ring has `time` free; -1: there is none.

    `begins` and `ends` are the busy parts of one period, sorted.
    """
    if count == 0:
        return at if time <= period else -1
    base = at // period * period
    for turn in range(3):
        for i in range(-1, count):
            # the free part after busy part i (before the first one for -1)
            free_from = ends[i] if i >= 0 else ends[count - 1] - period
            free_to = begins[i + 1] if i + 1 < count else begins[0] + period
            begin = max(at, base + turn * period + free_from)
            if begin + time <= base + turn * period + free_to:
                return int(begin)
    return -1


@kernel
def _occupy(begins: Int64, ends: Int64, count: int, begin: int, end: int) -> None:
    at = count
    while at > 0 and begins[at - 1] > begin:
        begins[at] = begins[at - 1]
        ends[at] = ends[at - 1]
        at -= 1
    begins[at] = begin
    ends[at] = end


@kernel
def lay_out(
    genome: Genome, shape: Shape, period: int, delays: float, keyed: bool, rng: RandomState
) -> bool:
    """Set the genome's phases to a layout of the given period; return whether all fits."""
    num_stages, num_devices = genome.meta[NUM_STAGES], shape.load.shape[0]
    most = 2 * (3 * num_stages) + 2
    begins = np.zeros((num_devices, most), np.int64)
    ends = np.zeros((num_devices, most), np.int64)
    count = np.zeros(num_devices, np.int64)
    at = 0
    mean = shape.duration[:num_stages, F].mean()
    for turn in range(3 * num_stages):
        if turn < num_stages:
            s, kind = turn, F
        elif turn < 2 * num_stages:
            s, kind = 2 * num_stages - 1 - turn, I
        else:
            s, kind = turn - 2 * num_stages, W
        d = genome.device[s]
        time = shape.duration[s, kind]
        if time == 0:
            continue
        if kind == W:
            # phase holds I's begin until all are placed
            at = int(genome.phase[s, I]) + shape.duration[s, I]
        elif random(rng) < 0.3:
            at += int(-math.log(1e-9 + random(rng)) * delays * mean)
        begin = _first_room(begins[d], ends[d], count[d], at, time, period)
        if begin < 0:
            if kind != W:
                return False
            genome.phase[s, W] = NEVER_FIRST * period  # it fills what gaps there are
            continue
        genome.phase[s, kind] = begin
        if kind == F:
            at = begin + time + shape.hold[s] + shape.latency[s]
        elif kind == I and s > 0:
            at = begin + time + shape.hold[s - 1] + shape.latency[s - 1]
        low = begin % period
        if low + time <= period:
            _occupy(begins[d], ends[d], count[d], low, low + time)
            count[d] += 1
        else:
            _occupy(begins[d], ends[d], count[d], low, period)
            count[d] += 1
            _occupy(begins[d], ends[d], count[d], 0, low + time - period)
            count[d] += 1
    for s in range(num_stages):
        for kind in range(3):
            genome.phase[s, kind] /= period
        if not keyed or not genome.split[s]:
            genome.phase[s, W] = NEVER_FIRST
    keep_monotone(genome)
    return True


def modulo_rules(world: World, genome: Genome, count: int, rng: RandomState) -> Iterator[Genome]:
    """Yield the genome with random modulo layouts, tight and loose, W by key and in gaps."""
    shape = empty_shape(world, len(genome.device))
    shape_stages(world, genome, shape)
    load = int(shape.load.max())
    for turn in range(count):
        made = copy_genome(genome)
        made.meta[STRICT] = 1
        period = load + int(load * (0.0, 0.01, 0.03, 0.06, 0.1)[turn % 5])
        delays = 0.0 if turn < 10 else 2.0 * random(rng)
        if lay_out(made, shape, max(1, period), delays, turn // 5 % 2 == 0, rng):
            yield made
