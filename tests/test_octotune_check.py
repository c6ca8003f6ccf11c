"""`check`: a plan's numbers recomputed, and the first rule it breaks."""

from __future__ import annotations

import random
import re

import pytest
from msgspec.structs import replace

from octotune import check
from octotune.contract import Plan, Predicted, Stage, read_plan
from octotune.errors import (
    BrokenPlanError,
    DeadlockError,
    InfeasibleError,
    MalformedError,
    OutOfMemoryError,
    ScheduleError,
)
from tests import oracle, valid_files
from tests.random_plans import random_plan


@pytest.fixture
def plan(tmp_path) -> Plan:
    return read_plan(valid_files.write(tmp_path, valid_files.plan()))


def roomy(plan: Plan) -> Plan:
    """The same plan where memory is no concern."""
    devices = tuple(replace(device, memory_bytes=2**62) for device in plan.cluster.devices)
    cluster = replace(plan.cluster, devices=devices, host_memory_bytes=None)
    return replace(plan, cluster=cluster)


@pytest.mark.parametrize("seed", range(40))
def test_the_oracle_s_numbers_are_confirmed_and_others_refused(seed):
    plan = roomy(random_plan(random.Random(seed)))
    expected = oracle.run(plan)
    claims = Predicted(
        step_ns=expected.step_ns,
        bubble_fraction=float(expected.bubble_fraction),
        peak_bytes=tuple(expected.peak_bytes),
        lower_bound_ns=expected.step_ns,
    )
    checked = check(replace(plan, predicted=claims))
    assert checked.step_ns == expected.step_ns
    assert checked.peak_bytes == tuple(expected.peak_bytes)
    assert checked.timeline.step_ns == expected.step_ns
    assert checked.bubble_fraction == pytest.approx(float(expected.bubble_fraction), abs=1e-9)

    last = len(claims.peak_bytes) - 1
    more = (*claims.peak_bytes[:-1], claims.peak_bytes[-1] + 1)
    for wrong, message in (
        ({"step_ns": claims.step_ns - 1}, "predicted.step_ns is "),
        ({"bubble_fraction": claims.bubble_fraction + 1e-6}, "predicted.bubble_fraction is "),
        ({"bubble_fraction": float("nan")}, "predicted.bubble_fraction is nan"),
        ({"peak_bytes": more}, rf"predicted.peak_bytes\[{last}\] is {more[-1]}; device {last} "),
        ({"peak_bytes": claims.peak_bytes[1:]}, f"peak_bytes has {last} entries; it has one a"),
        ({"lower_bound_ns": claims.step_ns + 1}, "predicted.lower_bound_ns is .* it is no bound"),
    ):
        with pytest.raises(BrokenPlanError, match=message):
            check(replace(plan, predicted=replace(claims, **wrong)))


def test_a_bubble_fraction_may_differ_in_its_last_digits(plan):
    fraction = check(plan).bubble_fraction
    for close in (fraction + 9e-10, fraction - 9e-10):
        check(replace(plan, predicted=Predicted(bubble_fraction=close)))
    for far in (fraction + 2e-9, fraction - 2e-9):
        with pytest.raises(BrokenPlanError, match=r"predicted\.bubble_fraction is"):
            check(replace(plan, predicted=Predicted(bubble_fraction=far)))


