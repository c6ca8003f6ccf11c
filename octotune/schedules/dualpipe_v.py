"""DualPipeV: a V of two stages a device, with F and B of different microbatches side by side.

Eight phases a device: forwards down the V; down and up in turn; zero-bubble backwards of the upper
stage; the long middle, where each forward of one stage stands beside a whole backward of the
other, so that on the authors' hardware one's communication hides behind the other's compute; and
the same backwards to the end, with W split off where it fills. The order does not depend on costs.
"""

from __future__ import annotations

from octotune.placement import v_shape
from octotune.schedules.family import (
    Family,
    Row,
    action,
    device_of_rank,
    on_devices,
    require_positive,
)
from simulator.actions import Kind, Schedule
from simulator.costs import Costs


def dualpipe_v(num_devices: int, num_microbatches: int) -> Schedule:
    """Return DualPipeV's order on the V placement.

    Args:
        num_devices: p; device d holds stages d and 2p - 1 - d.
        num_microbatches: m. The pattern needs 2p; with fewer, the surplus is struck.

    Returns:
        p rows; of each stage's microbatches some have a B, the others I and W. No device has
        more than 2p + 1 activations in flight.

    Raises:
        ScheduleError: if an argument is below 1.

    Source:
        DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1, cut in half to a V by Qi et al. 2025
        (sail-sg), as in deepseek-ai/DualPipe.
    """
    require_positive(num_devices=num_devices, num_microbatches=num_microbatches)
    full = max(num_microbatches, 2 * num_devices)
    return Schedule.from_codes(
        [_row(rank, num_devices, full, num_microbatches) for rank in range(num_devices)]
    )


class _Writer:
    """A row being written: each stage counts its forwards and backwards, Ws queue."""

    def __init__(self, num_microbatches: int) -> None:
        self.row: Row = []
        self.num_microbatches = num_microbatches
        self.forwards: dict[int, int] = {}
        self.backwards: dict[int, int] = {}
        self.open: list[int] = []

    def _write(self, stage: int, kind: Kind, microbatch: int) -> None:
        if microbatch < self.num_microbatches:
            self.row.append(action(stage, kind, microbatch))

    def forward(self, stage: int) -> None:
        microbatch = self.forwards.get(stage, 0)
        self.forwards[stage] = microbatch + 1
        self._write(stage, Kind.F, microbatch)

    def backward(self, stage: int, *, split: bool = False) -> None:
        microbatch = self.backwards.get(stage, 0)
        self.backwards[stage] = microbatch + 1
        self._write(stage, Kind.I if split else Kind.B, microbatch)
        if split and microbatch < self.num_microbatches:
            self.open.append(action(stage, Kind.W, microbatch))

    def weight(self) -> None:
        if self.open:
            self.row.append(self.open.pop(0))


def _row(rank: int, p: int, full: int, num_microbatches: int) -> Row:
    down, up = rank, 2 * p - 1 - rank
    below = p - 1 - rank  # ranks between this one and the turn
    writer = _Writer(num_microbatches)
    for _ in range(2 * below):
        writer.forward(down)
    for _ in range(rank + 1):
        writer.forward(down)
        writer.forward(up)
    for _ in range(below):
        writer.backward(up, split=True)
        writer.weight()
        writer.forward(up)
    for _ in range(full - 2 * p + rank + 1):
        writer.forward(down)
        writer.backward(up)
        writer.forward(up)
        writer.backward(down)
    for _ in range(below):
        writer.backward(up)
        writer.forward(up)
        writer.backward(down)
    # the second half of the last backwards is split: one backward later on even ranks
    split = False
    for turn in range(rank + 1):
        at_half = turn == (rank + 1) // 2
        split = split or (at_half and rank % 2 == 1)
        writer.backward(up, split=split)
        split = split or at_half
        writer.backward(down, split=split)
    for _ in range(below):
        writer.weight()
        writer.backward(down, split=split)
    while writer.open:
        writer.weight()
    return writer.row


def _refuses(num_devices: int, num_microbatches: int) -> str | None:
    if num_microbatches < 2 * num_devices:
        return f"m = {num_microbatches} is below 2 p = {2 * num_devices}"
    return None


def _generate(costs: Costs) -> Schedule:
    devices = device_of_rank(costs, v_shape)
    schedule = dualpipe_v(len(devices), costs.num_microbatches)
    return on_devices(schedule, devices, costs.num_devices)


DUALPIPE_V = Family(
    name="dualpipe-v",
    source="DeepSeek-AI 2024, arXiv:2412.19437",
    placement=v_shape,
    generate=_generate,
    original_refuses=_refuses,
    claimed_peak=lambda p, m: min(m, p + 0.5),
)
