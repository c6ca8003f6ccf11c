"""Bounds: never above an exact optimum or a known plan, and as strong as is known of the cases."""

from __future__ import annotations

import json
import random
from itertools import combinations, product
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_instances import random_instance, random_stages
from random_plans import random_plan

from octotune.bounds import Bound
from octotune.bounds.fixed import fixed_bound, heads_and_tails_of
from octotune.bounds.joint import lower_bound
from octotune.bounds.kernels import device_bound, energetic_bound, most_within, one_machine
from octotune.contract import (
    Cluster,
    Layer,
    Stage,
    Workload,
    build_costs,
    read_cluster,
    read_workload,
)
from octotune.errors import InfeasibleError, OutOfTimeError
from octotune.exact import exact_order
from simulator.engine import simulate

DATA = Path(__file__).parents[1] / "benchmarks" / "data"
MS = 10**6


def ints(values):
    """Return an int64 array."""
    return np.array(values, dtype=np.int64)


# --- parts that have a closed form or an oracle of their own


def preemptive(jobs):
    """Return the preemptive makespan with heads and tails: the worst of all sets of jobs.

    Carlier 1982: it is the largest, over all sets, of least head + all work + least tail.
    """
    return max(
        min(head for head, _, _ in some) + sum(work for _, work, _ in some)
        + min(tail for _, _, tail in some)
        for size in range(1, len(jobs) + 1)
        for some in combinations(jobs, size)
    )  # fmt: skip


JOB = st.tuples(st.integers(0, 20), st.integers(1, 10), st.integers(0, 20))


@settings(deadline=None)
@given(jobs=st.lists(JOB, min_size=1, max_size=8))
def test_one_machine_is_the_worst_set_of_jobs(jobs):
    heads, works, tails = (ints(column) for column in zip(*jobs, strict=True))
    assert one_machine(heads, works, tails) == preemptive(jobs)


@settings(deadline=None)
@given(jobs=st.lists(JOB, min_size=1, max_size=8))
def test_energetic_bound_of_one_machine_is_at_most_its_makespan_without_preemption(jobs):
    heads, works, tails = (ints(column) for column in zip(*jobs, strict=True))
    least = one_machine(heads, works, tails)

    def makespan(order):
        now = end = 0
        for head, work, tail in order:
            now = max(now, head) + work
            end = max(end, now + tail)
        return end

    # a list order by head and by tail, and some at random: each is an upper bound
    rng = random.Random(0)
    orders = [sorted(jobs), sorted(jobs, key=lambda job: -job[2])]
    orders += [rng.sample(jobs, len(jobs)) for _ in range(20)]
    best = min(makespan(order) for order in orders)
    assert energetic_bound(heads, works, tails, 1, least) <= best


@settings(deadline=None)
@given(
    items=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), min_size=1, max_size=3),
    count=st.integers(1, 3),
    room=st.integers(0, 25),
)
def test_most_within_is_at_least_the_best_whole_selection(items, count, room):
    best = max(
        sum(taken * value for taken, (value, _) in zip(choice, items, strict=True))
        for choice in product(range(count + 1), repeat=len(items))
        if sum(taken * size for taken, (_, size) in zip(choice, items, strict=True)) <= room
    )
    values, sizes = (ints(column) for column in zip(*items, strict=True))
    found = most_within(values, sizes, count, room)
    assert best <= found <= sum(values) * count + 1


def uniform(num_layers, times=(10, 10, 10), **of_layers):
    """Return a workload of equal layers."""
    sizes = {"param_bytes": 0, "state_bytes": 0, "saved_bytes": 0, "output_bytes": 0}
    layers = tuple(
        Layer(
            name=str(index),
            forward_ns=times[0],
            input_grad_ns=times[1],
            weight_grad_ns=times[2],
            **{**sizes, **of_layers},
        )
        for index in range(num_layers)
    )
    return Workload(name="uniform", layers=layers)


def fixed_costs(workload, placement, num_microbatches, **of_cluster):
    """Return the costs of one layer a stage."""
    stages = [Stage(layers=(i, i + 1), device=device) for i, device in enumerate(placement)]
    cluster = Cluster.equal(max(placement) + 1, **of_cluster)
    return build_costs(workload, cluster, stages, num_microbatches)


def test_device_bound_of_one_stage_a_device():
    """The last device begins after p - 1 stages and hops, and works without a gap."""
    costs = fixed_costs(uniform(4), range(4), 8, latency_ns=5)
    assert fixed_bound(costs).parts["device"] == 3 * (10 + 5) + 8 * 30


