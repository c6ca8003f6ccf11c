"""What the runtime asks of a transport: tagged messages between ranks, and a small shared store.

Sends and receives are posted and return handles; nothing blocks but `Handle.wait`. `Handle.done`
is a hint that never says yes too early. Received bytes go into a `Buffer` that the runtime owns
and gives back by lifetime: a transport writes into it from the moment the receive is posted.
The store (torch's Store interface) carries what is rare: shapes, verdicts, faults, timelines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

_SENTINEL = b"\xff" * 8
# Tags with this bit belong to messages outside the plan's program: losses, clocks, tied weights.
# All others are received in the order in which they are sent, channel by channel.
ASIDE = 2


def is_counted(tag: int) -> bool:
    """Whether a tag belongs to a message of the program: those are bounded in number."""
    return not tag & ASIDE


class Handle(Protocol):
    """A transfer under way."""

    def done(self) -> bool:
        """Whether it is known to have ended; False does not mean that it has not."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return once it has ended (on CUDA: once the current stream will wait for it).

        Raises TimeoutError or ConnectionError.
        """
        ...


class Buffer:
    """Memory that one message at a time is received into.

    `watched`: somebody will ask `looks_filled`.
    """

    __slots__ = ("key", "released", "tail", "tensor")

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        watched: bool = False,
    ) -> None:
        self.released: Any = None  # CUDA: the event after which nobody reads it
        self.key = (tuple(shape), dtype)
        self.tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        self.tail: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        if watched and device.type == "cpu" and self.tensor.numel():
            self.tail = self.tensor.view(-1).view(torch.uint8).numpy()[-8:]

    def mark_empty(self) -> None:
        """Put a pattern into the last bytes, which no float of a real message has."""
        if self.tail is not None:
            self.tail[:] = 0xFF

    def looks_filled(self) -> bool:
        """Whether the last bytes have been written: they arrive last.

        A message that happens to end in the pattern looks unfilled; that costs time, not truth.
        """
        return self.tail is not None and self.tail.tobytes() != _SENTINEL[: len(self.tail)]

    def give_back(self) -> bool:
        """Return it to where it came from, if that is not a pool."""
        return False


class Landing(Protocol):
    """A receive whose message is used where it lies: `buffer` is there once it has come."""

    buffer: Buffer | None

    def done(self) -> bool:
        """As of a `Handle`."""
        ...

    def wait(self, timeout_s: float) -> None:
        """As of a `Handle`."""
        ...


class BufferPool:
    """Receive buffers, made when first needed and used again once given back."""

    def __init__(self, device: torch.device, watched: bool = False) -> None:
        self._device = device
        self._watched = watched
        self._free: dict[Any, list[Buffer]] = {}
        self.made = 0
        self.made_bytes = 0

    def watch(self) -> None:
        """Make new buffers so that `looks_filled` can tell."""
        self._watched = True

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        """Return a buffer of this shape that nobody uses."""
        free = self._free.get((shape, dtype))
        if free:
            return free.pop()
        self.made += 1
        buffer = Buffer(shape, dtype, self._device, self._watched)
        self.made_bytes += buffer.tensor.nbytes
        return buffer

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back; the next message may be written into it at once."""
        if buffer.give_back():
            return
        if self._device.type == "cuda":
            buffer.released = torch.cuda.Event()
            buffer.released.record()
        self._free.setdefault(buffer.key, []).append(buffer)

    def clear(self) -> None:
        """Forget the free buffers: their shapes will not come again."""
        for buffers in self._free.values():
            self.made -= len(buffers)
            self.made_bytes -= sum(buffer.tensor.nbytes for buffer in buffers)
        self._free.clear()


class Transport(ABC):
    """Messages between the ranks of one run: processes or threads."""

    rank: int
    world_size: int
    store: Store
    # whether messages of one channel meet by tag; otherwise the k-th send meets the k-th receive
    tagged = False
    _num_names = 0

    def next_name(self) -> str:
        """Return a prefix for the store's keys: every rank gets the same at its n-th call."""
        self._num_names += 1
        return f"octotune/{self._num_names}"

    @abstractmethod
    def prepare(self, pairs: Iterable[tuple[int, int]], groups: Iterable[Sequence[int]]) -> None:
        """Connect the directed pairs of ranks, and the groups that will reduce, before any step.

        Called on every rank with the same arguments in the same order.
        """

    @abstractmethod
    def send(self, tensor: Tensor, target: int, tag: int) -> Handle:
        """Post a send. The tensor is contiguous and stays as it is until the handle is done."""

    @abstractmethod
    def receive(self, buffer: Buffer, source: int, tag: int) -> Handle:
        """Post a receive into a buffer of the message's shape and type."""

    def expect(
        self, shape: tuple[int, ...], dtype: torch.dtype, source: int, tag: int
    ) -> Landing | None:
        """Post a receive that needs no buffer; None where messages from `source` need one."""
        return None

    @property
    def lent_bytes(self) -> int:
        """The memory that messages received without a buffer lie in."""
        return 0

    def forget_shapes(self) -> None:
        """Give up memory kept for the messages so far; every rank calls it between two steps."""
        return

    @abstractmethod
    def all_reduce(self, tensor: Tensor, ranks: Sequence[int]) -> Handle:
        """Post a sum over ranks, in place; every one of them posts its sums in the same order."""

    @abstractmethod
    def abort(self) -> None:
        """Break the connections, so that ranks that wait for this one stop waiting."""

    def close(self) -> None:
        """Let connections, memory and threads go once nothing is on its way any more."""
        return

    @property
    def host(self) -> str:
        """A name that two ranks share when their clocks are one."""
        import socket
        from pathlib import Path

        boot = Path("/proc/sys/kernel/random/boot_id")
        mark = boot.read_text().strip() if boot.exists() else ""
        return f"{socket.gethostname()} {mark}"
