"""Placing W: given each rank's order of F and I (or B), find the moments for the W halves.

A W waits for nothing but its own I and nobody waits for it: it is the filler. The kernel plays the
order in time, and a device that would wait runs its oldest W instead. Three rules bend that:

- memory: an action that does not fit waits until enough Ws have run before it;
- `slack`: a W that is longer than the wait is taken only if it delays the next action by no more
  than this share of the W;
- `backlog`: as soon as this many Ws are pending, one is taken before the next action.

What the next action waits for is known once its producer has started; before that, the earliest
moment the producer could end is taken. Channels are taken as free here: only the order counts,
and the simulator says how long it takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simulator.actions import KIND_MASK, MICROBATCH_MASK, MICROBATCH_SHIFT, STAGE_SHIFT, Schedule
from simulator.costs import Costs

Int64 = NDArray[np.int64]

NEVER = np.int64(2**62)
NO_BACKLOG = 2**30

DONE, STUCK, TOO_BIG, TOO_MANY = 0, 1, 2, 3

_F, _B, _I, _W = 0, 1, 2, 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class World:
    """Costs as the kernels take them: rows of one array, so that a call is cheap.

    Memory steps are [S] bytes: what the start and the end of F, I (or B) and W add, and what they
    need at their peak beside what is held.
    """

    durations: Int64  # [4, S] by kind
    delay: Int64  # [S] from the end of F of stage s - 1 to its arrival; [0] is 0
    stage_device: Int64  # [S]
    at_start: Int64  # [4, S]
    at_end: Int64  # [4, S]
    workspace: Int64  # [S]
    room: Int64  # [D] memory beside what is always held
    most: Int64  # [D] activations in flight: F begun and W (or B) not, of all the device's stages
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.stage_device)

    @property
    def num_devices(self) -> int:
        """D."""
        return len(self.room)


def world_of(costs: Costs, *, limited: bool = True, most: int | None = None) -> World:
    """Return the costs for the kernels.

    Args:
        costs: of the stages in their placement.
        limited: keep within `memory_bytes`; otherwise memory is endless.
        most: the most activations that any device may have in flight, each of one stage and one
            microbatch; a schedule's own limit, where it is not one in bytes.
    """
    stages = costs.num_stages
    saved, saved_w, held = costs.saved_bytes, costs.saved_w_bytes, costs.held_w_bytes
    kept = np.where(costs.recompute, costs.input_bytes, saved + saved_w)
    back = np.where(costs.recompute, saved + saved_w - costs.input_bytes, 0) + held
    nothing = np.zeros(stages, np.int64)
    delay = np.zeros(stages, np.int64)
    delay[1:] = costs.transfer_hold_ns + costs.transfer_latency_ns
    room = (
        costs.memory_bytes - costs.static_bytes if limited else np.full(costs.num_devices, NEVER)
    )
    return World(
        durations=np.stack(
            [costs.forward_ns, costs.backward_ns, costs.input_grad_ns, costs.weight_grad_ns]
        ),
        delay=delay,
        stage_device=costs.stage_device,
        at_start=np.stack([kept, back, back, nothing]),
        at_end=np.stack([nothing, -(saved + saved_w + held), -saved, -(saved_w + held)]),
        workspace=costs.workspace_bytes,
        room=room.astype(np.int64),
        most=np.full(costs.num_devices, NEVER if most is None else most, np.int64),
        num_microbatches=costs.num_microbatches,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Played:
    """An order with its Ws in place, and when its last action ends.

    `state` is DONE, STUCK (no action could start), TOO_BIG (one did not fit into memory, and
    nothing was left to free) or TOO_MANY (the same for the number in flight); `device` says where,
    and `needed` how much it would have taken.
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
    """Play an order of F, I and B (and no W) and put a W for each I where the rules say.

    Complexity: O(actions × devices) with a small constant; deterministic.
    """
    offsets = np.zeros(order.num_devices + 1, np.int64)
    halves = (order.codes & KIND_MASK) == _I
    counts = np.concatenate(([0], np.cumsum(halves)))
    offsets[:] = order.offsets + counts[order.offsets]
    codes = np.empty(order.num_actions + int(counts[-1]), np.int64)
    end_ns, state, device, needed = _place(
        order.codes,
        order.offsets,
        world.durations,
        world.delay,
        world.stage_device,
        world.at_start,
        world.at_end,
        world.workspace,
        world.room,
        world.most,
        world.num_microbatches,
        slack,
        backlog,
        codes,
        offsets,
    )
    return Played(
        codes=codes,
        offsets=offsets,
        end_ns=int(end_ns),
        state=int(state),
        device=int(device),
        needed=int(needed),
    )


