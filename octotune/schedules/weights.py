"""Placing W: given each rank's order of F and I (or B), find the moments for the W halves.

A W waits for nothing but its own I and nobody waits for it: it is the filler. The kernel plays the
order in time, and a device that would wait runs its oldest W instead. Three rules bend that:

- memory: where an action does not fit, or too many are in flight, Ws run before it;
- `slack`: a W that is longer than the wait is taken only if it delays the next action by no more
  than this share of the W;
- `backlog`: as soon as this many Ws are pending, one is taken before the next action.

What the next action waits for is known once its producer has started; before that, the earliest
moment the producer could end is taken. Channels are those of the contract, but for a shared NIC:
only the order counts in the end, and the simulator says how long it takes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octotune.schedules.world import FOREVER, NEVER, World
from simulator.actions import (
    KIND_MASK,
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    STAGE_SHIFT,
    Kind,
    Schedule,
)
from simulator.compiled import kernel

Int64 = NDArray[np.int64]

NO_BACKLOG = 2**30

# how playing an order ended
DONE = 0
STUCK = 1  # no action could start
TOO_BIG = 2  # one did not fit into memory, and nothing was left to free
TOO_MANY = 3  # the same for the number in flight
LATE = 4  # it would end after the limit

_F, _I, _W = int(Kind.F), int(Kind.I), int(Kind.W)


class Played(NamedTuple):
    """An order with its Ws in place, and when its last action ends.

    Where `state` is not DONE, `device` says where it broke, and `needed` how many bytes beside
    what is always held (or how many in flight) it would have taken there.
    """

    codes: Int64
    offsets: Int64
    end_ns: int
    state: int
    device: int
    needed: int

    def schedule(self) -> Schedule:
        """Return the order."""
        return Schedule(self.codes, self.offsets)


def place_weights(
    order: Schedule, world: World, *, slack: float = 1.0, backlog: int = NO_BACKLOG
) -> Played:
    """Play an order of F, I and B, and W where it has some; put the other Ws where the rules say.

    A W that stands in the order stays there; an I whose W does not gets one.

    Complexity: O(actions × devices) with a small constant; deterministic.
    """
    kinds = order.codes & KIND_MASK
    placed = np.isin(order.codes - _I + _W, order.codes[kinds == _W]) if _W in kinds else False
    open_half = (kinds == _I) & ~np.asarray(placed)
    counts = np.concatenate(([0], np.cumsum(open_half)))
    offsets = order.offsets + counts[order.offsets]
    codes = np.empty(offsets[-1], np.int64)
    end_ns, state, device, needed = _place(
        order.codes, order.offsets, open_half, world, slack, backlog, codes, offsets
    )
    return Played(codes, offsets, int(end_ns), int(state), int(device), int(needed))


def without_weights(order: Schedule) -> Schedule:
    """Return the order without its Ws."""
    kept = (order.codes & KIND_MASK) != Kind.W
    counts = np.concatenate(([0], np.cumsum(kept)))
    return Schedule(order.codes[kept], counts[order.offsets])


@kernel
def _place(
    codes: Int64,
    offsets: Int64,
    open_half: NDArray[np.bool_],
    world: World,
    slack: float,
    backlog: int,
    out: Int64,
    out_offsets: Int64,
) -> tuple[int, int, int, int]:
    stage_device, delay, room, most = world.stage_device, world.delay, world.room, world.most
    num_devices = len(room)
    num_stages = len(stage_device)
    # when the input of F, and the gradient for I or B, is there; NEVER: its producer has not begun
    input_at = np.full((num_stages, world.num_microbatches), FOREVER)
    grad_at = np.full((num_stages, world.num_microbatches), FOREVER)
    input_at[0, :] = 0
    # a device ends its actions one after the other, and so its channels are first in, first out
    channel_free = np.zeros(2 * num_stages, np.int64)
    clock = np.zeros(num_devices, np.int64)  # when the device decides next; NEVER: it sleeps
    free = np.zeros(num_devices, np.int64)  # when its last action ends
    held = np.zeros(num_devices, np.int64)
    flying = np.zeros(num_devices, np.int64)
    position = offsets[:-1].copy()
    oldest = offsets[:-1].copy()  # where to look for the I whose W is the oldest
    pending = np.zeros(num_devices, np.int64)
    written = out_offsets[:-1].copy()
    left = out_offsets[-1]
    end = 0
    while left > 0:
        device = 0
        now = clock[0]
        for other in range(1, num_devices):
            if clock[other] < now:
                device, now = other, clock[other]
        if now == NEVER:
            for other in range(num_devices):
                if position[other] < offsets[other + 1]:
                    device = other
            return end, STUCK, device, 0
        at = position[device]
        take_w = False
        code, stage, kind, microbatch = 0, 0, 0, 0
        if at < offsets[device + 1]:
            code = codes[at]
            stage = code >> STAGE_SHIFT
            kind = code & KIND_MASK
            microbatch = (code >> MICROBATCH_SHIFT) & MICROBATCH_MASK
            ready = now
            if kind == _F:
                ready = input_at[stage, microbatch]
            elif kind != _W:
                ready = grad_at[stage, microbatch]
            need = held[device] + world.rise[kind, stage] + world.workspace[stage]
            if pending[device] > 0:
                if (
                    pending[device] >= backlog
                    or need > room[device]
                    or (kind == _F and flying[device] >= most[device])
                ):
                    take_w = True
                elif ready > now:
                    known = ready
                    if ready == NEVER:
                        maker = stage - 1 if kind == _F else stage + 1
                        where = stage_device[maker]
                        known = now if clock[where] == NEVER else max(now, clock[where])
                        known += world.duration[kind, maker] + delay[max(stage, maker)]
                    spot = _next_open(open_half, oldest[device])
                    length = world.duration[_W, codes[spot] >> STAGE_SHIFT]
                    take_w = now + length - known <= slack * length
            if not take_w and ready > now:
                clock[device] = ready
                continue
            if not take_w and need > room[device]:
                return end, TOO_BIG, device, need
            if not take_w and kind == _F and flying[device] >= most[device]:
                return end, TOO_MANY, device, flying[device] + 1
        elif pending[device] > 0:
            take_w = True
        else:
            clock[device] = NEVER
            continue
        if take_w:
            spot = _next_open(open_half, oldest[device])
            oldest[device] = spot + 1
            pending[device] -= 1
            code = codes[spot] - _I + _W
            stage = code >> STAGE_SHIFT
            kind = _W
        else:
            if open_half[at]:
                pending[device] += 1
            position[device] += 1
        if kind == _F:
            flying[device] += 1
        elif kind != _I:
            flying[device] -= 1
        finish = now + world.duration[kind, stage]
        held[device] += world.change[kind, stage]
        free[device] = finish
        clock[device] = finish
        end = max(end, finish)
        out[written[device]] = code
        written[device] += 1
        left -= 1
        if kind == _F and stage + 1 < num_stages:
            sent = max(finish, channel_free[world.down[stage]]) + world.hold[stage + 1]
            channel_free[world.down[stage]] = sent
            there = sent + delay[stage + 1] - world.hold[stage + 1]
            input_at[stage + 1, microbatch] = there
            other = stage_device[stage + 1]
            if clock[other] > there:
                clock[other] = max(free[other], now)
        elif kind == _F:
            grad_at[stage, microbatch] = finish
        elif kind != _W and stage > 0:
            sent = max(finish, channel_free[world.up[stage]]) + world.hold[stage]
            channel_free[world.up[stage]] = sent
            there = sent + delay[stage] - world.hold[stage]
            grad_at[stage - 1, microbatch] = there
            other = stage_device[stage - 1]
            if clock[other] > there:
                clock[other] = max(free[other], now)
    return end, DONE, 0, 0


@kernel
def _next_open(open_half: NDArray[np.bool_], spot: int) -> int:
    while not open_half[spot]:
        spot += 1
    return spot
