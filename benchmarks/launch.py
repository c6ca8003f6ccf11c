"""Start ranks under torchrun, follow what they say, and tell how they failed if they do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO

LAST_LINES = 15


class RanksFailedError(RuntimeError):
    """The ranks ended with an error; the message holds their exit status and last lines."""

    def __init__(self, command: Sequence[str], status: int, lines: Sequence[str]) -> None:
        text = "\n".join(f"  {line}" for line in lines) or "  (nothing was printed)"
        super().__init__(
            f"{' '.join(command)}\nended with exit status {status}; its last lines:\n{text}"
        )
        self.status = status


def run_ranks(
    num_ranks: int,
    module: str,
    arguments: Sequence[str],
    *,
    on_line: Callable[[str], None] = lambda _: None,
) -> None:
    """Run a module on so many ranks of this machine, one torch thread each.

    Args:
        num_ranks: processes.
        module: as in `python -m`.
        arguments: after the module's name.
        on_line: called with each line that the ranks print on standard output.

    Raises:
        RanksFailedError: if torchrun ends with another status than 0.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(num_ranks), "-m", module, *arguments,
    ]  # fmt: skip
    last: deque[str] = deque(maxlen=LAST_LINES)
    with subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        keep = threading.Thread(target=_keep, args=(process.stderr, last))
        keep.start()
        try:
            for line in process.stdout:
                on_line(line.rstrip("\n"))
                last.append(line.rstrip("\n"))
            keep.join()
        except BaseException:
            process.terminate()  # torchrun ends its ranks
            raise
    if process.returncode != 0:
        raise RanksFailedError(command, process.returncode, list(last))


def _keep(stream: IO[str], last: deque[str]) -> None:
    for line in stream:
        last.append(line.rstrip("\n"))
