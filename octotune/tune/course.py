"""The course of a search: walks and polishes in turn, each handing over when it is done.

A cycle is walks, then polishes. Walks have a share of what is left of the budget, and no more
than so many evaluations: longer walks end where they would have, others elsewhere, so that what
is left is better spent on a cycle that begins anew. The very first cycle is a quick one, so that
there is a good plan soon. Polishes go on while they find something: once they have found nothing
for a part of their time, a new cycle begins, unless so little is left that they may as well have
it. Where nothing is left to find for them, because their plans are as short as any order makes
them, it begins at once.
"""

from __future__ import annotations

PATIENCE = 0.15  # of the polishes' planned time: so long without a gain, and they are over
LEAST_CYCLE = 0.1  # of the budget: less is not worth a new cycle
COOLING = 0.3  # of the polishes' planned time until they are cold
COOLING_BINDING = 0.8
# of a cycle's walks: where memory binds, polishes of sketches gain as much in their time, and so
# have more of it than walks that have had so many
CYCLE_EVALUATIONS, CYCLE_EVALUATIONS_BINDING = 1_000_000, 350_000
# and no more than have so many actions in all: where an evaluation takes long, too
CYCLE_ACTIONS, CYCLE_ACTIONS_BINDING = 800_000_000, 400_000_000
POLISHES_BINDING = 1.5  # of the time of such walks
QUICK_EVALUATIONS, QUICK_PART = 240_000, 0.05  # of the quick cycle's, and of the budget
FRESH_PART = 0.7  # of the last cycle's length: with less left, the best so far are gone on with


class Course:
    """Where in its cycles a search is; all times are parts of the budget spent."""

    def __init__(self, *, quick: bool = False) -> None:
        self.num_cycles = 0
        self.quick = quick  # whether the first cycle is to be, then whether this one is
        self.elsewhere = False  # whether this one is not to begin where the last one did
        self.walks_ended: float | None = None
        self.pointless = False  # no order can shorten the last polishes' plans
        self.binding = False  # memory does
        self.num_actions = 1  # of an evaluation, about
        self.fresh = True  # whether this cycle begins anew
        self.full = False  # its walks have had all that they are given, not just all that is left
        self._begin = 0.0
        self._begin_evaluations = 0
        self._gained = 0.0
        self._planned = 1.0

    def begin(self, spent: float, evaluations: int = 0) -> None:
        """Begin a cycle, with walks; `evaluations` were made before it."""
        left, length = 1.0 - spent, spent - self._begin
        self.fresh = self.num_cycles == 0 or (self.full and left > FRESH_PART * length)
        self.elsewhere = self.fresh and self.num_cycles > 0 and not self.quick
        self.quick = self.quick and self.num_cycles == 0
        self.num_cycles += 1
        self.full = False
        self._begin_evaluations = evaluations
        self.walks_ended = None
        self._begin = spent

    def walks_part(self, spent: float, share: float, evaluations: int = 0) -> float:
        """Return how far the walks are, 1 when they are over; `share` of the cycle is theirs."""
        most = share * (1.0 - self._begin)
        most_evaluations = min(CYCLE_EVALUATIONS, CYCLE_ACTIONS // self.num_actions)
        if self.binding:
            most_evaluations = CYCLE_ACTIONS_BINDING // self.num_actions
            most_evaluations = min(CYCLE_EVALUATIONS_BINDING, most_evaluations)
        if self.quick:
            most, most_evaluations = min(most, QUICK_PART), QUICK_EVALUATIONS
        by_time = (spent - self._begin) / max(1e-9, most)
        by_work = (evaluations - self._begin_evaluations) / most_evaluations
        self.full = by_work >= 1.0 or (self.quick and by_time >= 1.0)
        return max(by_time, by_work)

    def end_walks(self, spent: float, share: float = 0.0) -> None:
        """Go on with polishes, whose share is the rest."""
        self.walks_ended = self._gained = spent
        self.pointless = False
        self._planned = 1.0 - spent
        if self.full and share > 0.0:
            walked = spent - self._begin
            ratio = POLISHES_BINDING if self.binding else (1.0 - share) / share
            self._planned = min(self._planned, walked * ratio)

    def polish_part(self, spent: float) -> float:
        """Return how far the polishes are from hot (0) to cold (1)."""
        assert self.walks_ended is not None
        cooling = COOLING_BINDING if self.binding else COOLING
        planned = max(1e-9, cooling * self._planned)
        return min(1.0, (spent - self.walks_ended) / planned)

    def note_gain(self, spent: float) -> None:
        """Polishes have found something."""
        self._gained = spent

    def hands_over(self, spent: float) -> bool:
        """Whether the polishes have found nothing for long, and a new cycle is worth its time."""
        assert self.walks_ended is not None
        if self.pointless:
            return True
        patience = PATIENCE * self._planned
        cold = self.polish_part(spent) >= 1.0
        return cold and spent - self._gained > patience and spent < 1.0 - LEAST_CYCLE
