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
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import gpt, record, sleeping
from benchmarks.comparison import (
    LOSS_TOLERANCE,
    NS_PER_MS,
    TUNED,
    Comparison,
    Run,
    compare,
    gain_sentences,
    print_comparison,
    print_files,
    print_losses,
    step_table,
    worst_departure,
)
from benchmarks.launch import RanksFailedError
from benchmarks.machine import machine_cluster
from benchmarks.phases import bar, busy
from executor.measure import deferred_split
from octotune import Cluster, Plan, Workload, check, profile, report, tune
from octotune.compiling import announced_compilation
from octotune.partition import balanced_cuts, equal_cuts
from octotune.schedules import FAMILIES, plan_from

OUT = Path("out")
EQUAL = "1F1B, equal layers"
BEST = "1F1B, best partition"
WIDTH = 120  # of tables that go to a file or a pipe


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


def main(arguments: Sequence[str] = ()) -> int:
    """Run the job; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, help="default: as many as cores, 2 to 4")
    parser.add_argument("--steps", type=int, default=Sizes().steps, help="measured steps a plan")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for what is written")
    parser.add_argument("--record", action="store_true", help="write a record to results/")
    options = parser.parse_args(list(arguments))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ranks = options.ranks or min(4, max(2, cores or 1))
    sizes = Sizes(steps=options.steps)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        real, worst = real_model(console, ranks, cores or 1, sizes, options.out)
        asleep = sleeping_model(console, sizes, options.out)
    except RanksFailedError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    console.print(f"\nDone in {time.monotonic() - began:.0f} s.")
    if options.record:
        path, _ = record.write(main_job_record(real, asleep, worst, ranks, sizes, arguments))
        console.print(f"Record: {path}")
    return 0 if worst <= LOSS_TOLERANCE else 1


def main_job_record(
    real: Comparison,
    asleep: Comparison,
    worst: float,
    ranks: int,
    sizes: Sizes,
    arguments: Sequence[str],
) -> record.Record:
    """Return what the job found, for `benchmarks/results/`."""
    steps = step_table(asleep)
    return record.Record(
        benchmark="main_job",
        workload=f"gpt, {ranks} ranks",
        question="Does a tuned plan of a real model beat 1F1B by as much as is predicted?",
        command=record.command("main_job", arguments),
        seed=0,
        tables=(step_table(real), replace(steps, title="Four ranks of sleeping layers, in turns")),
        shows=(
            *gain_sentences(real),
            f"Every step's loss of every plan equals that of one process to {worst:.1e} of it.",
            *(
                sentence.replace("The", "On sleeping layers the", 1)
                for sentence in gain_sentences(asleep)
            ),
        ),
        does_not_show=(
            "Anything about GPUs, several machines, or links slower than this machine's memory.",
            "How plans compare where other processes take part of the cores: see the last column.",
        ),
        notes=(
            f"{sizes.warmup} warmup steps a plan, medians of the {sizes.steps} calmest after; "
            "plans in turns in the same processes, a rank a core, one thread each",
            f"profile: {sizes.profile_repeats} passes; tune: {sizes.tune_s:g} s at most",
        ),
    )


def real_model(
    console: Console, ranks: int, cores: int, sizes: Sizes, out: Path
) -> tuple[Comparison, float]:
    """Profile, tune, run and compare the GPT; also return by how much losses depart at most."""
    settings = gpt.SETTINGS
    console.rule("A GPT on the standard library's source")
    with busy("learning the byte-level pieces (once), reading the text"):
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
    with busy("measuring what messages between ranks take"):
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
    print_comparison(console, comparison)
    print_losses(console, comparison.answer, alone)
    print_files(console, comparison)
    return comparison, worst_departure(comparison.answer, alone)


def plans_for(
    workload: Workload, cluster: Cluster, num_microbatches: int, time_limit_s: float
) -> dict[str, Plan]:
    """Return the tuned plan and 1F1B over equal layers and over the best partition."""
    with (
        busy(f"tuning for {len(cluster.devices)} devices, {time_limit_s:.0f} s at most") as remark,
        announced_compilation(lambda line: print(line, file=sys.stderr)),
    ):
        tuned = tune(
            workload,
            cluster,
            num_microbatches=num_microbatches,
            time_limit_s=time_limit_s,
            progress=lambda _, step_ns, __: remark(f"{step_ns / NS_PER_MS:.1f} ms a step"),
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


def losses_alone(steps: int, settings: gpt.GptSettings) -> list[float]:
    """Return the losses of the unsplit GPT in this process, microbatch by microbatch."""
    makers, loss_fn, batches, make_optimizer = gpt.build(settings)
    model = torch.nn.Sequential(*[make() for make in makers])
    optimizer = make_optimizer(list(model.parameters()))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks: other numbers of threads sum in another order
    found: list[float] = []
    try:
        with bar("the unsplit model in one process", steps) as advance:
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
    print_comparison(console, comparison)
    print_files(console, comparison)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
