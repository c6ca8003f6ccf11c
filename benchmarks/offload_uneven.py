"""Two hybrids within part of 1F1B's memory: recompute, offload, both."""

from __future__ import annotations

import argparse
from functools import partial

import msgspec

from benchmarks import record
from benchmarks.offload_points import (
    read,
    record_of,
)
from octotune.contract import Cluster, Workload
from octotune.offload.bench import Start
from octotune.offload.joint import with_more_memory
from octotune.offload.search import search_within
from octotune.offload.starts import finer
from octotune.tune.budget import Budget
from octotune.tune.search import Search
from octotune.tune.settings import SETTINGS

UNEVEN = ("nemotron-nano-v2-9B", "jamba-52B")
UNEVEN_BARS = {0.5: (1.00, 1.03, 1.08), 1.0: (1.03, 1.08, 1.15)}


def uneven(options: argparse.Namespace) -> None:
    """Hold recompute, offload and both against the step without a memory limit."""
    for name in options.cases or UNEVEN:
        case = read(name)
        workload = msgspec.convert(case["workload"], Workload)
        m, free_ns = case["num_microbatches"], case["octopipe_free_memory_ns"]
        clusters = [msgspec.convert(one["cluster"], Cluster) for one in case["limits"]]
        starts: list[Start] = []
        for times in (None, 2, 1):
            starts += tuned_starts(
                workload,
                with_more_memory(clusters[0], times),
                m,
                options.tune_seconds,
                options.seed,
            )
        cut = [finer(start, workload, pieces) for start in starts for pieces in (2, 3)]
        starts += [one for one in cut if one is not None]
        rows: list[tuple[record.Cell, ...]] = []
        places = dict.fromkeys(UNEVEN_BARS, 0)
        for one, cluster in zip(case["limits"], clusters, strict=True):
            bar = UNEVEN_BARS[one["k"]][places[one["k"]]]
            places[one["k"]] += 1

            within = partial(search_within, workload, cluster, m, starts, seed=options.seed)
            within = partial(within, time_limit_s=options.seconds)
            again = within(offload=False)
            copies = within(recompute=False)
            both = within(found=[plan for plan in (again, copies) if plan is not None])
            assert both is not None
            ratios = [
                "none" if plan is None else round(plan.step_ns / free_ns, 4)
                for plan in (again, copies, both)
            ]
            rows.append(
                (
                    one["k"],
                    one["share_of_1f1b"],
                    *ratios,
                    bar,
                    "yes" if both.step_ns <= bar * free_ns else "no",
                    len(both.stages),
                    sum(stage.recompute for stage in both.stages),
                    both.num_copies // 2,
                )
            )
            print(name, rows[-1], flush=True)
        record_of(
            options,
            workload=name,
            question="Within a part of 1F1B's memory, how far is the step from one without limit?",
            tables=(
                record.Table(
                    title="Steps over OctoPipe's without a memory limit",
                    columns=(
                        "k",
                        "limit, of 1F1B's activations",
                        "recompute only",
                        "offload only",
                        "both",
                        "bar",
                        "reached",
                        "stages",
                        "recomputed",
                        "activations that leave",
                    ),
                    rows=tuple(rows),
                ),
            ),
            shows="What recompute, offload and both reach from the same starts in the same time.",
            does_not_show="Runs: steps are simulated; OctoPipe's is as its authors publish it.",
        )


def tuned_starts(
    workload: Workload, cluster: Cluster, m: int, seconds: float, seed: int
) -> list[Start]:
    """Return the tuner's best plans of different stage counts on a cluster."""
    search = Search(workload, cluster, m, seed, Budget(seconds, None), None, None, SETTINGS)
    with search:
        search.try_seeds()
        search.try_published()
        while search.goes_on():
            diagnosis = search.diagnose()
            if search.walks_next():
                search.walk(diagnosis)
            else:
                search.polish(diagnosis)
    chosen: list[Start] = []
    plans = [search.best, *search.finalists]
    for plan in sorted((plan for plan in plans if plan), key=lambda plan: plan.step_ns):
        if len(chosen) < 4 and all(len(plan.stages) != len(one.stages) for one in chosen):
            chosen.append(Start(name=plan.source, stages=plan.stages, schedule=plan.schedule))
    return chosen
