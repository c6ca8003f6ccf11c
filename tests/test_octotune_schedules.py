"""Every published schedule meets the same checks, and the numbers its authors published."""

from __future__ import annotations

import csv
import io
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from schedule_costs import (
    UNIFORM,
    UNIT_NS,
    in_flight,
    uneven_shares,
    unit_costs,
    with_memory,
)

from octotune.contract import Cluster, Layer, Workload, build_costs
from octotune.errors import InfeasibleError
from octotune.placement import cross_host_edges, linear, loop, renumbered, v_shape, wave
from octotune.schedules import FAMILIES, find_family, plan_from
from octotune.schedules.dualpipe_v import dualpipe_v
from octotune.schedules.gpipe import gpipe
from octotune.schedules.group_interleaved import group_interleaved
from octotune.schedules.interleaved import interleaved
from octotune.schedules.interleaved_zero_bubble import interleaved_zero_bubble
from octotune.schedules.looped_bfs import looped_bfs
from octotune.schedules.one_f_one_b import one_f_one_b
from octotune.schedules.zb_v import zb_v
from simulator.engine import simulate
from simulator.errors import OutOfMemoryError, ScheduleError
from simulator.memory import order_peak_bytes
from simulator.validate import validate

HERE = Path(__file__).parent
PUBLISHED = json.loads((HERE / "data" / "published_schedules.json").read_text())
NAMES = list(FAMILIES)
# one device, fewer microbatches than devices, one more, one less, and none that divides
SIZES = [(1, 1), (1, 3), (2, 1), (2, 5), (3, 2), (3, 3), (4, 3), (4, 5), (5, 9), (6, 3), (3, 10)]
# published numbers are rounded to half a hundredth; transfers add up to no more than that
ROUNDING = 0.0051


def costs_of(family, p, m, **options):
    return unit_costs(family.placement(p), m, **options)


def rows(*texts):
    return tuple(tuple(text.split()) for text in texts)


# -- the same checks for all


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_complete_and_runs_for_any_size(name, p, m):
    family = FAMILIES[name]
    costs = costs_of(family, p, m, transfer=0.05)
    schedule = family.generate(costs)
    validate(schedule, costs)
    timeline = simulate(schedule, costs)
    busiest = m * int((costs.forward_ns + costs.backward_ns).sum()) // p
    assert timeline.step_ns >= busiest
    if family.claimed_peak is not None:
        stages_per_device = costs.num_stages / p
        assert max(in_flight(schedule)) <= family.claimed_peak(p, m) * stages_per_device


@pytest.mark.parametrize("name", NAMES)
def test_the_same_costs_give_the_same_order(name):
    family = FAMILIES[name]
    costs = costs_of(family, 4, 6, transfer=0.05, shares=[1.0, 0.8, 1.3, 0.9])
    assert family.generate(costs) == family.generate(costs)


@pytest.mark.parametrize("name", NAMES)
def test_devices_may_be_renumbered_and_left_out(name):
    """The order belongs to positions in the pipeline; device 1 of four holds nothing."""
    family = FAMILIES[name]
    placement = family.placement(3)
    costs = unit_costs(placement, 4)
    moved = unit_costs(renumbered(placement, (3, 0, 2)), 4)
    moved_schedule = family.generate(moved)
    schedule = family.generate(costs)
    assert moved_schedule.num_devices == 4
    assert len(moved_schedule.row(1)) == 0
    for rank, device in enumerate((3, 0, 2)):
        assert np.array_equal(moved_schedule.row(device), schedule.row(rank))


@pytest.mark.parametrize("name", NAMES)
def test_a_placement_of_another_schedule_is_refused(name):
    family = FAMILIES[name]
    costs = unit_costs((0, 0, 1, 0, 1), 2)
    with pytest.raises(ScheduleError, match=r"stages lie on devices \(0 0 1 0 1\); this sched"):
        family.generate(costs)


@pytest.mark.parametrize("name", NAMES)
def test_uneven_stages_and_slow_links_run_too(name):
    family = FAMILIES[name]
    costs = costs_of(
        family, 4, 7, times=(1.0, 1.4, 0.6), shares=[0.6, 1.0, 1.5, 0.9], transfer=0.7
    )
    schedule = family.generate(costs)
    validate(schedule, costs)
    assert simulate(schedule, costs).step_ns >= 7 * 1.5 * 3 * UNIT_NS


