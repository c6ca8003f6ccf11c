"""Loading the compiled code before the clock of a search starts.

The first call of a kernel loads it from numba's cache, or compiles it where there is none. Both
happen here, on a problem of two layers, and are no part of anyone's time limit.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from octotune.contract import Cluster, Layer, Workload
from octotune.tune.balance import island_rng, repair_memory
from octotune.tune.islands import Polish, Walk, tokens_of
from octotune.tune.moves import NUM_MOVES
from octotune.tune.plans import genome_stages, judge
from octotune.tune.problem import FAR, make_world
from octotune.tune.robust import jittered
from octotune.tune.scheduler import list_schedule
from octotune.tune.seeds import balanced


@cache
def warm_up() -> None:
    """Call every kernel of the search once."""
    from octotune.contract import build_costs
    from octotune.tune.genome import empty_run, empty_shape

    layers = tuple(
        Layer(
            name=str(index),
            forward_ns=1,
            input_grad_ns=1,
            weight_grad_ns=1,
            param_bytes=0,
            state_bytes=0,
            saved_bytes=0,
            output_bytes=0,
        )
        for index in range(2)
    )
    workload, cluster = Workload(name="warm up", layers=layers), Cluster.equal(2)
    world = make_world(workload, cluster, 2)
    rng = island_rng(0, 0)
    genome = balanced(world, 2, [0, 1], rng)
    shape, run = empty_shape(world, 2), empty_run(world, 2)
    repair_memory(world, genome, shape, np.zeros(2, np.int64))
    step = list_schedule(world, genome, shape, run, FAR)
    walk = Walk(world, genome, step, rng, "")
    walk.run_slice(0.01, np.ones(NUM_MOVES), 0.0, 2)
    candidate = judge(workload, cluster, 2, genome_stages(walk.best), walk.schedule(), "")
    assert candidate is not None
    tokens = tokens_of(world, candidate)
    assert tokens is not None
    Polish(world, tokens, rng, "").run_slice(0.01, 0.1, 2)
    jittered(candidate.schedule, build_costs(workload, cluster, candidate.stages, 2), samples=1)
