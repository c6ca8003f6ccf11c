"""How many saved bytes a rank really holds: from the lifetimes of storages, not from any plan.

Each storage that autograd saves is noted when it is saved, and each that a reload makes when it is
made; a weak reference says when the last owner of it, in Python or in C++, has let go. What
lies in a buffer that is used again (the input of a stage that came from another rank, the
minibatch) has no lifetime of its own and counts until its microbatch gives the buffer back.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import torch


class SavedWatch:
    """The saved bytes of one rank over time."""

    def __init__(self) -> None:
        # events are only ever appended: a storage can end in the middle of any statement
        self._events: list[tuple[int, int]] = []
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._lock = threading.RLock()

    def note(self, storage: torch.UntypedStorage) -> None:
        """Count a storage from now until it is gone; a second time counts nothing."""
        key = storage._cdata
        events, alive = self._events, self._alive
        with self._lock:
            known = alive.get(key)
            if known is not None and known() is not None:
                return
            size = storage.nbytes()

            def gone(which: weakref.ref[torch.UntypedStorage]) -> None:
                events.append((time.perf_counter_ns(), -size))
                if alive.get(key) is which:
                    del alive[key]

            alive[key] = weakref.ref(storage, gone)
            events.append((time.perf_counter_ns(), size))

    def hold(self, num_bytes: int) -> Callable[[], None]:
        """Count bytes that have no lifetime of their own; call what this returns to end that."""
        self._events.append((time.perf_counter_ns(), num_bytes))
        return lambda: self._events.append((time.perf_counter_ns(), -num_bytes))

    def restart(self) -> None:
        """Begin a step: forget what was before, but for what is still held."""
        with self._lock:
            held, count = 0, len(self._events)
            for _, change in self._events[:count]:
                held += change
            self._events[:count] = [(time.perf_counter_ns(), held)]

    def usage(self) -> list[tuple[int, int]]:
        """Return the bytes held from each moment (the host's clock) on, since `restart`."""
        held = 0
        found: list[tuple[int, int]] = []
        for at, change in list(self._events):
            held += change
            found.append((at, held))
        return found

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at once since `restart`."""
        return max((held for _, held in self.usage()), default=0)