# -- published numbers


def published(table, kinds, sizes):
    return list(_published(table, kinds, sizes))


def _published(table, kinds, sizes):
    for name, by_kind in PUBLISHED[table].items():
        for kind in kinds:
            for (p, m), cell in zip(PUBLISHED["sizes"][table], by_kind[kind], strict=True):
                if cell is not None and sizes(p):
                    yield pytest.param(name, kind, p, m, *cell, id=f"{name}-{kind}-p{p}-m{m}")


def hold_against(name, costs, makespan, peak):
    schedule = FAMILIES[name].generate(costs)
    validate(schedule, costs)
    stages_per_device = costs.num_stages // costs.num_devices
    assert simulate(schedule, costs).step_ns <= (makespan + ROUNDING) * UNIT_NS
    assert max(in_flight(schedule)) <= peak * stages_per_device


def uniform_costs(name, kind, p, m):
    *times, transfer = UNIFORM[kind]
    return costs_of(FAMILIES[name], p, m, times=times, transfer=transfer)


@pytest.mark.parametrize(
    ("name", "kind", "p", "m", "makespan", "peak"),
    published("uniform", "AB", lambda p: p <= 8),
)
def test_published_makespan_and_peak_are_reached(name, kind, p, m, makespan, peak):
    hold_against(name, uniform_costs(name, kind, p, m), makespan, peak)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "p", "m", "makespan", "peak"),
    published("uniform", "AB", lambda p: p > 8),
)
def test_published_makespan_and_peak_are_reached_at_depth(name, kind, p, m, makespan, peak):
    hold_against(name, uniform_costs(name, kind, p, m), makespan, peak)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-v4", "dualpipe-v"])
def test_orders_that_are_fixed_give_the_published_makespan_exactly(name):
    makespan, _ = PUBLISHED["uniform"][name]["A"][2]
    costs = uniform_costs(name, "A", 8, 32)
    assert simulate(FAMILIES[name].generate(costs), costs).step_ns == round(makespan * UNIT_NS)


def uneven_costs(name, kind, p, m):
    placement = FAMILIES[name].placement(p)
    shares = uneven_shares(kind, p, len(placement))
    return unit_costs(placement, m, shares=shares, transfer=0.05)


@pytest.mark.parametrize(
    ("name", "kind", "p", "m", "makespan", "peak"),
    published("uneven", ("head18", "headfirst", "alt"), lambda p: p <= 4),
)
def test_uneven_stages_are_no_worse_than_published(name, kind, p, m, makespan, peak):
    hold_against(name, uneven_costs(name, kind, p, m), makespan, peak)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "p", "m", "makespan", "peak"),
    published("uneven", ("head18", "headfirst", "alt"), lambda p: p > 4),
)
def test_uneven_stages_are_no_worse_than_published_at_depth(name, kind, p, m, makespan, peak):
    hold_against(name, uneven_costs(name, kind, p, m), makespan, peak)


@pytest.mark.parametrize(("p", "m", "limit", "solver", "peer"), PUBLISHED["below_1f1b_memory"])
def test_zb_h1_below_1f1b_memory_is_near_the_best_that_a_solver_found(p, m, limit, solver, peer):
    """The authors' own scheduler drains the pipe there; CP-SAT is optimal at p = 4."""
    costs = unit_costs(linear(p), m, transfer=0.05, memory=limit)
    schedule = FAMILIES["zb-h1"].generate(costs)
    step = simulate(schedule, costs).step_ns / UNIT_NS
    assert max(in_flight(schedule)) <= limit
    assert step <= 1.01 * solver < peer


@pytest.mark.parametrize(
    ("name", "p", "v", "m", "bubble", "peak"),
    [(name, *case) for name, cases in PUBLISHED["offload_orders"].items() for case in cases],
)
def test_orders_made_for_offload_keep_the_published_bubble_and_peak(name, p, v, m, bubble, peak):
    family = find_family(f"{name}-v{v}")
    costs = costs_of(family, p, m)
    schedule = family.generate(costs)
    assert 100 * simulate(schedule, costs).bubble_fraction <= bubble
    assert max(in_flight(schedule)) <= peak


