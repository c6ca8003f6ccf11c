"""Say that code is being compiled, when it is.

The kernels are compiled on their first call on a machine and kept beside their sources; numba
itself tells when it compiles rather than loads, so that nobody waits without knowing why.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

NOTICE = (
    "compiling for this machine, once and before any time limit begins; up to a minute where all "
    "is to be compiled (python -m octotune warm-up does it beforehand)"
)
EVERY_S = 10.0


@contextmanager
def announced_compilation(say: Callable[[str], None]) -> Iterator[None]:
    """Call `say` with one line when something compiles in here, and every ten seconds of it."""
    from numba.core import event

    class Teller(event.Listener):
        def __init__(self) -> None:
            self.count = 0
            self.begin_s = self.said_s = 0.0

        def on_start(self, _: Any) -> None:
            if not self.said_s:
                self.begin_s = self.said_s = time.monotonic()
                say(NOTICE)

        def on_end(self, _: Any) -> None:
            self.count += 1
            now = time.monotonic()
            if now - self.said_s >= EVERY_S:
                self.said_s = now
                say(f"compiling: {self.count} functions in {now - self.begin_s:.0f} s")

    teller = Teller()
    event.register("numba:compile", teller)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        event.unregister("numba:compile", teller)  # type: ignore[no-untyped-call]
