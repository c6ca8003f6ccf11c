"""The polishes of a cycle: where they start, and who goes on."""

from __future__ import annotations

import pytest

from octotune.contract import Cluster, Layer, Workload
from octotune.tune.budget import Budget
from octotune.tune.islands import Walk
from octotune.tune.opening import try_published, try_seeds, try_sketches
from octotune.tune.polishing import (
    DRAFT,
    DRAFT_HEATS,
    LEAST_POLISHES,
    RUNG_ENDS,
    STEADY,
    Polishing,
)
from octotune.tune.search import Search
from octotune.tune.settings import SETTINGS
from octotune.tune.sketch import SKETCH
from octotune.tune.walking import WALK


@pytest.fixture
def search():
    """A search on two devices with room for three microbatches of half the layers."""
    layers = tuple(
        Layer(name=str(index), forward_ns=100 + 7 * index, input_grad_ns=100,
              weight_grad_ns=70 + index, param_bytes=0, state_bytes=0, saved_bytes=1,
              output_bytes=0)
        for index in range(10)
    )  # fmt: skip
    budget = Budget(None, 10_000_000)
    with Search(
        Workload(name="w", layers=layers), Cluster.equal(2, memory_bytes=15), 8, 0, budget, 1,
        None, SETTINGS,
    ) as made:  # fmt: skip
        try_seeds(made)
        try_sketches(made, 4, 1.0)
        try_published(made)
        yield made


def test_sketches_are_drafted_once_where_memory_binds(search):
    sketches = sum(seed.source == SKETCH for seed in search.seeds)
    polishing = Polishing(search)
    polishing.begin([], binding=True, drafts=True)
    drafts = [polish for polish in polishing.polishes if polish.source == DRAFT]
    assert len(drafts) == sketches > 0
    assert {polish.heat for polish in drafts} == set(DRAFT_HEATS)
    polishing.end_cycle()
    assert not polishing.any
    polishing.begin([], binding=True, drafts=True)
    assert all(polish.source != DRAFT for polish in polishing.polishes)


def test_no_drafts_without_being_asked_or_where_they_cost_more_than_there_is(search):
    polishing = Polishing(search)
    polishing.begin([], binding=False, drafts=False)
    assert polishing.any
    assert all(polish.source != DRAFT for polish in polishing.polishes)
    search.budget.max_evaluations = search.budget.evaluations + 100
    other = Polishing(search)
    other.begin([], binding=True, drafts=True)
    assert all(polish.source != DRAFT for polish in other.polishes)


def test_a_cycle_that_begins_elsewhere_polishes_its_own_walks_alone(search):
    """The best so far is shorter than any of them, and would be polished again otherwise."""
    walks = [
        Walk(search.world, seed.genome, seed.step_ns, search.island_rng(), seed.source)
        for seed in search.seeds[-8:]
    ]
    assert min(walk.best_ns for walk in walks) > search.best_so_far().step_ns
    for elsewhere in (False, True):
        polishing = Polishing(search)
        polishing.begin(walks, binding=True, drafts=False, elsewhere=elsewhere)
        sources = {polish.source for polish in polishing.polishes} - {STEADY}
        assert (sources == {WALK}) == elsewhere
        assert len(polishing.polishes) >= search.settings.num_polishes


def test_rungs_give_up_the_worst_and_the_best_plan_is_kept(search):
    polishing = Polishing(search)
    polishing.begin([], binding=True, drafts=True)
    first_ns, live = search.best_so_far().step_ns, len(polishing.polishes)
    for end in (0.0, *RUNG_ENDS):
        polishing.round(end)
        assert len(polishing.live) <= live
        live = len(polishing.live)
        rest = [polish.best_ns for polish in polishing.polishes if polish not in polishing.live]
        assert min(polish.best_ns for polish in polishing.live) <= min(rest, default=2 * first_ns)
        least = min(polish.best_ns for polish in polishing.polishes)
        assert search.best_so_far().step_ns <= min(first_ns, least)
    assert LEAST_POLISHES <= live < len(polishing.polishes)
