"""Fill plans: made, written, read and recomputed; whatever is changed in one is found."""

from __future__ import annotations

import json

import msgspec
import pytest
import yaml

from octotune.__main__ import main
from octotune.contract import Cluster, Layer, Workload
from octotune.errors import BrokenPlanError, InfeasibleError, MalformedError
from octotune.fill.check import check_fill
from octotune.fill.jobs import Configuration, FillJob, MicroStep
from octotune.fill.make import make_fill_plan
from octotune.fill.packing import Margins
from octotune.fill.plan import read_fill
from octotune.fill.policies import find_policy
from octotune.schedules import find_family, plan_from

MS = 10**6
MARGINS = Margins(threshold_ns=5 * MS, switch_ns=1 * MS, margin=0.1)


def main_plan(schedule="1f1b", memory=10**9):
    layers = tuple(
        Layer(
            name=str(i),
            forward_ns=20 * MS,
            input_grad_ns=20 * MS,
            weight_grad_ns=20 * MS,
            optimizer_ns=3 * MS,
            param_bytes=0,
            state_bytes=10**8,
            saved_bytes=10**7,
            output_bytes=0,
        )
        for i in range(4)
    )
    cluster = Cluster.equal(4, memory_bytes=memory)
    return plan_from(find_family(schedule), Workload(name="even", layers=layers), cluster, 4)


def job(name, *, samples=1000, times=(3, 4), kind="inference", memory=10**8, **more):
    steps = tuple(MicroStep(time_ns=t * MS, memory_bytes=memory) for t in times)
    configuration = Configuration(batch_size=4, carried_bytes=10**6, micro_steps=steps)
    return FillJob(name=name, kind=kind, samples=samples, configurations=(configuration,), **more)


JOBS = tuple(
    job(f"job {i}", samples=200 * (i + 1), times=(3 + i % 3, 4), arrival_ns=i * 100 * MS)
    for i in range(9)
)


def made(**changed):
    settings = {"jobs": JOBS, "policy": find_policy("sjf"), "margins": MARGINS} | changed
    return make_fill_plan(settings.pop("plan", main_plan()), **settings)


@pytest.mark.parametrize("policy", ["sjf", "makespan", "deadline", "0.7*sjf + 0.3*makespan"])
@pytest.mark.parametrize("optimal", [False, True])
def test_a_fill_plan_finishes_its_jobs_and_recomputes(policy, optimal, tmp_path):
    fill = made(policy=find_policy(policy), optimal=optimal, time_limit_s=1)
    assert None not in fill.predicted.end_ns
    assert sum(run.samples for run in fill.runs) == sum(job.samples for job in JOBS)
    assert 0 < fill.predicted.filled_fraction < 0.9
    fill.save(tmp_path / "fill.json")
    again = read_fill(tmp_path / "fill.json")
    assert again == fill
    assert check_fill(again).predicted == fill.predicted


def test_filled_fraction_is_fill_time_over_idle_time():
    fill = made(jobs=(job("one", samples=10**4),))
    (packing,) = fill.packings
    checked = check_fill(fill)
    idle = 4 * fill.predicted.step_ns - int(checked.main.timeline.busy_ns.sum())
    (run,) = fill.runs
    a_step = sum(
        fill.configuration(packing).micro_steps[k].time_ns
        for step in packing.steps
        for order in step
        for k in order
    ) / len(packing.steps)
    assert run.end * fill.predicted.step_ns == fill.predicted.end_ns[0]
    assert fill.predicted.filled_fraction == pytest.approx(a_step / idle)


def test_the_same_input_gives_the_same_fill_plan():
    assert made(optimal=True, time_limit_s=1) == made(optimal=True, time_limit_s=1)


def test_jobs_keep_the_configurations_in_use_only():
    small = Configuration(batch_size=1, micro_steps=(MicroStep(time_ns=30 * MS),))
    both = msgspec.structs.replace(JOBS[0], configurations=(small, *JOBS[0].configurations))
    fill = made(jobs=(both,))
    assert fill.jobs[0].configurations == JOBS[0].configurations
    assert fill.packings[0].configuration == 0


