"""The tuner with offload: by itself where memory binds, kept when stopped, refused with reason."""

from __future__ import annotations

import itertools

import pytest
from offload_cases import UNIT, devices, equal_layers

from octotune.check import check
from octotune.errors import InfeasibleError, MalformedError
from octotune.tune import loop, offloading, tune


def test_tuner_offloads_where_memory_does_not_suffice():
    # inputs as large as activations: recompute frees nothing
    workload, cluster = equal_layers(8, output=UNIT), devices(2, units=3)
    with pytest.raises(InfeasibleError, match=r"no plan fits|too few"):
        tune(workload, cluster, num_microbatches=6, max_evaluations=500, offload="never")
    plan = tune(workload, cluster, num_microbatches=6, max_evaluations=500)
    assert plan.offload is not None
    assert any(plan.offload)
    assert check(plan).step_ns == plan.predicted.step_ns


@pytest.mark.parametrize("where", [1, 2, 3, "copies"])
def test_ctrl_c_keeps_the_plan_within_memory(where, monkeypatch):
    """In the search within memory, in those beyond it, and among the copies."""
    searches = itertools.count(1)
    run = loop._run

    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    def run_or_interrupt(search):
        run(search)
        if next(searches) == where:
            interrupted()

    monkeypatch.setattr(loop, "_run", run_or_interrupt)
    if where == "copies":
        monkeypatch.setattr(offloading, "improve_with_offload", interrupted)
    plan = tune(equal_layers(8), devices(2, units=7), num_microbatches=6, max_evaluations=300)
    assert plan.search["interrupted"]
    assert plan.offload is None
    assert check(plan).step_ns == plan.predicted.step_ns


def test_nothing_offloadable_is_the_same_plan_and_says_so():
    """D10: a fraction of 0 is no refusal."""
    workload, cluster = equal_layers(4, offloadable=0), devices(2, units=6)
    plans = [
        tune(workload, cluster, num_microbatches=4, max_evaluations=300, offload=offload)
        for offload in ("auto", "never", "always")
    ]
    assert plans[0].actions == plans[1].actions == plans[2].actions
    assert all(plan.offload is None for plan in plans)
    assert plans[2].search["offload"] == "none: no layer has offloadable_bytes"


def test_always_offloads_where_memory_does_suffice():
    workload, cluster = equal_layers(4), devices(2, units=1000)
    plan = tune(workload, cluster, num_microbatches=8, max_evaluations=500, offload="always")
    assert plan.offload is not None or plan.search["offload"].startswith("none: ")
    check(plan)


def test_a_wish_that_is_none_is_refused():
    with pytest.raises(MalformedError, match="offload is 'maybe'; it is one of auto, never"):
        tune(equal_layers(2), devices(1, units=9), num_microbatches=2, offload="maybe")
