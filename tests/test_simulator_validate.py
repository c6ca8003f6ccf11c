"""The rules of a schedule: each fault by its message, and against rules written a second time."""

import random
import re
import tracemalloc
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from octotune.contract import build_costs
from simulator.actions import CopySchedule, Schedule
from simulator.errors import ScheduleError
from simulator.validate import action_positions, copy_positions, validate
from tests.random_plans import random_plan
from tests.small_plans import plan_of


def costs_of(plan):
    return build_costs(plan.workload, plan.cluster, plan.stages, plan.num_microbatches)


def two_devices(**fields):
    """Costs of two stages on two devices that can offload, two microbatches."""
    plan = plan_of(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], times=[(1, 1, 1)] * 2, saved_bytes=1)
    devices = tuple(
        msgspec.structs.replace(device, offload_bandwidth=1) for device in plan.cluster.devices
    )
    cluster = msgspec.structs.replace(plan.cluster, devices=devices)
    return replace(costs_of(msgspec.structs.replace(plan, cluster=cluster)), **fields)


FIRST = "0F0 0F1 0B0 0B1"
SECOND = "1F0 1B0 1F1 1B1"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((FIRST,), r"actions has 1 rows; the cluster has 2 devices, and each has one row"),
        ((FIRST, SECOND, ""), r"actions has 3 rows; the cluster has 2 devices"),
        (
            (FIRST, "1B0 1F0 1F1 1B1"),
            r"actions[1][0]: 1B0 runs before 1F0; a backward comes after its forward "
            r"(device 1: [1B0] 1F0 1F1 1B1)",
        ),
        (
            (FIRST, "1F0 1F1 1W0 1I0 1B1"),
            r"actions[1][2]: 1W0 runs before 1I0; W comes after the I it completes "
            r"(device 1: 1F0 1F1 [1W0] 1I0 1B1)",
        ),
        ((FIRST, "1F0 1F1 1I0 1B1 1B0"), r"actions[1][4]: 1B0 runs, and so does another backward"),
        (
            (FIRST, "1F0 1F1 1B0 1W0 1B1"),
            r"another backward of the same stage and microbatch; write either 1B0, or 1I0 and 1W0",
        ),
        ((FIRST, SECOND + " 1F1"), r"actions[1][4]: 1F1 is there a second time; it runs once"),
        ((FIRST, SECOND + " 1B0"), r"actions[1][4]: 1B0 is there a second time; it runs once"),
        (
            (FIRST, "1F0 1I0 1W0 1W0 1F1 1B1"),
            r"actions[1][3]: 1W0 is there a second time; it runs once",
        ),
        ((FIRST, "1F0 1B0 1F1"), r"actions[1]: 1B1 (or 1I1 and 1W1) is missing; each stage runs"),
        ((FIRST, "1F0 1B0 1F1 1I1"), r"actions[1]: 1W1 is missing"),
        ((FIRST, "1F0 1B0"), r"actions[1]: 1F1 is missing"),
        (("", SECOND), r"actions[0]: 0F0 is missing"),
        (
            (FIRST + " 1F1", SECOND),
            r"actions[0][4]: stage 1 is on device 1; 1F1 belongs in actions",
        ),
        ((FIRST, SECOND + " 2F0"), r"actions[1][4]: there is no stage 2; stages are 0 to 1"),
        (
            (FIRST, SECOND + " 10000000F0"),
            r"actions[1][4]: there is no stage 10000000; stages are 0 to 1",
        ),
        (
            (FIRST, SECOND + " 1F2"),
            r"actions[1][4]: there is no microbatch 2; microbatches are 0 to 1",
        ),
    ],
)
def test_each_broken_rule_is_refused_with_row_and_spot(rows, message):
    schedule = Schedule.from_words([row.split() for row in rows])
    with pytest.raises(ScheduleError, match=re.escape(message)) as caught:
        validate(schedule, two_devices())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lanes", "message"),
    [
        ((("0O0", "0R0"),), r"offload has 1 rows; the cluster has 2 devices"),
        (
            (("0O0",), ()),
            r"offload[0][0]: 0O0 has no 0R0; what goes out comes back (device 0: [0O0])",
        ),
        ((("0R0", "0O0"), ()), r"offload[0][0]: 0R0 runs before 0O0; what comes back went out"),
        ((("0R0",), ()), r"offload[0][0]: 0R0 runs before 0O0"),
        ((("0O0", "0O0", "0R0"), ()), r"offload[0][1]: 0O0 is there a second time"),
        ((("0O0", "0R0", "0O0"), ()), r"offload[0][2]: 0O0 is there a second time"),
        ((("0O0", "0R0", "0R0"), ()), r"offload[0][2]: 0R0 is there a second time"),
        (
            ((), ("0O0", "0R0")),
            r"offload[1][0]: stage 0 is on device 0; 0O0 belongs in",
        ),
        ((("7O0", "7R0"), ()), r"offload[0][0]: there is no stage 7; stages are 0 to 1"),
        ((("0O2", "0R2"), ()), r"offload[0][0]: there is no microbatch 2"),
        ((("0O0", "0R0@1F0"), ()), r"offload[0][1]: device 0 runs no 1F0; a copy waits for an"),
        ((("0O0", "0R0@0I1"), ()), r"offload[0][1]: device 0 runs no 0I1"),
        ((("0O0", "0R0@0W1"), ()), r"offload[0][1]: device 0 runs no 0W1"),
        ((("0O0", "0R0@9F9"), ()), r"offload[0][1]: device 0 runs no 9F9"),
    ],
)
def test_each_broken_rule_of_copies_is_refused_with_row_and_spot(lanes, message):
    schedule = Schedule.from_words([FIRST.split(), SECOND.split()])
    with pytest.raises(ScheduleError, match=re.escape(message)):
        validate(schedule, two_devices(), CopySchedule.from_words(lanes))


