"""What jittered steps leave of a fill plan: the rule of handing over, on waits."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from executor_tools import make_workload
from hypothesis import given
from hypothesis import strategies as st

from octotune.contract import Cluster, Link, Links, Stage, build_costs
from simulator.actions import Schedule
from simulator.fills import HandoverRule, Waits, filled_passes, waits_before
from simulator.floating import simulate_floating

WORDS = (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1B0", "1F1", "1B1"))


def waits(lengths, before=None):
    """Waits that begin with the step; `before` is when the peer's message before was taken."""
    lengths = np.array(lengths, dtype=np.int64)
    return Waits(
        began_ns=np.zeros_like(lengths),
        taken_ns=lengths,
        before_ns=np.full_like(lengths, -1) if before is None else np.array(before),
    )


def rule(**fields):
    return HandoverRule(
        **({"switch_ns": 0, "kept": 0.0, "spread": 0.0, "least_drift_ns": 0} | fields)
    )


@given(
    length=st.integers(20, 500),
    kept=st.floats(0, 0.5),
    switch=st.integers(0, 10),
    time=st.integers(1, 20),
)
def test_even_waits_are_filled_to_what_is_handed_over(length, kept, switch, time):
    found = filled_passes(
        waits([[length]] * 6),
        [False, *[True] * 5],
        [[[0]]],
        [time],
        rule(kept=kept, switch_ns=switch, ahead=True, profile=1),
    )
    assert found == (length - switch) * (1.0 - kept) // time


def test_what_entering_takes_is_lost_of_each_wait():
    two = waits([[50, 70]] * 6)
    filled = [False, *[True] * 5]
    hurried = rule(profile=1, ahead=True, enter_ns=5)
    assert filled_passes(two, filled, [[[0], [0]]], [10], hurried) == 4 + 6


def test_without_working_ahead_a_plan_is_the_most():
    even = waits([[100, 100]] * 5)
    planned = [[[0, 1], [2]]]
    filled = [False, *[True] * 4]
    paced, hurried = rule(profile=1), rule(profile=1, ahead=True)
    assert filled_passes(even, filled, planned, [10, 10, 10], paced) == 1
    assert filled_passes(even, filled, planned, [10, 10, 10], hurried) == 6.5
    with pytest.raises(ValueError, match="4 filled steps, 4 of them do not count; give more"):
        filled_passes(even, filled, planned, [10, 10, 10], paced, skip=4)


def test_a_wait_is_believed_by_its_lower_quartile_and_its_peers_message():
    lengths = [[500], [80], [40], [100], [100], [30]]
    filled = [False] * 4 + [True] * 2
    # 40 is the lower quartile of three; the last wait ends before that
    assert filled_passes(waits(lengths), filled, [[[0] * 9]], [10], rule()) == (4 + 3) / 2
    longer = waits([*lengths[:4], *[[100]] * 16])
    filled_long = [False] * 4 + [True] * 16
    # the window is full at the 16th step, and looked at after the 18th
    found = filled_passes(longer, filled_long, [[[0] * 20]], [10], rule())
    assert found == (14 * 4 + 2 * 10) / 16


def test_a_wait_is_believed_to_end_as_long_after_its_peers_message_before_as_usual():
    lengths = [[500], [80], [80], [80], [100], [100]]
    before = [[90], [50], [50], [50], [-10], [50]]
    filled = [False] * 4 + [True] * 2
    # 30 after the message before: at 20, where 80 would be believed
    found = filled_passes(waits(lengths, before), filled, [[[0] * 9]], [10], rule())
    assert found == (2 + 8) / 2


def test_gaps_are_learned_again_with_lengths_from_steps_without_fill_work():
    lengths = [[50]] * 2 + [[100]] * 24
    before = [[0]] * 2 + [[10], [0]] * 12
    filled = [False, False, *[False, True] * 12]
    found = filled_passes(
        waits(lengths, before), filled, [[[0] * 20]], [10], rule(profile=2), skip=8
    )
    assert found == 9  # 90 after the message before, not 50


def test_a_wait_that_ends_during_a_micro_step_is_seen_when_that_ends():
    """In filled steps waits seem longer than they are."""
    lengths = [[100]] * 2 + [[20]] * 40
    filled = [False, False, *[True] * 40]
    # believed to be 30 long, later on: one begins in each of them, and none were it 20
    ran = filled_passes(waits(lengths), filled, [[[0] * 20]], [30], rule(profile=2))
    assert ran == 1


def test_small_drift_is_not_believed():
    lengths = [[100]] * 2 + [[200]] * 24
    filled = [False, False, *[True] * 24]
    small = rule(profile=2, least_drift_ns=150)
    assert filled_passes(waits(lengths), filled, [[[0] * 30]], [10], small) == 10


def test_waits_of_1f1b_are_those_of_its_steps():
    schedule = Schedule.from_words(WORDS)
    times = {"forward_ns": 10, "input_grad_ns": 10, "weight_grad_ns": 10}
    layers = make_workload(2, output_bytes=0, **times)
    stages = (Stage(layers=(0, 1), device=0), Stage(layers=(1, 2), device=1))
    links = Links(intra_host=Link(latency_ns=0, bandwidth=10**18))
    cluster = msgspec.structs.replace(Cluster.equal(2), links=links)
    costs = build_costs(layers, cluster, stages, 2)
    ran = simulate_floating(schedule, costs, floating=False)
    starts, ends = np.stack([ran.start_ns] * 3), np.stack([ran.end_ns] * 3)
    first = waits_before(schedule, costs, starts, ends, 0, [2, 3])
    assert first.length_ns.tolist() == [[20, 10]] * 3
    # 0B1's message comes after 0B0's
    assert first.before_ns.tolist() == [[-1, int(ran.start_ns[2])]] * 3
    second = waits_before(schedule, costs, starts, ends, 1, [0])
    assert second.length_ns.tolist() == [[10]] * 3
