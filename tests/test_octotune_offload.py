"""Offload planning: fits what it says it fits, keeps orders, and reaches published steps."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from octotune.check import check
from octotune.contract import (
    Cluster,
    Device,
    Layer,
    Link,
    Links,
    Plan,
    Stage,
    Workload,
    build_costs,
)
from octotune.errors import InfeasibleError, MalformedError, ScheduleError
from octotune.offload.bench import Start
from octotune.offload.joint import with_more_memory
from octotune.offload.pages import Rule
from octotune.offload.planning import keys_of, memory_over, paged, pages_of, plan_copies, simulated
from octotune.offload.search import search_within
from octotune.offload.starts import finer
from octotune.offload.uniform import uniform_start
from octotune.offload.usage import usage_of
from octotune.partition import stages_of
from octotune.schedules import FAMILIES, plan_from
from octotune.tune import loop, offloading, tune
from simulator.actions import CopyKind, Schedule, kind_of, stage_of
from simulator.engine import simulate
from simulator.memory import check_memory, host_peak_bytes

UNIT = 1000
CASES = Path(__file__).resolve().parent.parent / "benchmarks" / "data" / "offload"


def equal_layers(count, *, offloadable=UNIT, output=0):
    return Workload(
        name=f"{count} equal layers",
        layers=tuple(
            Layer(
                name=f"layers.{index}",
                forward_ns=100,
                input_grad_ns=100,
                weight_grad_ns=100,
                param_bytes=0,
                state_bytes=0,
                saved_bytes=0,
                saved_w_bytes=UNIT,
                output_bytes=output,
                offloadable_bytes=offloadable,
            )
            for index in range(count)
        ),
    )


def devices(count, *, units, copy_ns=75, link=None, host_memory_bytes=None):
    """Devices with room for so many activations of UNIT bytes, which take copy_ns one way."""
    return Cluster(
        name="equal",
        devices=tuple(
            Device(
                kind="unit",
                memory_bytes=units * UNIT,
                offload_bandwidth=UNIT * 10**9 // copy_ns if copy_ns else 0,
                host_link=None if link is None else f"link {index // link}",
            )
            for index in range(count)
        ),
        links=Links(intra_host=Link(latency_ns=0, bandwidth=10**18)),
        host_memory_bytes=host_memory_bytes,
    )


def family_plan(name, workload, cluster, num_microbatches, **options):
    return plan_from(
        FAMILIES[name], workload, with_more_memory(cluster, None), num_microbatches, **options
    )


def as_plan(found, workload, cluster, num_microbatches):
    return Plan(
        workload=workload,
        cluster=cluster,
        num_microbatches=num_microbatches,
        stages=found.stages,
        actions=found.schedule.words(),
        offload=None if found.copies is None else found.copies.words(),
    )


def starts(workload, cluster, num_microbatches, *names):
    plans = [family_plan(name, workload, cluster, num_microbatches) for name in names]
    return [
        Start(name=name, stages=plan.stages, schedule=plan.schedule())
        for name, plan in zip(names, plans, strict=True)
    ]


# --- a schedule as it is ------------------------------------------------------------------------


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


# --- orders that bend ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_played_plans_are_what_the_simulator_makes_of_them(seed):
    """Uneven layers, links that take time, random rules: the same step, and memory kept."""
    rng = random.Random(seed)
    layers = tuple(
        Layer(
            name=str(index),
            forward_ns=rng.randint(50, 150),
            input_grad_ns=rng.randint(50, 150),
            weight_grad_ns=rng.randint(20, 150),
            param_bytes=0,
            state_bytes=rng.randint(0, 100),
            saved_bytes=rng.randint(0, 500),
            saved_w_bytes=500,
            held_w_bytes=rng.choice((0, 100)),
            workspace_bytes=rng.choice((0, 100)),
            output_bytes=10,
            offloadable_bytes=500,
        )
        for index in range(8)
    )
    workload = Workload(name="random", layers=layers)
    free = with_more_memory(devices(4, units=1, copy_ns=rng.choice((40, 75, 150))), None)
    name = rng.choice(("gis-v2", "gis-h-v2", "pipeoffload-v2", "zb-v", "interleaved-v2"))
    plan = plan_from(FAMILIES[name], workload, free, 12)
    timeline = simulate(plan.schedule(), build_costs(workload, free, plan.stages, 12))
    tight = msgspec.structs.replace(
        free,
        devices=tuple(
            msgspec.structs.replace(device, memory_bytes=int(peak * 0.7))
            for device, peak in zip(free.devices, timeline.peak_bytes.tolist(), strict=True)
        ),
    )
    costs = build_costs(workload, tight, plan.stages, 12)
    keys = keys_of(timeline)
    played = 0
    for notice in (0, 1, 3):
        for window, overtake in ((0, 0.0), (400, 0.5)):
            rule = Rule(notice=notice, window_ns=window, overtake=overtake, slack=0.7, lead=0.5)
            made = paged(pages_of(costs, keys.split), keys, rule)
            if made is None:
                continue
            played += 1
            run = simulated(made, costs)  # raises where a rule of the contract is broken
            assert run.step_ns == made.end_ns
            check_memory(run)
    assert played > 0


def test_the_floor_of_memory_is_near_one_activation_in_and_one_out():
    """Uniform repeating: all that leaves needs two or three units, however many stages."""
    for passes in (2, 4):
        workload, cluster = equal_layers(4 * passes), devices(4, units=3)
        start = uniform_start(workload, cluster, 16, passes, equal=True)
        free = simulate(start.schedule, build_costs(workload, cluster, start.stages, 16))
        found = search_within(workload, cluster, 16, [start], recompute=False, max_evaluations=200)
        assert found is not None
        assert found.step_ns <= 1.05 * free.step_ns
        check(as_plan(found, workload, cluster, 16))


def test_peaks_do_not_grow_with_microbatches():
    """D13: four times the microbatches, the same memory, four times the time."""
    steps = []
    for num_microbatches in (16, 64):
        workload, cluster = equal_layers(8), devices(4, units=4)
        found = search_within(
            workload,
            cluster,
            num_microbatches,
            starts(workload, cluster, num_microbatches, "gis-h-v2"),
            recompute=False,
            max_evaluations=60,
        )
        assert found is not None
        steps.append(found.step_ns)
    assert steps[1] <= 4.1 * steps[0]


@pytest.mark.parametrize(
    ("k", "units", "step_ns"),
    [("0.5", 3, 104065041), ("0.5", 4, 102073365), ("0.7", 4, 104065041), ("1.0", 4, 102073365)],
)
def test_published_steps_at_published_peaks(k, units, step_ns):
    """The published scheduler's table, d = 4, v = 2, m = 16."""
    case = json.loads((CASES / "uniform-d4-v2-m16.json").read_text(encoding="utf-8"))
    workload = msgspec.convert(case["workload"], Workload)
    cluster = msgspec.convert(case["clusters"][k], Cluster)
    cluster = msgspec.structs.replace(
        cluster,
        devices=tuple(
            msgspec.structs.replace(device, memory_bytes=units * 10**9)
            for device in cluster.devices
        ),
    )
    found = search_within(
        workload,
        cluster,
        16,
        starts(workload, cluster, 16, "pipeoffload-v2", "zb-v", "gis-v2"),
        recompute=False,
        max_evaluations=300,
    )
    assert found is not None
    assert found.step_ns <= step_ns
    assert check(as_plan(found, workload, cluster, 16)).step_ns == found.step_ns


