"""The command line: what it prints, and its exit statuses."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from octotune import check
from octotune.__main__ import main
from octotune.compiling import NOTICE, announced_compilation
from octotune.contract import Predicted, read_plan
from octotune.offload.planning import warm_up_paging
from octotune.tune.warm import warm_up
from tests import valid_files

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile where a fresh checkout has to, since tests look at all of standard error."""
    warm_up()
    warm_up_paging()


@pytest.fixture
def path(tmp_path) -> str:
    return str(valid_files.write(tmp_path, valid_files.plan(), "plan.json"))


@pytest.fixture
def broken(tmp_path) -> str:
    tree = valid_files.plan()
    tree["actions"][0].reverse()
    return str(valid_files.write(tmp_path, tree, "broken.json"))


@pytest.fixture
def malformed(tmp_path) -> str:
    return str(valid_files.write(tmp_path, "[]", "malformed.json"))


@pytest.fixture
def problem(tmp_path) -> list[str]:
    """A small one, of which tune needs no long search."""
    workload = valid_files.write(tmp_path, valid_files.workload(), "workload.json")
    cluster = valid_files.write(tmp_path, valid_files.cluster(), "cluster.json")
    return [
        *("--workload", str(workload), "--cluster", str(cluster)),
        *("--microbatches", "2", "--time-limit", "0.5"),
    ]


def only_line(text: str) -> str:
    assert text.endswith("\n")
    assert text.count("\n") == 1, text
    return text.removesuffix("\n")


# check


def test_check_prints_the_numbers_as_json(path, capsys):
    assert main(["check", "--json", path]) == 0
    out, err = capsys.readouterr()
    checked = check(read_plan(path))
    assert json.loads(only_line(out)) == {
        "ok": True,
        "step_ns": checked.step_ns,
        "bubble_fraction": checked.bubble_fraction,
        "peak_bytes": list(checked.peak_bytes),
    }
    assert err == ""


def test_check_prints_one_object_a_line_for_many_plans_in_order(path, broken, malformed, capsys):
    assert main(["check", "--json", path, broken, malformed, "nowhere.json", path]) == 2
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["ok"] for line in lines] == [True, False, False, False, True]
    assert [set(line) for line in lines[1:4]] == [{"ok", "error"}] * 3
    assert lines[1]["error"].startswith(f"{broken}: actions[0]")
    assert lines[2]["error"] == f"{malformed}: found []; allowed: an object"
    assert lines[3]["error"] == "nowhere.json: no such file"
    assert lines[4] == lines[0]
    assert err == ""


