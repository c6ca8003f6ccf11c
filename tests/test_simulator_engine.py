"""The engine against a second simulator, closed forms and what must hold for any plan."""

import random
from dataclasses import fields, replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octotune.contract import Link, build_costs
from simulator.actions import CopySchedule
from simulator.engine import simulate
from simulator.memory import host_peak_bytes, usage
from tests import oracle
from tests.random_plans import is_contended, random_plan
from tests.small_plans import one_f_one_b, plan_of, run


def assert_as_the_oracle_says(plan):
    timeline, expected = run(plan), oracle.run(plan)
    words = [word for row in plan.actions for word in row]
    assert timeline.start_ns.tolist() == [expected.start[word] for word in words]
    assert timeline.end_ns.tolist() == [expected.end[word] for word in words]

    def table(times, kinds):
        return [
            [
                next((times[f"{s}{k}{m}"] for k in kinds if f"{s}{k}{m}" in times), -1)
                for m in range(plan.num_microbatches)
            ]
            for s in range(len(plan.stages))
        ]

    assert timeline.forward_sent_ns.tolist() == table(expected.sent, "F")
    assert timeline.forward_arrived_ns.tolist() == table(expected.arrived, "F")
    assert timeline.backward_sent_ns.tolist() == table(expected.sent, "BI")
    assert timeline.backward_arrived_ns.tolist() == table(expected.arrived, "BI")
    copies = [word.partition("@")[0] for row in plan.offload or () for word in row]
    assert timeline.copy_start_ns.tolist() == [expected.copy_start[word] for word in copies]
    assert timeline.copy_end_ns.tolist() == [expected.copy_end[word] for word in copies]
    stages = range(len(plan.stages))
    assert timeline.reduce_start_ns.tolist() == [expected.reduce_start.get(s, -1) for s in stages]
    assert timeline.reduce_end_ns.tolist() == [expected.reduce_end.get(s, -1) for s in stages]
    assert timeline.exchange_start_ns.tolist() == list(expected.exchange_start.values())
    assert timeline.exchange_end_ns.tolist() == list(expected.exchange_end.values())
    assert timeline.optimizer_start_ns.tolist() == expected.optimizer_start
    assert timeline.optimizer_end_ns.tolist() == expected.optimizer_end
    assert timeline.step_ns == expected.step_ns
    assert timeline.bubble_fraction == pytest.approx(float(expected.bubble_fraction), abs=1e-12)
    assert timeline.peak_bytes.tolist() == expected.peak_bytes
    assert host_peak_bytes(timeline) == expected.host_peak_bytes
    for device, held in enumerate(expected.device_bytes):
        times, sizes = usage(timeline, device)
        at = np.searchsorted(times, list(held), side="right") - 1
        assert sizes[at].tolist() == list(held.values())
        assert set(times.tolist()) <= set(held)


@pytest.mark.parametrize("block", range(10))
def test_1000_random_plans_run_as_the_oracle_says(block):
    for seed in range(100 * block, 100 * block + 100):
        assert_as_the_oracle_says(random_plan(random.Random(seed)))


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False, note_method_calls=False))
def test_any_plan_runs_as_the_oracle_says(rng):
    assert_as_the_oracle_says(random_plan(rng, most_stages=5, most_microbatches=4))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(50))
def test_5000_random_plans_run_as_the_oracle_says(block):
    for seed in range(1000 + 100 * block, 1000 + 100 * block + 100):
        assert_as_the_oracle_says(random_plan(random.Random(seed)))


def gpipe(p, m):
    return [
        " ".join([f"{s}F{i}" for i in range(m)] + [f"{s}B{i}" for i in range(m)]) for s in range(p)
    ]


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (4, 8), (4, 2), (8, 1), (5, 17)])
@pytest.mark.parametrize("times", [(1, 1, 1), (3, 2, 4)])
def test_1f1b_makespan_matches_closed_form(p, m, times):
    """Uniform stages and free transfers: (m + p - 1) (F + B)."""
    timeline = run(plan_of(one_f_one_b(p, m), times=[times] * p))
    assert timeline.step_ns == (m + p - 1) * sum(times)
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


def test_case_c01_textbook_1f1b_takes_33():
    assert run(plan_of(one_f_one_b(4, 8), times=[(1, 1, 1)] * 4)).step_ns == 33


@pytest.mark.parametrize("order", [one_f_one_b, gpipe])
def test_case_c02_one_microbatch_takes_24(order):
    assert run(plan_of(order(8, 1), times=[(1, 1, 1)] * 8)).step_ns == 24


def test_case_c07_one_slow_stage_takes_53():
    """Between the bound of the slow device (51) and sum + (m - 1) max (57)."""
    times = [(1, 1, 1), (2, 2, 2), (1, 1, 1), (1, 1, 1)]
    assert run(plan_of(one_f_one_b(4, 8), times=times)).step_ns == 53


def test_case_c12_a_slower_link_makes_the_step_longer():
    def step(bandwidth):
        plan = plan_of(
            one_f_one_b(4, 8), times=[(10, 10, 10)] * 4, bandwidth=bandwidth, output_bytes=4
        )
        return run(plan).step_ns

    assert step(10**9) < step(10**8)


