"""Processes that compute while a profile is taken, as the other ranks will during training.

Ranks on one machine share caches, memory bandwidth and the clock of the package; a layer timed
alone may be faster than it will ever be again. Each neighbour runs what a layer runs (a matrix
product, an elementwise pass over a few megabytes) on one thread until its standard input closes,
so that none is left behind when the profiling process ends, however it ends.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import PIPE, Popen

_READY = "ready"
_PROGRAM = "from octotune.model.neighbours import compute_until_closed; compute_until_closed()"


@contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """Keep `count` processes computing meanwhile.

    Raises:
        RuntimeError: if one of them ends before it computes, with its exit status.
    """
    processes = [
        Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=PIPE,
            stdout=PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline().strip() != _READY:
                raise RuntimeError(
                    f"a neighbour process ended with status {process.wait()} before it computed"
                )
        yield
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def compute_until_closed() -> None:
    """Be a neighbour: say so, then compute until standard input closes."""
    import threading

    import torch

    closed = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        closed.set()

    threading.Thread(target=watch, daemon=True).start()
    torch.set_num_threads(1)
    left, right = torch.rand(512, 512), torch.rand(512, 2048)
    print(_READY, flush=True)
    while not closed.is_set():
        torch.nn.functional.gelu(left @ right)
