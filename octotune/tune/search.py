"""The state of one search: the best plan, the islands, and the budget.

`octotune.tune.loop` tells the story; this module has the steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from types import TracebackType
from typing import Any

import numpy as np

from octotune.bounds import Bound
from octotune.bounds.fixed import fixed_bound
from octotune.bounds.joint import lower_bound
from octotune.contract import Cluster, Stage, Workload, build_costs
from octotune.errors import InfeasibleError
from octotune.steady import modulo_schedule
from octotune.tune.balance import island_rng
from octotune.tune.baselines import Baseline
from octotune.tune.budget import Budget
from octotune.tune.course import Course
from octotune.tune.diagnose import Diagnosis, diagnose
from octotune.tune.feasible import packed_genomes, too_small
from octotune.tune.fit import fitted_genomes
from octotune.tune.genome import (
    STRICT,
    Genome,
    capacity_for,
    copy_genome,
    empty_shape,
)
from octotune.tune.islands import Polish, Walk, tokens_of
from octotune.tune.moves import RECOMPUTE, STRUCTURAL
from octotune.tune.plans import Candidate, genome_stages, judge
from octotune.tune.problem import World, make_world
from octotune.tune.scheduler import device_bound, shape_stages
from octotune.tune.seeds import placement_seeds
from octotune.tune.settings import Settings
from octotune.tune.start import (
    LARGE_ACTIONS,
    Seed,
    different,
    distinct,
    given_genome,
    ran,
    rule_schedule,
    seeds_of,
)
from octotune.tune.tighten import Tighten
from simulator.actions import Schedule
from simulator.engine import simulate

Progress = Callable[[str, int, float], None]

BOUND_TIME_S = 4.0  # the solver's deterministic seconds
STEADY_TIME_S = 0.5  # the same, for one steady state; it takes some eight times that
STEADY_PART = 0.008  # of the time limit
STEADY_LIMIT_S = 20.0  # time limit for each steady state tried: one takes some seconds in all
MOST_STEADY_ACTIONS = 20_000
NUM_STEADY = 2
STEADY = "steady states"
WALK, POLISH = "walk", "order"

# Walks of one start end as far apart as those of different starts: many are tried for a short
# time, each cooled to the end, and the best are heated again. Parts of the walks' time, and of
# their number.
RUNG_ENDS = (0.4, 0.7, 1.0)
RUNG_WALKS = (1.0, 0.25, 0.07)
RUNG_HEAT = 0.6
POINTLESS_WALK_SHARE = 0.95  # in the cycle after polishes that had nothing to find
NUM_CARRIED = 4  # of one cycle's walks into the next
START_SPREAD = 1.12  # starts this far above the best are taken only where there are no others


class Search:
    """One search; a context manager, because it owns threads."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        num_microbatches: int,
        seed: int,
        budget: Budget,
        workers: int | None,
        progress: Progress | None,
        settings: Settings,
        stages: Sequence[Stage] | None = None,
    ):
        self.workload = workload
        self.cluster = cluster
        self.num_microbatches = num_microbatches
        self.seed = seed
        self.budget = budget
        self.settings = settings
        self.stages = None if stages is None else tuple(stages)
        self.progress = progress
        self.world: World = make_world(workload, cluster, num_microbatches)
        self.best: Candidate | None = None
        self.finalists: list[Candidate] = []  # the best of each island, and of each family
        self.published: list[Baseline] = []
        self.gains_ns: dict[str, int] = {}
        self.move_gains_ns: dict[str, int] = {}
        self.lower_bound_ns: int | None = None
        self.bound_reason = ""
        self.interrupted = False
        self._seeds: list[Seed] = []
        self._walks: list[Walk] = []
        self._polishes: list[Polish | Tighten] = []
        self._given_up: list[Walk] = []
        self._rung = 0
        self._islands = 0
        self._carried: list[Seed] = []
        self._course = Course()
        self._binding = False
        self._over = False  # nothing can be tried
        self._diagnosed: tuple[Candidate, Diagnosis] | None = None
        self._capacity = max(capacity_for(self.world), len(stages or ()))
        self._pool = ThreadPoolExecutor(max_workers=workers or os.cpu_count() or 1)
        self._prover = ThreadPoolExecutor(max_workers=1)
        self._bound = self._prover.submit(self._prove)

    def __enter__(self) -> Search:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Swallow Ctrl-C once there is a plan: the best so far is the result."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._keep_finalists()
        self._prover.shutdown(wait=False, cancel_futures=True)
        if kind is None:
            self._take_bound()
        self.interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        return self.interrupted and self.best is not None

    def goes_on(self) -> bool:
        """Whether the budget is not spent and the best plan not proven optimal."""
        best = self._best()
        # with evaluations alone as the limit, no decision hangs on when the proof comes in
        if self.lower_bound_ns is None and (
            self._bound.done() or self.budget.time_limit_s is None
        ):
            self._take_bound()
        return (
            self.budget.spent() < 1.0
            and not self._over
            and (self.lower_bound_ns is None or best.step_ns > self.lower_bound_ns)
        )

    # --- the start -----------------------------------------------------------------------------

    def try_seeds(self) -> None:
        """Run every rule on every placement seed, and keep the best of each pair."""
        placements = list(self._placements())
        for future in [self._pool.submit(self._seeds_of, genome) for genome in placements]:
            seeds, tried = future.result()
            self.budget.evaluations += tried
            self._seeds += seeds
            best = min(seeds, key=lambda seed: seed.step_ns, default=None)
            if best is not None and (self.best is None or best.step_ns < self.best.step_ns):
                schedule = rule_schedule(self.world, best.genome)
                assert schedule is not None  # the seed has run
                self._judge(best.genome, schedule, best.source)
            self._tell("seeds")
        if self.best is None and self.stages is not None:
            raise InfeasibleError(too_small(self.workload, self.cluster, self.stages))
        if self.best is None:
            for genome in packed_genomes(self.workload, self.cluster, self.world):
                schedule = rule_schedule(self.world, genome)
                if schedule is not None:
                    self._judge(genome, schedule, "packing")
                    break
        self._seeds.sort(key=lambda seed: (seed.step_ns, seed.num_stages))

    def _placements(self) -> Iterator[Genome]:
        if self.stages is None:
            rng = island_rng(self.seed, 0)
            yield from placement_seeds(self.world, self._capacity, rng)
        else:
            yield given_genome(self.world, self._capacity, self.stages)

    def _tightened(self, plan: Candidate) -> Tighten | None:
        tokens = tokens_of(self.world, plan)
        if tokens is None:
            return None
        self._islands += 1
        rng = island_rng(self.seed, self._islands)
        return Tighten(self.world, self.workload, self.cluster, plan, tokens.genome, rng)

    def _late(self) -> bool:
        """Whether what belongs to the start has no time left; evaluations do not count."""
        return self.budget.time_limit_s is not None and self.budget.spent() > 0.35

    def _seeds_of(self, genome: Genome) -> tuple[list[Seed], int]:
        limited = self.budget.time_limit_s is not None
        return seeds_of(
            self.world,
            genome,
            move=self.stages is None,
            late=lambda: limited and self.budget.spent() > 0.3,
        )

    def _rhythms(self, plan: Candidate) -> list[Seed]:
        """Return the rules that follow a plan, as seeds."""
        costs = build_costs(self.workload, self.cluster, plan.stages, self.num_microbatches)
        genomes = fitted_genomes(self.world, self._capacity, plan, simulate(plan.schedule, costs))
        self.budget.evaluations += len(genomes)
        return ran(self.world, genomes, plan.source)

    # --- the rounds ----------------------------------------------------------------------------

    def diagnose(self) -> Diagnosis:
        """Return where the time of the best plan goes."""
        best = self._best()
        if self._diagnosed is not None and self._diagnosed[0] is best:
            return self._diagnosed[1]
        tokens = tokens_of(self.world, best)
        assert tokens is not None
        shape = empty_shape(self.world, best.num_stages)
        shape_stages(self.world, tokens.genome, shape)
        costs = build_costs(self.workload, self.cluster, best.stages, self.num_microbatches)
        room = np.array([device.memory_bytes for device in self.cluster.devices])
        near = np.array(best.peak_bytes) > 0.9 * room
        diagnosis = diagnose(
            simulate(best.schedule, costs),
            device_bound(self.world, shape),
            binding=bool((near & (shape.tight == 1)).any()),
        )
        self._diagnosed = (best, diagnosis)
        return diagnosis

    def walks_next(self) -> bool:
        """Whether this round is one of walks not of polishes; cycles begin and end here."""
        spent, course = self.budget.spent(), self._course
        if course.walks_ended is not None and course.hands_over(spent):
            self._end_cycle()
            course.begin(spent)
        if course.num_cycles == 0:
            course.begin(spent)
        if course.walks_ended is None and course.walks_part(spent, self._walk_share()) >= 1.0:
            course.end_walks(spent)
        return course.walks_ended is None

    def walk(self, diagnosis: Diagnosis) -> None:
        """Run one round of walks; give up the worst as the cycle goes on."""
        self._binding = diagnosis.binding
        part = self._course.walks_part(self.budget.spent(), self._walk_share())
        if not self._walks:
            self._start_walks(diagnosis)
            if not self._walks:
                self._course.end_walks(self.budget.spent())
                return
        rung = min(int(np.searchsorted(RUNG_ENDS, part, side="right")), len(RUNG_ENDS) - 1)
        if rung > self._rung:
            self._climb(rung)
        live = self._walks
        begin = RUNG_ENDS[rung - 1] if rung else 0.0
        hot = self.settings.walk_hot * RUNG_HEAT ** (rung + self._course.num_cycles - 1)
        within = (part - begin) / (RUNG_ENDS[rung] - begin)
        temperature = _cooled(hot, self.settings.walk_cold, within)
        overhead = any(device.overhead_ns for device in self.cluster.devices)
        before = sum(walk.evaluations for walk in live)

        def advance(walk: Walk) -> None:
            weights = diagnosis.weights(strict=walk.strict, overhead=overhead)
            if self.stages is not None:
                weights[:STRUCTURAL] = 0.0
                weights[RECOMPUTE] = 0.0
            walk.run_slice(temperature, weights, diagnosis.repair_slack())

        self._side_by_side(advance, live)
        self.budget.evaluations += sum(walk.evaluations for walk in live) - before
        for walk in live:
            if walk.best_ns < walk.judged_ns and self._worth(walk.best_ns):
                walk.judged_ns = walk.best_ns
                self._judge(walk.best, walk.schedule(), WALK)
        self._tell(WALK)

    def polish(self, diagnosis: Diagnosis) -> None:
        """Run one round of polishes, started from the best plans of different kinds."""
        part = self._course.polish_part(self.budget.spent())
        if not self._polishes:
            self._start_polishes()
        open_ = [one for one in self._polishes if one.best_ns > one.bound_ns()]
        if not open_:
            self._course.pointless = True
            self._over = not self._walks
            return
        live = self._live(open_, part)
        settings = self.settings
        cut_share = settings.cut_share if self.stages is None else 0.0
        temperature = _cooled(settings.polish_hot, settings.polish_cold, part)
        before = sum(polish.evaluations for polish in live)
        self._side_by_side(lambda polish: polish.run_slice(temperature, cut_share), live)
        self.budget.evaluations += sum(polish.evaluations for polish in live) - before
        for polish in live:
            if polish.best_ns < polish.judged_ns and self._worth(polish.best_ns):
                polish.judged_ns = polish.best_ns
                genome, schedule = polish.result()
                before_ns = self._best().step_ns
                self._judge(genome, schedule, POLISH)
                if self._best().step_ns < before_ns:
                    self._course.note_gain(self.budget.spent())
        self._tell(POLISH)

    def _climb(self, rung: int) -> None:
        """Give up the worst walks; the others go on from their best."""
        self._rung = rung
        self._walks.sort(key=lambda walk: walk.best_ns)
        count = max(2, round(self.settings.num_walks * RUNG_WALKS[rung]))
        self._given_up += self._walks[count:]
        self._walks = self._walks[:count]
        for walk in self._walks:
            walk.restart()

    # --- inside --------------------------------------------------------------------------------

    def _prove(self) -> Bound:
        if self.stages is not None:
            costs = build_costs(self.workload, self.cluster, self.stages, self.num_microbatches)
            return fixed_bound(costs)
        return lower_bound(
            self.workload, self.cluster, self.num_microbatches, time_limit_s=BOUND_TIME_S
        )

    def _take_bound(self) -> None:
        bound = self._bound.result()
        self.lower_bound_ns, self.bound_reason = bound.ns, bound.reason

    def _best(self) -> Candidate:
        assert self.best is not None
        return self.best

    @property
    def _large(self) -> bool:
        return self.best is not None and self.best.schedule.num_actions > LARGE_ACTIONS

    def _walk_share(self) -> float:
        settings = self.settings
        if self._course.pointless:
            return POINTLESS_WALK_SHARE
        if self._large:
            return 1.0 - settings.polish_share_large
        return 1.0 - (settings.polish_share_binding if self._binding else settings.polish_share)

    def _end_cycle(self) -> None:
        self._keep_finalists()
        walks = sorted((*self._walks, *self._given_up), key=lambda walk: walk.best_ns)
        self._carried = [
            Seed(step_ns=walk.best_ns, source=WALK, genome=copy_genome(walk.best))
            for walk in walks[:NUM_CARRIED]
        ]
        self._walks, self._polishes, self._given_up, self._rung = [], [], [], 0

    def _keep_finalists(self) -> None:
        """Judge the best of every island that is about as good as the best of all."""
        if self.best is None:
            return
        most = self.best.step_ns * (1.0 + self.settings.stage_tolerance)
        for polish in self._polishes:
            if polish.best_ns <= most:
                genome, schedule = polish.result()
                made = self._made(genome, schedule, POLISH)
                self.finalists += [made] if made is not None else []
        for walk in (*self._walks, *self._given_up):
            if walk.best_ns <= most:
                made = self._made(walk.best, walk.schedule(), WALK)
                self.finalists += [made] if made is not None else []
            for name, gain in walk.gains_ns.items():
                self.move_gains_ns[name] = self.move_gains_ns.get(name, 0) + gain

    def _start_walks(self, diagnosis: Diagnosis) -> None:
        """Start from seeds of different stage counts; in later cycles, from the best so far.

        Most walks pick among what is ready, which gains most; where memory binds, some follow a
        pattern whatever comes: the rhythm of the best plan, and the best pattern seeds.
        """
        settings = self.settings
        patterns = settings.num_patterns if diagnosis.binding else 0
        chosen = self._rhythms(self._best())[:1] if patterns else []
        if self._carried:
            self._walk_from([*self._carried, *chosen], settings.num_walks // 2)
            return
        for strict, count in ((1, patterns - 1), (0, settings.num_walks - len(chosen))):
            of_kind = [seed for seed in self._seeds if seed.genome.meta[STRICT] == strict]
            near = [one for one in of_kind if one.step_ns <= of_kind[0].step_ns * START_SPREAD]
            chosen += different(near, min(count, settings.num_walks - len(chosen)))
        self._walk_from(chosen, settings.num_walks)

    def _walk_from(self, seeds: Sequence[Seed], count: int) -> None:
        """Start walks; the same seed may be walked from with other random numbers."""
        for _, seed in zip(range(count), cycle(seeds), strict=False):
            self._islands += 1
            rng = island_rng(self.seed, self._islands)
            self._walks.append(Walk(self.world, seed.genome, seed.step_ns, rng, seed.source))

    def _start_polishes(self) -> None:
        """Start from the best plans, of different origin where they are about as good."""
        plans = [self._best()]
        walks = sorted((*self._walks, *self._given_up), key=lambda walk: walk.best_ns)
        for walk in walks[: 2 * self.settings.num_polishes]:
            made = self._made(walk.best, walk.schedule(), WALK)
            if made is not None:
                plans.append(made)
        plans += [one.candidate for one in self.published if one.candidate is not None]
        plans += self.finalists
        if self._binding:
            limit = self.budget.time_limit_s
            most = NUM_STEADY if limit is None else int(limit / STEADY_LIMIT_S)
            plans += self._steady_plans(distinct(plans, min(NUM_STEADY, most)))
        plans.sort(key=lambda plan: plan.step_ns)
        polishes = 0 if self._large else self.settings.num_polishes
        tightened = self.settings.num_polishes if self._large else self.settings.num_tightened
        seen: set[Any] = set()
        for plan in plans:
            if (plan.stages, plan.step_ns) in seen:
                continue
            seen.add((plan.stages, plan.step_ns))
            tight = self._tightened(plan) if tightened else None
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
            polish = self._polish_of(self._best())
            self._polishes += [] if polish is None else [polish]

    def _polish_of(self, plan: Candidate) -> Polish | None:
        tokens = tokens_of(self.world, plan)
        if tokens is None:
            return None
        self._islands += 1
        polish = Polish(self.world, tokens, island_rng(self.seed, self._islands), plan.source)
        return polish if polish.fits else None

    def _steady_plans(self, plans: Sequence[Candidate]) -> list[Candidate]:
        """Return the periodic steady states of given partitions and placements."""

        def steady(plan: Candidate) -> Candidate | None:
            costs = build_costs(self.workload, self.cluster, plan.stages, self.num_microbatches)
            if plan.schedule.num_actions > MOST_STEADY_ACTIONS:
                return None
            limit = STEADY_TIME_S
            if self.budget.time_limit_s is not None:
                limit = min(limit, STEADY_PART * self.budget.time_limit_s)
            schedule = modulo_schedule(costs, time_limit_s=limit, seed=self.seed)
            if schedule is None:
                return None
            return judge(
                self.workload,
                self.cluster,
                self.num_microbatches,
                plan.stages,
                schedule,
                STEADY,
            )

        found = []
        for future in [self._pool.submit(steady, plan) for plan in plans]:
            candidate = future.result()
            if candidate is not None:
                self._offer(candidate, STEADY)
                found.append(candidate)
        self.budget.evaluations += len(plans)
        return found

    def _live(self, islands: list[Any], part: float) -> list[Any]:
        """Return the islands that go on: all at first, half, then two."""
        islands.sort(key=lambda island: island.best_ns)
        count = len(islands)
        if part > 0.5:
            return islands[:2]
        if part > 0.2:
            return islands[: max(2, count // 2)]
        return islands

    def _side_by_side(self, advance: Callable[[Any], None], islands: Sequence[Any]) -> None:
        for future in [self._pool.submit(advance, island) for island in islands]:
            future.result()

    def _worth(self, step_ns: int) -> bool:
        """Whether a step by the kernels' own reckoning is worth the simulator's judgement."""
        margin = 1.02 if self.world.has_nic else 1.0
        return step_ns < self._best().step_ns * margin

    def _made(self, genome: Genome, schedule: Schedule, source: str) -> Candidate | None:
        return judge(
            self.workload,
            self.cluster,
            self.num_microbatches,
            genome_stages(genome),
            schedule,
            source,
        )

    def _judge(self, genome: Genome, schedule: Schedule, source: str) -> None:
        candidate = self._made(genome, schedule, source)
        if candidate is not None:
            self._offer(candidate, source)

    def _offer(self, candidate: Candidate, source: str) -> None:
        """Keep a candidate if it is the best, and note what its source gained."""
        if self.best is None:
            self.best = candidate
        elif candidate.step_ns < self.best.step_ns:
            gain = self.best.step_ns - candidate.step_ns
            self.gains_ns[source] = self.gains_ns.get(source, 0) + gain
            self.best = candidate

    def _tell(self, phase: str) -> None:
        if self.progress is not None and self.best is not None:
            self.progress(phase, self.best.step_ns, self.budget.elapsed_s)


def _cooled(hot: float, cold: float, part: float) -> float:
    return float(hot * (cold / hot) ** min(1.0, max(0.0, part)))