def test_case_d10_no_copies_are_the_same_with_and_without_lanes():
    plan = plan_of(one_f_one_b(3, 5), times=[(1, 2, 3)] * 3)
    without, empty = run(plan), run(msgspec.structs.replace(plan, offload=((), (), ())))
    for field in fields(without):
        if field.name != "copies":
            assert np.array_equal(
                getattr(without, field.name), getattr(empty, field.name)
            ) or field.name in ("schedule", "costs")


def transfers(plan, timeline):
    """Return (asked, tie, source, target, sent, hold end, arrival) of every transfer."""
    costs = timeline.costs
    ends = dict(zip((w for row in plan.actions for w in row), timeline.end_ns, strict=True))
    found = []
    for step, kinds, sent, arrived in (
        (1, "F", timeline.forward_sent_ns, timeline.forward_arrived_ns),
        (-1, "BI", timeline.backward_sent_ns, timeline.backward_arrived_ns),
    ):
        for s in range(costs.num_stages):
            for m in range(costs.num_microbatches):
                if sent[s, m] < 0:
                    continue
                boundary = min(s, s + step)
                asked = next(ends[f"{s}{k}{m}"] for k in kinds if f"{s}{k}{m}" in ends)
                found.append(
                    (
                        int(asked),
                        (step < 0, s, m),
                        int(costs.stage_device[s]),
                        int(costs.stage_device[s + step]),
                        int(sent[s, m]),
                        int(sent[s, m] + costs.transfer_hold_ns[boundary]),
                        int(arrived[s, m]),
                    )
                )
    return sorted(found)


def test_case_e03_each_channel_sends_and_receives_in_one_order():
    for seed in range(100):
        plan = random_plan(random.Random(seed))
        channels = {}
        for transfer in transfers(plan, run(plan)):
            channels.setdefault(transfer[2:4], []).append(transfer)
        for channel in channels.values():
            for before, after in pairwise(channel):
                assert before[5] <= after[4]  # the hold ends before the next begins
                assert before[6] <= after[6]


def test_hosts_send_and_receive_one_transfer_at_a_time_in_the_order_asked():
    busy = 0
    for seed in range(150):
        plan = random_plan(random.Random(seed), contended=True)
        if plan.cluster.nic_bandwidth is None:
            continue
        host = [device.host for device in plan.cluster.devices]
        for end in (2, 3):
            sides = {}
            for transfer in transfers(plan, run(plan)):
                if host[transfer[2]] != host[transfer[3]]:
                    sides.setdefault(host[transfer[end]], []).append(transfer)
            for side in sides.values():
                for before, after in pairwise(side):
                    assert before[5] <= after[4]
                    busy += before[5] == after[4] > after[0]
    assert busy > 100


def on_hosts(plan, hosts, **of_devices):
    """Return the plan with a limited NIC and its devices on hosts, on links of 1 byte a ns."""
    devices = tuple(
        msgspec.structs.replace(device, host=host, **of_devices)
        for device, host in zip(plan.cluster.devices, hosts, strict=True)
    )
    links = msgspec.structs.replace(
        plan.cluster.links, inter_host=Link(latency_ns=0, bandwidth=10**9)
    )
    cluster = msgspec.structs.replace(
        plan.cluster, devices=devices, links=links, nic_bandwidth=10**9
    )
    return msgspec.structs.replace(plan, cluster=cluster)


def test_of_transfers_asked_for_at_once_the_activation_goes_first():
    """1F1 and 3B0, both for device 2, end at 26 ns on one host; each takes its NIC 4 ns."""
    plan = on_hosts(
        plan_of(
            ["3F0 3B0 3F1 3B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1", "0F0 0F1 0B0 0B1"],
            times=[(1, 1, 1), (12, 1, 1), (1, 1, 1), (1, 1, 1)],
            devices=[3, 1, 2, 0],
            output_bytes=4,
        ),
        [0, 0, 1, 0],
    )
    assert_as_the_oracle_says(plan)
    timeline = run(plan)
    assert timeline.forward_sent_ns[1, 1] == 26
    assert timeline.backward_sent_ns[3, 0] == 30


def test_of_activations_asked_for_at_once_the_lower_stage_goes_first():
    """0F1 and 2F0 end at 20 ns on one host, stage 0 on the higher device."""
    plan = on_hosts(
        plan_of(
            ["2F0 2F1 2B0 2B1", "1F0 1F1 1B0 1B1", "3F0 3F1 3B0 3B1", "0F0 0F1 0B0 0B1"],
            times=[(10, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1)],
            devices=[3, 1, 0, 2],
            output_bytes=4,
        ),
        [0, 1, 1, 0],
    )
    assert_as_the_oracle_says(plan)
    timeline = run(plan)
    assert timeline.forward_sent_ns[0, 1] == 20
    assert timeline.forward_sent_ns[2, 0] == 24


