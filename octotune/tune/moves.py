"""Moves on a genome: cuts, devices, stage counts, and the rule's parameters.

Every move changes the trial genome in place and returns whether it changed anything; moves on cuts
and devices leave the balance to `octotune.tune.balance.repair`.
"""

from __future__ import annotations

import math

from octotune.tune.balance import RandomState, random, random_below
from octotune.tune.genome import NEVER_FIRST, NUM_STAGES, F, Float64, Genome, I, Shape, W
from octotune.tune.kernel import kernel
from octotune.tune.problem import World

# The first ones need repair. SHIFT, RELAY change cuts; the next three the placement; two the
# number of stages; RECOMPUTE what is kept, of a stage or of a part that becomes one.
SHIFT, RELAY, MOVE, SWAP, EXCHANGE, SPLIT, MERGE, RECOMPUTE = 0, 1, 2, 3, 4, 5, 6, 7
PHASE, LIMIT, DEVICE, WEIGHT, FUSE = 8, 9, 10, 11, 12
NUM_MOVES = 13
STRUCTURAL = 8  # moves below this one change what the devices do, not only when

PART = 0.5  # of the changes of what is kept: those of a part of a stage

MOVE_NAMES = (
    *("shift a cut", "hand layers on", "move a stage", "swap stages", "exchange devices"),
    *("split a stage", "merge stages", "recompute"),
    *("keys", "limits", "waiting", "weight keys", "fuse backward"),
)


@kernel
def copy_into(source: Genome, target: Genome) -> None:
    """Copy the used part of a genome into another of the same capacity."""
    num_stages = source.meta[NUM_STAGES]
    target.meta[0] = source.meta[0]
    target.meta[1] = source.meta[1]
    for s in range(num_stages):
        target.cut[s] = source.cut[s]
        target.device[s] = source.device[s]
        target.split[s] = source.split[s]
        target.recompute[s] = source.recompute[s]
        target.limit[s] = source.limit[s]
        target.late[s] = source.late[s]
        target.switch[s] = source.switch[s]
        target.phase[s, F] = source.phase[s, F]
        target.phase[s, I] = source.phase[s, I]
        target.phase[s, W] = source.phase[s, W]
    target.cut[num_stages] = source.cut[num_stages]
    for d in range(source.window.shape[0]):
        target.window[d] = source.window[d]
        target.fits[d] = source.fits[d]
        target.bonus[d] = source.bonus[d]
    for j in range(source.rhythm.shape[0]):
        target.rhythm[j] = source.rhythm[j]


@kernel
def copy_stage(genome: Genome, source: int, target: int) -> None:
    """Give stage `target` all of stage `source` but its layers."""
    genome.device[target] = genome.device[source]
    genome.split[target] = genome.split[source]
    genome.recompute[target] = genome.recompute[source]
    genome.limit[target] = genome.limit[source]
    genome.late[target] = genome.late[source]
    genome.switch[target] = genome.switch[source]
    for kind in range(3):
        genome.phase[target, kind] = genome.phase[source, kind]


@kernel
def split_stage(genome: Genome, s: int, at: int) -> None:
    """Make stages s and s + 1 of stage s, the second beginning at layer `at`."""
    num_stages = genome.meta[NUM_STAGES]
    for t in range(num_stages, s, -1):
        genome.cut[t + 1] = genome.cut[t]
        copy_stage(genome, t - 1, t)
    genome.cut[s + 1] = at
    genome.meta[NUM_STAGES] = num_stages + 1


@kernel
def merge_stages(genome: Genome, s: int) -> None:
    """Make stage s of stages s and s + 1; the device and rule are those of s."""
    num_stages = genome.meta[NUM_STAGES]
    for t in range(s + 1, num_stages - 1):
        genome.cut[t] = genome.cut[t + 1]
        copy_stage(genome, t + 1, t)
    genome.cut[num_stages - 1] = genome.cut[num_stages]
    genome.meta[NUM_STAGES] = num_stages - 1


@kernel
def bell(rng: RandomState) -> float:
    """Return a random number of mean 0 and deviation 1, within 3.5."""
    return (random(rng) + random(rng) + random(rng) + random(rng) - 2.0) * 1.7320508


