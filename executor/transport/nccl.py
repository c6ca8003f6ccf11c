"""Messages over NCCL: processes with one GPU each. Experimental: needs one GPU a rank to run.

Each directed pair of ranks has a communicator of its own, so that its messages are one FIFO that
nothing else can block, and all are made before the first step: a communicator made inside a step
would be a hidden collective. Transfers run on the communicators' own streams. A receive is posted
from a side stream that only waits for the buffer's last reader, not for compute queued since, and
nothing makes the host wait: `wait` makes the current stream wait for the transfer's event.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from executor.transport.base import Buffer, Handle, Transport


class _Work:
    __slots__ = ("_tensor", "_work")

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        try:
            self._work.wait()  # the stream waits, the host does not
        except RuntimeError as error:
            if time.monotonic() >= end:
                raise TimeoutError(str(error)) from error
            raise ConnectionError(str(error)) from error


class NcclTransport(Transport):
    """Over NCCL communicators, with a gloo-less store for what is rare.

    torch.distributed must be initialised; every rank has set its CUDA device.
    """

    def __init__(self, store: Store | None = None, timeout_s: float = 300.0) -> None:
        if store is None:
            store = dist.distributed_c10d._get_default_store()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.store = store
        self._timeout = timedelta(seconds=timeout_s)
        self._channels: dict[tuple[int, int], Any] = {}
        self._reduce_groups: dict[tuple[int, ...], Any] = {}
        self._side = torch.cuda.Stream()

    def prepare(self, pairs: Iterable[tuple[int, int]], groups: Iterable[Sequence[int]]) -> None:
        """Make every communicator now, in the same order on all ranks, and use each once."""
        for pair in sorted(set(pairs)):
            if pair in self._channels:
                continue
            group: Any = dist.new_group(list(pair), backend="nccl", timeout=self._timeout)
            if self.rank in pair:
                self._channels[pair] = group
                probe = torch.zeros(1, device="cuda")
                peer = pair.index(pair[1] if self.rank == pair[0] else pair[0])
                work = (
                    group.send([probe], peer, 0)
                    if self.rank == pair[0]
                    else group.recv([probe], peer, 0)
                )
                work.wait()
        for ranks in groups:
            key = tuple(ranks)
            if key in self._reduce_groups:
                continue
            group = dist.new_group(list(key), backend="nccl", timeout=self._timeout)
            if self.rank in key:
                self._reduce_groups[key] = group
                group.allreduce([torch.zeros(1, device="cuda")]).wait()
        torch.cuda.synchronize()

    def send(self, tensor: Tensor, target: int, tag: int) -> Handle:
        """Post a send after what the current stream holds now."""
        group = self._channels[self.rank, target]
        return _Work(group.send([tensor], 1, 0), tensor)

    def receive(self, buffer: Buffer, source: int, tag: int) -> Handle:
        """Post a receive that waits only for what read the buffer last."""
        group = self._channels[source, self.rank]
        if buffer.released is not None:
            self._side.wait_event(buffer.released)
        with torch.cuda.stream(self._side):
            return _Work(group.recv([buffer.tensor], 0, 0), buffer.tensor)

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int]) -> Handle:
        """Post a sum."""
        return _Work(self._reduce_groups[tuple(ranks)].allreduce([tensor]), tensor)

    def abort(self) -> None:
        """Abort the communicators."""
        for group in (*self._channels.values(), *self._reduce_groups.values()):
            group.abort()

    def close(self) -> None:
        """End the communicators, in the order in which they were made."""
        groups = [*self._channels.values(), *self._reduce_groups.values()]
        self._channels.clear()
        self._reduce_groups.clear()
        torch.cuda.synchronize()
        for group in groups:
            dist.destroy_process_group(group)
