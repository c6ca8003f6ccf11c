"""What the README shows runs, and what it points to is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def programs() -> dict[str, str]:
    """Return the README's Python blocks by the file name in their first line."""
    blocks = re.findall(r"```python\n(# (\w+\.py).*?)```", README, re.DOTALL)
    return {name: text for text, name in blocks}


def test_links_lead_to_files():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_commands_are_make_targets_and_subcommands():
    from octotune.__main__ import cli

    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^    make (\w+)", README, re.MULTILINE):
        assert f"\n{target}:" in makefile, target
    for command in re.findall(r"python -m octotune ([\w-]+)", README):
        assert command in cli.commands, command


@pytest.mark.slow
def test_the_programs_run(tmp_path):
    for name, text in programs().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert "ms a step" in run("plan_my_model.py")
    run(
        *ranks, "-m", "executor", "--plan", "plan.json", "--model", "my_model.py:make",
        "--steps", "5", "--report", "report.json", "--trace", "trace.json",
    )  # fmt: skip
    assert {"report.json", "trace.json"} <= {path.name for path in tmp_path.iterdir()}
    assert "% bubbles" in run(*ranks, "train_my_model.py")
    run(
        "-m", "executor.fill.profile", "my_fill_job.py:make", "--name", "classify",
        "--samples", "20000", "--batch-sizes", "4,32", "-o", "jobs.yaml",
    )  # fmt: skip
    run(
        "-m", "octotune", "fill", "--plan", "plan.json", "--jobs", "jobs.yaml",
        "--threshold", "0.3 ms", "-o", "fill.json",
    )  # fmt: skip
    printed = run(
        *ranks, "-m", "executor", "--plan", "plan.json", "--model", "my_model.py:make",
        "--steps", "12", "--fill", "fill.json", "--fill-alternate",
        "--fill-picture", "filled.png", "--report", "report.json",
    )  # fmt: skip
    assert "Fill jobs as they ran" in printed
    assert (tmp_path / "filled.png").stat().st_size > 0
