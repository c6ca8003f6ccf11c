"""Other processes of this machine, as Linux shows them under /proc, and stopping them.

A stop (SIGSTOP) takes effect when the process is next given a processor. Where others keep them
busy that may take long, and costs nobody anything: such a stop is pending, not disobeyed. What
tells the two apart is the processor time that the process uses after the signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Protocol

_STOP_S = 0.005  # how long a stop is waited for; after that it is pending
_STOPS_WITHIN_NS = 30_000_000  # of processor time; the kernel counts it in ticks of mostly 10 ms
_NAP_S = 0.0001


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


def used_ns(pid: int) -> int:
    """Return the processor time that a process has used, in the kernel's ticks; 0: it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 10**9 // os.sysconf("SC_CLK_TCK")


def send(pid: int, number: int) -> None:
    """Send a signal to a process, if it is there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def send_group(pid: int, number: int) -> None:
    """Send a signal to a process and the others of its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


class Machine(Protocol):
    """Where processes run: what this module has for Linux."""

    def descendants(self, pid: int, /) -> list[int]: ...
    def began_of(self, pid: int, /) -> str: ...
    def state_of(self, pid: int, /) -> str: ...
    def used_ns(self, pid: int, /) -> int: ...
    def send(self, pid: int, number: int, /) -> None: ...
    def send_group(self, pid: int, number: int, /) -> None: ...


class Family:
    """A process that leads a group, and all that it starts, groups of their own included.

    Args:
        pid: of the process.
        machine: where it runs.
    """

    def __init__(self, pid: int, machine: Machine) -> None:
        self.pid = pid
        self._machine = machine
        self._known: dict[int, str] = {}  # processes it started -> when they began
        self._pending: dict[int, int] = {}  # told to stop, not seen to -> time used by then

    def members(self) -> list[int]:
        """Return the processes that are there, those whose parents are gone included."""
        began_of = self._machine.began_of
        for other in self._machine.descendants(self.pid):
            self._known.setdefault(other, began_of(other))
        for other, began in list(self._known.items()):
            if began_of(other) != began:  # gone, and its number may be another's
                del self._known[other]
        return [self.pid, *self._known]

    def signal(self, number: int) -> None:
        """Send a signal to all of them."""
        members = self.members()
        self._machine.send_group(self.pid, number)
        for other in members[1:]:  # it may have left the group
            self._machine.send(other, number)

    def go_on(self) -> None:
        """Continue all of them; a stop that is still pending is void."""
        self._pending.clear()
        self.signal(signal.SIGCONT)

    def stop(self) -> bool:
        """Stop all of them; return whether they were seen to within some milliseconds."""
        self.signal(signal.SIGSTOP)
        self._pending = {one: self._machine.used_ns(one) for one in self.members()}
        end = time.monotonic() + _STOP_S
        while going := self._going():
            if time.monotonic() > end:
                return False
            for one in going:  # it may have been started after the others were told
                self._machine.send(one, signal.SIGSTOP)
            time.sleep(_NAP_S)
        return True

    def disobeyed_ns(self) -> int:
        """Return the processor time used since the stop by one that goes on; 0: they obey.

        One that had not been given a processor, and those that have stopped, obey.
        """
        most = 0
        for one in self._going() if self._pending else ():
            used = self._machine.used_ns(one)
            most = max(most, used - self._pending.setdefault(one, used))
        return most if most > _STOPS_WITHIN_NS else 0

    def _going(self) -> list[int]:
        return [one for one in self.members() if self._machine.state_of(one) not in "TtZX"]
