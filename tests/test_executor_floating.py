"""Which W a rank runs: the first of the plan that may, in time for memory and for B's."""

from __future__ import annotations

import random

import pytest
from executor_tools import make_plan, random_rows

from executor.floating import FloatingWeights
from executor.program import lower
from octotune.contract import build_costs
from simulator.actions import Kind
from simulator.memory import byte_changes, order_peak_bytes


def weights_of(rows, limit=None, costs=None):
    """The W's of one device that holds all stages, and its ops by their word."""
    num_stages = 1 + max(int(word[0]) for row in rows for word in row.split())
    num_microbatches = 1 + max(int(word[2]) for row in rows for word in row.split())
    plan = make_plan(rows, [(1, 0)] * num_stages, num_microbatches)
    (program,) = lower(plan.schedule(), [0] * num_stages)
    rise, fall = costs or ([0] * 4 * num_stages, [0] * 4 * num_stages)
    return (
        FloatingWeights(program.ops, rise, fall, limit),
        {str(op.action): op for op in program.ops},
    )


def test_the_first_of_the_plan_goes_first():
    floating, ops = weights_of(["0F0 1F0 0F1 1F1 1I0 0I0 1I1 0I1 0W0 1W0 0W1 1W1"])
    assert floating.take() is None
    for word in ("0F0", "1F0", "0F1", "1F1", "1I0", "0I0"):
        floating.note(ops[word])
    assert floating.take() is ops["0W0"]
    assert floating.take() is ops["1W0"]
    assert floating.take() is None


def test_a_stages_ws_keep_their_order_even_if_a_later_one_could_run():
    floating, ops = weights_of(["0F0 0F1 0I1 0I0 0W0 0W1"])
    for word in ("0F0", "0F1", "0I1"):
        floating.note(ops[word])
    assert floating.take() is None
    floating.note(ops["0I0"])
    assert [floating.take(), floating.take()] == [ops["0W0"], ops["0W1"]]


def test_a_b_waits_for_the_ws_before_it_and_holds_up_those_after():
    floating, ops = weights_of(["0F0 0F1 0F2 0I0 0W0 0B1 0I2 0W2"])
    for word in ("0F0", "0F1", "0F2", "0I0"):
        floating.note(ops[word])
    assert floating.must_run_before(ops["0B1"]) is ops["0W0"]
    assert floating.must_run_before(ops["0B1"]) is None
    floating.note(ops["0B1"])
    floating.note(ops["0I2"])
    assert floating.take() is ops["0W2"]


def test_a_full_device_runs_ws_first():
    # F adds 4 and keeps them, I gives 2 back, W the other 2
    costs = ([4, 0, 0, 0], [0, 4, 2, 2])
    floating, ops = weights_of(["0F0 0I0 0W0 0F1 0I1 0W1"], limit=5, costs=costs)
    floating.note(ops["0F0"])
    assert floating.must_run_before(ops["0I0"]) is None
    floating.note(ops["0I0"])
    assert floating.must_run_before(ops["0F1"]) is ops["0W0"]
    floating.note(ops["0W0"])
    assert floating.must_run_before(ops["0F1"]) is None


@pytest.mark.parametrize("seed", range(40))
def test_whatever_comes_late_the_plans_peak_holds_and_all_run(seed):
    """Inputs come late at random; the order that results keeps to the plan's own peak."""
    rng = random.Random(seed)
    homes = [0] * rng.randint(1, 4)
    count = rng.randint(1, 5)
    plan = make_plan(random_rows(rng, homes, 1, count), [(1, 0)] * len(homes), count)
    schedule = plan.schedule()
    costs = build_costs(plan.workload, plan.cluster, plan.stages, count)
    (program,) = lower(schedule, homes)
    rise, fall = (changes.tolist() for changes in byte_changes(costs))
    peak = int(order_peak_bytes(schedule, costs)[0])
    static = int(costs.static_bytes[0])
    floating = FloatingWeights(program.ops, rise, fall, peak - static)
    for _ in range(2):  # a second step begins anew
        floating.reset()
        ran = []

        def run(op, ran=ran):
            ran.append(op.action.code)
            floating.note(op)

        for op in program.ops:
            if op.kind == Kind.W:
                continue
            while (weight := floating.must_run_before(op)) is not None:
                run(weight)
            while rng.random() < 0.4 and (weight := floating.take()) is not None:
                run(weight)
            run(op)
        while (weight := floating.take()) is not None:
            run(weight)
        assert sorted(ran) == sorted(schedule.row(0).tolist())
        done = type(schedule).from_codes([ran])
        assert order_peak_bytes(done, costs)[0] <= peak