def test_a_copy_released_by_a_transfer_without_duration_asks_before_a_higher_device():
    """At 3 ns: 1F1 arrives on device 0, 2F1 starts there and releases 2O0; 0F2 ends on device 1.

    Both copies ask their link at 3 ns, so the lower device is served first, though what lets it
    ask is a transfer of the same moment.
    """
    plan = on_hosts(
        plan_of(
            ["2F0 2F1 2F2 2B0 2B1 2B2", "0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"],
            times=[(1, 1, 1)] * 3,
            devices=[1, 2, 0],
            offloadable_bytes=10,
        ),
        [0, 0, 1],
        offload_bandwidth=10**9,
        host_link="bus",
    )
    plan = msgspec.structs.replace(plan, offload=(("2O0@2F1", "2R0"), ("0O2", "0R2"), ()))
    assert_as_the_oracle_says(plan)
    timeline = run(plan)
    assert timeline.copy_start_ns[[0, 2]].tolist() == [3, 13]


def test_zero_bytes_wait_their_turn_on_the_nic():
    """Stage 2 sends nothing, but at 12 ns its host is still sending what 0F1 made, until 19 ns."""
    plan = plan_of(
        ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1", "3F0 3F1 3B0 3B1"],
        times=[(5, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1)],
    )
    sizes = (9, 0, 0, 0)
    layers = tuple(
        msgspec.structs.replace(layer, output_bytes=size)
        for layer, size in zip(plan.workload.layers, sizes, strict=True)
    )
    workload = msgspec.structs.replace(plan.workload, layers=layers)
    plan = on_hosts(msgspec.structs.replace(plan, workload=workload), [0, 1, 0, 1])
    assert_as_the_oracle_says(plan)
    timeline = run(plan)
    assert timeline.forward_sent_ns[0].tolist() == [5, 14]
    assert timeline.end_ns[timeline.schedule.offsets[2]] == 16
    assert timeline.forward_sent_ns[2, 0] == 23


DURATIONS = (
    "forward_ns",
    "backward_ns",
    "input_grad_ns",
    "weight_grad_ns",
    "transfer_hold_ns",
    "transfer_latency_ns",
    "exchange_ns",
    "optimizer_ns",
)


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False, note_method_calls=False))
def test_cheaper_work_never_delays_any_end_where_nothing_is_contended(rng):
    plan = random_plan(rng, contended=False, most_stages=5, most_microbatches=4)
    if is_contended(plan):
        plan = msgspec.structs.replace(
            plan,
            cluster=msgspec.structs.replace(
                plan.cluster,
                nic_bandwidth=None,
                devices=tuple(
                    msgspec.structs.replace(device, host_link=None)
                    for device in plan.cluster.devices
                ),
            ),
        )
    before = run(plan)
    name = rng.choice(DURATIONS)
    cheaper = getattr(before.costs, name).copy()
    least = 1 if DURATIONS.index(name) < 4 else 0
    if len(cheaper):
        cheaper[rng.randrange(len(cheaper))] //= 2
    costs = replace(before.costs, **{name: np.maximum(cheaper, least)})
    after = simulate(before.schedule, costs, before.copies)
    assert (after.end_ns <= before.end_ns).all()
    assert after.step_ns <= before.step_ns


@pytest.mark.parametrize("factor", [2, 7])
def test_scaling_all_times_scales_the_step(factor):
    for seed in range(60):
        timeline = run(random_plan(random.Random(seed)))
        scaled = {
            name: getattr(timeline.costs, name) * factor
            for name in (*DURATIONS, "reduce_ns", "copy_ns")
        }
        scaled |= {
            name: np.where(getattr(timeline.costs, name) < 0, -1, scaled[name])
            for name in ("reduce_ns", "copy_ns")
        }
        longer = simulate(timeline.schedule, replace(timeline.costs, **scaled), timeline.copies)
        assert longer.step_ns == factor * timeline.step_ns
        assert (longer.start_ns == factor * timeline.start_ns).all()
        assert (longer.peak_bytes == timeline.peak_bytes).all()


def test_step_is_at_least_the_busiest_device():
    for seed in range(100):
        timeline = run(random_plan(random.Random(seed)))
        assert timeline.step_ns >= timeline.busy_ns.max()
        assert 0 <= timeline.bubble_fraction < 1


def test_a_device_without_stages_is_done_at_once():
    timeline = run(plan_of(["0F0 0B0", ""], times=[(1, 1, 1)]))
    assert timeline.optimizer_end_ns.tolist() == [3, 0]
    assert timeline.step_ns == 3


def test_times_near_the_limit_of_int64_do_not_wrap():
    plan = plan_of(one_f_one_b(2, 2), times=[(10**17, 10**17, 2 * 10**17)] * 2)
    assert_as_the_oracle_says(plan)
    assert run(plan).step_ns == 3 * 4 * 10**17


def test_lanes_given_as_a_value_are_held_against_the_rules():
    plan = plan_of(["0F0 0B0"], times=[(1, 1, 1)])
    costs = build_costs(plan.workload, plan.cluster, plan.stages, 1)
    with pytest.raises(ValueError, match=r"offload\[0\]\[0\]: device 0 cannot offload"):
        simulate(plan.schedule(), costs, CopySchedule.from_words([["0O0", "0R0"]]))
