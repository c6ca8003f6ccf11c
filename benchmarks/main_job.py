"""The main job (`make run`): profile a GPT here, tune it, run the plan beside 1F1B, compare.

    profile ─▶ tune ─▶ three plans ─▶ one process alone ─▶ the three in turns on ranks ─▶ tables
                       tuned, 1F1B with equal layers,       (losses to match)
                       1F1B with the best partition

Then four ranks of layers that sleep instead of computing, whose measured timeline shows the
bubbles also where cores are fewer than ranks. All files go to `out/`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import gpt, sleeping
from benchmarks.alternate import CALM, STEP_DONE, Answer, Job
from benchmarks.launch import RanksFailedError, run_ranks
from benchmarks.machine import machine_cluster
from executor.measure import deferred_split
from octotune import Cluster, Plan, Workload, check, profile, report, tune
from octotune.partition import balanced_cuts, equal_cuts
from octotune.schedules import FAMILIES, plan_from
from simulator.timeline import Timeline

OUT = Path("out")
TUNED = "tuned"
EQUAL = "1F1B, equal layers"
BEST = "1F1B, best partition"
NS_PER_MS = 1e6
WIDTH = 120  # of tables that go to a file or a pipe
# what a float32 loss may depart by where sums are taken in another order
LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How long the job takes: the defaults stay under five minutes on two cores."""

    warmup: int = 2
    steps: int = 10
    steps_s: float = 75.0
    sleeping_steps: int = 4
    sleeping_steps_s: float = 20.0
    tune_s: float = 15.0
    sleeping_tune_s: float = 10.0
    profile_repeats: int = 20


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


