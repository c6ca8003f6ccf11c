"""PipeOffload's compute order: GIS-H's block, one microbatch at a time.

Groups make activations come and go in bursts, and a burst has to fit whatever is taken out to the
host. Here each stage starts one microbatch every period and keeps each for the same time, so what
lives longest is also what an offload of it saves most. Consecutive stages of a device start 3 g
slots apart, with g = ceil(p / 2), and W follows its I at once. The copies themselves are planned
elsewhere.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from octotune.placement import loop
from octotune.schedules.choose import fitted, most_in_flight
from octotune.schedules.family import Family, device_of_rank
from octotune.schedules.group_interleaved import half_group
from octotune.schedules.squeeze import Block, squeezed
from octotune.schedules.world import world_of
from simulator.actions import Schedule
from simulator.costs import Costs


def uniform_block(num_devices: int, stages_per_device: int) -> Block:
    """Return the block that starts one microbatch every 3 v slots.

    Source:
        Wan et al. 2025, arXiv:2503.01328, section 4.3.
    """
    p, v = num_devices, stages_per_device
    group = half_group(p)
    passes, ranks = np.divmod(np.arange(p * v), p)
    # the first ranks hop two slots down and one up, so that p hops up and down take 3 g slots
    slow = np.minimum(ranks, max(0, 2 * p - 3 * group))
    # the residues of 3 g slots run out after v / gcd passes; the next ones lie three further on
    rounds = v // math.gcd(v, group)
    forward = 3 * (group * passes + passes // rounds) + ranks + slow
    turned = v - 1 - passes
    last = 3 * (group * (v - 1) + (v - 1) // rounds)
    backward = last + 3 * (p - 1) + 1 - 2 * ranks + slow + 3 * (group * turned + turned // rounds)
    return Block(forward, backward, backward + 1, 3 * v)


def pipeoffload_family(stages_per_device: int) -> Family:
    """Return PipeOffload's uniformly repeated order with v stages a device."""
    v = stages_per_device
    placement = partial(loop, stages_per_device=v)

    def generate(costs: Costs) -> Schedule:
        devices = device_of_rank(costs, placement)
        block = squeezed(uniform_block(len(devices), v), world_of(costs, devices))
        return fitted(costs, devices, [block], most=most_in_flight(block))

    return Family(
        name=f"pipeoffload-v{v}",
        source="Wan et al. 2025, arXiv:2503.01328, section 4",
        placement=placement,
        generate=generate,
        adapts_to_memory=True,
    )
