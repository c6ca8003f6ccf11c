"""From a workload that 1F1B does not fit to a run with copies, by the commands alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from executor.__main__ import DeviceReport, Report, StepReport
from octotune.check import check
from octotune.contract import Plan, read_plan, write_json
from octotune.errors import OutOfMemoryError

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "offload"


def test_a_report_of_a_run_without_copies_is_written(tmp_path):
    report = Report(
        steps=[StepReport(step_ns=1, loss=0.5)],
        predicted_step_ns=1,
        devices=[DeviceReport(busy_ns=1, peak_bytes=1)],
    )
    write_json(report, tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_bytes()) == msgspec.to_builtins(report)


def run(folder, *command):
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(folder, plan):
    run(
        folder, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "executor",
        "--plan", plan, "--model", f"{EXAMPLE / 'model.py'}:make", "--steps", "3",
        "--report", "report.json",
    )  # fmt: skip
    report = json.loads((folder / "report.json").read_bytes())
    return [step["loss"] for step in report["steps"]], report


def without_copies(plan: Plan) -> Plan:
    """The same order where there is room for everything."""
    roomy = tuple(
        msgspec.structs.replace(device, memory_bytes=2**40) for device in plan.cluster.devices
    )
    cluster = msgspec.structs.replace(plan.cluster, devices=roomy)
    return msgspec.structs.replace(plan, cluster=cluster, offload=None, predicted=None)


@pytest.mark.slow
def test_a_workload_that_1f1b_does_not_fit_is_tuned_checked_and_run_with_copies(tmp_path):
    run(
        tmp_path, "octotune", "tune", "--workload", str(EXAMPLE / "workload.json"),
        "--cluster", str(EXAMPLE / "small.yaml"), "--microbatches", "8",
        "--time-limit", "6", "-o", "small.json",
    )  # fmt: skip
    run(tmp_path, "octotune", "check", "small.json")
    plan = read_plan(tmp_path / "small.json")
    assert plan.offload is not None
    assert any(plan.offload)
    # without copies the order is beyond the memory
    with pytest.raises(OutOfMemoryError):
        check(msgspec.structs.replace(plan, offload=None, predicted=None))
    write_json(without_copies(plan), tmp_path / "roomy.json")
    found, report = losses(tmp_path, "small.json")
    assert [device["device"] for device in report["offload"]] == [0, 1]
    peaks = plan.predicted.peak_bytes
    state = [0, 0]
    for stage in plan.stages:
        layers = plan.workload.layers[slice(*stage.layers)]
        state[stage.device] += sum(layer.state_bytes for layer in layers)
    # of each microbatch that left, what the normalisations save is too small to leave
    stay = 12 * 2048
    for device, peak, held in zip(report["offload"], peaks, state, strict=True):
        assert device["moved_bytes"] > 0
        # layers that compute are shorter or longer than planned; within its peak all the same
        assert 0 < device["saved_peak_bytes"] <= peak - held + stay
    assert found == losses(tmp_path, "roomy.json")[0]
