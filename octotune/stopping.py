"""Ctrl-C ends a search early, and never takes away the plan that it has found.

The first signal raises KeyboardInterrupt, as ever, while there is a search to end. Once the plan
is being finished and written there is nothing left to stop, and the first signal changes nothing.
Only one that comes a while after it gives up the plan too; `timeout` and terminals may send the
same signal twice.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_S = 5.0


class Stopping:
    """A signal handler that knows whether there is still something to stop."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._over = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt where that ends a search, or was asked for again."""
        now = time.monotonic()
        if self._first_s is None:
            self._first_s = now
            if self._over:
                return
        elif now - self._first_s < AGAIN_S:
            return
        self._over = True
        raise KeyboardInterrupt

    def over(self) -> None:
        """Take the first signal from now on as too late: the plan is found."""
        self._over = True


def stop_by(*numbers: int) -> Stopping:
    """Handle signals by a new `Stopping`, but for those that are ignored or handled already."""
    made = Stopping()
    for number in numbers:
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(number, made)
    return made


@contextmanager
def stopping(*numbers: int) -> Iterator[Stopping]:
    """Yield the `Stopping` that is in force, or put one in force for a while."""
    in_force = map(signal.getsignal, (signal.SIGINT, signal.SIGTERM))
    found = next((one for one in in_force if isinstance(one, Stopping)), None)
    if found is not None:
        yield found
        return
    if threading.current_thread() is not threading.main_thread():  # where Python allows handlers
        yield Stopping()
        return
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield stop_by(*numbers)
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: one that is not Python's
                signal.signal(number, handler)
