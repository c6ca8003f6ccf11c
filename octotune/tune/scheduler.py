"""The list scheduler: a genome's stages and rule -> an order of actions and its step time.

Event by event: every device holds its next choice, the earliest of all starts, and only the
devices it touches choose again. Memory cannot deadlock: each stage that still has forwards to run
keeps one microbatch's bytes reserved, so the oldest microbatch can always go on. A run ends early
as soon as some device's time plus its remaining work exceeds the acceptance limit, which is what
makes a local search over partitions affordable (`benchmarks/tuner_speed.py`).
"""

from __future__ import annotations

from numba import njit

from octotune.tune.genome import NUM_STAGES, STRICT, F, Genome, I, Run, Shape, W
from octotune.tune.problem import FAR, World

REJECTED = -1  # above the limit
STUCK = -2  # memory too small for one microbatch a stage


@njit(cache=True, nogil=True)
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
                    most = max(most, world.workspace[layer])
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


@njit(cache=True, nogil=True)
def _stage_of(genome: Genome, layer: int) -> int:
    low, high = 0, genome.meta[NUM_STAGES] - 1
    while low < high:
        middle = (low + high + 1) // 2
        if genome.cut[middle] <= layer:
            low = middle
        else:
            high = middle - 1
    return low


@njit(cache=True, nogil=True)
def device_bound(world: World, shape: Shape) -> int:
    """Return the largest of the devices' earliest begin + all their work; no order beats it."""
    most = 0
    for d in range(world.num_devices):
        bound = shape.begin[d] + world.num_microbatches * shape.load[d] + shape.optimizer[d]
        most = max(most, bound)
    return most


@njit(cache=True, nogil=True)
def _may_forward(s: int, d: int, shape: Shape, run: Run) -> bool:
    if not shape.tight[d]:
        return True
    others = run.kept_sum[d] - run.kept[s]
    need = run.memory[d] + shape.at_forward[s] + others + shape.reserve[d]
    return bool(need <= shape.room[d])


@njit(cache=True, nogil=True)
def _may_backward(d: int, shape: Shape, run: Run) -> bool:
    # The reserve is the largest addition of any backward plus the largest workspace. Once no W
    # is pending it is free: every forward was admitted with the reserve to spare.
    if not shape.tight[d] or run.pending[d] == 0:
        return True
    return bool(run.memory[d] + shape.reserve[d] <= shape.room[d])


@njit(cache=True, nogil=True)
def _lowest_weight(d: int, genome: Genome, shape: Shape, run: Run) -> int:
    best, token = 1e300, -1
    for i in range(shape.first[d], shape.first[d + 1]):
        s = shape.member[i]
        if run.done[s, W] < run.done[s, I] and genome.split[s]:
            key = genome.phase[s, W] + genome.rhythm[run.done[s, W]]
            if key < best:
                best, token = key, 3 * s + W
    return token


@njit(cache=True, nogil=True)
def _fitting_weight(d: int, gap: int, genome: Genome, shape: Shape, run: Run) -> int:
    longest, token = -1, -1
    for i in range(shape.first[d], shape.first[d + 1]):
        s = shape.member[i]
        if run.done[s, W] < run.done[s, I] and genome.split[s]:
            time = shape.duration[s, W]
            if genome.fits[d] * time <= gap and time > longest:
                longest, token = time, 3 * s + W
    return token


