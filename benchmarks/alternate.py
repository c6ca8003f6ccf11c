"""Run several plans of one model in turns, step by step, in the same processes.

    torchrun --standalone --nproc-per-node N -m benchmarks.alternate job.json

What is compared meets the same machine at the same time: every rank builds one `Pipeline` a plan,
and each turn takes one step of each on the same minibatch, beginning with another one each turn.
A machine that slows down for a while slows them all. Where other processes want the cores, too,
turns go on until every plan has had enough calm steps or the time is up. The job says which plans,
whose model, how many steps and where the answer goes; rank 0 writes it and prints how far it is,
for a bar.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from executor import Pipeline, settle
from octotune.contract import read_plan
from octotune.model.run_queue import run_queue_ns
from simulator import chrome

STEP_DONE = "calm steps"  # followed by how many, of how many
CALM = 0.02  # the largest share of the ranks' time that others take from a calm step


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to run. `model` is MODULE:FACTORY; `plans` maps a name to a plan file."""

    plans: dict[str, str]
    model: str
    warmup: int
    steps: int  # calm ones, a plan
    limit_s: float  # for turns; never fewer than `steps` of them
    answer: str  # where the `Answer` goes
    traces: dict[str, str]  # a plan's name -> where the trace of its median step goes
    seed: int = 0


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One measured step of one plan."""

    step_ns: int
    bubble_fraction: float
    busy_ns: list[int]  # per device
    queued_ns: list[int]  # per device: ready to compute, but other processes held the cores
    loss: float

    @property
    def taken(self) -> float:
        """The share of the ranks' time in the step that other processes took."""
        return sum(self.queued_ns) / (len(self.queued_ns) * self.step_ns)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of each plan in order, warmup included: losses begin at the first."""

    steps: dict[str, list[Step]]
    warmup: int
    wanted: int

    def measured(self, name: str) -> list[Step]:
        """Return the wanted number of steps after warmup: those from which least was taken."""
        steps = sorted(self.steps[name][self.warmup :], key=lambda step: step.taken)
        return steps[: self.wanted]

    def step_ns(self, name: str) -> int:
        """Return the median of the measured steps."""
        return round(statistics.median(step.step_ns for step in self.measured(name)))

    def typical(self, name: str) -> int:
        """Return the index, among all steps, of the measured one nearest to their median."""
        middle = self.step_ns(name)
        nearest = min(self.measured(name), key=lambda step: abs(step.step_ns - middle))
        return self.steps[name].index(nearest)

    def bubble_fraction(self, name: str) -> float:
        """Return the median of the measured steps' bubble fractions."""
        return statistics.median(step.bubble_fraction for step in self.measured(name))

    def taken(self, name: str) -> float:
        """Return how large a share other processes took of the measured steps, as a median."""
        return statistics.median(step.taken for step in self.measured(name))


def run_rank(job: Job, queued_ns: Callable[[], int]) -> None:
    """Be one rank; torchrun has set its number. `queued_ns` tells how long it had to queue."""
    torch.set_num_threads(1)
    settle(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    dist.init_process_group("gloo")
    leads = dist.get_rank() == 0
    lanes: dict[str, tuple[Any, Any, Any]] = {}
    for name, path in job.plans.items():
        random.seed(job.seed)
        torch.manual_seed(job.seed)
        layers, loss_fn, batches, *rest = _factory(job.model)()
        pipe = Pipeline(read_plan(path), layers, loss_fn, seed=job.seed)
        parameters = list(pipe.parameters())
        make_optimizer = rest[0] if rest else torch.optim.AdamW
        lanes[name] = (pipe, make_optimizer(parameters) if parameters else None, iter(batches))
    names = list(lanes)
    answer: dict[str, list[Step]] = {name: [] for name in names}
    traces: dict[str, list[bytes]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    turn, goes_on = 0, torch.tensor([True])
    deadline = time.monotonic() + job.limit_s
    while goes_on:
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            pipe, optimizer, batches = lanes[name]
            inputs, targets = next(batches)
            dist.barrier()
            before_ns = queued_ns()
            loss = pipe.step(inputs, targets)
            with pipe.optimizer_step():
                if optimizer is not None:
                    optimizer.step()
            mine_ns = torch.tensor([queued_ns() - before_ns])
            if optimizer is not None:
                optimizer.zero_grad()
            timeline = pipe.timeline()
            everyone = [torch.zeros_like(mine_ns) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, mine_ns)
            if not leads:
                continue
            answer[name].append(
                Step(
                    step_ns=timeline.step_ns,
                    bubble_fraction=timeline.bubble_fraction,
                    busy_ns=timeline.busy_ns.tolist(),
                    queued_ns=[int(each) for each in everyone],
                    loss=loss,
                )
            )
            traces[name].append(chrome.dumps(timeline))
        turn += 1
        if leads:
            calm = min(_num_calm(steps[job.warmup :]) for steps in answer.values())
            print(STEP_DONE, min(calm, job.steps), job.steps, flush=True)
            enough = calm >= job.steps or time.monotonic() > deadline
            goes_on[0] = turn < job.warmup + job.steps or not enough
        dist.broadcast(goes_on, 0)
    if leads:
        done = Answer(steps=answer, warmup=job.warmup, wanted=job.steps)
        for name, path in job.traces.items():
            Path(path).write_bytes(traces[name][done.typical(name)])
        Path(job.answer).write_bytes(msgspec.json.encode(done))
    dist.barrier()
    dist.destroy_process_group()


def _num_calm(steps: Sequence[Step]) -> int:
    return sum(step.taken <= CALM for step in steps)


def _factory(model: str) -> Any:
    module, _, name = model.partition(":")
    return getattr(import_module(module), name)


if __name__ == "__main__":
    with run_queue_ns() as reading:
        run_rank(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job), reading)
    # gloo's threads may outlive the group by a moment; nothing is left to be said
    sys.stdout.flush()
