"""What the tuned plan is compared with: published schedules over equal and best partitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from octotune.contract import Cluster, Workload
from octotune.errors import InfeasibleError, OutOfMemoryError, ScheduleError
from octotune.partition import balanced_cuts, equal_cuts
from octotune.schedules import FAMILIES, plan_from
from octotune.tune.plans import Candidate, judge

EQUAL_LAYERS = "equal layers"
BEST_PARTITION = "best partition"


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


def baselines(workload: Workload, cluster: Cluster, num_microbatches: int) -> Iterator[Baseline]:
    """Yield every published schedule with layers cut equally and with the best partition.

    Where a generator fits any number of microbatches and its original does not, the step is the
    generator's; a schedule that exceeds the memory, or needs more stages than there are layers,
    comes with the reason.
    """
    for name, family in FAMILIES.items():
        placement = family.placement(len(cluster.devices))
        for how in (EQUAL_LAYERS, BEST_PARTITION):
            title = f"{name}, {how}"
            try:
                cuts = _cuts(how, workload, cluster, placement, num_microbatches)
                plan = plan_from(family, workload, cluster, num_microbatches, cuts)
                candidate = judge(
                    workload, cluster, num_microbatches, plan.stages, plan.schedule(), title
                )
            except (InfeasibleError, OutOfMemoryError, ScheduleError) as error:
                yield Baseline(name=title, candidate=None, reason=str(error))
                continue
            reason = "" if candidate else _too_much(workload, cluster, num_microbatches, plan)
            yield Baseline(name=title, candidate=candidate, reason=reason)


def _cuts(
    how: str,
    workload: Workload,
    cluster: Cluster,
    placement: Sequence[int],
    num_microbatches: int,
) -> Sequence[int]:
    if how == EQUAL_LAYERS:
        return equal_cuts(len(workload.layers), len(placement))
    return balanced_cuts(
        workload, cluster, placement, num_microbatches=num_microbatches, time_limit_s=0.2
    ).cuts


def _too_much(workload: Workload, cluster: Cluster, num_microbatches: int, plan: object) -> str:
    from octotune.contract import Plan, build_costs
    from octotune.tune.plans import memory_shortfall
    from simulator.engine import simulate

    assert isinstance(plan, Plan)
    costs = build_costs(workload, cluster, plan.stages, num_microbatches)
    shortfall = memory_shortfall(costs, simulate(plan.schedule(), costs))
    assert shortfall is not None
    device, missing = shortfall
    return f"device {device} has {missing} bytes too few"
