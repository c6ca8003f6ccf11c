"""Trace: what a step measured, from every rank, as the simulator's Timeline.

Each rank notes a clock reading at the start and end of each action, which costs well under 1 us;
the readings are put together only when asked for. Ranks on one host share a clock. Others measure
the offset of theirs against rank 0's by messages there and back, and keep the quickest exchange:
the error is at most half its round trip. On CUDA the readings are events on the compute stream.

The Timeline's rows are in the order in which the actions really ran, floating W's included. A
message "arrived" when its receiver took it, so it may have been there earlier.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from executor.transport.base import ASIDE, Buffer, Transport
from simulator.actions import CopySchedule, Kind, Schedule
from simulator.channels import Message
from simulator.costs import Costs
from simulator.memory import peak_bytes
from simulator.timeline import Timeline

_CLOCK_TAG = ASIDE | 1
_ROUNDS = 16


def clock_offset_ns(
    transport: Transport, hosts: list[str], timeout_s: float, device: torch.device
) -> int:
    """Return what to add to this rank's clock to read rank 0's. Every rank calls it."""
    if len(set(hosts)) == 1:
        return 0
    offset = 0
    for rank in range(1, transport.world_size):
        if hosts[rank] == hosts[0] or transport.rank not in (0, rank):
            continue
        peer = rank if transport.rank == 0 else 0
        best = None
        for _ in range(_ROUNDS):
            buffer = Buffer((1,), torch.int64, device)
            received = transport.receive(buffer, peer, _CLOCK_TAG)
            if transport.rank == 0:
                received.wait(timeout_s)
                int(buffer.tensor[0])  # on CUDA only reading it makes the host wait
                now = torch.tensor([time.perf_counter_ns()], device=device)
                transport.send(now, peer, _CLOCK_TAG).wait(timeout_s)
                continue
            asked = time.perf_counter_ns()
            question = torch.zeros(1, dtype=torch.int64, device=device)
            transport.send(question, peer, _CLOCK_TAG).wait(timeout_s)
            received.wait(timeout_s)
            there = int(buffer.tensor[0])
            back = time.perf_counter_ns()
            if best is None or back - asked < best:
                best = back - asked
                offset = there - (asked + back) // 2
    return offset


class Clock:
    """When each action of a step began and ended, by its position in the plan's row.

    On a CPU a reading of `perf_counter_ns`; on CUDA an event on the current stream, read when
    asked for and put on the host's clock by an event of known time.
    """

    def __init__(self, num_ops: int, device: torch.device) -> None:
        self._starts = [-1] * num_ops
        self._ends = [-1] * num_ops
        self._cuda = device.type == "cuda"
        self._events: list[tuple[Any, Any]] = []
        if self._cuda:
            self._events = [
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                for _ in range(num_ops)
            ]
            self._last: Any = None

    def start(self, position: int) -> None:
        """Note that an action begins."""
        if self._cuda:
            self._events[position][0].record()
        self._starts[position] = time.perf_counter_ns()

    def end(self, position: int) -> int:
        """Note that an action ends; return the host's time."""
        if self._cuda:
            self._last = self._events[position][1]
            self._last.record()
        now = self._ends[position] = time.perf_counter_ns()
        return now

    def synchronize(self) -> None:
        """Wait until the device has done what was queued last."""
        if self._cuda and self._last is not None:
            self._last.synchronize()

    def times_ns(self) -> tuple[list[int], list[int]]:
        """Return starts and ends."""
        if not self._cuda or not self._events:
            return self._starts, self._ends
        torch.cuda.synchronize()
        anchor = torch.cuda.Event(enable_timing=True)
        anchor.record()
        anchor.synchronize()
        now = time.perf_counter_ns()

        def at(event: Any) -> int:
            return now - int(event.elapsed_time(anchor) * 1e6)

        return [at(first) for first, _ in self._events], [at(last) for _, last in self._events]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """One rank's readings of one step, on rank 0's clock; JSON holds all of it."""

    device: int
    began_ns: int
    codes: list[int]  # in the order of the plan's row
    start_ns: list[int]
    end_ns: list[int]
    sent: list[list[int]]  # stage, kind, microbatch, time
    arrived: list[list[int]]
    reduced: list[list[int]]  # stage, start, end
    exchanged: list[list[int]]  # pair, start, end
    optimizer_ns: list[int]  # start, end; empty where it was not recorded
    copies: list[list[int]] = field(default_factory=list)  # packed copy, start, end

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RankTrace:
        """Read what `to_json` wrote."""
        return cls(**value)