def test_a_stage_that_recomputes_has_no_copies():
    costs = two_devices(recompute=np.array([True, False]))
    schedule = Schedule.from_words([FIRST.split(), SECOND.split()])
    validate(schedule, costs, CopySchedule.from_words([[], ["1O0", "1R0"]]))
    with pytest.raises(ScheduleError, match=r"offload\[0\]\[0\]: stage 0 recomputes"):
        validate(schedule, costs, CopySchedule.from_words([["0O0", "0R0"], []]))


def test_a_device_without_offload_bandwidth_has_no_copies():
    costs = two_devices(copy_ns=np.array([-1, 1]))
    schedule = Schedule.from_words([FIRST.split(), SECOND.split()])
    with pytest.raises(
        ScheduleError, match=r"device 0 cannot offload; its offload_bandwidth is 0"
    ):
        validate(schedule, costs, CopySchedule.from_words([["0O0", "0R0"], []]))


def test_packed_words_of_no_kind_are_refused():
    codes = Schedule.from_words([FIRST.split(), SECOND.split()]).codes.copy()
    codes[2] |= 4
    with pytest.raises(ScheduleError, match=r"actions\[0\]\[2\]: kind 5 is none of F, B, I and W"):
        validate(Schedule(codes, np.array([0, 4, 8])), two_devices())
    codes[2] = -1
    with pytest.raises(ScheduleError, match=r"actions\[0\]\[2\]: kind 15 is none of F, B, I"):
        validate(Schedule(codes, np.array([0, 4, 8])), two_devices())
    codes[2] = -(1 << 40)
    with pytest.raises(ScheduleError, match=r"actions\[0\]\[2\]: there is no stage -256"):
        validate(Schedule(codes, np.array([0, 4, 8])), two_devices())


def test_a_long_row_is_shown_around_the_spot():
    plan = plan_of([" ".join(f"0F{i} 0B{i}" for i in range(50))], times=[(1, 1, 1)])
    rows = [list(plan.actions[0])]
    rows[0][60] = "0F0"
    with pytest.raises(ScheduleError, match=re.escape("0B29 [0F0] 0B30")) as caught:
        validate(Schedule.from_words(rows), costs_of(plan))
    assert len(str(caught.value)) < 200
    assert "... 0F28 0B28 0F29 0B29 [0F0] 0B30 0F31 0B31 0F32 ..." in str(caught.value)


