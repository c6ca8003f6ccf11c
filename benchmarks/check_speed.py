"""How long do plans of 100,000 actions, and 100 MB of what is no plan, keep the command line?

`python -m octotune check` is started as a user starts it, on one core: as JSON and as the full
table with compiled code cached, and once more as on a machine that has never run it. Then files
of 100 MB that are no plans, each of a kind that would cost a careless reader its time or memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import record

NUM_DEVICES, NUM_MICROBATCHES = 64, 256
MEGABYTES = 100


def plan_file(path: Path) -> int:
    """Write a plan of ZB-V with predictions; return how many actions it has."""
    from msgspec.structs import replace

    from octotune import check
    from octotune.contract import Cluster, Device, Layer, Link, Links, Plan, Predicted, Workload
    from octotune.partition import stages_of
    from octotune.placement import v_shape
    from octotune.schedules.zb_v import zb_v

    layer = Layer(
        name="", forward_ns=10**6, input_grad_ns=10**6, weight_grad_ns=10**6,
        param_bytes=10**8, state_bytes=10**9, saved_bytes=10**7, saved_w_bytes=10**7,
        output_bytes=10**7,
    )  # fmt: skip
    num_stages = 2 * NUM_DEVICES
    layers = tuple(replace(layer, name=f"layers.{index}") for index in range(2 * num_stages))
    link = Link(latency_ns=5000, bandwidth=10**11)
    device = Device(kind="any", memory_bytes=10**12)
    schedule = zb_v(NUM_DEVICES, NUM_MICROBATCHES)
    plan = Plan(
        workload=Workload(name="equal layers", layers=layers),
        cluster=Cluster(name="c", devices=(device,) * NUM_DEVICES, links=Links(intra_host=link)),
        num_microbatches=NUM_MICROBATCHES,
        stages=stages_of(range(0, 2 * num_stages + 1, 2), v_shape(NUM_DEVICES)),
        actions=schedule.words(),
    )
    checked = check(plan)
    predicted = Predicted(
        step_ns=checked.step_ns,
        bubble_fraction=checked.bubble_fraction,
        peak_bytes=checked.peak_bytes,
    )
    replace(plan, predicted=predicted).save(path)
    return schedule.num_actions


def no_plans(plan: dict[str, Any]) -> dict[str, tuple[bytes, bytes, bytes]]:
    """Return what each kind of file that is no plan begins with, repeats, and ends with.

    `plan` is a valid one, as plain data.
    """
    small = json.dumps(plan | {"actions": [[]], "predicted": None}).encode()
    layers, actions = small.index(b'"layers": [') + 11, small.index(b"[[]]") + 2
    return {
        "a list of numbers": (b"[", b"1,", b"1]"),
        "a list of empty objects": (b"[", b"{},", b"{}]"),
        "brackets only": (b"", b"[", b""),
        "one number": (b"", b"1", b""),
        "zero bytes": (b"", b"\0", b""),
        "random bytes": (b"", os.urandom(1 << 20), b""),
        "spaces": (b"", b" ", b""),
        "an object of other fields": (b"{", b'"k":0,', b'"l":0}'),
        "a plan with an unknown field at its end": (small[:-1] + b',"more":[', b"[],", b"[]]}"),
        "a plan with lists in place of layers": (small[:layers], b"[],", small[layers:]),
        "a plan that breaks off in endless rows": (small[:actions], b'"1F1",', b""),
        "a plan with endless rows, and then a wrong field": (
            small[:actions],
            b'"1F1",',
            b'"1F1"]], "num_microbatches": "2"}',
        ),
    }


def write_repeated(path: Path, begin: bytes, repeated: bytes, end: bytes, size: int) -> None:
    """Write a file of about a size, in pieces."""
    piece = repeated * max(1, (1 << 20) // len(repeated))
    with path.open("wb") as file:
        file.write(begin)
        for _ in range((size - len(begin) - len(end)) // len(piece)):
            file.write(piece)
        file.write(end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One start of the command line."""

    wall_s: float
    cpu_s: float
    peak_mib: float
    status: int
    out: str
    err: str


