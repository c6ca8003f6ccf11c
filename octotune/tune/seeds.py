"""Where the search starts: partitions and placements of many stage counts, and rules to run them.

A placement seed is a stage count (one to eight times the devices) on a loop, a wave, or a loop
that skips devices which have their share. A rule seed is a way to choose among ready work: keys
from the chain's own times (stretched), backward first, deep stages first, limits in flight by
remaining depth, the group rhythms of interleaved schedules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from octotune.tune.balance import RandomState, repair, spread_cuts
from octotune.tune.genome import (
    NEVER_FIRST,
    NUM_STAGES,
    STRICT,
    F,
    Float64,
    Genome,
    I,
    Shape,
    copy_genome,
    empty_genome,
    empty_shape,
)
from octotune.tune.problem import World
from octotune.tune.shape import device_bound, shape_stages

STAGES_PER_DEVICE = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


def loop_devices(num_stages: int, devices: Sequence[int]) -> list[int]:
    """Return stage s on the s-th device, starting again after the last."""
    return [devices[s % len(devices)] for s in range(num_stages)]


def wave_devices(num_stages: int, devices: Sequence[int]) -> list[int]:
    """Return passes over the devices that turn round each time."""
    there_and_back = [*devices, *reversed(devices)]
    return [there_and_back[s % len(there_and_back)] for s in range(num_stages)]


def hosts_in_turn(num_stages: int, groups: Sequence[Sequence[int]], wave: bool) -> list[int]:
    """Return passes over one host's devices, then over the next one's: each link once.

    Every device has about as many stages as any other.
    """
    used = sum(map(len, groups))
    placed: list[int] = []
    before = 0
    for group in groups:
        before += len(group)
        count = round(num_stages * before / used) - len(placed)
        placed += (wave_devices if wave else loop_devices)(count, group)
    return placed


def skipping_devices(world: World, num_stages: int, devices: Sequence[int]) -> list[int]:
    """Return a loop over layers cut evenly that skips devices which have their share of work."""
    whole = world.forward + world.input_grad + world.weight_grad  # [D, L + 1]
    mean = whole[list(devices)].mean(axis=0)
    ends = np.searchsorted(mean, mean[-1] * np.arange(1, num_stages + 1) / num_stages)
    speed = max(1.0, float(mean[-1])) / np.maximum(1, whole[:, -1])
    share = max(1.0, float(mean[-1])) * speed / float(speed[list(devices)].sum())
    cost = np.diff(np.concatenate(([0.0], mean[np.minimum(ends, world.num_layers)])))
    load = np.zeros(world.num_devices)
    chosen: list[int] = []
    # from the last stage back: what cannot be cut, a head, mostly comes last
    at = (num_stages - 1) % len(devices)
    for s in range(num_stages - 1, -1, -1):
        for step in range(len(devices)):
            d = devices[(at - step) % len(devices)]
            if (load[d] + cost[s] / speed[d]) * speed[d] <= 1.02 * share[d]:
                at -= step
                break
        else:
            d = min(devices, key=lambda e: load[e] * speed[e] / share[e])
        chosen.insert(0, d)
        load[d] += cost[s] / speed[d]
        at -= 1
    return chosen


def stage_counts(world: World, capacity: int, num_used: int) -> list[int]:
    """Return the stage counts to start from, few first."""
    most = min(capacity, world.num_layers)
    wanted = {min(most, max(1, round(num_used * times))) for times in STAGES_PER_DEVICE}
    return sorted(wanted)


def placement_seeds(world: World, capacity: int, rng: RandomState) -> Iterator[Genome]:
    """Yield balanced genomes of every stage count and placement, with the plainest rule."""
    used = min(world.num_devices, world.num_layers)
    fast_first = sorted(
        range(world.num_devices), key=lambda d: (int(world.forward[d, -1]), -int(world.room[d]), d)
    )
    devices = sorted(fast_first[:used])
    for num_stages in stage_counts(world, capacity, used):
        seen: list[list[int]] = []
        for placed in _placements(world, num_stages, devices):
            if placed in seen:
                continue
            seen.append(placed)
            yield balanced(world, capacity, placed, rng)


def _placements(world: World, num_stages: int, devices: list[int]) -> Iterator[list[int]]:
    yield loop_devices(num_stages, devices)
    yield wave_devices(num_stages, devices)
    yield skipping_devices(world, num_stages, devices)
    hosts = sorted({int(world.host[d]) for d in devices})
    if len(hosts) > 1:
        groups = [[d for d in devices if world.host[d] == host] for host in hosts]
        yield hosts_in_turn(num_stages, groups, wave=False)
        yield hosts_in_turn(num_stages, groups, wave=True)
        yield hosts_in_turn(num_stages, groups[::-1], wave=False)
    speed = [int(world.work[d, -1]) for d in devices]
    if min(speed) < max(speed):
        slow_first = sorted(devices, key=lambda d: (-int(world.work[d, -1]), d))
        yield loop_devices(num_stages, slow_first)
        yield wave_devices(num_stages, slow_first)
        yield loop_devices(num_stages, slow_first[::-1])


def balanced(
    world: World, capacity: int, placed: Sequence[int], rng: RandomState, recompute: int = 0
) -> Genome:
    """Return a genome with stages on the given devices, cut to balance them."""
    genome = empty_genome(world, capacity)
    genome.meta[NUM_STAGES] = len(placed)
    genome.device[: len(placed)] = placed
    genome.recompute[:] = recompute
    spread_cuts(world, genome)
    shape = empty_shape(world, capacity)
    bound = np.zeros(world.num_devices, np.int64)
    shape_stages(world, genome, shape)
    best, target = copy_genome(genome), device_bound(world, shape)
    for _ in range(40):
        target -= max(1, target // 400)
        if not repair(world, genome, shape, bound, target, 0.02, rng):
            break
        best = copy_genome(genome)
    return best


def chain_phases(
    world: World, genome: Genome, shape: Shape, forward: float, backward: float
) -> Float64:
    """Return [S, 3] phases: when each stage could first run, in periods, stretched.

    One period is the largest device load, so a stretch of 1 is the tightest rhythm in which every
    microbatch meets no queue.
    """
    num_stages = int(genome.meta[NUM_STAGES])
    period = max(1, int(shape.load.max()))
    phases = np.full((num_stages, 3), NEVER_FIRST)
    hop = shape.hold + shape.latency
    at = 0.0
    for s in range(num_stages):
        phases[s, F] = at
        at += forward * float(shape.duration[s, F] + hop[s]) / period
    for s in range(num_stages - 1, -1, -1):
        phases[s, I] = at
        at += backward * float(shape.duration[s, I] + (hop[s - 1] if s else 0)) / period
    return phases


def depth_limits(world: World, genome: Genome, shape: Shape, times: float) -> list[int]:
    """Return how many microbatches each stage may hold: those that a round trip spans."""
    phases = chain_phases(world, genome, shape, times, times)
    span = np.ceil(phases[:, I] - phases[:, F]).astype(np.int64) + 1
    return [min(world.num_microbatches, max(1, int(count))) for count in span]


def filled_limits(world: World, genome: Genome, shape: Shape, part: float) -> list[int]:
    """Return in-flight limits in proportion to each stage's round trip that fill the memory.

    On each device the same multiple of the round trip, as large as fits into `part` of the room:
    otherwise the first stages take all of it, and the later ones starve.
    """
    num_stages, m = int(genome.meta[NUM_STAGES]), world.num_microbatches
    phases = chain_phases(world, genome, shape, 1.0, 1.0)
    span = phases[:, I] - phases[:, F] + 1.0
    limits = np.full(num_stages, m, np.int64)
    of_device = genome.device[:num_stages]
    for d in set(of_device.tolist()):
        mine = np.flatnonzero(of_device == d)
        size = shape.at_forward[mine]
        room = part * float(shape.room[d] - shape.reserve[d])
        low, high = 0.0, float(m)
        for _ in range(30):
            middle = (low + high) / 2
            if float((np.clip(np.floor(middle * span[mine]), 1, m) * size).sum()) <= room:
                low = middle
            else:
                high = middle
        limits[mine] = np.clip(np.floor(low * span[mine]), 1, m)
        # what is left goes to single stages, those with the longest round trip first
        left = room - float((limits[mine] * size).sum())
        for s in mine[np.argsort(-span[mine], kind="stable")]:
            if shape.at_forward[s] <= left and limits[s] < m:
                limits[s] += 1
                left -= float(shape.at_forward[s])
    return [int(limit) for limit in limits]


def list_rules(world: World, genome: Genome) -> Iterator[Genome]:
    """Yield the genome with each rule that picks among what is ready."""
    num_stages = int(genome.meta[NUM_STAGES])
    shape = empty_shape(world, len(genome.device))
    shape_stages(world, genome, shape)
    depth = np.arange(num_stages, dtype=np.float64)
    natural = chain_phases(world, genome, shape, 1.0, 1.0)
    limits: list[list[int] | None] = [None]
    limits += [depth_limits(world, genome, shape, times) for times in (1.0, 1.5, 2.5)]
    if shape.tight.any():
        limits += [filled_limits(world, genome, shape, part) for part in (1.0, 1.25)]
    for most in limits:
        for rule in range(9):
            made = copy_genome(genome)
            made.phase[:num_stages] = natural
            if most is not None:
                made.limit[:num_stages] = most
                made.late[:num_stages] = most
            if rule == 1:
                made.phase[:num_stages, I] -= 1e4
            elif rule == 2:
                made.phase[:num_stages, I] -= 1e4
                made.phase[:num_stages, F] = -depth * 1e3
            elif rule == 3:
                made.phase[:num_stages, F] = -depth * 1e3
                made.phase[:num_stages, I] = -depth * 1e3
                made.bonus[:] = 1e5
            elif rule == 4:
                made.bonus[:] = 1e5
            elif rule == 5:
                made.phase[:num_stages] = chain_phases(world, genome, shape, 1.5, 1.0)
            elif rule == 6:
                made.phase[:num_stages] = chain_phases(world, genome, shape, 1.0, 2.0)
            elif rule == 7:
                made.phase[:num_stages, F] = depth * 1e-3
                made.phase[:num_stages, I] = -depth * 1e-3
                made.bonus[:] = 0.5
            elif rule == 8:
                made.phase[:num_stages, F] = depth * 1e-3
                made.phase[:num_stages, I] = -1e4 - depth * 1e-3
                made.fits[:] = 0.6
            yield made


def strict_rules(
    world: World, genome: Genome, stretches: Sequence[float] = (0.6, 0.8, 1.0, 1.3, 1.7, 2.4)
) -> Iterator[Genome]:
    """Yield the genome as a modulo schedule: phases from the chain, stretched both ways."""
    num_stages = int(genome.meta[NUM_STAGES])
    shape = empty_shape(world, len(genome.device))
    shape_stages(world, genome, shape)
    for forward in stretches:
        for backward in stretches:
            made = copy_genome(genome)
            made.meta[STRICT] = 1
            made.phase[:num_stages] = chain_phases(world, genome, shape, forward, backward)
            yield made


def group_rhythm(num_microbatches: int, group: int, passes: float) -> Float64:
    """Return the rhythm of interleaving in groups: a group passes each chunk before the next."""
    index = np.arange(num_microbatches)
    return np.asarray(index // group * group + (index % group) / passes, dtype=np.float64)


def pattern_rules(
    world: World, genome: Genome, groups: Sequence[int] | None = None
) -> Iterator[Genome]:
    """Yield the genome as interleaving in groups: F and I in turn after a warmup, W where it fits.

    A device runs F of its first stage for a group of microbatches, then of its next stage, and so
    on, and I likewise from its last stage back. It begins with as many F as its last stage needs
    for the first one, and `slope` more for each stage that follows in the chain.
    """
    num_stages = int(genome.meta[NUM_STAGES])
    of_device = genome.device[:num_stages]
    used = len(set(of_device.tolist()))
    passes = max(1, round(num_stages / used))
    if groups is None:
        marks = {used // 2, 3 * used // 4, used, 3 * used // 2, 2 * used}
        small = range(1, 17) if used <= 8 else (1, 2, 4)
        groups = sorted(g for g in {*small, *marks} if 1 <= g <= world.num_microbatches)
    turn = np.zeros(num_stages, np.int64)
    for s in range(num_stages):
        turn[s] = (of_device[:s] == of_device[s]).sum()
    count = np.bincount(of_device, minlength=world.num_devices)[of_device]
    last = np.array([int(np.flatnonzero(of_device == d)[-1]) for d in of_device])
    for group in groups:
        for slope in (0.5, 1.0, 1.5, 2.0):
            for extra in (0, 1):
                made = copy_genome(genome)
                made.meta[STRICT] = 1
                made.rhythm[:] = group_rhythm(world.num_microbatches, group, passes)
                made.phase[:num_stages, F] = turn * group / count
                warmup = (count - 1) * group + slope * (num_stages - 1 - last) + extra + 0.5
                made.phase[:num_stages, I] = (warmup + (count - 1 - turn) * group) / count
                yield made
