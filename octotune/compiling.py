"""Say that code is being compiled, when it is.

The kernels are compiled on their first call on a machine and kept beside their sources; numba
itself tells when it compiles rather than loads, so that nobody waits without knowing why.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

NOTICE = "compiling for this machine; this happens once, and takes up to 20 seconds"


@contextmanager
def announced_compilation(say: Callable[[str], None]) -> Iterator[None]:
    """Call `say` with one line when something compiles for the first time in here."""
    from numba.core import event

    class Once(event.Listener):
        def __init__(self) -> None:
            self.said = False

        def on_start(self, _: Any) -> None:
            if not self.said:
                self.said = True
                say(NOTICE)

        def on_end(self, _: Any) -> None:
            pass

    listener = Once()
    event.register("numba:compile", listener)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        event.unregister("numba:compile", listener)  # type: ignore[no-untyped-call]
