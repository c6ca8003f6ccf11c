"""Bytes over time and peaks: by hand, by closed form, and against the sum at every moment."""

import random

import msgspec
import pytest

from octotune.contract import Stage
from simulator.errors import OutOfMemoryError
from simulator.memory import (
    check_memory,
    host_peak_bytes,
    host_usage,
    order_peak_bytes,
    readable,
    usage,
)
from tests.random_plans import random_plan
from tests.small_plans import one_f_one_b, plan_of, run


def with_devices(plan, **fields):
    devices = tuple(msgspec.structs.replace(device, **fields) for device in plan.cluster.devices)
    return msgspec.structs.replace(
        plan, cluster=msgspec.structs.replace(plan.cluster, devices=devices)
    )


def with_recompute(plan):
    stages = tuple(msgspec.structs.replace(stage, recompute=True) for stage in plan.stages)
    return msgspec.structs.replace(plan, stages=stages)


def held(timeline, device):
    times, sizes = usage(timeline, device)
    return list(zip(times.tolist(), sizes.tolist(), strict=True))


def test_case_d01_1f1b_holds_one_more_on_each_earlier_device():
    timeline = run(plan_of(one_f_one_b(8, 16), times=[(1, 1, 1)] * 8, saved_bytes=1))
    assert timeline.peak_bytes.tolist() == [8, 7, 6, 5, 4, 3, 2, 1]


def test_case_d11_the_heaviest_device_decides_not_the_mean():
    """Eight equal layers cut 1, 2, 2, 3: the last device holds three layers of one microbatch."""
    small = plan_of(["0F0 0B0"], times=[(1, 1, 1)] * 8, devices=[0] * 8)
    cuts = [0, 1, 3, 5, 8]
    stages = tuple(Stage(layers=(cuts[s], cuts[s + 1]), device=s) for s in range(4))
    devices = small.cluster.devices * 4
    plan = msgspec.structs.replace(
        small,
        cluster=msgspec.structs.replace(small.cluster, devices=devices),
        stages=stages,
        actions=tuple((f"{s}F0", f"{s}B0") for s in range(4)),
    )
    assert run(plan).peak_bytes.tolist() == [10, 20, 20, 30]


@pytest.mark.parametrize("m", [16, 64])
def test_case_d13_peaks_do_not_grow_with_the_number_of_microbatches(m):
    timeline = run(plan_of(one_f_one_b(4, m), times=[(1, 1, 1)] * 4))
    assert timeline.peak_bytes.tolist() == [40, 30, 20, 10]


def test_split_backward_holds_each_kind_of_bytes_as_long_as_the_contract_says():
    plan = plan_of(
        ["0F0 0I0 0W0"],
        times=[(2, 3, 4)],
        saved_bytes=100,
        saved_w_bytes=10,
        held_w_bytes=1,
        workspace_bytes=1000,
        state_bytes=50000,
    )
    timeline = run(with_devices(plan, reserved_bytes=200000))
    assert held(timeline, 0) == [
        (0, 251110),  # F: saved, saved for W, workspace
        (2, 251111),  # I: what W needs of the output's gradient on top
        (5, 251011),  # W: what only I needed is gone
        (9, 250000),
    ]
    assert timeline.peak_bytes.tolist() == [251111]


def test_full_backward_holds_all_until_its_end():
    plan = plan_of(
        ["0F0 0F1 0B0 0B1"], times=[(1, 1, 1)], saved_bytes=100, saved_w_bytes=10, held_w_bytes=1
    )
    assert held(run(plan), 0) == [(0, 110), (1, 220), (2, 221), (4, 111), (6, 0)]


def test_case_d05_recompute_holds_the_input_then_all_until_w():
    """I makes the activations again: from its start they are there, what W needs until W."""
    plan = plan_of(
        ["0F0 0I0 0W0", "1F0 1I0 1W0"],
        times=[(1, 1, 1)] * 2,
        saved_bytes=100,
        saved_w_bytes=10,
        held_w_bytes=1,
        output_bytes=7,
    )
    recomputed = run(with_recompute(plan))
    # stage 0 holds no input; stage 1 holds the 7 bytes stage 0 sent; 1 ns of transfer each way
    assert held(recomputed, 0) == [(0, 0), (6, 111), (8, 11), (9, 0)]
    assert held(recomputed, 1) == [(0, 0), (2, 7), (3, 111), (5, 11), (6, 0)]
    assert (recomputed.end_ns - recomputed.start_ns).tolist() == [1, 2, 1, 1, 2, 1]


def test_recompute_with_a_deferred_w_peaks_above_plain_1f1b():
    """Case D05: a W that waits keeps recomputed activations; 1F1B with B would not."""
    sizes = {"saved_bytes": 10, "saved_w_bytes": 10}
    late = plan_of(["0F0 0F1 0I0 0I1 0W0 0W1"], times=[(1, 1, 1)], **sizes)
    plain = plan_of(["0F0 0B0 0F1 0B1"], times=[(1, 1, 1)], **sizes)
    assert run(with_recompute(late)).peak_bytes.tolist() == [30]
    assert run(with_recompute(plain)).peak_bytes.tolist() == [20]


