"""Copies of a schedule as it is: within memory, its order kept; and what they do."""

from __future__ import annotations

import msgspec
import pytest
from offload_cases import UNIT, as_plan, devices, equal_layers, family_plan, starts

from octotune.check import check
from octotune.contract import (
    Cluster,
    Layer,
    Plan,
    Stage,
    Workload,
    build_costs,
)
from octotune.errors import ScheduleError
from octotune.offload.bench import Start
from octotune.offload.planning import memory_over, plan_copies
from octotune.offload.search import search_within
from octotune.offload.usage import usage_of
from octotune.partition import stages_of
from simulator.actions import CopyKind, Schedule, kind_of, stage_of
from simulator.engine import simulate
from simulator.memory import check_memory


def test_a_schedule_that_fits_gets_no_copies():
    workload, cluster = equal_layers(4), devices(4, units=4)
    plan = family_plan("1f1b", workload, cluster, 8)
    planned = plan_copies(plan.schedule(), build_costs(workload, cluster, plan.stages, 8))
    assert planned.copies is None
    assert planned.shortfall_bytes == 0


@pytest.mark.parametrize(
    "name", ["1f1b", "gis-h-v2", "pipeoffload-v2", "interleaved-v2", "v-half"]
)
def test_copies_bring_a_schedule_within_memory_and_keep_its_order(name):
    workload = equal_layers(8)
    cluster = devices(4, units=5)
    plan = family_plan(name, workload, cluster, 16)
    free = simulate(plan.schedule(), build_costs(workload, cluster, plan.stages, 16))
    assert memory_over(free) > 0
    planned = plan_copies(plan.schedule(), free.costs)
    assert planned.shortfall_bytes == 0
    check_memory(planned.timeline)
    assert planned.timeline.schedule == plan.schedule()
    assert planned.copies is not None
    # both ways each, and none of the last stage: its backward follows at once
    outs = planned.copies.codes[kind_of(planned.copies.codes) == CopyKind.O]
    assert 2 * len(outs) == len(planned.copies.codes)
    assert not (stage_of(outs) == len(plan.stages) - 1).any()
    assert planned.timeline.step_ns <= 1.05 * free.step_ns


def test_later_ranks_offload_less():
    """D08: equal activations; the later a rank, the shorter what it keeps lives."""
    workload, cluster = equal_layers(4), devices(4, units=2)
    plan = family_plan("1f1b", workload, cluster, 16)
    planned = plan_copies(plan.schedule(), build_costs(workload, cluster, plan.stages, 16))
    copied = usage_of(planned.timeline).copied.tolist()
    assert planned.shortfall_bytes == 0
    assert copied == sorted(copied, reverse=True)
    assert copied[0] > copied[2]
    assert copied[3] == 0


def test_copies_are_found_where_weights_put_off_fill_the_memory():
    """V-half: gradients kept for W's add to a device right before its reloads."""
    workload = Workload(
        name="put off",
        layers=tuple(
            Layer(
                name=str(index),
                forward_ns=700,
                input_grad_ns=1300,
                weight_grad_ns=1000,
                param_bytes=0,
                state_bytes=0,
                saved_bytes=UNIT // 2,
                saved_w_bytes=UNIT // 2,
                held_w_bytes=UNIT // 2,
                output_bytes=0,
                offloadable_bytes=UNIT,
            )
            for index in range(8)
        ),
    )
    plan = family_plan("v-half", workload, Cluster.equal(4), 8)
    free = simulate(plan.schedule(), build_costs(workload, plan.cluster, plan.stages, 8))
    peak = int(free.peak_bytes.max())
    cluster = devices(4, units=1, copy_ns=750)
    cluster = msgspec.structs.replace(
        cluster,
        devices=tuple(
            msgspec.structs.replace(device, memory_bytes=9 * peak // 10)
            for device in cluster.devices
        ),
    )
    planned = plan_copies(plan.schedule(), build_costs(workload, cluster, plan.stages, 8))
    assert planned.shortfall_bytes == 0
    assert planned.copies is not None
    assert planned.timeline.step_ns == free.step_ns


def test_what_no_copies_can_free_is_the_shortfall():
    workload, cluster = equal_layers(4, offloadable=0), devices(4, units=2)
    plan = family_plan("1f1b", workload, cluster, 8)
    planned = plan_copies(plan.schedule(), build_costs(workload, cluster, plan.stages, 8))
    assert planned.copies is None
    assert planned.shortfall_bytes == 2 * UNIT  # 1F1B's first rank holds four


def test_a_slow_link_leaves_part_of_the_shortfall():
    workload, cluster = equal_layers(4), devices(4, units=2, copy_ns=1500)
    plan = family_plan("1f1b", workload, cluster, 8)
    planned = plan_copies(plan.schedule(), build_costs(workload, cluster, plan.stages, 8))
    assert 0 < planned.shortfall_bytes <= 2 * UNIT
    assert planned.shortfall_bytes == memory_over(planned.timeline)


def test_schedules_that_turn_microbatches_round_are_refused():
    rows = [["0F0", "0F1", "0B1", "0B0"]]
    workload, cluster = equal_layers(1), devices(1, units=1)
    costs = build_costs(workload, cluster, (Stage(layers=(0, 1), device=0),), 2)
    with pytest.raises(ScheduleError, match="stage 0 does not run its microbatches in rising"):
        plan_copies(Schedule.from_words(rows), costs)


def test_recomputed_stages_never_leave():
    """D05 beside offload: recompute and copies of other stages in one plan."""
    workload, cluster = equal_layers(4), devices(2, units=4)
    stages = tuple(
        msgspec.structs.replace(stage, recompute=stage.layers[0] == 0)
        for stage in stages_of((0, 1, 2, 3, 4), (0, 1, 0, 1))
    )
    start = starts(workload, cluster, 8, "interleaved-v2")[0]
    found = search_within(
        workload,
        cluster,
        8,
        [Start(name="", stages=stages, schedule=start.schedule)],
        recompute=False,
        max_evaluations=40,
    )
    assert found is not None
    check(as_plan(found, workload, cluster, 8))
    if found.copies is not None:
        assert not (stage_of(found.copies.codes) == 0).any()


def test_usage_counts_copies_bytes_and_waits():
    workload = equal_layers(2)
    cluster = devices(1, units=3, copy_ns=50)
    stages = (Stage(layers=(0, 1), device=0), Stage(layers=(1, 2), device=0))
    plan = Plan(
        workload=workload,
        cluster=cluster,
        num_microbatches=1,
        stages=stages,
        actions=(["0F0", "1F0", "1B0", "0B0"],),
        offload=(("0O0", "0R0@1B0"),),
    )
    costs = build_costs(workload, cluster, stages, 1)
    usage = usage_of(simulate(plan.schedule(), costs, plan.copies()))
    assert usage.copied.tolist() == [1, 0]
    assert usage.moved_bytes.tolist() == [2 * UNIT]
    assert usage.trip_share.tolist() == [pytest.approx(1 / 3)] * 2
    assert usage.lane_busy[0] == pytest.approx(100 / 600)
    assert usage.late_ns.tolist() == [0, 0]
    # back only when 0B0 could begin: 1B0 ends at 400, and the copy then takes 50
    slow = msgspec.structs.replace(plan, cluster=devices(1, units=3, copy_ns=250))
    costs = build_costs(workload, slow.cluster, stages, 1)
    late = usage_of(simulate(slow.schedule(), costs, slow.copies())).late_ns
    # O: 100 to 350, R: from 350 (1B0 began at 200) to 600; 1B0 ended at 400
    assert late.tolist() == [200, 0]
