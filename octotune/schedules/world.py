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
    delay: Int64  # [S] ns from the end of an action of stage s - 1 to its arrival; [0] is 0
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


def world_of(costs: Costs, *, most: int | None = None) -> World:
    """Return the costs for the kernels.

    Args:
        costs: of the stages in their placement; `memory_bytes` is kept.
        most: the most activations any device may have in flight, each of one stage and one
            microbatch: a schedule's own limit, where it is not one in bytes.
    """
    saved, saved_w, held = costs.saved_bytes, costs.saved_w_bytes, costs.held_w_bytes
    nothing = np.zeros(costs.num_stages, np.int64)
    kept = np.where(costs.recompute, costs.input_bytes, saved + saved_w)
    again = np.where(costs.recompute, saved + saved_w - costs.input_bytes, 0) + held
    delay = nothing.copy()
    delay[1:] = costs.transfer_hold_ns + costs.transfer_latency_ns
    counts = np.bincount(costs.stage_device, minlength=costs.num_devices)
    duration = np.empty((len(Kind), costs.num_stages), np.int64)
    duration[Kind.F] = costs.forward_ns
    duration[Kind.B] = costs.backward_ns
    duration[Kind.I] = costs.input_grad_ns
    duration[Kind.W] = costs.weight_grad_ns
    return World(
        num_microbatches=costs.num_microbatches,
        duration=duration,
        delay=delay,
        stage_device=np.ascontiguousarray(costs.stage_device, dtype=np.int64),
        first=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        local=np.argsort(costs.stage_device, kind="stable").astype(np.int64),
        rise=np.stack([kept, again, again, nothing]),
        change=np.stack([kept, -kept, again - saved, -(saved_w + held)]),
        workspace=np.array(costs.workspace_bytes, dtype=np.int64),
        room=(costs.memory_bytes - costs.static_bytes).astype(np.int64),
        most=np.full(costs.num_devices, NEVER if most is None else most, np.int64),
    )


def unit_world(placement: Sequence[int], num_microbatches: int) -> World:
    """Return stages of one unit an action (B: two) on a placement, without delays or limits."""
    num_stages, num_devices = len(placement), max(placement) + 1
    duration = np.ones((len(Kind), num_stages), np.int64)
    duration[Kind.B] = 2
    nothing = np.zeros((len(Kind), num_stages), np.int64)
    stage_device = np.array(placement, np.int64)
    counts = np.bincount(stage_device, minlength=num_devices)
    return World(
        num_microbatches=num_microbatches,
        duration=duration,
        delay=nothing[0],
        stage_device=stage_device,
        first=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        local=np.argsort(stage_device, kind="stable").astype(np.int64),
        rise=nothing,
        change=nothing,
        workspace=nothing[0],
        room=np.full(num_devices, NEVER, np.int64),
        most=np.full(num_devices, NEVER, np.int64),
    )