@pytest.mark.parametrize(
    ("names", "status"),
    [
        (["path"], 0),
        (["broken"], 1),
        (["malformed"], 2),
        (["path", "path"], 0),
        (["path", "broken"], 1),
        (["broken", "path"], 1),
        (["malformed", "broken"], 2),
        (["path", "malformed"], 2),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_the_status_is_the_worst_of_any_plan(names, status, flags, request, capsys):
    assert main(["check", *flags, *map(request.getfixturevalue, names)]) == status
    assert "Traceback" not in "".join(capsys.readouterr())


def test_what_is_wrong_goes_to_standard_error_in_one_line(broken, malformed, capsys):
    assert main(["check", broken]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert only_line(err).startswith(f"{broken}: actions[0]")
    assert main(["check", malformed]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert only_line(err) == f"{malformed}: found []; allowed: an object"


@pytest.mark.parametrize(
    ("claim", "value"),
    [("step_ns", 1), ("bubble_fraction", 0.5), ("peak_bytes", [1, 1]), ("lower_bound_ns", 10**9)],
)
def test_a_prediction_that_differs_is_a_rule_broken(claim, value, tmp_path, capsys):
    tree = valid_files.plan() | {"predicted": {claim: value}}
    path = valid_files.write(tmp_path, tree)
    assert main(["check", "--json", str(path)]) == 1
    line = json.loads(only_line(capsys.readouterr().out))
    assert line["error"].startswith(f"{path}: predicted.{claim}")


def test_too_little_memory_is_a_rule_broken(tmp_path, capsys):
    tree = valid_files.plan()
    tree["cluster"]["devices"][1]["memory_bytes"] = 40000
    path = valid_files.write(tmp_path, tree)
    assert main(["check", "--json", str(path)]) == 1
    assert "device 1 needs" in json.loads(only_line(capsys.readouterr().out))["error"]


def test_the_full_table_has_all_that_is_asked_of_a_plan(path, capsys):
    assert main(["check", path]) == 0
    out, err = capsys.readouterr()
    for part in ("step", "memory", "bound, these stages", "critical path", "Stages", "Devices"):
        assert part in out
    assert err == ""


def test_check_reads_a_plan_inside_a_file(tmp_path, capsys):
    path = valid_files.write(tmp_path, {"plans": [valid_files.plan()]})
    assert main(["check", "--json", f"{path}#plans.0"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


def test_names_that_are_no_text_are_printed_all_the_same(capsys):
    assert main(["check", "--json", "a\udcffb\nc.json"]) == 2
    assert json.loads(only_line(capsys.readouterr().out))["error"].endswith("no such file")
    assert main(["check", "a\udcffb\nc.json"]) == 2
    assert only_line(capsys.readouterr().err).isprintable()


# tune and compare


def test_tune_writes_a_plan_that_check_confirms(problem, tmp_path, capsys):
    output = tmp_path / "plan.json"
    assert main(["tune", *problem, "-o", str(output)]) == 0
    assert "step" in capsys.readouterr().out
    plan = read_plan(output)
    assert plan.predicted is not None
    checked = check(plan)
    assert plan.predicted.step_ns == checked.step_ns
    assert plan.num_microbatches == 2
    assert main(["check", str(output)]) == 0


def test_compare_shows_every_baseline_and_the_tuned_plan(problem, capsys):
    assert main(["compare", *problem, "--json"]) == 0
    found = json.loads(only_line(capsys.readouterr().out))
    assert set(found) == {"tuned", "lower_bound_ns", "baselines"}
    steps = [step for step in found["baselines"].values() if isinstance(step, int)]
    assert min(steps) >= found["tuned"]["step_ns"] > 0
    assert len(found["baselines"]) >= 4
    assert main(["compare", *problem]) == 0
    out = capsys.readouterr().out
    assert "tuned" in out
    assert next(iter(found["baselines"])).split(",")[0] in out


def test_a_cluster_of_1_is_one_device(problem, tmp_path, capsys):
    problem[problem.index("--cluster") + 1] = "1"
    output = tmp_path / "plan.json"
    assert main(["tune", *problem, "-o", str(output)]) == 0
    assert main(["compare", *problem]) == 0
    plan = read_plan(output)
    assert len(plan.cluster.devices) == 1
    assert check(plan).bubble_fraction == 0.0
    assert plan.search["optimal"]
    assert "tuned" in capsys.readouterr().out


def test_memory_that_no_plan_fits_ends_with_status_1(problem, tmp_path, capsys):
    tree = valid_files.cluster()
    for device in tree["devices"]:
        device["memory_bytes"] = 10000
    cluster = valid_files.write(tmp_path, tree, "small.json")
    problem[problem.index("--cluster") + 1] = str(cluster)
    output = tmp_path / "plan.json"
    assert main(["tune", *problem, "-o", str(output)]) == 1
    assert "device" in only_line(capsys.readouterr().err.splitlines(keepends=True)[-1])
    assert not output.exists()


def test_an_output_that_cannot_be_written_is_refused_before_the_search(problem, tmp_path, capsys):
    for output, why in (
        (tmp_path, f"{tmp_path}: cannot be written: Is a directory"),
        (tmp_path / "no" / "plan.json", "cannot be written: No such file or directory"),
        ("/proc/plan.json", "cannot be written: "),
        (tmp_path / ("n" * 300), "cannot be written: File name too long"),
        (f"{tmp_path}/a\0b", "cannot be written: "),
    ):
        begin = time.monotonic()
        assert main(["tune", *problem, "-o", str(output)]) == 2
        assert time.monotonic() - begin < 30
        assert why in only_line(capsys.readouterr().err)


def stopped(how, problem, output):
    """Run tune, send a signal when the first plan is found, and return what it printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "octotune", "tune", *problem, "-o", str(output)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    begun = []
    for line in process.stderr:
        begun.append(line)
        if "step" in line:
            break
    process.send_signal(how)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, "".join(begun) + err
    assert "Traceback" not in err
    assert "step" in out
    return read_plan(output)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_search_that_is_stopped_keeps_its_best_plan(how, tmp_path):
    """One that would go on for hours."""
    problem = ["--workload", "llama3-8b", "--cluster", "4", "--microbatches", "9"]
    plan = stopped(how, [*problem, "--time-limit", "9999"], tmp_path / "plan.json")
    assert plan.search["interrupted"]
    assert plan.search["seconds"] < 300
    assert check(plan).step_ns == plan.predicted.step_ns


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_search_that_is_stopped_at_its_end_keeps_its_best_plan(how, problem, tmp_path):
    """It meets the bound at once: the signal may come at any moment up to the process's end."""
    plan = stopped(how, problem, tmp_path / "plan.json")
    assert check(plan).step_ns == plan.predicted.step_ns


def test_no_solver_takes_ctrl_c_to_itself():
    """CP-SAT would leave the signal to the system, which kills at the next Ctrl-C."""
    texts = [path.read_text() for path in (ROOT / "octotune").rglob("*.py")]
    made = [text.count("CpSolver()") for text in texts]
    assert sum(made) >= 5
    assert made == [text.count("catch_sigint_signal = False") for text in texts]


def test_a_search_shows_on_a_terminal_what_it_does(problem, tmp_path):
    """On a terminal of its own, since only there is the line live."""
    terminal, other_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "octotune", "tune", *problem, "-o", str(tmp_path / "plan.json")],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=other_end,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(other_end)
    shown = b""
    with contextlib.suppress(OSError):  # what Linux says when the other end is closed
        while piece := os.read(terminal, 4096):
            shown += piece
    os.close(terminal)
    assert process.wait() == 0
    assert b"best step" in shown


# the command line itself


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing command"),
        (["frob"], "No such command 'frob'"),
        (["check"], "Missing argument 'PLAN...'"),
        (["check", "--frob", "x"], "No such option '--frob'"),
        (["tune"], "Missing option '--workload'"),
        (["tune", "--microbatches", "0"], "0 is not in the range"),
        (["tune", "--microbatches", "many"], "'many' is not a valid integer"),
        (["tune", "--time-limit", "-1"], "-1.0 is not in the range"),
        (["tune", "--seed", "-1"], "-1 is not in the range"),
        (
            ["compare", "--workload", "w", "--cluster", "1", "--microbatches", "1"],
            "w: no such file",
        ),
        (
            ["compare", "--workload", "llama3-8b", "--cluster", "0", "--microbatches", "1"],
            "cluster: found 0 devices; allowed: 1 to 65536",
        ),
    ],
)
def test_a_wrong_command_line_is_status_2_and_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in only_line(err)


@pytest.mark.parametrize("arguments", [["--help"], ["tune", "-h"], ["check", "--help"]])
def test_help_is_status_0(arguments, capsys):
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("Usage: python -m octotune")


def run(*arguments: str, **keywords) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octotune", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        **keywords,
    )


def test_statuses_reach_the_shell(path, broken, malformed):
    assert run("check", "--json", path).returncode == 0
    done = run("check", "--json", path, broken)
    assert done.returncode == 1
    assert done.stdout.count("\n") == 2
    done = run("check", malformed)
    assert done.returncode == 2
    assert done.stdout == ""
    assert only_line(done.stderr) == f"{malformed}: found []; allowed: an object"


def test_output_that_nobody_reads_is_no_error(path):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "octotune", "check", path],
            cwd=ROOT,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_output_is_written_where_the_terminal_knows_ascii_only(path):
    done = run("check", path, env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert (done.returncode, done.stderr) == (0, "")


def test_compiling_is_announced_once_and_only_when_it_happens():
    from numba import njit

    @njit
    def fresh(value):
        return value + 1

    said: list[str] = []
    with announced_compilation(said.append):
        fresh(1)
        fresh(1.0)
    assert said == [NOTICE]
    with announced_compilation(said.append):
        fresh(2)
    assert said == [NOTICE]


@pytest.mark.slow
def test_the_first_call_on_a_machine_says_that_it_compiles(path, tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    first = run("check", "--json", path, env=environment)
    assert (first.returncode, first.stderr) == (0, f"{NOTICE}\n")
    assert run("check", "--json", path, env=environment).stderr == ""


def test_check_says_whether_the_claimed_bound_is_reached(path, tmp_path, capsys):
    step = check(read_plan(path)).step_ns
    claimed = tmp_path / "claimed.json"
    replace(read_plan(path), predicted=Predicted(lower_bound_ns=step)).save(claimed)
    assert main(["check", "--bound", str(claimed)]) == 0
    assert "bound, all plans" in capsys.readouterr().out
    assert main(["check", "--bound", "--json", path]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["lower_bound_ns"] <= step


def test_a_full_disk_names_the_file_and_nan_the_option(path, tmp_path, capsys):
    with pytest.raises(OSError, match="/dev/full"):
        read_plan(path).save("/dev/full")
    arguments = ("--workload", "w", "--cluster", "2", "--microbatches", "2", "-o", "p.json")
    assert main(["tune", *arguments, "--time-limit", "nan"]) == 2
    assert "'--time-limit': nan is no number of seconds" in capsys.readouterr().err
