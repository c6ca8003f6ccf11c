"""The critical path in a few lines: what it is made of, and which way it goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octotune.report.words import count, duration, percent

if TYPE_CHECKING:
    from simulator.graph import Piece

_MOST_STOPS = 12
_MOST_STAGES = 4
_WORDS = {
    "ACTION": "computing",
    "TRANSFER": "transfers",
    "COPY": "copies to and from the host",
    "REDUCTION": "gradient reduction",
    "EXCHANGE": "tied layers' exchange",
    "OPTIMIZER": "optimizer",
}


def critical_path_text(pieces: Sequence[Piece]) -> tuple[str, ...]:
    """Return the lines that say where the step's time goes along its critical path.

    Args:
        pieces: the path from the start of the step to its end, as `simulator.graph` finds it.

    Returns:
        What it is made of; which stages compute on it, the longest first; and its way over the
        devices, several actions in a row as one stop and at most 12 stops.
    """
    if not pieces:
        return ()
    total = pieces[-1].end_ns - pieces[0].start_ns
    of_node: dict[str, int] = {}
    of_stage: dict[tuple[str, int], int] = {}
    for piece in pieces:
        length = piece.end_ns - piece.start_ns
        of_node[piece.node.name] = of_node.get(piece.node.name, 0) + length
        if piece.node.name == "ACTION":
            key = _stage(piece.name), piece.device
            of_stage[key] = of_stage.get(key, 0) + length
    made_of = ", ".join(
        f"{_WORDS[name]} {percent(length, total)}"
        for name, length in sorted(of_node.items(), key=lambda item: -item[1])
        if length
    )
    stages = sorted(of_stage.items(), key=lambda item: -item[1])
    lines = [made_of]
    if stages:
        named = [
            f"stage {stage} on device {device} {percent(length, total)}"
            for (stage, device), length in stages[:_MOST_STAGES]
        ]
        more = len(stages) - len(named)
        lines.append(", ".join(named) + (f", {count(more, 'more stage')}" if more else ""))
    lines.append(" > ".join(_stops(pieces)))
    return tuple(lines)


def _stage(name: str) -> str:
    """Return the stage of an action's word."""
    return name.rstrip("0123456789")[:-1]


def _stops(pieces: Sequence[Piece]) -> list[str]:
    """Return the way over the devices; transfers are the steps between stops."""
    stops: list[list[Piece]] = []
    for piece in pieces:
        kind = piece.node.name
        if kind == "TRANSFER":
            continue
        last = stops[-1][-1] if stops else None
        if (
            last is not None
            and kind == "ACTION"
            and last.node.name == "ACTION"
            and last.device == piece.device
        ):
            stops[-1].append(piece)
        else:
            stops.append([piece])
    words = [_stop(stop) for stop in stops]
    if len(words) <= _MOST_STOPS:
        return words
    half = _MOST_STOPS // 2
    left_out = stops[half:-half]
    devices = sorted({piece.device for stop in left_out for piece in stop})
    span = duration(left_out[-1][-1].end_ns - left_out[0][0].start_ns)
    among = (
        f"devices {devices[0]} to {devices[-1]}"
        if len(devices) > 2
        else (" and ".join(f"device {device}" for device in devices))
    )
    return [
        *words[:half],
        f"... {count(len(left_out), 'stop')} on {among}, {span} ...",
        *words[-half:],
    ]


def _stop(stop: Sequence[Piece]) -> str:
    first, last = stop[0], stop[-1]
    length = duration(last.end_ns - first.start_ns)
    if first.node.name != "ACTION":
        what = _WORDS[first.node.name] if first.node.name == "OPTIMIZER" else first.name
        return f"device {first.device}: {what} ({length})"
    if len(stop) == 1:
        return f"device {first.device}: {first.name} ({length})"
    return f"device {first.device}: {first.name} to {last.name} ({len(stop)} actions, {length})"
