"""The way to the host, measured."""

from __future__ import annotations

import pytest

from octotune.errors import MalformedError
from octotune.model.host_link import HostLink, measure_host_link


def test_each_way_is_measured_alone_both_at_once_and_beside_others():
    link = measure_host_link(size_bytes=1 << 20, repeats=3, neighbours=1)
    assert min(link.out, link.back, link.both, link.out_beside, link.back_beside) > 10**7
    assert link.neighbours == 1


def test_a_plan_counts_on_the_slower_way_with_neighbours_copying():
    link = HostLink(out=10, back=12, both=6, out_beside=5, back_beside=4, neighbours=1)
    assert link.offload_bandwidth == 4


def test_without_neighbours_it_is_the_slower_way_alone():
    link = measure_host_link(size_bytes=1 << 16, repeats=1)
    assert link.offload_bandwidth == min(link.out, link.back)


def test_counts_below_one_are_refused():
    with pytest.raises(MalformedError, match="size_bytes, repeats, neighbours are 0, 5, 0"):
        measure_host_link(size_bytes=0)
