"""World: costs as the kernels of this package take them, with a schedule's own limit beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.actions import Kind
from simulator.costs import Costs

Int64 = NDArray[np.int64]

NEVER = 2**62
FOREVER = np.int64(NEVER)  # the same, for arrays


class World(NamedTuple):
    """Durations, delays and memory of one plan's stages. S stages, D devices.

    The arrays by kind are in the order of `simulator.actions.Kind`: F, B, I, W.
    """

    num_microbatches: int
    duration: Int64  # [4, S] ns
    delay: Int64  # [S] ns over the boundary before stage s, where its channel is free; [0] is 0
    hold: Int64  # [S] the part of it that the channel is taken for
    down: Int64  # [S] the channel that F of stage s sends into
    up: Int64  # [S] the channel that I or B of stage s sends into
    stage_device: Int64  # [S]
    first: Int64  # [D + 1] where each device's stages begin in `local`
    local: Int64  # [S] the stages by device, rising
    rise: Int64  # [4, S] bytes that an action adds at its start, without workspace
    change: Int64  # [4, S] bytes that are held more (or less) after its end than before its start
    workspace: Int64  # [S]
    room: Int64  # [D] bytes beside what is always held
    most: (
        Int64  # [D] activations in flight: stages' microbatches with F begun and W or B not ended
    )

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.stage_device)

    @property
    def num_devices(self) -> int:
        """D."""
        return len(self.room)


def world_of(costs: Costs, devices: Sequence[int], *, most: int | None = None) -> World:
    """Return the costs for the kernels, with ranks in the place of devices.

    Args:
        costs: of the stages in their placement; `memory_bytes` is kept.
        devices: the device that plays each rank; they hold all stages.
        most: the most activations any device may have in flight, each of one stage and one
            microbatch: a schedule's own limit, where it is not one in bytes.
    """
    saved, saved_w, held = costs.saved_bytes, costs.saved_w_bytes, costs.held_w_bytes
    nothing = np.zeros(costs.num_stages, np.int64)
    kept = np.where(costs.recompute, costs.input_bytes, saved + saved_w)
    again = np.where(costs.recompute, saved + saved_w - costs.input_bytes, 0) + held
    hold, delay, down, up = (nothing.copy() for _ in range(4))
    hold[1:] = costs.transfer_hold_ns
    delay[1:] = costs.transfer_hold_ns + costs.transfer_latency_ns
    channels: dict[tuple[int, int], int] = {}
    homes = costs.stage_device.tolist()
    for stage in range(costs.num_stages):
        for sends, target in ((down, stage + 1), (up, stage - 1)):
            if 0 <= target < costs.num_stages:
                channel = homes[stage], homes[target]
                sends[stage] = channels.setdefault(channel, len(channels))
    chosen = np.array(devices, np.int64)
    rank_of = np.zeros(costs.num_devices, np.int64)
    rank_of[chosen] = np.arange(len(chosen))
    stage_device = rank_of[costs.stage_device]
    counts = np.bincount(stage_device, minlength=len(chosen))
    duration = np.empty((len(Kind), costs.num_stages), np.int64)
    duration[Kind.F] = costs.forward_ns
    duration[Kind.B] = costs.backward_ns
    duration[Kind.I] = costs.input_grad_ns
    duration[Kind.W] = costs.weight_grad_ns
    return World(
        num_microbatches=costs.num_microbatches,
        duration=duration,
        delay=delay,
        hold=hold,
        down=down,
        up=up,
        stage_device=stage_device,
        first=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        local=np.argsort(stage_device, kind="stable").astype(np.int64),
        rise=np.stack([kept, again, again, nothing]),
        change=np.stack([kept, -kept, again - saved, -(saved_w + held)]),
        workspace=np.array(costs.workspace_bytes, dtype=np.int64),
        room=(costs.memory_bytes - costs.static_bytes)[chosen],
        most=np.full(len(chosen), NEVER if most is None else most, np.int64),
    )
