"""PipeOffload's uniform repeating as a start: every stage begins one microbatch a period.

The schedule generator of that name (`octotune.schedules.pipeoffload`) squeezes the block where it
fills and drains, which shortens the step and bunches activations. Here the block stays as it is:
what lives longest takes the most memory, so what offload frees is most, too.

Source:
    Wan et al. 2025, arXiv:2503.01328, section 4.3.
"""

from __future__ import annotations

import numpy as np

from octotune.contract import Cluster, Workload, build_costs
from octotune.offload.bench import Start
from octotune.offload.pages import BACKWARD, FORWARD, WEIGHT, Rule
from octotune.offload.planning import Keys, paged, pages_of
from octotune.partition import balanced_cuts, equal_cuts, stages_of
from octotune.placement import loop
from octotune.schedules.pipeoffload import uniform_block


def uniform_start(
    workload: Workload,
    cluster: Cluster,
    num_microbatches: int,
    stages_per_device: int,
    *,
    equal: bool = False,
) -> Start | None:
    """Return uniform repeating with v stages a device, its memory whatever it is.

    Args:
        workload: the layers.
        cluster: the devices, in the order of the pipeline.
        num_microbatches: m.
        stages_per_device: v.
        equal: cut layers equally rather than in balance.

    Returns:
        None where there are fewer layers than stages.
    """
    p = len(cluster.devices)
    placement = loop(p, stages_per_device)
    if len(placement) > len(workload.layers):
        return None
    cuts = (
        equal_cuts(len(workload.layers), len(placement))
        if equal
        else balanced_cuts(
            workload, cluster, placement, num_microbatches=num_microbatches, time_limit_s=0.2
        ).cuts
    )
    stages = tuple(stages_of(cuts, placement))
    block = uniform_block(p, stages_per_device)
    assert block.weight is not None  # W follows its I
    repeats = block.period * np.arange(num_microbatches)
    times = np.empty((3, len(stages), num_microbatches), np.int64)
    for row, slots in (
        (FORWARD, block.forward),
        (BACKWARD, block.backward),
        (WEIGHT, block.weight),
    ):
        times[row] = slots[:, None] + repeats[None, :]
    every = np.ones(len(stages), np.bool_)
    keys = Keys(times=times, split=every, stays=every)
    costs = build_costs(workload, cluster, stages, num_microbatches)
    played = paged(pages_of(costs, every, stays=every), keys, Rule(), fixed=True)
    assert played is not None  # a block in the order of its slots waits for nothing behind it
    return Start(
        name=f"uniform repeating, {stages_per_device} stages a device",
        stages=stages,
        schedule=played.schedule,
    )
