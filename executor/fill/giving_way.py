"""Giving way: the main job is woken at once, also on cores that other ranks' fill work keeps busy.

Where ranks outnumber cores, a message finds its receiver's core at somebody's fill work, and the
system lets that go on for some milliseconds more; each such wait makes the main step longer. Linux
(since 6.12) runs a thread that asks for a short slice of time before one that is in a longer
slice. So the main job's threads ask for the shortest, and a thread in a bubble for a long one.
That needs no privileges and takes nothing from anybody's share. (Idle priority was tried: it does
as much on a quiet machine, but a micro-step that others keep off the core comes back 60 ms late,
and its own main job with it.)

The record of benchmarks/fill_runtime.py has the gain at 4 computing ranks on 2 cores.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterator

MAIN_SLICE_NS = 100_000  # the least that Linux takes
FILL_SLICE_NS = 3_000_000
_DEFAULT = 0
_SHARING = (0, 3)  # SCHED_OTHER, SCHED_BATCH: the policies that have slices
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}  # sched_setattr, sched_getattr


class _Attributes(ctypes.Structure):
    """Linux's struct sched_attr."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


_SIZE = ctypes.sizeof(_Attributes)
_set, _get = _CALLS.get(platform.machine(), (None, None))
_libc = ctypes.CDLL(None) if platform.system() == "Linux" and _set is not None else None


def slice_ns(thread: int = 0) -> int | None:
    """Return the slice that a thread asks for, by default this one; None: the system has none."""
    found = _attributes(thread)
    return None if found is None or not found.runtime else int(found.runtime)


def ask_for(length_ns: int, thread: int = 0) -> None:
    """Have a thread ask for slices of such a length; nothing happens where there are none."""
    found = _attributes(thread)
    if _libc is None or found is None or found.policy not in _SHARING:
        return
    found.runtime = length_ns
    _libc.syscall(_set, thread, ctypes.byref(found), 0)


def _attributes(thread: int) -> _Attributes | None:
    if _libc is None:
        return None
    found = _Attributes(size=_SIZE)
    if _libc.syscall(_get, thread, ctypes.byref(found), _SIZE, 0):
        return None
    return found


def hurry() -> None:
    """Have all threads of this process, and those they start, be woken before fill work."""
    _for_all(MAIN_SLICE_NS)


def relax() -> None:
    """Take `hurry` back."""
    _for_all(_DEFAULT)


def _for_all(length_ns: int) -> None:
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            ask_for(length_ns, int(thread))


def kept_off_ns() -> int:
    """Return how long this thread has been ready to run, in all, on cores that others had.

    0 where the system does not say.
    """
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError, ValueError):
        return 0


@contextlib.contextmanager
def giving_way() -> Iterator[None]:
    """Have this thread give way to threads that hurry."""
    before = slice_ns()
    if before is None:
        yield
        return
    ask_for(FILL_SLICE_NS)
    try:
        yield
    finally:
        ask_for(before)
