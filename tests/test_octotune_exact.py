"""Exact orders: closed forms, brute force over all orders of the tiniest, the simulator's step."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path

import pytest
from random_instances import random_instance, random_stages

from octotune.contract import Cluster, Layer, Stage, Workload, build_costs, read_workload
from octotune.errors import InfeasibleError, OutOfTimeError
from octotune.exact import exact_order
from octotune.partition import balanced_cuts
from simulator.actions import Action, Kind, Schedule
from simulator.engine import simulate
from simulator.errors import DeadlockError
from simulator.validate import validate


def costs_of(times, placement, num_microbatches, *, memory=2**60, saved=0, saved_w=0, latency=0):
    """Return the costs of one layer a stage."""
    workload = Workload(
        name="small",
        layers=tuple(
            Layer(
                name=str(index),
                forward_ns=f,
                input_grad_ns=i,
                weight_grad_ns=w,
                param_bytes=0,
                state_bytes=0,
                saved_bytes=saved,
                saved_w_bytes=saved_w,
                output_bytes=0,
            )
            for index, (f, i, w) in enumerate(times)
        ),
    )
    stages = [
        Stage(layers=(index, index + 1), device=device) for index, device in enumerate(placement)
    ]
    cluster = Cluster.equal(max(placement) + 1, memory_bytes=memory, latency_ns=latency)
    return build_costs(workload, cluster, stages, num_microbatches)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (2, 4), (3, 3), (4, 4)])
def test_without_split_equal_stages_take_the_time_of_1f1b(p, m):
    """One stage a device, B unsplit: (m + p - 1)(F + B) is optimal."""
    costs = costs_of([(10, 10, 10)] * p, range(p), m)
    found = exact_order(costs, split=False)
    assert found.optimal
    assert found.step_ns == (m + p - 1) * 30


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 5), (4, 7)])
def test_with_split_only_the_first_bubble_is_left(p, m):
    """F = I = W, one stage a device, m >= 2p - 1, endless memory: ZB-H2 without optimizer."""
    found = exact_order(costs_of([(10, 10, 10)] * p, range(p), m), split=True)
    assert found.optimal
    assert found.step_ns == (p - 1) * 10 + m * 30


def test_memory_for_one_microbatch_runs_them_one_by_one():
    """No second F before the first W has ended: nothing overlaps but W and what is upstream."""
    costs = costs_of([(10, 10, 10)] * 2, range(2), 3, memory=5, saved_w=5)
    found = exact_order(costs)
    assert found.optimal
    assert found.step_ns == 3 * 50
    assert simulate(found.schedule, costs).peak_bytes.max() <= 5


def test_too_little_memory_is_infeasible():
    with pytest.raises(InfeasibleError, match="no order of these stages fits the memory"):
        exact_order(costs_of([(10, 10, 10)] * 2, [0, 0], 1, memory=9, saved=5))


def test_no_time_is_out_of_time():
    costs = costs_of([(10, 10, 10)] * 4, range(4), 8)
    with pytest.raises(OutOfTimeError, match="no order found in 1e-06 s; raise time_limit_s"):
        exact_order(costs, time_limit_s=1e-6)


def test_a_hint_is_never_lost():
    """However little time there is, the answer is at most as long as the order given."""
    costs = costs_of([(10, 12, 8), (11, 9, 7), (9, 14, 10)], [0, 1, 2], 4, latency=2)
    best = exact_order(costs)
    again = exact_order(costs, hint=best.schedule, prune=False, time_limit_s=0.5)
    assert again.step_ns == best.step_ns


def test_a_larger_instance_meets_its_bound():
    """Llama3-8B on four devices in a V, 192 actions: start and proof need no search."""
    path = Path(__file__).parents[1] / "benchmarks" / "data" / "octopipe" / "llama3-8B.json"
    workload, cluster = read_workload(f"{path}#workload"), Cluster.equal(4)
    placement = [0, 1, 2, 3, 3, 2, 1, 0]
    partition = balanced_cuts(workload, cluster, placement, num_microbatches=8)
    costs = build_costs(workload, cluster, partition.stages(), 8)
    assert exact_order(costs, time_limit_s=10.0).optimal


def all_orders(costs):
    """Yield every order of B plans on at most two devices that can run."""
    stages, m = costs.num_stages, costs.num_microbatches
    actions = [
        Action(stage, kind, microbatch)
        for stage in range(stages)
        for microbatch in range(m)
        for kind in (Kind.F, Kind.B)
    ]

    def interleave(rows):
        if len(rows) == 1:
            yield list(rows[0])
            return
        for rest in interleave(rows[1:]):
            total = len(rows[0]) + len(rest)
            for spots in combinations(range(total), len(rows[0])):
                mine, others = iter(rows[0]), iter(rest)
                yield [next(mine) if spot in spots else next(others) for spot in range(total)]

    def row(device):
        kinds = [
            [action for action in actions if action.stage == stage and action.kind == kind]
            for stage in range(stages)
            if costs.stage_device[stage] == device
            for kind in (Kind.F, Kind.B)
        ]
        return list(interleave(kinds)) if kinds else [[]]

    for first in row(0):
        for second in row(1) if costs.num_devices > 1 else [None]:
            rows = [first] if second is None else [first, second]
            yield Schedule.from_rows(rows)


@pytest.mark.parametrize("seed", range(12))
def test_b_orders_of_tiny_instances_match_brute_force(seed):
    """Two stages, two microbatches: every interleaving is simulated."""
    rng = random.Random(seed)
    times = [(rng.randint(1, 9), rng.randint(1, 9), rng.randint(1, 9)) for _ in range(2)]
    placement = rng.choice([(0, 0), (0, 1)])
    saved, memory = rng.choice([(0, 10), (5, 12), (5, 17)])
    costs = costs_of(times, placement, 2, saved=saved, memory=memory, latency=rng.randint(0, 3))
    best = None
    for schedule in all_orders(costs):
        try:
            timeline = simulate(schedule, costs)
        except (DeadlockError, ValueError):
            continue
        if (timeline.peak_bytes <= costs.memory_bytes).all():
            best = timeline.step_ns if best is None else min(best, timeline.step_ns)
    found = exact_order(costs, split=False, prune=False)
    assert found.step_ns == found.bound_ns == best


def check_exact(seed):
    """The order found is valid, within memory, and takes what is claimed, bounds or not."""
    rng = random.Random(seed)
    workload, cluster, num_microbatches, features = random_instance(
        rng, max_layers=5, max_microbatches=3
    )
    stages = random_stages(rng, workload, cluster, recompute="recompute" in features, most=4)
    costs = build_costs(workload, cluster, stages, num_microbatches)
    try:
        found = exact_order(costs, time_limit_s=5.0)
    except InfeasibleError:
        with pytest.raises(InfeasibleError, match=r"no order of these stages fits|layers alone"):
            exact_order(costs, time_limit_s=5.0, prune=False)
        return
    validate(found.schedule, costs)
    timeline = simulate(found.schedule, costs)
    assert (timeline.peak_bytes <= costs.memory_bytes).all()
    assert found.bound_ns <= found.step_ns == timeline.step_ns
    plain = exact_order(costs, time_limit_s=5.0, prune=False)
    if plain.optimal and found.optimal:
        assert plain.step_ns == found.step_ns
    assert found.step_ns >= plain.bound_ns


@pytest.mark.parametrize("seed", range(30))
def test_random_instances_are_solved_with_and_without_bounds(seed):
    check_exact(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 400))
def test_more_random_instances_are_solved_with_and_without_bounds(seed):
    check_exact(seed)