@njit(cache=True, nogil=True)
def _choose(d: int, world: World, genome: Genome, shape: Shape, run: Run) -> None:
    """Set the device's next choice: the lowest key of what can start, W where it fits."""
    num_stages, m = genome.meta[NUM_STAGES], world.num_microbatches
    now = run.free[d]
    found = 0
    soonest = FAR
    blocked_key = 1e300
    blocked_start = FAR
    after = run.last_kind[d]
    bonus_f = genome.bonus[d] if after == I else 0.0
    bonus_i = genome.bonus[d] if after == F else 0.0
    for i in range(shape.first[d], shape.first[d + 1]):
        s = shape.member[i]
        n = run.done[s, I]
        if n < run.done[s, F] and (s == num_stages - 1 or run.done[s + 1, I] > n):
            start = now
            if s < num_stages - 1 and run.arrival_i[s, n] > now:
                start = run.arrival_i[s, n]
            key = genome.phase[s, I] + genome.rhythm[n] - bonus_i
            if _may_backward(d, shape, run):
                run.found_start[found] = start
                run.found_key[found] = key
                run.found_token[found] = 3 * s + I
                found += 1
                soonest = min(soonest, start)
            elif key < blocked_key:
                blocked_key, blocked_start = key, start
        n = run.done[s, F]
        if n < m and (s == 0 or run.done[s - 1, F] > n):
            most = genome.limit[s] if n < genome.switch[s] else genome.late[s]
            if n - run.done[s, I] < most:
                start = now
                if s > 0 and run.arrival_f[s, n] > now:
                    start = run.arrival_f[s, n]
                key = genome.phase[s, F] + genome.rhythm[n] - bonus_f
                if _may_forward(s, d, shape, run):
                    run.found_start[found] = start
                    run.found_key[found] = key
                    run.found_token[found] = 3 * s + F
                    found += 1
                    soonest = min(soonest, start)
                elif key < blocked_key:
                    blocked_key, blocked_start = key, start
    best_key, best_start, best_token = 1e300, FAR, -1
    horizon = soonest + genome.window[d]
    for i in range(found):
        if run.found_start[i] <= horizon and run.found_key[i] < best_key:
            best_key = run.found_key[i]
            best_start = run.found_start[i]
            best_token = run.found_token[i]
    if run.pending[d] > 0:
        if best_token < 0 or (blocked_key < best_key and blocked_start <= best_start):
            best_token, best_start = _lowest_weight(d, genome, shape, run), now
        else:
            token = _lowest_weight(d, genome, shape, run)
            s = token // 3
            if genome.phase[s, W] + genome.rhythm[run.done[s, W]] < best_key:
                best_token, best_start = token, now
            elif best_start > now:
                token = _fitting_weight(d, best_start - now, genome, shape, run)
                if token >= 0:
                    best_token, best_start = token, now
    run.next_token[d] = best_token
    run.next_start[d] = best_start


@njit(cache=True, nogil=True)
def _choose_strict(d: int, world: World, genome: Genome, shape: Shape, run: Run) -> None:
    """Set the device's next choice: the lowest key of all, waited for; W in the gaps."""
    num_stages, m = genome.meta[NUM_STAGES], world.num_microbatches
    now = run.free[d]
    key_i, token_i, key_f, token_f = 1e300, -1, 1e300, -1
    for i in range(shape.first[d], shape.first[d + 1]):
        s = shape.member[i]
        n = run.done[s, I]
        if n < m:
            key = genome.phase[s, I] + genome.rhythm[n]
            if key <= key_i:
                key_i, token_i = key, 3 * s + I
        n = run.done[s, F]
        if n < m:
            key = genome.phase[s, F] + genome.rhythm[n]
            if key < key_f:
                key_f, token_f = key, 3 * s + F
    token = token_i
    if token_f >= 0 and key_f <= key_i:
        token = token_f
        s = token // 3
        n = run.done[s, F]
        most = genome.limit[s] if n < genome.switch[s] else genome.late[s]
        if n - run.done[s, I] >= most or not _may_forward(s, d, shape, run):
            _choose(d, world, genome, shape, run)  # memory is in the way: what can run, runs
            return
    start = FAR
    if token >= 0:
        s = token // 3
        if token % 3 == F:
            n = run.done[s, F]
            if s == 0:
                start = now
            elif run.done[s - 1, F] > n:
                start = max(now, run.arrival_f[s, n])
        else:
            n = run.done[s, I]
            if n < run.done[s, F]:
                if s == num_stages - 1:
                    start = now
                elif run.done[s + 1, I] > n:
                    start = max(now, run.arrival_i[s, n])
                if start < FAR and not _may_backward(d, shape, run):
                    start = FAR
    if run.pending[d] > 0 and start > now:
        if start == FAR:
            token, start = _lowest_weight(d, genome, shape, run), now
        else:
            weight = _fitting_weight(d, start - now, genome, shape, run)
            if weight >= 0:
                token, start = weight, now
    run.next_token[d] = token if start < FAR else -1
    run.next_start[d] = start


@njit(cache=True, nogil=True)
def _send(end: int, s: int, source: int, target: int, world: World, shape: Shape, run: Run) -> int:
    """Return when the tensor of boundary s, ready at `end`, arrives."""
    if source == target:
        return end
    begin = max(end, run.channel[source, target])
    if shape.nic[s]:
        out, into = world.host[source], world.host[target]
        begin = max(begin, max(run.sending[out], run.receiving[into]))
        run.sending[out] = begin + shape.hold[s]
        run.receiving[into] = begin + shape.hold[s]
    run.channel[source, target] = begin + shape.hold[s]
    return int(begin + shape.hold[s] + shape.latency[s])


