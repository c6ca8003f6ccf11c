"""The rounds after the start: walks and polishes in cycles, as the course has it."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from octotune.tune.course import Course
from octotune.tune.diagnose import Diagnosis
from octotune.tune.outer import OuterChoices
from octotune.tune.polishing import Polishing
from octotune.tune.walking import WALK, Walking

if TYPE_CHECKING:
    from octotune.tune.search import Search

POINTLESS_WALK_SHARE = 0.95  # of the cycle after polishes that had nothing to find


class Rounds:
    """A search's cycles; on leaving, whatever the reason, its islands' best become finalists."""

    def __init__(self, search: Search):
        self._search = search
        self._course = Course(quick=not search.large)
        self._walking = Walking(search)
        self._polishing = Polishing(search)
        self._outer = OuterChoices(search.settings, search.seed)
        self._nothing_to_try = False

    def __enter__(self) -> Rounds:
        self._course.begin(self._search.budget.spent(), self._search.budget.evaluations)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._polishing.keep_finalists()
        self._walking.keep_finalists()

    def can_try(self) -> bool:
        """Whether there is anything left to try."""
        return not self._nothing_to_try

    def walks_next(self) -> bool:
        """Whether this round is one of walks, not of polishes; cycles begin and end here."""
        budget, course = self._search.budget, self._course
        course.num_actions = self._search.best_so_far().schedule.num_actions
        spent, evaluations, share = budget.spent(), budget.evaluations, self._walk_share()
        if course.walks_ended is not None and course.hands_over(spent):
            self._end_cycle()
            course.begin(spent, evaluations)
            self._search.settings = self._outer.settings(fresh=course.fresh)
            share = self._walk_share()
        if course.walks_ended is None and course.walks_part(spent, share, evaluations) >= 1.0:
            course.end_walks(spent, share)
        return course.walks_ended is None

    def walk(self, diagnosis: Diagnosis) -> None:
        """Run one round of walks; the worst are given up as the cycle goes on."""
        self._course.binding = diagnosis.binding
        budget, course = self._search.budget, self._course
        part = course.walks_part(budget.spent(), self._walk_share(), budget.evaluations)
        if not self._walking.any:
            self._walking.begin(diagnosis, fresh=course.fresh, elsewhere=course.elsewhere)
        if self._walking.any:
            self._walking.round(diagnosis, part)
        else:
            course.end_walks(budget.spent())

    def polish(self) -> None:
        """Run one round of polishes, started from the best plans of different kinds."""
        budget = self._search.budget
        if not self._polishing.any:
            course = self._course
            alone = course.binding and course.full
            self._polishing.begin(
                self._walking.by_step,
                course.binding,
                drafts=alone and not course.quick,  # in a short search walks gain more
                elsewhere=alone and course.elsewhere,
            )
            self._course.end_walks(budget.spent(), self._walk_share())  # drafts took their time
        part = self._course.polish_part(budget.spent())
        can_gain, gained = self._polishing.round(part)
        if gained:
            self._course.note_gain(budget.spent())
        self._course.pointless = not can_gain
        self._nothing_to_try = not can_gain and not self._walking.any

    def _end_cycle(self) -> None:
        reached = [walk.best_ns for walk in self._walking.by_step[:1]]
        if reached and not self._course.quick:
            self._outer.rate(min(reached + self._polishing.steps_of(WALK)))
        self._polishing.end_cycle()
        self._walking.end_cycle()

    def _walk_share(self) -> float:
        settings = self._search.settings
        if self._course.pointless:
            return POINTLESS_WALK_SHARE
        if self._search.large:
            return 1.0 - settings.polish_share_large
        return 1.0 - (
            settings.polish_share_binding if self._course.binding else settings.polish_share
        )
