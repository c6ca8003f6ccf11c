"""Fill jobs in the waits of torch's own pipeline runtime.

    torchrun --nproc-per-node 2 examples/fill_torch_pipelining.py

`Schedule1F1B` waits for its messages in one function, `_wait_batch_p2p`. The first steps measure
how long each of a step's waits is; from then on each is a bubble: handed over for 80 % of its
usual length, and only then waited for. The losses keep their bits.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, schedules

from executor.bubble import Filler
from executor.fill.module import ModuleTask
from executor.fill.profile import profile_job
from executor.fill.work import Work

MICROBATCHES, STEPS, PROFILE_STEPS, UNIT_S = 4, 8, 3, 0.02
SHARE, LEAST_NS = 0.8, 2_000_000


class Waits:
    """The waits of a step, by their number: their usual length, and fill work inside."""

    def __init__(self, filler: Filler) -> None:
        self.filler = filler
        self.lengths: list[list[int]] = []
        self.step = -1
        self.at = 0
        self.busy_ns = 0

    def begin_step(self) -> None:
        """Begin a step: its first wait is number 0."""
        self.step += 1
        self.at = 0

    def wait(self, work: list[Any]) -> None:
        """Take the place of `_wait_batch_p2p`."""
        began = time.perf_counter_ns()
        if self.at == len(self.lengths):
            self.lengths.append([])
        seen = self.lengths[self.at]
        self.at += 1
        usual = int(statistics.median(seen)) if seen else 0
        if self.step >= PROFILE_STEPS and usual >= LEAST_NS:
            with self.filler.bubble(began + int(SHARE * usual), must_ns=began + usual) as ran:
                for each in work:
                    each.wait()
            self.busy_ns += ran.busy_ns
            return
        for each in work:
            each.wait()
        if 0 < self.step < PROFILE_STEPS:  # the first step is no example
            seen.append(time.perf_counter_ns() - began)


@contextmanager
def bubbles(waits: Waits) -> Iterator[None]:
    """Put `waits` in torch's place."""
    original = schedules._wait_batch_p2p
    schedules._wait_batch_p2p = waits.wait
    try:
        yield
    finally:
        schedules._wait_batch_p2p = original


class Layer(nn.Module):
    """A linear layer with dropout that takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(16, 16), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(UNIT_S)
        return self.drop(self.linear(x))


def fill_task() -> ModuleTask:
    """Return the fill job: a small network that trains."""
    generator = torch.Generator().manual_seed(2)
    rows = [(torch.randn(8, 32, generator=generator),) * 2 for _ in range(16)]
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))
    return ModuleTask(model, lambda _: rows, 8, loss_fn=nn.functional.mse_loss)


def train(waits: Waits | None) -> list[float]:
    """Train the main job some steps; return its losses, on the last rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    stage = PipelineStage(Layer(), rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(STEPS):
        x, y = (torch.randn(2 * MICROBATCHES, 16, generator=generator) for _ in range(2))
        losses: list[torch.Tensor] = []
        if waits is not None:
            waits.begin_step()
        schedule.step(
            *([x] if rank == 0 else []),
            **({"target": y, "losses": losses} if rank == size - 1 else {}),
        )
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            found.append(torch.stack(losses).mean().item())
    return found


def main() -> None:
    """Train without and with the fill job, and say what it did."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plain = train(None)
    (alone,) = profile_job(lambda **_: fill_task(), batch_sizes=(8,))
    work = Work("small network", fill_task(), [step.time_ns for step in alone.micro_steps])
    waits = Waits(Filler([work]))
    with bubbles(waits):
        filled = train(waits)
    assert filled == plain, "the fill job changed the main job's losses"
    counts = work.counts
    print(
        f"rank {dist.get_rank()}: {counts.samples} samples in {counts.bubbles} bubbles, "
        f"{waits.busy_ns / 1e6:.0f} ms; late {counts.late} times; {work.failure or 'no failure'}",
        flush=True,
    )
    waits.filler.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