@kernel
def same_ranks(world: World, shape: Shape, genome: Genome, other: Genome) -> bool:
    """Whether two genomes that differ in keys alone order every device's work the same.

    With a microbatch's keys one apart from the next one's, only the whole part of a difference
    between two keys tells which microbatch of one kind comes before which of the other.
    `shape` is the genomes' (their placement alone is read).
    """
    m = world.num_microbatches
    if genome.rhythm[m - 1] != m - 1:
        return False
    for d in range(world.num_devices):
        for i in range(shape.first[d], shape.first[d + 1]):
            s = shape.member[i]
            for kind in range(3):
                for j in range(shape.first[d], i + 1):
                    t = shape.member[j]
                    for k in range(kind if t == s else 3):
                        before = genome.phase[s, kind] - genome.phase[t, k]
                        after = other.phase[s, kind] - other.phase[t, k]
                        if before == after:
                            continue
                        for way in range(-1, 2):
                            by = way * genome.bonus[d]
                            low, high = math.floor(before + by), math.floor(after + by)
                            if max(-m, min(m, low)) != max(-m, min(m, high)):
                                return False
    return True


@kernel
def keep_monotone(genome: Genome) -> None:
    """Raise keys that come before those of actions they wait for."""
    num_stages = genome.meta[NUM_STAGES]
    low = genome.phase[0, F]
    for s in range(num_stages):
        low = max(low, genome.phase[s, F])
        genome.phase[s, F] = low
    for s in range(num_stages - 1, -1, -1):
        low = max(low, genome.phase[s, I])
        genome.phase[s, I] = low


@kernel
def _some_device(world: World, genome: Genome, s: int, rng: RandomState) -> int:
    """Return a random device, mostly one on the host of a stage next to s."""
    d = random_below(rng, world.num_devices)
    if not world.many_hosts or random(rng) < 0.3:
        return d
    t = s - 1 if random(rng) < 0.5 else s + 1
    if t < 0 or t >= genome.meta[NUM_STAGES]:
        t = s
    host = world.host[genome.device[t]]
    for _ in range(8):
        if world.host[d] == host:
            break
        d = random_below(rng, world.num_devices)
    return d


@kernel
def drawn(weights: Float64, rng: RandomState) -> int:
    """Return the number of a random move, each as likely as its weight says, up to a factor."""
    at, kind = random(rng) * weights.sum(), 0
    while kind < len(weights) - 1 and at >= weights[kind]:
        at -= weights[kind]
        kind += 1
    return kind


@kernel
def change(kind: int, world: World, genome: Genome, most: int, rng: RandomState) -> bool:
    """Make one move; `most` is the genome's capacity."""
    if kind < STRUCTURAL:
        return _change_structure(kind, world, genome, most, rng)
    return _change_rule(kind, world, genome, rng)


@kernel
def _change_structure(
    kind: int, world: World, genome: Genome, most: int, rng: RandomState
) -> bool:
    num_stages, num_devices = genome.meta[NUM_STAGES], world.num_devices
    cut, device = genome.cut, genome.device
    s = random_below(rng, num_stages)
    if kind == SHIFT:
        if s == 0:
            return False
        step = 1 if random(rng) < 0.7 else 2
        if random(rng) < 0.5:
            step = -step
        if not cut[s - 1] < cut[s] + step < cut[s + 1]:
            return False
        cut[s] += step
    elif kind == RELAY:
        # a run of stages hands one layer on: one stage grows, another shrinks, those between move
        t = random_below(rng, num_stages)
        a, b = min(s, t), max(s, t)
        step = 1 if random(rng) < 0.5 else -1
        if a == b or cut[a + 1] - cut[a] + step < 1 or cut[b + 1] - cut[b] - step < 1:
            return False
        for t in range(a + 1, b + 1):
            cut[t] += step
    elif kind == MOVE:
        d = _some_device(world, genome, s, rng)
        if device[s] == d:
            return False
        device[s] = d
    elif kind == SWAP:
        t = random_below(rng, num_stages)
        if random(rng) < 0.5:
            t = min(num_stages - 1, s + 1 + random_below(rng, 3))
        if device[s] == device[t]:
            return False
        device[s], device[t] = device[t], device[s]
    elif kind == EXCHANGE:
        # from stage s on, or up to some other, two devices change places
        d, e = random_below(rng, num_devices), device[s]
        if d == e:
            return False
        last = num_stages - 1
        if random(rng) < 0.5:
            last = s + random_below(rng, num_stages - s)
        for t in range(s, last + 1):
            if device[t] == d:
                device[t] = e
            elif device[t] == e:
                device[t] = d
    elif kind == SPLIT:
        size = cut[s + 1] - cut[s]
        if size < 2 or num_stages >= most:
            return False
        split_stage(genome, s, cut[s] + 1 + random_below(rng, size - 1))
        t = s + random_below(rng, 2)
        device[t] = _some_device(world, genome, t, rng)
    elif kind == MERGE:
        if s == num_stages - 1:
            return False
        which = s + random_below(rng, 2)
        keep, again = device[which], genome.recompute[which]
        merge_stages(genome, s)
        device[s], genome.recompute[s] = keep, again
    else:
        size = cut[s + 1] - cut[s]
        if size > 1 and num_stages < most and random(rng) < PART:
            split_stage(genome, s, cut[s] + 1 + random_below(rng, size - 1))
            s += random_below(rng, 2)
        genome.recompute[s] = 1 - genome.recompute[s]
    return True


