"""The copy lane of a CPU rank: a thread with a second store.

It really copies, and takes as long as the plan's `offload_bandwidth` says, so that times and freed
bytes are as on a device. It sleeps between slices, and once awake makes up for waking up late: a
copy counts from when the link's own engine would have begun it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from executor.offload.host_pool import Block
from executor.offload.lanes import (
    BACK,
    CALLED_BACK,
    OUT,
    Copied,
    Entry,
    Key,
    Lane,
    Move,
    Road,
    StateItem,
)
from executor.offload.saved import Parcel, Piece

# Slices between which a copy looks whether it is still wanted, and Moves make way. Each wakes the
# thread up once, which takes time from the rank (benchmarks/offload_runtime.py).
_SLICE_NS = 4_000_000
_SMALLEST_SLICE = 1 << 18
_NEVER = 1 << 62
# how late a thread may wake up and still begin a copy when a link's own engine would have
_LATENCY_NS = 2_000_000


class ThreadLane(Lane):
    """The lane of a CPU rank.

    The thread lives while there is something to copy; nothing has to be closed.
    """

    def __init__(self, entries: Sequence[Entry], road: Road, timeout_s: float) -> None:
        super().__init__(entries, road, timeout_s)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._at = len(self.entries)
        self._wanted = _NEVER
        self._parcels: dict[Key, Parcel] = {}
        self._out: set[Key] = set()
        self._back: set[Key] = set()
        self._copying: Key | None = None
        # when the next copy could begin: the one before it has ended, its F has or it may start
        self._free_ns = self._marked_ns = self._ready_ns = 0
        self._state = (0, 0)
        self._put_ns: dict[Key, int] = {}
        self._moves: deque[Move] = deque()
        self._error: BaseException | None = None
        self._stopped = False

    # --- called by the rank ---------------------------------------------------------------

    def begin(self) -> None:
        with self._changed:
            self._at = 0
            self.reached, self._wanted = -1, _NEVER
            self._parcels.clear()
            self._out.clear()
            self._back.clear()
            self.copied, self.kept = [], {}
            self._state = (0, 0)
            if self.entries:
                self._start()

    @property
    def state(self) -> tuple[int, int]:
        return self._state

    def mark(self, number: int) -> None:
        if number > self.reached:
            self._marked_ns = time.perf_counter_ns()
            self.reached = number
        if self._wanted <= number:
            with self._changed:
                self._changed.notify_all()

    def put(self, key: Key, parcel: Parcel) -> None:
        with self._changed:
            self._parcels[key] = parcel
            self._put_ns[key] = time.perf_counter_ns()
            self._changed.notify_all()

    def wait_back(self, key: Key) -> int:
        waited = 0
        if key not in self._back:
            with self._changed:
                if key not in self._out:
                    # what has not left need not come back
                    why = self._parcels[key].why_not if key in self._parcels else ""
                    self._keep(key, why or CALLED_BACK)
            waited = self._wait_for(key, self._back)
        parcel = self._parcels.pop(key, None)
        if parcel is not None:
            parcel.empty()  # from here on its pieces live as long as autograd wants them
        return waited

    def wait_out(self, key: Key) -> None:
        self._wait_for(key, self._out)

    def finish(self) -> None:
        self.mark(_NEVER - 1)
        end = time.monotonic() + self.timeout_s
        with self._changed:
            while self._at < len(self.entries) or self._copying is not None:
                self._look(end)
        self._parcels.clear()

    def abort(self) -> None:
        with self._changed:
            self._stopped = True
            self._parcels.clear()
            for move in self._moves:
                move.failure = move.failure or "the run failed"
                move.done.set()
            self._moves.clear()
            self._changed.notify_all()

    def move(self, items: Sequence[StateItem], back: bool) -> Move:
        move = Move(list(items), back)
        with self._changed:
            if not move.items or self._stopped:
                move.failure = "the run failed" if self._stopped else ""
                move.done.set()
                return move
            self._moves.append(move)
            self._start()
            self._changed.notify_all()
        return move

    def wait_move(self, move: Move, timeout_s: float) -> None:
        if not move.done.wait(timeout_s):
            raise TimeoutError(f"optimizer state was not moved within {timeout_s:g} s")
        if self._error is not None:
            raise self._error

    def _wait_for(self, key: Key, done: set[Key]) -> int:
        if key in done:
            return 0
        began = time.perf_counter_ns()
        end = time.monotonic() + self.timeout_s
        with self._changed:
            while key not in done:
                self._look(end)
        return time.perf_counter_ns() - began

    def _look(self, end: float) -> None:
        """Wait for a change; raise what went wrong."""
        if self._error is not None:
            raise self._error
        if self._stopped:
            raise ConnectionError("the copy lane was stopped")
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"a copy did not end within {self.timeout_s:g} s")
        self._changed.wait(left)

    # --- the thread -----------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None and not self._stopped:
            self._thread = threading.Thread(target=self._serve, name="copy lane", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        try:
            while (job := self._next()) is not None:
                if isinstance(job, Move):
                    self._slice(job)
                elif job.back:
                    self._bring_back(job)
                else:
                    self._take_out(job)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._thread = None
                for move in self._moves:
                    move.done.set()
                self._changed.notify_all()

    def _next(self) -> Entry | Move | None:
        """Return what to copy next; None where nothing is left, and the thread ends."""
        with self._changed:
            while not self._stopped:
                if self._at < len(self.entries):
                    entry = self.entries[self._at]
                    # first said, then looked: `mark` writes and reads in the other order
                    self._wanted = entry.number if entry.back else _NEVER
                    if self._ready(entry):
                        self._ready_ns = max(
                            self._marked_ns if entry.back else 0,
                            time.perf_counter_ns() - _LATENCY_NS,
                        )
                        self._wanted = _NEVER
                        self._at += 1
                        self._copying = entry.key
                        return entry
                if self._moves:
                    return self._moves[0]
                if self._at >= len(self.entries):
                    break
                self._changed.wait()
            self._thread = None
            return None

    def _ready(self, entry: Entry) -> bool:
        if entry.key in self._back:
            return True  # it stays; nothing to copy
        if not entry.back:
            return entry.key in self._parcels
        return entry.number <= self.reached

    def _keep(self, key: Key, why: str) -> None:
        """Leave a parcel where it is. The lock is held."""
        self.kept.setdefault(key, why)
        self._out.add(key)
        self._back.add(key)
        self._changed.notify_all()

    def _end(self, entry: Entry, copied: Copied | None) -> None:
        """Count an entry as done. The lock is held."""
        self._copying = None
        self._out.add(entry.key)
        if entry.back:
            self._back.add(entry.key)
        if copied is not None:
            before = self.copied[-1].end_ns if self.copied else 0
            self.copied.append(replace(copied, start_ns=max(copied.start_ns, before)))
        self._changed.notify_all()

    def _take_out(self, entry: Entry) -> None:
        key, road = entry.key, self.road
        trips, why = list[tuple[Piece, Block]](), ""
        parcel = self._parcels.get(key)
        if parcel is not None and key not in self._back:
            trips, why = self.take_for(parcel)
        total = sum(piece.num_bytes for piece, _ in trips)
        start = begin = 0
        if trips:
            since = max(self._free_ns, self._put_ns[key], self._ready_ns)
            start = begin = road.book.turn_ns(road.link, OUT, road.length_ns(total), since)
            _sleep_until(begin)
        for piece, block in trips:
            if begin >= 0:
                begin = self._paced(block.bytes, piece.bytes(), begin, key)
        _sleep_until(begin)
        with self._changed:
            if why:
                self.kept[key] = why
            if not trips or begin < 0 or key in self._back:
                # no room, or asked for meanwhile: all of it is still there
                for _, block in trips:
                    self.give(block)
                self._back.add(key)
                self._settle(0)
                self._end(entry, None)
                return
            self._free_ns = begin
            for piece, block in trips:
                piece.leave(block)
            self._settle(total)
            self._end(entry, Copied(entry.code, start, time.perf_counter_ns(), total))

    def _bring_back(self, entry: Entry) -> None:
        key, road = entry.key, self.road
        if key in self._back:
            with self._changed:
                self._settle(0)
                self._end(entry, None)
            return
        pieces = [piece for piece in self._parcels[key].chosen if piece.block is not None]
        total = sum(piece.num_bytes for piece in pieces)
        since = max(self._free_ns, self._ready_ns)
        start = begin = road.book.turn_ns(road.link, BACK, road.length_ns(total), since)
        _sleep_until(begin)
        self._settle(-total)
        memory = [torch.empty(piece.num_bytes, dtype=torch.uint8) for piece in pieces]
        if self.note is not None:
            for into in memory:
                self.note(into.untyped_storage())
        for piece, into in zip(pieces, memory, strict=True):
            source = piece.block
            assert source is not None
            begin = self._paced(into, source.bytes, begin)
            if begin < 0:
                return
        _sleep_until(begin)
        self._free_ns = begin
        for piece, into in zip(pieces, memory, strict=True):
            block = piece.come_back(into)
            assert block is not None
            self.give(block)
        with self._changed:
            self._end(entry, Copied(entry.code, start, time.perf_counter_ns(), total))

    def _settle(self, left_bytes: int) -> None:
        """Count the next entry as one that has moved its bytes."""
        settled, away = self._state
        self._state = (settled + 1, away + left_bytes)

    def _paced(self, target: Tensor, source: Tensor, begin: int, key: Key | None = None) -> int:
        """Copy at the lane's bandwidth from `begin` on; return when that should end.

        -1 where the copy was given up: `key` was called back meanwhile, or the lane stopped.
        """
        count = source.numel()
        out, into = source.data_ptr(), target.data_ptr()
        step = max(_SMALLEST_SLICE, self.road.bandwidth * _SLICE_NS // 10**9)
        for at in range(0, count, step):
            upto = min(count, at + step)
            # not through numpy, which makes a storage one that cannot be emptied any more
            ctypes.memmove(into + at, out + at, upto - at)
            if self._stopped or key in self._back:
                return -1
            ahead_until = begin + self.road.length_ns(upto)
            if ahead_until - time.perf_counter_ns() > _SLICE_NS:
                _sleep_until(ahead_until)
        return begin + self.road.length_ns(count)

    # --- moves ----------------------------------------------------------------------------

    def _slice(self, move: Move) -> None:
        """Copy some of a Move; an entry that becomes ready goes before the next slice."""
        item, road = move.items[move.at], self.road
        if move.back == (item.block is None):
            self._next_item(move)  # nothing to bring back, or out already
            return
        if move.offset == 0:
            if move.back:
                item.storage.resize_(item.num_bytes)
            else:
                move.taken, failure = self.take(item.num_bytes)
                if move.taken is None:
                    move.failure = failure
                    self._next_item(move)
                    return
        device = torch.empty(0, dtype=torch.uint8).set_(item.storage)
        block = item.block if move.back else move.taken
        assert block is not None
        target, source = (device, block.bytes) if move.back else (block.bytes, device)
        slice_bytes = max(_SMALLEST_SLICE, road.bandwidth * _SLICE_NS // 10**9)
        upto = min(item.num_bytes, move.offset + slice_bytes)
        length = road.length_ns(upto - move.offset)
        begin = road.book.turn_ns(road.link, BACK if move.back else OUT, length)
        _sleep_until(begin)
        end = self._paced(target[move.offset : upto], source[move.offset : upto], begin)
        if end < 0:
            return
        _sleep_until(end)
        self._free_ns = time.perf_counter_ns()
        move.offset = upto
        if upto < item.num_bytes:
            return
        if move.back:
            item.block = None
            self.give(block)
        else:
            item.block, move.taken = block, None
            del device
            item.storage.resize_(0)
        move.moved_bytes += item.num_bytes
        self._next_item(move)

    def _next_item(self, move: Move) -> None:
        move.at += 1
        move.offset = 0
        if move.at < len(move.items):
            return
        with self._changed:
            self._moves.popleft()
            move.done.set()
            self._changed.notify_all()


def _sleep_until(moment_ns: int) -> None:
    """Sleep until a moment of the host's clock; less than the sleep's own error is no sleep."""
    left = moment_ns - time.perf_counter_ns()
    if left > 50_000:
        time.sleep(left / 1e9)
