"""What people read: tables, pictures, traces and the words in them."""

import io
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs
from rich.console import Console

from octotune import report
from octotune.contract import Device, Link, Links, Predicted
from octotune.contract.cluster import UNLIMITED_BYTES, Cluster
from octotune.errors import MalformedError
from octotune.report import words
from simulator.bubbles import COOLDOWN_CAUSES, Cause
from simulator.difference import difference
from simulator.graph import critical_path
from tests import oracle
from tests.measured import timeline_of
from tests.random_plans import random_plan
from tests.small_plans import plan_of, run

MS = 10**6


def text_of(what, width=120):
    file = io.StringIO()
    Console(file=file, width=width, highlight=False).print(what)
    return file.getvalue()


def pipeline(num_stages=4, num_microbatches=8, times=(1, 1, 1), **more):
    """Return 1F1B on equal stages; times in ms."""
    rows = []
    for stage in range(num_stages):
        warmup = min(num_microbatches, num_stages - 1 - stage)
        row = [f"{stage}F{m}" for m in range(warmup)]
        for m in range(num_microbatches - warmup):
            row += [f"{stage}F{m + warmup}", f"{stage}B{m}"]
        row += [f"{stage}B{m}" for m in range(num_microbatches - warmup, num_microbatches)]
        rows.append(" ".join(row))
    of_stage = tuple(round(time * MS) for time in times)
    return plan_of(rows, times=[of_stage] * num_stages, **more)


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        (words.duration, 0, "0 ns"),
        (words.duration, 999, "999 ns"),
        (words.duration, 1_000, "1.000 us"),
        (words.duration, 12_345_678, "12.35 ms"),
        (words.duration, -12_345_678, "-12.35 ms"),
        (words.duration, 3_600 * 10**9, "3,600 s"),
        (words.milliseconds, 123_456_789, "123.5"),
        (words.milliseconds, 0, "·"),
        (words.size, 1023, "1023 B"),
        (words.size, 80 * 2**30, "80.0 GiB"),
        (words.limit, UNLIMITED_BYTES, "none"),
        (words.limit, 2**30, "1.0 GiB"),
    ],
)
def test_numbers_as_people_read_them(function, value, expected):
    assert function(value) == expected


def test_shares_and_counts():
    assert words.share(1, 3) == "33.3"
    assert words.share(0, 3) == "·"
    assert words.share(1, 10**6) == "<0.1"
    assert words.percent(1, 8) == "12.5 %"
    assert words.count(1, "microbatch") == "1 microbatch"
    assert words.count(16, "microbatch") == "16 microbatches"
    assert words.count(2, "stage") == "2 stages"


def test_a_bound_above_the_step_is_called_wrong():
    assert words.above(100, 100) == "reached: no plan is faster"
    assert words.above(110, 100) == "the step is 10.00 % above"
    assert words.above(100_001, 100_000) == "the step is <0.01 % above"
    assert words.above(99, 110).startswith("wrong")


def cells(table):
    return [list(column.cells) for column in table.columns]


def test_device_table_shows_load_idle_time_by_cause_and_memory():
    plan = pipeline(saved_bytes=2**30)
    devices = tuple(
        structs.replace(device, memory_bytes=8 * 2**30) for device in plan.cluster.devices
    )
    plan = structs.replace(plan, cluster=structs.replace(plan.cluster, devices=devices))
    timeline = run(plan)
    assert timeline.step_ns == 33 * MS  # C01: (M + p - 1) x 3
    table = report.device_table(plan, timeline)
    shown = dict(zip([column.header for column in table.columns], cells(table), strict=True))
    assert shown["device"] == ["0", "1", "2", "3"]
    assert shown["busy ms"] == ["24.00"] * 4
    assert shown["idle %"] == ["27.3"] * 4
    assert shown["warmup"] == ["·", "3.0", "6.1", "9.1"]
    assert shown["input"] == ["27.3", "18.2", "9.1", "·"]
    assert shown["cooldown"] == ["·", "6.1", "12.1", "18.2"]
    assert shown["peak"] == ["4.0 GiB", "3.0 GiB", "2.0 GiB", "1.0 GiB"]
    assert shown["limit %"] == ["50.0", "37.5", "25.0", "12.5"]


