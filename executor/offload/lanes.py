"""The copy lane of one rank: one copy at a time, beside compute, in the plan's order.

    entry of the plan    an O waits for its F, an R until it may start; then for the link
    Move                 other tensors (optimizer state), in slices, while no entry is ready

`Lane` says what the runtime asks for. The thread of a CPU rank is in `thread_lane`, the stream of
a CUDA device in `cuda_lane`.

When a reload may start, `room` says. Whoever waits for one lets it start first, and everything
before it on the lane has its F behind it, so nothing waits in a ring: the plan's check has proved
that for the plan's order, and W's that float let nothing start by themselves.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from executor.offload.host_book import HostBook
from executor.offload.host_pool import Block, HostPool
from executor.offload.saved import Parcel, Piece

Key = tuple[int, int]  # stage, microbatch
OUT, BACK = 0, 1

CALLED_BACK = "called back before it had left"


@dataclass(frozen=True, slots=True)
class Entry:
    """One copy of the plan; `number` counts the reloads of the lane, -1 for copies out."""

    code: int
    key: Key
    back: bool
    number: int = -1


@dataclass(frozen=True, slots=True)
class Copied:
    """One copy as it was made; times are the host's clock."""

    code: int
    start_ns: int
    end_ns: int
    num_bytes: int


class StateItem:
    """A storage that a Move takes out and back; with `block` it is on the host."""

    __slots__ = ("block", "num_bytes", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.num_bytes = storage.nbytes()
        self.block: Block | None = None


@dataclass(slots=True, eq=False)
class Move:
    """Storages on their way out or back."""

    items: list[StateItem]
    back: bool
    moved_bytes: int = 0
    failure: str = ""
    done: threading.Event = field(default_factory=threading.Event)
    at: int = 0  # the item, and how much of it is copied
    offset: int = 0
    taken: Block | None = None
    event: Any = None  # CUDA: after its last copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Road:
    """What a lane copies over: bytes a second, the host link, whose memory is at the other end."""

    bandwidth: int
    link: int
    host: int
    book: HostBook
    pool: HostPool

    def length_ns(self, num_bytes: int) -> int:
        """Return how long a copy takes, by the contract."""
        return max(1, -(-num_bytes * 10**9 // self.bandwidth))


class Lane(ABC):
    """One rank's copies, step after step."""

    def __init__(self, entries: Sequence[Entry], road: Road, timeout_s: float) -> None:
        self.entries = tuple(entries)
        self.road = road
        self.timeout_s = timeout_s
        self.copied: list[Copied] = []
        self.kept: dict[Key, str] = {}  # what did not leave, and why
        self.reached = -1  # the last reload that may start
        # called with each storage that a reload makes
        self.note: Callable[[torch.UntypedStorage], None] | None = None

    @abstractmethod
    def begin(self) -> None:
        """Begin a step."""

    @property
    @abstractmethod
    def state(self) -> tuple[int, int]:
        """How many entries have moved their bytes; how many are out and not yet coming back."""

    @abstractmethod
    def mark(self, number: int) -> None:
        """Reloads up to this one may start."""

    @abstractmethod
    def put(self, key: Key, parcel: Parcel) -> None:
        """An F has ended, and here is what it saved."""

    @abstractmethod
    def wait_back(self, key: Key) -> int:
        """Return when a parcel is on the device; how long that took, in nanoseconds."""

    @abstractmethod
    def wait_out(self, key: Key) -> None:
        """Return when a parcel has left, or is known to stay."""

    @abstractmethod
    def finish(self) -> None:
        """End a step: every entry has been copied or dropped."""

    @abstractmethod
    def abort(self) -> None:
        """Stop: the step failed."""

    @abstractmethod
    def move(self, items: Sequence[StateItem], back: bool) -> Move:
        """Take storages out or bring them back, when no entry is ready; returns at once."""

    @abstractmethod
    def wait_move(self, move: Move, timeout_s: float) -> None:
        """Return when a Move has ended. Raises TimeoutError."""

    def take(self, num_bytes: int) -> tuple[Block | None, str]:
        """Return a block of host memory, or why there is none."""
        road = self.road
        if not road.book.take(road.host, num_bytes):
            return None, "the host's memory is full (host_memory_bytes)"
        block = road.pool.take(num_bytes)
        if block is None:
            road.book.give(road.host, num_bytes)
            return None, road.pool.failure
        return block, ""

    def take_for(self, parcel: Parcel) -> tuple[list[tuple[Piece, Block]], str]:
        """Return the pieces to take out, where to, and why there are not more of them."""
        found, why = list[tuple[Piece, Block]](), parcel.why_not
        for piece in parcel.chosen:
            block, failure = self.take(piece.num_bytes)
            if block is None:
                why = failure
            else:
                found.append((piece, block))
        return found, why

    def give(self, block: Block) -> None:
        """Give a block of host memory back."""
        self.road.book.give(self.road.host, block.num_bytes)
        self.road.pool.give(block)

    def copies(self) -> list[Copied]:
        """Return the plan's copies of the last step, in the order they were made."""
        return self.copied
