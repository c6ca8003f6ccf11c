"""Floating W's: what they gain under jitter, and what they never do."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from executor_tools import make_plan, make_workload, one_f_one_b_rows, random_rows

from octotune.contract import Cluster, build_costs
from octotune.schedules import FAMILIES, plan_from
from octotune.schedules.zb_v import zb_v
from simulator.actions import Kind, kind_of, microbatch_of, stage_of
from simulator.engine import simulate
from simulator.errors import DeadlockError
from simulator.floating import jittered, simulate_floating
from simulator.floating_bound import least_step_ns
from simulator.memory import order_peak_bytes

UNIT = {"forward_ns": 10**6, "input_grad_ns": 10**6, "weight_grad_ns": 10**6}


def case(name, num_microbatches):
    if name == "1f1b":
        plan = make_plan(
            one_f_one_b_rows(4, num_microbatches, split=True),
            [(1, d) for d in range(4)],
            num_microbatches,
            workload=make_workload(4, **UNIT),
        )
    else:
        plan = plan_from(
            FAMILIES[name.split()[0]], make_workload(8, **UNIT), Cluster.equal(4), num_microbatches
        )
    schedule = zb_v(4, num_microbatches) if name == "zb-v as published" else plan.schedule()
    return schedule, costs_of(plan)


def costs_of(plan):
    return build_costs(plan.workload, plan.cluster, plan.stages, plan.num_microbatches)


def changes(schedule, costs, limit, seeds=200):
    """Relative change of the step by floating, under ±30 % a stage and microbatch."""
    found = []
    for seed in range(seeds):
        durations = jittered(schedule, costs, kind="stage and microbatch", spread=0.3, seed=seed)
        static = simulate_floating(schedule, costs, durations_ns=durations, floating=False)
        floats = simulate_floating(schedule, costs, durations_ns=durations, limit_bytes=limit)
        found.append(floats.step_ns / static.step_ns - 1)
    return np.array(found)


@pytest.mark.parametrize(
    ("name", "num_microbatches", "gain"),
    [
        *(("1f1b", 8, 0.03), ("1f1b", 16, 0.03), ("zb-v", 8, 0.01)),
        *(("zb-v as published", 8, 0.01), ("zb-v as published", 16, 0.01)),
    ],
)
def test_unlimited_floating_gains_and_is_never_longer(name, num_microbatches, gain):
    schedule, costs = case(name, num_microbatches)
    found = changes(schedule, costs, None)
    assert found.mean() <= -gain
    assert found.max() <= 0


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "zb-v as published"])
@pytest.mark.parametrize("num_microbatches", [8, 16])
def test_floating_within_the_plans_peak_gains_on_average(name, num_microbatches):
    schedule, costs = case(name, num_microbatches)
    peak = order_peak_bytes(schedule, costs).max()
    found = changes(schedule, costs, np.full(4, peak))
    assert found.mean() < 0
    assert found.max() <= 0.03


def test_no_rule_does_much_better_than_the_greedy_one():
    """Under ±30 %, with 16 microbatches: within 0.1 % of the bound on average, mostly at it."""
    schedule, costs = case("zb-v", 16)
    above = []
    for seed in range(100):
        durations = jittered(schedule, costs, kind="stage and microbatch", spread=0.3, seed=seed)
        floats = simulate_floating(schedule, costs, durations_ns=durations)
        above.append(floats.step_ns / least_step_ns(schedule, costs, durations_ns=durations) - 1)
    assert min(above) >= 0
    assert np.mean(above) <= 0.001
    assert np.mean(np.array(above) == 0) >= 0.8


def random_case(seed):
    rng = random.Random(seed)
    num_devices, num_stages = rng.randint(1, 4), rng.randint(1, 6)
    num_microbatches = rng.randint(1, 6)
    homes = [rng.randrange(num_devices) for _ in range(num_stages)]
    rows = random_rows(rng, homes, num_devices, num_microbatches)
    times = {
        name: rng.randint(1, 50) for name in ("forward_ns", "input_grad_ns", "weight_grad_ns")
    }
    cluster = Cluster.equal(num_devices, latency_ns=rng.randint(0, 30), bandwidth=10**9)
    workload = make_workload(num_stages, output_bytes=rng.randint(0, 40), **times)
    stages = [(1, home) for home in homes]
    return make_plan(rows, stages, num_microbatches, workload=workload, cluster=cluster)


@pytest.mark.parametrize("seed", range(40))
def test_without_floating_it_is_the_engine(seed):
    plan = random_case(seed)
    schedule, costs = plan.schedule(), costs_of(plan)
    expected = simulate(schedule, costs)
    found = simulate_floating(schedule, costs, floating=False)
    assert np.array_equal(found.start_ns, expected.start_ns)
    assert np.array_equal(found.end_ns, expected.end_ns)


@pytest.mark.parametrize("seed", range(40))
def test_no_step_is_shorter_than_the_bound(seed):
    plan = random_case(seed)
    schedule, costs = plan.schedule(), costs_of(plan)
    least = least_step_ns(schedule, costs)
    for floating in (True, False):
        assert simulate_floating(schedule, costs, floating=floating).step_ns >= least
    peak = order_peak_bytes(schedule, costs)
    assert simulate_floating(schedule, costs, limit_bytes=peak).step_ns >= least


def test_the_bound_is_the_work_after_the_last_wait():
    """One device, W after all else: nothing waits, so the bound is the work."""
    plan = make_plan(["0F0 0F1 0I0 0I1 0W1 0W0"], [(1, 0)], 2, workload=make_workload(1, **UNIT))
    assert least_step_ns(plan.schedule(), costs_of(plan)) == 6 * 10**6
    # two devices: the first has its answer after 3 and two transfers, and then 4 to do
    rows = ["0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"]
    plan = make_plan(rows, [(1, 0), (1, 1)], 2, workload=make_workload(2, **UNIT))
    assert least_step_ns(plan.schedule(), costs_of(plan)) == 7 * 10**6 + 2


@pytest.mark.parametrize("seed", range(40))
def test_floating_keeps_order_memory_and_inputs(seed):
    """F, I and B in the row's order, each stage's W's and B's too, within the plan's peak."""
    plan = random_case(seed)
    schedule, costs = plan.schedule(), costs_of(plan)
    peak = order_peak_bytes(schedule, costs)
    found = simulate_floating(schedule, costs, limit_bytes=peak)
    stages, kinds = stage_of(schedule.codes), kind_of(schedule.codes)
    microbatches = microbatch_of(schedule.codes)
    ran = []
    for device in range(schedule.num_devices):
        rows = range(schedule.offsets[device], schedule.offsets[device + 1])
        order = sorted(rows, key=lambda at: found.start_ns[at])
        ran.append([schedule.codes[at] for at in order])
        assert [at for at in order if kinds[at] != Kind.W] == [
            at for at in rows if kinds[at] != Kind.W
        ]
        for stage in range(costs.num_stages):
            lane = [at for at in order if stages[at] == stage and kinds[at] in (Kind.W, Kind.B)]
            assert lane == sorted(lane)
        for before, after in pairwise(order):
            assert found.start_ns[after] >= found.end_ns[before]
    when = {
        (int(s), Kind(int(k)), int(m)): at
        for at, (s, k, m) in enumerate(zip(stages, kinds, microbatches, strict=True))
    }
    for (stage, kind, microbatch), at in when.items():
        if kind == Kind.W:
            assert found.start_ns[at] >= found.end_ns[when[stage, Kind.I, microbatch]]
    reordered = type(schedule).from_codes(ran)
    assert (order_peak_bytes(reordered, costs) <= peak).all()


