"""The words of a schedule: actions such as `2F0`, and the order each device runs them in.

An action is one stage's forward (F), full backward (B), input half (I) or weight half (W) of one
microbatch, in the letters of torch.distributed.pipelining. A `Schedule` is one row of actions a
device. It keeps them packed, one int64 each, so that plans of a hundred thousand actions are read,
compared and simulated without a Python object an action; `rows` gives the objects when asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.errors import ScheduleError

Int64 = NDArray[np.int64]

MAX_STAGES = 1 << 24
MAX_MICROBATCHES = 1 << 24

# A packed action: stage << 32 | microbatch << 4 | kind. A packed copy has the same form.
STAGE_SHIFT = 32
MICROBATCH_SHIFT = 4
MICROBATCH_MASK = (1 << (STAGE_SHIFT - MICROBATCH_SHIFT)) - 1
KIND_MASK = (1 << MICROBATCH_SHIFT) - 1


class Kind(IntEnum):
    """What an action computes. B is I and W in one."""

    F = 0
    B = 1
    I = 2
    W = 3


class CopyKind(IntEnum):
    """O takes saved activations out to the host, R brings them back."""

    O = 4
    R = 5


_KIND_OF_LETTER = {kind.name: kind for kind in Kind}
_COPY_OF_LETTER = {kind.name: kind for kind in CopyKind}
_ACTION = re.compile(r"(0|[1-9][0-9]{0,7})([FBIW])(0|[1-9][0-9]{0,7})", re.ASCII)
_COPY = re.compile(r"(0|[1-9][0-9]{0,7})([OR])(0|[1-9][0-9]{0,7})(?:@(.+))?", re.ASCII)


class Action(NamedTuple):
    """One stage's F, B, I or W of one microbatch; prints as `2F0`."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.name}{self.microbatch}"

    @classmethod
    def parse(cls, word: str) -> Action:
        """Read `2F0`. Raises ScheduleError where the word is none."""
        match = _ACTION.fullmatch(word)
        if match is None:
            raise ScheduleError(
                f"{word[:40]!r} is no action; write <stage><F|B|I|W><microbatch>, such as 2F0"
            )
        return cls(int(match[1]), _KIND_OF_LETTER[match[2]], int(match[3]))

    @property
    def code(self) -> int:
        """The packed form."""
        return pack(self.stage, self.kind, self.microbatch)


class Copy(NamedTuple):
    """One copy of a stage's activations of one microbatch; prints as `3R5` or `3R5@3F9`.

    `anchor` names the action of the same device before whose start the copy does not begin.
    """

    stage: int
    kind: CopyKind
    microbatch: int
    anchor: Action | None = None

    def __str__(self) -> str:
        word = f"{self.stage}{self.kind.name}{self.microbatch}"
        return word if self.anchor is None else f"{word}@{self.anchor}"

    @classmethod
    def parse(cls, word: str) -> Copy:
        """Read `3O5` or `3R5@3F9`. Raises ScheduleError where the word is none."""
        match = _COPY.fullmatch(word)
        if match is None:
            raise ScheduleError(
                f"{word[:40]!r} is no copy; write <stage><O|R><microbatch>[@<action>], "
                "such as 3R5@3F9"
            )
        anchor = None if match[4] is None else Action.parse(match[4])
        return cls(int(match[1]), _COPY_OF_LETTER[match[2]], int(match[3]), anchor)

    @property
    def code(self) -> int:
        """The packed form, without the anchor."""
        return pack(self.stage, self.kind, self.microbatch)


def pack(stage: int, kind: int, microbatch: int) -> int:
    """Return the int64 form of an action or copy."""
    return (stage << STAGE_SHIFT) | (microbatch << MICROBATCH_SHIFT) | int(kind)


def unpack(code: int) -> Action:
    """Return the action that `pack` made `code` of."""
    code = int(code)
    return Action(
        code >> STAGE_SHIFT,
        Kind(code & KIND_MASK),
        (code >> MICROBATCH_SHIFT) & MICROBATCH_MASK,
    )


def stage_of(codes: Int64) -> Int64:
    """Return the stage of each packed action or copy."""
    return codes >> STAGE_SHIFT


def kind_of(codes: Int64) -> Int64:
    """Return the kind, as an integer, of each packed action or copy."""
    return codes & KIND_MASK


def microbatch_of(codes: Int64) -> Int64:
    """Return the microbatch of each packed action or copy."""
    return (codes >> MICROBATCH_SHIFT) & MICROBATCH_MASK