def message_times(times: dict[Message, int], offset_ns: int) -> list[list[int]]:
    """Return messages' times as lists of numbers."""
    return [
        [message.stage, int(message.kind), message.microbatch, at + offset_ns]
        for message, at in times.items()
    ]


def to_timeline(traces: list[RankTrace], costs: Costs) -> Timeline:
    """Put one replica's traces, one a device, together."""
    num_stages, num_microbatches = costs.num_stages, costs.num_microbatches
    began = min(trace.began_ns for trace in traces)
    codes: list[list[int]] = []
    lanes: list[list[list[int]]] = []
    start: list[int] = []
    end: list[int] = []
    forward_sent, forward_arrived, backward_sent, backward_arrived = (
        np.full((num_stages, num_microbatches), -1, dtype=np.int64) for _ in range(4)
    )
    reduce_start, reduce_end = (np.full(num_stages, -1, dtype=np.int64) for _ in range(2))
    pairs = len(costs.exchange_ns)
    exchange_start, exchange_end = (np.full(pairs, -1, dtype=np.int64) for _ in range(2))
    optimizer_start, optimizer_end = (np.zeros(len(traces), dtype=np.int64) for _ in range(2))
    for trace in sorted(traces, key=lambda trace: trace.device):
        order = sorted(range(len(trace.codes)), key=lambda at: trace.start_ns[at])
        codes.append([trace.codes[at] for at in order])
        lanes.append([[code, at - began, to - began] for code, at, to in trace.copies])
        start += [trace.start_ns[at] - began for at in order]
        end += [trace.end_ns[at] - began for at in order]
        for forward, backward, times in (
            (forward_sent, backward_sent, trace.sent),
            (forward_arrived, backward_arrived, trace.arrived),
        ):
            for stage, kind, microbatch, at in times:
                table = forward if kind == Kind.F else backward
                table[stage, microbatch] = at - began
        last = max([began, *trace.end_ns])
        for stage, from_ns, to_ns in trace.reduced:
            reduce_start[stage], reduce_end[stage] = from_ns - began, to_ns - began
            last = max(last, to_ns)
        for pair, from_ns, to_ns in trace.exchanged:
            exchange_start[pair], exchange_end[pair] = from_ns - began, to_ns - began
            last = max(last, to_ns)
        from_ns, to_ns = trace.optimizer_ns or (last, last)
        optimizer_start[trace.device] = from_ns - began
        optimizer_end[trace.device] = to_ns - began
    schedule = Schedule.from_codes(codes)
    made = np.array([copy for lane in lanes for copy in lane], dtype=np.int64).reshape(-1, 3)
    copies = CopySchedule(
        made[:, 0],
        np.full(len(made), -1, dtype=np.int64),
        np.concatenate(([0], np.cumsum([len(lane) for lane in lanes], dtype=np.int64))),
    )
    start_ns, end_ns = np.array(start, dtype=np.int64), np.array(end, dtype=np.int64)
    copy_start_ns, copy_end_ns = made[:, 1], made[:, 2]
    return Timeline(
        schedule=schedule,
        copies=copies if len(made) else None,
        costs=costs,
        start_ns=start_ns,
        end_ns=end_ns,
        forward_sent_ns=forward_sent,
        forward_arrived_ns=forward_arrived,
        backward_sent_ns=backward_sent,
        backward_arrived_ns=backward_arrived,
        copy_start_ns=copy_start_ns,
        copy_end_ns=copy_end_ns,
        reduce_start_ns=reduce_start,
        reduce_end_ns=reduce_end,
        exchange_start_ns=exchange_start,
        exchange_end_ns=exchange_end,
        optimizer_start_ns=optimizer_start,
        optimizer_end_ns=optimizer_end,
        peak_bytes=peak_bytes(
            schedule,
            costs,
            copies if len(made) else None,
            start_ns,
            end_ns,
            copy_start_ns,
            copy_end_ns,
        ),
    )
