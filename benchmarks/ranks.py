"""Start gloo ranks as processes of this machine for benchmarks; get back what rank 0 gives."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from executor import settle


def run(size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function(rank, *arguments)` on `size` ranks, one thread each; return rank 0's value.

    The function stands at the top of a module.
    """
    with tempfile.TemporaryDirectory() as folder:
        # whoever starts the ranks opens their store: a free port left to rank 0 may be another's
        # before rank 0 listens there
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.spawn(_main, args=(size, store.port, folder, function, arguments), nprocs=size)
        return pickle.loads(Path(folder, "answer").read_bytes())


def _main(
    rank: int,
    size: int,
    port: int,
    folder: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    settle(rank, size)
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", port, is_master=False),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=300),
    )
    answer = function(rank, *arguments)
    if rank == 0:
        Path(folder, "answer").write_bytes(pickle.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()
