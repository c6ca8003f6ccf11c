"""The copy lane of a CUDA device: one stream for both directions, ordered by events.

The host only queues. An entry is queued as soon as its F, or its gate, has been queued, in the
plan's order, so when a backward is queued its reload is queued already:

    O    the copy stream waits for the event after F, copies into pinned memory, records `left`
    R    memory is taken on the compute stream; the copy stream waits for that moment, copies back,
         records `there`
    I, B the compute stream waits for `there`

Memory leaves when the copy out has ended on the device. The allocator hands memory on in the order
of the compute stream, so the compute stream first waits for `left`, where that has happened by
itself or where the plan counts on the room, and then the tensors are let go of: what is allocated
from there on may use their place. One stream, because two made bandwidth jump (PipeOffload, B6).

Not run on a device yet: take it as experimental.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from executor.offload.host_pool import Block
from executor.offload.lanes import CALLED_BACK, Copied, Entry, Key, Lane, Move, Road, StateItem
from executor.offload.saved import Parcel, Piece


@dataclass(slots=True, eq=False)
class _Trip:
    """One parcel on its way: events mark where the copy stream is with it."""

    parcel: Parcel
    ready: Any  # F has ended
    at: int = 0  # its way out among the entries
    pieces: list[Piece] = field(default_factory=list)
    out: tuple[Any, Any] | None = None  # begins, has left
    back: tuple[Any, Any] | None = None  # begins, is there
    gone: bool = False


class CudaLane(Lane):
    """Copies on a stream of their own."""

    def __init__(self, entries: Sequence[Entry], road: Road, timeout_s: float) -> None:
        super().__init__(entries, road, timeout_s)
        self._stream: Any = torch.cuda.Stream()
        self._at = len(self.entries)
        self._trips: dict[Key, _Trip] = {}
        self._on_their_way: deque[_Trip] = deque()
        self._done: list[tuple[int, tuple[Any, Any], int]] = []
        self._blocks: deque[tuple[Any, Block]] = deque()  # free once the event has happened
        self._stopped = False
        self._away_bytes = 0

    # --- a step ---------------------------------------------------------------------------

    def begin(self) -> None:
        self._at, self.reached = 0, -1
        self._trips.clear()
        self._on_their_way.clear()
        self._done, self.copied, self.kept = [], [], {}
        self._away_bytes = 0

    @property
    def state(self) -> tuple[int, int]:
        # what is queued behind a copy out that has not ended counts only as bytes
        on_their_way = self._on_their_way
        return on_their_way[0].at if on_their_way else self._at, self._away_bytes

    def mark(self, number: int) -> None:
        self.reached = number
        self._free(wait=None)
        self._advance()

    def put(self, key: Key, parcel: Parcel) -> None:
        ready: Any = torch.cuda.Event()
        ready.record()
        self._trips[key] = _Trip(parcel, ready)
        self._advance()

    def wait_back(self, key: Key) -> int:
        self._advance()
        trip = self._trips.get(key)
        if trip is None:
            return 0
        if trip.out is None:
            self.kept.setdefault(key, trip.parcel.why_not or CALLED_BACK)
        elif trip.back is not None:
            torch.cuda.current_stream().wait_event(trip.back[1])
        trip.parcel.empty()
        del self._trips[key]
        return 0

    def wait_out(self, key: Key) -> None:
        trip = self._trips.get(key)
        if trip is not None and trip.out is not None and not trip.gone:
            self._free(wait=trip)

    def finish(self) -> None:
        self.mark((1 << 62) - 1)
        self._at = len(self.entries)
        self._trips.clear()

    def abort(self) -> None:
        self._stopped = True
        self._at = len(self.entries)
        # whatever is queued reads and writes memory that must outlive it
        self._stream.synchronize()
        self._trips.clear()
        self._on_their_way.clear()

    def copies(self) -> list[Copied]:
        if not self.copied and self._done:
            self._stream.synchronize()
            anchor: Any = torch.cuda.Event(enable_timing=True)
            anchor.record(self._stream)
            anchor.synchronize()
            now = time.perf_counter_ns()

            def at(event: Any) -> int:
                return now - int(event.elapsed_time(anchor) * 1e6)

            self.copied = [
                Copied(code, at(begins), at(ends), num_bytes)
                for code, (begins, ends), num_bytes in self._done
            ]
        return self.copied

    # --- queueing -------------------------------------------------------------------------

    def _advance(self) -> None:
        """Queue the entries that may be queued, in the plan's order."""
        while self._at < len(self.entries) and not self._stopped:
            entry = self.entries[self._at]
            trip = self._trips.get(entry.key)
            if entry.back:
                if trip is not None and entry.number > self.reached:
                    return
                if trip is not None:
                    self._bring_back(entry, trip)
            else:
                if trip is None and entry.key not in self.kept:
                    return
                if trip is not None:
                    self._take_out(entry, trip)
            self._at += 1

    def _events(self) -> tuple[Any, Any]:
        return (
            torch.cuda.Event(enable_timing=True),
            torch.cuda.Event(enable_timing=True),
        )

    def take(self, num_bytes: int) -> tuple[Block | None, str]:
        while self._blocks and self._blocks[0][0].query():
            self.give(self._blocks.popleft()[1])
        return super().take(num_bytes)

    def _take_out(self, entry: Entry, trip: _Trip) -> None:
        found, why = self.take_for(trip.parcel)
        if why:
            self.kept[entry.key] = why
        if not found:
            return
        trip.pieces = [piece for piece, _ in found]
        trip.out, trip.at = self._events(), self._at
        self._stream.wait_event(trip.ready)
        with torch.cuda.stream(self._stream), torch.no_grad():
            trip.out[0].record()
            for piece, block in found:
                block.bytes.copy_(piece.bytes(), non_blocking=True)
                piece.block = block
            trip.out[1].record()
        self._on_their_way.append(trip)
        self._done.append((entry.code, trip.out, sum(piece.num_bytes for piece in trip.pieces)))

    def _bring_back(self, entry: Entry, trip: _Trip) -> None:
        if trip.out is None:
            return
        if not trip.gone:
            self._free(wait=trip)
        total = sum(piece.num_bytes for piece in trip.pieces)
        self._away_bytes -= total
        memory = [
            torch.empty(piece.num_bytes, dtype=torch.uint8, device=piece.device)
            for piece in trip.pieces
        ]
        taken: Any = torch.cuda.Event()
        taken.record()  # until here the compute stream may still use what lay there
        self._stream.wait_event(taken)
        trip.back = self._events()
        with torch.cuda.stream(self._stream), torch.no_grad():
            trip.back[0].record()
            for piece, into in zip(trip.pieces, memory, strict=True):
                assert piece.block is not None
                into.copy_(piece.block.bytes, non_blocking=True)
            trip.back[1].record()
        for piece, into in zip(trip.pieces, memory, strict=True):
            if self.note is not None:
                self.note(into.untyped_storage())
            block = piece.come_back(into)
            assert block is not None
            self._blocks.append((trip.back[1], block))
        self._done.append((entry.code, trip.back, total))

    def _free(self, wait: _Trip | None) -> None:
        """Let go of what has left; up to `wait`, the compute stream waits until it has."""
        while self._on_their_way:
            trip = self._on_their_way[0]
            assert trip.out is not None
            if wait is None and not trip.out[1].query():
                return
            torch.cuda.current_stream().wait_event(trip.out[1])
            for piece in trip.pieces:
                assert piece.block is not None
                piece.leave(piece.block)
            trip.gone = True
            self._away_bytes += sum(piece.num_bytes for piece in trip.pieces)
            self._on_their_way.popleft()
            if trip is wait:
                return

    # --- optimizer state ------------------------------------------------------------------

    def move(self, items: Sequence[StateItem], back: bool) -> Move:
        move = Move(list(items), back)
        now: Any = torch.cuda.Event()
        now.record()
        self._stream.wait_event(now)
        for item in move.items:
            if back == (item.block is None):
                continue
            if back:
                item.storage.resize_(item.num_bytes)
                now = torch.cuda.Event()
                now.record()
                self._stream.wait_event(now)
            else:
                item.block, failure = self.take(item.num_bytes)
                if item.block is None:
                    move.failure = failure
                    continue
            assert item.block is not None
            device = torch.empty(0, dtype=torch.uint8, device=item.storage.device)
            device.set_(item.storage)
            target, source = (device, item.block.bytes) if back else (item.block.bytes, device)
            with torch.cuda.stream(self._stream), torch.no_grad():
                target.copy_(source, non_blocking=True)
            move.moved_bytes += item.num_bytes
        move.event = torch.cuda.Event()
        move.event.record(self._stream)
        return move

    def wait_move(self, move: Move, timeout_s: float) -> None:
        end, nap = time.monotonic() + timeout_s, 0.0001
        while move.event is not None and not move.event.query():
            if time.monotonic() > end:
                raise TimeoutError(f"optimizer state was not moved within {timeout_s:g} s")
            time.sleep(nap)
            nap = min(2 * nap, 0.005)
        if move.done.is_set():
            return
        if move.event is not None:
            torch.cuda.current_stream().wait_event(move.event)
        for item in move.items:
            if item.block is None:
                continue
            if move.back:
                self.give(item.block)
                item.block = None
            else:
                item.storage.resize_(0)
        move.done.set()
