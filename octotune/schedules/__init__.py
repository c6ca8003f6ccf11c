"""Every published schedule as a generator of plans.

`FAMILIES` maps a name to a `Family`: where its stages lie, the order of its actions for given
costs, and why the original could not run, where it could not. `plan_from` makes a plan of one.
One generator a file, each with its source; numba is imported on the first look into `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octotune.contract import Cluster, Plan, Workload
    from octotune.schedules.family import Family

__all__ = ["FAMILIES", "find_family", "plan_from"]


@cache
def _families() -> dict[str, Family]:
    from octotune.schedules.controllable_memory import ONE_F_ONE_B_V, V_HALF, V_MIN
    from octotune.schedules.dualpipe_v import DUALPIPE_V
    from octotune.schedules.gpipe import GPIPE
    from octotune.schedules.group_interleaved import group_interleaved_family
    from octotune.schedules.hanayo import hanayo_family
    from octotune.schedules.interleaved import interleaved_family
    from octotune.schedules.interleaved_zero_bubble import interleaved_zero_bubble_family
    from octotune.schedules.looped_bfs import looped_bfs_family
    from octotune.schedules.one_f_one_b import EAGER_ONE_F_ONE_B, ONE_F_ONE_B
    from octotune.schedules.pipeoffload import pipeoffload_family
    from octotune.schedules.zb_v import ZB_V
    from octotune.schedules.zero_bubble import ZB_H1, ZB_H2

    families = [
        GPIPE,
        ONE_F_ONE_B,
        EAGER_ONE_F_ONE_B,
        interleaved_family(2),
        interleaved_family(4),
        looped_bfs_family(2),
        group_interleaved_family(2),
        group_interleaved_family(4),
        group_interleaved_family(2, half=True),
        group_interleaved_family(4, half=True),
        ZB_H1,
        ZB_H2,
        interleaved_zero_bubble_family(2),
        interleaved_zero_bubble_family(4),
        ZB_V,
        V_HALF,
        V_MIN,
        ONE_F_ONE_B_V,
        DUALPIPE_V,
        hanayo_family(1),
        hanayo_family(2),
        pipeoffload_family(2),
        pipeoffload_family(4),
    ]
    return {family.name: family for family in families}


@cache
def _makers() -> dict[str, Callable[[int], Family]]:
    """What makes the family of a name such as `interleaved-v3` for its last number."""
    from octotune.schedules.group_interleaved import group_interleaved_family
    from octotune.schedules.hanayo import hanayo_family
    from octotune.schedules.interleaved import interleaved_family
    from octotune.schedules.interleaved_zero_bubble import interleaved_zero_bubble_family
    from octotune.schedules.looped_bfs import looped_bfs_family
    from octotune.schedules.pipeoffload import pipeoffload_family

    return {
        "interleaved-v": interleaved_family,
        "looped-bfs-v": looped_bfs_family,
        "gis-v": group_interleaved_family,
        "gis-h-v": partial(group_interleaved_family, half=True),
        "interleaved-zb-v": interleaved_zero_bubble_family,
        "hanayo-w": hanayo_family,
        "pipeoffload-v": pipeoffload_family,
    }


class _Registry(Mapping[str, "Family"]):
    """The families by name, imported when first asked for."""

    def __getitem__(self, name: str) -> Family:
        return _families()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_families())

    def __len__(self) -> int:
        return len(_families())


FAMILIES: Mapping[str, Family] = _Registry()


def find_family(name: str) -> Family:
    """Return a family by name; those with a number at the end exist for any number.

    Raises:
        InfeasibleError: if there is none of that name.
    """
    from octotune.errors import InfeasibleError

    if name in FAMILIES:
        return FAMILIES[name]
    base = name.rstrip("0123456789")
    number = name[len(base) :]
    make = _makers().get(base)
    if make is None or not number or number[0] == "0":
        open_names = ", ".join(f"{maker}<number>" for maker in _makers())
        raise InfeasibleError(
            f"no schedule is called {name[:60]!r}; there are {', '.join(FAMILIES)}, "
            f"and {open_names}"
        )
    return make(int(number))


def plan_from(
    family: Family,
    workload: Workload,
    cluster: Cluster,
    num_microbatches: int,
    cuts: Sequence[int] | None = None,
    *,
    recompute: bool = False,
) -> Plan:
    """Return the plan of a published schedule: its placement and order over given cuts.

    Args:
        family: from `FAMILIES`.
        workload: the layers.
        cluster: its devices, all in use, in the order of the pipeline's ranks.
        num_microbatches: m.
        cuts: S + 1 layer indices, stage s being `[cuts[s], cuts[s + 1])`; by default equal layer
            counts as frameworks cut (`octotune.partition.equal_cuts`).
        recompute: of every stage.

    Raises:
        InfeasibleError: if there are fewer layers than stages.
        OutOfMemoryError: if the family adapts to memory and finds no order that fits.
    """
    from octotune.contract import Plan, build_costs
    from octotune.partition import equal_cuts, stages_of

    placement = family.placement(len(cluster.devices))
    if cuts is None:
        cuts = equal_cuts(len(workload.layers), len(placement))
    stages = stages_of(cuts, placement, recompute=recompute)
    schedule = family.generate(build_costs(workload, cluster, stages, num_microbatches))
    return Plan(
        workload=workload,
        cluster=cluster,
        num_microbatches=num_microbatches,
        stages=stages,
        actions=schedule.words(),
    )
