"""A fill job's own process: `python -m executor.fill.served FOLDER`.

It runs the job as far as the parent allows (`executor.fill.board`), until it says to end. The
parent is `executor.fill.child`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import torch

from executor.fill.board import Board, Command, Phase, Slot, Spec, is_idle
from executor.fill.giving_way import FILL_SLICE_NS, ask_for
from executor.fill.task import make_task
from executor.fill.work import Work
from octotune.fill.jobs import Configuration

_PR_SET_PDEATHSIG = 1


def main(folder: Path) -> None:
    """Be the process: run the job as far as the parent allows, until it says to end."""
    spec = msgspec.json.decode((folder / "spec.json").read_bytes(), type=Spec)
    _die_with(spec.parent)
    ask_for(FILL_SLICE_NS)
    board = Board(folder / "board", make=False)
    try:
        _serve(spec, board, folder)
    except Exception as error:
        (folder / "error").write_text(str(error) or type(error).__name__)
        board[Slot.PHASE] = Phase.FAILED
        sys.exit(1)


def _serve(spec: Spec, board: Board, folder: Path) -> None:
    torch.set_num_threads(1)
    configuration: Configuration = spec.job.configurations[0]
    device = torch.device(spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if spec.cap_bytes is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, spec.cap_bytes / total), device)
    work = Work(
        spec.job.name,
        make_task(spec.job, configuration),
        [step.time_ns for step in configuration.micro_steps],
        device=device,
        seed=spec.seed,
    )
    work.setup()
    _refuse_failed(work)
    board[Slot.PHASE] = Phase.READY
    with work.world():
        while board[Slot.COMMAND] != Command.END:
            command = board[Slot.COMMAND]
            if command != Command.NONE and not work.num_open:  # a state is one between passes
                board[Slot.COMMAND] = Command.NONE
                if command == Command.SAVE:
                    torch.save(work.task.state_dict(), folder / "state.pt")
                else:
                    work.task.load_state_dict(torch.load(folder / "state.pt", weights_only=False))
                board[Slot.ANSWERED] += 1
                continue
            if is_idle(board):
                time.sleep(0.001)
                if os.getppid() != spec.parent:
                    return
                continue
            work.run(work.next_of_one_pass())
            _refuse_failed(work)
            board[Slot.MICRO_STEPS] = work.counts.micro_steps
            board[Slot.PASSES] = work.counts.passes
            board[Slot.SAMPLES] = work.counts.samples
    work.close()


def _refuse_failed(work: Work) -> None:
    if work.failure is not None:
        raise RuntimeError(work.failure)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even while it is stopped."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
