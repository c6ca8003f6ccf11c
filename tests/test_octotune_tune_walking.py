"""Where the walks of a cycle start: from seeds, from the best so far, and anew."""

from __future__ import annotations

import pytest

from octotune.contract import Cluster, Layer, Workload
from octotune.tune.budget import Budget
from octotune.tune.opening import try_published, try_seeds, try_sketches
from octotune.tune.search import Search
from octotune.tune.settings import SETTINGS
from octotune.tune.sketch import SKETCH
from octotune.tune.walking import NEW_SKETCHES, NEW_STARTS, NUM_CARRIED, WALK, Walking


@pytest.fixture
def search():
    """A search on two devices whose start is over, of evaluations enough for all sketches."""
    layers = tuple(
        Layer(name=str(index), forward_ns=10 + index, input_grad_ns=10, weight_grad_ns=7 + index,
              param_bytes=0, state_bytes=0, saved_bytes=1, output_bytes=0)
        for index in range(8)
    )  # fmt: skip
    budget = Budget(None, 10_000_000)
    with Search(
        Workload(name="w", layers=layers), Cluster.equal(2), 4, 0, budget, 1, None, SETTINGS
    ) as made:
        try_seeds(made)
        try_sketches(made, 2, 1.0)
        try_published(made)
        yield made


def sources(walking):
    return [walk.source for walk in walking.by_step]


def test_the_first_cycle_starts_from_the_seeds_there_are(search):
    seeds, walking = len(search.seeds), Walking(search)
    walking.begin(search.diagnose(), fresh=True)
    assert len(search.seeds) == seeds
    assert len(sources(walking)) == SETTINGS.num_walks
    assert WALK not in sources(walking)


def test_a_cycle_that_goes_on_starts_from_the_last_ones_best(search):
    walking = Walking(search)
    walking.begin(search.diagnose(), fresh=True)
    walking.end_cycle()
    assert not walking.any
    seeds = len(search.seeds)
    walking.begin(search.diagnose(), fresh=False)
    assert len(search.seeds) == seeds + NEW_SKETCHES
    assert len(sources(walking)) == SETTINGS.num_walks // 2
    assert sources(walking).count(WALK) >= NUM_CARRIED


def test_a_cycle_that_begins_elsewhere_starts_half_from_new_sketches(search):
    walking = Walking(search)
    walking.begin(search.diagnose(), fresh=True)
    walking.end_cycle()
    seeds = len(search.seeds)
    walking.begin(search.diagnose(), fresh=True, elsewhere=True)
    assert len(search.seeds) == seeds + NEW_STARTS
    assert len(sources(walking)) == SETTINGS.num_walks
    assert WALK not in sources(walking)
    assert sources(walking).count(SKETCH) >= SETTINGS.num_walks // 2
