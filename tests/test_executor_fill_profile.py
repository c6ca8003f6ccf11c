"""Fill jobs measured alone: times, bytes, and the jobs file that planning reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from executor.fill.module import ModuleTask
from executor.fill.profile import main, profile_job
from octotune.errors import MalformedError
from octotune.fill.jobs_file import read_jobs

WIDE = 256


def trains(batch_size, technique):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(4)))
    rows = [(torch.randn(batch_size, WIDE), torch.randn(batch_size, WIDE))]
    return ModuleTask(
        model,
        lambda _: rows,
        batch_size,
        loss_fn=nn.functional.mse_loss,
        optimizer_fn=torch.optim.SGD,
        technique=technique,
    )


def test_bytes_are_those_of_the_tensors():
    parameters = 4 * (WIDE * WIDE + WIDE) * 4
    activation = 64 * WIDE * 4
    plain, checkpointed, offloaded = profile_job(
        trains, batch_sizes=(64,), techniques=("none", "checkpointing", "offload"), passes=2
    )
    assert plain.batch_size == 64
    assert len(plain.micro_steps) == 13
    assert [step.name for step in plain.micro_steps][:2] == ["layer 0 forward", "layer 1 forward"]
    # parameters, and the data of the one batch there is
    assert plain.resident_bytes == pytest.approx(parameters + 2 * activation, rel=0.02)
    # gradients of all parameters wait for the updates
    assert plain.carried_bytes >= parameters
    assert max(s.memory_bytes for s in plain.micro_steps) >= 2 * parameters
    assert checkpointed.technique == "checkpointing"
    # what is on the device cannot be told from the host here: both are the same memory
    assert offloaded.technique == "offload"
    assert all(step.time_ns > 0 for c in (plain, checkpointed) for step in c.micro_steps)


def test_a_larger_batch_takes_longer():
    small, large = profile_job(trains, batch_sizes=(2, 2048), passes=3)
    assert large.pass_ns > small.pass_ns
    assert large.carried_bytes > small.carried_bytes


def test_a_job_that_raises_is_one_line():
    class Bad(ModuleTask):
        def run(self, k, carry):
            raise OSError("no data\nat all")

    def make(batch_size, technique):
        return Bad(nn.Sequential(nn.Linear(1, 1)), lambda _: [], 1)

    with pytest.raises(MalformedError, match=r"raised OSError: no data$"):
        profile_job(make, name="bad")


def test_the_command_writes_a_jobs_file(tmp_path, monkeypatch, capsys):
    factory = tmp_path / "my_measured_job.py"
    factory.write_text(Path(__file__).read_text().split("\ndef test_")[0])
    output = tmp_path / "jobs.yaml"
    arguments = [f"{factory}:trains", "--kind", "training", "--samples", "100", "-o", str(output)]

    def run(*more):
        monkeypatch.setattr("sys.argv", ["fill_profile", *arguments, *more])
        return main()

    assert run("--name", "one", "--batch-sizes", "2,4", "--passes", "1") == 0
    assert run("--name", "two", "--batch-sizes", "2", "--passes", "1", "--untrusted") == 0
    assert run("--name", "one", "--batch-sizes", "8", "--passes", "1") == 0
    assert "13 micro-steps" in capsys.readouterr().out
    jobs = read_jobs(output)
    assert [(job.name, job.trusted, len(job.configurations)) for job in jobs] == [
        ("two", False, 1),
        ("one", True, 1),
    ]
    assert jobs[1].configurations[0].batch_size == 8
    assert run("--techniques", "magic") == 2
    assert run("--arguments", "[1]") == 2
    assert run("--arguments", '{"size": 3}') == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 3
    assert "write a JSON object" in lines[1]
    assert "raised TypeError" in lines[2]
