"""How long a thread was ready to compute while others held the cores.

On a machine with other work, part of what a clock shows is that other work's. Linux counts it for
each thread: the time it stood in the run queue. A thread that sleeps or waits for a message does
not stand there, so taking it off leaves what the same code takes on a core of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_FILE = "/proc/thread-self/schedstat"  # ns on a core, ns in the run queue, times put on a core


@contextmanager
def run_queue_ns() -> Iterator[Callable[[], int]]:
    """Give a function that reads this thread's ns in run queues so far, about 3 us a call.

    Where the system does not count it the function gives 0 always: nothing can be taken off.
    """
    try:
        file = os.open(_FILE, os.O_RDONLY)
    except OSError:
        yield lambda: 0
        return
    try:
        yield lambda: int(os.pread(file, 64, 0).split()[1])
    finally:
        os.close(file)
