"""Rounds of walks: many tried for a short time, each cooled to the end, the best heated again.

Walks of one start end as far apart as those of different starts; so a cycle begins with many, and
in rungs (successive halving, Jamieson and Talwalkar 2016, arXiv:1502.07943) the worst are given
up. Later cycles start from the best walks of the last one, or anew: half from new sketches, or,
after the quick cycle, as that one did.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from octotune.tune.diagnose import Diagnosis
from octotune.tune.genome import STRICT, copy_genome
from octotune.tune.islands import Walk
from octotune.tune.moves import STRUCTURAL
from octotune.tune.opening import SKETCHES_PART, try_sketches
from octotune.tune.start import Seed, different

if TYPE_CHECKING:
    from octotune.tune.search import Search

WALK = "walk"
# parts of the walks' time, and of their number
RUNG_ENDS = (0.4, 0.7, 1.0)
RUNG_WALKS = (1.0, 0.25, 0.07)
RUNG_HEAT = 0.6  # of each rung against the last one, and of each cycle
HEATS = (1.0, 0.5)  # in turn: how hot is best depends on the problem and on how long a walk is
MORE_RULES = (0.15, 0.15, 0.6, 0.6)  # in turn, for the same reason
LEAST_WALKS = 2
FITTED_PART = 8  # one of so many walks follows a published schedule
NUM_CARRIED = 4  # of one cycle's walks into the next, and of new sketches
NEW_SKETCHES, NEW_STARTS = 12, 24
START_SPREAD = 1.12  # starts this far above the best are taken only where there are no others


class Walking:
    """The walks of the current cycle."""

    def __init__(self, search: Search):
        self._search = search
        self._overhead = any(device.overhead_ns for device in search.cluster.devices)
        self._live: list[Walk] = []
        self._given_up: list[Walk] = []
        self._rung = 0
        self._reheated = 0  # cycles since one began anew
        self._carried: list[Seed] = []

    @property
    def any(self) -> bool:
        """Whether the cycle has walks."""
        return bool(self._live)

    @property
    def by_step(self) -> list[Walk]:
        """The cycle's walks, those given up included, best first."""
        return sorted((*self._live, *self._given_up), key=lambda walk: walk.best_ns)

    def begin(self, diagnosis: Diagnosis, *, fresh: bool, elsewhere: bool = False) -> None:
        """Start from seeds of different stage counts, or, if not `fresh`, from the best so far.

        From the second cycle on there are new sketches; `elsewhere`: half start from these.

        Most walks pick among what is ready, which gains most; where memory binds, some follow a
        pattern whatever comes: the rhythm of the best plan, and the best pattern seeds. Few follow
        published schedules: their steps are short from the start, but so alike that most walks
        would begin in one place.
        """
        search, settings = self._search, self._search.settings
        patterns = settings.num_patterns if diagnosis.binding else 0
        chosen = search.rhythms(search.best_so_far())[:1] if patterns else []
        self._reheated = 0 if fresh else self._reheated + 1
        new = NEW_STARTS if fresh else NEW_SKETCHES
        part = search.budget.spent() + SKETCHES_PART
        sketches = try_sketches(search, new, part) if self._carried else []
        if self._carried and not fresh:
            starts = [*self._carried, *chosen, *sketches[:NUM_CARRIED]]
            self._walk_from(starts, settings.num_walks // 2)
            return
        chosen += different(search.fitted, settings.num_walks // FITTED_PART)
        if elsewhere:
            chosen += different(_near(sketches, search.seeds[:1]), settings.num_walks // 2)
        for strict, count in ((1, patterns - 1), (0, settings.num_walks)):
            of_kind = [seed for seed in search.seeds if seed.genome.meta[STRICT] == strict]
            near = _near(of_kind, of_kind[:1])
            chosen += different(near, min(count, settings.num_walks - len(chosen)))
        self._walk_from(chosen, settings.num_walks)

    def _walk_from(self, seeds: Sequence[Seed], count: int) -> None:
        """Start walks; the same seed may be walked from with other random numbers."""
        search = self._search
        ways = zip(range(count), cycle(seeds), cycle(HEATS), cycle(MORE_RULES), strict=False)
        for _, seed, heat, more in ways:
            rng = search.island_rng()
            walk = Walk(search.world, seed.genome, seed.step_ns, rng, seed.source, heat, more)
            self._live.append(walk)

    def round(self, diagnosis: Diagnosis, part: float) -> None:
        """Advance every walk by a slice; `part` of the cycle's walks is over."""
        search = self._search
        rung = min(int(np.searchsorted(RUNG_ENDS, part, side="right")), len(RUNG_ENDS) - 1)
        if rung > self._rung:
            self._climb(rung)
        begin = RUNG_ENDS[rung - 1] if rung else 0.0
        hot = search.settings.walk_hot * RUNG_HEAT ** (rung + self._reheated)
        within = (part - begin) / (RUNG_ENDS[rung] - begin)
        cold = search.settings.walk_cold
        before = sum(walk.evaluations for walk in self._live)

        def advance(walk: Walk) -> None:
            weights = diagnosis.weights(strict=walk.strict, overhead=self._overhead)
            if search.stages is not None:
                weights[:STRUCTURAL] = 0.0
            temperature = cooled(walk.heat * hot, cold, within)
            walk.run_slice(temperature, weights, diagnosis.repair_slack())

        search.side_by_side(advance, self._live)
        search.budget.evaluations += sum(walk.evaluations for walk in self._live) - before
        for walk in self._live:
            if walk.best_ns < walk.judged_ns and search.worth(walk.best_ns):
                walk.judged_ns = walk.best_ns
                search.judge(walk.best, walk.schedule(), WALK)
        search.tell(WALK)

    def _climb(self, rung: int) -> None:
        """Give up the worst walks; the others go on from their best."""
        self._rung = rung
        self._live.sort(key=lambda walk: walk.best_ns)
        count = max(LEAST_WALKS, round(self._search.settings.num_walks * RUNG_WALKS[rung]))
        self._given_up += self._live[count:]
        self._live = self._live[:count]
        for walk, heat in zip(self._live, cycle(HEATS), strict=False):
            walk.restart(heat)

    def end_cycle(self) -> None:
        """Keep the best for the next cycle."""
        self.keep_finalists()
        walked = [
            Seed(step_ns=walk.best_ns, source=WALK, genome=copy_genome(walk.best))
            for walk in self.by_step[:NUM_CARRIED]
        ]
        best_first = sorted([*self._carried, *walked], key=lambda seed: seed.step_ns)
        self._carried = best_first[:NUM_CARRIED]
        self._live, self._given_up, self._rung = [], [], 0

    def keep_finalists(self) -> None:
        """Make finalists of the walks about as good as the best plan; note what moves gained."""
        search = self._search
        most = search.best_so_far().step_ns * (1.0 + search.settings.stage_tolerance)
        for walk in (*self._live, *self._given_up):
            if walk.best_ns <= most:
                made = search.made(walk.best, walk.schedule(), WALK)
                search.finalists += [made] if made is not None else []
            for name, gain in walk.gains_ns.items():
                search.move_gains_ns[name] = search.move_gains_ns.get(name, 0) + gain


def _near(seeds: Sequence[Seed], best: Sequence[Seed]) -> list[Seed]:
    """Return the seeds that are not far above the best one."""
    return [one for one in seeds if one.step_ns <= best[0].step_ns * START_SPREAD]


def cooled(hot: float, cold: float, part: float) -> float:
    """Return a temperature that falls geometrically."""
    return float(hot * (cold / hot) ** min(1.0, max(0.0, part)))