# Letters of kinds by their ASCII code; -1: no kind.
_KIND_OF_BYTE = np.full(256, -1, dtype=np.int64)
for _kind in Kind:
    _KIND_OF_BYTE[ord(_kind.name)] = _kind
_END, _ZERO, _MAX_DIGITS = ord("\n"), ord("0"), 8


def _packed_words(words: Sequence[str]) -> Int64 | None:
    """Return the packed actions of words such as `2F0`, or None if one of them is none.

    All words at once, as bytes: a plan of 100,000 actions is parsed in a few milliseconds
    (benchmarks/check_speed.py). That the words are right is seen, not where one is wrong.
    """
    if not words:
        return np.zeros(0, dtype=np.int64)
    try:
        text = np.frombuffer("\n".join([*words, ""]).encode("ascii"), dtype=np.uint8)
    except UnicodeEncodeError:
        return None
    digits = text - np.uint8(_ZERO)  # wraps: what is no digit is above 9
    ends = np.flatnonzero(text == _END)
    letters = np.flatnonzero((digits > 9) & (text != _END))
    if len(ends) != len(words) or len(letters) != len(words):
        return None
    begins = np.concatenate(([0], ends[:-1] + 1))
    kinds = _KIND_OF_BYTE[text[letters]]
    # the i-th letter stands inside the i-th word, with a digit on each side
    if np.any(letters <= begins) or np.any(letters >= ends - 1) or np.any(kinds < 0):
        return None

    def numbers(first: Int64, last: Int64) -> Int64 | None:
        length = last - first
        if np.any(length > _MAX_DIGITS) or np.any((digits[first] == 0) & (length > 1)):
            return None
        value = np.zeros(len(first), dtype=np.int64)
        for place in range(int(length.max())):
            inside = place < length
            value[inside] = value[inside] * 10 + digits[first[inside] + place]
        return value

    stages, microbatches = numbers(begins, letters), numbers(letters + 1, ends)
    if stages is None or microbatches is None:
        return None
    packed: Int64 = (stages << STAGE_SHIFT) | (microbatches << MICROBATCH_SHIFT) | kinds
    return packed


def _frozen(array: Int64) -> Int64:
    if array.flags.writeable or array.dtype != np.int64 or not array.flags.c_contiguous:
        array = np.array(array, dtype=np.int64, order="C")  # the caller's stays writable
        array.setflags(write=False)
    return array


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """The order in which each device runs its actions.

    `codes` holds the packed actions of device 0, then of device 1, and so on; device d's are
    `codes[offsets[d]:offsets[d + 1]]`. Both arrays are read-only. Whether the order obeys the
    contract is `simulator.validate`'s to say: a Schedule may hold any actions.
    """

    codes: Int64
    offsets: Int64

    def __post_init__(self) -> None:
        object.__setattr__(self, "codes", _frozen(self.codes))
        object.__setattr__(self, "offsets", _frozen(self.offsets))

    @classmethod
    def from_codes(cls, rows: Sequence[Sequence[int] | Int64]) -> Schedule:
        """Make a schedule of one sequence of packed actions a device."""
        lengths = [len(row) for row in rows]
        offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        parts = [np.asarray(row, dtype=np.int64) for row in rows if len(row)]
        codes = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        return cls(codes, offsets)

    @classmethod
    def from_rows(cls, rows: Iterable[Iterable[Action]]) -> Schedule:
        """Make a schedule of one sequence of actions a device."""
        return cls.from_codes([[action.code for action in row] for row in rows])

    @classmethod
    def from_words(cls, rows: Iterable[Iterable[str]]) -> Schedule:
        """Make a schedule of one sequence of words such as `2F0` a device.

        Raises ScheduleError, naming device and position, at the first word that is no action.
        """
        words = [tuple(row) for row in rows]
        offsets = np.cumsum([0, *map(len, words)], dtype=np.int64)
        codes = _packed_words(list(chain.from_iterable(words)))
        if codes is None:
            for device, row in enumerate(words):
                for position, word in enumerate(row):
                    try:
                        Action.parse(word)
                    except ScheduleError as error:
                        raise ScheduleError(f"actions[{device}][{position}]: {error}") from None
            raise AssertionError("a word was refused that is an action")
        return cls(codes, offsets)

    @property
    def num_devices(self) -> int:
        """How many rows there are."""
        return len(self.offsets) - 1

    @property
    def num_actions(self) -> int:
        """How many actions there are on all devices."""
        return len(self.codes)

    def row(self, device: int) -> Int64:
        """Return the packed actions of one device."""
        return self.codes[self.offsets[device] : self.offsets[device + 1]]

    @property
    def rows(self) -> tuple[tuple[Action, ...], ...]:
        """The actions as objects, one tuple a device."""
        return tuple(
            tuple(unpack(code) for code in self.row(device)) for device in range(self.num_devices)
        )

    def words(self) -> tuple[tuple[str, ...], ...]:
        """Return the actions as words, one tuple a device."""
        stages = stage_of(self.codes).tolist()
        letters = [kind.name for kind in Kind]
        kinds = kind_of(self.codes).tolist()
        microbatches = microbatch_of(self.codes).tolist()
        words = [
            f"{stage}{letters[kind]}{microbatch}"
            for stage, kind, microbatch in zip(stages, kinds, microbatches, strict=True)
        ]
        bounds = self.offsets.tolist()
        return tuple(tuple(words[begin:end]) for begin, end in pairwise(bounds))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(
            self.codes, other.codes
        )

    def __hash__(self) -> int:
        return hash((self.offsets.tobytes(), self.codes.tobytes()))

    def __str__(self) -> str:
        return "\n".join(
            f"device {device}: {' '.join(row)}" for device, row in enumerate(self.words())
        )


