"""What the ranks of one machine share of its host: whose turn on a link it is, and bytes in use.

Ranks are processes, so this is a small file in shared memory, locked for the moment of a change
and unlinked as soon as all have opened it. A link side is a time: when it is free again. A copy
asks by moving that time on by its own length, which serves copies in the order of asking, and a
rank that dies leaves nothing held.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from executor.agree import gather
from executor.transport.base import Transport
from simulator.costs import Costs


class HostBook:
    """Link sides and host memory of the devices of one or several ranks.

    Args:
        num_links: host links; each has a side out (0) and a side back (1).
        limits: [H] the most bytes in use on each host of the plan, or None for no limit.
        path: a file that `create` made, for ranks that share; without, this rank's alone.
    """

    def __init__(
        self, num_links: int, limits: Sequence[int | None], path: Path | None = None
    ) -> None:
        self._limits = list(limits)
        self._hosts = len(limits)
        self._alone = threading.Lock()
        self._file: int | None = None
        count = self._hosts + 2 * num_links
        if path is None:
            self._values = np.zeros(max(1, count), dtype=np.int64)
        else:
            self._file = os.open(path, os.O_RDWR)
            self._values = np.frombuffer(mmap.mmap(self._file, 8 * max(1, count)), dtype=np.int64)

    @staticmethod
    def create(num_links: int, num_hosts: int) -> Path:
        """Make the file; its maker removes it when every rank has opened it."""
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        handle, name = tempfile.mkstemp(prefix="octotune-host-", dir=folder)
        os.ftruncate(handle, 8 * max(1, num_hosts + 2 * num_links))
        os.close(handle)
        return Path(name)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._alone:
            if self._file is not None:
                # by open file, not by process: ranks may be threads
                fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                if self._file is not None:
                    fcntl.flock(self._file, fcntl.LOCK_UN)

    def turn_ns(self, link: int, side: int, length_ns: int, since_ns: int | None = None) -> int:
        """Book a link's side for so long; return when that begins: now, or once it is free.

        `since_ns`: when the copy could have started, where it is a thread's waking up that it
        waited for: a link's own engine would have begun then.
        """
        at = self._hosts + 2 * link + side
        asked = time.perf_counter_ns() if since_ns is None else since_ns
        with self._locked():
            begin = max(asked, int(self._values[at]))
            self._values[at] = begin + length_ns
        return begin

    def take(self, host: int, num_bytes: int) -> bool:
        """Count bytes as in use on a host; False, and nothing counted, where its limit is less."""
        limit = self._limits[host]
        with self._locked():
            if limit is not None and int(self._values[host]) + num_bytes > limit:
                return False
            self._values[host] += num_bytes
        return True

    def give(self, host: int, num_bytes: int) -> None:
        """Count bytes as free again."""
        with self._locked():
            self._values[host] -= num_bytes

    def in_use_bytes(self, host: int) -> int:
        """Return the bytes in use on a host."""
        return int(self._values[host])

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def open_book(
    transport: Transport,
    hosts: Sequence[str],
    replica: int,
    num_devices: int,
    costs: Costs,
    key: str,
    timeout_s: float,
) -> HostBook:
    """Return the book that this replica's ranks on this machine share. Every rank calls it."""
    mine = [
        rank
        for rank in range(replica * num_devices, (replica + 1) * num_devices)
        if hosts[rank] == hosts[transport.rank]
    ]
    num_links = int(costs.host_link.max()) + 1
    num_hosts = int(costs.device_host.max()) + 1
    made: Path | None = None
    if mine[0] == transport.rank and len(mine) > 1:
        made = HostBook.create(num_links, num_hosts)
    try:
        names = gather(transport, f"{key}/made", made and str(made), timeout_s)
        path = None if names[mine[0]] is None else Path(names[mine[0]])
        book = HostBook(num_links, [costs.host_memory_bytes] * num_hosts, path)
        gather(transport, f"{key}/open", None, timeout_s)
    finally:
        if made is not None:
            made.unlink()
    return book
