"""`compare --offload`: what activations on the host change, in one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octotune.__main__ import main

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "offload"
PROBLEM = (
    *("--workload", str(EXAMPLE / "workload.json"), "--cluster", str(EXAMPLE / "small.yaml")),
    *("--microbatches", "8", "--max-evaluations", "60"),
)


def compared(capsys, *options):
    assert main(["compare", *PROBLEM, *options]) == 0
    return capsys.readouterr().out


def test_compare_with_and_without_activations_on_the_host(capsys):
    found = {
        mode: json.loads(compared(capsys, "--offload", mode, "--json"))
        for mode in ("auto", "always", "never")
    }
    assert found["never"]["tuned"]["num_offloaded"] == 0
    assert found["auto"]["tuned"]["num_offloaded"] > 0
    assert found["always"]["tuned"]["num_offloaded"] > 0
    # where memory binds, what leaves buys time
    assert found["auto"]["tuned"]["step_ns"] < found["never"]["tuned"]["step_ns"]
    assert "too few" in found["auto"]["baselines"]["1f1b, equal layers"]
    limit = 7_000_000
    assert all(max(each["tuned"]["peak_bytes"]) <= limit for each in found.values())


def test_the_table_says_how_many_activations_leave(capsys):
    assert "activations" in compared(capsys)
    assert "activations" not in compared(capsys, "--offload", "never")


def test_check_shows_what_the_copies_do(capsys, tmp_path):
    """Of each stage k, of each device the bytes, the lane's busy share and what waited."""
    output = tmp_path / "plan.json"
    assert main(["tune", *PROBLEM, "-o", str(output)]) == 0
    assert main(["check", str(output)]) == 0
    out = capsys.readouterr().out
    assert "offloads 8 of 8, k 0." in out
    assert all(word in out for word in ("moved", "lane busy", "late ms", "waits for"))


def test_another_word_for_offload_is_refused(capsys):
    assert main(["compare", *PROBLEM, "--offload", "sometimes"]) == 2
    error = capsys.readouterr().err
    assert "sometimes" in error
    assert "auto" in error


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_where_no_device_can_offload_nothing_leaves(capsys, tmp_path, mode):
    cluster = tmp_path / "cluster.yaml"
    text = (EXAMPLE / "small.yaml").read_text()
    cluster.write_text(text.replace(" offload_bandwidth: 1 GB/s,", ""))
    problem = [str(cluster) if word.endswith("small.yaml") else word for word in PROBLEM]
    assert main(["compare", *problem, "--offload", mode]) == 0
    out = capsys.readouterr().out
    assert "activations" not in out
    assert ("no offload: no device has an offload_bandwidth" in out) == (mode == "always")
