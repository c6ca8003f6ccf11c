"""Messages inside one process: a thread a rank, for tests and for several stages on one GPU.

A message is copied from the sender's tensor into the receiver's buffer by whichever of the two
comes second; on CUDA on a stream of its own that waits for both sides' events. `fifo=True` makes
each directed pair of ranks one queue, as an NCCL communicator is: the k-th send meets the k-th
receive, and tags that differ are an error. `buffered=True` copies a message when it is sent, so
that a send never waits for its receive; otherwise sends are rendezvous.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from executor.transport.base import Buffer, Handle, Transport


class _Transfer:
    """One side of a message, and its handle."""

    __slots__ = ("event", "finished", "ready", "tag", "tensor", "world")

    def __init__(self, world: ThreadWorld, tensor: Tensor, tag: int, ready: Any = None) -> None:
        self.world = world
        self.tensor = tensor
        self.tag = tag
        self.finished = False
        self.event: Any = None  # CUDA: when the copy has ended
        self.ready: Any = None  # CUDA: when this side's memory may be touched
        if tensor.is_cuda:
            if ready is None:
                ready = torch.cuda.Event()
                ready.record()
            self.ready = ready

    def done(self) -> bool:
        return self.finished and (self.event is None or self.event.query())

    def wait(self, timeout_s: float) -> None:
        if not self.finished:
            end = time.monotonic() + timeout_s
            with self.world.changed:
                while not self.finished:
                    if self.world.broken:
                        raise ConnectionError("the in-process transport was aborted")
                    left = end - time.monotonic()
                    if left <= 0:
                        raise TimeoutError(f"nothing came within {timeout_s} s")
                    self.world.changed.wait(left)
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class _Reduction:
    """A sum that ends when every rank of its group has posted it."""

    def __init__(self) -> None:
        self.sides: list[tuple[int, _Transfer]] = []


class ThreadWorld:
    """The shared side of the transports of `size` threads."""

    def __init__(self, size: int, *, fifo: bool = True, buffered: bool = False) -> None:
        self.size = size
        self.fifo = fifo
        self.buffered = buffered
        self.changed = threading.Condition()
        self.broken = False
        self.store = HashStore()
        self.most_in_flight = 0
        self._sends: dict[tuple[int, int, int], deque[_Transfer]] = {}
        self._receives: dict[tuple[int, int, int], deque[_Transfer]] = {}
        self._reductions: dict[tuple[tuple[int, ...], int], _Reduction] = {}
        self._counts: dict[tuple[tuple[int, ...], int], int] = {}
        self._stream: Any = None

    def transports(self) -> list[ThreadTransport]:
        """Return one transport a rank."""
        return [ThreadTransport(self, rank) for rank in range(self.size)]

    def post(self, source: int, target: int, transfer: _Transfer, sending: bool) -> None:
        """Add one side of a message, and move the message if the other side is there."""
        key = (source, target, -1 if self.fifo else transfer.tag)
        mine, theirs = (self._sends, self._receives) if sending else (self._receives, self._sends)
        with self.changed:
            waiting = theirs.get(key)
            if waiting:
                other = waiting.popleft()
                if other.tag != transfer.tag:
                    raise ConnectionError(
                        f"channel {source} -> {target}: tag {transfer.tag} met tag {other.tag}"
                    )
                out, into = (transfer, other) if sending else (other, transfer)
                self._copy(out, into)
                self.changed.notify_all()
            else:
                if sending and self.buffered:
                    copy = _Transfer(self, transfer.tensor.clone(), transfer.tag)
                    transfer.finished = True
                    transfer = copy
                queue = mine.setdefault(key, deque())
                queue.append(transfer)
                if sending:
                    self.most_in_flight = max(self.most_in_flight, len(queue))

    def _copy(self, out: _Transfer, into: _Transfer) -> None:
        if out.tensor.shape != into.tensor.shape or out.tensor.dtype != into.tensor.dtype:
            raise ConnectionError(
                f"a message of {list(out.tensor.shape)} {out.tensor.dtype} met a receive of "
                f"{list(into.tensor.shape)} {into.tensor.dtype}"
            )
        # a detached alias shares memory but not the autograd state of the receiver's leaf
        target, source = into.tensor.detach(), out.tensor.detach()
        if out.ready is None:
            with torch.no_grad():
                target.copy_(source)
        else:
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            with torch.no_grad(), torch.cuda.stream(self._stream):
                self._stream.wait_event(out.ready)
                self._stream.wait_event(into.ready)
                target.copy_(source, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            out.event = into.event = event
        out.finished = into.finished = True

    def reduce(self, rank: int, ranks: tuple[int, ...], transfer: _Transfer) -> None:
        """Add one rank's share of a sum; the last one to come adds them up in rank order."""
        with self.changed:
            turn = self._counts.get((ranks, rank), 0)
            self._counts[ranks, rank] = turn + 1
            reduction = self._reductions.setdefault((ranks, turn), _Reduction())
            reduction.sides.append((rank, transfer))
            if len(reduction.sides) < len(ranks):
                return
            del self._reductions[ranks, turn]
            sides = [side for _, side in sorted(reduction.sides, key=lambda pair: pair[0])]
            with torch.no_grad():
                for side in sides:
                    if side.ready is not None:
                        torch.cuda.current_stream().wait_event(side.ready)
                total = sides[0].tensor.clone()
                for side in sides[1:]:
                    total += side.tensor
                for side in sides:
                    side.tensor.copy_(total)
                    if side.ready is not None:
                        side.event = torch.cuda.Event()
                        side.event.record()
                    side.finished = True
            self.changed.notify_all()


class ThreadTransport(Transport):
    """One rank of a `ThreadWorld`."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.world_size = world.size
        self.store = world.store
        self.tagged = not world.fifo

    def prepare(self, pairs: Iterable[tuple[int, int]], groups: Iterable[Sequence[int]]) -> None:
        """Nothing to connect."""

    def send(self, tensor: Tensor, target: int, tag: int) -> Handle:
        """Post a send."""
        transfer = _Transfer(self._world, tensor, tag)
        self._world.post(self.rank, target, transfer, sending=True)
        return transfer

    def receive(self, buffer: Buffer, source: int, tag: int) -> Handle:
        """Post a receive."""
        transfer = _Transfer(self._world, buffer.tensor, tag, buffer.released)
        self._world.post(source, self.rank, transfer, sending=False)
        return transfer

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int]) -> Handle:
        """Post a sum."""
        transfer = _Transfer(self._world, tensor, -1)
        self._world.reduce(self.rank, tuple(ranks), transfer)
        return transfer

    def abort(self) -> None:
        """Wake every thread that waits."""
        with self._world.changed:
            self._world.broken = True
            self._world.changed.notify_all()
