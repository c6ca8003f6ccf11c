"""How good are the tuner's plans, against published results and against its own lower bound?

Every plan is recomputed by `octotune.check` before its step is counted. A ratio is the reference's
step over ours: above 1, ours is shorter. `--panel` runs twelve cases, each for a short time; with
neither that nor `--group` or `--case` everything runs, which takes hours. On a machine that others
use too, `--clock processor --workers 1` makes a limit count the search's own work.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from benchmarks import record
from benchmarks.tuner_cases import OCTOPIPE_1F1B, OCTOPIPE_FREE, PANEL, Case, all_cases
from octotune.check import check
from octotune.tune import tune

PANEL_TIME_LIMIT_S = 20.0
CLOCKS = {"wall": time.monotonic, "processor": time.process_time}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the tuner reached on one case: the median seed's step, and the spread of the seeds."""

    case: Case
    step_ns: int
    least_ns: int
    most_ns: int
    lower_bound_ns: int
    num_stages: int
    optimal: bool
    within_1_percent_s: float
    seconds: float

    @property
    def ratio(self) -> float | None:
        """The reference's step over ours."""
        return None if self.case.reference_ns is None else self.case.reference_ns / self.step_ns

    @property
    def gap(self) -> float:
        """How far the step is above the bound."""
        return self.step_ns / self.lower_bound_ns - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long each case is searched: seconds by a clock, with how many threads, which seeds."""

    time_limit_s: float | None  # None: the case's own
    clock: str
    workers: int | None
    seeds: tuple[int, ...]


def run_case(case: Case, effort: Effort) -> Outcome:
    """Tune one case with each seed."""
    clock = CLOCKS[effort.clock]
    workload, cluster = case.problem()
    found = []
    for seed in effort.seeds:
        history: list[tuple[float, int]] = []

        def note(phase: str, step_ns: int, elapsed_s: float, into: list = history) -> None:
            into.append((elapsed_s, step_ns))

        begin = clock()
        plan = tune(
            workload,
            cluster,
            num_microbatches=case.num_microbatches,
            seed=seed,
            time_limit_s=effort.time_limit_s or case.time_limit_s,
            workers=effort.workers,
            progress=note,
            clock=clock,
        )
        took = clock() - begin
        step = check(plan).step_ns
        near = next((at for at, value in history if value <= 1.01 * step), took)
        found.append((step, near, took, plan))
    found.sort(key=lambda one: one[0])
    step, near, took, plan = found[len(found) // 2]
    return Outcome(
        case=case,
        step_ns=step,
        least_ns=found[0][0],
        most_ns=found[-1][0],
        lower_bound_ns=max(one[3].predicted.lower_bound_ns for one in found),
        num_stages=len(plan.stages),
        optimal=plan.search["optimal"],
        within_1_percent_s=near,
        seconds=took,
    )


def rows(outcomes: Sequence[Outcome]) -> tuple[tuple[record.Cell, ...], ...]:
    """Return the table's rows."""
    return tuple(
        (
            one.case.name,
            round(one.step_ns / 1e6, 3),
            None if one.case.reference_ns is None else round(one.case.reference_ns / 1e6, 3),
            None if one.ratio is None else round(one.ratio, 4),
            round(one.lower_bound_ns / 1e6, 3),
            round(100 * one.gap, 2),
            "yes" if one.optimal else "",
            one.num_stages,
            f"{one.least_ns / one.step_ns - 1:+.1%} {one.most_ns / one.step_ns - 1:+.1%}",
            round(one.within_1_percent_s, 1),
        )
        for one in outcomes
    )


