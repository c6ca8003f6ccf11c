"""Outer choices: with which parameters a search begins anew, as optuna proposes them.

What is best hangs on the problem: how hot, how many walks, how much of them in patterns, how much
of a cycle for orders, how many partitions and placements under an order. The quick cycle and the
first whole one take the settings as given; those that begin anew later take proposals around them,
by the TPE sampler (Bergstra, Bardenet, Bengio and Kegl 2011, NeurIPS 24), rated by the shortest
step that their own walks have led to. What a cycle only goes on with is searched as given.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octotune.tune.settings import Settings

if TYPE_CHECKING:
    import optuna

# by how much each is multiplied or divided at most
SPREADS = {
    "num_walks": 1.6,
    "num_patterns": 2.0,
    "num_polishes": 1.6,
    "num_tightened": 1.6,
    "walk_hot": 1.6,
    "walk_cold": 2.0,
    "polish_share": 1.6,
    "polish_share_binding": 1.6,
    "polish_hot": 2.0,
    "polish_hot_binding": 2.0,
    "polish_cold": 2.0,
    "structure_share": 2.0,
    "structure_share_binding": 2.0,
}
RANDOM_TRIALS = 4  # before the sampler models anything


def proposed(trial: Any, around: Settings, wider: float = 1.0) -> Settings:
    """Return the settings of a trial of optuna: those in `around`, each times a factor.

    `wider` is the exponent of the spreads.
    """
    values: dict[str, float | int] = {}
    for name, spread in SPREADS.items():
        most = spread**wider
        value = getattr(around, name) * trial.suggest_float(name, 1 / most, most, log=True)
        whole = isinstance(getattr(around, name), int)
        values[name] = max(1, round(value)) if whole else value
    return replace(around, **values)  # type: ignore[arg-type]


class OuterChoices:
    """The settings of a search's cycles, one trial each."""

    def __init__(self, given: Settings, seed: int):
        self._given = given
        self._seed = seed
        self._first_ns: int | None = None
        self._study: optuna.Study | None = None
        self._trial: optuna.Trial | None = None

    def settings(self, *, fresh: bool) -> Settings:
        """Return the settings of the next cycle; `fresh`: it begins anew."""
        self._trial = None
        if not fresh or self._first_ns is None:
            return self._given
        if self._study is None:
            self._study = _study(self._seed)
            self._trial = self._study.ask()
            proposed(self._trial, self._given)
            self.rate(self._first_ns)
        self._trial = self._study.ask()
        return proposed(self._trial, self._given)

    def rate(self, step_ns: int) -> None:
        """Say how short a step the cycle's own walks have led to."""
        if self._first_ns is None:
            self._first_ns = step_ns
        if self._study is not None and self._trial is not None:
            self._study.tell(self._trial, math.log(step_ns))
            self._trial = None


def _study(seed: int) -> optuna.Study:
    """Return a study whose first trial is the settings as given."""
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # else it says that there is a study
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=RANDOM_TRIALS)
    study = optuna.create_study(sampler=sampler)
    optuna.logging.set_verbosity(verbosity)
    study.enqueue_trial(dict.fromkeys(SPREADS, 1.0))
    return study