@kernel
def _change_rule(kind: int, world: World, genome: Genome, rng: RandomState) -> bool:
    num_stages, m = genome.meta[NUM_STAGES], world.num_microbatches
    s = random_below(rng, num_stages)
    if kind == PHASE:
        which = F if random(rng) < 0.5 else I
        way = random(rng)
        scale = 0.02 * 100.0 ** random(rng)
        if way < 0.5:
            # past the next microbatch, or the one after it, of other work on the same device
            other = random_below(rng, num_stages)
            for _ in range(8):
                if genome.device[other] == genome.device[s]:
                    break
                other = random_below(rng, num_stages)
            kind_of = F if random(rng) < 0.5 else I
            apart = genome.phase[s, which] - genome.phase[other, kind_of]
            if genome.device[other] != genome.device[s] or (other == s and kind_of == which):
                genome.phase[s, which] += scale * bell(rng)
            elif abs(apart) > m:
                genome.phase[s, which] -= apart + 3.0 * bell(rng)
            else:
                by = 1.0 if random(rng) < 0.8 else 2.0
                by = math.floor(apart) + random(rng) + (by if random(rng) < 0.5 else -by)
                genome.phase[s, which] += by - apart
        elif way < 0.7:
            other = random_below(rng, num_stages)
            if genome.device[other] != genome.device[s]:
                other = s
            source = F if random(rng) < 0.5 else I
            genome.phase[s, which] = genome.phase[other, source] + scale * bell(rng)
        else:
            # what comes later in the chain moves along
            by = scale * bell(rng)
            if which == F:
                for t in range(s, num_stages):
                    genome.phase[t, F] += by
            last = s if which == I else num_stages - 1
            for t in range(last + 1):
                genome.phase[t, I] += by
    elif kind == LIMIT:
        step = 1 + random_below(rng, 2)
        if random(rng) < 0.5:
            step = -step
        if random(rng) < 0.6:
            genome.limit[s] = min(m, max(1, min(genome.limit[s], m) + step))
            if random(rng) < 0.5:
                genome.late[s] = genome.limit[s]
        else:
            genome.late[s] = min(m, max(1, min(genome.late[s], m) + step))
        if random(rng) < 0.3:
            genome.switch[s] = random_below(rng, m + 1)
    elif kind == DEVICE:
        d = genome.device[s]
        way = random(rng)
        if way < 0.4:
            longest = (world.forward[d, genome.cut[s + 1]] - world.forward[d, genome.cut[s]]) * 1.5
            genome.window[d] = int(longest * random(rng)) if random(rng) < 0.7 else 0
        elif way < 0.7:
            genome.fits[d] = 1.4 * random(rng) if random(rng) < 0.7 else 1.0
        else:
            size = random(rng)
            genome.bonus[d] = 0.0 if size < 0.3 else (1e5 if size < 0.5 else 4.0 * (size - 0.5))
    elif kind == WEIGHT:
        if random(rng) < 0.3:
            genome.phase[s, W] = NEVER_FIRST
        else:
            genome.phase[s, W] = genome.phase[s, I] - math.log(1e-9 + random(rng)) * 1.5
    else:
        genome.split[s] = 1 - genome.split[s]
    return True