def summary(outcomes: Sequence[Outcome]) -> tuple[tuple[record.Cell, ...], ...]:
    """Return one row a group, and a row for each part of it that has a bar of its own."""
    lines: list[tuple[record.Cell, ...]] = []

    def add(name: str, chosen: list[Outcome], free: bool = False) -> None:
        ratios = [
            (one.case.free_reference_ns if free else one.case.reference_ns) / one.step_ns
            for one in chosen
            if (one.case.free_reference_ns if free else one.case.reference_ns) is not None
        ]
        if not ratios:
            return
        lines.append(
            (
                name,
                len(ratios),
                round(min(ratios), 4),
                sum(ratio < 0.9999 for ratio in ratios),
                round(math.exp(statistics.fmean(map(math.log, ratios))), 4),
                round(100 * statistics.fmean(one.gap for one in chosen), 2),
            )
        )

    for group in dict.fromkeys(one.case.group for one in outcomes):
        chosen = [one for one in outcomes if one.case.group == group]
        add(group, chosen)
        if group == OCTOPIPE_FREE:
            add(f"{group}, where the reference has headroom",
                [one for one in chosen if one.case.headroom])  # fmt: skip
            for devices in sorted({one.case.num_devices for one in chosen}):
                add(f"{group}, {devices} devices",
                    [one for one in chosen if one.case.num_devices == devices])  # fmt: skip
        elif group == OCTOPIPE_1F1B:
            add(f"{group}, against the reference with free memory", chosen, free=True)
        elif group.startswith("published"):
            pinned = [one for one in chosen if one.case.name.startswith("pin-")]
            add(f"{group}, pinned heads", pinned)
            add(f"{group}, without pinned heads", [one for one in chosen if one not in pinned])
    return tuple(lines)


def _effort_note(effort: Effort) -> str:
    limit = "each case's own limit" if effort.time_limit_s is None else f"{effort.time_limit_s} s"
    clock = (
        "of processor time, all threads together, the proof of the bound included"
        if effort.clock == "processor"
        else "by the wall clock"
    )
    return f"{limit} {clock}; threads {effort.workers or 'all cores'}; seeds {list(effort.seeds)}"


def main(arguments: list[str]) -> int:
    """Run the chosen cases, print each as it comes, and write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tuner_quality")
    parser.add_argument("--panel", action="store_true", help="twelve cases, 20 s each")
    parser.add_argument("--group", action="append", default=[], help="part of a group's name")
    parser.add_argument("--case", action="append", default=[], help="a case's name")
    parser.add_argument("--time-limit", type=float, help="seconds a case, in place of its own")
    parser.add_argument("--seeds", type=int, default=None, help="how many; 3, for the panel 1")
    parser.add_argument("--first-seed", type=int, default=0, help="they count up from here")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="what limits count")
    parser.add_argument("--workers", type=int, help="threads a case; by default all cores")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--name", help="of the record, in place of panel, all or part")
    options = parser.parse_args(arguments)
    cases = list(all_cases())
    if options.panel:
        cases = [case for case in cases if case.name in PANEL]
    if options.group or options.case:
        cases = [
            case
            for case in cases
            if case.name in options.case or any(part in case.group for part in options.group)
        ]
    count = options.seeds or (1 if options.panel else 3)
    effort = Effort(
        time_limit_s=options.time_limit or (PANEL_TIME_LIMIT_S if options.panel else None),
        clock=options.clock,
        workers=options.workers,
        seeds=tuple(range(options.first_seed, options.first_seed + count)),
    )
    outcomes = []
    # processes, so that each case has a processor clock of its own
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        for outcome in pool.map(run_case, cases, [effort] * len(cases)):
            outcomes.append(outcome)
            print(*rows([outcome])[0], sep="  ", flush=True)
    tables = (
        record.Table(
            title="Groups",
            columns=("group", "cases", "worst ratio", "behind", "geometric mean", "mean gap %"),
            rows=summary(outcomes),
        ),
        record.Table(
            title="Cases",
            columns=(
                *("case", "step ms", "reference ms", "ratio", "bound ms", "gap %"),
                *("optimal", "stages", "seeds", "to within 1 % s"),
            ),
            rows=rows(outcomes),
        ),
    )
    kind = "panel" if options.panel else "all" if not (options.group or options.case) else "part"
    record.write(
        record.Record(
            benchmark="tuner_quality",
            workload=options.name or kind,
            question="How good are the tuner's plans, against published results and its bound?",
            command=record.command("tuner_quality", arguments),
            seed=0,
            tables=tables,
            shows=(
                "Steps are the median over the seeds, each recomputed from its plan by check.",
                "Ratio is the reference's step over ours; the gap is above our own lower bound.",
            ),
            does_not_show=("Measured steps: all are the contract's simulation.",),
            notes=(_effort_note(effort),),
        )
    )
    return 0
