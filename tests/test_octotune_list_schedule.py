"""The machines beneath the schedules: time and memory as the simulator has them, no deadlock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_costs import UNIT_NS, in_flight, unit_costs, with_memory

from octotune.placement import linear, loop, v_shape, wave
from octotune.schedules import FAMILIES
from octotune.schedules.choose import most_in_flight
from octotune.schedules.controllable_memory import ONE_F_ONE_B_V_BLOCKS, V_HALF_BLOCKS
from octotune.schedules.list_schedule import Rule, list_schedule
from octotune.schedules.pipeoffload import uniform_block
from octotune.schedules.rhythm import Rhythm, Trial, phases_of, play, search
from octotune.schedules.squeeze import block_of, squeezed
from octotune.schedules.weights import (
    DONE,
    STUCK,
    TOO_BIG,
    TOO_MANY,
    place_weights,
    without_weights,
)
from octotune.schedules.world import world_of
from octotune.schedules.zb_v import zb_v
from simulator.actions import Kind, Schedule, kind_of
from simulator.engine import simulate
from simulator.errors import OutOfMemoryError
from simulator.memory import order_peak_bytes
from simulator.validate import validate

PLACEMENTS = [linear(1), linear(3), v_shape(2), v_shape(3), loop(3, 2), loop(2, 3), wave(2, 3)]
ADAPTIVE = [name for name, family in FAMILIES.items() if family.adapts_to_memory]


@st.composite
def random_costs(draw, placement, *, tight=False):
    """Costs with odd times, delays, busy channels and sizes of every kind."""
    num_stages = len(placement)
    m = draw(st.integers(1, 6))
    base = unit_costs(placement, m)

    def numbers(low, high, count=num_stages):
        values = draw(st.lists(st.integers(low, high), min_size=count, max_size=count))
        return np.array(values, dtype=np.int64)

    recompute = numbers(0, 1).astype(bool)
    crosses = base.stage_device[:-1] != base.stage_device[1:]
    i, w = numbers(1, 9), numbers(1, 9)
    costs = replace(
        base,
        forward_ns=numbers(1, 9),
        input_grad_ns=i,
        weight_grad_ns=w,
        backward_ns=i + w,
        transfer_hold_ns=np.where(crosses, numbers(0, 9, num_stages - 1), 0),
        transfer_latency_ns=np.where(crosses, numbers(0, 9, num_stages - 1), 0),
        saved_bytes=numbers(0, 5),
        saved_w_bytes=numbers(0, 5),
        held_w_bytes=numbers(0, 4),
        workspace_bytes=numbers(0, 3),
        input_bytes=numbers(0, 3),
        recompute=recompute,
        static_bytes=numbers(0, 3, base.num_devices),
    )
    if tight:
        costs = with_memory(costs, numbers(0, 60, base.num_devices))
    return costs


def order_of(*rows):
    return Schedule.from_words([row.split() for row in rows])


def devices_of(costs):
    return range(costs.num_devices)


@st.composite
def trials(draw, passes):
    numbers = draw(st.lists(st.floats(0, 5), min_size=4 * passes - 1, max_size=4 * passes - 1))
    rhythm = replace(
        Rhythm.even(passes).with_numbers(numbers),
        on_costs=draw(st.booleans()),
        spaced=draw(st.booleans()),
        group=draw(st.integers(1, 3)),
    )
    rule = Rule(
        window=draw(st.sampled_from([0.0, 0.5, 2.0, 100.0])),
        slack=draw(st.sampled_from([0.0, 0.4, 1.0])),
        delay=draw(st.sampled_from([0.0, 0.5, 1.0])),
        backlog=draw(st.sampled_from([1, 3, 100])),
    )
    return Trial(rhythm=rhythm, rule=rule, ideal=draw(st.booleans()))


def passes_of(placement):
    return len(placement) // (max(placement) + 1)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_played_order_is_complete_and_ends_when_the_simulator_says(data):
    placement = data.draw(st.sampled_from(PLACEMENTS))
    costs = data.draw(random_costs(placement))
    split = data.draw(st.booleans())
    trial = data.draw(trials(passes_of(placement)))
    played = play(trial, world_of(costs, devices_of(costs)), split=split)
    if played.state != DONE:
        # orders that wait for each other come only from a narrow window
        assert played.state == STUCK
        assert trial.rule.window < 100
        return
    schedule = played.schedule()
    validate(schedule, costs)
    assert simulate(schedule, costs).step_ns == played.end_ns
    kinds = set(kind_of(schedule.codes).tolist())
    assert kinds == ({Kind.F, Kind.I, Kind.W} if split else {Kind.F, Kind.B})


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_list_schedule_keeps_within_memory_and_runs_as_soon_as_it_may(data):
    """With a wide window it runs whenever each stage's next microbatch has room at once."""
    placement = data.draw(st.sampled_from(PLACEMENTS))
    costs = data.draw(random_costs(placement, tight=True))
    split = data.draw(st.booleans())
    world = world_of(costs, devices_of(costs))
    trial = data.draw(trials(passes_of(placement)))
    rule = trial.rule._replace(window=100.0)
    played = list_schedule(phases_of(trial.rhythm, world, split=split), world, rule, split=split)
    back = Kind.I if split else Kind.B
    margin = np.maximum(0, world.rise[back]) + world.workspace
    enough = all(
        int(world.rise[Kind.F, stages].sum() + margin[stages].max()) <= world.room[device]
        for device in devices_of(costs)
        for stages in [np.flatnonzero(costs.stage_device == device)]
    )
    if enough:
        assert played.state == DONE
        schedule = played.schedule()
        validate(schedule, costs)
        assert (order_peak_bytes(schedule, costs) <= costs.memory_bytes).all()
        assert simulate(schedule, costs).step_ns == played.end_ns
    elif played.state == DONE:
        assert (order_peak_bytes(played.schedule(), costs) <= costs.memory_bytes).all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_family_that_adapts_keeps_within_memory_or_names_the_device(data):
    family = FAMILIES[data.draw(st.sampled_from(ADAPTIVE))]
    placement = family.placement(data.draw(st.integers(1, 3)))
    costs = data.draw(random_costs(placement, tight=True))
    try:
        schedule = family.generate(costs)
    except OutOfMemoryError as error:
        named = error
        device = int(named.place.removeprefix("device "))
        limit = costs.memory_bytes[device]
    else:
        validate(schedule, costs)
        assert (order_peak_bytes(schedule, costs) <= costs.memory_bytes).all()
        return
    assert named.limit_bytes == limit
    assert named.needed_bytes > limit


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "v-min", "1f1b-v", "hanayo-w1"])
def test_memory_for_one_microbatch_is_enough_and_a_byte_less_is_not(name):
    """All forwards of a microbatch on a device, then its backwards: the least any order needs."""
    family = FAMILIES[name]
    costs = unit_costs(family.placement(3), 3)
    costs = replace(
        costs,
        saved_w_bytes=np.arange(3, 3 + costs.num_stages),
        held_w_bytes=np.full(costs.num_stages, 2),
        workspace_bytes=np.full(costs.num_stages, 1),
    )
    least = np.array(
        [
            int(costs.saved_w_bytes[costs.stage_device == device].sum()) + 2 + 1
            for device in range(3)
        ]
    )
    exact = with_memory(costs, least)
    assert (order_peak_bytes(family.generate(exact), exact) <= least).all()
    less = with_memory(costs, least - [0, 1, 0])
    with pytest.raises(OutOfMemoryError, match=f"device 1 needs {least[1]} B for this schedule"):
        family.generate(less)


