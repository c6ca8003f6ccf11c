"""A fill job in a process of its own: paused and continued by signals, killed if it does not obey.

The parent says through a page of shared memory how far the job may go, and continues the process
(SIGCONT) when a bubble begins; when it ends, it stops it (SIGSTOP) wherever it is. Processes that
the job has started are stopped, too. One that goes on using the processor after that is killed
before the next bubble, and so is one that holds more memory than it may. The process dies with
its parent.

On a GPU the process is paused, the kernels it has queued are not: they run to their end. Its share
of the device's memory is capped by torch's allocator.

`executor.fill.served` is the other side, `executor.fill.board` what lies between the two.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from executor.fill import processes
from executor.fill.board import ENDLESS, Board, Command, Phase, Slot, Spec, is_idle
from executor.fill.processes import Family, resident_bytes
from executor.fill.work import Estimate, Progress, words
from octotune.fill.jobs import FillJob

_NAP_S = 0.0003
_DEATH_S = 2.0
_SIGNAL_NS = 300_000  # what it takes to stop one
_LEAK_SLACK_BYTES = 64 << 20


class ChildWork(Progress):
    """A fill job in a process of its own; to the runtime what `Work` is.

    Args:
        job: with a factory.
        configuration: which of its configurations runs.
        device: where it runs.
        seed: of its random numbers.
        timeout_s: for its start, and for saving and loading its state.
        cap_bytes: of memory beyond what a process with torch holds; None: what its micro-steps
            say, if they do.
    """

    def __init__(
        self,
        job: FillJob,
        configuration: int = 0,
        *,
        device: torch.device | None = None,
        seed: int = 0,
        timeout_s: float = 300.0,
        cap_bytes: int | None = None,
    ) -> None:
        super().__init__(job.name, None)
        self.device = torch.device("cpu") if device is None else device
        self.configuration = job.configurations[configuration]
        self.task = None
        declared = self.configuration.peak_bytes
        self._cap = declared or None if cap_bytes is None else cap_bytes
        self._job = msgspec.structs.replace(job, configurations=(self.configuration,))
        self._seed = seed
        self._timeout_s = timeout_s
        self._allowed: int | None = None
        self._family: Family | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._board: Board | None = None
        self._base_bytes = 0
        self._stopping = Estimate(_SIGNAL_NS)  # what it takes to stop the process

    # --- life ----------------------------------------------------------------------------

    def setup(self) -> None:
        """Start the process, wait until its job is ready, and pause it."""
        self.is_set_up = True
        folder = self._folder = Path(tempfile.mkdtemp(prefix="octotune-fill-"))
        board = self._board = Board(folder / "board", make=True)
        spec = Spec(
            job=self._job,
            device=str(self.device),
            seed=self._seed,
            cap_bytes=self._cap,
            parent=os.getpid(),
            path=[entry for entry in sys.path if entry],
        )
        (folder / "spec.json").write_bytes(msgspec.json.encode(spec))
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(spec.path),
        }
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        with (folder / "output").open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "executor.fill.served", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._family = Family(self._process.pid, processes)
        end = time.monotonic() + self._timeout_s
        while board[Slot.PHASE] == Phase.STARTING and self._process.poll() is None:
            if time.monotonic() > end:
                self._kill(f"was not ready within {self._timeout_s:g} s")
                return
            time.sleep(0.005)
        if not self._alive():
            return
        self._base_bytes = resident_bytes(self._process.pid)
        self._pause()

    def fail(self, why: str) -> None:
        """Stop the job for good."""
        if self.failure is None:
            self.failure = why
        self._end()

    def cancel(self) -> None:
        """Stop the job; that is no failure."""
        if not self.ended:
            self.cancelled = True
            self._end()

    def close(self) -> None:
        """End the process: the job's `teardown` runs, for `timeout_s` at most."""
        process, board = self._process, self._board
        if process is not None and board is not None and process.poll() is None:
            board[Slot.COMMAND] = Command.END
            self._continue()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(10.0, self._timeout_s))
        self._end()

    def _kill(self, why: str) -> None:
        if self.failure is None:
            self.failure = why
        self._end()

    def _end(self) -> None:
        if self._process is not None:
            assert self._family is not None
            self._family.signal(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # the main job does not wait long
                self._process.wait(_DEATH_S)
            self._process = None
        if self._board is not None:
            self._read()
            self._board.close()
            self._board = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _alive(self) -> bool:
        """Whether the process is there and its job has not failed; if not, the job ends."""
        if self._process is None or self._board is None or self._folder is None:
            return False
        if self._board[Slot.PHASE] == Phase.FAILED:
            self._kill(_last_line(self._folder / "error") or "failed")
            return False
        status = self._process.poll()
        if status is None:
            return True
        said = _last_line(self._folder / "output")
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        self._kill(f"its process ended with {how}" + (f": {said}" if said else ""))
        return False

    def _pause(self) -> None:
        """Stop the process; a stop that takes long is pending, and looked at before it goes on."""
        assert self._family is not None
        self._family.stop()

    def _continue(self) -> bool:
        """Let the process go on; kill it if it never stopped."""
        assert self._family is not None
        disobeyed = self._family.disobeyed_ns()
        if disobeyed:
            self._kill(
                f"used {disobeyed / 1e6:.0f} ms of the processor after it was stopped: killed"
            )
            return False
        self._family.go_on()
        return True

    # --- what `Work` has -----------------------------------------------------------------

    def forget_passes(self) -> None:
        """Nothing is known of them here."""

    def allow(self, micro_steps: int) -> None:
        """Let the job run so many micro-steps more; it goes as far as it can until first told."""
        self._allowed = (self._allowed or 0) + micro_steps

    def state(self) -> Any:
        """Return the task's state; what saving it raises is raised."""
        self._command(Command.SAVE)
        assert self._folder is not None
        return torch.load(self._folder / "state.pt", weights_only=False)

    def load(self, state: Any) -> None:
        """Go on from a state; a failure stays in `failure`."""
        if self._folder is None:
            return
        try:
            torch.save(state, self._folder / "state.pt")
            self._command(Command.LOAD)
        except Exception as error:
            self.fail(f"load_state_dict: {words(error)}")

    def _command(self, command: Command) -> None:
        """Have the child do something between two micro-steps; raise RuntimeError if it fails."""
        board, process = self._board, self._process
        if board is None or process is None:
            raise RuntimeError("its process has ended")
        answered = board[Slot.ANSWERED]
        board[Slot.COMMAND] = command
        if not self._continue():
            raise RuntimeError(self.failure)
        end = time.monotonic() + self._timeout_s
        while board[Slot.ANSWERED] == answered:
            if not self._alive() or time.monotonic() > end:
                self._kill(f"did not answer {command.name} within {self._timeout_s:g} s")
                raise RuntimeError(self.failure)
            time.sleep(_NAP_S)
        self._pause()

    def run_until(
        self,
        handover: Any,
        *,
        must_ns: int,  # it is stopped by then wherever it is
        free_bytes: int | None,
        arrived: Callable[[], bool],
    ) -> None:
        """Let the process run until the handover's deadline; as `executor.bubble.run_until`."""
        board, counts, clock = self._board, self.counts, time.perf_counter_ns
        if board is None or self.ended or not self._alive():
            return
        if free_bytes is not None and self.configuration.peak_bytes > free_bytes:
            counts.refused_memory += 1
            return
        board[Slot.ALLOWED] = ENDLESS if self._allowed is None else self._allowed
        board[Slot.TARGET] = ENDLESS if self.samples is None else self.samples
        leave_ns = int(handover.deadline_ns - self._stopping.safe_ns)
        if is_idle(board):
            self._read()  # it may have gone on for a moment after the last bubble
            return
        if clock() >= leave_ns:
            self._stopping.refuse()
            return
        began = clock()
        if not self._continue():
            return
        while clock() < leave_ns:
            if arrived():
                handover.stopped_early = True
                break
            if is_idle(board) or not self._alive():
                break
            time.sleep(max(0.0, min(_NAP_S, (leave_ns - clock()) / 1e9)))
        if self._process is not None:
            self._pause()
        ended = clock()
        if ended > leave_ns:
            self._stopping.note(ended - leave_ns)
        counts.bubbles += 1
        counts.busy_ns += ended - began
        handover.busy_ns += ended - began
        handover.ran.append((self.name, -1, began, ended))
        self._read()
        late = ended - handover.deadline_ns
        if late > 0:
            counts.late += 1
            counts.late_ns += late
            counts.worst_late_ns = max(counts.worst_late_ns, late)
            handover.late_ns = late
        if self._process is not None:
            self._watch_memory(free_bytes)

    def _read(self) -> None:
        board, counts = self._board, self.counts
        if board is None:
            return
        made = board[Slot.SAMPLES]
        counts.samples = made if self.samples is None else min(made, self.samples)
        counts.micro_steps = board[Slot.MICRO_STEPS]
        counts.passes = board[Slot.PASSES]
        per_pass = self.configuration.pass_ns
        counts.expected_ns = counts.micro_steps * per_pass // len(self.configuration.micro_steps)

    def _watch_memory(self, free_bytes: int | None) -> None:
        assert self._family is not None
        limits = [limit for limit in (self._cap, free_bytes) if limit is not None]
        if not limits or self.device.type == "cuda":
            return
        held = sum(map(resident_bytes, self._family.members())) - self._base_bytes
        if held > min(limits) + max(_LEAK_SLACK_BYTES, min(limits) // 2):
            self._kill(
                f"holds {held >> 20} MiB beyond its start; it may hold {min(limits) >> 20} MiB: "
                "killed"
            )


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""
