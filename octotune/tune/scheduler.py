"""The list scheduler: a genome's stages and rule -> an order of actions and its step time.

Event by event: every device holds its next choice, the earliest of all starts, and only the
devices it touches choose again. Memory cannot deadlock: each stage that still has forwards to run
keeps one microbatch's bytes reserved, so the oldest microbatch can always go on. A run ends early
as soon as some device's time plus its remaining work exceeds the acceptance limit, which is what
makes a local search over partitions affordable (`benchmarks/tuner_speed.py`).
"""

from __future__ import annotations

from octotune.tune.genome import NUM_STAGES, STRICT, F, Genome, I, Run, Shape, W
from octotune.tune.kernel import kernel
from octotune.tune.problem import FAR, World
from octotune.tune.shape import REJECTED, STUCK, device_bound, finish_step


@kernel
def list_schedule(world: World, genome: Genome, shape: Shape, run: Run, limit: int) -> int:
    """Run the rule; return the step, REJECTED once it must exceed `limit`, or STUCK.

    `shape` is the genome's (`shape_stages` was true). The order is left in `run.order`.

    One long function on purpose: a call that passes these tuples of arrays costs more than the
    choice it would make (`benchmarks/tuner_speed.py`).
    """
    num_stages, num_devices = genome.meta[NUM_STAGES], world.num_devices
    m = world.num_microbatches
    follow_keys = genome.meta[STRICT] == 1
    device, split, phase, rhythm = genome.device, genome.split, genome.phase, genome.rhythm
    early, late, switch = genome.limit, genome.late, genome.switch
    window, fits, bonus = genome.window, genome.fits, genome.bonus
    duration, hold, latency, nic = shape.duration, shape.hold, shape.latency, shape.nic
    first, member, tight, room, reserve = (
        shape.first,
        shape.member,
        shape.tight,
        shape.room,
        shape.reserve,
    )
    at_forward, at_backward = shape.at_forward, shape.at_backward
    off_backward, off_weight = shape.off_backward, shape.off_weight
    done, arrival_f, arrival_i = run.done, run.arrival_f, run.arrival_i
    free, left, memory, pending = run.free, run.left, run.memory, run.pending
    kept, kept_sum, use = run.kept, run.kept_sum, run.use
    next_start, next_token, last_kind = run.next_start, run.next_token, run.last_kind
    channel, sending, receiving = run.channel, run.sending, run.receiving
    found_start, found_key, found_token = run.found_start, run.found_key, run.found_token
    order, position, reconsider = run.order, run.position, run.reconsider
    host, rest, turn, tail = world.host, run.rest, shape.turn, shape.tail

    if device_bound(world, shape) > limit:
        return REJECTED
    run.begin[0] = 0
    for d in range(num_devices):
        free[d] = 0
        left[d] = m * shape.load[d] + shape.optimizer[d]
        memory[d] = 0
        kept_sum[d] = 0
        pending[d] = 0
        last_kind[d] = -1
        run.reducing[d] = 0
        reconsider[d] = d
        count = 0
        for i in range(first[d], first[d + 1]):
            s = member[i]
            kept_sum[d] += at_forward[s]
            count += m * (2 + split[s])
        following = 0
        for i in range(first[d + 1] - 1, first[d] - 1, -1):
            s = member[i]
            following += m * (duration[s, F] + duration[s, I])
            rest[s] = following
        position[d] = run.begin[d]
        run.begin[d + 1] = run.begin[d] + count
        for e in range(num_devices):
            channel[d, e] = 0
    for h in range(sending.shape[0]):
        sending[h] = 0
        receiving[h] = 0
    for s in range(num_stages):
        done[s, F] = 0
        done[s, I] = 0
        done[s, W] = 0
        use[s] = 0
        kept[s] = at_forward[s]

    num_reconsidered = num_devices
    strict = follow_keys
    remaining = run.begin[num_devices]
    while remaining > 0:
        for q in range(num_reconsidered):
            d = reconsider[q]
            now = free[d]
            waiting = pending[d] > 0
            # The reserve covers any backward and workspace. Once no W waits it is free: every
            # forward was admitted with the reserve to spare.
            may_backward = not tight[d] or not waiting or memory[d] + reserve[d] <= room[d]
            choose_ready = not strict
            if strict:
                # the lowest key of all, waited for
                key_i, token_i, key_f, token_f = 1e300, -1, 1e300, -1
                for i in range(first[d], first[d + 1]):
                    s = member[i]
                    n = done[s, I]
                    if n < m:
                        key = phase[s, I] + rhythm[n]
                        if key <= key_i:
                            key_i, token_i = key, 4 * s + I
                    n = done[s, F]
                    if n < m:
                        key = phase[s, F] + rhythm[n]
                        if key < key_f:
                            key_f, token_f = key, 4 * s + F
                start, token = FAR, token_i
                best_key = min(key_i, key_f)
                blocked_key, blocked_start = 1e300, FAR
                if token_f >= 0 and key_f <= key_i:
                    token = token_f
                    s = token >> 2
                    n = done[s, F]
                    most = early[s] if n < switch[s] else late[s]
                    if n - done[s, I] >= most or (
                        tight[d] and memory[d] + at_forward[s] + reserve[d] > room[d]
                    ):
                        choose_ready = True  # memory is in the way: what can run, runs
                    elif s == 0:
                        start = now
                    elif done[s - 1, F] > n:
                        start = max(now, arrival_f[s, n])
                elif token >= 0:
                    s = token >> 2
                    n = done[s, I]
                    if n < done[s, F] and may_backward:
                        if s == num_stages - 1:
                            start = now
                        elif done[s + 1, I] > n:
                            start = max(now, arrival_i[s, n])
            if choose_ready:
                # the lowest key of what can start first, or within the window
                found, wait = 0, window[d]
                soonest, best_key, token = FAR, 1e300, -1
                blocked_key, blocked_start = 1e300, FAR
                bonus_f = bonus[d] if last_kind[d] == I else 0.0
                bonus_i = bonus[d] if last_kind[d] == F else 0.0
                for i in range(first[d], first[d + 1]):
                    s = member[i]
                    n = done[s, I]
                    if n < done[s, F] and (s == num_stages - 1 or done[s + 1, I] > n):
                        start = now
                        if s < num_stages - 1 and arrival_i[s, n] > now:
                            start = arrival_i[s, n]
                        key = phase[s, I] + rhythm[n] - bonus_i
                        if may_backward:
                            if wait > 0:
                                found_start[found] = start
                                found_key[found] = key
                                found_token[found] = 4 * s + I
                                found += 1
                                soonest = min(soonest, start)
                            elif start < soonest or (start == soonest and key < best_key):
                                soonest, best_key, token = start, key, 4 * s + I
                        elif key < blocked_key:
                            blocked_key, blocked_start = key, start
                    n = done[s, F]
                    if n < m and (s == 0 or done[s - 1, F] > n):
                        most = early[s] if n < switch[s] else late[s]
                        if n - done[s, I] < most:
                            start = now
                            if s > 0 and arrival_f[s, n] > now:
                                start = arrival_f[s, n]
                            key = phase[s, F] + rhythm[n] - bonus_f
                            if (
                                not tight[d]
                                or memory[d] + at_forward[s] + kept_sum[d] - kept[s] + reserve[d]
                                <= room[d]
                                or (
                                    follow_keys
                                    and memory[d] + at_forward[s] + reserve[d] <= room[d]
                                )
                            ):
                                if wait > 0:
                                    found_start[found] = start
                                    found_key[found] = key
                                    found_token[found] = 4 * s + F
                                    found += 1
                                    soonest = min(soonest, start)
                                elif start < soonest or (start == soonest and key < best_key):
                                    soonest, best_key, token = start, key, 4 * s + F
                            elif key < blocked_key:
                                blocked_key, blocked_start = key, start
                start = soonest
                for i in range(found):
                    if found_start[i] <= soonest + wait and found_key[i] < best_key:
                        best_key = found_key[i]
                        start = found_start[i]
                        token = found_token[i]
            if waiting:
                # W: when nothing else can run or memory asks for it, by its key, or in a gap
                weight_key, weight_token = 1e300, -1
                longest, longest_token = -1, -1
                gap = start - now
                for i in range(first[d], first[d + 1]):
                    s = member[i]
                    n = done[s, W]
                    if split[s] and n < done[s, I]:
                        key = phase[s, W] + rhythm[n]
                        if key < weight_key:
                            weight_key, weight_token = key, 4 * s + W
                        time = duration[s, W]
                        if time > longest and fits[d] * time <= gap:
                            longest, longest_token = time, 4 * s + W
                if (
                    start == FAR
                    or weight_key < best_key
                    or (blocked_key < best_key and blocked_start <= start)
                ):
                    token, start = weight_token, now
                elif gap > 0 and longest >= 0:
                    token, start = longest_token, now
            next_token[d] = token
            next_start[d] = start

        d = 0
        start = next_start[0]
        for e in range(1, num_devices):
            if next_start[e] < start:
                start, d = next_start[e], e
        if start >= FAR:
            if not strict:
                return STUCK
            # forwards passed over for memory can make devices wait in a ring: take what can run
            strict = False
            num_reconsidered = num_devices
            for e in range(num_devices):
                reconsider[e] = e
            continue
        strict = follow_keys
        remaining -= 1
        token = next_token[d]
        s, kind = token >> 2, token & 3
        n = done[s, kind]
        done[s, kind] = n + 1
        end = start + duration[s, kind]
        free[d] = end
        left[d] -= duration[s, kind]
        if end + left[d] > limit:
            return REJECTED
        # the way back that follows the last I of each stage and later ones, and of this microbatch
        time = duration[s, kind] if kind != W else 0
        for i in range(first[d], first[d + 1]):
            t = member[i]
            if t <= s:
                rest[t] -= time
            if rest[t] > 0 and end + rest[t] + tail[t] > limit:
                return REJECTED
        if kind == F and end + (m - 1 - n) * time + turn[s] + duration[s, I] + tail[s] > limit:
            return REJECTED
        order[position[d]] = 3 * s + kind
        position[d] += 1
        target, boundary = -1, s
        if kind == F:
            last_kind[d] = F
            use[s] += at_forward[s]
            memory[d] += at_forward[s]
            if s + 1 < num_stages:
                target = device[s + 1]
        elif kind == I:
            last_kind[d] = I
            use[s] += at_backward[s] - off_backward[s]
            memory[d] += at_backward[s] - off_backward[s]
            if split[s]:
                pending[d] += 1
            if s > 0:
                target, boundary = device[s - 1], s - 1
        else:
            use[s] -= off_weight[s]
            memory[d] -= off_weight[s]
            pending[d] -= 1
        if tight[d]:
            keep = 0
            if done[s, F] < m and use[s] < at_forward[s]:
                keep = at_forward[s] - use[s]
            kept_sum[d] += keep - kept[s]
            kept[s] = keep
        if n == m - 1:
            run.last_end[s] = end  # the last kind to end is the one that stays
            if kind == W or (kind == I and not split[s]):
                run.reducing[d] = max(run.reducing[d], end) + shape.reduction[s]
        reconsider[0] = d
        num_reconsidered = 1
        if target >= 0:
            arrives = end
            if target != d:
                begin = max(end, channel[d, target])
                if nic[boundary]:
                    begin = max(begin, max(sending[host[d]], receiving[host[target]]))
                    sending[host[d]] = begin + hold[boundary]
                    receiving[host[target]] = begin + hold[boundary]
                channel[d, target] = begin + hold[boundary]
                arrives = begin + hold[boundary] + latency[boundary]
                # a choice of F or I that starts before this input is there stays
                if (
                    follow_keys
                    or window[target] > 0
                    or next_token[target] & 3 == W
                    or next_start[target] >= max(arrives, free[target])
                ):
                    reconsider[1] = target
                    num_reconsidered = 2
            if kind == F:
                arrival_f[s + 1, n] = arrives
            else:
                arrival_i[s - 1, n] = arrives
    step = finish_step(world, genome, shape.optimizer, run.free, run.reducing, run.last_end)
    return step if step <= limit else REJECTED
