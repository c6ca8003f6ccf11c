"""Do fill jobs use the bubbles of a real pipeline, and what does that cost the main job?

Gloo ranks of this machine run 1F1B on layers that sleep, at 20 ms units, with fill work in every
second step: work that sleeps on four ranks, work that computes (products of matrices, a small
transformer's inference and training) on two, so that each has a core. Every plan is made and
simulated first; what its simulation says of samples a second stands beside what was measured. What
the executor adds to an action is fitted on steps without fill work, and for each computing job how
much slower it is in bubbles. Then a tuned plan of uneven layers works through a queue of jobs,
simulated as a fleet and run.

`--parts` runs some of it and keeps the answers in a folder; the record is made when all are there.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks import ranks, sleeping
from benchmarks.fill_cases import (
    CASES,
    FITTING_ROUNDS,
    MARGINS,
    MS,
    UNIT_MS,
    Case,
    job_of,
    main_plan,
    planned,
    tuned_plan,
)
from benchmarks.fill_ranks import alternating, losses_of, plain_steps, queueing
from benchmarks.fill_record import case_row, write_record
from benchmarks.fill_simulated import simulated
from benchmarks.sleeping_plans import workload
from executor.fill.report import fill_spans
from octotune.contract import Cluster, Workload
from octotune.fill.jobs import Configuration, FillJob, MicroStep
from octotune.fill.make import make_fill_plan
from octotune.fill.packing import Margins
from octotune.fill.policies import find_policy
from octotune.report.fill_run import fill_run_picture
from octotune.schedules import FAMILIES, plan_from
from simulator import chrome


def calibrate() -> dict[str, Any]:
    """Fit what the executor adds to an action, on plain steps: the one fitted number."""
    case = CASES["sleeping-m4"]
    plan = main_plan(case, 0)
    lengths = sorted(ranks.run(case.devices, plain_steps, plan, 25))
    measured = lengths[len(lengths) // 4]  # others on the machine only make steps longer
    ideal = (case.microbatches + case.devices - 1) * 3 * UNIT_MS * MS
    actions = 2 * (case.microbatches + case.devices - 1)
    return {"overhead_ns": max(0, int((measured - ideal) / actions)), "measured_ns": measured}


def fit(case: Case, overhead_ns: int) -> dict[str, Any]:
    """Measure a job alone, and fit how much slower it is in bubbles.

    What computes shares its core with network threads, other ranks where there are more of them
    than cores, and finds cold caches after a wait.
    """
    job = job_of(case.job, "job 0", 10**6)
    plain = planned(case, overhead_ns, job, 1.0)
    tried = ranks.run(case.devices, alternating, plain, case, FITTING_ROUNDS)
    steps = tried["outcome"]["filled_steps"]
    made = sum(job["samples"] for job in tried["outcome"]["jobs"]) / steps
    return {
        "slower": max(1.0, simulated(case, plain, FITTING_ROUNDS)[0] / made),
        "job": msgspec.to_builtins(job),
    }


def run_case(
    case: Case, overhead_ns: int, rounds: int, fitted: dict[str, Any] | None
) -> dict[str, Any]:
    """Plan, run, and put what was predicted beside it."""
    if fitted is None:
        first, slower = job_of(case.job, "job 0", 10**6), 1.0
    else:
        first, slower = msgspec.convert(fitted["job"], FillJob), fitted["slower"]
    fill = planned(case, overhead_ns, first, slower)
    answer = ranks.run(case.devices, alternating, fill, case, rounds)
    answer["slower"] = slower
    answer["simulated_samples"], answer["simulated_step_ns"] = simulated(case, fill, rounds)
    answer["predicted_samples"] = sum(p.samples / len(p.steps) for p in fill.packings)
    answer["micro_ms"] = [s.time_ns / MS for s in first.configurations[0].micro_steps]
    return answer


def run_queue(overhead_ns: int, seconds: float) -> dict[str, Any]:
    """Tune a plan of uneven layers, plan a queue of jobs for it, and run both."""
    plan = tuned_plan(sleeping.workload(), overhead_ns, seconds)
    rng = np.random.default_rng(3)
    kinds = [job_of("sleeping", "short", 1), job_of("sleeping", "long", 1)]
    long_micro = msgspec.structs.replace(
        kinds[1],
        arguments={"times_ms": [3.0, 5.0, 4.0]},
        configurations=(
            Configuration(
                batch_size=2,
                micro_steps=tuple(MicroStep(time_ns=round((t + 0.1) * MS)) for t in (3, 5, 4)),
            ),
        ),
    )
    kinds[1] = long_micro
    jobs = []
    for number in range(10):
        kind = kinds[number % 2]
        samples = int(rng.integers(50, 280)) if number % 2 == 0 else int(rng.integers(20, 80))
        arrival = 0 if number < 4 else int(rng.integers(0, 5)) * 10**9
        jobs.append(
            msgspec.structs.replace(
                kind, name=f"{kind.name} {number}", samples=samples, arrival_ns=arrival
            )
        )
    fill = make_fill_plan(plan, jobs, find_policy("sjf"), margins=MARGINS["sleeping"])
    most = int(1.5 * fill.predicted.steps) + 4
    answer = ranks.run(4, queueing, fill, most)
    answer["predicted_step_ns"] = fill.predicted.step_ns
    answer["predicted"] = {
        str(fill.packings[run.packing].job): [run.begin, run.end, run.samples] for run in fill.runs
    }
    answer["names"] = [job.name for job in jobs]
    answer["arrivals"] = [-(-job.arrival_ns // fill.predicted.step_ns) for job in jobs]
    answer["bubble_fraction"] = plan.predicted.bubble_fraction if plan.predicted else None
    return answer


def run_losses() -> dict[str, Any]:
    """Train a small GPT with and without fill jobs that train, too."""
    from benchmarks.gpt import TINY

    names = TINY.layer_names
    layers = Workload(
        name="tiny gpt",
        layers=tuple(
            msgspec.structs.replace(layer, name=name)
            for name, layer in zip(
                names, workload([(2.0, 2.0, 2.0)] * len(names)).layers, strict=True
            )
        ),
    )
    plan = plan_from(FAMILIES["1f1b"], layers, Cluster.equal(2), TINY.num_microbatches)
    job = job_of("training", "job", 10**6)
    margins = Margins(threshold_ns=MS, switch_ns=MS // 2, margin=0.2)
    jobs = [msgspec.structs.replace(job, name=f"job {d}") for d in range(2)]
    fill = make_fill_plan(plan, jobs, find_policy("fifo"), margins=margins)
    with_fill = ranks.run(2, losses_of, fill, plan, LOSS_STEPS)
    without = ranks.run(2, losses_of, None, plan, LOSS_STEPS)
    return {
        "with": with_fill["losses"],
        "without": without["losses"],
        "micro_steps": with_fill["micro_steps"],
        "failed": with_fill["failed"],
    }


LOSS_STEPS = 250
FITS = {f"fit-{key}": case for key, case in CASES.items() if case.margins == "computing"}
PARTS = ("calibration", *FITS, *CASES, "losses", "queue")


def main(arguments: list[str]) -> None:
    """Run the parts that are asked for; write the record once all are there."""
    parser = argparse.ArgumentParser(prog="fill_runtime", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="steps with, and without")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--folder", default="out/fill_runtime", help="where answers are kept")
    parser.add_argument("--without", default="", help="cases that the record does without")
    parser.add_argument("--tune-seconds", type=float, default=8)
    options = parser.parse_args(arguments)
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for part in filter(None, options.parts.split(",")):
        if part not in PARTS:
            parser.error(f"--parts has {part!r}; allowed: {', '.join(PARTS)}")
        kept = folder / "calibration.json"
        overhead_ns = msgspec.json.decode(kept.read_bytes())["overhead_ns"] if kept.exists() else 0
        if part == "calibration":
            answer = calibrate()
        elif part == "queue":
            answer = run_queue(overhead_ns, options.tune_seconds)
        elif part == "losses":
            answer = run_losses()
        elif part in FITS:
            answer = fit(FITS[part], overhead_ns)
        else:
            kept = folder / f"fit-{part}.json"
            if f"fit-{part}" in FITS and not kept.exists():
                parser.error(f"--parts has {part} and {kept} is not there; run fit-{part} first")
            fitted = msgspec.json.decode(kept.read_bytes()) if kept.exists() else None
            answer = run_case(CASES[part], overhead_ns, options.rounds, fitted)
            print(part, case_row(part, answer), flush=True)
        (folder / f"{part}.json").write_bytes(msgspec.json.encode(answer))
    without = tuple(filter(None, options.without.split(",")))
    needed = [part for part in PARTS if part.removeprefix("fit-") not in without]
    missing = [part for part in needed if not (folder / f"{part}.json").exists()]
    if missing:
        print(f"kept in {folder}; missing for the record: {', '.join(missing)}")
        return
    answers = {
        part: msgspec.json.decode((folder / f"{part}.json").read_bytes()) for part in needed
    }
    path, _ = write_record(answers, options.rounds, without)
    drawn = answers["queue"]["drawn"]
    fill_run_picture(
        chrome.loads(drawn["timeline"]),
        fill_spans(drawn["rows"], drawn["began_ns"]),
        path.with_suffix(".png"),
    )
    print(path.read_text())
