"""Rounds of polishes: the order itself is annealed and justified, from plans of different kinds.

Where memory binds, sketches and periodic steady states of the best partitions are starts, too. In
rungs the worst are given up; the others anneal anew from their best, less hot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from octotune.contract import Stage, build_costs
from octotune.steady import modulo_schedule
from octotune.tune.islands import Polish, Walk, tokens_of
from octotune.tune.plans import Candidate, judge
from octotune.tune.sketch import SKETCH
from octotune.tune.start import Seed, different, distinct, rule_schedule
from octotune.tune.tighten import Tighten
from octotune.tune.walking import WALK, cooled

if TYPE_CHECKING:
    from octotune.tune.search import Search

POLISH, STEADY = "order", "steady states"
STEADY_TIME_S = 0.5  # the solver's deterministic seconds for one; it takes some eight times that
STEADY_PART = 0.008  # of the time limit
STEADY_LIMIT_S = 20.0  # time limit for each steady state tried: one takes some seconds in all
MOST_STEADY_ACTIONS = 20_000
NUM_STEADY = 2
STEADY_LATE = 0.85  # of a time limit: no solver is begun that might pass it
# Drafts: sketches whose orders are annealed at once, where memory binds. The list scheduler's
# orders of them are 5 to 10 % longer, of some more than of others: its step does not tell much.
DRAFT = "drafts"
NUM_DRAFTS, DRAFTS_SHARE, DRAFT_EVALUATIONS = 16, 0.2, 5_000
DRAFT_HEATS = (1.0, 2.0)  # in turn: how hot is best depends on the problem
# parts of the time, and of their number; each anneals anew from the best
RUNG_ENDS = (0.35, 0.6, 0.8, 1.0)
RUNG_POLISHES = (1.0, 0.33, 0.16, 0.08)
RUNG_HEAT = 0.6  # of each rung against the last one
LEAST_POLISHES = 2
COLD_FROM = 0.85  # of a rung


class Polishing:
    """The polishes of the current cycle."""

    def __init__(self, search: Search):
        self._search = search
        self.polishes: list[Polish | Tighten] = []
        self.live: list[Polish | Tighten] = []
        self._rung = 0
        self._binding = False
        self._drafted: list[Seed] = []
        self._steadied: set[tuple[Stage, ...]] = set()  # steady states are solved once each

    @property
    def any(self) -> bool:
        """Whether the cycle has polishes."""
        return bool(self.polishes)

    def round(self, part: float) -> tuple[bool, bool]:
        """Advance the polishes by a slice; return whether any can gain, and whether one did.

        `part` tells how far they are, from the first rung to the end of the last.
        """
        search, settings = self._search, self._search.settings
        rung = min(int(np.searchsorted(RUNG_ENDS, part, side="right")), len(RUNG_ENDS) - 1)
        if rung > self._rung:
            self._climb(rung)
        hot, structure_share = settings.polish_hot, settings.structure_share
        if self._binding:
            hot, structure_share = settings.polish_hot_binding, settings.structure_share_binding
        if search.stages is not None:
            structure_share = 0.0
        live = [one for one in self.live if one.best_ns > one.bound_ns()]
        if not live:
            return False, False
        begin = RUNG_ENDS[rung - 1] if rung else 0.0
        within = (part - begin) / (RUNG_ENDS[rung] - begin) / COLD_FROM
        temperature = cooled(hot * RUNG_HEAT**rung, settings.polish_cold, within)
        before = sum(polish.evaluations for polish in live)

        def advance(polish: Polish | Tighten) -> None:
            if not search.late(1.0):
                polish.run_slice(polish.heat * temperature, structure_share)

        search.side_by_side(advance, live)
        search.budget.evaluations += sum(polish.evaluations for polish in live) - before
        step_ns = search.best_so_far().step_ns
        for polish in live:
            if polish.best_ns < polish.judged_ns and search.worth(polish.best_ns):
                polish.judged_ns = polish.best_ns
                search.judge(*polish.result(), POLISH)
        search.tell(POLISH)
        return True, search.best_so_far().step_ns < step_ns

    def _climb(self, rung: int) -> None:
        """Give up the worst; the others go on from their best."""
        self._rung = rung
        count = max(LEAST_POLISHES, round(len(self.polishes) * RUNG_POLISHES[rung]))
        self.live = sorted(self.live, key=lambda polish: polish.best_ns)[:count]
        for polish in list(self.live):
            polish.restart()
            if isinstance(polish, Tighten):  # what it has found, others go on from
                made = self._search.made(*polish.result(), polish.source)
                other = None if made is None else self._polish_of(made)
                self.live += [] if other is None else [other]
                self.polishes += [] if other is None else [other]

    def begin(
        self, walks: Sequence[Walk], binding: bool, drafts: bool, *, elsewhere: bool = False
    ) -> None:
        """Start from the best plans, of different origin where they are about as good.

        `elsewhere`: from this cycle's own alone. Those of earlier cycles have been polished; what
        has not been is longer as yet, and would have no turn beside them.
        """
        search, settings = self._search, self._search.settings
        self._binding = binding
        plans = [] if elsewhere else [search.best_so_far()]
        for walk in walks[: 2 * settings.num_polishes]:
            made = search.made(walk.best, walk.schedule(), WALK)
            if made is not None:
                plans.append(made)
        if not elsewhere or not plans:
            plans += [one.candidate for one in search.published if one.candidate is not None]
            plans += search.finalists
        if binding and not search.late(STEADY_LATE):
            limit = search.budget.time_limit_s
            most = NUM_STEADY if limit is None else int(limit / STEADY_LIMIT_S)
            chosen = distinct(plans, min(NUM_STEADY, most))
            plans += self._steady_plans([p for p in chosen if p.stages not in self._steadied])
            self._steadied |= {plan.stages for plan in chosen}
        plans.sort(key=lambda plan: plan.step_ns)
        polishes = 0 if search.large else settings.num_polishes
        tightened = settings.num_polishes if search.large else settings.num_tightened
        seen: set[Any] = set()
        for plan in plans:
            if (plan.stages, plan.step_ns) in seen:
                continue
            seen.add((plan.stages, plan.step_ns))
            tight = search.tightened(plan) if tightened else None
            if tight is not None:
                self.polishes.append(tight)
                tightened -= 1
            polish = self._polish_of(plan) if polishes else None
            if polish is not None:
                self.polishes.append(polish)
                polishes -= 1
            if not polishes and not tightened:
                break
        # the same plan may be polished with other random numbers
        for _ in range(polishes):
            polish = self._polish_of(search.best_so_far())
            self.polishes += [] if polish is None else [polish]
        if drafts:
            self.polishes += self._drafts()
        self.live, self._rung = list(self.polishes), 0

    def _drafts(self) -> list[Polish]:
        """Return polishes of the best sketches of different stage counts."""
        search, count = self._search, NUM_DRAFTS
        if search.budget.max_evaluations is not None:
            left = search.budget.max_evaluations - search.budget.evaluations
            count = min(count, int(DRAFTS_SHARE * left / DRAFT_EVALUATIONS))
        sketches = [
            seed
            for seed in search.seeds
            if seed.source == SKETCH and all(seed is not one for one in self._drafted)
        ]
        drafts: list[Polish] = []
        for seed in different(sketches, count):
            self._drafted.append(seed)
            schedule = rule_schedule(search.world, seed.genome)
            plan = None if schedule is None else search.made(seed.genome, schedule, DRAFT)
            heat = DRAFT_HEATS[len(drafts) % len(DRAFT_HEATS)]
            polish = None if plan is None else self._polish_of(plan, heat)
            drafts += [] if polish is None else [polish]
        return drafts

    def _polish_of(self, plan: Candidate, heat: float = 1.0) -> Polish | None:
        world = self._search.world
        tokens = tokens_of(world, plan)
        if tokens is None:
            return None
        rng = self._search.island_rng()
        polish = Polish(world, tokens, rng, plan.source, heat, binding=self._binding)
        return polish if polish.fits else None

    def _steady_plans(self, plans: Sequence[Candidate]) -> list[Candidate]:
        """Return the periodic steady states of given partitions and placements."""
        search = self._search
        workload, cluster, m = search.workload, search.cluster, search.num_microbatches

        def steady(plan: Candidate) -> Candidate | None:
            costs = build_costs(workload, cluster, plan.stages, m)
            if plan.schedule.num_actions > MOST_STEADY_ACTIONS:
                return None
            limit = STEADY_TIME_S
            if search.budget.time_limit_s is not None:
                limit = min(limit, STEADY_PART * search.budget.time_limit_s)
            schedule = modulo_schedule(costs, time_limit_s=limit, seed=search.seed)
            if schedule is None:
                return None
            return judge(workload, cluster, m, plan.stages, schedule, STEADY)

        found = []
        for future in [search.pool.submit(steady, plan) for plan in plans]:
            candidate = future.result()
            if candidate is not None:
                search.offer(candidate, STEADY)
                found.append(candidate)
        search.budget.evaluations += len(plans)
        return found

    def steps_of(self, source: str) -> list[int]:
        """Return the steps of the polishes that began with a plan of a source."""
        return [polish.best_ns for polish in self.polishes if polish.source == source]

    def end_cycle(self) -> None:
        """Let the polishes go."""
        self.keep_finalists()
        self.polishes, self.live = [], []

    def keep_finalists(self) -> None:
        """Make finalists of the polishes about as good as the best plan."""
        search = self._search
        most = search.best_so_far().step_ns * (1.0 + search.settings.stage_tolerance)
        for polish in self.polishes:
            if polish.best_ns <= most:
                made = search.made(*polish.result(), POLISH)
                search.finalists += [made] if made is not None else []
