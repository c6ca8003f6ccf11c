"""Plans of one workload, run in turns on ranks and held against what they predict."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.alternate import CALM, STEP_DONE, Answer, Job
from benchmarks.launch import run_ranks
from benchmarks.phases import bar
from octotune import Plan, check, report
from simulator.timeline import Timeline

TUNED = "tuned"
NS_PER_MS = 1e6
# what a float32 loss may depart by where sums are taken in another order
LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What plans of one workload predict by name, and what their steps came to."""

    predicted: dict[str, Timeline]
    measured: dict[str, Timeline]  # one step each: the one nearest to the median
    answer: Answer
    plan_files: dict[str, Path]
    traces: dict[str, Path]
    picture: Path

    def gain(self, other: str) -> tuple[float, float]:
        """Return how many times as fast the tuned plan is as another: predicted, measured."""
        return (
            self.predicted[other].step_ns / self.predicted[TUNED].step_ns,
            self.answer.step_ns(other) / self.answer.step_ns(TUNED),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How plans are run: whose model, on how many ranks, for how many steps each."""

    model: str
    ranks: int
    warmup: int
    steps: int
    limit_s: float


def compare(title: str, plans: dict[str, Plan], run: Run, out: Path) -> Comparison:
    """Run the plans in turns on ranks; leave plans, traces and one picture in `out`."""
    plan_files = {name: out / f"{title}-{_slug(name)}.plan.json" for name in plans}
    traces = {name: out / f"{title}-{_slug(name)}.trace.json" for name in plans}
    predicted: dict[str, Timeline] = {}
    for name, plan in plans.items():
        predicted[name] = check(plan).timeline
        plan.save(plan_files[name])
    job = Job(
        plans={name: str(path) for name, path in plan_files.items()},
        model=run.model,
        warmup=run.warmup,
        steps=run.steps,
        limit_s=run.limit_s,
        answer=str(out / f"{title}.steps.json"),
        traces={name: str(path) for name, path in traces.items()},
    )
    job_file = out / f"{title}.job.json"
    job_file.write_bytes(msgspec.json.format(msgspec.json.encode(job), indent=1))
    with bar(f"{run.ranks} ranks, plans in turns", run.steps) as advance:

        def follow(line: str) -> None:
            if line.startswith(STEP_DONE):
                advance(int(line.split()[-2]))

        run_ranks(run.ranks, "benchmarks.alternate", [str(job_file)], on_line=follow)
    measured = {name: report.read_trace(path) for name, path in traces.items()}
    picture = out / f"{title}.png"
    report.timelines_picture(
        {
            f"{name}, {how}": timelines[name]
            for name in plans
            for how, timelines in (("predicted", predicted), ("measured", measured))
        },
        picture,
    )
    return Comparison(
        predicted=predicted,
        measured=measured,
        answer=msgspec.json.decode(Path(job.answer).read_bytes(), type=Answer),
        plan_files=plan_files,
        traces=traces,
        picture=picture,
    )


def step_table(found: Comparison) -> record.Table:
    """Return one row a plan: what it predicts beside what it came to."""
    rows = []
    for name, predicted in found.predicted.items():
        times = sorted(step.step_ns for step in found.answer.measured(name))
        middle = found.answer.step_ns(name)
        rows.append(
            (
                name,
                round(predicted.step_ns / NS_PER_MS, 1),
                round(middle / NS_PER_MS, 1),
                f"{times[0] / NS_PER_MS:.0f}..{times[-1] / NS_PER_MS:.0f}",
                round(middle / predicted.step_ns, 3),
                round(100 * predicted.bubble_fraction, 1),
                round(100 * found.answer.bubble_fraction(name), 1),
                round(100 * found.answer.taken(name), 1),
            )
        )
    return record.Table(
        title="Steps, in turns on the same ranks",
        columns=(
            "plan", "predicted ms", "measured ms", "range ms", "measured / predicted",
            "bubbles predicted %", "bubbles measured %", "taken by others %",
        ),
        rows=tuple(rows),
    )  # fmt: skip


def gain_sentences(found: Comparison) -> list[str]:
    """Return what the tuned plan gains on each other one, as measured and as predicted."""
    sentences = []
    for name in found.predicted:
        if name != TUNED:
            predicted, measured = found.gain(name)
            sentences.append(
                f"The tuned plan is {measured:.3f} times as fast as {name} ({predicted:.3f} "
                f"predicted; measured / predicted {measured / predicted:.3f})."
            )
    return sentences


def print_comparison(console: Console, found: Comparison) -> None:
    """Print steps, gains, and where time was lost."""
    steps = step_table(found)
    table = Table(title=steps.title)
    for index, column in enumerate(steps.columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=not index)
    for row in steps.rows:
        table.add_row(*map(str, row))
    console.print(table)
    for sentence in gain_sentences(found):
        console.print(sentence, highlight=False)
    taken = max(found.answer.taken(name) for name in found.predicted)
    if taken > CALM:
        console.print(
            f"[yellow]Other processes took up to {taken:.1%} of the ranks' time: steps are longer "
            "than on an idle machine, those with the fewest bubbles most.[/yellow]",
            highlight=False,
        )
    console.print(
        report.bubble_table(
            {f"{name}, measured": timeline for name, timeline in found.measured.items()}
        )
    )


def print_files(console: Console, found: Comparison) -> None:
    """Print where picture, traces and plan lie."""
    console.print(
        f"Picture of the timelines, predicted above measured: {found.picture}\n"
        "Measured timelines for chrome://tracing or ui.perfetto.dev: "
        + ", ".join(map(str, found.traces.values()))
        + f"\nThe plan: {found.plan_files[TUNED]}",
        highlight=False,
    )


def print_losses(console: Console, answer: Answer, alone: Sequence[float]) -> None:
    """Print each step's loss of every plan beside that of one process."""
    table = Table(title="Loss of each step")
    table.add_column("step", justify="right")
    table.add_column("one process", justify="right")
    for name in answer.steps:
        table.add_column(name, justify="right")
    for index, loss in enumerate(alone):
        table.add_row(
            str(index),
            f"{loss:.6f}",
            *(f"{steps[index].loss:.6f}" for steps in answer.steps.values()),
        )
    console.print(table)
    worst = worst_departure(answer, alone)
    verdict = "match" if worst <= LOSS_TOLERANCE else "DO NOT match"
    console.print(
        f"The losses {verdict} those of one process; the largest difference is {worst:.1e} of one."
    )


def worst_departure(answer: Answer, alone: Sequence[float]) -> float:
    """Return the largest difference of a plan's loss from one process's, in parts of it."""
    return max(
        abs(step.loss - loss) / abs(loss)
        for steps in answer.steps.values()
        for step, loss in zip(steps, alone, strict=False)  # turns may have gone on
    )


def _slug(name: str) -> str:
    return "-".join(re.findall("[a-z0-9]+", name.lower()))