def test_device_bound_of_a_v_placement():
    """Device 1 holds the middle of a V: it begins after one stage, and has two stages of work."""
    costs = fixed_costs(uniform(4), [0, 1, 1, 0], 8)
    assert fixed_bound(costs).parts["device"] == 10 + 8 * 60


def test_device_bound_counts_the_optimizer_of_the_first_stage_after_the_last_gradient():
    """One microbatch: down, back, the W of stage 0 and its optimizer."""
    costs = fixed_costs(uniform(3, optimizer_ns=7), range(3), 1)
    assert fixed_bound(costs).ns == 3 * 10 + 3 * 10 + 10 + 7


def test_heads_and_tails_of_a_chain():
    heads, tails = heads_and_tails_of(fixed_costs(uniform(3), range(3), 2, latency_ns=1))
    assert heads[0, :, 0].tolist() == [0, 11, 22]  # F of the first microbatch
    assert heads[1, :, 0].tolist() == [54, 43, 32]  # its I on the way back
    assert tails[1, :, 1].tolist() == [10, 21, 32]  # after the last I: I down to 0, then its W
    assert heads[0, 0].tolist() == [0, 10]


def test_memory_delays_the_second_microbatch():
    """Room for one: its F waits until the W of the first has ended."""
    workload = uniform(2, saved_bytes=0, saved_w_bytes=5)
    heads, _ = heads_and_tails_of(fixed_costs(workload, range(2), 2, memory_bytes=5))
    assert heads[0, 0].tolist() == [0, 50]
    assert fixed_bound(fixed_costs(workload, range(2), 2, memory_bytes=5)).ns == 100


def test_a_bound_names_its_strongest_argument():
    bound = Bound(ns=7, parts={"load": 3, "chain": 7, "device": 7})
    assert bound.reason == "chain"
    assert bound.gap(14) == 1.0


# --- against exact optima


def check_fixed(seed):
    """No bound of a fixed partition and placement is above the best order's step."""
    rng = random.Random(seed)
    workload, cluster, num_microbatches, features = random_instance(rng, max_layers=6)
    stages = random_stages(rng, workload, cluster, recompute="recompute" in features)
    costs = build_costs(workload, cluster, stages, num_microbatches)
    try:
        # without the bounds in the solver: it would believe them
        found = exact_order(costs, time_limit_s=3.0, prune=False)
    except (InfeasibleError, OutOfTimeError):
        return None
    bound = fixed_bound(costs)
    for name, part in bound.parts.items():
        assert part <= found.step_ns, name
    quick = device_bound(
        costs.forward_ns,
        costs.input_grad_ns,
        costs.backward_ns,
        costs.transfer_hold_ns + costs.transfer_latency_ns,
        costs.stage_device,
        costs.optimizer_ns,
        num_microbatches,
    )
    assert quick == bound.parts["device"]
    return bound.ns == found.step_ns


def test_fixed_bounds_are_below_exact_optima_and_mostly_equal():
    equal = [check_fixed(seed) for seed in range(60)]
    solved = [found for found in equal if found is not None]
    assert len(solved) >= 45
    assert sum(solved) >= 0.7 * len(solved)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1600))
def test_more_fixed_bounds_are_below_exact_optima(seed):
    check_fixed(seed)


def best_step(workload, cluster, num_microbatches, *, recompute):
    """Return the step of the best plan, over all partitions, placements, recompute and orders.

    Plans are taken by their fixed bound, which the tests above check by themselves, until none
    can be better than the best found.
    """
    num_layers, devices = len(workload.layers), range(len(cluster.devices))
    plans = []
    for num_stages in range(1, num_layers + 1):
        for inner in combinations(range(1, num_layers), num_stages - 1):
            cuts = (0, *inner, num_layers)
            for homes in product(devices, repeat=num_stages):
                for again in product([False, True] if recompute else [False], repeat=num_stages):
                    stages = [
                        Stage(layers=(cuts[s], cuts[s + 1]), device=homes[s], recompute=again[s])
                        for s in range(num_stages)
                    ]
                    costs = build_costs(workload, cluster, stages, num_microbatches)
                    if (costs.static_bytes <= costs.memory_bytes).all():
                        plans.append((fixed_bound(costs).ns, len(plans), costs))
    best = None
    for bound_ns, _, costs in sorted(plans, key=lambda plan: plan[:2])[:60]:
        if best is not None and bound_ns >= best:
            break
        try:
            step = exact_order(costs, time_limit_s=3.0).step_ns
        except (InfeasibleError, OutOfTimeError):
            continue
        best = step if best is None else min(best, step)
    return best


