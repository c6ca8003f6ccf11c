"""What users do wrong: one line, on every rank, and nothing hangs."""

from __future__ import annotations

import signal
import subprocess
import sys

import executor_ranks
import pytest
import torch
from executor_tools import make_plan, one_f_one_b_rows, run_ranks
from torch import nn

from executor import MismatchError, Pipeline, StepError
from octotune.errors import BrokenPlanError


class AsDouble(nn.Module):
    def forward(self, x):
        return x.double()


class Grows(nn.Module):
    """Gives another shape for each microbatch."""

    runs = 0

    def forward(self, x):
        self.runs += 1
        return x.repeat(self.runs, 1)


def broken_layer():
    raise RuntimeError("no such file: weights.bin")


def refusals(make_layers):
    """Run one step on two thread ranks; return the error each of them raised."""
    plan = make_plan(one_f_one_b_rows(2, 2), [(2, 0), (2, 1)], 2)
    models = [make_layers() for _ in range(2)]

    def body(transport):
        try:
            pipe = Pipeline(
                plan,
                models[transport.rank],
                nn.functional.mse_loss,
                transport=transport,
                timeout_s=10,
            )
            pipe.step(torch.zeros(4, 4), torch.zeros(4, 4))
        except (MismatchError, StepError, BrokenPlanError) as error:
            return error
        return None

    return run_ranks(2, body)


@pytest.mark.parametrize(
    ("at", "layer", "text"),
    [
        (1, lambda: nn.Linear(4, 5), "rank 1, at 1F0: RuntimeError: mat1 and mat2 shapes"),
        (1, AsDouble, "rank 1, at 1F0: RuntimeError: "),
        (0, lambda: nn.Linear(5, 4), "rank 0, at 0F0: RuntimeError: mat1 and mat2 shapes"),
        (3, lambda: nn.Linear(5, 4), "rank 1, at 1F0: RuntimeError: mat1 and mat2 shapes"),
        (1, Grows, "rank 0: stage 0 gives [4, 4] torch.float32, and gave [2, 4]"),
        (2, lambda: broken_layer, "layer 2"),
    ],
)
def test_layers_that_do_not_fit_are_named_on_every_rank(at, layer, text):
    def make_layers():
        layers = [nn.Linear(4, 4) for _ in range(4)]
        layers[at] = layer()
        return layers

    errors = refusals(make_layers)
    assert all(isinstance(error, ValueError) for error in errors)
    assert len({str(error) for error in errors}) == 1, errors
    assert text in str(errors[0])
    assert "\n" not in str(errors[0])


MODEL = """
import time
import torch
from torch import nn

class Slow(nn.Linear):
    def forward(self, x):
        print("computes", flush=True)
        for _ in range(6000):
            time.sleep(0.01)
        return super().forward(x)

def make():
    layers = [lambda: nn.Linear(4, 4), lambda: Slow(4, 4)]
    return layers, nn.functional.mse_loss, [(torch.zeros(4, 4), torch.zeros(4, 4))] * 2
"""


@pytest.mark.parametrize("hit", [(0, 1), (1,)])
def test_ctrl_c_in_a_step_ends_every_rank_with_one_line(tmp_path, hit):
    """Both ranks get it, as from a terminal; or only the one that computes."""
    (tmp_path / "model.py").write_text(MODEL)
    make_plan(one_f_one_b_rows(2, 2), [(1, 0), (1, 1)], 2).save(tmp_path / "plan.json")
    ranks = executor_ranks.start_command(
        2,
        *("--plan", tmp_path / "plan.json", "--model", f"{tmp_path / 'model.py'}:make"),
        *("--steps", 2, "--timeout", 60),
    )
    try:
        begun = ranks[1].stdout.readline()
        assert begun == "computes\n", begun + ranks[1].stderr.read()
        for rank in hit:
            ranks[rank].send_signal(signal.SIGINT)
        ends = [process.communicate(timeout=60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    lines = [line for _, text in ends for line in text.splitlines() if line]
    assert [process.returncode for process in ranks] == [1, 1], lines
    assert len(lines) == 1, lines
    assert "interrupted" in lines[0]


def test_the_command_without_torchrun_says_how_many_ranks_it_needs(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    make_plan(one_f_one_b_rows(2, 2), [(1, 0), (1, 1)], 2).save(tmp_path / "plan.json")
    command = [sys.executable, "-m", "executor", "--plan", str(tmp_path / "plan.json")]
    found = subprocess.run(
        [*command, "--model", f"{tmp_path / 'model.py'}:make", "--steps", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 2
    assert "there are 1 ranks; the plan needs 2" in found.stderr
    assert len(found.stderr.splitlines()) == 1