def test_causes_of_a_row_add_up_to_idle():
    for seed in range(25):
        plan = random_plan(random.Random(seed))
        timeline = run(plan)
        table = report.device_table(plan, timeline)
        shown = dict(zip([column.header for column in table.columns], cells(table), strict=True))
        names = [cause.words for cause in Cause if cause.words in shown]

        def number(cell):
            return {"·": 0.0, "<0.1": 0.05}.get(cell) if cell in ("·", "<0.1") else float(cell)

        for row, idle in enumerate(shown["idle %"]):
            total = sum(number(shown[name][row]) for name in names)
            assert total == pytest.approx(number(idle), abs=0.05 * (len(names) + 1) + 1e-9)
        assert not {cause.words for cause in COOLDOWN_CAUSES[:2]} & set(shown)


def test_the_slow_stage_is_named_and_so_is_depth():
    even = pipeline(num_microbatches=1)
    table = report.device_table(even, run(even))
    assert {column.header: list(column.cells) for column in table.columns}["input: for"] == [
        "depth (100 %)",
        "depth (100 %)",
        "depth (100 %)",
        "·",
    ]
    layers = list(even.workload.layers)
    slow = pipeline(num_microbatches=16)
    layers[2] = structs.replace(layers[2], forward_ns=4 * MS, input_grad_ns=4 * MS)
    slow = structs.replace(slow, workload=structs.replace(slow.workload, layers=tuple(layers)))
    table = report.device_table(slow, run(slow))
    named = {column.header: list(column.cells) for column in table.columns}["input: for"]
    assert [cell.split(" (")[0] for cell in np.array(named)[[0, 1, 3]]] == ["stage 2"] * 3


def test_stage_table_shows_layers_durations_and_what_is_in_flight():
    plan = pipeline(saved_bytes=3 * 2**20, bandwidth=10**9, output_bytes=2 * 10**6)
    table = report.stage_table(plan, run(plan))
    shown = {column.header: list(column.cells) for column in table.columns}
    assert shown["layers"] == ["0: 0", "1: 1", "2: 2", "3: 3"]
    assert shown["F ms"] == ["1.000"] * 4
    assert shown["B ms"] == ["2.000"] * 4
    assert "I ms" not in shown
    assert shown["saved"] == ["3.0 MiB"] * 4
    assert shown["in flight"] == ["4", "3", "2", "1"]
    assert shown["send ms"] == ["2.000", "2.000", "2.000", "·"]


def test_stage_table_notes_recompute_and_offload():
    plan = pipeline(num_stages=2, num_microbatches=2, offloadable_bytes=10)
    devices = tuple(
        structs.replace(device, offload_bandwidth=10**9) for device in plan.cluster.devices
    )
    plan = structs.replace(
        plan,
        cluster=structs.replace(plan.cluster, devices=devices),
        stages=(plan.stages[0], structs.replace(plan.stages[1], recompute=True)),
        offload=(("0O0", "0R0"), ()),
    )
    table = report.stage_table(plan, run(plan))
    assert cells(table)[-1] == ["offloads 1 of 2, k 0.00", "recomputes"]


def test_long_tables_show_what_stands_out_and_say_how_much_they_leave_out():
    plan = pipeline(num_stages=40, num_microbatches=3)
    layers = list(plan.workload.layers)
    layers[17] = structs.replace(layers[17], forward_ns=9 * MS)
    plan = structs.replace(plan, workload=structs.replace(plan.workload, layers=tuple(layers)))
    for table, thing in (
        (report.stage_table(plan, run(plan)), "stages"),
        (report.device_table(plan, run(plan)), "devices"),
    ):
        shown = cells(table)[0]
        assert len(shown) == 24
        assert {"0", "17", "39"} <= set(shown)
        assert table.caption.startswith(f"16 {thing} not shown")