# -- closed forms and cases


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (4, 8), (4, 2)])
def test_1f1b_makespan_matches_closed_form(p, m):
    """Uniform stages and free transfers: (m + p - 1) (F + B)."""
    costs = unit_costs(linear(p), m)
    assert simulate(one_f_one_b(p, m), costs).step_ns == (m + p - 1) * 3 * UNIT_NS


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 12), (3, 4, 6)])
def test_interleaved_makespan_matches_closed_form(p, v, m):
    """The bubble of 1F1B is divided by v where p divides m."""
    costs = unit_costs(loop(p, v), m, times=(1.2, 1.2, 1.2))
    step = simulate(interleaved(p, v, m), costs).step_ns
    assert step == round((m * v + p - 1) * 3 * 1.2 * UNIT_NS / v)


def test_1f1b_two_stages_three_microbatches():
    assert one_f_one_b(2, 3).words() == rows("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")


def test_one_extra_warmup_hides_a_transfer_that_1f1b_waits_for():
    costs = unit_costs(linear(4), 16, transfer=0.4)
    eager, plain = (simulate(one_f_one_b(4, 16, extra_warmup=extra), costs) for extra in (1, 0))
    assert eager.step_ns < plain.step_ns
    assert in_flight(one_f_one_b(4, 16, extra_warmup=1)) == [5, 4, 3, 1]


def test_1f1b_holds_most_on_the_first_device():
    assert in_flight(one_f_one_b(8, 16)) == [8, 7, 6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_one_microbatch_passes_a_deep_pipeline(name):
    costs = unit_costs(linear(8), 1)
    assert simulate(FAMILIES[name].generate(costs), costs).step_ns == 24 * UNIT_NS


def test_a_slow_stage_in_the_middle_paces_1f1b():
    costs = unit_costs(linear(4), 8, shares=[1.0, 2.0, 1.0, 1.0])
    step = simulate(one_f_one_b(4, 8), costs).step_ns / UNIT_NS
    assert step == 53
    assert 1 + 8 * 6 + 2 <= step <= (5 + 10) + 7 * 6


def test_fewer_microbatches_than_devices_run_where_the_original_refuses():
    family = FAMILIES["interleaved-v2"]
    costs = costs_of(family, 6, 3)
    assert simulate(family.generate(costs), costs).step_ns > 0
    assert family.original_refuses(6, 3) == "m = 3 is not divisible by p = 6"
    assert family.original_refuses(6, 12) is None
    assert FAMILIES["1f1b"].original_refuses(4, 3) == "m = 3 is below p = 4"
    assert FAMILIES["dualpipe-v"].original_refuses(4, 7) == "m = 7 is below 2 p = 8"
    refusal = FAMILIES["interleaved-zb-v2"].original_refuses(4, 9)
    assert refusal == "m = 9 is not divisible into 2 equal rounds"


def test_a_smaller_group_idles_more():
    costs = unit_costs(loop(4, 2), 8)
    two, four = (simulate(interleaved(4, 2, 8, group=group), costs) for group in (2, 4))
    assert two.bubble_fraction > four.bubble_fraction


def test_two_devices_that_are_each_other_s_next_and_previous():
    """Both edges of a loop of two join the same pair; every schedule keeps them apart."""
    costs = unit_costs(loop(2, 2), 4, times=(1.0, 1.0, 1.0), transfer=0.1)
    timeline = simulate(interleaved(2, 2, 4), costs)
    words = [word for row in interleaved(2, 2, 4).words() for word in row]
    start = dict(zip(words, timeline.start_ns.tolist(), strict=True))
    end = dict(zip(words, timeline.end_ns.tolist(), strict=True))
    for stage in range(3):
        for microbatch in range(4):
            assert start[f"{stage + 1}F{microbatch}"] >= end[f"{stage}F{microbatch}"] + 10**5
            assert start[f"{stage}B{microbatch}"] >= end[f"{stage + 1}B{microbatch}"] + 10**5


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("v", [1, 2, 3])
def test_interleaved_runs_for_any_microbatches_and_any_group(p, v):
    for m in range(1, 2 * p + 2):
        costs = unit_costs(loop(p, v), m, times=(1.2, 1.2, 1.2))
        for group in range(1, p + 3):
            schedule = interleaved(p, v, m, group=group)
            validate(schedule, costs)
            assert simulate(schedule, costs).step_ns >= 3.6 * m * UNIT_NS - 1


# -- memory


def test_each_device_keeps_its_own_cap():
    caps = np.array([8, 6, 4, 4]) * 10**9
    base = unit_costs(linear(4), 12, transfer=0.05)
    costs = with_memory(base, caps)
    schedule = FAMILIES["zb-h2"].generate(costs)
    assert (order_peak_bytes(schedule, costs) <= caps).all()
    assert in_flight(schedule)[0] > 4


@pytest.mark.parametrize("name", [name for name in NAMES if FAMILIES[name].adapts_to_memory])
def test_a_cap_below_one_microbatch_is_named(name):
    family = FAMILIES[name]
    costs = costs_of(family, 3, 4, memory=100)
    costs = with_memory(costs, [100 * 10**9, 10**9 - 1, 100 * 10**9])
    with pytest.raises(OutOfMemoryError, match=r"device 1 needs .* 953.7 MiB: \d+"):
        family.generate(costs)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "v-half", "v-min", "1f1b-v", "hanayo-w1"])
