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
import gc
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from benchmarks import ranks, record, sleeping
from benchmarks.executor_overhead import workload
from benchmarks.models import SleepingLayer, sleeping_loss
from executor.fill.instructions import bubble_instructions
from executor.fill.report import fill_spans, spans_of
from executor.fill.run import KEPT_OF_MARGIN
from octotune.contract import Cluster, Plan, Workload, build_costs
from octotune.fill.jobs import Configuration, FillJob, JobKind, MicroStep
from octotune.fill.make import make_fill_plan
from octotune.fill.packing import Margins
from octotune.fill.plan import FillPlan
from octotune.fill.policies import find_policy
from octotune.report.fill_run import fill_run_picture
from octotune.schedules import FAMILIES, plan_from
from simulator import chrome
from simulator.actions import microbatch_of, stage_of
from simulator.fills import HandoverRule, filled_passes, waits_before
from simulator.floating import nominal_durations, simulate_floating
from simulator.timeline import Timeline

MS = 10**6
UNIT_MS = 20.0
LEAST_NS = 5 * MS
PROFILE_STEPS = 5
MARGINS = {
    "sleeping": Margins(threshold_ns=LEAST_NS, switch_ns=MS // 2, margin=0.08),
    "jitter": Margins(threshold_ns=LEAST_NS, switch_ns=MS // 2, margin=0.2),
    "computing": Margins(threshold_ns=LEAST_NS, switch_ns=MS // 2, margin=0.1),
}
JITTER = 0.2
ENTER_NS = 350_000  # measured: a job's own random numbers and modes take the main job's place
_ONE = (MicroStep(time_ns=1),)
_FITTING_ROUNDS = 6
_LOSS_STEPS = 100


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of a main job and a kind of fill job."""

    name: str
    devices: int
    microbatches: int
    job: str
    margins: str
    jitter: float = 0.0
    ahead: bool = False


CASES = {
    "sleeping-m4": Case(
        name="sleep 2 ms", devices=4, microbatches=4, job="sleeping", margins="sleeping"
    ),
    "sleeping-m8": Case(
        name="sleep 2 ms", devices=4, microbatches=8, job="sleeping", margins="sleeping"
    ),
    "jitter": Case(
        name="sleep 2 ms, main layers +-20 %",
        devices=4,
        microbatches=8,
        job="sleeping",
        margins="jitter",
        jitter=JITTER,
    ),
    "matrices": Case(
        name="matrix products", devices=2, microbatches=4, job="multiplying", margins="computing"
    ),
}
CASES |= {
    f"{job}-{devices}x{m}": Case(
        name=f"transformer {job}",
        devices=devices,
        microbatches=m,
        job=job,
        margins="computing",
        ahead=True,
    )
    for devices, m in ((2, 4), (4, 4), (4, 8))
    for job in ("inference", "training")
}


# --- plans ---------------------------------------------------------------------------------------


def with_overhead(cluster: Cluster, overhead_ns: int) -> Cluster:
    """Return a cluster whose devices take so much for each action beside its layers."""
    devices = tuple(
        msgspec.structs.replace(device, overhead_ns=overhead_ns) for device in cluster.devices
    )
    return msgspec.structs.replace(cluster, devices=devices)


def main_plan(case: Case, overhead_ns: int) -> Plan:
    """Return 1F1B of one sleeping layer a device: F of one unit, B of two."""
    layers = workload([(UNIT_MS,) * 3] * case.devices)
    cluster = with_overhead(Cluster.equal(case.devices), overhead_ns)
    return plan_from(FAMILIES["1f1b"], layers, cluster, case.microbatches)


def tuned_plan(layers: Workload, overhead_ns: int, seconds: float) -> Plan:
    """Return the tuner's plan of uneven layers for four devices."""
    from octotune import tune

    return tune(
        layers,
        with_overhead(Cluster.equal(4), overhead_ns),
        num_microbatches=sleeping.NUM_MICROBATCHES,
        seed=0,
        time_limit_s=seconds,
    )


def job_of(kind: str, name: str, samples: int) -> FillJob:
    """Return a job, measured alone on this machine."""
    from executor.fill.profile import profiled

    found: dict[str, tuple[JobKind, str, dict[str, Any], int]] = {
        "sleeping": ("inference", "sleeping", {"times_ms": [2.0]}, 1),
        "multiplying": ("inference", "multiplying", {"size": 192, "products": 4}, 4),
        "inference": ("inference", "transformer", {"kind": "inference"}, 2),
        "training": ("training", "transformer", {"kind": "training"}, 2),
    }
    fill_kind, factory, arguments, batch = found[kind]
    job = FillJob(
        name=name,
        kind=fill_kind,
        samples=samples,
        factory=f"benchmarks.fill_jobs:{factory}",
        arguments=arguments,
        configurations=(Configuration(batch_size=batch, micro_steps=_ONE),),
    )
    measured = profiled(
        job,
        passes=60 if kind != "training" else 20,
        # its large micro-steps find colder caches after each wait
        rest_s=0.02 if kind == "training" else 0.0,
    )
    # bytes on a CPU without a limit bind nothing, and the main job's layers say nothing of theirs
    configuration = measured.configurations[0]
    return msgspec.structs.replace(measured, configurations=(configuration,))


def slowed(job: FillJob, factor: float) -> FillJob:
    """Return a job whose micro-steps take so many times as long."""
    return msgspec.structs.replace(
        job,
        configurations=tuple(
            msgspec.structs.replace(
                configuration,
                micro_steps=tuple(
                    msgspec.structs.replace(step, time_ns=max(1, round(step.time_ns * factor)))
                    for step in configuration.micro_steps
                ),
            )
            for configuration in job.configurations
        ),
    )


# --- ranks ---------------------------------------------------------------------------------------


def bubbles_ns(timeline: Timeline, least_ns: int = LEAST_NS) -> int:
    """Return the idle time of all devices in intervals of at least so much."""
    total = 0
    for begin, end in pairwise(timeline.schedule.offsets.tolist()):
        edges = [0]
        for at in range(begin, end):
            edges += [int(timeline.start_ns[at]), int(timeline.end_ns[at])]
        edges.append(timeline.step_ns)
        gaps = [b - a for a, b in zip(edges[::2], edges[1::2], strict=True)]
        total += sum(gap for gap in gaps if gap >= least_ns)
    return total


def sleeping_of(plan: Plan, factors: Any = None) -> list[SleepingLayer]:
    """Return the layers of a plan; `factors` [stage, microbatch] scale their times."""
    homes = [index for index, stage in enumerate(plan.stages) for _ in range(*stage.layers)]
    return [
        SleepingLayer(
            (layer.forward_ns / MS, layer.input_grad_ns / MS, layer.weight_grad_ns / MS),
            factors=None if factors is None else factors[home].tolist(),
        )
        for home, layer in zip(homes, plan.workload.layers, strict=True)
    ]


def alternating(
    rank: int, fill: FillPlan, rounds: int, jitter: float, ahead: bool
) -> dict[str, Any]:
    """Run steps with and without fill work in turns; rank 0 returns what was measured."""
    from executor import Pipeline
    from executor.fill.run import FillOptions, attach

    plan = fill.plan
    m, size = plan.num_microbatches, len(plan.cluster.devices)
    table = factors_of(rounds, plan, jitter)
    layers = sleeping_of(plan, table[0])
    pipe = Pipeline(plan, layers, sleeping_loss, timeout_s=60)
    run = attach(
        pipe,
        fill,
        FillOptions(
            profile_steps=PROFILE_STEPS, alternate=True, steps_end_together=True, ahead=ahead
        ),
    )
    inputs = torch.arange(m, dtype=torch.float32).view(-1, 1).repeat(1, 256)
    targets = torch.zeros(m, 1)
    homes = [index for index, stage in enumerate(plan.stages) for _ in range(*stage.layers)]
    gc.collect()
    gc.disable()
    answer: dict[str, Any] = {"on": [], "off": [], "busy": [], "bubbles": [], "losses": []}
    for number in range(PROFILE_STEPS + 2 * rounds):
        turn = min(number, PROFILE_STEPS) + max(0, number - PROFILE_STEPS) // 2
        for layer, home in zip(layers, homes, strict=True):
            layer.factors = table[turn, home].tolist()
        dist.barrier()
        began = time.perf_counter_ns()
        loss = pipe.step(inputs, targets)
        with pipe.optimizer_step():
            pass
        ended = time.perf_counter_ns()
        step = run.steps[-1]
        busy = sum(handover.busy_ns for _, handover in step.handovers)
        timeline = pipe.timeline()
        found: list[Any] = [None] * size
        dist.all_gather_object(found, (began, ended, busy))
        length = max(end for _, end, _ in found) - min(begin for begin, _, _ in found)
        if number < PROFILE_STEPS:
            continue
        answer["losses"].append(loss)
        if step.filled:
            answer["on"].append(length)
            answer["busy"].append(sum(used for _, _, used in found))
        else:
            answer["off"].append(length)
            answer["bubbles"].append(bubbles_ns(timeline))
    outcome = run.report()
    run.close()
    answer["outcome"] = msgspec.to_builtins(outcome)
    return answer


def plain_steps(rank: int, plan: Plan, steps: int) -> list[int]:
    """Return the lengths of steps without fill work."""
    from executor import Pipeline

    pipe = Pipeline(plan, sleeping_of(plan), sleeping_loss, timeout_s=60)
    inputs, targets = (
        torch.zeros(plan.num_microbatches, 256),
        torch.zeros(plan.num_microbatches, 1),
    )
    lengths = []
    for _ in range(steps):
        dist.barrier()
        began = time.perf_counter_ns()
        pipe.step(inputs, targets)
        found: list[Any] = [None] * len(plan.cluster.devices)
        dist.all_gather_object(found, (began, time.perf_counter_ns()))
        lengths.append(max(end for _, end in found) - min(begin for begin, _ in found))
    return lengths[1:]


def queueing(rank: int, fill: FillPlan, most_steps: int) -> dict[str, Any]:
    """Run a fill plan until its jobs are done; return when each was, in filled steps."""
    from executor import Pipeline
    from executor.fill.run import FillOptions, attach

    plan = fill.plan
    size = len(plan.cluster.devices)
    # weight gradients in the plan's order, as simulated: floating ones take bubbles for themselves
    pipe = Pipeline(plan, sleeping_of(plan), sleeping_loss, timeout_s=60, float_limit="off")
    run = attach(pipe, fill, FillOptions(profile_steps=PROFILE_STEPS, steps_end_together=True))
    inputs, targets = (
        torch.zeros(plan.num_microbatches, 256),
        torch.zeros(plan.num_microbatches, 1),
    )
    gc.collect()
    gc.disable()
    lengths: list[int] = []
    found: list[Any] = [None] * size
    drawn: dict[str, Any] = {}
    for number in range(PROFILE_STEPS + most_steps):
        dist.barrier()
        began = time.perf_counter_ns()
        pipe.step(inputs, targets)
        with pipe.optimizer_step():
            pass
        dist.all_gather_object(found, (began, time.perf_counter_ns(), run.done))
        lengths.append(max(end for _, end, _ in found) - min(begin for begin, _, _ in found))
        if number == PROFILE_STEPS + 2:
            timeline = pipe.timeline()
            began_ns = pipe.trace().began_ns
            rows = spans_of(run.steps[-1], rank, pipe.clock_offset_ns)
            everyone: list[Any] = [None] * size
            dist.all_gather_object(everyone, (began_ns, rows))
            drawn = {
                "timeline": chrome.dumps(timeline, derived=False).decode(),
                "began_ns": min(at for at, _ in everyone),
                "rows": [row for _, mine in everyone for row in mine],
            }
        if all(done for _, _, done in found):
            break
    mine = {str(each.job): [each.started, each.ended, each.samples_done] for each in run.runs}
    dist.all_gather_object(found, mine)
    outcome = run.report()
    run.close()
    jobs: dict[str, list[int]] = {}
    for rows in found:
        jobs |= rows
    return {
        "steps": lengths,
        "jobs": jobs,
        "outcome": msgspec.to_builtins(outcome),
        "drawn": drawn,
    }


def losses_of(rank: int, fill: FillPlan | None, plan: Plan, steps: int) -> list[float]:
    """Train a small GPT some steps, with fill jobs or without; return the losses."""
    from benchmarks.gpt import tiny_factory
    from executor import Pipeline
    from executor.fill.run import FillOptions, attach

    torch.manual_seed(0)
    layers, loss_fn, batches, optimizer_fn = tiny_factory()
    pipe = Pipeline(plan, layers, loss_fn, timeout_s=60)
    run = None
    if fill is not None:
        run = attach(pipe, fill, FillOptions(profile_steps=1, steps_end_together=True))
    optimizer = optimizer_fn(list(pipe.parameters()))
    losses = []
    for _ in range(steps):
        inputs, targets = next(batches)
        losses.append(pipe.step(inputs, targets))
        with pipe.optimizer_step():
            optimizer.step()
            optimizer.zero_grad()
    if run is not None:
        done = run.report().jobs[0].micro_steps
        run.close()
        losses.append(float(done))
    return losses


# --- parts ---------------------------------------------------------------------------------------


def calibrate() -> dict[str, Any]:
    """Fit what the executor adds to an action, on plain steps: the one fitted number."""
    case = CASES["sleeping-m4"]
    plan = main_plan(case, 0)
    lengths = ranks.run(case.devices, plain_steps, plan, 9)
    measured = int(statistics.median(lengths))
    ideal = (case.microbatches + case.devices - 1) * 3 * UNIT_MS * MS
    actions = 2 * (case.microbatches + case.devices - 1)
    return {"overhead_ns": max(0, int((measured - ideal) / actions)), "measured_ns": measured}


def planned(case: Case, overhead_ns: int, job: FillJob, slower: float) -> FillPlan:
    """Return a fill plan with a job for each device, each so many times slower than alone."""
    job = slowed(job, slower)
    jobs = [msgspec.structs.replace(job, name=f"job {d}") for d in range(case.devices)]
    plan = main_plan(case, overhead_ns)
    return make_fill_plan(plan, jobs, find_policy("fifo"), margins=MARGINS[case.margins])


def fit(case: Case, overhead_ns: int) -> dict[str, Any]:
    """Measure a job alone, and fit how much slower it is in bubbles.

    What computes shares its core with network threads, other ranks where there are more of them
    than cores, and finds cold caches after a wait.
    """
    job = job_of(case.job, "job 0", 10**6)
    plain = planned(case, overhead_ns, job, 1.0)
    tried = ranks.run(case.devices, alternating, plain, _FITTING_ROUNDS, 0.0, case.ahead)
    steps = tried["outcome"]["filled_steps"]
    made = sum(job["samples"] for job in tried["outcome"]["jobs"]) / steps
    return {
        "slower": max(1.0, simulated(case, plain, _FITTING_ROUNDS)[0] / made),
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
    answer = ranks.run(case.devices, alternating, fill, rounds, case.jitter, case.ahead)
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
    # bubbles of such a small model are too short for it as measured: let it run all the same
    small = tuple(
        msgspec.structs.replace(step, time_ns=100_000)
        for step in job.configurations[0].micro_steps
    )
    configuration = msgspec.structs.replace(job.configurations[0], micro_steps=small)
    job = msgspec.structs.replace(job, configurations=(configuration,))
    margins = Margins(threshold_ns=MS, margin=0.0)
    fill = make_fill_plan(plan, [job], find_policy("fifo"), margins=margins)
    with_fill = ranks.run(2, losses_of, fill, plan, _LOSS_STEPS)
    without = ranks.run(2, losses_of, None, plan, _LOSS_STEPS)
    return {"with": with_fill[:-1], "without": without, "micro_steps": int(with_fill[-1])}


# --- the record ----------------------------------------------------------------------------------


def paired(answer: dict[str, Any]) -> tuple[float, float]:
    """Return the slowdown by medians, and the median of the turns' ratios, in %."""
    on, off = answer["on"], answer["off"]
    ratio = statistics.median(a / b for a, b in zip(on, off, strict=True))
    by_medians = statistics.median(on) / statistics.median(off)
    return 100 * (by_medians - 1), 100 * (ratio - 1)


def factors_of(rounds: int, plan: Plan, jitter: float) -> np.ndarray[Any, Any]:
    """Return by what layers' times are scaled [turn, stage, microbatch], profiling included."""
    shape = (PROFILE_STEPS + rounds, len(plan.stages), plan.num_microbatches)
    return np.random.default_rng(0).uniform(1 - jitter, 1 + jitter, shape)


def simulated(case: Case, fill: FillPlan, rounds: int) -> tuple[float, int]:
    """Return samples of a filled step, and a step, of a run whose layers vary as the case's do."""
    plan = fill.plan
    schedule = plan.schedule()
    costs = build_costs(plan.workload, plan.cluster, plan.stages, plan.num_microbatches)
    nominal = nominal_durations(schedule, costs)
    stages, microbatches = stage_of(schedule.codes), microbatch_of(schedule.codes)
    ran = [
        simulate_floating(
            schedule,
            costs,
            durations_ns=np.rint(nominal * factors[stages, microbatches]).astype(np.int64),
            floating=False,
        )
        for factors in factors_of(rounds, plan, case.jitter)
    ]
    # as measured: each of the later steps twice, the second time filled
    order = [*range(PROFILE_STEPS), *np.repeat(np.arange(PROFILE_STEPS, len(ran)), 2)]
    filled = [number >= PROFILE_STEPS and number % 2 == 0 for number in range(len(order))]
    starts = np.stack([ran[at].start_ns for at in order])
    ends = np.stack([ran[at].end_ns for at in order])
    rule = HandoverRule(
        switch_ns=fill.margins.switch_ns,
        kept=KEPT_OF_MARGIN * fill.margins.margin,
        enter_ns=ENTER_NS,
        ahead=case.ahead,
        profile=PROFILE_STEPS,
    )
    samples = 0.0
    for packing in fill.packings:
        device = packing.device
        instructions = bubble_instructions(fill, device, plan.actions[device])
        # what follows the row's actions is handed over at the plan's length
        at = [i.position for i in instructions if i.position >= 0]
        waits = waits_before(schedule, costs, starts, ends, device, at)
        rest = [i.length_ns for i in instructions if i.position < 0]
        configuration = fill.configuration(packing)
        samples += configuration.batch_size * filled_passes(
            waits.beside(rest),
            filled,
            packing.steps,
            [step.time_ns for step in configuration.micro_steps],
            rule,
        )
    return samples, int(statistics.median(each.step_ns for each in ran[PROFILE_STEPS:]))


def case_row(key: str, answer: dict[str, Any]) -> tuple[record.Cell, ...]:
    """Return one line of the main table."""
    case = CASES[key]
    step_ns = answer["simulated_step_ns"]
    on_ns, off_ns = statistics.median(answer["on"]), statistics.median(answer["off"])
    slowdown, ratio = paired(answer)
    filled = statistics.median(answer["busy"]) / statistics.median(answer["bubbles"])
    jobs = answer["outcome"]["jobs"]
    steps = answer["outcome"]["filled_steps"]
    samples = sum(job["samples"] for job in jobs) / steps
    predicted = answer["predicted_samples"]
    real_rate = samples / on_ns
    simulated_rate = answer["simulated_samples"] / step_ns
    busy, alone = (sum(job[name] for job in jobs) for name in ("busy_ns", "alone_ns"))
    return (
        case.name,
        case.devices,
        case.microbatches,
        round(off_ns / MS, 1),
        round(step_ns / MS, 1),
        round(slowdown, 2),
        round(ratio, 2),
        round(100 * filled, 1),
        round(100 * samples / predicted, 1),
        round(100 * (simulated_rate / real_rate - 1), 1),
        round(100 * (busy / alone * answer.get("slower", 1.0) - 1), 1),
        sum(job["late"] for job in jobs),
        sum(job["micro_steps"] for job in jobs),
    )


def queue_tables(answer: dict[str, Any]) -> tuple[record.Table, record.Table, float]:
    """Return the jobs' ends, simulated and real, what they come to, and the largest difference."""
    rows = []
    for number, (begin, end, samples) in sorted(
        answer["predicted"].items(), key=lambda item: (item[1][0], int(item[0]))
    ):
        started, ended, made = answer["jobs"].get(number, (None, None, 0))
        real_end = None if ended is None else ended + 1
        rows.append((answer["names"][int(number)], samples, made, begin, started, end, real_end))
    step_ns = statistics.median(answer["steps"][PROFILE_STEPS:])
    arrivals = dict(zip(answer["names"], answer["arrivals"], strict=True))

    def mean(column: int) -> float:
        times = [row[column] - arrivals[row[0]] for row in rows if row[column] is not None]
        return statistics.mean(times)

    simulated, real = mean(5), mean(6)
    last_simulated, last_real = max(r[5] for r in rows), max(r[6] or 0 for r in rows)
    s_ns = answer["predicted_step_ns"]
    summary = (
        ("main step, ms", s_ns / MS, step_ns / MS),
        ("mean completion time, s", simulated * s_ns / 1e9, real * step_ns / 1e9),
        ("makespan, s", last_simulated * s_ns / 1e9, last_real * step_ns / 1e9),
        (
            "samples a second",
            sum(r[1] for r in rows) / (last_simulated * s_ns / 1e9),
            sum(r[2] for r in rows) / (last_real * step_ns / 1e9),
        ),
    )
    off = max(abs(real / simulated - 1) for _, simulated, real in summary[1:])
    return (
        record.Table(
            title="A queue of jobs on a tuned plan of uneven layers, 4 ranks; in main steps",
            columns=("job", "samples", "made", "begin", "real begin", "end", "real end"),
            rows=tuple(rows),
        ),
        record.Table(
            title="What it comes to",
            columns=("", "simulated", "real", "real / simulated"),
            rows=tuple(
                (name, round(a, 3), round(b, 3), round(b / a, 3)) for name, a, b in summary
            ),
        ),
        100 * off,
    )


FITS = {f"fit-{key}": case for key, case in CASES.items() if case.margins == "computing"}
PARTS = ("calibration", *FITS, *CASES, "losses", "queue")


def write_record(answers: dict[str, Any], rounds: int, arguments: list[str]) -> tuple[Path, Path]:
    """Write the record of all parts."""
    rows = tuple(case_row(key, answers[key]) for key in CASES)
    queue, summary, off = queue_tables(answers["queue"])
    losses = answers["losses"]
    equal = losses["with"] == losses["without"]
    worst = max(abs(row[9]) for row in rows if "+-" not in str(row[0]))
    four = rows[:2]
    return record.write(
        record.Record(
            benchmark="fill_runtime",
            workload="1f1b-20ms",
            question="Do fill jobs use the bubbles of a real pipeline, and what does that cost?",
            command=record.command("fill_runtime", arguments),
            seed=0,
            tables=(
                record.Table(
                    title=f"1F1B, F {UNIT_MS:g} ms and B {2 * UNIT_MS:g} ms, {rounds} steps with "
                    "fill work and as many without, in turns",
                    columns=(
                        "fill work",
                        "ranks",
                        "m",
                        "step ms",
                        "simulated ms",
                        "main slower %",
                        "by turns %",
                        "bubble time filled %",
                        "samples of predicted %",
                        "simulated / real samples a second - 1 %",
                        "fill slower than alone %",
                        "late",
                        "micro-steps",
                    ),
                    rows=rows,
                ),
                queue,
                summary,
            ),
            shows=(
                f"Sleeping fill work uses {min(r[7] for r in four):.0f} to "
                f"{max(r[7] for r in four):.0f} % of all bubble time of at least 5 ms, and the "
                f"main step changes by {min(r[5] for r in four):+.2f} to "
                f"{max(r[5] for r in four):+.2f} %; under jitter of 20 % by {rows[2][5]:+.2f} %.",
                f"Computing fill work on two ranks makes the main step longer by "
                f"{', '.join(f'{row[5]:+.2f} % ({row[0]})' for row in rows[3:])}.",
                f"Samples a second are simulated within {worst:.1f} % ({abs(rows[2][9]):.1f} % "
                f"under jitter), the queue's times and throughput within {off:.1f} %.",
                f"The losses of a GPT beside {losses['micro_steps']} micro-steps of a job that "
                f"trains on the same ranks are {'' if equal else 'not '}bit-equal to those "
                f"without it, over {len(losses['with'])} steps.",
            ),
            does_not_show=(
                "GPUs: kernels already queued cannot be taken back, and streams share a device.",
                "Main jobs that compute: these sleep, so that the cores are the fill work's and "
                "the network threads'.",
                "Long runs: each case is a minute.",
            ),
            notes=(
                f"bubbles of at least 5 ms of the steps without fill work count: waits, the wait "
                f"for the first forward, and the time after the last action; "
                f"{PROFILE_STEPS} steps measure them first",
                f"an action takes {answers['calibration']['overhead_ns'] / MS:.2f} ms beside its "
                "layers, fitted once on steps without fill work; how much slower a computing job "
                f"is in bubbles than alone is fitted on {_FITTING_ROUNDS} filled steps, one "
                "number a job; the rest is prediction",
                "margins: "
                + ", ".join(f"{name} {m.margin:g}" for name, m in MARGINS.items())
                + "; 0.5 ms for handing over",
                "gloo, one torch thread a rank, 1 KiB messages",
            ),
        )
    )


def main(arguments: list[str]) -> None:
    """Run the parts that are asked for; write the record once all are there."""
    parser = argparse.ArgumentParser(prog="fill_runtime", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="steps with, and without")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--folder", default="out/fill_runtime", help="where answers are kept")
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
    missing = [part for part in PARTS if not (folder / f"{part}.json").exists()]
    if missing:
        print(f"kept in {folder}; missing for the record: {', '.join(missing)}")
        return
    answers = {part: msgspec.json.decode((folder / f"{part}.json").read_bytes()) for part in PARTS}
    path, _ = write_record(answers, options.rounds, [])
    drawn = answers["queue"]["drawn"]
    fill_run_picture(
        chrome.loads(drawn["timeline"]),
        fill_spans(drawn["rows"], drawn["began_ns"]),
        path.with_suffix(".png"),
    )
    print(path.read_text())
