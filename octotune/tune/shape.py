"""A genome's stages in numbers: times, bytes and transfers, and what no order of them can beat."""

from __future__ import annotations

from octotune.tune.genome import NUM_STAGES, F, Genome, I, Shape, W
from octotune.tune.kernel import kernel
from octotune.tune.problem import FAR, Int64, World

# in place of a step
REJECTED = -1  # above the limit
STUCK = -2  # memory too small for one microbatch a stage


@kernel
def shape_stages(world: World, genome: Genome, shape: Shape) -> bool:
    """Fill `shape`; return whether every device has room for one microbatch of its stages."""
    num_stages, num_devices = genome.meta[NUM_STAGES], world.num_devices
    cut, device = genome.cut, genome.device
    for d in range(num_devices):
        shape.load[d] = 0
        shape.begin[d] = FAR
        shape.optimizer[d] = 0
        shape.reserve[d] = 0
        shape.room[d] = world.room[d]
        shape.first[d + 1] = 0
        shape.tight[d] = 0
    shape.first[0] = 0
    arrive = 0
    for s in range(num_stages):
        a, b, d = cut[s], cut[s + 1], device[s]
        shape.first[d + 1] += 1
        forward = world.forward[d, b] - world.forward[d, a]
        backward = world.input_grad[d, b] - world.input_grad[d, a]
        weight = world.weight_grad[d, b] - world.weight_grad[d, a]
        if genome.recompute[s]:
            backward += forward
        if not genome.split[s]:
            backward += weight
        shape.duration[s, F] = max(1, forward + world.overhead[d])
        shape.duration[s, I] = max(1, backward + world.overhead[d])
        shape.duration[s, W] = max(1, weight + world.overhead[d]) if genome.split[s] else 0
        shape.load[d] += shape.duration[s, F] + shape.duration[s, I] + shape.duration[s, W]
        shape.begin[d] = min(shape.begin[d], arrive)
        shape.head[s] = arrive
        arrive += shape.duration[s, F]
        shape.hold[s] = 0
        shape.latency[s] = 0
        shape.nic[s] = 0
        if s + 1 < num_stages and device[s + 1] != d:
            e = device[s + 1]
            shape.hold[s] = world.hold[world.link_kind[d, e], b - 1]
            shape.latency[s] = world.latency[d, e]
            shape.nic[s] = 1 if world.uses_nic[d, e] else 0
            arrive += shape.hold[s] + shape.latency[s]
        shape.optimizer[d] += world.optimizer[d, b] - world.optimizer[d, a]
        shape.reduction[s] = world.reduction[b] - world.reduction[a]

        saved = world.saved[b] - world.saved[a]
        saved_w = world.saved_w[b] - world.saved_w[a]
        held = world.held_w[b] - world.held_w[a]
        shape.room[d] -= world.state[b] - world.state[a]
        if genome.recompute[s]:
            kept = world.output[a - 1] if a > 0 else 0
            shape.at_forward[s] = kept
            shape.at_backward[s] = saved + saved_w + held - kept
        else:
            shape.at_forward[s] = saved + saved_w
            shape.at_backward[s] = held
        if genome.split[s]:
            shape.off_backward[s] = saved
            shape.off_weight[s] = saved_w + held
        else:
            shape.off_backward[s] = saved + saved_w + held
            shape.off_weight[s] = 0
        shape.reserve[d] = max(shape.reserve[d], shape.at_backward[s])
        shape.workspace[s] = 0

    turn = 0
    for s in range(num_stages - 1, -1, -1):
        shape.turn[s] = turn
        hop = shape.hold[s - 1] + shape.latency[s - 1] if s > 0 else 0
        turn += shape.duration[s, F] + shape.duration[s, I] + 2 * hop
    after = 0
    for s in range(num_stages):
        after = max(after, shape.duration[s, W] + shape.optimizer[device[s]])
        shape.tail[s] = after
        after += shape.duration[s, I] + shape.hold[s] + shape.latency[s]

    for d in range(num_devices):
        shape.first[d + 1] += shape.first[d]
        if shape.begin[d] == FAR:
            shape.begin[d] = 0
    for s in range(num_stages - 1, -1, -1):
        d = device[s]
        shape.first[d + 1] -= 1
        shape.member[shape.first[d + 1]] = s
    # first[d + 1] now holds where device d begins; shift it back to the usual form
    for d in range(num_devices):
        shape.first[d] = shape.first[d + 1]
    shape.first[num_devices] = num_stages

    if world.has_workspace:
        for d in range(num_devices):
            most = 0
            for i in range(shape.first[d], shape.first[d + 1]):
                s = shape.member[i]
                for layer in range(cut[s], cut[s + 1]):
                    shape.workspace[s] = max(shape.workspace[s], world.workspace[layer])
                most = max(most, shape.workspace[s])
            shape.reserve[d] += most
    for t in range(world.tied.shape[0]):
        first_device = device[_stage_of(genome, world.tied[t, 0])]
        if first_device == device[_stage_of(genome, world.tied[t, 1])]:
            shape.room[first_device] += world.tied_saving[t]

    fits = True
    for d in range(num_devices):
        one = shape.reserve[d]
        whole = shape.reserve[d]
        for i in range(shape.first[d], shape.first[d + 1]):
            s = shape.member[i]
            one += shape.at_forward[s]
            whole += world.num_microbatches * max(shape.at_forward[s], shape.off_weight[s])
        if one > shape.room[d]:
            fits = False
        if whole > shape.room[d]:
            shape.tight[d] = 1
    return fits