def test_a_grace_lets_a_slightly_late_input_win():
    """Device 1's next forward comes 1 ns after it is free; without grace a whole W goes first."""
    plan = make_plan(
        ["0F0 0F1 0B0 0B1", "1F0 1I0 1W0 1F1 1I1 1W1"],
        [(1, 0), (1, 1)],
        2,
        workload=make_workload(2, forward_ns=100, input_grad_ns=99, weight_grad_ns=50),
        cluster=Cluster.equal(2, latency_ns=100, bandwidth=10**18),
    )
    schedule, costs = plan.schedule(), costs_of(plan)
    second = schedule.words()[1].index("1F1") + int(schedule.offsets[1])
    # 1F0 runs from 201 to 301, 1I0 to 400; 1F1's input leaves at 200 and is there at 301
    assert simulate_floating(schedule, costs).start_ns[second] == 400
    late = np.array([100, 200, 199, 199, 100, 99, 50, 100, 99, 50])
    assert simulate_floating(schedule, costs, durations_ns=late).start_ns[second] == 450
    patient = simulate_floating(schedule, costs, durations_ns=late, grace_ns=5)
    assert patient.start_ns[second] == 401


def test_an_order_in_a_ring_is_refused():
    plan = make_plan(["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"], [(1, 0), (1, 1)], 2)
    with pytest.raises(DeadlockError, match="actions wait for each other"):
        simulate_floating(plan.schedule(), costs_of(plan))
