"""What the ranks of the fill runtime's benchmark run, and measure."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from benchmarks.fill_cases import (
    LEAST_NS,
    MS,
    PROFILE_STEPS,
    Case,
)
from benchmarks.fill_simulated import factors_of
from benchmarks.models import SleepingLayer, sleeping_loss
from executor.fill import giving_way
from executor.fill.report import spans_of
from octotune.contract import Plan
from octotune.fill.plan import FillPlan
from simulator import chrome
from simulator.timeline import Timeline


def bubbles_ns(timeline: Timeline, least_ns: int = LEAST_NS) -> int:
    """Return the idle time of all devices in intervals of at least so much."""
    total = 0
    for begin, end in pairwise(timeline.schedule.offsets.tolist()):
        edges = [0]
        for at in range(begin, end):
            edges += [int(timeline.start_ns[at]), int(timeline.end_ns[at])]
        edges.append(timeline.step_ns)
        gaps = [b - a for a, b in zip(edges[::2], edges[1::2], strict=True)]
        total += sum(gap for gap in gaps if gap >= least_ns)
    return total


def sleeping_of(plan: Plan, factors: Any = None) -> list[SleepingLayer]:
    """Return the layers of a plan; `factors` [stage, microbatch] scale their times."""
    homes = [index for index, stage in enumerate(plan.stages) for _ in range(*stage.layers)]
    return [
        SleepingLayer(
            (layer.forward_ns / MS, layer.input_grad_ns / MS, layer.weight_grad_ns / MS),
            factors=None if factors is None else factors[home].tolist(),
        )
        for home, layer in zip(homes, plan.workload.layers, strict=True)
    ]


def _ask_for_nothing(length_ns: int, thread: int = 0) -> None:
    """Take the place of `giving_way.ask_for`."""


def alternating(rank: int, fill: FillPlan, case: Case, rounds: int) -> dict[str, Any]:
    """Run steps with and without fill work in turns; rank 0 returns what was measured."""
    from executor import Pipeline
    from executor.fill.run import FillOptions, attach

    if not case.gives_way:
        giving_way.ask_for = _ask_for_nothing
    plan = fill.plan
    m, size = plan.num_microbatches, len(plan.cluster.devices)
    table = factors_of(rounds, plan, case.jitter)
    layers = sleeping_of(plan, table[0])
    pipe = Pipeline(plan, layers, sleeping_loss, timeout_s=60)
    run = attach(
        pipe,
        fill,
        FillOptions(
            profile_steps=PROFILE_STEPS, alternate=True, steps_end_together=True, ahead=case.ahead
        ),
    )
    inputs = torch.arange(m, dtype=torch.float32).view(-1, 1).repeat(1, 256)
    targets = torch.zeros(m, 1)
    homes = [index for index, stage in enumerate(plan.stages) for _ in range(*stage.layers)]
    gc.collect()
    gc.disable()
    answer: dict[str, Any] = {"on": [], "off": [], "busy": [], "bubbles": [], "losses": []}
    for number in range(PROFILE_STEPS + 2 * rounds):
        turn = min(number, PROFILE_STEPS) + max(0, number - PROFILE_STEPS) // 2
        for layer, home in zip(layers, homes, strict=True):
            layer.factors = table[turn, home].tolist()
        dist.barrier()
        began = time.perf_counter_ns()
        loss = pipe.step(inputs, targets)
        with pipe.optimizer_step():
            pass
        ended = time.perf_counter_ns()
        step = run.steps[-1]
        busy = sum(handover.busy_ns for _, handover in step.handovers)
        timeline = pipe.timeline()
        found: list[Any] = [None] * size
        dist.all_gather_object(found, (began, ended, busy))
        length = max(end for _, end, _ in found) - min(begin for begin, _, _ in found)
        if number < PROFILE_STEPS:
            continue
        answer["losses"].append(loss)
        if step.filled:
            answer["on"].append(length)
            answer["busy"].append(sum(used for _, _, used in found))
        else:
            answer["off"].append(length)
            answer["bubbles"].append(bubbles_ns(timeline))
    outcome = run.report()
    run.close()
    answer["outcome"] = msgspec.to_builtins(outcome)
    return answer


def plain_steps(rank: int, plan: Plan, steps: int) -> list[int]:
    """Return the lengths of steps without fill work."""
    from executor import Pipeline

    pipe = Pipeline(plan, sleeping_of(plan), sleeping_loss, timeout_s=60)
    inputs, targets = (
        torch.zeros(plan.num_microbatches, 256),
        torch.zeros(plan.num_microbatches, 1),
    )
    lengths = []
    for _ in range(steps):
        dist.barrier()
        began = time.perf_counter_ns()
        pipe.step(inputs, targets)
        found: list[Any] = [None] * len(plan.cluster.devices)
        dist.all_gather_object(found, (began, time.perf_counter_ns()))
        lengths.append(max(end for _, end in found) - min(begin for begin, _ in found))
    return lengths[1:]


def queueing(rank: int, fill: FillPlan, most_steps: int) -> dict[str, Any]:
    """Run a fill plan until its jobs are done; return when each was, in filled steps."""
    from executor import Pipeline
    from executor.fill.run import FillOptions, attach

    plan = fill.plan
    size = len(plan.cluster.devices)
    # weight gradients in the plan's order, as simulated: floating ones take bubbles for themselves
    pipe = Pipeline(plan, sleeping_of(plan), sleeping_loss, timeout_s=60, float_limit="off")
    run = attach(pipe, fill, FillOptions(profile_steps=PROFILE_STEPS, steps_end_together=True))
    inputs, targets = (
        torch.zeros(plan.num_microbatches, 256),
        torch.zeros(plan.num_microbatches, 1),
    )
    gc.collect()
    gc.disable()
    lengths: list[int] = []
    found: list[Any] = [None] * size
    drawn: dict[str, Any] = {}
    for number in range(PROFILE_STEPS + most_steps):
        dist.barrier()
        began = time.perf_counter_ns()
        pipe.step(inputs, targets)
        with pipe.optimizer_step():
            pass
        dist.all_gather_object(found, (began, time.perf_counter_ns(), run.done))
        lengths.append(max(end for _, end, _ in found) - min(begin for begin, _, _ in found))
        if number == PROFILE_STEPS + 2:
            timeline = pipe.timeline()
            began_ns = pipe.trace().began_ns
            rows = spans_of(run.steps[-1], rank, pipe.clock_offset_ns)
            everyone: list[Any] = [None] * size
            dist.all_gather_object(everyone, (began_ns, rows))
            drawn = {
                "timeline": chrome.dumps(timeline, derived=False).decode(),
                "began_ns": min(at for at, _ in everyone),
                "rows": [row for _, mine in everyone for row in mine],
            }
        if all(done for _, _, done in found):
            break
    mine = {str(each.job): [each.started, each.ended, each.samples_done] for each in run.runs}
    dist.all_gather_object(found, mine)
    outcome = run.report()
    run.close()
    jobs: dict[str, list[int]] = {}
    for rows in found:
        jobs |= rows
    return {
        "steps": lengths,
        "jobs": jobs,
        "outcome": msgspec.to_builtins(outcome),
        "drawn": drawn,
    }


class _Slowed(torch.nn.Module):
    """A layer that sleeps before its forward, so that other ranks wait for it."""

    def __init__(self, make: Callable[[], torch.nn.Module]) -> None:
        super().__init__()
        self.layer = make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        return self.layer(x)


def losses_of(rank: int, fill: FillPlan | None, plan: Plan, steps: int) -> dict[str, Any]:
    """Train a small GPT some steps, with fill jobs or without; return its losses."""
    from benchmarks.gpt import tiny_factory
    from executor import Pipeline
    from executor.fill.run import FillOptions, attach

    torch.manual_seed(0)
    layers, loss_fn, batches, optimizer_fn = tiny_factory()
    pipe = Pipeline(plan, [partial(_Slowed, make) for make in layers], loss_fn, timeout_s=60)
    run = None
    if fill is not None:
        run = attach(pipe, fill, FillOptions(profile_steps=4, steps_end_together=True, ahead=True))
    optimizer = optimizer_fn(list(pipe.parameters()))
    losses = []
    for _ in range(steps):
        inputs, targets = next(batches)
        losses.append(pipe.step(inputs, targets))
        with pipe.optimizer_step():
            optimizer.step()
            optimizer.zero_grad()
    if run is not None:
        jobs = run.report().jobs
        run.close()
        failed = [job.failure for job in jobs if job.failure is not None]
        return {
            "losses": losses,
            "micro_steps": sum(j.micro_steps for j in jobs),
            "failed": failed,
        }
    return {"losses": losses}
