"""The way to the host, measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octotune.__main__ import main
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


WORKLOAD = Path(__file__).resolve().parent.parent / "examples" / "offload" / "workload.json"


def test_the_command_measures_and_says_what_share_of_a_workload_may_leave(capsys):
    command = ["host-link", "--neighbours", "0", "--workload", str(WORKLOAD)]
    assert main([*command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["offload_bandwidth"] == min(facts["out"], facts["back"])
    layers = json.loads(WORKLOAD.read_bytes())["layers"]
    saved = sum(layer["saved_bytes"] + layer["saved_w_bytes"] for layer in layers)
    away = sum(layer["offloadable_bytes"] for layer in layers)
    assert facts["offloadable_share"] == pytest.approx(away / saved)
    assert main(command) == 0
    assert "offload_bandwidth" in capsys.readouterr().out