def test_check_report_says_all_of_it_within_the_width():
    plan = pipeline(num_stages=8, num_microbatches=16, latency=10_000)
    timeline = run(plan)
    text = text_of(
        report.check_report(
            plan,
            timeline,
            fixed_bound_ns=timeline.step_ns,
            claimed_bound_ns=timeline.step_ns // 2,
            joint_bound_ns=timeline.step_ns - MS,
            critical_path=critical_path(timeline),
        )
    )
    assert "small on 8 equal devices: 8 layers in 8 stages on 8 devices, 16 microbatches" in text
    assert (
        f"{words.duration(timeline.step_ns)}, {words.percent(timeline.bubble_fraction, 1)}" in text
    )
    assert "bound, these stages" in text
    assert "reached: no plan is faster" in text
    assert "claimed, all plans" in text
    assert "the step is 100.00 % above" in text
    assert "the cluster has no limit" in text
    for name in ("critical path", "Stages", "Devices", "warmup", "transfer", "cooldown"):
        assert name in text
    assert max(map(len, text.splitlines())) <= 120
    assert "…" not in text  # nothing was cut off


def test_fullest_device_is_the_one_nearest_its_limit():
    plan = pipeline(num_stages=2, saved_bytes=2**30)
    roomy, tight = plan.cluster.devices[0], plan.cluster.devices[1]
    cluster = structs.replace(
        plan.cluster,
        devices=(
            structs.replace(roomy, memory_bytes=64 * 2**30),
            structs.replace(tight, memory_bytes=2 * 2**30),
        ),
    )
    plan = structs.replace(plan, cluster=cluster)
    text = text_of(report.check_report(plan, run(plan)))
    assert "fullest: device 1 with 1.0 GiB of 2.0 GiB (50.0 %)" in text


def test_baselines_stand_in_order_with_ratios_and_reasons():
    table = report.baseline_table(
        100,
        {"1f1b": 125, "gpipe": 150, "zb-v": 90, "dualpipe-v": "m = 2 is below 2 p"},
        bound_ns=80,
    )
    names, steps, ratios, notes = cells(table)
    assert names == ["zb-v", "this plan", "1f1b", "gpipe", "lower bound", "dualpipe-v"]
    assert ratios == ["0.900x", "1.000x", "1.250x", "1.500x", "0.800x", "·"]
    assert steps[0] == "90 ns"
    assert notes[-1] == "m = 2 is below 2 p"
    assert notes[-2] == "the step is 25.00 % above"


def test_critical_path_goes_down_and_up_the_pipeline_in_few_stops():
    plan = pipeline(num_stages=4, num_microbatches=8)
    made_of, stages, way = report.critical_path_text(critical_path(run(plan)))
    assert made_of == "computing 100.0 %"
    assert stages.startswith("stage 3 on device 3 72.7 %")
    stops = way.split(" > ")
    assert stops[0] == "device 0: 0F0 (1.000 ms)"
    assert stops[3] == "device 3: 3F0 to 3B7 (16 actions, 24.00 ms)"
    assert stops[-1] == "device 0: 0B7 (2.000 ms)"
    assert len(stops) == 7


def test_critical_path_of_a_deep_pipeline_leaves_its_middle_out():
    plan = pipeline(num_stages=30, num_microbatches=2, latency=5)
    _, _, way = report.critical_path_text(critical_path(run(plan)))
    stops = way.split(" > ")
    assert len(stops) == 13
    assert stops[6].startswith("... 47 stops on devices 6 to 29")
    assert report.critical_path_text(()) == ()


def test_print_plan_and_comparison_go_to_a_file_without_terminal_codes():
    plan = pipeline()
    step = run(plan).step_ns
    plan = structs.replace(
        plan,
        predicted=Predicted(
            step_ns=step,
            lower_bound_ns=step - MS,
            baselines={"gpipe": step + 3 * MS, "zb-v": "needs two stages a device"},
        ),
    )
    for show in (report.print_plan, report.print_comparison):
        file = io.StringIO()
        show(plan, file=file)
        text = file.getvalue()
        assert "\x1b" not in text
        assert "gpipe" in text
        assert "1.091x" in text
        assert "needs two stages a device" in text


def test_bubbles_of_several_timelines_stand_side_by_side():
    few, many = run(pipeline(num_microbatches=4)), run(pipeline(num_microbatches=16))
    table = report.bubble_table({"4": few, "16": many})
    causes, of_few, of_many = cells(table)
    assert causes[-1] == "all"
    assert of_few[-1] == f"{100 * few.bubble_fraction:.1f}"
    assert of_many[-1] == f"{100 * many.bubble_fraction:.1f}"


