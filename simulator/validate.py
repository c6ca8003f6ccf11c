"""The rules every schedule obeys before it may run: completeness, place and order in a row.

All actions of a (stage, microbatch) stand in one row, its device's. So what is checked here is
exact: one pass over the rows notes where each F, B or I, and W stands, and refuses what is out of
range, on a wrong device, there twice, or before what it needs. Nothing missing, then, is a
matter of counting. Whether rows wait for each other in a ring is for the engine to find.

The tables of positions are as long as stages x microbatches; they are made only when there are
enough actions to fill them, so that a short file with a huge microbatch count costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.actions import (
    KIND_MASK,
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    STAGE_SHIFT,
    CopyKind,
    CopySchedule,
    Kind,
    Schedule,
    kind_of,
    microbatch_of,
    stage_of,
)
from simulator.compiled import kernel
from simulator.costs import Costs
from simulator.errors import ScheduleError

Int64 = NDArray[np.int64]

_F, _B, _I, _W = (int(kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
_O, _R = int(CopyKind.O), int(CopyKind.R)

# What a pass can find; 0: nothing.
_NO_KIND, _NO_STAGE, _NO_MICROBATCH, _OTHER_DEVICE, _TWICE = 1, 2, 3, 4, 5
_SPLIT_AND_WHOLE, _BEFORE_F, _BEFORE_I = 6, 7, 8
_RECOMPUTED, _CANNOT_OFFLOAD, _BEFORE_O, _NO_ANCHOR, _NEVER_BACK = 9, 10, 11, 12, 13

_AROUND = 4  # words of the row shown on each side of the spot


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Where each action stands: indices into `Schedule.codes`, by stage x m + microbatch."""

    forward: Int64  # [S * m]
    backward: Int64  # [S * m] of B or I
    weight: Int64  # [S * m] of W; -1 where the backward is a B


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPositions:
    """What each copy waits for in the row of its device: indices into `Schedule.codes`."""

    after: Int64  # [C] the F before an O; -1 for an R
    anchor: Int64  # [C] the action whose start it waits for; -1: none


def validate(schedule: Schedule, costs: Costs, copies: CopySchedule | None = None) -> None:
    """Raise ScheduleError at the first rule of the contract that a schedule breaks.

    The message is one line: the place, the row with the spot in brackets, and what is allowed.
    """
    positions = action_positions(schedule, costs)
    if copies is not None:
        copy_positions(copies, costs, schedule, positions)


def action_positions(schedule: Schedule, costs: Costs) -> Positions:
    """Return where each action stands. Raises ScheduleError at the first rule broken."""
    if schedule.num_devices != costs.num_devices:
        raise ScheduleError(
            f"actions has {schedule.num_devices} rows; the cluster has {costs.num_devices} "
            "devices, and each has one row, an empty one where it runs nothing"
        )
    m = costs.num_microbatches
    total = costs.num_stages * m
    enough = schedule.num_actions >= 2 * total
    size = total if enough else 0
    forward, backward, weight = (np.full(size, -1, dtype=np.int64) for _ in range(3))
    fault, at, num_forward, num_backward, num_split, num_weight = _place_actions(
        schedule.codes,
        schedule.offsets,
        np.array(costs.stage_device, dtype=np.int64),
        m,
        forward,
        backward,
        weight,
    )
    if fault:
        raise _action_fault(schedule, costs, fault, at)
    if num_forward != total or num_backward != total or num_split != num_weight:
        raise _missing(schedule, costs)
    return Positions(forward=forward, backward=backward, weight=weight)


def copy_positions(
    copies: CopySchedule, costs: Costs, schedule: Schedule, positions: Positions
) -> CopyPositions:
    """Return what each copy waits for. Raises ScheduleError at the first rule broken."""
    if copies.num_devices != costs.num_devices:
        raise ScheduleError(
            f"offload has {copies.num_devices} rows; the cluster has {costs.num_devices} "
            "devices, and each has one row, an empty one where it copies nothing"
        )
    after, anchor = (np.full(len(copies.codes), -1, dtype=np.int64) for _ in range(2))
    fault, at = _place_copies(
        copies.codes,
        copies.anchors,
        copies.offsets,
        np.array(costs.stage_device, dtype=np.int64),
        costs.num_microbatches,
        np.array(costs.recompute, dtype=np.bool_),
        np.array(costs.copy_ns, dtype=np.int64),
        schedule.codes,
        positions.forward,
        positions.backward,
        positions.weight,
        after,
        anchor,
    )
    if fault:
        raise _copy_fault(copies, costs, fault, at)
    return CopyPositions(after=after, anchor=anchor)