ROWS = valid_files.plan()["actions"]
LANES = valid_files.plan()["offload"]


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        # words
        (
            ["0F0 0F1 0B0 0B01", ROWS[1]],
            ScheduleError,
            "actions[0][3]: '0B01' is no action; write",
        ),
        (["0F0 0F1 0B0 0b1", ROWS[1]], ScheduleError, "actions[0][3]: '0b1' is no action"),
        (["0F0 0F1 0B0 0B1@0F0", ROWS[1]], ScheduleError, "'0B1@0F0' is no action"),
        (["0F0 0F1 0B0 0O1", ROWS[1]], ScheduleError, "'0O1' is no action"),
        (["0F0 0F1 0B0 0B\u0661", ROWS[1]], ScheduleError, "is no action"),
        # complete, once, on the stage's device
        (["0F0 0F1 0B0", ROWS[1]], ScheduleError, "0B1"),
        (["0F0 0F1 0B0 0B1 0B1", ROWS[1]], ScheduleError, "0B1"),
        (["0F0 0F1 0B0 0B1 0I1", ROWS[1]], ScheduleError, "0I1"),
        (["0F0 0F1 0B0 0I1", ROWS[1]], ScheduleError, "0W1"),
        (["0F0 0F1 0B0 0W1", ROWS[1]], ScheduleError, "0W1"),
        (["0F0 0B0", "1F0 1I0 1W0"], ScheduleError, "0F1 is missing"),
        (["", ""], ScheduleError, "0F0 is missing"),
        (["0F0 0F1 0B0 0B1 2F0", ROWS[1]], ScheduleError, "2F0"),
        (["0F0 0F1 0B0 0B1 0F2", ROWS[1]], ScheduleError, "0F2"),
        (["0F0 0F1 0B0 0B1 99999999F99999999", ROWS[1]], ScheduleError, "99999999F99999999"),
        (["0F0 0F1 0B0 0B1 1F0", "1I0 1F1 1W0 1I1 1W1"], ScheduleError, "1F0"),
        (["1F0 1F1 1B0 1B1", "0F0 0F1 0B0 0B1"], ScheduleError, "1F0"),
        # order in a row
        (["0B0 0F0 0F1 0B1", ROWS[1]], ScheduleError, "0B0"),
        ([ROWS[0], "1F0 1W0 1I0 1F1 1I1 1W1"], ScheduleError, "1W0"),
        # orders that cannot run
        ([ROWS[0], "1F1 1F0 1I0 1W0 1I1 1W1"], None, None),
        (["0F0 0B0 0F1 0B1", "1F1 1F0 1I0 1W0 1I1 1W1"], DeadlockError, "0F1"),
    ],
)
def test_orders_that_break_a_rule_are_refused_with_the_spot(plan, rows, error, message):
    actions = tuple(tuple(row.split() if isinstance(row, str) else row) for row in rows)
    wrong = replace(plan, actions=actions, offload=None)
    if error is None:
        check(wrong)
        return
    with pytest.raises(error, match=re.escape(message)) as caught:
        check(wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lane", "error", "message"),
    [
        ("0O1 0R01", ScheduleError, "offload[0][1]: '0R01' is no copy; write"),
        ("0O1 0R1@0B", ScheduleError, "offload[0][1]: '0B' is no action"),
        ("0O1 0B1", ScheduleError, "offload[0][1]: '0B1' is no copy"),
        ("0O1", ScheduleError, "0O1"),
        ("0R1 0O1", ScheduleError, "0R1"),
        ("0O1 0O1 0R1", ScheduleError, "0O1"),
        ("0O1 0R1 0O2 0R2", ScheduleError, "0O2"),
        ("0O1 0R1@1F0", ScheduleError, "1F0"),
        ("0O1 0R1@0B7", ScheduleError, "0B7"),
        ("1O1 1R1", ScheduleError, "1O1"),
        ("0O1 0R1@0B1", DeadlockError, "0R1"),
        ("0O1@0B1 0R1", DeadlockError, "0O1"),
    ],
)
def test_lanes_that_break_a_rule_are_refused(plan, lane, error, message):
    with pytest.raises(error, match=re.escape(message)) as caught:
        check(replace(plan, offload=(tuple(lane.split()), ())))
    assert "\n" not in str(caught.value)


def test_a_stage_with_recompute_offloads_nothing(plan):
    stages = (replace(plan.stages[0], recompute=True), plan.stages[1])
    with pytest.raises(ScheduleError, match="0O1"):
        check(replace(plan, stages=stages))


def test_a_device_without_offload_bandwidth_offloads_nothing(plan):
    with pytest.raises(ScheduleError, match="1O0"):
        check(replace(plan, offload=((), ("1O0", "1R0"))))


def test_a_deadlock_spells_out_its_cycle(plan):
    """Two devices, each waiting for the other's second action."""
    stages = (Stage(layers=(0, 1), device=0), Stage(layers=(1, 3), device=1))
    actions = (("0F0", "0B0", "0F1", "0B1"), ("1F1", "1F0", "1B0", "1B1"))
    with pytest.raises(DeadlockError, match="0F1") as caught:
        check(replace(plan, stages=stages, actions=actions, offload=None))
    assert {"0F1", "0B0", "1F1"} & set(re.findall(r"\d[FB]\d", " ".join(caught.value.cycle)))
    assert len(caught.value.cycle) >= 3


def test_too_little_memory_names_the_device_and_the_shortfall(plan):
    peak = check(plan).peak_bytes[1]
    devices = (plan.cluster.devices[0], replace(plan.cluster.devices[1], memory_bytes=peak))
    check(replace(plan, cluster=replace(plan.cluster, devices=devices)))
    devices = (plan.cluster.devices[0], replace(plan.cluster.devices[1], memory_bytes=peak - 100))
    with pytest.raises(OutOfMemoryError, match=r"device 1 needs .* 100 B too little") as caught:
        check(replace(plan, cluster=replace(plan.cluster, devices=devices)))
    assert (caught.value.needed_bytes, caught.value.limit_bytes) == (peak, peak - 100)


def test_too_little_memory_on_a_host_is_found(plan):
    with pytest.raises(OutOfMemoryError, match="host 0 needs"):
        check(replace(plan, cluster=replace(plan.cluster, host_memory_bytes=100)))


def test_sums_that_overflow_are_malformed(plan):
    layers = tuple(replace(layer, forward_ns=2**62) for layer in plan.workload.layers)
    workload = replace(plan.workload, layers=layers)
    devices = tuple(replace(device, kind="other") for device in plan.cluster.devices)
    cluster = replace(plan.cluster, devices=devices)
    with pytest.raises(MalformedError, match="times"):
        check(replace(plan, workload=workload, cluster=cluster))


def test_a_huge_microbatch_count_costs_nothing(plan):
    with pytest.raises(ScheduleError, match="0F2 is missing"):
        check(replace(plan, num_microbatches=2**24))


def test_every_error_of_a_plan_is_a_value_error_of_one_of_two_statuses():
    for error in (BrokenPlanError, InfeasibleError, ScheduleError, OutOfMemoryError):
        assert issubclass(error, ValueError)
        assert not issubclass(error, MalformedError)
