"""Cuts that balance the devices: a first partition for a placement, and repair after a move.

Moving one layer, or one stage to another device, nearly always breaks a tight balance. Repair then
shifts single layers over other cuts until the plan's device bound (its devices' earliest begin
plus all their work, which no order can beat) is under a target, before any order is tried: most
moves are turned down for a fraction of what scheduling them would cost.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octotune.tune.genome import NUM_STAGES, Genome, Shape
from octotune.tune.kernel import kernel
from octotune.tune.problem import FAR, Int64, World
from octotune.tune.shape import device_idle, shape_stages

RandomState = NDArray[np.uint64]

MOST_SHIFTS = 24

# splitmix64: one 64-bit state, no zero state, the same numbers on every platform
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31 = np.uint64(30), np.uint64(27), np.uint64(31)
_SHIFT_11 = np.uint64(11)
_TO_UNIT = 2.0**-53


def island_rng(seed: int, number: int) -> RandomState:
    """Return the random state of one island, unlike that of any other number."""
    mixed = np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)
    return np.asarray(mixed, dtype=np.uint64)


@kernel
def random(state: RandomState) -> float:
    """Return the next number in [0, 1) of a generator whose state is one uint64."""
    state[0] += _GAMMA
    z = state[0]
    z = (z ^ (z >> _SHIFT_30)) * _MIX_1
    z = (z ^ (z >> _SHIFT_27)) * _MIX_2
    return float((z ^ (z >> _SHIFT_31)) >> _SHIFT_11) * _TO_UNIT


@kernel
def random_below(state: RandomState, count: int) -> int:
    """Return a random integer in [0, count)."""
    return min(int(random(state) * count), count - 1)


@kernel
def layers_time(world: World, genome: Genome, s: int, d: int, a: int, b: int) -> int:
    """Return what layers [a, b) take a microbatch on device d, as part of stage s; no overhead."""
    time = world.forward[d, b] - world.forward[d, a]
    time *= 2 if genome.recompute[s] else 1
    time += world.input_grad[d, b] - world.input_grad[d, a]
    return int(time + world.weight_grad[d, b] - world.weight_grad[d, a])


@kernel
def spread_cuts(world: World, genome: Genome) -> None:
    """Cut so that the largest (stage time x stages on its device) is smallest, by bisection."""
    num_stages, num_layers = genome.meta[NUM_STAGES], world.num_layers
    counts = np.zeros(world.num_devices, np.int64)
    for s in range(num_stages):
        counts[genome.device[s]] += 1
    low, high = 0, 1
    for d in range(world.num_devices):
        whole = 2 * world.forward[d, num_layers] + world.input_grad[d, num_layers]
        high = max(high, (whole + world.weight_grad[d, num_layers]) * max(1, counts[d]))
    while low < high:
        middle = (low + high) // 2
        if _fill(world, genome, counts, middle):
            high = middle
        else:
            low = middle + 1
    _fill(world, genome, counts, high)
    genome.cut[num_stages] = num_layers


@kernel
def _fill(world: World, genome: Genome, counts: Int64, most: int) -> bool:
    num_stages, num_layers = genome.meta[NUM_STAGES], world.num_layers
    at = 0
    genome.cut[0] = 0
    for s in range(num_stages):
        d = genome.device[s]
        end = at + 1
        last = num_layers - (num_stages - 1 - s)
        while end < last and layers_time(world, genome, s, d, at, end + 1) * counts[d] <= most:
            end += 1
        if layers_time(world, genome, s, d, at, end) * counts[d] > most:
            return False
        at = end
        genome.cut[s + 1] = at
    return bool(at == num_layers)


@kernel
def repair(
    world: World,
    genome: Genome,
    shape: Shape,
    bound: Int64,
    target: int,
    noise: float,
    rng: RandomState,
) -> bool:
    """Shift layers off the worst device until its bound is at most `target`; False: it is not.

    `bound` [D] is left as the devices' bounds. What memory makes a device wait is taken from the
    cuts at the beginning; the list scheduler's own bound is exact.
    """
    num_stages, num_devices, m = genome.meta[NUM_STAGES], world.num_devices, world.num_microbatches
    cut, device, split, recompute = genome.cut, genome.device, genome.split, genome.recompute
    work, forward, optimizer, overhead = (
        world.work,
        world.forward,
        world.optimizer,
        world.overhead,
    )
    hold, link_kind, latency = world.hold, world.link_kind, world.latency
    begin = shape.begin
    all_bytes = world.saved[world.num_layers] + world.saved_w[world.num_layers]
    limited = world.room.min() - world.state[world.num_layers] < m * all_bytes
    idle = shape.idle
    for d in range(num_devices):
        idle[d] = 0
    if limited and shape_stages(world, genome, shape):
        for d in range(num_devices):
            idle[d] = device_idle(world, shape, d)
    for shift in range(MOST_SHIFTS + 1):
        for d in range(num_devices):
            begin[d] = FAR
            bound[d] = 0
        arrive = 0
        for s in range(num_stages):
            d, a, b = device[s], cut[s], cut[s + 1]
            time = forward[d, b] - forward[d, a]
            if begin[d] == FAR:
                begin[d] = arrive
                bound[d] = max(arrive, idle[d])
            arrive += time + overhead[d]
            again = time if recompute[s] else 0
            load = work[d, b] - work[d, a] + again + (2 + split[s]) * overhead[d]
            bound[d] += m * load + optimizer[d, b] - optimizer[d, a]
            if s + 1 < num_stages and device[s + 1] != d:
                arrive += hold[link_kind[d, device[s + 1]], b - 1] + latency[d, device[s + 1]]
        worst = 0
        for d in range(num_devices):
            if bound[d] > bound[worst]:
                worst = d
        if bound[worst] <= target:
            return True
        if shift == MOST_SHIFTS:
            return False
        best_value, best_cut, best_step = 1e300, -1, 0
        for s in range(num_stages):
            if device[s] != worst or cut[s + 1] - cut[s] < 2:
                continue
            for side in range(2):
                other = s - 1 if side == 0 else s + 1
                if other < 0 or other >= num_stages or device[other] == worst:
                    continue
                e = device[other]
                layer = cut[s] if side == 0 else cut[s + 1] - 1
                gain = work[worst, layer + 1] - work[worst, layer]
                if recompute[s]:
                    gain += forward[worst, layer + 1] - forward[worst, layer]
                loss = work[e, layer + 1] - work[e, layer]
                if recompute[other]:
                    loss += forward[e, layer + 1] - forward[e, layer]
                value = float(max(bound[worst] - m * gain, bound[e] + m * loss))
                value *= 1.0 + noise * random(rng)
                if value < best_value:
                    best_value, best_cut = value, s if side == 0 else s + 1
                    best_step = 1 if side == 0 else -1
        if best_cut < 0:
            return False
        cut[best_cut] += best_step
    return False


@kernel
def excess(world: World, genome: Genome, shape: Shape, d: int) -> int:
    """Return by how many bytes one microbatch of every stage exceeds the device (negative: fits).

    `shape` is the genome's.
    """
    need = shape.reserve[d] - shape.room[d]
    for i in range(shape.first[d], shape.first[d + 1]):
        need += shape.at_forward[shape.member[i]]
    return int(need)


@kernel
def repair_memory(world: World, genome: Genome, shape: Shape, bound: Int64) -> bool:
    """Shift layers off the device that lacks most bytes until every device has room.

    One microbatch of all its stages must fit a device: every order holds that much at least.
    """
    num_stages = genome.meta[NUM_STAGES]
    cut, device = genome.cut, genome.device
    for _ in range(4 * world.num_layers + 8):
        if shape_stages(world, genome, shape):
            return True
        worst = 0
        for d in range(world.num_devices):
            bound[d] = excess(world, genome, shape, d)
            if bound[d] > bound[worst]:
                worst = d
        best_value, best_cut, best_step = float(bound[worst]), -1, 0
        for s in range(num_stages):
            if device[s] != worst or cut[s + 1] - cut[s] < 2:
                continue
            for side in range(2):
                other = s - 1 if side == 0 else s + 1
                if other < 0 or other >= num_stages or device[other] == worst:
                    continue
                layer = cut[s] if side == 0 else cut[s + 1] - 1
                size = world.state[layer + 1] - world.state[layer]
                if not genome.recompute[s]:
                    size += world.saved[layer + 1] - world.saved[layer]
                    size += world.saved_w[layer + 1] - world.saved_w[layer]
                value = float(max(bound[worst] - size, bound[device[other]] + size))
                if value < best_value:
                    best_value, best_cut = value, s if side == 0 else s + 1
                    best_step = 1 if side == 0 else -1
        if best_cut < 0:
            return False
        cut[best_cut] += best_step
    return False