def check_joint(seed):
    """No argument of the joint bound is above the best plan's step."""
    rng = random.Random(seed)
    workload, cluster, num_microbatches, features = random_instance(rng, max_layers=4)
    recompute = "memory" in features and len(workload.layers) < 4
    best = best_step(workload, cluster, num_microbatches, recompute=recompute)
    if best is None:
        return None
    bound = lower_bound(workload, cluster, num_microbatches, time_limit_s=1.0)
    for name, part in bound.parts.items():
        assert part <= best, name
    assert bound.ns == max(bound.parts.values())
    return bound.ns == best


def test_joint_bounds_are_below_exact_optima_and_often_equal():
    equal = [check_joint(seed) for seed in range(25)]
    solved = [found for found in equal if found is not None]
    assert len(solved) >= 20
    assert sum(solved) >= 0.2 * len(solved)


def test_devices_that_are_too_far_away_may_stay_empty():
    """Three devices, a hop longer than all work: one does everything, the others wait for none."""
    workload, far = uniform(4, (2, 3, 4)), Cluster.equal(3, latency_ns=100)
    assert lower_bound(workload, far, 1).ns == 4 * 9
    assert lower_bound(workload, far, 1).parts["device"] == 4 * 9


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(1000, 1300), *range(20_000, 20_300)])
def test_more_joint_bounds_are_below_exact_optima(seed):
    check_joint(seed)


# --- against random plans with everything in them, offload and absurd numbers too


def check_plan(seed):
    """A plan fits devices of just the memory it takes; no bound is above its step there."""
    plan = random_plan(random.Random(seed))

    def costs_on(cluster):
        return build_costs(plan.workload, cluster, plan.stages, plan.num_microbatches)

    timeline = simulate(plan.schedule(), costs_on(plan.cluster), plan.copies())
    tight = msgspec.structs.replace(
        plan.cluster,
        devices=tuple(
            msgspec.structs.replace(device, memory_bytes=int(peak))
            for device, peak in zip(plan.cluster.devices, timeline.peak_bytes, strict=True)
        ),
    )
    copies = plan.offload is not None and any(plan.offload)
    bounds = [
        fixed_bound(costs_on(tight), copies=copies),
        lower_bound(plan.workload, tight, plan.num_microbatches, time_limit_s=0.2),
    ]
    for bound in bounds:
        for name, part in bound.parts.items():
            assert part <= timeline.step_ns, name


@pytest.mark.parametrize("seed", range(60))
def test_no_bound_is_above_a_random_plan(seed):
    check_plan(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60, 1000))
def test_no_bound_is_above_more_random_plans(seed):
    check_plan(seed)


@pytest.mark.parametrize("seed", range(12))
def test_bounds_grow_with_all_times_alike(seed):
    """Ten million times as long: the same proof, to the rounding of units."""
    rng = random.Random(seed)
    workload, cluster, num_microbatches, _ = random_instance(rng, max_layers=5)
    layers = [
        msgspec.structs.replace(
            layer,
            times_ns={},
            output_bytes=0,
            forward_ns=layer.forward_ns * 10**7,
            input_grad_ns=layer.input_grad_ns * 10**7,
            weight_grad_ns=layer.weight_grad_ns * 10**7,
            optimizer_ns=layer.optimizer_ns * 10**7,
        )
        for layer in workload.layers
    ]
    plain = [
        msgspec.structs.replace(layer, times_ns={}, output_bytes=0) for layer in workload.layers
    ]
    equal = Cluster.equal(len(cluster.devices), memory_bytes=10**6)
    small, large = (
        lower_bound(Workload(name="w", layers=tuple(each)), equal, num_microbatches)
        for each in (plain, layers)
    )
    assert small.finished
    assert large.finished
    assert small.ns * 10**7 == pytest.approx(large.ns, rel=1e-6)


# --- against what is known of larger cases


def octopipe(model, num_devices, num_microbatches, **options):
    """Return the bound of a public point."""
    workload = read_workload(DATA / "octopipe" / f"{model}.json#workload")
    return lower_bound(workload, Cluster.equal(num_devices), num_microbatches, **options)


@pytest.mark.parametrize(
    ("model", "num_devices", "num_microbatches", "expected_ms"),
    [
        ("llama3-8B", 4, 8, 378.32),
        ("llama3-8B", 4, 16, 751.36),
        ("llama3-70B", 4, 8, 2839.65),
        ("llama3-70B", 8, 8, 1494.85),
        ("llama3-70B", 8, 16, 2974.13),
        ("llama3-70B", 16, 32, 3243.09),
        ("llama3-70B", 16, 64, 6470.61),
        ("nemotron-nano-v2-9B", 4, 8, 857.10),
        ("nemotron-h-4B", 4, 8, 295.87),
        ("jamba-52B", 16, 32, 973.84),
    ],
)
def test_bounds_of_public_points_are_at_least_as_good_as_known(
    model, num_devices, num_microbatches, expected_ms
):
    bound = octopipe(model, num_devices, num_microbatches)
    assert bound.ns >= int(expected_ms * MS) - 5000  # known to 0.01 ms
    assert bound.finished


