"""Host: what a rank on CPUs asks of the machine under it, once, before it builds anything.

Cores: a rank woken by a message is put on the core of the rank that sent it, if others have
something to do there, too, and queues behind it: one message in ten then takes 4 to 7 ms. Ranks
with cores of their own do not meet. Where there are fewer cores than ranks nothing is pinned:
which ranks wait and which compute changes all the time.

Memory: glibc gives large blocks back to the system as soon as they are free, and the system gives
them anew page by page: 10 ms for an activation of 16 MB whose copying takes 4
(benchmarks/executor_overhead.py). A training step frees and wants the same blocks over and over,
so they are kept.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Literal

Pin = Literal["auto", "off"]

# glibc's malloc.h: what is freed at the heap's end stays; blocks up to 32 MiB (its own limit) come
# from the heap
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEEP_BYTES, _FROM_HEAP_BYTES = 2**31 - 1, 32 << 20


def settle(local_rank: int, local_size: int, *, pin: Pin = "auto") -> frozenset[int]:
    """Pin this rank to its cores and keep freed memory; return the cores it may use.

    Call it before torch starts threads: they take the cores over from the thread that makes them.

    Args:
        local_rank: this rank's number on this host.
        local_size: how many ranks this host has.
        pin: "auto" gives every rank as many cores of its own as there are for each, if there is
            at least one; "off" leaves the choice to the system.
    """
    keep_freed_memory()
    if not hasattr(os, "sched_setaffinity"):
        return frozenset(range(os.cpu_count() or 1))
    cores = sorted(os.sched_getaffinity(0))
    if pin == "auto":
        mine = share_of(cores, local_rank, local_size)
        if len(mine) < len(cores):
            os.sched_setaffinity(0, mine)
            return frozenset(mine)
    return frozenset(cores)


def share_of(cores: list[int], local_rank: int, local_size: int) -> list[int]:
    """Return the cores of one rank: neighbours, as many for each; all where there are too few."""
    each = len(cores) // local_size
    if each == 0:
        return cores
    return cores[local_rank * each : (local_rank + 1) * each]


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed, unless MALLOC_TRIM_THRESHOLD_ is set; False elsewhere."""
    if not sys.platform.startswith("linux") or "MALLOC_TRIM_THRESHOLD_" in os.environ:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False  # another C library
    return bool(mallopt(_TRIM_THRESHOLD, _KEEP_BYTES)) and bool(
        mallopt(_MMAP_THRESHOLD, _FROM_HEAP_BYTES)
    )
