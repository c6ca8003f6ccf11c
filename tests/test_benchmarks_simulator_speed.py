import numpy as np
import pytest

from benchmarks.simulator_speed import plan_of
from simulator.memory import check_memory
from tests.small_plans import run


@pytest.mark.parametrize(("nic", "lanes"), [(False, False), (True, True)])
def test_the_timed_plan_runs_and_fits(nic, lanes):
    """98,304 actions; with lanes about a third as many copies, and a lower peak."""
    timeline = run(plan_of(nic=nic, lanes=lanes))
    assert timeline.schedule.num_actions == 98_304
    assert timeline.costs.transfer_uses_nic.any() == nic
    check_memory(timeline)
    if lanes:
        assert timeline.copies is not None
        assert len(timeline.copies.codes) > 30_000
        assert len(np.unique(timeline.costs.host_link)) == timeline.costs.num_devices // 2
        without = run(plan_of(nic=nic, lanes=False))
        assert timeline.peak_bytes.max() < without.peak_bytes.max()
