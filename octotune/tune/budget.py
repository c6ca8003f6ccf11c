"""How much searching is left, in evaluations or in seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

from octotune.errors import MalformedError

DEFAULT_TIME_LIMIT_S = 20.0


class Budget:
    """Counts evaluations and seconds; the fraction spent is that of the limit nearer its end.

    With `max_evaluations` alone no clock is read for any decision, so that the same seed gives
    the same plan. With neither limit there is a default time limit. The clock gives seconds:
    `time.process_time` counts the search's own work where other programs share the machine.
    """

    def __init__(
        self,
        time_limit_s: float | None,
        max_evaluations: int | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if time_limit_s is not None and not time_limit_s > 0:
            raise MalformedError(f"time_limit_s is {time_limit_s}; it is above 0")
        if max_evaluations is not None and max_evaluations < 1:
            raise MalformedError(f"max_evaluations is {max_evaluations}; it is at least 1")
        if time_limit_s is None and max_evaluations is None:
            time_limit_s = DEFAULT_TIME_LIMIT_S
        self.time_limit_s = time_limit_s
        self.max_evaluations = max_evaluations
        self.evaluations = 0
        self._clock = clock
        self._begin = clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return self._clock() - self._begin

    def spent(self) -> float:
        """Return the part of the budget that is spent; 1 and more: all."""
        parts = [0.0]
        if self.time_limit_s is not None:
            parts.append(self.elapsed_s / self.time_limit_s)
        if self.max_evaluations is not None:
            parts.append(self.evaluations / self.max_evaluations)
        return max(parts)

    def part(self, share: float) -> Budget:
        """Return a budget of its own, with a share of this one's limits."""
        return Budget(
            None if self.time_limit_s is None else self.time_limit_s * share,
            None if self.max_evaluations is None else max(1, int(self.max_evaluations * share)),
            self._clock,
        )