@pytest.mark.parametrize("units", [1.0, 1.5, 3.0])
def test_memory_down_to_one_microbatch_is_kept(name, units):
    family = FAMILIES[name]
    costs = costs_of(family, 4, 9, transfer=0.05, memory=units)
    schedule = family.generate(costs)
    validate(schedule, costs)
    assert (order_peak_bytes(schedule, costs) <= costs.memory_bytes).all()


def test_interleaved_takes_smaller_groups_where_the_larger_do_not_fit():
    family = FAMILIES["interleaved-v2"]
    roomy = family.generate(costs_of(family, 4, 7))
    tight = costs_of(family, 4, 7, memory=5.5)
    assert max(in_flight(roomy)) == 14
    assert (order_peak_bytes(family.generate(tight), tight) <= tight.memory_bytes).all()


# -- arguments


@pytest.mark.parametrize(
    "make",
    [
        lambda: gpipe(0, 1),
        lambda: one_f_one_b(1, 0),
        lambda: interleaved(2, 0, 1),
        lambda: interleaved(2, 1, 1, group=0),
        lambda: looped_bfs(1, 1, -1),
        lambda: zb_v(0, 1),
        lambda: dualpipe_v(1, 0),
        lambda: interleaved_zero_bubble(1, 0, 1),
        lambda: group_interleaved(0, 1, 1, group=1),
    ],
)
def test_counts_below_one_are_refused(make):
    with pytest.raises(ScheduleError, match=r"\w+ is (0|-1); it is at least 1"):
        make()


def test_a_negative_warmup_is_refused():
    with pytest.raises(ScheduleError, match="extra_warmup is -1; it is at least 0"):
        one_f_one_b(2, 2, extra_warmup=-1)


def test_a_group_of_gis_below_half_the_devices_is_refused():
    with pytest.raises(ScheduleError, match="group is 1; with p = 4 it is from 2 to 4"):
        group_interleaved(4, 2, 8, group=1)


def test_families_with_a_number_exist_for_any_number():
    family = find_family("interleaved-v3")
    assert family.placement(2) == (0, 1, 0, 1, 0, 1)
    assert find_family("gis-h-v5").name == "gis-h-v5"
    assert find_family("zb-v") is FAMILIES["zb-v"]
    assert all(find_family(name).name == name for name in NAMES)
    for name in ("interleaved-v", "interleaved-v0", "2f2b", "zb-v2"):
        with pytest.raises(
            InfeasibleError, match=f"no schedule is called '{name}'; there are gpi"
        ):
            find_family(name)


# -- plans


