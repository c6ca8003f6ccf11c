"""Loading the compiled code before the clock of a search starts.

The first call of a kernel loads it from numba's cache, or compiles it where there is none. Both
happen here, on a problem of a few layers, and are no part of anyone's time limit. Where much has
to be compiled, a second process compiles half of it, because threads cannot: numba compiles under
one lock.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from types import MappingProxyType

import numpy as np

from octotune.bounds.joint import lower_bound
from octotune.contract import Cluster, Layer, Workload, build_costs
from octotune.partition import stages_of
from octotune.schedules.one_f_one_b import one_f_one_b
from octotune.steady import modulo_schedule
from octotune.tune.balance import island_rng, repair_memory
from octotune.tune.baselines import Problem, baseline_makers
from octotune.tune.genome import Genome, empty_run, empty_shape
from octotune.tune.islands import Polish, Walk, tokens_of
from octotune.tune.moves import NUM_MOVES
from octotune.tune.plans import Candidate, genome_stages, judge
from octotune.tune.problem import FAR, World, make_world
from octotune.tune.robust import jittered
from octotune.tune.scheduler import list_schedule
from octotune.tune.seeds import balanced
from octotune.tune.sketch import sketched
from octotune.tune.start import given_genome
from octotune.tune.tighten import Tighten
from simulator.compiled import num_cold

WORTH_A_PROCESS = 10  # kernels that are not in the cache
MOST_WAIT_S = 600.0


@cache
def warm_up() -> None:
    """Call every kernel of the search once."""
    helper = None
    if num_cold() >= WORTH_A_PROCESS and (os.cpu_count() or 1) > 1:
        helper = subprocess.Popen(
            [sys.executable, "-c", "from octotune.tune import warm; warm.PARTS['orders']()"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    try:
        for part in ("walks", "orders"):
            if part == "orders" and helper is not None:
                helper.wait(MOST_WAIT_S)
            PARTS[part]()
    finally:
        if helper is not None and helper.poll() is None:
            helper.kill()
            helper.wait()


def _problem(num_layers: int) -> tuple[Workload, Cluster, World]:
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
        for index in range(num_layers)
    )
    workload, cluster = Workload(name="warm up", layers=layers), Cluster.equal(2)
    return workload, cluster, make_world(workload, cluster, 2)


def _seed(world: World) -> tuple[Genome, int]:
    rng = island_rng(0, 0)
    genome = balanced(world, 2, [0, 1], rng)
    shape, run = empty_shape(world, 2), empty_run(world, 2)
    repair_memory(world, genome, shape, np.zeros(2, np.int64))
    return genome, list_schedule(world, genome, shape, run, FAR)


def _warm_walks() -> None:
    workload, cluster, world = _problem(2)
    genome, step = _seed(world)
    Walk(world, genome, step, island_rng(0, 0), "").run_slice(0.01, np.ones(NUM_MOVES), 0.0, 2)
    sketched(world, genome, 0.01, island_rng(0, 0))
    lower_bound(workload, cluster, 2, time_limit_s=0.01)


def _warm_orders() -> None:
    """Published schedules, the simulator, and the searches over orders."""
    workload, cluster, world = _problem(8)
    problem = Problem(workload=workload, cluster=cluster, num_microbatches=2, world=world)
    for _, make in baseline_makers(problem):
        make()
    workload, cluster, world = _problem(2)
    rng = island_rng(0, 0)
    candidate = _plan(workload, cluster)
    tokens = tokens_of(world, candidate)
    assert tokens is not None
    Polish(world, tokens, rng, "").run_slice(0.01, 0.1, 2)
    Tighten(world, workload, cluster, candidate, tokens.genome, rng).close_gaps(1)
    costs = build_costs(workload, cluster, candidate.stages, 2)
    jittered(candidate.schedule, costs, samples=1)
    modulo_schedule(costs, time_limit_s=0.0)


def _plan(workload: Workload, cluster: Cluster) -> Candidate:
    genome = given_genome(make_world(workload, cluster, 2), 2, stages_of((0, 1, 2), (0, 1)))
    candidate = judge(workload, cluster, 2, genome_stages(genome), one_f_one_b(2, 2), "")
    assert candidate is not None
    return candidate


PARTS = MappingProxyType({"walks": _warm_walks, "orders": _warm_orders})
