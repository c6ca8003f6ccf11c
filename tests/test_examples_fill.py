"""The example on torch's own pipeline runtime runs, fills waits, and keeps the losses' bits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_fill_jobs_work_in_the_waits_of_torchs_own_runtime():
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "examples/fill_torch_pipelining.py"),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = re.findall(r"rank (\d): (\d+) samples in (\d+) bubbles", done.stdout)
    assert {rank for rank, _, _ in rows} == {"0", "1"}
    assert sum(int(samples) for _, samples, _ in rows) > 0
