"""Optimizer state moves in the gaps of the copy lane, and is back in time."""

from __future__ import annotations

import msgspec
import pytest

from octotune.check import check
from octotune.contract import Cluster, Device, Layer, Link, Links, Plan, Stage, Workload
from octotune.errors import BrokenPlanError
from octotune.fill.bubbles import find_bubbles
from octotune.fill.check import check_fill
from octotune.fill.jobs import Configuration, FillJob, MicroStep
from octotune.fill.make import make_fill_plan
from octotune.fill.packing import Margins
from octotune.fill.policies import find_policy
from octotune.fill.state import StateMove, state_moves

BUBBLE = (100, 300)  # of device 0, between its F and its B


def plan(*, state=40, bandwidth=10**9, offload=False, link=None, microbatch=100):
    """Two devices; device 0 waits from 100 to 300 for device 1, and updates at 500."""

    def layer(name):
        return Layer(
            name=name,
            forward_ns=100,
            input_grad_ns=50,
            weight_grad_ns=50,
            optimizer_ns=10,
            param_bytes=0,
            state_bytes=state,
            saved_bytes=microbatch,
            output_bytes=0,
            offloadable_bytes=microbatch if offload else 0,
        )

    device = Device(
        kind="a", memory_bytes=1000, offload_bandwidth=bandwidth, host_link=link, reserved_bytes=7
    )
    return Plan(
        workload=Workload(name="two", layers=(layer("0"), layer("1"))),
        cluster=Cluster(
            name="two",
            devices=(device, device),
            links=Links(intra_host=Link(latency_ns=0, bandwidth=10**18)),
        ),
        num_microbatches=1,
        stages=(Stage(layers=(0, 1), device=0), Stage(layers=(1, 2), device=1)),
        actions=(("0F0", "0B0"), ("1F0", "1B0")),
        offload=(("0O0", "0R0"), ()) if offload else None,
    )


def moves_of(what, share=0.5):
    return state_moves(what, check(what).timeline, share)


def test_state_leaves_at_once_and_comes_back_at_the_last_moment():
    first, second = moves_of(plan())
    assert first == StateMove(
        device=0, num_bytes=20, copy_ns=20, out_ns=20, back_ns=380, by_ns=400
    )
    assert (second.out_ns, second.back_ns, second.by_ns) == (20, 280, 300)
    assert first.free_bytes(*BUBBLE) == 20
    assert first.free_bytes(10, 300) == first.free_bytes(100, 381) == 0
    assert first.lane_ns(10, 390) == 10 + 10


def test_activations_come_first_on_the_lane():
    """The activation leaves from 100 to 150 and is back at 200; the state moves around it."""
    what = plan(offload=True, microbatch=50, state=240)
    timeline = check(what).timeline
    assert timeline.copy_start_ns.tolist() == [100, 150]
    assert timeline.copy_end_ns.tolist() == [150, 200]
    first, _ = moves_of(what)
    assert first.copy_ns == 120
    assert first.out_ns == 220  # 100 before, 20 after
    assert first.back_ns == 280


def test_devices_of_one_link_take_its_sides_in_turn():
    first, second = moves_of(plan(link="bus"))
    assert (first.out_ns, second.out_ns) == (20, 40)
    # the ways back do not meet: 380 to 400, and 280 to 300
    assert (first.back_ns, second.back_ns) == (380, 280)


@pytest.mark.parametrize("changed", [{"bandwidth": 0}, {"bandwidth": 10**8}])
def test_state_stays_where_there_is_no_time_for_both_ways(changed):
    """At a byte in 10 ns, 20 bytes take 200 ns each way: too long for device 1's 300."""
    first, second = moves_of(plan(**changed))
    assert second is None
    assert (first is None) == (changed["bandwidth"] == 0)


def test_a_bubble_has_the_bytes_that_are_away_and_less_of_the_lane():
    what = plan(bandwidth=10**8)
    timeline = check(what).timeline
    moves = state_moves(what, timeline, 0.5)
    plain, freed = (find_bubbles(timeline, moves=m)[0][0] for m in ((), moves))
    assert (plain.start_ns, plain.end_ns) == BUBBLE
    assert moves[0].out_ns == moves[0].back_ns == 200  # never away for all of the bubble
    assert freed.free_bytes == plain.free_bytes
    assert (plain.copy_ns, freed.copy_ns) == (0, 200)
    quick = plan()
    moves = state_moves(quick, check(quick).timeline, 0.5)
    assert find_bubbles(timeline, moves=moves)[0][0].free_bytes == plain.free_bytes + 20


def test_a_fill_plan_with_moving_state_takes_larger_jobs_and_recomputes():
    free = 1000 - 7 - 40 - 100
    micro = (MicroStep(time_ns=50, memory_bytes=free + 15),)
    job = FillJob(
        name="large",
        kind="inference",
        samples=5,
        configurations=(Configuration(batch_size=1, micro_steps=micro),),
    )
    margins = Margins(threshold_ns=150, margin=0.0)
    settings = {"margins": margins, "policy": find_policy("sjf")}
    with pytest.raises(ValueError, match="needs 868 bytes, the roomiest bubble has 853"):
        make_fill_plan(plan(), (job,), **settings)
    fill = make_fill_plan(plan(), (job,), state_share=0.5, **settings)
    assert check_fill(fill).predicted.end_ns[0] is not None
    assert [move.device for move in fill.state] == [0, 1]
    with pytest.raises(BrokenPlanError, match="state has 0 moves, which are not the 2"):
        check_fill(msgspec.structs.replace(fill, state=()))