def test_a_job_that_fits_nowhere_is_said_at_once_with_the_nearest_miss():
    with pytest.raises(
        InfeasibleError,
        match=r"job 'large' fits in no bubble; nearest miss: batch 4, none: micro-step '' takes "
        r"900000000 ns, the longest bubble takes \d+ ns \(\d+\.\d\d times as much\)",
    ):
        made(jobs=(*JOBS, job("large", times=(900,))))
    with pytest.raises(InfeasibleError, match="needs 5000000000 bytes, the roomiest bubble has"):
        made(jobs=(job("large", memory=5 * 10**9),))


@pytest.mark.parametrize("endless", [{"samples": 2**62}, {"arrival_ns": 2**62}])
def test_a_job_that_never_ends_is_refused(endless):
    with pytest.raises(
        MalformedError, match=r"job 'long': arrives at \d+ ns with \d+ samples, and"
    ):
        made(jobs=(job("long", **endless),))


def changed(fill, path, value):
    """The fill plan with one value changed, as a file would hold it."""
    tree = json.loads(msgspec.json.encode(fill))
    *way, last = path
    at = tree
    for key in way:
        at = at[key]
    at[last] = value(at[last]) if callable(value) else value
    return msgspec.json.decode(json.dumps(tree), type=type(fill))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ("bubbles", 0, 0, "free_bytes"),
            lambda n: n + 1,
            r"bubbles\[0\]\[0\].free_bytes is \d+; by",
        ),
        (
            ("bubbles", 0, 0, "usable_ns"),
            lambda n: n + 1,
            r"bubbles\[0\]\[0\].usable_ns is \d+; by",
        ),
        (
            ("bubbles", 0, 0, "after"),
            "0F9",
            r"bubbles\[0\]\[0\].after is 0F9; by the plan it is 0F3",
        ),
        (("bubbles", 0), [], r"bubbles\[0\] has 0 bubbles; the plan leaves"),
        (("bubbles",), [], r"bubbles has 0 rows; it has one a device, so 4"),
        (("resting_bytes", 0), 5, r"resting_bytes is \[5, .*\]; by the plan it is"),
        (("packings", 0, "job"), 99, r"packings\[0\].job is 99; allowed: 0 to 8"),
        (("packings", 0, "device"), 4, r"packings\[0\].device is 4; allowed: 0 to 3"),
        (("packings", 0, "configuration"), 1, r"packings\[0\].configuration is 1; job .* has 1"),
        (
            ("packings", 0, "samples"),
            lambda n: n + 4,
            r"packings\[0\].samples is \d+; a cycle makes",
        ),
        (
            ("packings", 0, "steps", 0, 0, 0),
            1,
            r"steps\[0\]\[0\] has micro-step 1; no pass has come",
        ),
        (("packings", 0, "steps", 0, 0, 0), 7, r"has micro-step 7; there are 0 to 1"),
        (("packings", 0, "steps", 0), [], r"steps\[0\] has 0 bubbles; device \d has"),
        (
            ("packings", 0, "steps", 0, 0),
            lambda order: [0, 1] * 100,
            r"steps\[0\]\[0\] takes \d+ ns; \d+ of the bubble are handed over",
        ),
        (
            ("jobs", 0, "configurations", 0, "micro_steps", 0, "memory_bytes"),
            10**9,
            r"micro-step 0 needs 1000000000 bytes, 0 other open passes included; the bubble has",
        ),
        (
            ("jobs", 0, "configurations", 0, "carried_bytes"),
            10**9,
            "leaves 1 passes open, which keep 1000000000 bytes between bubbles",
        ),
        (("runs", 0, "packing"), 99, r"runs\[0\].packing is 99; there are 9 packings"),
        (
            ("runs", 0, "samples"),
            lambda n: n + 10**6,
            r"runs\[0\].samples is \d+; its whole cycles",
        ),
        (
            ("runs", 0, "end"),
            lambda n: n + 1000,
            r"runs\[\d\] begins at step \d+; runs\[0\] has dev",
        ),
        (("runs", 8, "begin"), 0, r"runs\[8\].begin is step 0, at 0 ns; job 'job \d' arrives at"),
        (("predicted", "step_ns"), 5, r"predicted.step_ns is 5; it is \d+"),
        (("predicted", "steps"), 5, r"predicted.steps is 5; it is \d+"),
        (("predicted", "end_ns", 0), None, r"predicted.end_ns is "),
        (("predicted", "filled_fraction"), 0.99, r"predicted.filled_fraction is 0.99; it is"),
        (("plan", "actions", 0, 0), "0F1", "0F1"),
    ],
)
def test_a_changed_fill_plan_is_found_out(path, value, message):
    with pytest.raises(ValueError, match=message) as error:
        check_fill(changed(made(), path, value))
    if path[0] != "plan":
        assert isinstance(error.value, BrokenPlanError)