def test_ws_fill_the_wait_for_the_first_gradient():
    """One microbatch ahead: device 0 waits for I1 while W0 is there to run."""
    order = order_of("0F0 0F1 0I0 0I1", "1F0 1I0 1F1 1I1")
    costs = unit_costs(linear(2), 2)
    world = world_of(costs, devices_of(costs))
    eager = place_weights(order, world, slack=0.0)
    assert eager.schedule().words()[0] == ("0F0", "0F1", "0I0", "0W0", "0I1", "0W1")
    assert eager.end_ns == 7 * UNIT_NS


def test_a_w_that_would_delay_is_put_off_by_slack():
    order = order_of("0F0 0F1 0I0 0I1", "1F0 1I0 1F1 1I1")
    costs = unit_costs(linear(2), 2)
    costs = replace(costs, weight_grad_ns=costs.weight_grad_ns * 3)
    world = world_of(costs, devices_of(costs))
    patient = place_weights(order, world, slack=0.0)
    assert patient.schedule().words()[0] == ("0F0", "0F1", "0I0", "0I1", "0W0", "0W1")
    hasty = place_weights(order, world, slack=1.0)
    assert hasty.schedule().words()[0] == ("0F0", "0F1", "0I0", "0W0", "0I1", "0W1")
    backlog = place_weights(order, world, slack=0.0, backlog=1)
    assert backlog.schedule().words()[1] == ("1F0", "1I0", "1W0", "1F1", "1I1", "1W1")


def test_ws_that_stand_in_an_order_stay_there():
    costs = unit_costs(v_shape(3), 7)
    schedule = zb_v(3, 7)
    assert place_weights(schedule, world_of(costs, devices_of(costs))).schedule() == schedule
    assert without_weights(schedule).num_actions == 2 * 6 * 7