def test_half_of_the_stages_leave_less_than_half_of_the_peak():
    workload, cluster = equal_layers(32), devices(4, units=1 << 40)
    start = uniform_start(workload, cluster, 16, 8, equal=True)
    costs = build_costs(workload, cluster, start.stages, 16)
    free = simulate(start.schedule, costs)
    none = int(free.peak_bytes.max())
    keys = keys_of(free)
    stays = np.arange(32) // 4 >= 4
    tight = devices(4, units=int(0.36 * none) // UNIT)
    costs = build_costs(workload, tight, start.stages, 16)
    made = [
        paged(pages_of(costs, keys.split, stays=stays), keys, Rule(notice=notice))
        for notice in (1, 2, 4)
    ]
    assert any(one is not None and one.end_ns <= 1.05 * free.step_ns for one in made)


def test_finer_stages_take_the_same_time():
    workload, cluster = equal_layers(8), devices(2, units=100)
    start = starts(workload, cluster, 4, "zb-h1")[0]
    cut = finer(start, workload, 3)
    assert cut is not None
    assert [stage.layers for stage in cut.stages] == [
        (0, 1),
        (1, 3),
        (3, 4),
        (4, 5),
        (5, 7),
        (7, 8),
    ]
    whole, parts = (
        simulate(one.schedule, build_costs(workload, cluster, one.stages, 4))
        for one in (start, cut)
    )
    assert parts.step_ns == whole.step_ns
    assert (parts.peak_bytes <= whole.peak_bytes).all()
    assert finer(cut, workload, 1) is None


def test_host_memory_is_kept():
    workload = equal_layers(4)
    cluster = devices(4, units=3, host_memory_bytes=3 * UNIT)
    found = search_within(
        workload, cluster, 8, starts(workload, cluster, 8, "1f1b"), max_evaluations=200
    )
    assert found is not None
    checked = check(as_plan(found, workload, cluster, 8))
    run = simulate(found.schedule, build_costs(workload, cluster, found.stages, 8), found.copies)
    assert max(host_peak_bytes(run).values()) <= 3 * UNIT
    assert checked.step_ns == found.step_ns


def test_devices_of_one_link_take_turns():
    """Two devices a link: one goes out while the other comes in, and the plan still fits."""
    workload = equal_layers(8)
    cluster = devices(4, units=5, copy_ns=60, link=2)
    found = search_within(
        workload,
        cluster,
        16,
        starts(workload, cluster, 16, "gis-h-v2", "pipeoffload-v2"),
        recompute=False,
        max_evaluations=200,
    )
    assert found is not None
    check(as_plan(found, workload, cluster, 16))
    run = simulate(found.schedule, build_costs(workload, cluster, found.stages, 16), found.copies)
    usage = usage_of(run)
    assert all(0 < out <= 1 and 0 < back <= 1 for out, back in usage.link_busy.values())


def test_both_is_never_behind_either():
    workload, cluster = equal_layers(8), devices(4, units=4, copy_ns=200)
    begin = starts(workload, cluster, 12, "zb-v", "gis-v2")
    alone = [
        search_within(
            workload,
            cluster,
            12,
            begin,
            offload=offload,
            recompute=not offload,
            max_evaluations=150,
        )
        for offload in (False, True)
    ]
    known = [one for one in alone if one is not None]
    both = search_within(workload, cluster, 12, begin, max_evaluations=150, found=known)
    assert known
    assert both.step_ns <= min(one.step_ns for one in known)


# --- what copies do -----------------------------------------------------------------------------


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


# --- the tuner ----------------------------------------------------------------------------------


def test_tuner_offloads_where_memory_does_not_suffice():
    # inputs as large as activations: recompute frees nothing
    workload, cluster = equal_layers(8, output=UNIT), devices(2, units=3)
    with pytest.raises(InfeasibleError, match=r"no plan fits|too few"):
        tune(workload, cluster, num_microbatches=6, max_evaluations=500, offload="never")
    plan = tune(workload, cluster, num_microbatches=6, max_evaluations=500)
    assert plan.offload is not None
    assert any(plan.offload)
    assert check(plan).step_ns == plan.predicted.step_ns


@pytest.mark.parametrize("where", [1, 2, 3, "copies"])
def test_ctrl_c_keeps_the_plan_within_memory(where, monkeypatch):
    """In the search within memory, in those beyond it, and among the copies."""
    searches = itertools.count(1)
    run = loop._run

    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    def run_or_interrupt(search):
        run(search)
        if next(searches) == where:
            interrupted()

    monkeypatch.setattr(loop, "_run", run_or_interrupt)
    if where == "copies":
        monkeypatch.setattr(offloading, "improve_with_offload", interrupted)
    plan = tune(equal_layers(8), devices(2, units=7), num_microbatches=6, max_evaluations=300)
    assert plan.search["interrupted"]
    assert plan.offload is None
    assert check(plan).step_ns == plan.predicted.step_ns


def test_nothing_offloadable_is_the_same_plan_and_says_so():
    """D10: a fraction of 0 is no refusal."""
    workload, cluster = equal_layers(4, offloadable=0), devices(2, units=6)
    plans = [
        tune(workload, cluster, num_microbatches=4, max_evaluations=300, offload=offload)
        for offload in ("auto", "never", "always")
    ]
    assert plans[0].actions == plans[1].actions == plans[2].actions
    assert all(plan.offload is None for plan in plans)
    assert plans[2].search["offload"] == "none: no layer has offloadable_bytes"


def test_always_offloads_where_memory_does_suffice():
    workload, cluster = equal_layers(4), devices(2, units=1000)
    plan = tune(workload, cluster, num_microbatches=8, max_evaluations=500, offload="always")
    assert plan.offload is not None or plan.search["offload"].startswith("none: ")
    check(plan)


def test_a_wish_that_is_none_is_refused():
    with pytest.raises(MalformedError, match="offload is 'maybe'; it is one of auto, never"):
        tune(equal_layers(2), devices(1, units=9), num_microbatches=2, offload="maybe")
