"""The course of a search: walks and polishes in turn, each handing over when it is done.

A cycle is walks, then polishes. Walks have a share of what is left of the budget. Polishes go on
while they find something: once they have found nothing for a part of their time, a new cycle
begins, unless so little is left that they may as well have it. Where nothing is left to find for
them, because their plans are as short as any order makes them, it begins at once.
"""

from __future__ import annotations

PATIENCE = 0.15  # of the polishes' planned time: so long without a gain, and they are over
LEAST_CYCLE = 0.1  # of the budget: less is not worth a new cycle
COOLING = 0.3  # of the polishes' planned time until they are cold
COOLING_BINDING = 0.8


class Course:
    """Where in its cycles a search is; all times are parts of the budget spent."""

    def __init__(self) -> None:
        self.num_cycles = 0
        self.walks_ended: float | None = None
        self.pointless = False  # no order can shorten the last polishes' plans
        self.cooling = COOLING
        self._begin = 0.0
        self._gained = 0.0

    def begin(self, spent: float) -> None:
        """Begin a cycle, with walks."""
        self.num_cycles += 1
        self.walks_ended = None
        self._begin = spent

    def walks_part(self, spent: float, share: float) -> float:
        """Return how far the walks are, 1 when they are over; `share` of the cycle is theirs."""
        return (spent - self._begin) / max(1e-9, share * (1.0 - self._begin))

    def end_walks(self, spent: float) -> None:
        """Go on with polishes."""
        self.walks_ended = self._gained = spent
        self.pointless = False

    def polish_part(self, spent: float) -> float:
        """Return how far the polishes are from hot (0) to cold (1)."""
        assert self.walks_ended is not None
        planned = max(1e-9, 1.0 - self.walks_ended)
        return min(1.0, (spent - self.walks_ended) / (self.cooling * planned))

    def note_gain(self, spent: float) -> None:
        """Polishes have found something."""
        self._gained = spent

    def hands_over(self, spent: float) -> bool:
        """Whether the polishes have found nothing for long, and a new cycle is worth its time."""
        assert self.walks_ended is not None
        if self.pointless:
            return True
        patience = PATIENCE * (1.0 - self.walks_ended)
        cold = self.polish_part(spent) >= 1.0
        return cold and spent - self._gained > patience and spent < 1.0 - LEAST_CYCLE
