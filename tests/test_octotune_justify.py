"""Justification closes gaps: never longer, always within memory, the same for a seed."""

import numpy as np
import pytest

from octotune.contract import Cluster, Layer, Workload, build_costs
from octotune.schedules import FAMILIES, plan_from
from octotune.tune.balance import island_rng
from octotune.tune.islands import tokens_of
from octotune.tune.plans import judge
from octotune.tune.problem import make_world
from octotune.tune.tighten import Tighten
from simulator.engine import simulate
from simulator.validate import validate


def equal(num_devices: int, units: float, layers_a_device: int = 4) -> tuple[Workload, Cluster]:
    """Equal layers: a device's share takes 3 ms; one unit is what a microbatch leaves on it."""
    time, size = 1_000_000 // layers_a_device, 10**9 // layers_a_device
    layer = {"forward_ns": time, "input_grad_ns": time, "weight_grad_ns": time}
    layers = tuple(
        Layer(name=str(i), param_bytes=0, state_bytes=0, saved_bytes=0, saved_w_bytes=size,
              output_bytes=0, **layer)
        for i in range(num_devices * layers_a_device)
    )  # fmt: skip
    cluster = Cluster.equal(
        num_devices, memory_bytes=int(units * 10**9), latency_ns=50_000, bandwidth=10**15
    )
    return Workload(name="equal", layers=layers), cluster


def tighten(workload, cluster, m, plan, seed=0):
    candidate = judge(workload, cluster, m, plan.stages, plan.schedule(), "published")
    assert candidate is not None
    world = make_world(workload, cluster, m)
    tokens = tokens_of(world, candidate)
    assert tokens is not None
    rng = island_rng(seed, 1)
    return candidate, Tighten(world, workload, cluster, candidate, tokens.genome, rng)


@pytest.mark.parametrize(
    "name", ["1f1b", "zb-h1", "zb-v", "interleaved-zb-v4", "v-half", "gis-v4"]
)
def test_closing_gaps_never_makes_a_published_schedule_longer_or_larger(name):
    workload, cluster = equal(4, 4)
    plan = plan_from(FAMILIES[name], workload, cluster, 16)
    candidate, island = tighten(workload, cluster, 16, plan)
    island.close_gaps(3)
    _, schedule = island.result()
    costs = build_costs(workload, cluster, plan.stages, 16)
    validate(schedule, costs)
    timeline = simulate(schedule, costs)
    assert timeline.step_ns == island.best_ns <= candidate.step_ns
    assert (timeline.peak_bytes <= costs.memory_bytes).all()


def test_disturbed_justification_beats_the_best_published_schedule_within_its_memory():
    workload, cluster = equal(8, 8)
    plan = plan_from(FAMILIES["interleaved-zb-v4"], workload, cluster, 32)
    candidate, island = tighten(workload, cluster, 32, plan)
    for _ in range(30):
        island.run_slice(0.002)
    _, schedule = island.result()
    costs = build_costs(workload, cluster, plan.stages, 32)
    timeline = simulate(schedule, costs)
    assert timeline.step_ns == island.best_ns < candidate.step_ns
    assert (timeline.peak_bytes <= costs.memory_bytes).all()


def test_the_same_seed_gives_the_same_order():
    workload, cluster = equal(4, 4)
    plan = plan_from(FAMILIES["zb-v"], workload, cluster, 16)
    codes = []
    for _ in range(2):
        _, island = tighten(workload, cluster, 16, plan, seed=3)
        for _ in range(3):
            island.run_slice(0.002)
        codes.append(island.result()[1].codes)
    assert np.array_equal(*codes)