def test_a_huge_microbatch_count_with_few_actions_costs_no_memory():
    """2^24 microbatches of two stages would take tables of 256 MiB each."""
    costs = two_devices(num_microbatches=2**24)
    schedule = Schedule.from_words([FIRST.split(), SECOND.split()])
    validate(schedule, two_devices())  # compiled before memory is watched
    tracemalloc.start()
    with pytest.raises(ScheduleError, match=r"actions\[0\]: 0F2 is missing"):
        validate(schedule, costs)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_positions_say_where_each_action_stands():
    schedule = Schedule.from_words([FIRST.split(), ["1F0", "1I0", "1F1", "1W0", "1B1"]])
    positions = action_positions(schedule, two_devices())
    assert positions.forward.tolist() == [0, 1, 4, 6]
    assert positions.backward.tolist() == [2, 3, 5, 8]
    assert positions.weight.tolist() == [-1, -1, 7, -1]
    lanes = CopySchedule.from_words([["0O1@0B0", "0R1"], ["1O0", "1R0@1F1"]])
    waits = copy_positions(lanes, two_devices(), schedule, positions)
    assert waits.after.tolist() == [1, -1, 4, -1]
    assert waits.anchor.tolist() == [2, -1, -1, 6]


def obeys(plan, rows, lanes):
    """Say whether rows and lanes obey the rules: plainly, from docs/contract.md."""
    place = {}
    for device, row in enumerate(rows):
        for position, word in enumerate(row):
            stage, kind, microbatch = re.fullmatch(r"(\d+)([FBIW])(\d+)", word).groups()
            if int(stage) >= len(plan.stages) or int(microbatch) >= plan.num_microbatches:
                return False
            if plan.stages[int(stage)].device != device or word in place:
                return False
            place[word] = position
    for s in range(len(plan.stages)):
        for m in range(plan.num_microbatches):
            f, b, i, w = (place.get(f"{s}{kind}{m}") for kind in "FBIW")
            whole = b is not None and i is None and w is None
            split = b is None and i is not None and w is not None and i < w
            if f is None or not (whole or split) or f > (b if whole else i):
                return False
    out = {}
    for device, lane in enumerate(lanes):
        for word in lane:
            stage, kind, microbatch, anchor = re.fullmatch(
                r"(\d+)([OR])(\d+)(?:@(.*))?", word
            ).groups()
            key = int(stage), int(microbatch)
            if key[0] >= len(plan.stages) or key[1] >= plan.num_microbatches:
                return False
            home = plan.stages[key[0]]
            if home.device != device or home.recompute:
                return False
            if plan.cluster.devices[device].offload_bandwidth == 0:
                return False
            if anchor is not None and anchor not in rows[device]:
                return False
            if out.get(key, "") != {"O": "", "R": "O"}[kind]:
                return False
            out[key] = kind
    return all(kind == "R" for kind in out.values())


def test_faults_are_found_exactly_where_the_rules_are_broken():
    """Valid plans with one change: a word dropped, doubled, moved, swapped or renamed."""
    broken = 0
    for seed in range(1500):
        rng = random.Random(seed)
        plan = random_plan(rng, most_stages=3, most_microbatches=3, most_devices=3)
        rows = [list(row) for row in plan.actions]
        lanes = [list(row) for row in plan.offload or [()] * len(rows)]
        lines = [line for line in rows + lanes if line]
        line = rng.choice(lines)
        at = rng.randrange(len(line))
        change = rng.randrange(6)
        if change == 0:
            del line[at]
        elif change == 1:
            line.insert(rng.randint(0, len(line)), line[at])
        elif change == 2:
            word = line.pop(at)
            other = rng.choice(lanes if "O" in word or "R" in word else rows)
            other.insert(rng.randint(0, len(other)), word)
        elif change == 3:
            to = rng.randrange(len(line))
            line[at], line[to] = line[to], line[at]
        elif change == 4:
            letters = "OR" if "O" in line[at] or "R" in line[at] else "FBIW"
            line[at] = re.sub(r"^(\d+)[A-Z]", rf"\1{rng.choice(letters)}", line[at])
        else:
            line[at] = re.sub(r"\d+$", str(rng.randrange(4)), line[at])
        schedule, copies = Schedule.from_words(rows), CopySchedule.from_words(lanes)
        if obeys(plan, rows, lanes):
            validate(schedule, costs_of(plan), copies)
            continue
        broken += 1
        with pytest.raises(ScheduleError, match=r"^(actions|offload)\[\d+\](\[\d+\])?: "):
            validate(schedule, costs_of(plan), copies)
    assert 500 < broken < 1400