def test_what_ends_at_a_moment_leaves_before_what_starts():
    """One microbatch after the other: never two at once, though B0 ends as F1 starts."""
    timeline = run(plan_of(["0F0 0B0 0F1 0B1"], times=[(1, 1, 1)], saved_bytes=10))
    assert held(timeline, 0) == [(0, 10), (6, 0)]
    assert timeline.peak_bytes.tolist() == [10]


def offloaded(lane, **fields):
    plan = plan_of(
        ["0F0 0F1 0B1 0B0"], times=[(10, 10, 10)], saved_bytes=100, offloadable_bytes=60, **fields
    )
    plan = with_devices(plan, offload_bandwidth=20 * 10**9)  # 3 ns a copy
    return msgspec.structs.replace(plan, offload=(lane,))


def test_offloaded_bytes_leave_at_the_end_of_o_and_are_back_from_the_start_of_r():
    timeline = run(offloaded(("0O0", "0R0@0B1")))
    assert held(timeline, 0) == [(0, 100), (10, 200), (13, 140), (20, 200), (40, 100), (60, 0)]
    assert [array.tolist() for array in host_usage(timeline, 0)] == [[0, 10, 23], [0, 60, 0]]
    assert host_peak_bytes(timeline) == {0: 60}


def test_peak_counts_what_is_out_only_while_it_is_out():
    """Out from 13 ns to 20 ns, while no other action starts: the peak stays."""
    assert run(offloaded(("0O0", "0R0@0B1"))).peak_bytes.tolist() == [200]
    late = offloaded(("0O0", "0R0@0B1"), workspace_bytes=5)
    assert run(late).peak_bytes.tolist() == [205]


def test_usage_peaks_at_the_peak_on_random_plans():
    for seed in range(100):
        timeline = run(random_plan(random.Random(seed)))
        for device, peak in enumerate(timeline.peak_bytes.tolist()):
            times, sizes = usage(timeline, device)
            assert sizes.max() == peak
            assert times[0] == 0
            assert (times[1:] > times[:-1]).all()
            assert sizes[-1] == timeline.costs.static_bytes[device]


def test_without_copies_the_order_alone_gives_the_peaks():
    for seed in range(100):
        timeline = run(random_plan(random.Random(seed)))
        if timeline.copies is None:
            found = order_peak_bytes(timeline.schedule, timeline.costs)
            assert (found == timeline.peak_bytes).all()


def test_too_little_memory_names_device_need_limit_and_what_helps():
    plan = plan_of(["0F0 0B0", "1F0 1B0"], times=[(1, 1, 1)] * 2, saved_bytes=3 * 2**30)
    timeline = run(with_devices(plan, memory_bytes=2**31))
    with pytest.raises(
        OutOfMemoryError,
        match=r"^device 0 needs 3\.0 GiB, it has 2\.0 GiB: 1\.0 GiB too little; give it fewer "
        r"layers or microbatches in flight, recompute, or offload$",
    ) as caught:
        check_memory(timeline)
    error = caught.value
    assert (error.place, error.needed_bytes, error.limit_bytes) == ("device 0", 3 * 2**30, 2**31)


def test_static_bytes_above_the_limit_are_named_as_such():
    plan = plan_of(["0F0 0B0"], times=[(1, 1, 1)], state_bytes=3000)
    timeline = run(with_devices(plan, memory_bytes=2000))
    with pytest.raises(OutOfMemoryError, match=r"state and reserved bytes alone take more"):
        check_memory(timeline)


def test_the_device_that_lacks_most_is_named():
    plan = plan_of(one_f_one_b(3, 3), times=[(1, 1, 1)] * 3, saved_bytes=10)
    with pytest.raises(OutOfMemoryError, match=r"^device 0 needs 30 B, it has 15 B: 15 B too"):
        check_memory(run(with_devices(plan, memory_bytes=15)))


def test_a_full_host_is_named():
    plan = offloaded(("0O0", "0O1", "0R1", "0R0"))
    cluster = msgspec.structs.replace(plan.cluster, host_memory_bytes=119)
    plan = msgspec.structs.replace(plan, cluster=cluster)
    with pytest.raises(
        OutOfMemoryError,
        match=r"^host 0 needs 120 B for offloaded activations, it has 119 B: 1 B too little",
    ) as caught:
        check_memory(run(plan))
    assert caught.value.place == "host 0"


def test_exactly_enough_memory_is_enough():
    plan = offloaded(("0O0", "0O1", "0R1", "0R0"))
    cluster = msgspec.structs.replace(plan.cluster, host_memory_bytes=120)
    plan = msgspec.structs.replace(plan, cluster=cluster)
    check_memory(run(with_devices(plan, memory_bytes=int(run(plan).peak_bytes[0]))))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (80 * 2**30, "80.0 GiB"),
        (2**62, "4.0 EiB"),
    ],
)
def test_readable_sizes(size, text):
    assert readable(size) == text