def main(arguments: Sequence[str] = ()) -> int:
    """Run the job; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, help="default: as many as cores, 2 to 4")
    parser.add_argument("--steps", type=int, default=Sizes().steps, help="measured steps a plan")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for what is written")
    options = parser.parse_args(list(arguments))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ranks = options.ranks or min(4, max(2, cores or 1))
    sizes = Sizes(steps=options.steps)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        real_model(console, ranks, cores or 1, sizes, options.out)
        sleeping_model(console, sizes, options.out)
    except RanksFailedError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    console.print(f"\nDone in {time.monotonic() - began:.0f} s.")
    return 0


def real_model(console: Console, ranks: int, cores: int, sizes: Sizes, out: Path) -> Comparison:
    """Profile, tune, run and compare the GPT."""
    settings = gpt.SETTINGS
    console.rule("A GPT on the standard library's source")
    with _busy("learning the byte-level pieces (once), reading the text"):
        makers, loss_fn, batches, make_optimizer = gpt.factory()
    ids, target = next(batches)
    console.print(
        f"{len(makers)} layers, {settings.num_microbatches} microbatches of "
        f"{settings.microbatch} x {settings.length} tokens, vocabulary {settings.vocabulary}; "
        f"{ranks} ranks on {cores} cores, one thread each."
    )
    if ranks > cores:
        console.print(
            f"[yellow]{ranks} ranks share {cores} cores: their computing contends, and measured "
            "steps are longer than predicted.[/yellow]"
        )
    workload = profile(
        [make() for make in makers],
        ids[: settings.microbatch],
        loss_fn,
        example_target=target[: settings.microbatch],
        name="gpt",
        names=settings.layer_names,
        optimizer_fn=make_optimizer,
        repeats=sizes.profile_repeats,
        neighbours=min(ranks, cores) - 1,
        split=deferred_split,
    )
    _print_layers(console, workload)
    with _busy("measuring what messages between ranks take"):
        cluster = machine_cluster(ranks, workload.layers[0].output_bytes, out)
    _print_cluster(console, cluster)
    plans = plans_for(workload, cluster, settings.num_microbatches, sizes.tune_s)
    _print_plan(console, plans[TUNED])
    alone = losses_alone(sizes.warmup + sizes.steps, settings)
    comparison = compare(
        "gpt",
        plans,
        Run(
            model="benchmarks.gpt:factory",
            ranks=ranks,
            warmup=sizes.warmup,
            steps=sizes.steps,
            limit_s=sizes.steps_s,
        ),
        out,
    )
    _print_comparison(console, comparison)
    _print_losses(console, comparison.answer, alone)
    _print_files(console, comparison)
    return comparison


def plans_for(
    workload: Workload, cluster: Cluster, num_microbatches: int, time_limit_s: float
) -> dict[str, Plan]:
    """Return the tuned plan and 1F1B over equal layers and over the best partition."""
    with _busy(f"tuning for {len(cluster.devices)} devices, {time_limit_s:.0f} s at most"):
        tuned = tune(
            workload, cluster, num_microbatches=num_microbatches, time_limit_s=time_limit_s
        )
    family = FAMILIES["1f1b"]
    placement = family.placement(len(cluster.devices))
    cuts = {
        EQUAL: equal_cuts(len(workload.layers), len(placement)),
        BEST: balanced_cuts(workload, cluster, placement, num_microbatches=num_microbatches).cuts,
    }
    return {TUNED: tuned} | {
        name: plan_from(family, workload, cluster, num_microbatches, of_stages)
        for name, of_stages in cuts.items()
    }


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
    with _bar(f"{run.ranks} ranks, plans in turns", run.steps) as advance:

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


def losses_alone(steps: int, settings: gpt.GptSettings) -> list[float]:
    """Return the losses of the unsplit GPT in this process, microbatch by microbatch."""
    makers, loss_fn, batches, make_optimizer = gpt.build(settings)
    model = torch.nn.Sequential(*[make() for make in makers])
    optimizer = make_optimizer(list(model.parameters()))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks: other numbers of threads sum in another order
    found: list[float] = []
    try:
        with _bar("the unsplit model in one process", steps) as advance:
            for ids, target in islice(batches, steps):
                losses = []
                for inputs, wanted in zip(
                    ids.split(settings.microbatch), target.split(settings.microbatch), strict=True
                ):
                    loss = loss_fn(model(inputs), wanted)
                    (loss / settings.num_microbatches).backward()
                    losses.append(loss.detach().double())
                optimizer.step()
                optimizer.zero_grad()
                found.append(float(torch.stack(losses).mean()))
                advance(len(found))
    finally:
        torch.set_num_threads(threads)
    return found


def sleeping_model(console: Console, sizes: Sizes, out: Path) -> Comparison:
    """Tune and run four ranks of sleeping layers, where bubbles are seen on any machine."""
    console.rule("Four ranks of layers that sleep")
    console.print(
        "Real layers of four ranks would contend for fewer cores; these sleep their F, I and W."
    )
    plans = plans_for(
        sleeping.workload(), Cluster.equal(4), sleeping.NUM_MICROBATCHES, sizes.sleeping_tune_s
    )
    del plans[BEST]
    _print_plan(console, plans[TUNED])
    comparison = compare(
        "sleeping",
        plans,
        Run(
            model="benchmarks.sleeping:factory",
            ranks=4,
            warmup=1,
            steps=sizes.sleeping_steps,
            limit_s=sizes.sleeping_steps_s,
        ),
        out,
    )
    _print_comparison(console, comparison)
    _print_files(console, comparison)
    return comparison


# ---------------------------------------------------------------- what is printed


def _print_layers(console: Console, workload: Workload) -> None:
    table = Table(title=f"Measured layers of {workload.name!r}, ms a microbatch")
    for column in ("layer", "kind"):
        table.add_column(column)
    for column in ("F", "I", "W", "optimizer", "parameters MiB", "saved MiB", "for W MiB"):
        table.add_column(column, justify="right")
    for layer in workload.layers:
        times = (
            layer.forward_ns,
            layer.input_grad_ns,
            layer.weight_grad_ns,
            layer.optimizer_ns,
        )
        sizes = (
            layer.param_bytes,
            layer.saved_bytes,
            layer.saved_w_bytes + layer.held_w_bytes,
        )
        table.add_row(
            layer.name,
            layer.kind,
            *(f"{time_ns / NS_PER_MS:.1f}" for time_ns in times),
            *(f"{size / 2**20:.1f}" for size in sizes),
        )
    console.print(table)


def _print_cluster(console: Console, cluster: Cluster) -> None:
    link, device = cluster.links.intra_host, cluster.devices[0]
    console.print(
        f"A message takes {link.latency_ns / NS_PER_MS:.2f} ms and "
        f"{link.bandwidth / 1e9:.1f} GB/s, an action {device.overhead_ns / NS_PER_MS:.2f} ms "
        "beside its layers."
    )


def _print_plan(console: Console, plan: Plan) -> None:
    console.print(f"\nThe tuned plan of {plan.workload.name!r} as predicted:\n", highlight=False)
    console.print(report.plan_table(plan, check(plan).timeline))


def _print_comparison(console: Console, found: Comparison) -> None:
    table = Table(title="Steps, in turns on the same ranks")
    table.add_column("plan", no_wrap=True)
    for column in (
        "predicted ms", "measured ms", "range ms", "measured / predicted",
        "bubbles predicted %", "bubbles measured %", "taken by others %",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for name, predicted in found.predicted.items():
        times = sorted(step.step_ns for step in found.answer.measured(name))
        middle = found.answer.step_ns(name)
        table.add_row(
            name,
            f"{predicted.step_ns / NS_PER_MS:.1f}",
            f"{middle / NS_PER_MS:.1f}",
            f"{times[0] / NS_PER_MS:.0f}..{times[-1] / NS_PER_MS:.0f}",
            f"{middle / predicted.step_ns:.3f}",
            f"{100 * predicted.bubble_fraction:.1f}",
            f"{100 * found.answer.bubble_fraction(name):.1f}",
            f"{100 * found.answer.taken(name):.1f}",
        )
    console.print(table)
    for name in found.predicted:
        if name == TUNED:
            continue
        predicted, measured = found.gain(name)
        console.print(
            f"The tuned plan is {measured:.3f} times as fast as {name} ({predicted:.3f} "
            f"predicted; measured / predicted {measured / predicted:.3f}).",
            highlight=False,
        )
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


def _print_files(console: Console, found: Comparison) -> None:
    console.print(
        f"Picture of the timelines, predicted above measured: {found.picture}\n"
        "Measured timelines for chrome://tracing or ui.perfetto.dev: "
        + ", ".join(map(str, found.traces.values()))
        + f"\nThe plan: {found.plan_files[TUNED]}",
        highlight=False,
    )


def _print_losses(console: Console, answer: Answer, alone: Sequence[float]) -> None:
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


@contextmanager
def _busy(text: str) -> Iterator[None]:
    """Say what is going on, with a spinner if stderr is a terminal."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        console.print(f"{text} ...", highlight=False)
        yield


@contextmanager
def _bar(text: str, total: int) -> Iterator[Callable[[int], Any]]:
    """A bar on stderr if that is a terminal, else one line that says what is going on."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"{text}: {total} steps ...", highlight=False)
        yield lambda _: None
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    with bar:
        task = bar.add_task(text, total=total)
        yield lambda done: bar.update(task, completed=done)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
