"""Other processes of this machine, as Linux shows them under /proc."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those they have."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        try:
            threads = os.listdir(f"/proc/{one}/task")
        except OSError:
            continue
        for thread in threads:
            with contextlib.suppress(OSError):
                children = Path(f"/proc/{one}/task/{thread}/children").read_text().split()
                new = [int(child) for child in children]
                found += new
                waiting += new
    return found


def began_of(pid: int) -> str:
    """Return when a process began, in the kernel's ticks; empty: it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]


def state_of(pid: int) -> str:
    """Return the letter of a process's state; X: it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X"
    return text.rpartition(")")[2].split()[0]


def resident_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