@dataclass(frozen=True, slots=True, eq=False)
class CopySchedule:
    """The order of each device's copy lane: which activations go to the host and back.

    `codes` and `offsets` are as in `Schedule`, with copies in place of actions; `anchors` holds
    the packed action each copy is held back for, or -1.
    """

    codes: Int64
    anchors: Int64
    offsets: Int64

    def __post_init__(self) -> None:
        object.__setattr__(self, "codes", _frozen(self.codes))
        object.__setattr__(self, "anchors", _frozen(self.anchors))
        object.__setattr__(self, "offsets", _frozen(self.offsets))

    @classmethod
    def from_rows(cls, rows: Iterable[Iterable[Copy]]) -> CopySchedule:
        """Make the lanes of one sequence of copies a device."""
        copies = [list(row) for row in rows]
        flat = [copy for row in copies for copy in row]
        offsets = np.concatenate(([0], np.cumsum([len(row) for row in copies], dtype=np.int64)))
        return cls(
            np.array([copy.code for copy in flat], dtype=np.int64),
            np.array(
                [-1 if copy.anchor is None else copy.anchor.code for copy in flat], dtype=np.int64
            ),
            offsets,
        )

    @classmethod
    def from_words(cls, rows: Iterable[Iterable[str]]) -> CopySchedule:
        """Make the lanes of one sequence of words such as `3R5@3F9` a device.

        Raises ScheduleError, naming device and position, at the first word that is no copy.
        """
        parsed: list[list[Copy]] = []
        for device, row in enumerate(rows):
            lane: list[Copy] = []
            for position, word in enumerate(row):
                try:
                    lane.append(Copy.parse(word))
                except ScheduleError as error:
                    raise ScheduleError(f"offload[{device}][{position}]: {error}") from None
            parsed.append(lane)
        return cls.from_rows(parsed)

    @property
    def num_devices(self) -> int:
        """How many lanes there are."""
        return len(self.offsets) - 1

    @property
    def rows(self) -> tuple[tuple[Copy, ...], ...]:
        """The copies as objects, one tuple a device."""
        copies = [
            Copy(
                code >> STAGE_SHIFT,
                CopyKind(code & KIND_MASK),
                (code >> MICROBATCH_SHIFT) & MICROBATCH_MASK,
                None if anchor < 0 else unpack(anchor),
            )
            for code, anchor in zip(self.codes.tolist(), self.anchors.tolist(), strict=True)
        ]
        bounds = self.offsets.tolist()
        return tuple(tuple(copies[begin:end]) for begin, end in pairwise(bounds))

    def words(self) -> tuple[tuple[str, ...], ...]:
        """Return the copies as words, one tuple a device."""
        return tuple(tuple(str(copy) for copy in row) for row in self.rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CopySchedule):
            return NotImplemented
        return (
            np.array_equal(self.offsets, other.offsets)
            and np.array_equal(self.codes, other.codes)
            and np.array_equal(self.anchors, other.anchors)
        )

    def __hash__(self) -> int:
        return hash((self.offsets.tobytes(), self.codes.tobytes(), self.anchors.tobytes()))