def workload_of(num_layers):
    return Workload(
        name="layers",
        layers=tuple(
            Layer(
                name=str(index),
                forward_ns=100 + index,
                input_grad_ns=100,
                weight_grad_ns=100,
                param_bytes=8,
                state_bytes=16,
                saved_bytes=4,
                output_bytes=2,
            )
            for index in range(num_layers)
        ),
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_of_a_family_runs(name):
    family = FAMILIES[name]
    workload, cluster = workload_of(19), Cluster.equal(4, latency_ns=5, bandwidth=10**9)
    plan = plan_from(family, workload, cluster, 5)
    costs = build_costs(workload, cluster, plan.stages, 5)
    validate(plan.schedule(), costs)
    assert [stage.device for stage in plan.stages] == list(family.placement(4))
    sizes = [stage.layers[1] - stage.layers[0] for stage in plan.stages]
    assert sum(sizes) == 19
    assert max(sizes) - min(sizes) <= 1


def test_a_plan_takes_given_cuts_and_recompute():
    cuts = (0, 1, 4, 5, 9)
    plan = plan_from(FAMILIES["zb-v"], workload_of(9), Cluster.equal(2), 3, cuts, recompute=True)
    assert [stage.layers for stage in plan.stages] == [(0, 1), (1, 4), (4, 5), (5, 9)]
    assert all(stage.recompute for stage in plan.stages)


def test_too_few_layers_are_named():
    with pytest.raises(InfeasibleError, match="7"):
        plan_from(FAMILIES["zb-v"], workload_of(7), Cluster.equal(4), 2)


# -- golden files

PLAIN = {
    "gpipe": partial(gpipe, 3, 4),
    "1f1b": partial(one_f_one_b, 3, 5),
    "1f1b-eager": partial(one_f_one_b, 3, 5, extra_warmup=1),
    "interleaved-v2": partial(interleaved, 2, 2, 5),
    "looped-bfs-v2": partial(looped_bfs, 2, 2, 3),
    "interleaved-zb-v2": partial(interleaved_zero_bubble, 2, 2, 5),
    "gis-v3": partial(group_interleaved, 3, 3, 4, group=2),
    "zb-v": partial(zb_v, 3, 6),
    "dualpipe-v": partial(dualpipe_v, 2, 5),
}


@pytest.mark.parametrize("name", NAMES)
def test_orders_for_equal_stages_are_as_reviewed(name, rewrites_golden):
    """Four devices, six microbatches, F = I = W = 1 and transfers of 0.05."""
    costs = costs_of(FAMILIES[name], 4, 6, transfer=0.05)
    check_golden(f"{name}_p4_m6", FAMILIES[name].generate(costs), rewrites_golden)


@pytest.mark.parametrize("name", list(PLAIN))
def test_plain_orders_are_as_reviewed(name, rewrites_golden):
    check_golden(f"{name}_plain", PLAIN[name](), rewrites_golden)


def check_golden(name, schedule, rewrites):
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(schedule.words())
    path = HERE / "golden" / f"{name}.csv"
    if rewrites:
        path.write_text(text.getvalue())
    assert text.getvalue() == path.read_text()


def test_no_golden_file_is_left_over():
    expected = {f"{name}_p4_m6" for name in NAMES} | {f"{name}_plain" for name in PLAIN}
    found = {path.stem for path in (HERE / "golden").glob("*_p4_m6.csv")}
    found |= {path.stem for path in (HERE / "golden").glob("*_plain.csv")}
    assert found == expected


# -- placements


def test_placements_turn_or_begin_again():
    assert linear(3) == (0, 1, 2)
    assert loop(3, 2) == (0, 1, 2, 0, 1, 2)
    assert wave(3, 3) == (0, 1, 2, 2, 1, 0, 0, 1, 2)
    assert v_shape(3) == wave(3, 2)


def test_a_v_crosses_two_hosts_less_often_than_a_loop():
    """Two hosts of four devices: slow edges once, once a pass and back, and twice."""
    hosts = [0] * 4 + [1] * 4
    crossings = [cross_host_edges(place, hosts) for place in (linear(8), loop(8, 2), v_shape(8))]
    assert crossings == [1, 3, 2]


def test_a_placement_of_no_device_is_refused():
    with pytest.raises(InfeasibleError, match="num_devices is 0; it is at least 1"):
        loop(0, 1)
