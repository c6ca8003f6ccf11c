"""Orders that bend to memory: they fit as they say, and reach published steps."""

from __future__ import annotations

import json
import random

import msgspec
import numpy as np
import pytest
from offload_cases import CASES, UNIT, as_plan, devices, equal_layers, starts

from octotune.check import check
from octotune.contract import (
    Cluster,
    Layer,
    Workload,
    build_costs,
)
from octotune.offload.joint import with_more_memory
from octotune.offload.pages import Rule
from octotune.offload.planning import keys_of, paged, pages_of, simulated
from octotune.offload.search import search_within
from octotune.offload.starts import finer
from octotune.offload.uniform import uniform_start
from octotune.offload.usage import usage_of
from octotune.schedules import FAMILIES, plan_from
from simulator.engine import simulate
from simulator.memory import check_memory, host_peak_bytes


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