@njit(cache=True, nogil=True)
def _place(
    codes: Int64,
    offsets: Int64,
    durations: Int64,
    delay: Int64,
    stage_device: Int64,
    at_start: Int64,
    at_end: Int64,
    workspace: Int64,
    room: Int64,
    most: Int64,
    num_microbatches: int,
    slack: float,
    backlog: int,
    out: Int64,
    out_offsets: Int64,
) -> tuple[int, int, int, int]:
    num_devices = len(room)
    num_stages = len(stage_device)
    # when the input of F, and the gradient for I or B, is there; NEVER: its producer has not begun
    input_at = np.full((num_stages, num_microbatches), NEVER)
    grad_at = np.full((num_stages, num_microbatches), NEVER)
    input_at[0, :] = 0
    clock = np.zeros(num_devices, np.int64)  # when the device decides next; NEVER: it sleeps
    free = np.zeros(num_devices, np.int64)  # when its last action ends
    held = np.zeros(num_devices, np.int64)
    flying = np.zeros(num_devices, np.int64)
    position = offsets[:-1].copy()
    next_w = offsets[:-1].copy()  # where to look for the I whose W is the oldest
    pending = np.zeros(num_devices, np.int64)
    written = out_offsets[:-1].copy()
    left = out_offsets[-1]
    end = np.int64(0)
    while left > 0:
        device = 0
        now = clock[0]
        for other in range(1, num_devices):
            if clock[other] < now:
                device, now = other, clock[other]
        if now == NEVER:
            for other in range(num_devices):
                if position[other] < offsets[other + 1]:
                    return end, STUCK, other, 0
        at = position[device]
        if at < offsets[device + 1]:
            code = codes[at]
            stage = code >> STAGE_SHIFT
            kind = code & KIND_MASK
            microbatch = (code >> MICROBATCH_SHIFT) & MICROBATCH_MASK
            ready = input_at[stage, microbatch] if kind == _F else grad_at[stage, microbatch]
            take_w = False
            if pending[device] > 0:
                if (
                    pending[device] >= backlog
                    or held[device] + at_start[kind, stage] + workspace[stage] > room[device]
                    or (kind == _F and flying[device] >= most[device])
                ):
                    take_w = True
                elif ready > now:
                    known = ready
                    if ready == NEVER:
                        maker = stage - 1 if kind == _F else stage + 1
                        where = stage_device[maker]
                        known = now if clock[where] == NEVER else max(now, clock[where])
                        if kind == _F:
                            known += durations[_F, maker] + delay[stage]
                        else:
                            known += durations[kind, maker] + delay[maker]
                    w_stage = codes[_next_half(codes, next_w[device])] >> STAGE_SHIFT
                    length = durations[_W, w_stage]
                    take_w = now + length - known <= slack * length
            if not take_w and ready > now:
                clock[device] = ready
                continue
        elif pending[device] > 0:
            take_w = True
            code, kind, stage, microbatch = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
        else:
            clock[device] = NEVER
            continue
        if take_w:
            spot = _next_half(codes, next_w[device])
            next_w[device] = spot + 1
            pending[device] -= 1
            code = codes[spot] - _I + _W
            stage = code >> STAGE_SHIFT
            kind = np.int64(_W)
        else:
            need = held[device] + at_start[kind, stage] + workspace[stage]
            if need > room[device]:
                return end, TOO_BIG, device, need
            if kind == _F and flying[device] >= most[device]:
                return end, TOO_MANY, device, flying[device] + 1
            position[device] += 1
            if kind == _I:
                pending[device] += 1
        if kind == _F:
            flying[device] += 1
        elif kind != _I:
            flying[device] -= 1
        finish = now + durations[kind, stage]
        held[device] += at_start[kind, stage] + at_end[kind, stage]
        free[device] = finish
        clock[device] = finish
        end = max(end, finish)
        out[written[device]] = code
        written[device] += 1
        left -= 1
        if kind == _F:
            if stage + 1 < num_stages:
                there = finish + delay[stage + 1]
                input_at[stage + 1, microbatch] = there
                other = stage_device[stage + 1]
                if clock[other] == NEVER or clock[other] > there:
                    clock[other] = max(free[other], now)
            else:
                grad_at[stage, microbatch] = finish
        elif kind != _W and stage > 0:
            there = finish + delay[stage]
            grad_at[stage - 1, microbatch] = there
            other = stage_device[stage - 1]
            if clock[other] == NEVER or clock[other] > there:
                clock[other] = max(free[other], now)
    return end, DONE, 0, 0


@njit(cache=True, nogil=True)
def _next_half(codes: Int64, spot: int) -> int:
    while codes[spot] & KIND_MASK != _I:
        spot += 1
    return spot
