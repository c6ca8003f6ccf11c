"""What the tuned plan is compared with: published schedules over equal and balanced partitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from octotune.contract import Cluster, Plan, Workload, build_costs
from octotune.errors import InfeasibleError, OutOfMemoryError, ScheduleError
from octotune.partition import balanced_cuts, equal_cuts
from octotune.schedules import FAMILIES, plan_from
from octotune.schedules.rhythm import EFFORT
from octotune.tune.balance import repair_memory
from octotune.tune.genome import empty_shape
from octotune.tune.plans import Candidate, judge, memory_shortfall
from octotune.tune.problem import World
from octotune.tune.seeds import balanced
from simulator.engine import simulate

EQUAL_LAYERS = "equal layers"
BEST_PARTITION = "best partition"

# what every report shows, first; what else there is follows
MAIN = ("1f1b", "gpipe", "interleaved-v2", "interleaved-v4", "zb-h1", "zb-v")
# then those that are often the best of the rest
STRONG = ("interleaved-zb-v4", "dualpipe-v", "v-half", "gis-v4")
# made first, because they take no search: in large problems each of the others takes seconds
QUICK = (
    *("1f1b", "gpipe", "interleaved-v2", "interleaved-v4"),
    *("interleaved-zb-v4", "dualpipe-v", "gis-v4"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A published schedule on this problem: its candidate, or the reason why there is none."""

    name: str
    candidate: Candidate | None
    reason: str = ""

    @property
    def entry(self) -> int | str:
        """What `predicted.baselines` holds."""
        return self.reason if self.candidate is None else self.candidate.step_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What every baseline is made for."""

    workload: Workload
    cluster: Cluster
    num_microbatches: int
    world: World
    effort: float = 1.0  # of the schedules that search, as a part of what they do on their own


def baseline_makers(
    problem: Problem,
) -> list[tuple[str, Callable[[], tuple[Baseline, Baseline]]]]:
    """Return a name and a function for every published schedule, which cuts layers in two ways.

    "Equal layers" is what frameworks do by default. "Best partition" is the exact one for one
    stage a device, and layers balanced over devices by local search for several. Where a generator
    takes any number of microbatches and its original does not, the step is the generator's. A
    schedule that exceeds the memory, or needs more stages than there are layers, comes with the
    reason.
    """
    cuts: dict[tuple[int, ...], tuple[int, ...]] = {}
    first = [name for name in (*MAIN, *STRONG) if name in FAMILIES]
    names = [*first, *(name for name in FAMILIES if name not in first)]
    return [(name, partial(_both, problem, name, cuts)) for name in names]


def untried(name: str, reason: str) -> tuple[Baseline, Baseline]:
    """Return a published schedule's baselines that were not made."""
    first, second = (
        Baseline(name=f"{name}, {how}", candidate=None, reason=reason)
        for how in (EQUAL_LAYERS, BEST_PARTITION)
    )
    return first, second


def _both(
    problem: Problem, name: str, known: dict[tuple[int, ...], tuple[int, ...]]
) -> tuple[Baseline, Baseline]:
    placement = tuple(FAMILIES[name].placement(len(problem.cluster.devices)))
    effort = EFFORT.set(problem.effort)
    try:
        cuts: tuple[int, ...] | None
        try:
            cuts = tuple(equal_cuts(len(problem.workload.layers), len(placement)))
            equal = _baseline(problem, name, EQUAL_LAYERS, cuts)
        except InfeasibleError as error:
            cuts = None
            equal = Baseline(name=f"{name}, {EQUAL_LAYERS}", candidate=None, reason=str(error))
        try:
            if placement not in known:
                known[placement] = _best_cuts(problem, placement)
        except InfeasibleError as error:
            title = f"{name}, {BEST_PARTITION}"
            return equal, Baseline(name=title, candidate=None, reason=str(error))
        if known[placement] == cuts:  # one search will do
            return equal, replace(equal, name=f"{name}, {BEST_PARTITION}")
        return equal, _baseline(problem, name, BEST_PARTITION, known[placement])
    finally:
        EFFORT.reset(effort)


def _baseline(problem: Problem, name: str, how: str, cuts: tuple[int, ...]) -> Baseline:
    workload, cluster, m = problem.workload, problem.cluster, problem.num_microbatches
    title = f"{name}, {how}"
    try:
        plan = plan_from(FAMILIES[name], workload, cluster, m, cuts)
        candidate = judge(workload, cluster, m, plan.stages, plan.schedule(), title)
    except (InfeasibleError, OutOfMemoryError, ScheduleError) as error:
        return Baseline(name=title, candidate=None, reason=str(error))
    reason = "" if candidate else _too_much(plan)
    return Baseline(name=title, candidate=candidate, reason=reason)


def _best_cuts(problem: Problem, placement: Sequence[int]) -> tuple[int, ...]:
    world = problem.world
    if len(placement) == len(set(placement)) or len(placement) > world.num_layers:
        return balanced_cuts(
            problem.workload,
            problem.cluster,
            placement,
            num_microbatches=problem.num_microbatches,
        ).cuts
    rng = np.array([len(placement)], dtype=np.uint64)
    genome = balanced(world, len(placement), placement, rng)
    shape = empty_shape(world, len(placement))
    repair_memory(world, genome, shape, np.zeros(world.num_devices, np.int64))
    return tuple(genome.cut.tolist())


def _too_much(plan: Plan) -> str:
    costs = build_costs(plan.workload, plan.cluster, plan.stages, plan.num_microbatches)
    shortfall = memory_shortfall(costs, simulate(plan.schedule(), costs))
    assert shortfall is not None
    device, missing = shortfall
    return f"device {device} has {missing} bytes too few"