@kernel
def _stage_of(genome: Genome, layer: int) -> int:
    low, high = 0, genome.meta[NUM_STAGES] - 1
    while low < high:
        middle = (low + high + 1) // 2
        if genome.cut[middle] <= layer:
            low = middle
        else:
            high = middle - 1
    return low


@kernel
def device_idle(world: World, shape: Shape, d: int) -> int:
    """Return how long a device is idle at least, whatever the order.

    It begins when the forward chain has reached its first stage. Where memory binds: before its
    first I, which is its last stage's, it can run no more F than it has room to hold, each
    microbatch as far as some of its stages in turn; after its last I, no more W than it has room
    to hold back.
    """
    if not shape.tight[d]:
        return int(shape.begin[d])
    low, high = shape.first[d], shape.first[d + 1]
    if low == high:
        return 0
    m, room = world.num_microbatches, float(max(0, shape.room[d]))
    forward, size, at_no_cost, density = 0, 0, 0, 0.0
    weight, weight_at_no_cost, weight_density = 0, 0, 0.0
    for i in range(low, high):
        s = shape.member[i]
        forward += shape.duration[s, F]
        size += shape.at_forward[s]
        if size == 0:
            at_no_cost = forward
        else:
            density = max(density, (forward - at_no_cost) / size)
        weight += shape.duration[s, W]
        if shape.off_weight[s] == 0:
            weight_at_no_cost += shape.duration[s, W]
        else:
            weight_density = max(weight_density, shape.duration[s, W] / shape.off_weight[s])
    fills = min(float(m * forward), m * at_no_cost + room * density)
    fills_w = min(float(m * weight), m * weight_at_no_cost + room * weight_density)
    last, first = shape.member[high - 1], shape.member[low]
    until = shape.head[last] + shape.duration[last, F] + shape.turn[last]
    after = shape.tail[first] - shape.optimizer[d]
    idle = max(float(shape.begin[d]), until - fills - 1.0)
    return int(idle + max(0.0, after - fills_w - 1.0))


@kernel
def device_bound(world: World, shape: Shape) -> int:
    """Return what no order can beat: the busiest device, with what comes before and after.

    For each device, sets of its work that begin no earlier than some time and end no later than
    another before the step does: all of it; F and I of a stage and later ones, whose last I is
    followed by the way back through all earlier stages; I and W of a stage and earlier ones, whose
    first I comes after the way up and back. Source: the heads and tails of Carlier 1982, European
    Journal of Operational Research 11, each set of the same machine.
    """
    m, most = world.num_microbatches, 0
    for d in range(world.num_devices):
        most = max(most, device_idle(world, shape, d) + m * shape.load[d] + shape.optimizer[d])
        work = 0
        for i in range(shape.first[d + 1] - 1, shape.first[d] - 1, -1):
            s = shape.member[i]
            work += shape.duration[s, F] + shape.duration[s, I]
            most = max(most, shape.head[s] + m * work + shape.tail[s])
        work = 0
        for i in range(shape.first[d], shape.first[d + 1]):
            s = shape.member[i]
            work += shape.duration[s, I] + shape.duration[s, W]
            begin = shape.head[s] + shape.duration[s, F] + shape.turn[s]
            most = max(most, begin + m * work + shape.optimizer[d])
    return most


@kernel
def finish_step(
    world: World,
    genome: Genome,
    optimizer: Int64,
    free: Int64,
    reducing: Int64,
    last_end: Int64,
) -> int:
    """Return the step: actions, reductions, exchanges of tied layers, then the optimizer.

    Per device, `free` is when its actions have ended and `reducing` when its reductions have;
    `last_end` is when each stage's last action has.
    """
    for t in range(world.tied.shape[0]):
        first, second = _stage_of(genome, world.tied[t, 0]), _stage_of(genome, world.tied[t, 1])
        d, e = genome.device[first], genome.device[second]
        if d != e:
            transfer = float(world.tied_bytes[t]) * 1e9 / float(world.bandwidth[d, e])
            end = max(last_end[first], last_end[second])
            end += int(transfer + 0.5) + world.latency[d, e]
            reducing[d] = max(reducing[d], end)
            reducing[e] = max(reducing[e], end)
    step = 0
    for d in range(world.num_devices):
        step = max(step, max(free[d], reducing[d]) + optimizer[d])
    return int(step)
