"""Two timelines of one plan side by side."""

import random
from dataclasses import replace

import numpy as np
import pytest

from simulator.actions import Action
from simulator.bubbles import Cause
from simulator.difference import difference
from simulator.errors import MismatchError
from tests import oracle
from tests.measured import timeline_of
from tests.random_plans import random_plan
from tests.small_plans import plan_of, run


def test_a_timeline_does_not_differ_from_itself():
    for seed in range(30):
        timeline = run(random_plan(random.Random(seed)))
        same = difference(timeline, timeline)
        assert same.known.all()
        assert same.step_ns == 0
        for array in (same.start_ns, same.duration_ns, same.gap_ns, same.busy_ns, same.idle_ns):
            assert not array.any()
        assert not same.forward_flight_ns.any()


def test_one_longer_action_is_named_and_the_totals_follow():
    """The longest-running worlds: the oracle with one action made longer."""
    for seed in range(40):
        rng = random.Random(seed)
        plan = random_plan(rng)
        word = rng.choice([word for row in plan.actions for word in row])
        simulated = run(plan)
        found = difference(simulated, timeline_of(plan, oracle.run(plan, {word: 1000})))
        assert found.largest(1) == ((word, 1000),)
        assert found.duration_ns.sum() == 1000
        device = plan.stages[Action.parse(word).stage].device
        assert found.busy_ns.tolist() == [
            1000 if each == device else 0 for each in range(len(plan.actions))
        ]
        # what a device gains in busy time and idle time is what the step gains
        assert (found.busy_ns + found.idle_ns).tolist() == [found.step_ns] * len(plan.actions)
        assert sum(found.idle_by_cause.values()).tolist() == found.idle_ns.tolist()


def test_gaps_say_how_much_longer_each_action_was_waited_for():
    for seed in range(20):
        rng = random.Random(seed)
        plan = random_plan(rng)
        word = rng.choice([word for row in plan.actions for word in row])
        first, second = run(plan), timeline_of(plan, oracle.run(plan, {word: 500}))
        found = difference(first, second)
        gaps = []
        for timeline in (first, second):
            before = timeline.end_ns.copy()
            before[1:] = timeline.end_ns[:-1]
            before[timeline.schedule.offsets[:-1][np.diff(timeline.schedule.offsets) > 0]] = 0
            gaps.append(timeline.start_ns - before)
        assert found.gap_ns.tolist() == (gaps[1] - gaps[0]).tolist()


def test_means_by_stage_and_kind():
    plan = random_plan(random.Random(8))
    longer = {
        word: 100 if "F" in word else 30 for row in plan.actions for word in row if word[0] == "0"
    }
    found = difference(run(plan), timeline_of(plan, oracle.run(plan, longer)))
    means = found.duration_by_stage(len(plan.stages))
    assert means[0, 0] == 100
    assert set(means[0, 1:].tolist()) <= {0, 30}
    assert means[0, 1:].any()
    assert not means[1:].any()


def test_actions_are_matched_by_what_they_are_where_a_weight_gradient_floated():
    times = [(10, 10, 10), (10, 10, 10)]
    last = "1F0 1I0 1W0 1F1 1I1 1W1"
    first = run(plan_of(["0F0 0F1 0I0 0W0 0I1 0W1", last], times=times))
    second = run(plan_of(["0F0 0F1 0I0 0I1 0W1 0W0", last], times=times))
    found = difference(first, second)
    assert first.schedule.words()[0][3] == "0W0"
    assert found.start_ns[3] == second.start_ns[5] - first.start_ns[3]
    assert not found.duration_ns.any()


def test_what_was_not_recorded_is_left_out():
    plan = random_plan(random.Random(6))
    simulated = run(plan)
    start = simulated.start_ns.copy()
    start[0] = -1
    sent = simulated.forward_sent_ns.copy()
    sent[0] = -1
    found = difference(simulated, replace(simulated, start_ns=start, forward_sent_ns=sent))
    assert found.known.tolist() == [False] + [True] * (len(start) - 1)
    assert not found.duration_ns.any()
    assert not found.forward_known[0].any()
    assert found.idle_by_cause[Cause.UNKNOWN].any()


def test_runs_of_different_plans_have_no_difference():
    times = [(10, 10, 10), (10, 10, 10)]
    last = "1F0 1B0 1F1 1B1"
    whole = run(plan_of(["0F0 0F1 0B0 0B1", last], times=times))
    split = run(plan_of(["0F0 0F1 0I0 0W0 0B1", last], times=times))
    with pytest.raises(MismatchError, match=r"only the first timeline runs 0B0; only runs of"):
        difference(whole, split)
    with pytest.raises(MismatchError, match=r"only the second timeline runs 0B0; only runs of"):
        difference(split, whole)
    fewer = run(plan_of(["0F0 0B0", "1F0 1B0"], times=times))
    with pytest.raises(MismatchError, match=r"has 2 microbatches, the other 1"):
        difference(whole, fewer)
    swapped = run(plan_of([last, "0F0 0F1 0B0 0B1"], times=times, devices=[1, 0]))
    with pytest.raises(MismatchError, match=r"stages are on different devices"):
        difference(whole, swapped)
    wider = run(plan_of(["0F0 0F1 0B0 0B1", last, ""], times=times))
    with pytest.raises(MismatchError, match=r"has 2 devices, the other 3"):
        difference(whole, wider)