@pytest.mark.parametrize(
    ("rows", "limits", "state"),
    [
        (["0I0 0F0", "1F0 1I0"], {}, STUCK),
        (["0F0 0F1 0I0 0I1", "1F0 1I0 1F1 1I1"], {"memory": 1}, TOO_BIG),
        (["0F0 0F1 0I0 0I1", "1F0 1I0 1F1 1I1"], {"most": 1}, TOO_MANY),
    ],
)
def test_an_order_that_cannot_be_played_says_why(rows, limits, state):
    order = order_of(*rows)
    most = limits.pop("most", None)
    costs = unit_costs(linear(2), 1 if state == STUCK else 2, **limits)
    played = place_weights(order, world_of(costs, devices_of(costs), most=most))
    assert (played.state, played.device) == (state, 1 if state == STUCK else 0)


# -- rhythms and squeezing


def test_phases_of_a_v_follow_the_hops():
    costs = unit_costs(v_shape(3), 2)
    rhythm = Rhythm.of((1, 2), (3, 4), (5, 6, 7))
    phases = phases_of(rhythm, world_of(costs, devices_of(costs)), split=True)
    assert (phases.forward // 1000).tolist() == [0, 1, 2, 7, 9, 11]
    assert (phases.backward // 1000).tolist() == [38, 35, 32, 25, 21, 17]
    assert (phases.beats // 1000).tolist() == [0, 6]


def test_phases_on_costs_stretch_with_the_stage():
    costs = unit_costs(linear(3), 2, shares=[1.0, 3.0, 1.0], transfer=0.5)
    rhythm = replace(Rhythm.even(1, forward=2, backward=1), on_costs=True)
    phases = phases_of(rhythm, world_of(costs, devices_of(costs)), split=True)
    assert (phases.forward / UNIT_NS).tolist() == [0, 3, 10]
    assert phases.period == 9 * UNIT_NS


def test_groups_come_at_once_and_then_pause():
    costs = unit_costs(loop(2, 2), 5)
    rhythm = replace(Rhythm.even(2), group=2)
    phases = phases_of(rhythm, world_of(costs, devices_of(costs)), split=True)
    assert (phases.beats // 1000).tolist() == [0, 3, 12, 15, 24]


@pytest.mark.parametrize("p", range(1, 13))
@pytest.mark.parametrize("split", [True, False])
def test_squeezing_keeps_the_peak_and_shortens_the_order(p, split):
    costs = unit_costs(v_shape(p), 2 * p + 1)
    world = world_of(costs, devices_of(costs))
    rhythm = (V_HALF_BLOCKS if split else ONE_F_ONE_B_V_BLOCKS)[0]
    block = block_of(rhythm, world, split=split)
    schedule = squeezed(block, world)
    validate(schedule, costs)
    leaves = block.backward + 2 if block.weight is None else block.weight + 1
    lifetime = leaves - block.forward
    repeated = [
        sum(-(-int(lifetime[stage]) // block.period) for stage in (device, 2 * p - 1 - device))
        for device in range(p)
    ]
    assert max(in_flight(schedule)) <= max(repeated)
    last = int(leaves.max()) + block.period * 2 * p
    assert simulate(schedule, costs).step_ns <= last * UNIT_NS / 2


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("v", [1, 2, 3, 4, 6])
def test_the_uniform_block_gives_each_device_one_action_a_slot(p, v):
    block = uniform_block(p, v)
    for rank in range(p):
        mine = slice(rank, None, p)
        slots = np.concatenate([part[mine] for part in (block.forward, block.backward)])
        slots = np.concatenate([slots, block.weight[mine]]) % block.period
        assert sorted(slots.tolist()) == list(range(block.period))
    assert (np.diff(block.forward) >= 1).all()
    assert (np.diff(block.backward) <= -1).all()
    assert block.backward[-1] > block.forward[-1]


def test_a_search_is_never_worse_than_where_it_starts_and_repeats_itself():
    costs = unit_costs(v_shape(3), 6, shares=[1.0, 0.7, 1.2], transfer=0.1)
    world = world_of(costs, devices_of(costs), most=5)
    start = Trial(rhythm=Rhythm.even(2), rule=Rule(window=100.0))
    first = play(start, world)
    found, again = search([start], world, seed=3), search([start], world, seed=3)
    assert found.end_ns <= first.end_ns
    assert found.schedule() == again.schedule()
    assert most_in_flight(found.schedule()) <= 5
    better = found._replace(end_ns=1)
    assert search([start], world, incumbent=better) is better
