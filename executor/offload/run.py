"""Offload: what a rank's plan says about copies, asked at each action.

    before F         wait for copies out where memory is needed that the plan has free by then
    F                runs under saved-tensor hooks where its microbatch leaves (`saved`)
    after F          the parcel goes to the lane (`lanes`), which copies it out, and later back
    before I or B    wait for the way back; what has not left yet stays, and need not come back

A reload is back on the device from its start, so it must not start before the plan has it start:
its gate is the last action before it in the plan's simulated step. Behind time, a lane runs its
copies as fast as it can within the plan's memory (`room`), and the report says which came late.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.offload.host_book import HostBook
from executor.offload.host_pool import HostPool
from executor.offload.lanes import Copied, Key, Lane, Road
from executor.offload.planned import entries_of, host_peak_bytes, row_of, saved_peak_bytes
from executor.offload.room import Room
from executor.offload.saved import Parcel, fixed_storages
from executor.offload.saved_watch import SavedWatch
from executor.offload.thread_lane import ThreadLane
from executor.program import Op
from executor.stages import StageModule
from octotune.contract import Plan
from octotune.offload.measured import (
    KeptActivation,
    LateCopy,
    MeasuredOffload,
    MeasuredStage,
)
from simulator.actions import (
    KIND_MASK,
    STAGE_SHIFT,
    CopyKind,
    Kind,
)
from simulator.memory import byte_changes
from simulator.timeline import Timeline

Int64 = NDArray[np.int64]


# A reload that ends so much after all else is there is late; below it, clocks and threads.
LATE_NS = 500_000


class Offload:
    """One rank's offload, step after step.

    Args:
        predicted: the plan's simulated step.
        device_index: this rank's device of the plan.
        ops: its row.
        stages: its stages, whose parameters and buffers stay.
        floats: whether W's leave the plan's order; they raise no gates then.
        limit_bytes: what the device may hold: actions and reloads wait where they would pass it.
        watch: counts the saved bytes that are really held, where somebody asked for that.
        book: what the ranks of its host share.
        device: where its tensors live.
        timeout_s: how long any one wait may take.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        predicted: Timeline,
        device_index: int,
        ops: Sequence[Op],
        stages: dict[int, StageModule],
        floats: bool,
        limit_bytes: int,
        watch: SavedWatch | None,
        book: HostBook,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        costs = predicted.costs
        self._costs = costs
        self._ops = tuple(ops)
        self._device_index = device_index
        self._stages = stages
        self._device = device
        self._floats = floats
        rise, fall = byte_changes(costs)
        self._rise, self._fall = rise.tolist(), fall.tolist()
        entries, gates, self._due = entries_of(predicted, device_index, floats)
        self._leaves = {entry.key for entry in entries}
        starts = predicted.start_ns[row_of(predicted, device_index)]
        self._planned_start = {op.position: int(starts[op.position]) for op in ops}
        road = Road(
            # without one there are no copies
            bandwidth=max(1, plan.cluster.devices[device_index].offload_bandwidth),
            link=int(costs.host_link[device_index]),
            host=int(costs.device_host[device_index]),
            book=book,
            pool=HostPool(
                pinned=device.type == "cuda",
                expected_bytes=host_peak_bytes(predicted, device_index),
            ),
        )
        self.lane: Lane = _lane_for(device)(entries, road, timeout_s)
        self.room = Room(
            self.lane,
            [int(costs.offload_bytes[stage]) for stage, _ in (entry.key for entry in entries)],
            gates,
            limit_bytes - int(costs.static_bytes[device_index]),
            floats,
        )
        self.watch = watch
        if watch is not None:
            self.lane.note = watch.note
        self._holds: dict[Key, Callable[[], None]] = {}
        self._fixed: frozenset[int] | None = None
        self.late_ns: dict[Key, int] = {}
        self.room_ns = 0  # how long the step waited for copies out to free memory
        self.offered_bytes: dict[int, int] = {}  # by stage, of its last microbatch
        self.moved_bytes: dict[int, int] = {}
        self._steps = 0
        self._late: dict[Key, tuple[int, int]] = {}
        self._kept: dict[Key, tuple[int, str]] = {}
        self._saved_peak = 0
        self._planned_saved_peak = saved_peak_bytes(predicted, device_index)
        self._parcel: Parcel | None = None
        self._pending: deque[tuple[int, Key]] = deque()

    # --- around the actions of a step -----------------------------------------------------

    def begin(self) -> None:
        """Begin a step."""
        if self._fixed is None:
            self._fixed = fixed_storages(self._stages.values())
        if self.watch is not None:
            self.watch.restart()
            self._holds.clear()
        self._pending = deque(self._due)
        self.late_ns = {}
        self.room_ns = 0
        self._parcel = None
        self.lane.begin()
        self.room.begin()

    def before(self, op: Op) -> None:
        """Wait for what the action needs of the lane; its messages are there."""
        kind, position, room = op.kind, op.position, self.room
        rise, fall = self._rise[op.stage * 4 + kind], self._fall[op.stage * 4 + kind]
        if kind == Kind.W and self._floats:  # out of the plan's order
            room.start(rise, fall)
            return
        room.reach(2 * position - 1)
        key = (op.stage, op.microbatch)
        if kind in (Kind.I, Kind.B) and key in self._leaves:
            room.let(key)
            waited = self.lane.wait_back(key)
            if waited:
                self.late_ns[key] = waited
        pending, by = self._pending, self._planned_start[position]
        while pending and pending[0][0] <= by and not room.fits(rise, 2 * position - 1):
            began = time.perf_counter_ns()
            room.wait_out(pending.popleft()[1])
            self.room_ns += time.perf_counter_ns() - began
        room.start(rise, fall)
        room.reach(2 * position)

    @property
    def copies_any(self) -> bool:
        """Whether the plan has copies on this device."""
        return bool(self._leaves)

    def fits(self, op: Op) -> bool:
        """Whether there is room for an action and the reloads that the plan starts by then."""
        gate = 2 * op.position
        return self.room.fits(self._rise[op.stage * 4 + op.kind], gate) and self.room.lets(gate)

    def listening(self, op: Op, lasting: Tensor | None) -> AbstractContextManager[Any] | None:
        """Return the context to run an F in whose microbatch leaves, or whose bytes are watched.

        None where neither is so. `lasting` is the stage's input where that lies in memory that
        outlives the microbatch.
        """
        key, watch = (op.stage, op.microbatch), self.watch
        leaves = key in self._leaves and op.kind == Kind.F
        if watch is None and not leaves:
            return None
        assert self._fixed is not None
        note = None if watch is None else watch.note
        if watch is not None and lasting is not None:
            note = partial(self._note, watch, key, lasting.untyped_storage().data_ptr())
        parcel = Parcel(self._fixed, self._device, note)
        self._parcel = parcel if leaves else None
        return parcel.listening()

    def _note(
        self, watch: SavedWatch, key: Key, lasting: int, storage: torch.UntypedStorage
    ) -> None:
        if storage.data_ptr() == lasting:
            self._hold(watch, key, storage.nbytes())
        else:
            watch.note(storage)

    def _hold(self, watch: SavedWatch, key: Key, num_bytes: int) -> None:
        if key not in self._holds:
            self._holds[key] = watch.hold(num_bytes)

    def holds_input(self, op: Op, x: Tensor) -> None:
        """Count the input that a stage which recomputes keeps."""
        if self.watch is not None:
            self._hold(self.watch, (op.stage, op.microbatch), x.nbytes)

    def released(self, op: Op) -> None:
        """The buffers of a stage's microbatch are free again."""
        end = self._holds.pop((op.stage, op.microbatch), None)
        if end is not None:
            end()

    def close(self, op: Op, handed: Iterable[Tensor]) -> None:
        """Choose what leaves of the F that ran; `handed` is what others hold."""
        if self._parcel is None:
            return
        budget = int(self._costs.offload_bytes[op.stage])
        self.moved_bytes[op.stage] = self._parcel.close(handed, budget)
        self.offered_bytes[op.stage] = self._parcel.offered_bytes

    def after(self, op: Op) -> None:
        """Tell the lane that an action ended."""
        self.room.end()
        if self._parcel is not None:
            self.lane.put((op.stage, op.microbatch), self._parcel)
            self._parcel = None
        if op.kind == Kind.W and self._floats:
            self.room.reach()
        else:
            self.room.reach(2 * op.position + 1)

    def finish(self) -> None:
        """End a step."""
        lane = self.lane
        lane.finish()
        self._steps += 1
        for key, waited in self.late_ns.items():
            if waited >= LATE_NS:
                steps, most = self._late.get(key, (0, 0))
                self._late[key] = (steps + 1, max(most, waited))
        for key, why in lane.kept.items():
            self._kept[key] = (self._kept.get(key, (0, ""))[0] + 1, why)
        if self.watch is not None:
            self._saved_peak = max(self._saved_peak, self.watch.peak_bytes)

    def abort(self) -> None:
        """The step failed: stop copying."""
        self._parcel = None
        self.lane.abort()

    def copies(self) -> list[Copied]:
        """Return the last step's copies."""
        return self.lane.copies()

    def measured(self, start_ns: Sequence[int], end_ns: Sequence[int]) -> MeasuredOffload:
        """Return what the copies did; starts and ends are the last step's, by position."""
        costs, lane = self._costs, self.lane
        work, trip = dict.fromkeys(self._stages, 0), dict.fromkeys(self._stages, 0)
        for op, start, end in zip(self._ops, start_ns, end_ns, strict=True):
            work[op.stage] += end - start
        copied, planned = dict.fromkeys(self._stages, 0), dict.fromkeys(self._stages, 0)
        for copy in self.copies():
            stage = int(copy.code) >> STAGE_SHIFT
            trip[stage] += copy.end_ns - copy.start_ns
            copied[stage] += int(copy.code) & KIND_MASK == CopyKind.O
        for stage, _ in self._leaves:
            planned[stage] += 1
        stages: list[MeasuredStage] = []
        for stage in sorted(self._stages):
            if not planned[stage]:
                continue
            each = costs.forward_ns + costs.input_grad_ns + costs.weight_grad_ns
            whole = work[stage] / costs.num_microbatches * copied[stage]
            stages.append(
                MeasuredStage(
                    stage=stage,
                    copied=copied[stage],
                    planned=planned[stage],
                    bytes=self.moved_bytes.get(stage, 0),
                    planned_bytes=int(costs.offload_bytes[stage]),
                    offered_bytes=self.offered_bytes.get(stage, 0),
                    k=trip[stage] / whole if whole else None,
                    planned_k=2 * int(costs.copy_ns[stage]) / int(each[stage]),
                )
            )
        step = max(1, max(end_ns, default=1) - min(start_ns, default=0))
        return MeasuredOffload(
            device=self._device_index,
            saved_peak_bytes=self._saved_peak,
            planned_saved_peak_bytes=self._planned_saved_peak,
            waited_for_room_ns=self.room_ns,
            moved_bytes=sum(copy.num_bytes for copy in self.copies()),
            lane_busy=sum(copy.end_ns - copy.start_ns for copy in self.copies()) / step,
            host_peak_bytes=lane.road.pool.peak_bytes,
            host_reserved_bytes=lane.road.pool.reserved_bytes,
            stages=stages,
            late=[
                LateCopy(copy=f"{stage}R{microbatch}", steps=steps, most_ns=most)
                for (stage, microbatch), (steps, most) in sorted(self._late.items())
            ],
            kept=[
                KeptActivation(copy=f"{stage}O{microbatch}", steps=steps, why=why)
                for (stage, microbatch), (steps, why) in sorted(self._kept.items())
            ],
        )


def _lane_for(device: torch.device) -> type[Lane]:
    if device.type == "cuda":
        from executor.offload.cuda_lane import CudaLane

        return CudaLane
    return ThreadLane
