"""Room: behind time, actions and reloads wait rather than pass the plan's memory."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from executor_tools import make_plan, run_ranks

from benchmarks.saving import saving_batches, saving_layers, saving_loss, saving_workload
from executor.offload.lanes import Entry
from executor.offload.room import Room
from executor.pipeline import Pipeline
from octotune.contract import Cluster
from simulator.memory import usage

TIMES = (0.2, 0.2, 0.2)


class Lane:
    """Two microbatches go out and come back; each copy moves 10 bytes."""

    def __init__(self):
        self.entries = (
            Entry(0, (0, 0), False),
            Entry(1, (0, 1), False),
            Entry(2, (0, 1), True, 0),
            Entry(3, (0, 0), True, 1),
        )
        self.state = (0, 0)
        self.reached = -1
        self.waited = []

    def mark(self, number):
        self.reached = number

    def wait_out(self, key):
        self.waited.append(key)


@pytest.fixture
def lane():
    return Lane()


def room_of(lane, limit, floats=False, gates=(5, 7)):
    return Room(lane, [10] * 4, gates, limit, floats)


def test_what_copies_have_taken_out_is_room(lane):
    room = room_of(lane, limit=25)
    room.start(12, 2)
    room.end()
    assert room.held_bytes == 10
    room.start(12, 2)
    room.end()
    assert not room.fits(12, 4)
    lane.state = (1, 10)
    assert room.fits(12, 4)


def test_a_reload_that_may_start_counts_as_started(lane):
    room = room_of(lane, limit=25)
    room.start(20, 0)
    lane.state = (2, 20)
    assert room.fits(25, 4)  # the first reload's gate is 5
    assert not room.fits(25, 5)
    assert room.fits(15, 5)
    assert not room.fits(15, 7)
    lane.state = (3, 10)  # it has started
    assert room.fits(15, 5)
    assert not room.fits(16, 5)


def test_copies_out_before_a_reload_have_ended_when_it_starts(lane):
    room = room_of(lane, limit=25)
    room.start(20, 0)
    # nothing has left: the reload comes after both copies out and takes less than they free
    assert room.fits(5, 5)
    assert not room.fits(6, 5)


def test_reloads_start_at_their_gates(lane):
    room = room_of(lane, limit=0)  # in the plan's order its check has seen to the room
    for gate, number in ((4, -1), (5, 0), (6, 0), (9, 1)):
        room.reach(gate)
        assert lane.reached == number
    room.begin()
    room.reach(4)
    assert lane.reached == -1


def test_a_reload_waits_for_weights_that_float(lane):
    room = room_of(lane, limit=30, floats=True)
    room.start(35, 0)
    lane.state = (2, 20)
    room.reach(6)
    assert lane.reached == 0  # 15 held and 10 more
    lane.state = (3, 10)
    assert not room.lets(7)
    room.reach(7)
    assert lane.reached == 0
    room.end()
    room.start(0, 6)  # a W
    room.end()
    assert room.lets(7)
    room.reach()  # no gate of its own: what was reached before
    assert lane.reached == 1


def test_a_reload_leaves_room_for_the_next_weights(lane):
    room = room_of(lane, limit=30, floats=True)
    room.put_off_bytes = lambda: 5
    room.start(36, 0)
    lane.state = (2, 20)
    room.reach(5)
    assert lane.reached == -1  # 16 held, 10 more and 5 for a W
    room.begin()
    room.start(36, 4)  # 4 of them are gone before the W starts
    room.reach(5)
    assert lane.reached == 0


def test_what_is_needed_now_comes_back_whatever_the_room(lane):
    room = room_of(lane, limit=0, floats=True)
    room.start(10, 0)
    room.reach(9)
    assert lane.reached == -1
    room.let((0, 1))
    assert lane.reached == 0
    room.let((0, 0))
    assert lane.reached == 1
    room.let((0, 1))
    assert lane.reached == 1


def test_who_waits_for_a_copy_out_lets_the_reloads_before_it_start():
    lane = Lane()
    lane.entries = (lane.entries[0], Entry(3, (0, 0), True, 0), lane.entries[1])
    room = Room(lane, [10] * 3, [3], limit_bytes=0, floats=True)
    room.start(10, 0)
    room.reach(9)
    assert lane.reached == -1
    room.wait_out((0, 1))
    assert lane.reached == 0
    assert lane.waited == [(0, 1)]


@pytest.mark.parametrize("floats", ["plan", "off"])
def test_a_lane_behind_time_never_takes_more_than_the_plans_memory(floats):
    """Reloads come late and weight gradients float; each alone would pass the plan's peak."""
    rows = ["0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0F4 0I2 0W2 0F5 0I3 0W3 0I4 0W4 0I5 0W5"]
    lanes = (
        tuple(f"0O{m}" for m in range(3)),
        *(("0R0", "0O3"), ("0R1", "0O4"), ("0R2", "0O5"), ("0R3", "0R4", "0R5")),
    )
    cluster = Cluster.equal(1)
    cluster = msgspec.structs.replace(
        cluster,
        devices=(msgspec.structs.replace(cluster.devices[0], offload_bandwidth=4 * 10**9),),
    )
    plan = make_plan(
        rows,
        [(1, 0)],
        6,
        cluster=cluster,
        workload=saving_workload([TIMES], own_ms=(1.0, 1.0, 1.0)),
        offload=(tuple(word for words in lanes for word in words),),
    )
    inputs, targets = next(saving_batches(6))
    models = [saving_layers([TIMES])]

    def body(transport):
        pipe = Pipeline(
            plan,
            models[transport.rank],
            saving_loss,
            transport=transport,
            timeout_s=20,
            float_limit=floats,
        )
        lane = pipe._offload.lane
        lane.road = dataclasses.replace(lane.road, bandwidth=4 * 10**8)
        timelines = []
        for _ in range(3):
            pipe.step(inputs, targets)
            timelines.append(pipe.timeline())
        return timelines, int(pipe.predicted.peak_bytes[0])

    ((timelines, peak),) = run_ranks(1, body)
    for timeline in timelines:
        assert usage(timeline, 0)[1].max() <= peak
