"""What ranks tell each other about fill jobs: states on their way, and cancellations.

A job that goes on elsewhere leaves its state as a file, and a word in the store that it is there:
the store itself takes no more than 8 MiB. Nothing here waits; who finds nothing looks again in a
later bubble.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from executor.agree import gather
from executor.errors import MismatchError
from executor.fill.work import words
from executor.transport.base import Transport

_HERE, _LOST = "here", "lost"


class Moves:
    """Files and keys under one name. Every rank makes one.

    Args:
        transport: of the pipeline.
        name: prefix of the keys.
        jobs: their names.
        needed: whether any job moves at all.
        folder: that all ranks see; None: a temporary one of rank 0's host.
        timeout_s: for agreeing on it.

    Raises:
        MismatchError: if jobs move between hosts and no folder is given, or it does not exist.
    """

    def __init__(
        self,
        transport: Transport,
        name: str,
        jobs: Sequence[str],
        needed: bool,
        folder: str | None,
        timeout_s: float,
    ) -> None:
        self._store = transport.store
        self._name = name
        self._jobs = tuple(jobs)
        self._cancel_folder = None if folder is None else Path(folder)
        self._owns: Path | None = None
        if folder is not None and not Path(folder).is_dir():
            raise MismatchError(f"the fill folder {folder} does not exist; make it first")
        if not needed:
            self._folder = Path()
            return
        hosts = gather(transport, f"{name}/hosts", transport.host, timeout_s)
        if folder is None and len(set(hosts)) > 1:
            raise MismatchError(
                "fill jobs move between hosts; give --fill-folder, one that all ranks can write"
            )
        if folder is None and transport.rank == 0:
            folder = tempfile.mkdtemp(prefix="octotune-fill-")
            self._owns = Path(folder)
        self._folder = Path(gather(transport, f"{name}/folder", folder, timeout_s)[0])

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._name.replace('/', '-')}-run{number}.pt"

    def _key(self, number: int) -> str:
        return f"{self._name}/state/{number}"

    def leave(self, number: int, state: Any) -> None:
        """Leave the state of run `number`; raises what writing it raises."""
        path = self._path(number)
        new = path.with_suffix(".new")
        torch.save(state, new)
        os.replace(new, path)
        self._store.set(self._key(number), _HERE)

    def lose(self, number: int) -> None:
        """Say that the state of run `number` will not come."""
        self._store.set(self._key(number), _LOST)

    def fetch(self, number: int) -> tuple[Any, str] | None:
        """Return the state of run `number` and why there is none; None: not yet known."""
        key = self._key(number)
        if not self._store.check([key]):
            return None
        if self._store.get(key).decode() == _LOST:
            return None, "the device that it comes from did not finish its part"
        path = self._path(number)
        try:
            state = torch.load(path, weights_only=False)
        except Exception as error:
            return None, f"its state cannot be read: {words(error)}"
        path.unlink(missing_ok=True)
        return state, ""

    def cancel(self, job: int) -> None:
        """Ask whoever runs a job to stop it."""
        self._store.set(f"{self._name}/cancel/{job}", "1")

    def is_cancelled(self, job: int) -> bool:
        """Whether somebody asked for that, in the store or by a file."""
        if (
            self._cancel_folder is not None
            and (self._cancel_folder / f"cancel-{self._jobs[job]}").exists()
        ):
            return True
        return bool(self._store.check([f"{self._name}/cancel/{job}"]))

    def close(self) -> None:
        """Remove what is left of states."""
        if self._owns is not None:
            for path in self._owns.glob("*"):
                path.unlink(missing_ok=True)
            self._owns.rmdir()
            self._owns = None
