"""The fleet's benchmark: its constants, and its predictions on a small fleet of equal shares."""

from __future__ import annotations

import pytest

from benchmarks import fleet_job as fleet

SCALE = 2.46  # on the V100's roofline; the record fits it anew


@pytest.fixture(scope="module")
def main():
    return fleet.fitted_main()


def test_two_equations_give_the_slot_and_the_fixed_slots(main):
    assert main.fixed_slots == pytest.approx(3.0)
    iterations = fleet.TOKENS / (fleet.MINIBATCH * fleet.SEQUENCE)
    assert main.slot_ns * iterations == pytest.approx(fleet.DAY_NS)


@pytest.mark.parametrize(("gpus", "m", "days"), [(1024, 64, 82), (4096, 16, 34), (8192, 8, 26)])
def test_simulated_days_are_the_published_ones(main, gpus, m, days):
    assert fleet.microbatches(gpus) == m
    assert main.days(gpus) == pytest.approx(days, abs=1e-3)


def test_bubbles_are_the_fifteen_slots_of_the_closed_form(main):
    timeline = main.timeline(8192, "gpipe")
    assert timeline.bubble_fraction == pytest.approx(15 / (8 + 15 + 3), rel=1e-6)


def filled(main, gpus, mix, **more):
    """A replica's share: what one makes, all make."""
    outcome = fleet.fill(main, gpus, mix, SCALE, replicas=1, hours=24, **more)
    return outcome, fleet.relative_utilisation(main, gpus) * (1 + outcome.gain)


def test_filled_fleets_reach_the_published_share_of_half_their_size(main):
    for gpus, mix, percent in (
        (4096, fleet.MIXED, 89.0),
        (8192, fleet.MIXED, 92.0),
        (8192, fleet.INFERENCE, 106.5),
    ):
        _, reached = filled(main, gpus, mix)
        half = fleet.relative_utilisation(main, gpus // 2)
        assert 100 * reached / half == pytest.approx(percent, abs=4), (gpus, percent)


def test_gpus_saved_by_inference_are_in_the_published_range(main):
    outcome, _ = filled(main, 8192, fleet.INFERENCE)
    assert 2000 <= 64 * outcome.report.gpus_saved <= 2600
    assert outcome.report.slowdown.mean < 0.02


LARGE = tuple(part for part in fleet.MIXED if part.model == "swin-large")


def test_each_change_goes_the_published_way(main):
    def rate(gpus, mix=fleet.INFERENCE, **changed):
        return filled(main, gpus, mix, **changed)[0].tera_a_second

    assert rate(1024) > 1.1 * rate(1024, schedule="1f1b")
    assert rate(8192) > rate(8192, shrink=0.5)
    least, some, most = (rate(8192, LARGE, free_gib=gib) for gib in (2, 4, 8))
    assert least < some < most
