"""What a fill job's own process and the rank that pauses it tell each other.

A page of shared memory holds how far the job may go and how far it is; a file in the same folder
says what the process is to run.
"""

from __future__ import annotations

import mmap
import struct
from enum import IntEnum
from pathlib import Path

import msgspec

from octotune.fill.jobs import FillJob

ENDLESS = 1 << 60
_PAGE = 4096


class Slot(IntEnum):
    PHASE = 0
    SAMPLES = 1
    ALLOWED = 2  # micro-steps
    MICRO_STEPS = 3
    COMMAND = 4
    ANSWERED = 5
    PASSES = 6
    TARGET = 7  # samples


class Phase(IntEnum):
    STARTING = 0
    READY = 1
    FAILED = 2


class Command(IntEnum):
    NONE = 0
    SAVE = 1
    LOAD = 2
    END = 3


class Board:
    """Numbers that both sides see."""

    def __init__(self, path: Path, make: bool) -> None:
        if make:
            path.write_bytes(bytes(_PAGE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _PAGE)

    def __getitem__(self, slot: int) -> int:
        found: int = struct.unpack_from("q", self._map, 8 * slot)[0]
        return found

    def __setitem__(self, slot: int, value: int) -> None:
        struct.pack_into("q", self._map, 8 * slot, value)

    def close(self) -> None:
        self._map.close()


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What the child is told at its start."""

    job: FillJob
    device: str
    seed: int
    cap_bytes: int | None
    parent: int
    path: list[str]


def is_idle(board: Board) -> bool:
    """Whether the child has gone as far as it may."""
    return (
        board[Slot.MICRO_STEPS] >= board[Slot.ALLOWED] or board[Slot.SAMPLES] >= board[Slot.TARGET]
    )
