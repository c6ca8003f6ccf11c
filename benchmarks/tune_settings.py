"""Which of the search's own parameters are best, on random problems that no benchmark reports?

optuna (TPE) proposes settings; each is tried on random heterogeneous problems of 4 devices at free
memory, 1F1B's and half of it, and rated by the mean logarithm of the steps over those of the
settings in use. A proposal that is clearly behind after some problems is given up (median
pruning). The best one is then compared on problems that were held out, with other seeds. Only the
winner there is worth adopting. Searches are limited by evaluations, so that everything can be
repeated.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import record
from benchmarks.random_problems import FREE, HALF, TIGHT, limited, random_cluster, random_workload
from octotune.contract import Cluster, Workload
from octotune.errors import InfeasibleError
from octotune.tune import tune
from octotune.tune.outer import proposed
from octotune.tune.settings import SETTINGS, Settings
from octotune.tune.warm import warm_up

Problem = tuple[str, Workload, Cluster, int]

EVALUATIONS = 60_000
NUM_TRAINED, NUM_HELD_OUT = 6, 9
WIDER = 2.0  # than what a search tries by itself


def problems(first: int, count: int) -> Iterator[Problem]:
    """Yield random problems; their numbers decide all."""
    number, made = first, 0
    while made < count:
        rng = random.Random(1_000_003 * number)
        cap = (FREE, TIGHT, HALF)[number % 3]
        workload = random_workload(rng, rng.randint(12, 32))
        m = rng.choice((8, 12, 16))
        cluster = limited(workload, random_cluster(rng, 4), m, cap)
        try:
            step_of((cap, workload, cluster, m), SETTINGS, 0, 1)
        except InfeasibleError:
            pass
        else:
            made += 1
            yield f"{number} {cap}", workload, cluster, m
        number += 1


def step_of(problem: Problem, settings: Settings, seed: int, evaluations: int) -> int:
    """Return the step that a search reaches."""
    _, workload, cluster, m = problem
    plan = tune(
        workload,
        cluster,
        num_microbatches=m,
        seed=seed,
        max_evaluations=evaluations,
        settings=settings,
        offload="never",
    )
    assert plan.predicted is not None
    return plan.predicted.step_ns


def tuned(trained: Sequence[Problem], seconds: float, evaluations: int) -> tuple[Settings, int]:
    """Return the best settings found in so many seconds of processor time, and the trials."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    base = [step_of(problem, SETTINGS, 0, evaluations) for problem in trained]
    end = time.process_time() + seconds
    found: dict[int, Settings] = {}

    def objective(trial: Any) -> float:
        settings = found[trial.number] = proposed(trial, SETTINGS, WIDER)
        ratings: list[float] = []
        for at, problem in enumerate(trained):
            step = step_of(problem, settings, 0, evaluations)
            ratings.append(math.log(step / base[at]))
            trial.report(statistics.fmean(ratings), at)
            if trial.should_prune():
                raise optuna.TrialPruned
        return statistics.fmean(ratings)

    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=8),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1),
    )
    while not study.trials or time.process_time() < end:
        study.optimize(objective, n_trials=1)
    return found[study.best_trial.number], len(study.trials)


def main(arguments: list[str]) -> int:
    """Tune, compare on what was held out, print and write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tune_settings")
    parser.add_argument("--seconds", type=float, default=600.0, help="of processor time")
    parser.add_argument("--evaluations", type=int, default=EVALUATIONS, help="of one search")
    options = parser.parse_args(arguments)
    warm_up()
    trained = list(problems(0, NUM_TRAINED))
    best, trials = tuned(trained, options.seconds, options.evaluations)
    rows: list[tuple[record.Cell, ...]] = []
    ratings = []
    for problem in problems(1000, NUM_HELD_OUT):
        steps = [
            statistics.fmean(step_of(problem, one, seed, options.evaluations) for seed in (1, 2))
            for one in (SETTINGS, best)
        ]
        ratings.append(math.log(steps[1] / steps[0]))
        rows.append((problem[0], *(round(step / 1e6, 3) for step in steps),
                     round(100 * (steps[1] / steps[0] - 1), 2)))  # fmt: skip
        print(*rows[-1], sep="  ", flush=True)
    mean = 100 * (math.exp(statistics.fmean(ratings)) - 1)
    error = 100 * statistics.stdev(ratings) / math.sqrt(len(ratings))
    better = mean + error < 0
    names = [name for name in Settings.__dataclass_fields__
             if getattr(best, name) != getattr(SETTINGS, name)]  # fmt: skip
    settings = tuple(
        (name, *(round(float(getattr(one, name)), 6) for one in (SETTINGS, best)))
        for name in names
    )
    print(f"held out: {mean:+.2f} % +- {error:.2f} %", settings)
    record.write(
        record.Record(
            benchmark="tune_settings",
            workload="random-heterogeneous",
            question="Which of the search's own parameters are best on problems not reported?",
            command=record.command("tune_settings", arguments),
            seed=0,
            tables=(
                record.Table(
                    title="Held-out problems, mean of two seeds",
                    columns=("problem", "in use ms", "proposed ms", "change %"),
                    rows=tuple(rows),
                ),
                record.Table(
                    title="Settings", columns=("name", "in use", "proposed"), rows=settings
                ),
            ),
            shows=(
                f"{trials} proposals of optuna on {len(trained)} problems, "
                f"{options.evaluations} evaluations a search.",
                f"On {len(rows)} held-out problems the proposal changes the step by {mean:+.2f} % "
                f"(standard error {error:.2f} %): it is {'better' if better else 'not better'}.",
            ),
            does_not_show=("More devices than 4, and searches longer than these.",),
        )
    )
    return 0
