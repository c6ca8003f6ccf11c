"""Run several plans of one model in turns, step by step, in the same processes.

    torchrun --standalone --nproc-per-node N -m benchmarks.alternate job.json

What is compared meets the same machine at the same time: every rank builds one `Pipeline` a plan,
and each turn takes one step of each on the same minibatch, beginning with another one each turn.
A machine that slows down for a while slows them all. The job says which plans, whose model, how
many turns and where the answer goes; rank 0 writes it, and says on standard output which step has
ended, for a bar.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from executor import Pipeline
from octotune.contract import read_plan
from simulator import chrome

STEP_DONE = "step done"


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to run. `model` is MODULE:FACTORY; `plans` maps a name to a plan file."""

    plans: dict[str, str]
    model: str
    warmup: int
    steps: int
    answer: str  # where the `Answer` goes
    traces: dict[str, str]  # a plan's name -> where the trace of its median step goes
    seed: int = 0


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One measured step of one plan."""

    step_ns: int
    bubble_fraction: float
    busy_ns: list[int]  # per device
    loss: float


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of each plan in order, warmup included: losses begin at the first."""

    steps: dict[str, list[Step]]
    warmup: int

    def measured(self, name: str) -> list[Step]:
        """Return the steps after warmup."""
        return self.steps[name][self.warmup :]

    def step_ns(self, name: str) -> int:
        """Return the median step after warmup."""
        return round(statistics.median(step.step_ns for step in self.measured(name)))


def run_rank(job: Job) -> None:
    """Be one rank; torchrun has set its number."""
    torch.set_num_threads(1)
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
    texts: dict[str, list[tuple[int, bytes]]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    for turn in range(job.warmup + job.steps):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            pipe, optimizer, batches = lanes[name]
            inputs, targets = next(batches)
            dist.barrier()
            loss = pipe.step(inputs, targets)
            with pipe.optimizer_step():
                if optimizer is not None:
                    optimizer.step()
            if optimizer is not None:
                optimizer.zero_grad()
            timeline = pipe.timeline()
            if not leads:
                continue
            answer[name].append(
                Step(
                    step_ns=timeline.step_ns,
                    bubble_fraction=timeline.bubble_fraction,
                    busy_ns=timeline.busy_ns.tolist(),
                    loss=loss,
                )
            )
            if turn >= job.warmup:
                texts[name].append((timeline.step_ns, chrome.dumps(timeline)))
            print(STEP_DONE, name, flush=True)
    if leads:
        for name, path in job.traces.items():
            ordered = sorted(texts[name], key=lambda pair: pair[0])
            Path(path).write_bytes(ordered[(len(ordered) - 1) // 2][1])
        done = Answer(steps=answer, warmup=job.warmup)
        Path(job.answer).write_bytes(msgspec.json.encode(done))
    dist.barrier()
    dist.destroy_process_group()


def _factory(model: str) -> Any:
    module, _, name = model.partition(":")
    return getattr(import_module(module), name)


if __name__ == "__main__":
    run_rank(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job))
    # gloo's threads may outlive the group by a moment; nothing is left to be said
    sys.stdout.flush()