def case(name, cap, **options):
    """Return the bound of a case at one of its memory limits."""
    path = DATA / "cases" / f"{name}.json"
    return lower_bound(
        read_workload(f"{path}#workload"),
        read_cluster(f"{path}#caps.{cap}.cluster"),
        json.loads(path.read_text())["num_microbatches"],
        **options,
    )


@pytest.mark.parametrize(
    ("name", "cap", "expected_ms"),
    [
        ("uni-a-p8-m32", "2p", 98.10),
        ("uni-a-p8-m32", "p", 98.44),
        ("uni-a-p8-m32", "half", 101.44),
        ("uni-b-p8-m32", "2p", 98.45),
        ("uni-b-p8-m32", "half", 102.28),
        ("pin-headfirst-p8-m32", "2p", 110.60),
        ("het-alt-p8-m32", "half", 98.53),
    ],
)
def test_bounds_of_cases_are_at_least_as_good_as_known(name, cap, expected_ms):
    assert case(name, cap).ns >= int(expected_ms * MS)


def test_no_bound_is_above_a_published_step():
    """All public points, with little time: a bound cut short holds as well."""
    for path in sorted((DATA / "octopipe").glob("*.json")):
        workload = read_workload(f"{path}#workload")
        for point in json.loads(path.read_text())["points"]:
            num_devices, num_microbatches = point["devices"], point["num_microbatches"]
            bound = lower_bound(
                workload, Cluster.equal(num_devices), num_microbatches, time_limit_s=0.1
            )
            assert bound.ns <= point["published"]["octopipe"]
            assert bound.ns >= point["load_bound_ns"]


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((DATA / "cases").glob("*.json")), ids=lambda p: p.stem)
def test_no_bound_of_a_case_is_above_a_published_step(path):
    found = json.loads(path.read_text())
    for cap, limits in found["caps"].items():
        steps = [limits["one_f_one_b_ns"], (limits["best_published"] or {}).get("step_ns")]
        bound = case(path.stem, cap)
        assert all(bound.ns <= step for step in steps if step)


def test_more_time_never_weakens_a_bound():
    short, long = (
        octopipe("nemotron-nano-v2-9B", 8, 16, time_limit_s=limit) for limit in (0.02, 1.0)
    )
    assert short.ns <= long.ns
    assert not short.finished


def test_the_same_arguments_give_the_same_bound():
    first, second = (octopipe("jamba-52B", 8, 16, time_limit_s=0.3) for _ in range(2))
    assert first == second


def test_offload_is_not_held_against_a_plan():
    """Copying out makes room: the memory argument gives way, and never below the free bound."""
    workload = uniform(8, (100, 100, 100), saved_w_bytes=10, offloadable_bytes=10)
    tight = Cluster.equal(4, memory_bytes=40)
    devices = [
        type(device)(kind="any", memory_bytes=40, offload_bandwidth=10**12)
        for device in tight.devices
    ]
    copies = Cluster(name="copies", devices=tuple(devices), links=tight.links)
    free, without, with_copies = (
        lower_bound(workload, cluster, 8).ns for cluster in (Cluster.equal(4), tight, copies)
    )
    assert free <= with_copies < without


def test_unequal_devices_take_turns():
    """One device twice as fast: three devices do as much as four, and no more."""
    workload = uniform(12, (10, 10, 10))
    fast, slow = (
        type(Cluster.equal(1).devices[0])(kind=kind, memory_bytes=2**60, speed=speed)
        for kind, speed in (("fast", 2.0), ("slow", 1.0))
    )
    cluster = Cluster(name="unequal", devices=(slow, fast, slow), links=Cluster.equal(1).links)
    bound = lower_bound(workload, cluster, 100)
    assert bound.parts["load"] == 12 * 30 * 100 / 4
    # whole layers: 3, 6, 3; the last of three begins after two of them, one at the fast device
    assert bound.parts["device"] >= bound.parts["load"]


def test_more_devices_than_layers_and_one_device():
    workload = uniform(2, (10, 20, 30))
    assert lower_bound(workload, Cluster.equal(5), 4).ns == 10 + 4 * 60
    assert lower_bound(workload, Cluster.equal(1), 4).ns == 4 * 2 * 60
    assert lower_bound(uniform(1), Cluster.equal(3), 7).ns == 7 * 30


def test_thousands_of_layers_are_bounded():
    bound = lower_bound(uniform(2000), Cluster.equal(8), 16)
    assert bound.ns >= 2000 * 30 * 16 // 8