def test_training_with_two_open_passes_is_found_out():
    fill = made(jobs=(job("one", kind="training", times=(3, 3), samples=40),))
    order = fill.packings[0].steps[0][0]
    assert len(order) >= 4
    broken = changed(fill, ("packings", 0, "steps", 0, 0), [0, 0, 1, 1, *order[4:]])
    with pytest.raises(BrokenPlanError, match="begins a pass while another is open"):
        check_fill(broken)


def test_resident_bytes_rest_between_bubbles():
    """It fits bubbles in which no microbatch is in flight, but cannot stay there."""
    fill = made(jobs=(job("one", memory=895 * 10**6),))
    check_fill(fill)
    tree = ("jobs", 0, "configurations", 0, "resident_bytes")
    with pytest.raises(BrokenPlanError, match=r"895000000 bytes stay on device . between bubbles"):
        check_fill(changed(fill, tree, 895 * 10**6))


# --- the command line


@pytest.fixture
def files(tmp_path):
    main_plan().save(tmp_path / "plan.json")
    tree = {
        "format": "octotune-fill-jobs",
        "version": 1,
        "jobs": json.loads(msgspec.json.encode(JOBS)),
    }
    (tmp_path / "jobs.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path


def command(files, *more, policy="sjf"):
    return main(
        [
            *("fill", "--plan", str(files / "plan.json"), "--jobs", str(files / "jobs.yaml")),
            *("--policy", policy, "-o", str(files / "fill.json"), *more),
        ]
    )


def test_fill_plans_and_check_recomputes(files, capsys):
    assert command(files, "--margin", "0.1", "--picture", str(files / "fill.png")) == 0
    assert "job 8" in capsys.readouterr().out
    assert (files / "fill.png").stat().st_size > 10_000
    assert main(["check", "--json", str(files / "fill.json"), str(files / "plan.json")]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["ok"]
    assert second["ok"]
    assert first["step_ns"] == second["step_ns"]
    assert 0 < first["filled_fraction"] < 1
    assert main(["check", str(files / "fill.json")]) == 0
    assert "of all idle time is fill work" in capsys.readouterr().out


def test_check_says_in_one_line_what_a_fill_plan_breaks(files, capsys):
    command(files)
    capsys.readouterr()
    path = files / "fill.json"
    changed(read_fill(path), ("predicted", "steps"), 1).save(path)
    assert main(["check", str(path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{path}: predicted.steps is 1; it is ")


@pytest.mark.parametrize(
    ("policy", "more", "status", "message"),
    [
        ("fastest", (), 2, "policy: found 'fastest'; allowed: sjf, makespan, deadline, fifo"),
        ("no_such:thing", (), 2, "policy 'no_such:thing': cannot be loaded: ModuleNotFoundError"),
        ("{dir}/mine.py:nan", (), 2, "for job 0 on device 0 it returned nan; a score is a finite"),
        ("{dir}/mine.py:bad", (), 2, "it raised ZeroDivisionError: division by zero"),
        ("sjf", ("--threshold", "5 GiB"), 2, "--threshold: found '5 GiB', which is a size"),
        ("sjf", ("--threshold", "3 s"), 1, "job 'job 0' fits in no bubble; no bubble is long"),
    ],
)
def test_bad_input_is_one_line(files, capsys, policy, more, status, message):
    (files / "mine.py").write_text(
        "def nan(job, state, device):\n    return float('nan')\n"
        "def bad(job, state, device):\n    return 1 / 0\n"
    )
    assert command(files, *more, policy=policy.format(dir=files)) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (files / "fill.json").exists()


def test_what_is_no_fill_plan_is_refused(files):
    (files / "fill.json").write_text('{"format": "octotune-fill", "version": 1}')
    with pytest.raises(MalformedError, match="plan: missing"):
        read_fill(files / "fill.json")
