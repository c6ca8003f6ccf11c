"""Rounds of polishes: the order itself is annealed and justified, from plans of different kinds.

Where memory binds, periodic steady states of the best partitions are starts, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octotune.contract import Stage, build_costs
from octotune.steady import modulo_schedule
from octotune.tune.islands import Polish, Walk, tokens_of
from octotune.tune.plans import Candidate, judge
from octotune.tune.start import distinct
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
# parts of the time from hot to cold: then half of the polishes go on, then two
HALF_FROM, TWO_FROM = 0.2, 0.5


class Polishing:
    """The polishes of the current cycle."""

    def __init__(self, search: Search):
        self._search = search
        self._polishes: list[Polish | Tighten] = []
        self._binding = False
        self._steadied: set[tuple[Stage, ...]] = set()  # steady states are solved once each

    @property
    def any(self) -> bool:
        """Whether the cycle has polishes."""
        return bool(self._polishes)

    def round(self, part: float) -> tuple[bool, bool]:
        """Advance the polishes by a slice; return whether any can gain, and whether one did.

        `part` tells how far they are from hot to cold.
        """
        search, settings = self._search, self._search.settings
        open_ = [one for one in self._polishes if one.best_ns > one.bound_ns()]
        if not open_:
            return False, False
        open_.sort(key=lambda polish: polish.best_ns)
        count = len(open_)
        if part > HALF_FROM:
            count = 2 if part > TWO_FROM else max(2, count // 2)
        live = open_[:count]
        hot, structure_share = settings.polish_hot, settings.structure_share
        if self._binding:
            hot, structure_share = settings.polish_hot_binding, settings.structure_share_binding
        if search.stages is not None:
            structure_share = 0.0
        temperature = cooled(hot, settings.polish_cold, part)
        before = sum(polish.evaluations for polish in live)
        search.side_by_side(lambda polish: polish.run_slice(temperature, structure_share), live)
        search.budget.evaluations += sum(polish.evaluations for polish in live) - before
        step_ns = search.best_so_far().step_ns
        for polish in live:
            if polish.best_ns < polish.judged_ns and search.worth(polish.best_ns):
                polish.judged_ns = polish.best_ns
                search.judge(*polish.result(), POLISH)
        search.tell(POLISH)
        return True, search.best_so_far().step_ns < step_ns

    def begin(self, walks: Sequence[Walk], binding: bool) -> None:
        """Start from the best plans, of different origin where they are about as good."""
        search, settings = self._search, self._search.settings
        self._binding = binding
        plans = [search.best_so_far()]
        for walk in walks[: 2 * settings.num_polishes]:
            made = search.made(walk.best, walk.schedule(), WALK)
            if made is not None:
                plans.append(made)
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
                self._polishes.append(tight)
                tightened -= 1
            polish = self._polish_of(plan) if polishes else None
            if polish is not None:
                self._polishes.append(polish)
                polishes -= 1
            if not polishes and not tightened:
                break
        # the same plan may be polished with other random numbers
        for _ in range(polishes):
            polish = self._polish_of(search.best_so_far())
            self._polishes += [] if polish is None else [polish]

    def _polish_of(self, plan: Candidate) -> Polish | None:
        world = self._search.world
        tokens = tokens_of(world, plan)
        if tokens is None:
            return None
        polish = Polish(world, tokens, self._search.island_rng(), plan.source)
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
        return [polish.best_ns for polish in self._polishes if polish.source == source]

    def end_cycle(self) -> None:
        """Let the polishes go."""
        self.keep_finalists()
        self._polishes = []

    def keep_finalists(self) -> None:
        """Make finalists of the polishes about as good as the best plan."""
        search = self._search
        most = search.best_so_far().step_ns * (1.0 + search.settings.stage_tolerance)
        for polish in self._polishes:
            if polish.best_ns <= most:
                made = search.made(*polish.result(), POLISH)
                search.finalists += [made] if made is not None else []
