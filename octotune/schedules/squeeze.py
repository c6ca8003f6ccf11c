"""Squeezing: the repeated block of a rhythm, with its holes at both ends filled.

A rhythm repeated m times leaves each device idle before its first actions meet and after its last
ones part. On a grid of slots, with F, I and W one slot and B two, every action is taken in the
order of the rhythm and moved to the earliest hole after what it waits for. Backwards and Ws free
memory and may move at will; a forward moves only as long as its device holds less than the
rhythm's own peak. So the peak stays, and the order gets shorter.

Source:
    Qi et al. 2024, "Pipeline parallelism with controllable memory", arXiv:2405.15362, section 3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octotune.schedules.rhythm import UNIT, Rhythm, phases_of
from octotune.schedules.world import World
from simulator.actions import MICROBATCH_SHIFT, STAGE_SHIFT, Kind, Schedule
from simulator.compiled import kernel

Int64 = NDArray[np.int64]

_F, _B, _I, _W = int(Kind.F), int(Kind.B), int(Kind.I), int(Kind.W)


class Block(NamedTuple):
    """The slots of one microbatch's actions, repeated every period.

    No two actions of a device fall on one slot modulo the period. Without `weight`, B is whole
    and takes two slots from `backward` on.
    """

    forward: Int64  # [S]
    backward: Int64  # [S]
    weight: Int64 | None  # [S]
    period: int


def block_of(rhythm: Rhythm, world: World, *, split: bool) -> Block:
    """Return the block of a rhythm of whole numbers, each W in the first free slot after its I."""
    spaced = replace(rhythm, spaced=True, on_costs=False)
    phases = phases_of(spaced, world, split=split)
    period = phases.period // UNIT
    forward, backward = phases.forward // UNIT, phases.backward // UNIT
    weight = _weight_slots(forward, backward, world.stage_device, period) if split else None
    return Block(forward, backward, weight, period)


def squeezed(block: Block, world: World) -> Schedule:
    """Return the order of a block, repeated and squeezed.

    Complexity: O(actions) but for the slots that forwards are moved by.
    """
    m, num_stages = world.num_microbatches, world.num_stages
    parts, kinds = [block.forward, block.backward], [_F, _B]
    if block.weight is not None:
        parts, kinds = [*parts, block.weight], [_F, _I, _W]
    offsets = np.concatenate(([0], np.cumsum(np.diff(world.first) * (len(kinds) * m))))
    codes = np.empty(offsets[-1], np.int64)
    microbatches = np.arange(m)
    slots = (np.concatenate(parts)[:, None] + block.period * microbatches[None, :]).ravel()
    order = np.argsort(slots, kind="stable")
    collided = _squeeze(
        slots[order],
        np.tile(np.repeat(np.arange(num_stages), m), len(kinds))[order],
        np.repeat(kinds, num_stages * m)[order],
        np.tile(microbatches, len(kinds) * num_stages)[order],
        world,
        codes,
        offsets,
    )
    assert not collided, "a block gives each device one action a slot"
    return Schedule(codes, offsets)


@kernel
def _weight_slots(forward: Int64, backward: Int64, stage_device: Int64, period: int) -> Int64:
    """Give each stage's W the first slot after its I that is free in every period."""
    num_stages = len(stage_device)
    taken = np.zeros((stage_device.max() + 1, period), np.bool_)
    for stage in range(num_stages):
        taken[stage_device[stage], forward[stage] % period] = True
        taken[stage_device[stage], backward[stage] % period] = True
    slots = np.empty(num_stages, np.int64)
    for stage in range(num_stages - 1, -1, -1):
        device = stage_device[stage]
        slot = backward[stage] + 1
        while taken[device, slot % period]:
            slot += 1
        taken[device, slot % period] = True
        slots[stage] = slot
    return slots


@kernel
def _squeeze(
    slots: Int64,
    stages: Int64,
    kinds: Int64,
    microbatches: Int64,
    world: World,
    codes: Int64,
    offsets: Int64,
) -> bool:
    num_devices, num_stages = len(world.room), len(world.stage_device)
    horizon = slots[-1] + 3
    taken = np.full((num_devices, horizon), -1)  # which action holds a slot
    holds = np.zeros((num_devices, horizon + 1), np.int64)  # activations in flight, per slot
    for index in range(len(slots)):
        device, slot, kind = world.stage_device[stages[index]], slots[index], kinds[index]
        if taken[device, slot] >= 0 or (kind == _B and taken[device, slot + 1] >= 0):
            return True
        taken[device, slot] = index
        if kind == _F:
            holds[device, slot] += 1
        elif kind == _B:
            taken[device, slot + 1] = index
            holds[device, slot + 2] -= 1
        elif kind == _W:
            holds[device, slot + 1] -= 1
    peak = 0
    for device in range(num_devices):
        for slot in range(1, horizon + 1):
            holds[device, slot] += holds[device, slot - 1]
            peak = max(peak, holds[device, slot])
    end = np.zeros((4, num_stages, world.num_microbatches), np.int64)
    for index in range(len(slots)):
        stage, kind, microbatch = stages[index], kinds[index], microbatches[index]
        slot = slots[index]
        device = world.stage_device[stage]
        length = 2 if kind == _B else 1
        place = 0
        if kind == _F:
            if stage > 0:
                place = end[_F, stage - 1, microbatch]
        elif kind == _W:
            place = end[_I, stage, microbatch]
        elif stage + 1 == num_stages:
            place = end[_F, stage, microbatch]
        else:
            place = max(end[_F, stage, microbatch], end[kind, stage + 1, microbatch])
        if kind == _F:
            lowest = slot
            while lowest > place and holds[device, lowest - 1] < peak:
                lowest -= 1
            place = lowest
        while place < slot and not (
            taken[device, place] < 0 and (length == 1 or taken[device, place + 1] < 0)
        ):
            place += 1
        place = min(place, slot)
        for part in range(length):
            taken[device, slot + part] = -1
        for part in range(length):
            taken[device, place + part] = index
        if kind == _F:
            holds[device, place:slot] += 1
        elif kind != _I:
            holds[device, place + length : slot + length] -= 1
        end[kind, stage, microbatch] = place + length
    for device in range(num_devices):
        written = offsets[device]
        before = -1
        for slot in range(horizon):
            index = taken[device, slot]
            if index >= 0 and index != before:
                codes[written] = (
                    (stages[index] << STAGE_SHIFT)
                    | (microbatches[index] << MICROBATCH_SHIFT)
                    | kinds[index]
                )
                written += 1
                before = index
    return False
