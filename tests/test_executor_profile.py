"""The profile's command: a model's layers and the way to the host, in one go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from executor.profile import main
from octotune.contract import read_workload

MODEL = f"{Path(__file__).resolve().parent.parent / 'examples' / 'offload' / 'model.py'}:make"
QUICK = ("--repeats", "1", "--neighbours", "0")


def profiled(tmp_path, *more, model=MODEL, microbatches="8"):
    output = tmp_path / "workload.json"
    status = main(
        ["--model", model, "--microbatches", microbatches, "-o", str(output), *QUICK, *more]
    )
    return status, output


def test_the_layers_and_the_link_are_measured(tmp_path, capsys):
    status, output = profiled(tmp_path, "--json", "--name", "small")
    assert status == 0
    workload = read_workload(output)
    assert workload.name == "small"
    assert len(workload.layers) == 8
    found = json.loads(capsys.readouterr().out)
    assert found["host_link"]["offload_bandwidth"] > 0
    assert found["host_link"]["neighbours"] == 0
    for layer, row in zip(workload.layers, found["layers"], strict=True):
        saved = layer.saved_bytes + layer.saved_w_bytes
        assert row["saved_bytes"] == saved
        assert row["offloadable_share"] == pytest.approx(layer.offloadable_bytes / saved)
    blocks = [row["offloadable_share"] for row in found["layers"][1:-1]]
    # all but what the normalisations keep of each row
    assert all(0.95 < share < 1 for share in blocks)


def test_the_table_says_what_may_leave_and_what_the_link_carries(tmp_path, capsys):
    assert profiled(tmp_path)[0] == 0
    out = capsys.readouterr().out
    assert "may leave" in out
    assert "each of both at once" in out
    assert "offload_bandwidth" in out


def test_the_link_is_left_out_where_nobody_asks_for_it(tmp_path, capsys):
    assert profiled(tmp_path, "--no-host-link", "--json")[0] == 0
    assert json.loads(capsys.readouterr().out)["host_link"] is None


def test_what_does_not_fit_is_refused_in_one_line(tmp_path, capsys):
    status, output = profiled(tmp_path, microbatches="7")
    assert status == 2
    assert not output.exists()
    error = capsys.readouterr().err
    assert "a minibatch has 32 rows, which 7 microbatches" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("batches", "says"),
    [("[]", "has no batches"), ("[(1, 2, 3)]", "batches are (input, target)")],
)
def test_a_model_without_a_batch_to_look_at_is_refused(tmp_path, capsys, batches, says):
    path = tmp_path / "odd_model.py"
    path.write_text(
        "from torch import nn\n\n\ndef make():\n"
        f"    return [nn.Linear(2, 2)], nn.functional.mse_loss, {batches}\n"
    )
    assert profiled(tmp_path, model=f"{path}:make")[0] == 2
    assert says in capsys.readouterr().err


def test_an_unknown_option_is_refused(capsys):
    assert main(["--models", "x"]) == 2
    assert "executor.profile:" in capsys.readouterr().err