@kernel
def _place_actions(
    codes: Int64,
    offsets: Int64,
    stage_device: Int64,
    num_microbatches: int,
    forward: Int64,
    backward: Int64,
    weight: Int64,
) -> tuple[int, int, int, int, int, int]:
    """Fill the tables; return the first fault, its position, and how many of each kind there are.

    With tables of length 0 only range and device are checked: then something is missing anyway.
    """
    num_stages = len(stage_device)
    m = num_microbatches
    placed = len(forward) > 0
    num_forward = num_backward = num_split = num_weight = 0
    for device in range(len(offsets) - 1):
        for at in range(offsets[device], offsets[device + 1]):
            code = codes[at]
            stage = code >> STAGE_SHIFT
            kind = code & KIND_MASK
            microbatch = (code >> MICROBATCH_SHIFT) & MICROBATCH_MASK
            fault = 0
            if kind > _W:
                fault = _NO_KIND
            elif stage < 0 or stage >= num_stages:
                fault = _NO_STAGE
            elif microbatch >= m:
                fault = _NO_MICROBATCH
            elif stage_device[stage] != device:
                fault = _OTHER_DEVICE
            elif placed:
                index = stage * m + microbatch
                if kind == _F:
                    num_forward += 1
                    if forward[index] >= 0:
                        fault = _TWICE
                    forward[index] = at
                elif kind == _W:
                    num_weight += 1
                    before = backward[index]
                    if weight[index] >= 0:
                        fault = _TWICE
                    elif before < 0:
                        fault = _BEFORE_I
                    elif codes[before] & KIND_MASK == _B:
                        fault = _SPLIT_AND_WHOLE
                    weight[index] = at
                else:
                    num_backward += 1
                    num_split += kind == _I
                    before = backward[index]
                    if before >= 0:
                        same = codes[before] & KIND_MASK == kind
                        fault = _TWICE if same else _SPLIT_AND_WHOLE
                    elif forward[index] < 0:
                        fault = _BEFORE_F
                    backward[index] = at
            if fault:
                return fault, at, num_forward, num_backward, num_split, num_weight
    return 0, 0, num_forward, num_backward, num_split, num_weight


@kernel
def _place_copies(
    codes: Int64,
    anchors: Int64,
    offsets: Int64,
    stage_device: Int64,
    num_microbatches: int,
    recompute: NDArray[np.bool_],
    copy_ns: Int64,
    action_codes: Int64,
    forward: Int64,
    backward: Int64,
    weight: Int64,
    after: Int64,
    anchor: Int64,
) -> tuple[int, int]:
    """Fill what each copy waits for; return the first fault and its position."""
    num_stages = len(stage_device)
    m = num_microbatches
    out = np.full(len(forward), -1, dtype=np.int64)  # position of O, or -2 - position once back
    for device in range(len(offsets) - 1):
        for at in range(offsets[device], offsets[device + 1]):
            code = codes[at]
            stage = code >> STAGE_SHIFT
            kind = code & KIND_MASK
            microbatch = (code >> MICROBATCH_SHIFT) & MICROBATCH_MASK
            if kind != _O and kind != _R:
                return _NO_KIND, at
            if stage < 0 or stage >= num_stages:
                return _NO_STAGE, at
            if microbatch >= m:
                return _NO_MICROBATCH, at
            if stage_device[stage] != device:
                return _OTHER_DEVICE, at
            if recompute[stage]:
                return _RECOMPUTED, at
            if copy_ns[stage] < 0:
                return _CANNOT_OFFLOAD, at
            index = stage * m + microbatch
            if kind == _O:
                if out[index] != -1:
                    return _TWICE, at
                out[index] = at
                after[at] = forward[index]
            else:
                if out[index] < -1:
                    return _TWICE, at
                if out[index] == -1:
                    return _BEFORE_O, at
                out[index] = -2 - out[index]
            held = anchors[at]
            if held == -1:
                continue
            stage = held >> STAGE_SHIFT
            kind = held & KIND_MASK
            microbatch = (held >> MICROBATCH_SHIFT) & MICROBATCH_MASK
            if stage < 0 or stage >= num_stages or microbatch >= m:
                return _NO_ANCHOR, at
            index = stage * m + microbatch
            if kind == _F:
                found = forward[index]
            elif kind == _W:
                found = weight[index]
            elif kind in (_B, _I):
                found = backward[index]
            else:
                return _NO_ANCHOR, at
            if stage_device[stage] != device or found < 0 or action_codes[found] != held:
                return _NO_ANCHOR, at
            anchor[at] = found
    for at in range(len(codes)):
        code = codes[at]
        index = (code >> STAGE_SHIFT) * m + ((code >> MICROBATCH_SHIFT) & MICROBATCH_MASK)
        if out[index] >= 0:
            return _NEVER_BACK, at
    return 0, 0


def _word(code: int) -> str:
    """Return a packed action or copy as a word; `?` stands for a kind that does not exist."""
    letters = "FBIWOR"
    kind = code & KIND_MASK
    letter = letters[kind] if kind < len(letters) else "?"
    return f"{code >> STAGE_SHIFT}{letter}{(code >> MICROBATCH_SHIFT) & MICROBATCH_MASK}"


def _spot(codes: Int64, offsets: Int64, device: int, at: int) -> str:
    """Return the row around a position, that one in brackets."""
    begin, end = int(offsets[device]), int(offsets[device + 1])
    low, high = max(begin, at - _AROUND), min(end, at + _AROUND + 1)
    words = [
        f"[{_word(code)}]" if index == at else _word(code)
        for index, code in enumerate(codes[low:high].tolist(), start=low)
    ]
    return " ".join(
        [f"device {device}:", *["..."] * (low > begin), *words, *["..."] * (high < end)]
    )


