"""Memory that two ranks of a host have mapped: slots for messages, and a count.

All of it is anonymous: it has no name in any file system and goes with the last process that has
it mapped. One rank makes it and hands its descriptor to the other.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor.transport.base import Buffer

_PAGE = mmap.PAGESIZE
_MAX_SLOTS = 16 * _PAGE  # of a shelf: a byte each says whether it is in use
_FIRST_MAP_BYTES = 1 << 16


class Slot:
    """Memory of one message at a time, and the tensors that look at it."""

    __slots__ = ("_bytes", "_control", "_lent", "number")

    def __init__(self, number: int, memory: Tensor, control: mmap.mmap) -> None:
        self.number = number
        self._bytes = memory
        self._control = control
        self._lent: dict[tuple[Any, torch.dtype], LentBuffer] = {}

    def lend(self, shape: Any, dtype: torch.dtype) -> LentBuffer:
        """Return the memory as a buffer of a message's shape and type."""
        lent = self._lent.get((shape, dtype))
        if lent is None:
            lent = self._lent[shape, dtype] = LentBuffer(self, self._bytes, tuple(shape), dtype)
        return lent

    def free(self) -> None:
        """Let the sender write the next message here; nobody reads this one any more."""
        self._control[self.number] = 0


class LentBuffer(Buffer):
    """A slot in the place of a receive buffer."""

    __slots__ = ("_slot",)

    def __init__(
        self, slot: Slot, memory: Tensor, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self._slot = slot
        self.released = self.tail = None
        self.key = (shape, dtype)
        self.tensor = memory.view(dtype).view(shape)

    def give_back(self) -> bool:
        """Free the slot."""
        self._slot.free()
        return True


class Shelf:
    """Slots for messages of one size and direction, in one piece of anonymous memory.

    It begins with a byte a slot: 1 while the slot is in use. The sender sets it, the receiver
    clears it. Maps double in size, so that few are needed; untouched pages cost nothing.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.descriptor = descriptor
        self._num_bytes = num_bytes
        self._stride = -(-max(1, num_bytes) // _PAGE) * _PAGE
        self._slots: list[Slot] = []
        self._map_slots = max(1, _FIRST_MAP_BYTES // self._stride)
        self._used = 0
        self._control = mmap.mmap(descriptor, _MAX_SLOTS)

    @classmethod
    def new(cls, num_bytes: int) -> Shelf:
        """Return an empty one, the sender's."""
        descriptor = os.memfd_create("octotune-messages")
        os.ftruncate(descriptor, _MAX_SLOTS)
        return cls(descriptor, num_bytes)

    @property
    def used_bytes(self) -> int:
        """The memory of slots that held a message at any time."""
        return self._used * self._stride

    def slot(self, number: int) -> Slot:
        """Return a slot by its number."""
        while number >= len(self._slots):
            self._map_more()
        self._used = max(self._used, number + 1)
        return self._slots[number]

    def take(self) -> Slot:
        """Return a free slot, the sender's from now on."""
        number = self._control.find(b"\0", 0, self._used + 1)
        assert 0 <= number < _MAX_SLOTS, "more messages on their way than a step can have"
        self._control[number] = 1
        return self.slot(number)

    def _map_more(self) -> None:
        begin, size = len(self._slots), self._map_slots * self._stride
        offset = _MAX_SLOTS + begin * self._stride
        if os.fstat(self.descriptor).st_size < offset + size:
            os.ftruncate(self.descriptor, offset + size)
        memory = torch.frombuffer(
            mmap.mmap(self.descriptor, size, offset=offset), dtype=torch.uint8
        )
        for at in range(self._map_slots):
            part = memory[at * self._stride : at * self._stride + self._num_bytes]
            self._slots.append(Slot(begin + at, part, self._control))
        self._map_slots *= 2

    def close(self) -> None:
        """Map no more; what is mapped lives as long as somebody looks at it."""
        os.close(self.descriptor)


class Ledger:
    """How many receives a rank has posted from one peer: it writes, the peer reads."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._count = np.frombuffer(mmap.mmap(descriptor, _PAGE), dtype=np.uint64)
        self._own = 0

    @classmethod
    def new(cls) -> Ledger:
        """Return one at zero."""
        descriptor = os.memfd_create("octotune-ledger")
        os.ftruncate(descriptor, _PAGE)
        return cls(descriptor)

    def add(self) -> None:
        """Count one more."""
        self._own += 1
        self._count[0] = self._own

    def read(self) -> int:
        """Return the count."""
        return int(self._count[0])

    def close(self) -> None:
        """Let the descriptor go; the memory stays mapped."""
        os.close(self.descriptor)
