"""Trace files: what chrome://tracing and Perfetto open, and octotune reads again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from octotune.contract.files import write_whole
from octotune.errors import MalformedError

if TYPE_CHECKING:
    from simulator.timeline import Timeline


def write_trace(timeline: Timeline, path: str | Path, *, derived: bool = True) -> None:
    """Write a timeline as a trace file, whole or not at all.

    Args:
        timeline: simulated or measured.
        path: the file; `ui.perfetto.dev` opens it.
        derived: with bubbles, flow arrows and memory; without, the file is a third as long.
    """
    from simulator.chrome import dumps

    write_whole(dumps(timeline, derived=derived), path)


def read_trace(path: str | Path) -> Timeline:
    """Read the timeline of a trace file that `write_trace` wrote.

    Raises:
        MalformedError: if the file cannot be read or is no such trace; the message is one line.
    """
    from simulator.chrome import loads
    from simulator.errors import TraceError

    try:
        return loads(Path(path).read_bytes())
    except OSError as error:
        raise MalformedError(f"{path}: {error.strerror}") from None
    except TraceError as error:
        raise MalformedError(f"{path}: {error}") from None