@njit(cache=True, nogil=True)
def list_schedule(world: World, genome: Genome, shape: Shape, run: Run, limit: int) -> int:
    """Run the rule; return the step, REJECTED once it must exceed `limit`, or STUCK.

    `shape` is the genome's (`shape_stages` was true). The order is left in `run.order`.
    """
    num_stages, num_devices = genome.meta[NUM_STAGES], world.num_devices
    m = world.num_microbatches
    strict = genome.meta[STRICT] == 1
    run.begin[0] = 0
    for d in range(num_devices):
        run.free[d] = 0
        run.left[d] = m * shape.load[d] + shape.optimizer[d]
        if shape.begin[d] + run.left[d] > limit:
            return REJECTED
        run.memory[d] = 0
        run.kept_sum[d] = 0
        run.pending[d] = 0
        run.last_kind[d] = -1
        run.reducing[d] = 0
        count = 0
        for i in range(shape.first[d], shape.first[d + 1]):
            s = shape.member[i]
            run.kept_sum[d] += shape.at_forward[s]
            count += m * (2 + genome.split[s])
        run.position[d] = run.begin[d]
        run.begin[d + 1] = run.begin[d] + count
        for e in range(num_devices):
            run.channel[d, e] = 0
    for h in range(run.sending.shape[0]):
        run.sending[h] = 0
        run.receiving[h] = 0
    for s in range(num_stages):
        run.done[s, F] = 0
        run.done[s, I] = 0
        run.done[s, W] = 0
        run.use[s] = 0
        run.kept[s] = shape.at_forward[s]
    for d in range(num_devices):
        if strict:
            _choose_strict(d, world, genome, shape, run)
        else:
            _choose(d, world, genome, shape, run)

    for _ in range(run.begin[num_devices]):
        d = 0
        start = run.next_start[0]
        for e in range(1, num_devices):
            if run.next_start[e] < start:
                start, d = run.next_start[e], e
        if start >= FAR and strict:
            # forwards passed over for memory can make devices wait in a ring: take what can run
            for e in range(num_devices):
                _choose(e, world, genome, shape, run)
                if run.next_start[e] < start:
                    start, d = run.next_start[e], e
        if start >= FAR:
            return STUCK
        token = run.next_token[d]
        s, kind = token // 3, token % 3
        n = run.done[s, kind]
        run.done[s, kind] = n + 1
        end = start + shape.duration[s, kind]
        run.free[d] = end
        run.left[d] -= shape.duration[s, kind]
        if end + run.left[d] > limit:
            return REJECTED
        run.order[run.position[d]] = token
        run.position[d] += 1
        touched = -1
        if kind == F:
            run.last_kind[d] = F
            run.use[s] += shape.at_forward[s]
            run.memory[d] += shape.at_forward[s]
            if s + 1 < num_stages:
                touched = genome.device[s + 1]
                run.arrival_f[s + 1, n] = _send(end, s, d, touched, world, shape, run)
        elif kind == I:
            run.last_kind[d] = I
            change = shape.at_backward[s] - shape.off_backward[s]
            run.use[s] += change
            run.memory[d] += change
            if genome.split[s]:
                run.pending[d] += 1
            if s > 0:
                touched = genome.device[s - 1]
                run.arrival_i[s - 1, n] = _send(end, s - 1, d, touched, world, shape, run)
        else:
            run.use[s] -= shape.off_weight[s]
            run.memory[d] -= shape.off_weight[s]
            run.pending[d] -= 1
        if shape.tight[d]:
            kept = 0
            if run.done[s, F] < m and run.use[s] < shape.at_forward[s]:
                kept = shape.at_forward[s] - run.use[s]
            run.kept_sum[d] += kept - run.kept[s]
            run.kept[s] = kept
        if n == m - 1:
            run.last_end[s] = end  # the last kind to end is the one that stays
            if kind == W or (kind == I and not genome.split[s]):
                run.reducing[d] = max(run.reducing[d], end) + shape.reduction[s]
        if strict:
            _choose_strict(d, world, genome, shape, run)
            if touched >= 0 and touched != d:
                _choose_strict(touched, world, genome, shape, run)
        else:
            _choose(d, world, genome, shape, run)
            if touched >= 0 and touched != d:
                _choose(touched, world, genome, shape, run)
    return _finish(world, genome, shape, run)


@njit(cache=True, nogil=True)
def _finish(world: World, genome: Genome, shape: Shape, run: Run) -> int:
    """Return the step: actions, reductions, exchanges of tied layers, then the optimizer."""
    for t in range(world.tied.shape[0]):
        first, second = _stage_of(genome, world.tied[t, 0]), _stage_of(genome, world.tied[t, 1])
        d, e = genome.device[first], genome.device[second]
        if d != e:
            transfer = float(world.tied_bytes[t]) * 1e9 / float(world.bandwidth[d, e])
            end = max(run.last_end[first], run.last_end[second])
            end += int(transfer + 0.5) + world.latency[d, e]
            run.reducing[d] = max(run.reducing[d], end)
            run.reducing[e] = max(run.reducing[e], end)
    step = 0
    for d in range(world.num_devices):
        step = max(step, max(run.free[d], run.reducing[d]) + shape.optimizer[d])
    return int(step)
