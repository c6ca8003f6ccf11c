"""What all phases of one search share: the problem, the best plan, the budget, threads, the proof.

`octotune.tune.loop` tells the story; `opening` and `rounds` have the steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any

import numpy as np

from octotune.bounds import Bound
from octotune.bounds.joint import lower_bound
from octotune.contract import Cluster, Stage, Workload, build_costs
from octotune.tune.balance import RandomState, island_rng
from octotune.tune.baselines import Baseline
from octotune.tune.budget import Budget
from octotune.tune.diagnose import Diagnosis, diagnose
from octotune.tune.fit import fitted_genomes
from octotune.tune.genome import Genome, capacity_for, empty_shape
from octotune.tune.islands import tokens_of
from octotune.tune.plans import Candidate, genome_stages, judge
from octotune.tune.problem import World, make_world
from octotune.tune.settings import Settings
from octotune.tune.shape import device_bound, shape_stages
from octotune.tune.solve import SOLVED, solved
from octotune.tune.start import LARGE_ACTIONS, Seed, ran
from octotune.tune.tighten import Tighten
from simulator.actions import Schedule
from simulator.engine import simulate

Progress = Callable[[str, int, float], None]

BOUND_TIME_S = 4.0  # the solver's deterministic seconds
LATE = 0.35  # of a time limit: what belongs to the start has no more
NIC_MARGIN = 1.02


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
        self.capacity = max(capacity_for(self.world), len(stages or ()))
        self.best: Candidate | None = None
        self.finalists: list[Candidate] = []  # the best of each island, and of each family
        self.published: list[Baseline] = []
        self.seeds: list[Seed] = []  # the best first
        self.fitted: list[Seed] = []  # the rules that follow published schedules, best first
        self.gains_ns: dict[str, int] = {}
        self.move_gains_ns: dict[str, int] = {}
        self.lower_bound_ns: int | None = None
        self.bound_reason = ""
        self.interrupted = False
        self.pool = ThreadPoolExecutor(max_workers=workers or os.cpu_count() or 1)
        self._num_islands = 0
        self._diagnosed: tuple[Candidate, Diagnosis] | None = None
        self._prover = ThreadPoolExecutor(max_workers=1)
        self._solved: Schedule | None = None
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
        self.pool.shutdown(wait=True, cancel_futures=True)
        self._prover.shutdown(wait=False, cancel_futures=True)
        if kind is None:
            self._take_bound()
        self.interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        return self.interrupted and self.best is not None

    def goes_on(self) -> bool:
        """Whether the budget is not spent and the best plan not proven optimal."""
        step_ns = self.best_so_far().step_ns
        # with evaluations alone as the limit, no decision hangs on when the proof comes in
        if self.lower_bound_ns is None and (
            self._bound.done() or self.budget.time_limit_s is None
        ):
            self._take_bound()
        return self.budget.spent() < 1.0 and (
            self.lower_bound_ns is None or step_ns > self.lower_bound_ns
        )

    # --- where it stands -----------------------------------------------------------------------

    def best_so_far(self) -> Candidate:
        """Return the best plan; there is one once the seeds have been tried."""
        assert self.best is not None
        return self.best

    @property
    def large(self) -> bool:
        """Whether evaluations take so long that orders are justified rather than annealed."""
        return self.best is not None and self.best.schedule.num_actions > LARGE_ACTIONS

    def late(self, part: float = LATE) -> bool:
        """Whether more than a part of the time is gone; evaluations do not count."""
        return self.budget.time_limit_s is not None and self.budget.spent() > part

    def diagnose(self) -> Diagnosis:
        """Return where the time of the best plan goes."""
        best = self.best_so_far()
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

    # --- candidates ----------------------------------------------------------------------------

    def worth(self, step_ns: int) -> bool:
        """Whether a step by the kernels' own reckoning is worth the simulator's judgement."""
        margin = NIC_MARGIN if self.world.has_nic else 1.0
        return step_ns < self.best_so_far().step_ns * margin

    def made(self, genome: Genome, schedule: Schedule, source: str) -> Candidate | None:
        """Return a genome's stages with an order as a candidate; None if it is no plan."""
        return judge(
            self.workload,
            self.cluster,
            self.num_microbatches,
            genome_stages(genome),
            schedule,
            source,
        )

    def judge(self, genome: Genome, schedule: Schedule, source: str) -> None:
        """Offer a genome's stages with an order."""
        candidate = self.made(genome, schedule, source)
        if candidate is not None:
            self.offer(candidate, source)

    def offer(self, candidate: Candidate, source: str) -> None:
        """Keep a candidate if it is the best, and note what its source gained."""
        if self.best is None:
            self.best = candidate
        elif candidate.step_ns < self.best.step_ns:
            gain = self.best.step_ns - candidate.step_ns
            self.gains_ns[source] = self.gains_ns.get(source, 0) + gain
            self.best = candidate

    def rhythms(self, plan: Candidate) -> list[Seed]:
        """Return the rules that follow a plan, as seeds."""
        costs = build_costs(self.workload, self.cluster, plan.stages, self.num_microbatches)
        genomes = fitted_genomes(self.world, self.capacity, plan, simulate(plan.schedule, costs))
        self.budget.evaluations += len(genomes)
        return ran(self.world, genomes, plan.source)

    # --- islands -------------------------------------------------------------------------------

    def island_rng(self) -> RandomState:
        """Return the random numbers of the next island."""
        self._num_islands += 1
        return island_rng(self.seed, self._num_islands)

    def tightened(self, plan: Candidate) -> Tighten | None:
        """Return an island that justifies a plan; None where its order has no tokens."""
        tokens = tokens_of(self.world, plan)
        if tokens is None:
            return None
        rng = self.island_rng()
        return Tighten(self.world, self.workload, self.cluster, plan, tokens.genome, rng)

    def side_by_side(self, advance: Callable[[Any], None], islands: Sequence[Any]) -> None:
        """Advance islands on all threads; whatever happens, none is running afterwards."""
        futures = [self.pool.submit(advance, island) for island in islands]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()  # those that have not begun
            wait(futures)

    def tell(self, phase: str) -> None:
        """Report progress."""
        if self.progress is not None and self.best is not None:
            self.progress(phase, self.best.step_ns, self.budget.elapsed_s)

    # --- the proof -----------------------------------------------------------------------------

    def _prove(self) -> Bound:
        if self.stages is not None:
            costs = build_costs(self.workload, self.cluster, self.stages, self.num_microbatches)
            limit_s = self.budget.time_limit_s
            bound, self._solved = solved(self.workload, costs, limit_s, self.seed)
            return bound
        return lower_bound(
            self.workload, self.cluster, self.num_microbatches, time_limit_s=BOUND_TIME_S
        )

    def _take_bound(self) -> None:
        bound = self._bound.result()
        self.lower_bound_ns, self.bound_reason = bound.ns, bound.reason
        if self._solved is not None:
            assert self.stages is not None
            made = judge(
                self.workload,
                self.cluster,
                self.num_microbatches,
                self.stages,
                self._solved,
                SOLVED,
            )
            self._solved = None
            if made is not None:
                self.offer(made, SOLVED)
