"""Gloo ranks as processes, and what they run in the tests: top-level, so that spawn finds it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def spawn(size, function, *arguments):
    """Call `function(rank, *arguments)` in `size` gloo processes; return what each gave."""
    with tempfile.TemporaryDirectory() as folder:
        store = open_store()
        mp.spawn(_main, args=(size, store.port, folder, function, arguments), nprocs=size)
        return [pickle.loads(Path(folder, f"answer{rank}").read_bytes()) for rank in range(size)]


def start_command(size, *arguments):
    """Start the command on `size` ranks as torchrun does; return the processes."""
    store = open_store()
    environment = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "executor", *map(str, arguments)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    ranks[0].store = store  # for as long as the ranks are of interest
    return ranks


def open_store():
    """Return the store that ranks meet at, opened by whoever starts them.

    A port found free and left to rank 0 may be another's before rank 0 listens there.
    """
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _main(rank, size, port, folder, function, arguments):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", port, is_master=False),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    answer = function(rank, *arguments)
    Path(folder, f"answer{rank}").write_bytes(pickle.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def run_plans(rank, plans, options, shared_memory):
    """Run each plan two steps in one process group; return losses and gradients of each."""
    from test_executor_parity import LOSS, batch, layers_of

    from executor import Pipeline
    from executor.transport import GlooTransport

    found = []
    for plan, option in zip(plans, options, strict=True):
        layers = layers_of(len(plan.workload.layers))()
        transport = GlooTransport(shared_memory=shared_memory)
        pipe = Pipeline(plan, layers, LOSS, transport=transport, timeout_s=30, **option)
        parallel = plan.cluster.data_parallel
        inputs, targets = batch(plan.num_microbatches * (parallel.size if parallel else 1))
        losses = []
        for _ in range(2):
            for param in pipe.parameters():
                param.grad = None
            losses.append(pipe.step(pipe.share(inputs), pipe.share(targets)))
        # plain bytes: tensors in a pickle would want shared memory
        grads = {name: param.grad.tolist() for name, param in pipe.named_parameters()}
        found.append((losses, grads))
        pipe.close()
    return found


def run_saving_plans(rank, plans, times):
    """Run a step of each plan on saving layers.

    Return (loss, gradients, turns on the host link as (side, begin, length)).
    """
    from benchmarks.saving import saving_batches, saving_layers, saving_loss
    from executor import Pipeline

    found = []
    for plan in plans:
        pipe = Pipeline(plan, saving_layers(times), saving_loss, timeout_s=30)
        turns = []
        if pipe._offload is not None:
            book = pipe._offload.lane.road.book
            turn = book.turn_ns

            def noted(link, side, length, since=None, turn=turn, turns=turns):
                begin = turn(link, side, length, since)
                turns.append((side, begin, length))
                return begin

            book.turn_ns = noted
        inputs, targets = next(saving_batches(plan.num_microbatches))
        loss = pipe.step(inputs, targets)
        grads = {name: param.grad.tolist() for name, param in pipe.named_parameters()}
        found.append((loss, grads, turns))
    return found


def exchange_large(rank, num_bytes, shared_memory):
    """Send messages both ways, the large ones from a thread; then wait for one nobody sends."""
    from executor.transport import Buffer, GlooTransport

    transport = GlooTransport(shared_memory=shared_memory)
    transport.prepare([(0, 1), (1, 0)], [])
    sizes = [num_bytes // 4, 8, num_bytes // 4, 8]
    out = [torch.full((size,), float(10 * rank + at)) for at, size in enumerate(sizes)]
    into = [Buffer((size,), torch.float32, torch.device("cpu")) for size in sizes]
    received = [transport.receive(buffer, 1 - rank, at << 2) for at, buffer in enumerate(into)]
    sent = [transport.send(tensor, 1 - rank, at << 2) for at, tensor in enumerate(out)]
    for handle in received + sent:
        handle.wait(30)
        handle.wait(0)  # over is over
    assert all(handle.done() for handle in received + sent)
    right = [bool((buffer.tensor == 10 * (1 - rank) + at).all()) for at, buffer in enumerate(into)]
    last = Buffer((sizes[0],), torch.float32, torch.device("cpu"))
    try:
        transport.receive(last, 1 - rank, 100).wait(1)
    except (TimeoutError, ConnectionError) as error:
        lost = type(error).__name__
    return right, lost


def lose_a_rank(rank, plan, folder):
    """Rank 2 kills itself in its second step; the others write down what they learn of it."""
    from torch import nn

    from executor import Pipeline, StepError

    class Dies(nn.Module):
        runs = 0

        def forward(self, x):
            Dies.runs += 1
            if Dies.runs == 4:
                os.kill(os.getpid(), 9)
            return x

    layers = [nn.Linear(4, 4), nn.Linear(4, 4), Dies(), nn.Linear(4, 4)]
    pipe = Pipeline(plan, layers, nn.functional.mse_loss, timeout_s=20)
    try:
        for _ in range(2):
            pipe.step(torch.zeros(4, 4), torch.zeros(4, 4))
    except StepError as error:
        Path(folder, f"rank{rank}").write_text(f"{error.rank} {error}")
        sys.exit(3)
