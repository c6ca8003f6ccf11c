"""Outer choices: settings proposed by optuna for the cycles that begin anew."""

from __future__ import annotations

import math
import statistics

import optuna
import pytest

from octotune.tune.outer import SPREADS, OuterChoices
from octotune.tune.settings import SETTINGS, Settings

BEST_NS = 10**9


def cycles(count: int, seed: int = 0, rate=lambda settings: 1000) -> list[Settings]:
    """The settings of so many cycles, each begun anew and rated."""
    outer = OuterChoices(SETTINGS, seed)
    found = []
    for number in range(count):
        found.append(outer.settings(fresh=number > 0))
        outer.rate(rate(found[-1]))
    return found


def test_the_first_cycle_and_those_gone_on_with_are_as_given():
    outer = OuterChoices(SETTINGS, 0)
    assert outer.settings(fresh=True) is SETTINGS
    outer.rate(1000)
    assert outer.settings(fresh=True) != SETTINGS
    outer.rate(900)
    assert outer.settings(fresh=False) is SETTINGS


def test_a_cycle_that_is_not_rated_is_no_trial():
    outer = OuterChoices(SETTINGS, 0)
    assert outer.settings(fresh=False) is SETTINGS
    assert outer.settings(fresh=True) is SETTINGS  # nothing to hold a proposal against


@pytest.mark.parametrize("seed", range(3))
def test_proposals_stay_near_what_was_given_and_are_the_seeds(seed):
    found = cycles(12, seed)
    assert found == cycles(12, seed)
    assert len(set(found)) == len(found)
    for settings in found:
        for name in Settings.__dataclass_fields__:
            given, value = getattr(SETTINGS, name), getattr(settings, name)
            assert type(value) is type(given)
            spread = SPREADS.get(name, 1.0)
            slack = 0.5 if isinstance(given, int) else 1e-9
            assert given / spread - slack <= value <= given * spread + slack
            assert value > 0


def test_proposals_get_better():
    def rate(settings: Settings) -> int:
        off = math.log(settings.walk_hot / (1.5 * SETTINGS.walk_hot))
        return round(BEST_NS * (1.0 + off * off))

    above = [rate(settings) - BEST_NS for settings in cycles(60, rate=rate)]
    assert statistics.fmean(above[-20:]) < 0.5 * statistics.fmean(above[:20])


def test_the_users_own_studies_log_as_before():
    before = optuna.logging.get_verbosity()
    cycles(2)
    assert optuna.logging.get_verbosity() == before