def test_difference_table_names_stage_and_action():
    plan = pipeline(num_stages=2, num_microbatches=2)
    found = difference(run(plan), timeline_of(plan, oracle.run(plan, {"1F0": 500_000})))
    text = text_of(report.difference_table(found, 2))
    assert "largest: 1F0 +500.0 us" in text
    assert "+250.0 us" in text
    assert "step +500.0 us" in text


# ------------------------------------------------------------------------------------ pictures


def pixels(path):
    from matplotlib.image import imread

    image = imread(path)
    return np.rint(image[..., :3] * 255).astype(int).reshape(-1, 3)


def amount(path, colour):
    """Return how many pixels of a picture have exactly a colour."""
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return int((pixels(path) == wanted).all(axis=1).sum())


def test_a_picture_gives_each_kind_the_area_of_its_time(tmp_path):
    """One device, F 40 ms, I 20 ms, W 10 ms and an idle device; legend and edges aside."""
    plan = plan_of(["0F0 0I0 0W0", ""], times=[(40 * MS, 20 * MS, 10 * MS)], devices=[0])
    path = tmp_path / "picture.png"
    report.timeline_picture(run(plan), path, title="one device")
    forward, half, weight = (amount(path, c) for c in ("#0072B2", "#E69F00", "#CC79A7"))
    assert forward / half == pytest.approx(2, rel=0.05)
    assert half / weight == pytest.approx(2, rel=0.08)
    assert amount(path, "#009E73") == 0


def test_a_picture_colours_idle_time_by_cause(tmp_path):
    plan = pipeline(num_stages=2, num_microbatches=1, bandwidth=10**9, output_bytes=10**6)
    path = tmp_path / "picture.png"
    report.timeline_picture(run(plan), path)
    # device 0 waits 3 ms for 1B0 and 1 ms for each transfer; device 1 warms up for 2 ms
    waits, flies, warms = (amount(path, c) for c in ("#D55E00", "#56B4E9", "#D9D9D9"))
    assert waits / flies == pytest.approx(4, rel=0.12)
    assert warms / flies == pytest.approx(2, rel=0.12)


def test_pictures_of_anything_can_be_drawn(tmp_path):
    for seed in range(3):
        plan = random_plan(random.Random(seed))
        path = tmp_path / f"{seed}.png"
        report.timeline_picture(run(plan), path, memory=True)
        assert path.read_bytes().startswith(b"\x89PNG")
    wide = pipeline(num_stages=20, num_microbatches=3)
    unrecorded = replace(run(wide), start_ns=np.full(120, -1))
    report.timelines_picture(
        {"20 devices": run(wide), "nothing recorded": unrecorded},
        tmp_path / "two.svg",
        memory=True,
    )
    drawn = (tmp_path / "two.svg").read_text()
    assert "20 devices: 66.00 ms" in drawn
    assert "nothing recorded" in drawn


def test_no_timeline_is_no_picture(tmp_path):
    with pytest.raises(ValueError, match=r"no timeline to draw; pass at least one"):
        report.timelines_picture({}, tmp_path / "none.png")


# -------------------------------------------------------------------------------------- traces


def test_traces_are_written_and_read(tmp_path):
    timeline = run(random_plan(random.Random(5)))
    path = tmp_path / "trace.json"
    report.write_trace(timeline, path)
    assert report.read_trace(path) == timeline


def test_a_broken_trace_is_refused_with_its_name(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(MalformedError, match=r"trace\.json: no trace of a timeline: .*otherData"):
        report.read_trace(path)
    with pytest.raises(MalformedError, match=r"missing\.json: No such file"):
        report.read_trace(tmp_path / "missing.json")


def test_tables_need_neither_matplotlib_nor_numba():
    code = (
        "import sys; import octotune.report; "
        "print([m for m in ('matplotlib', 'numba', 'torch', 'networkx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_several_kinds_of_device_are_named():
    plan = pipeline(num_stages=2)
    plan = structs.replace(
        plan,
        cluster=Cluster(
            name="mixed",
            devices=(
                Device(kind="old", memory_bytes=2**40, speed=0.5),
                Device(kind="new", memory_bytes=2**40),
            ),
            links=Links(intra_host=Link(latency_ns=0, bandwidth=10**12)),
        ),
    )
    table = report.device_table(plan, run(plan))
    assert {c.header: list(c.cells) for c in table.columns}["kind"] == ["old", "new"]