def check_file(path: Path, *options: str, cache: Path) -> Run:
    """Run `check` in a process of its own on one core, with kernels kept in `cache`."""
    core = min(os.sched_getaffinity(0))
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        begin = time.perf_counter()
        process = subprocess.Popen(
            [
                "taskset",
                "-c",
                str(core),
                sys.executable,
                "-m",
                "octotune",
                "check",
                *options,
                path,
            ],
            stdout=out,
            stderr=err,
            cwd=record.ROOT,
            env={**os.environ, "NUMBA_CACHE_DIR": str(cache)},
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        return Run(
            wall_s=wall,
            cpu_s=usage.ru_utime + usage.ru_stime,
            peak_mib=usage.ru_maxrss / 1024,
            status=process.returncode,
            out=out.read().decode(),
            err=err.read().decode(),
        )


def main(arguments: list[str]) -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser("check_speed", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        speed, num_actions = speed_table(Path(folder), options.rounds)
        refusals = refusal_table(Path(folder))
    path, _ = record.write(
        record.Record(
            benchmark="check_speed",
            workload=f"ZB-V {NUM_DEVICES}x{NUM_MICROBATCHES}",
            question="How long do plans of 100,000 actions, and 100 MB of what is no plan, keep "
            "the command line?",
            command=record.command("check_speed", arguments),
            seed=None,
            tables=(speed, refusals),
            shows=(
                "Wall time of the whole command: starting Python, imports, reading, validating, "
                "simulating, comparing with the predictions, printing.",
                "What is no plan is refused in one line before it costs much more than its size.",
            ),
            does_not_show=(
                "Reading from a slow disk: the files are in the page cache.",
                "How long the engine alone takes.",
            ),
            notes=(
                f"plan: {num_actions} actions on {NUM_DEVICES} devices, backward split",
                f"warm: {options.rounds} rounds, JSON and table in turns, after one of each that "
                "compiles; all on one core",
                f"the machine's load at the end: {os.getloadavg()[1]:.1f} over {os.cpu_count()} "
                "cores; above them, wall time is others' as well and CPU time is what holds",
            ),
        )
    )
    print(path.read_text(encoding="utf-8"))


def speed_table(folder: Path, rounds: int) -> tuple[record.Table, int]:
    """Return the times of a large plan, and how many actions it has."""
    plan, cache = folder / "plan.json", folder / "cache"
    num_actions = plan_file(plan)
    first = {
        "JSON, first call on a machine": check_file(plan, "--json", cache=cache),
        "full table, after JSON has been compiled": check_file(plan, cache=cache),
    }
    rows: list[tuple[record.Cell, ...]] = [
        (name, run.wall_s, run.cpu_s, run.peak_mib, "") for name, run in first.items()
    ]
    assert all("compiling" in run.err for run in first.values())
    runs: dict[str, list[Run]] = {"JSON, compiled code cached": [], "full table, cached": []}
    for _ in range(rounds):
        for name, found in runs.items():
            found.append(check_file(plan, *(["--json"] if "JSON" in name else []), cache=cache))
            assert (found[-1].status, found[-1].err) == (0, "")
    for name, found in runs.items():
        wall = record.Timing(seconds=tuple(run.wall_s for run in found))
        cpu = record.Timing(seconds=tuple(run.cpu_s for run in found))
        peak = max(run.peak_mib for run in found)
        rows.append((name, wall.median, cpu.median, peak, wall.spread))
    return (
        record.Table(
            title=f"Check a plan of {num_actions:,} actions",
            columns=("what", "wall s, median", "CPU s, median", "peak MiB", "spread"),
            rows=tuple(rows),
        ),
        num_actions,
    )


def refusal_table(folder: Path) -> record.Table:
    """Return what it takes to refuse large files that are no plans."""
    rows: list[tuple[record.Cell, ...]] = []
    plan = json.loads((folder / "plan.json").read_bytes())
    path = folder / "no plan.json"
    for name, (begin, repeated, end) in no_plans(plan).items():
        write_repeated(path, begin, repeated, end, MEGABYTES * 10**6)
        run = check_file(path, "--json", cache=folder / "cache")
        answer = json.loads(run.out)
        assert (run.status, answer["ok"], run.err) == (2, False, "")
        message = answer["error"].removeprefix(f"{path}: ")
        shown = message if len(message) <= 90 else f"{message[:89]}…"
        rows.append((name, run.wall_s, run.cpu_s, run.peak_mib, shown))
    return record.Table(
        title=f"Refuse {MEGABYTES} MB that are no plan",
        columns=("what", "wall s", "CPU s", "peak MiB", "answer"),
        rows=tuple(rows),
    )
