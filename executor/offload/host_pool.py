"""Host memory that copies go to: few large slabs, cut into blocks of any size.

Page-locked memory is handed out by torch in powers of two, so that a block of 65 MiB would take
128; slabs are powers of two themselves, and blocks lie side by side in them. On a CPU, where
"device" and host are one memory, a slab is a shared mapping of its own: a real second store, and
what leaves the device's tensors is really gone from them.
"""

from __future__ import annotations

import mmap
from bisect import insort

import torch
from torch import Tensor

_ALIGN = 512
_SMALLEST_SLAB = 1 << 20
_LARGEST_FIRST_SLAB = 1 << 30


class Block:
    """Bytes of one slab that belong to one copy until they are given back."""

    __slots__ = ("begin", "num_bytes", "size", "slab")

    def __init__(self, slab: _Slab, begin: int, size: int, num_bytes: int) -> None:
        self.slab = slab
        self.begin = begin
        self.size = size  # as taken from the slab, rounded up
        self.num_bytes = num_bytes

    @property
    def bytes(self) -> Tensor:
        """The memory itself: uint8 [num_bytes]."""
        return self.slab.memory[self.begin : self.begin + self.num_bytes]


class _Slab:
    """One piece of host memory with its gaps, sorted and never side by side."""

    __slots__ = ("gaps", "memory")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.gaps: list[tuple[int, int]] = [(0, memory.numel())]

    def best_gap(self, size: int) -> tuple[int, int] | None:
        """Return the smallest gap that holds `size` bytes."""
        fitting = [gap for gap in self.gaps if gap[1] >= size]
        return min(fitting, key=lambda gap: gap[1], default=None)

    def cut(self, gap: tuple[int, int], size: int) -> int:
        """Take the first bytes of a gap; return where they begin."""
        self.gaps.remove(gap)
        begin, length = gap
        if length > size:
            insort(self.gaps, (begin + size, length - size))
        return begin

    def join(self, begin: int, size: int) -> None:
        """Give bytes back, together with the gaps beside them."""
        end = begin + size
        for gap in list(self.gaps):
            if gap[0] + gap[1] == begin:
                self.gaps.remove(gap)
                begin = gap[0]
            elif gap[0] == end:
                self.gaps.remove(gap)
                end = gap[0] + gap[1]
        insort(self.gaps, (begin, end - begin))


class HostPool:
    """Blocks of host memory; slabs are made when first needed and kept.

    Args:
        pinned: page-locked, for copies beside compute on CUDA.
        expected_bytes: how much will be in use at most, if known: slabs are laid out for it.
    """

    def __init__(self, *, pinned: bool, expected_bytes: int = 0) -> None:
        self._pinned = pinned
        self._slabs: list[_Slab] = []
        self._planned = _slab_sizes(expected_bytes)
        self.in_use_bytes = 0
        self.peak_bytes = 0
        self.failure = ""  # why a slab could not be made, the last time that happened

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.memory.numel() for slab in self._slabs)

    def take(self, num_bytes: int) -> Block | None:
        """Return a block of so many bytes, or None (and `failure`) where the host has no more."""
        size = -(-max(1, num_bytes) // _ALIGN) * _ALIGN
        found = self._find(size)
        if found is None:
            if not self._grow(size):
                return None
            found = self._find(size)
            assert found is not None
        slab, gap = found
        self.in_use_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
        return Block(slab, slab.cut(gap, size), size, num_bytes)

    def give(self, block: Block) -> None:
        """Take a block back."""
        self.in_use_bytes -= block.size
        block.slab.join(block.begin, block.size)

    def _find(self, size: int) -> tuple[_Slab, tuple[int, int]] | None:
        best: tuple[_Slab, tuple[int, int]] | None = None
        for slab in self._slabs:
            gap = slab.best_gap(size)
            if gap is not None and (best is None or gap[1] < best[1][1]):
                best = slab, gap
        return best

    def _grow(self, size: int) -> bool:
        """Make a slab that holds `size` bytes."""
        wanted = max(_SMALLEST_SLAB, 1 << (size - 1).bit_length())
        while self._planned:
            planned = self._planned.pop(0)
            if planned >= size:
                wanted = planned
                break
        try:
            self._slabs.append(_Slab(self._make(wanted)))
        except (OSError, MemoryError, RuntimeError) as error:
            text = str(error).strip().splitlines()
            self.failure = f"{wanted} bytes of host memory: {text[0] if text else 'refused'}"
            return False
        return True

    def _make(self, size: int) -> Tensor:
        if self._pinned:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


def _slab_sizes(expected_bytes: int) -> list[int]:
    """Return powers of two, largest first, that hold so many bytes with little to spare.

    A block may not fit into what is left of a slab: an eighth is left for that.
    """
    left = expected_bytes + expected_bytes // 8
    sizes: list[int] = []
    while left > 0:
        size = min(_LARGEST_FIRST_SLAB, max(_SMALLEST_SLAB, 1 << (left.bit_length() - 1)))
        sizes.append(size)
        left -= size
    return sizes