def _place(offsets: Int64, at: int) -> tuple[int, int]:
    """Return device and position in its row of an index into the codes."""
    device = int(np.searchsorted(offsets, at, side="right")) - 1
    return device, at - int(offsets[device])


def _common_fault(rows: str, word: str, code: int, costs: Costs, fault: int) -> str:
    """Return what is wrong with a stage, a microbatch, a device, or a word that came before."""
    if fault == _NO_STAGE:
        return f"there is no stage {code >> STAGE_SHIFT}; stages are 0 to {costs.num_stages - 1}"
    if fault == _NO_MICROBATCH:
        microbatch = (code >> MICROBATCH_SHIFT) & MICROBATCH_MASK
        return (
            f"there is no microbatch {microbatch}; "
            f"microbatches are 0 to {costs.num_microbatches - 1}"
        )
    if fault == _OTHER_DEVICE:
        home = int(costs.stage_device[code >> STAGE_SHIFT])
        return f"stage {code >> STAGE_SHIFT} is on device {home}; {word} belongs in {rows}[{home}]"
    assert fault == _TWICE
    return f"{word} is there a second time; it runs once"


def _action_fault(schedule: Schedule, costs: Costs, fault: int, at: int) -> ScheduleError:
    device, position = _place(schedule.offsets, at)
    code = int(schedule.codes[at])
    word = _word(code)
    pair = word.replace("B", "{0}").replace("I", "{0}").replace("W", "{0}")
    if fault == _NO_KIND:
        said = f"kind {code & KIND_MASK} is none of F, B, I and W"
    elif fault == _SPLIT_AND_WHOLE:
        said = (
            f"{word} runs, and so does another backward of the same stage and microbatch; "
            f"write either {pair.format('B')}, or {pair.format('I')} and {pair.format('W')}"
        )
    elif fault == _BEFORE_F:
        said = f"{word} runs before {pair.format('F')}; a backward comes after its forward"
    elif fault == _BEFORE_I:
        said = f"{word} runs before {pair.format('I')}; W comes after the I it completes"
    else:
        said = _common_fault("actions", word, code, costs, fault)
    spot = _spot(schedule.codes, schedule.offsets, device, at)
    return ScheduleError(f"actions[{device}][{position}]: {said} ({spot})")


def _missing(schedule: Schedule, costs: Costs) -> ScheduleError:
    """Name the first action that is not there; memory grows with the actions that are."""
    m = costs.num_microbatches
    kinds = kind_of(schedule.codes)
    indices = stage_of(schedule.codes) * m + microbatch_of(schedule.codes)

    def first_gap(present: Int64) -> int:
        """Return the least index that is not present."""
        present = np.unique(present)
        gaps = np.flatnonzero(present != np.arange(len(present)))
        return int(gaps[0]) if len(gaps) else len(present)

    forward = first_gap(indices[kinds == _F])
    backward = first_gap(indices[(kinds == _B) | (kinds == _I)])
    split = np.setdiff1d(indices[kinds == _I], indices[kinds == _W])
    weight = int(split[0]) if len(split) else costs.num_stages * m
    index, _, kind, instead = min(
        (forward, 0, "F", ""),
        (backward, 1, "B", " (or {0}I{1} and {0}W{1})"),
        (weight, 2, "W", ""),
    )
    stage, microbatch = divmod(index, m)
    device = int(costs.stage_device[stage])
    return ScheduleError(
        f"actions[{device}]: {stage}{kind}{microbatch}{instead.format(stage, microbatch)} is "
        "missing; each stage runs F and either B, or I and W, of each microbatch once: "
        f"{costs.num_stages} stages x {m} microbatches"
    )


def _copy_fault(copies: CopySchedule, costs: Costs, fault: int, at: int) -> ScheduleError:
    device, position = _place(copies.offsets, at)
    code = int(copies.codes[at])
    word = _word(code)
    stage = code >> STAGE_SHIFT
    if fault == _NO_KIND:
        said = f"kind {code & KIND_MASK} is neither O nor R"
    elif fault == _RECOMPUTED:
        said = f"stage {stage} recomputes, so there is nothing to copy; drop its copies"
    elif fault == _CANNOT_OFFLOAD:
        said = f"device {device} cannot offload; its offload_bandwidth is 0"
    elif fault == _BEFORE_O:
        said = f"{word} runs before {word.replace('R', 'O')}; what comes back went out before"
    elif fault == _NEVER_BACK:
        said = f"{word} has no {word.replace('O', 'R')}; what goes out comes back"
    elif fault == _NO_ANCHOR:
        anchor = _word(int(copies.anchors[at]))
        said = f"device {device} runs no {anchor}; a copy waits for an action of its own device"
    else:
        said = _common_fault("offload", word, code, costs, fault)
    spot = _spot(copies.codes, copies.offsets, device, at)
    return ScheduleError(f"offload[{device}][{position}]: {said} ({spot})")
