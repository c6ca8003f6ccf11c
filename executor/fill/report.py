"""What a fill plan came to, put together from all ranks."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from executor.agree import gather
from octotune.fill.outcome import DeviceOutcome, FillOutcome, JobOutcome, JobStatus
from octotune.fill.plan import FillPlan
from simulator.fills import FillSpan

if TYPE_CHECKING:
    from executor.fill.queue import DeviceRun
    from executor.fill.run import FilledStep, FillRun

_RANKING: tuple[JobStatus, ...] = ("failed", "cancelled", "running", "waiting", "done")


def planned_samples(fill: FillPlan, number: int, filled_steps: int) -> int:
    """Return what a run has made by the plan after so many filled main steps."""
    run = fill.runs[number]
    packing = fill.packings[run.packing]
    configuration = fill.configuration(packing)
    steps = min(filled_steps, run.end) - run.begin
    if steps <= 0:
        return 0
    cycles, rest = divmod(steps, len(packing.steps))
    last = len(configuration.micro_steps) - 1
    passes = sum(bubble.count(last) for step in packing.steps[:rest] for bubble in step)
    made = cycles * packing.samples + passes * configuration.batch_size
    return min(run.samples, made)


def _run_words(run: DeviceRun) -> dict[str, Any]:
    work = run.work
    status: JobStatus = "waiting" if run.started is None else "running"
    if work.failure is not None:
        status = "failed"
    elif work.cancelled:
        status = "cancelled"
    elif run.ended is not None:
        status = "done"
    return {
        "number": run.number,
        "status": status,
        "failure": work.failure,
        "samples": run.samples_done,
    }


def local_words(run: FillRun) -> dict[str, Any]:
    """Return this rank's part as JSON holds it."""
    works = {id(each.work): (each.job, each.work) for each in run.runs}
    return {
        "runs": [_run_words(each) for each in run.runs],
        "works": [
            [
                job,
                work.counts.micro_steps,
                work.counts.busy_ns,
                work.counts.expected_ns,
                work.counts.late,
                work.counts.late_ns,
                work.counts.worst_late_ns,
            ]
            for job, work in works.values()
        ],
        "device": {
            "bubble_ns": run.bubble_ns,
            "handed_ns": run.handed_ns,
            "busy_ns": run.busy_ns,
            "reprofiled": run.lengths.reprofiled,
            "confirmed": run.confirmed,
        },
        "steps": run.step_times(),
    }


def report(run: FillRun, key: str, timeout_s: float) -> FillOutcome:
    """Return what all ranks did together. Every rank calls it."""
    transport, fill = run.transport, run.fill
    found = gather(transport, key, local_words(run), timeout_s)
    found = found[: len(fill.plan.cluster.devices)]  # the replica that fills
    plain: list[int] = []
    filled: list[int] = []
    # ranks begin their next step while others end theirs: a step lasts from end to end
    ended = [max(row[2] for row in rows) for rows in zip(*steps_of(found), strict=True)]
    for before, now, row in zip(ended, ended[1:], found[0]["steps"][1:], strict=False):
        (filled if row[3] else plain).append(now - before)
    filled_steps = run.num_filled_steps
    bubble_ns = sum(each["device"]["bubble_ns"] for each in found)
    busy_ns = sum(each["device"]["busy_ns"] for each in found)
    return FillOutcome(
        jobs=tuple(_job(fill, number, found, filled_steps) for number in range(len(fill.jobs))),
        devices=tuple(DeviceOutcome(**each["device"]) for each in found),
        filled_steps=filled_steps,
        plain_steps=len(plain),
        step_ns=int(statistics.median(filled)) if filled else None,
        plain_step_ns=int(statistics.median(plain)) if plain else None,
        predicted_step_ns=fill.predicted.step_ns,
        filled=busy_ns / bubble_ns if bubble_ns else 0.0,
    )


def steps_of(found: list[dict[str, Any]]) -> list[list[Any]]:
    """Return each rank's steps, as far back as all ranks kept them."""
    first = max(each["steps"][0][0] for each in found) if all(e["steps"] for e in found) else 0
    return [[row for row in each["steps"] if row[0] >= first] for each in found]


def _job(
    fill: FillPlan, number: int, found: list[dict[str, Any]], filled_steps: int
) -> JobOutcome:
    runs = [
        run
        for each in found
        for run in each["runs"]
        if fill.packings[fill.runs[run["number"]].packing].job == number
    ]
    works = [work for each in found for work in each["works"] if work[0] == number]
    micro, busy, alone, late, late_ns = (sum(work[at] for work in works) for at in range(1, 6))
    statuses = [run["status"] for run in runs] or ["waiting"]
    status = next(word for word in _RANKING if word in statuses)
    samples = sum(run["samples"] for run in runs)
    if status == "waiting" and samples:
        status = "running"
    packings = [p for p in fill.packings if p.job == number]
    return JobOutcome(
        name=fill.jobs[number].name,
        devices=tuple(sorted({packing.device for packing in packings})),
        status=status,
        failure=next((run["failure"] for run in runs if run["failure"]), None),
        samples=samples,
        predicted_samples=sum(
            planned_samples(fill, at, filled_steps)
            for at, run in enumerate(fill.runs)
            if fill.packings[run.packing].job == number
        ),
        micro_steps=micro,
        busy_ns=busy,
        alone_ns=alone,
        slowdown=busy / alone if alone else None,
        late=late,
        late_ns=late_ns,
        worst_late_ns=max((work[6] for work in works), default=0),
    )


def spans_of(step: FilledStep, device: int, offset_ns: int) -> list[list[Any]]:
    """Return a step's fill work as JSON holds it: device, job, micro-step, start, end."""
    return [
        [device, job, k, start + offset_ns, end + offset_ns]
        for _, handover in step.handovers
        for job, k, start, end in handover.ran
    ]


def fill_spans(rows: list[list[Any]], began_ns: int) -> list[FillSpan]:
    """Return spans of all ranks, from the start of the step."""
    return [
        FillSpan(
            device=device,
            job=job,
            name="" if k < 0 else f"#{k}",
            start_ns=start - began_ns,
            end_ns=end - began_ns,
        )
        for device, job, k, start, end in rows
    ]
