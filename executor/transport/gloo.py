"""Messages over gloo: processes on CPUs.

One process group carries everything; its messages have tags, and its connections exist from the
start. A gloo transfer cannot be polled, and a wait that times out breaks the connection, so
arrival is seen by looking at the buffer's last bytes (`Buffer.looks_filled`) and confirmed by the
wait. The process group is called directly: the wrappers of torch.distributed cost 10 us a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from executor.transport.base import Buffer, Handle, Transport


class _Sent:
    __slots__ = ("_tensor", "_work")

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work = work
        self._tensor: Tensor | None = tensor  # alive as long as gloo may read it

    def done(self) -> bool:
        return self._work is None

    def wait(self, timeout_s: float) -> None:
        if self._work is not None:
            _wait(self._work, timeout_s)
            self._work = self._tensor = None


class _Received:
    __slots__ = ("_buffer", "_work")

    def __init__(self, work: Any, buffer: Buffer) -> None:
        self._work = work
        self._buffer = buffer

    def done(self) -> bool:
        return self._work is None or self._buffer.looks_filled()

    def wait(self, timeout_s: float) -> None:
        if self._work is not None:
            _wait(self._work, timeout_s)
            self._work = None


def _wait(work: Any, timeout_s: float) -> None:
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        text = str(error)
        if "imed out" in text or "timeout" in text.lower():
            raise TimeoutError(text) from error
        raise ConnectionError(text) from error


class GlooTransport(Transport):
    """Over a gloo process group: the default one unless given."""

    tagged = True

    def __init__(self, group: dist.ProcessGroup | None = None, store: Store | None = None) -> None:
        if group is None:
            group = dist.distributed_c10d._get_default_group()
        if store is None:
            store = dist.distributed_c10d._get_default_store()
        self._group: Any = group
        self._reduce_groups: dict[tuple[int, ...], Any] = {}
        self.rank = group.rank()
        self.world_size = group.size()
        self.store = store

    def next_name(self) -> str:
        """Return a prefix no other transport of this process on this store gets."""
        GlooTransport._num_names += 1
        return f"octotune/{GlooTransport._num_names}"

    def prepare(self, pairs: Iterable[tuple[int, int]], groups: Iterable[Sequence[int]]) -> None:
        """Make the reduction groups; gloo connects every pair when a group is made."""
        for ranks in groups:
            key = tuple(ranks)
            if key not in self._reduce_groups:
                self._reduce_groups[key] = dist.new_group(list(key), backend="gloo")

    def send(self, tensor: Tensor, target: int, tag: int) -> Handle:
        """Post a send of the tensor's own memory."""
        return _Sent(self._group.send([tensor], target, tag), tensor)

    def receive(self, buffer: Buffer, source: int, tag: int) -> Handle:
        """Post a receive."""
        buffer.mark_empty()
        return _Received(self._group.recv([buffer.tensor], source, tag), buffer)

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int]) -> Handle:
        """Post a sum; gloo's own threads run it beside compute."""
        work = self._reduce_groups[tuple(ranks)].allreduce([tensor])
        return _Sent(work, tensor)

    def abort(self) -> None:
        """Close the sockets: peers that wait get an error at once."""
        self._group = None
        self._reduce_groups.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
