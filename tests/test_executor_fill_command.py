"""The command's fill options: what is wrong in one line; reports, traces and pictures of runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fill_ranks
import msgspec
import pytest
from executor_tools import make_plan

from executor.fill.confirm import SHARES, confirmed, num_steps, trial
from executor.fill.report import planned_samples
from octotune.check import check
from octotune.fill.outcome import DeviceOutcome, FillOutcome, JobOutcome
from octotune.report.fill_run import fill_run_picture, idle_spans, outcome_lines, outcome_table
from simulator import chrome
from simulator.fills import FillSpan

ROOT = Path(__file__).resolve().parent.parent
MODEL = """
import torch
from torch import nn

def make():
    return [nn.Linear(4, 4)], nn.functional.mse_loss, [(torch.ones(2, 4), torch.ones(2, 4))]
"""


def test_what_is_wrong_with_a_fill_plan_is_one_line(tmp_path):
    (tmp_path / "m.py").write_text(MODEL)
    make_plan(["0F0 0B0 0F1 0B1"], [(1, 0)], 2).save(tmp_path / "plan.json")
    fill_ranks.fill_plan([fill_ranks.job("a", "counting", 1, 10)]).save(tmp_path / "fill.json")
    environment = {k: v for k, v in os.environ.items() if k != "RANK"}
    for options, words in (
        (["--fill", "nowhere.json"], "nowhere.json"),
        (["--fill", "fill.json"], "the fill plan is for another plan: num_microbatches is 4"),
    ):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "executor", "--plan", "plan.json", "--model", "m.py:make"),
                *("--steps", "1", *options),
            ],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 2
        (line,) = done.stderr.strip().splitlines()
        assert words in line


@pytest.mark.parametrize("steps", range(6))
def test_predicted_samples_follow_the_plan_step_by_step(steps):
    fill = fill_ranks.fill_plan([fill_ranks.job("a", "counting", 1, 40, batch_size=2)])
    run, packing = fill.runs[0], fill.packings[0]
    made = 0
    for step in range(min(steps, run.end) - run.begin):
        made += 2 * sum(map(len, packing.steps[step % len(packing.steps)]))
    assert planned_samples(fill, 0, steps) == min(made, run.samples)


def test_a_wait_is_good_for_the_largest_share_that_did_no_harm():
    plain = [100, 101, 99]
    trials = {0: [100, 100, 100, 101, 130], 1: [100, 140, 100, 100, 100], 2: [120] * 5}
    lengths = [length for device in range(3) for length in trials[device] for _ in range(2)]
    assert len(lengths) == num_steps(3)
    lengths[0] = 500  # a hiccup: the other round says that it did no harm
    assert confirmed(plain, lengths, 3) == (1.0, SHARES[0], 0.5)
    tried = [trial(step, 3) for step in range(num_steps(3))]
    assert tried[0] == (0, SHARES[0])
    assert tried[-1] == (2, SHARES[-1])
    assert trial(num_steps(3), 3) is None
    assert trial(-1, 3) is None


def spans():
    return [
        FillSpan(device=0, job='na"me', name="#0", start_ns=80 * 10**6, end_ns=90 * 10**6),
        FillSpan(device=1, job="b", name="", start_ns=0, end_ns=5 * 10**6),
    ]


def test_a_trace_with_fill_work_reads_back_the_same_timeline():
    timeline = check(fill_ranks.main_plan()).timeline
    text = chrome.dumps(timeline, fills=spans())
    assert chrome.loads(text) == timeline
    events = msgspec.json.decode(text)["traceEvents"]
    assert [e["name"] for e in events if e.get("cat") == "fill"] == ['na"me #0', "b"]


def test_idle_time_is_what_neither_uses(tmp_path):
    timeline = check(fill_ranks.main_plan()).timeline
    idle = timeline.step_ns * 2 - int(timeline.busy_ns.sum())
    assert sum(end - start for _, start, end in idle_spans(timeline, [])) == idle
    gap = idle_spans(timeline, [])[0]
    span = FillSpan(device=gap[0], job="a", name="", start_ns=gap[1], end_ns=gap[2])
    assert sum(end - start for _, start, end in idle_spans(timeline, [span])) == idle - (
        gap[2] - gap[1]
    )
    fill_run_picture(timeline, [span], tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 1000


def test_a_report_says_what_was_stopped_and_what_it_cost():
    job = JobOutcome(
        name="a",
        devices=(0, 1),
        status="failed",
        failure="micro-step 0 raised X: y",
        samples=5,
        predicted_samples=9,
        micro_steps=5,
        busy_ns=12 * 10**6,
        alone_ns=10 * 10**6,
        slowdown=1.2,
        late=1,
        late_ns=1000,
        worst_late_ns=1000,
    )
    device = DeviceOutcome(bubble_ns=10, handed_ns=9, busy_ns=8, reprofiled=2, confirmed=None)
    outcome = FillOutcome(
        jobs=(job,),
        devices=(device,),
        filled_steps=3,
        plain_steps=3,
        step_ns=101,
        plain_step_ns=100,
        predicted_step_ns=99,
        filled=0.8,
    )
    assert outcome.main_slowdown == pytest.approx(0.01)
    text = "\n".join(outcome_lines(outcome))
    assert "80.0 % of all bubble time" in text
    assert "(+1.00 %)" in text
    assert "profiled again 2 times" in text
    assert "a was stopped: micro-step 0 raised X: y" in text
    assert outcome_table(outcome).row_count == 1
