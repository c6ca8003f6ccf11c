"""How many plans does the tuner try a second, and how long does it take around the search?

The kernels run on one thread, on the processor's own clock: the list scheduler inside annealing
(partitions and rules) and the moves of the order search. Then whole runs: how long a
`tune` with the least budget takes, which is all that it does besides searching, and how soon a
long one is within 1 % of what is asked of a minute, and of the step that it reaches in the end
itself, again by the processor's clock, in the median of three seeds.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

from benchmarks import record
from benchmarks.tuner_cases import Case, all_cases
from octotune.tune import tune
from octotune.tune.balance import island_rng
from octotune.tune.diagnose import Diagnosis
from octotune.tune.genome import STRICT, capacity_for, empty_run, empty_shape
from octotune.tune.islands import Polish, Walk, tokens_of
from octotune.tune.plans import genome_stages, judge
from octotune.tune.problem import FAR, make_world
from octotune.tune.scheduler import list_schedule
from octotune.tune.seeds import list_rules, placement_seeds, strict_rules
from octotune.tune.settings import SETTINGS
from octotune.tune.shape import shape_stages
from octotune.tune.warm import warm_up

CASES = (
    "llama3-8B:4x8:free",
    "nemotron-nano-v2-9B:8x16:free",
    "llama3-70B:8x8:free",
    "uni-a-p8-m32:p",
    "llama3-70B:16x32:free",
)
SECONDS = 2.0


def rate(run_slice: Callable[[], None], tried: Callable[[], int]) -> float:
    """Return trials a second of processor time of a slice that is called again and again."""
    begin, before = time.process_time(), tried()
    while time.process_time() - begin < SECONDS:
        run_slice()
    return (tried() - before) / (time.process_time() - begin)


def measure(case: Case) -> tuple[record.Cell, ...]:
    """Return one row: sizes, rates, and seconds of the least run."""
    workload, cluster = case.problem()
    world = make_world(workload, cluster, case.num_microbatches)
    capacity = capacity_for(world)
    shape, run = empty_shape(world, capacity), empty_run(world, capacity)
    best = {}
    for genome in placement_seeds(world, capacity, island_rng(0, 0)):
        for rules in (list_rules, strict_rules):
            for ruled in rules(world, genome):
                if shape_stages(world, ruled, shape):
                    step = list_schedule(world, ruled, shape, run, FAR)
                    key = int(ruled.meta[STRICT])
                    if step >= 0 and (key not in best or step < best[key][0]):
                        best[key] = (step, ruled)
    rates = []
    for key in (0, 1):
        step, genome = best[key]
        walk = Walk(world, genome, step, island_rng(0, 1), "")
        diagnosis = Diagnosis(order_loss=0.01, imbalance=0.01, edge=0.5, binding=False)
        weights = diagnosis.weights(strict=key == 1, overhead=False)
        run_slice = partial(walk.run_slice, 0.002, weights, 0.03)
        rates.append(rate(run_slice, partial(getattr, walk, "evaluations")))
    candidate = judge(
        workload, cluster, case.num_microbatches, genome_stages(walk.best), walk.schedule(), ""
    )
    assert candidate is not None
    tokens = tokens_of(world, candidate)
    assert tokens is not None
    polish = Polish(world, tokens, island_rng(0, 2), "")
    run_slice = partial(polish.run_slice, 0.0005, SETTINGS.structure_share)
    rates.append(rate(run_slice, partial(getattr, polish, "trials")))
    begin = time.perf_counter()
    tune(workload, cluster, num_microbatches=case.num_microbatches, time_limit_s=0.001)
    around = time.perf_counter() - begin
    return (
        case.name,
        len(tokens.token),
        *(int(round(value, -2)) for value in rates),
        round(around, 2),
    )


# cases of 4, 8 and 16 devices: the step in ms asked of a minute, and in how many seconds a search
# is to be within 1 % of it
SOON = {
    "nemotron-nano-v2-9B:4x8:free": (870.0, 3.0),
    "jamba-52B:8x16:free": (775.0, 10.0),
    "llama3-70B:16x32:free": (3315.0, 30.0),
}
SEEDS = (0, 1, 2)


def searched(case: Case, seconds: float, seed: int) -> tuple[int, float, float]:
    """Return the step in the end, and when it was within 1 % of what is asked, and of itself."""
    workload, cluster = case.problem()
    history: list[tuple[float, int]] = []
    cores = os.cpu_count() or 1
    plan = tune(
        workload,
        cluster,
        num_microbatches=case.num_microbatches,
        seed=seed,
        time_limit_s=seconds * cores,
        clock=time.process_time,
        progress=lambda _, step_ns, at_s: history.append((at_s, step_ns)),
    )
    assert plan.predicted is not None
    step = plan.predicted.step_ns

    def within(step_ns: float) -> float:
        soon = next((at for at, best in history if best <= 1.01 * step_ns), math.inf)
        return soon / cores

    return step, within(1e6 * SOON[case.name][0]), within(step)


def time_to_quality(case: Case, seconds: float) -> tuple[record.Cell, ...]:
    """Return one row: medians over the seeds, and each seed's time to what is asked."""
    asked_ms, limit_s = SOON[case.name]
    steps, soon, own = zip(*(searched(case, seconds, seed) for seed in SEEDS), strict=True)

    def shown(at_s: float) -> str:
        return "not" if math.isinf(at_s) else f"{at_s:.1f}"

    return (
        *(case.name, round(statistics.median(steps) / 1e6, 3), asked_ms),
        *(shown(statistics.median(soon)), limit_s, " ".join(map(shown, soon))),
        shown(statistics.median(own)),
    )


def main(arguments: list[str]) -> int:
    """Measure, print and write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tuner_speed")
    parser.add_argument("--case", action="append", help="a case's name; by default five")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of the long searches; 0: none"
    )
    options = parser.parse_args(arguments)
    begin = time.perf_counter()
    warm_up()
    loading = time.perf_counter() - begin
    chosen = options.case or CASES
    rows = []
    for case in all_cases():
        if case.name in chosen:
            rows.append(measure(case))
            print(*rows[-1], sep="  ", flush=True)
    soon = []
    for case in all_cases():
        if case.name in SOON and options.seconds and not options.case:
            soon.append(time_to_quality(case, options.seconds))
            print(*soon[-1], sep="  ", flush=True)
    record.write(
        record.Record(
            benchmark="tuner_speed",
            workload="all" if not options.case else "part",
            question="How many plans does the tuner try a second, and what does it cost around?",
            command=record.command("tuner_speed", arguments),
            seed=0,
            tables=(
                record.Table(
                    title="Trials a second of one core",
                    columns=(
                        *("case", "actions", "partition and rule", "pattern", "order"),
                        "seconds around the search",
                    ),
                    rows=tuple(rows),
                ),
                record.Table(
                    title="Time to within 1 %",
                    columns=(
                        *("case", f"ms after {options.seconds:g} s", "ms asked"),
                        *("seconds to 1 % of that", "seconds asked", "each seed's"),
                        "to 1 % of its own",
                    ),
                    rows=tuple(soon),
                ),
            ),
            shows=(
                "A trial is a neighbour tried, most of them given up early at the limit; 16 of an "
                "order's count as one evaluation where transfers do not queue.",
                "Times to quality are processor seconds over the number of cores: what an idle "
                f"machine takes on all of them; medians over the seeds {SEEDS}.",
            ),
            does_not_show=("How good the plans are: see tuner_quality.",),
            notes=(f"loading the compiled kernels took {loading:.2f} s",),
        )
    )
    return 0
