"""What ranks run in the tests of the fill runtime: top-level, so that spawn finds it."""

from __future__ import annotations

import dataclasses
import random
import time
from pathlib import Path

import msgspec
import numpy as np
import torch
from executor_tools import make_plan, make_workload, one_f_one_b_rows
from torch import nn

from octotune.contract import Cluster
from octotune.fill.jobs import Configuration, FillJob, MicroStep
from octotune.fill.make import make_fill_plan
from octotune.fill.packing import Margins
from octotune.fill.policies import find_policy

MS = 10**6
UNIT_MS = 6


class Slow(nn.Module):
    """A layer that draws random numbers and sleeps, forwards and backwards."""

    def __init__(self, width=8):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.drop = nn.Dropout(0.4)

    def forward(self, x):
        time.sleep(UNIT_MS / 1e3)
        x = self.drop(self.linear(x)) * float(0.5 + np.random.rand()) * (0.5 + random.random())
        if x.requires_grad:
            x.register_hook(lambda grad: time.sleep(2 * UNIT_MS / 1e3))
        return x


def slow_layers(number, width=8):
    torch.manual_seed(11)
    return [Slow(width) for _ in range(number)]


def main_plan(num_devices=2, num_microbatches=4, cluster=None, **sizes):
    workload = make_workload(
        num_devices,
        forward_ns=UNIT_MS * MS,
        input_grad_ns=UNIT_MS * MS,
        weight_grad_ns=UNIT_MS * MS,
        **sizes,
    )
    return make_plan(
        one_f_one_b_rows(num_devices, num_microbatches),
        [(1, device) for device in range(num_devices)],
        num_microbatches,
        workload=workload,
        cluster=cluster,
    )


def loose_plan():
    """A job that its plan gives one micro-step of each bubble, though there is time for more."""
    fill = fill_plan([job("a", "counting", 0.8, 10_000)])
    (packing,) = fill.packings
    steps = tuple(tuple(bubble[:1] for bubble in step) for step in packing.steps)
    made = sum(map(len, (bubble for step in steps for bubble in step)))
    packing = msgspec.structs.replace(packing, steps=steps, samples=made)
    return msgspec.structs.replace(fill, packings=(packing,))


WIDE = 40
STATE_BYTES = 2 * WIDE * WIDE * 4  # Adam's two moments of a weight; those of a bias stay


def leaving_plan():
    """A job that has room only while the main job's Adam moments are on the host."""
    cluster = Cluster.equal(2)
    devices = tuple(
        msgspec.structs.replace(device, memory_bytes=STATE_BYTES + 4000, offload_bandwidth=10**9)
        for device in cluster.devices
    )
    plan = main_plan(
        cluster=msgspec.structs.replace(cluster, devices=devices), state_bytes=STATE_BYTES
    )
    configuration = Configuration(
        batch_size=1, micro_steps=(MicroStep(time_ns=MS, memory_bytes=STATE_BYTES),)
    )
    wide = FillJob(
        name="wide",
        kind="inference",
        samples=10_000,
        factory="fill_ranks:counting",
        configurations=(configuration,),
    )
    return make_fill_plan(
        plan,
        [wide],
        find_policy("fifo"),
        margins=Margins(threshold_ns=2 * MS, margin=0.2),
        state_share=1.0,
    )


def training(width=8):
    """A fill job that trains, with dropout, and draws of all three generators."""
    return Training(width)


class Training:
    def __init__(self, width):
        self.width = width

    def setup(self, device):
        torch.manual_seed(random.randrange(100))
        self.model = nn.Sequential(nn.Linear(self.width, self.width), nn.Dropout(0.5))
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def step(self):
        x = torch.randn(4, self.width) * np.random.rand()
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return 4

    def state_dict(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def teardown(self):
        del self.model


def counting(ms=1.0, raises_at=0):
    return Counting(ms, raises_at)


class Counting:
    """Counts its steps; raises at one of them."""

    def __init__(self, ms, raises_at):
        self.ms, self.raises_at, self.steps = ms, raises_at, 0

    def setup(self, device):
        pass

    def step(self):
        self.steps += 1
        time.sleep(self.ms / 1e3)
        if self.steps == self.raises_at:
            raise RuntimeError("the data ran out")
        return 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]

    def teardown(self):
        pass


def job(name, factory, ms, samples, kind="inference", batch_size=1, **fields):
    configuration = Configuration(
        batch_size=batch_size, micro_steps=(MicroStep(time_ns=int(ms * MS)),)
    )
    return FillJob(
        name=name,
        kind=kind,
        samples=samples,
        factory=f"fill_ranks:{factory}",
        configurations=(configuration,),
        **fields,
    )


def fill_plan(jobs, plan=None, policy="fifo"):
    return make_fill_plan(
        main_plan() if plan is None else plan,
        jobs,
        find_policy(policy),
        margins=Margins(threshold_ns=2 * MS, margin=0.2),
    )


def batch(num_microbatches=4, width=8):
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randn(num_microbatches * 2, width, generator=generator),
        torch.randn(num_microbatches * 2, width, generator=generator),
    )


def run_main(plan, fill, steps, options=None, each=None, *, width=8, adam=False):
    """Train some steps; return losses, parameters, and the fill run."""
    from executor import Pipeline
    from executor.fill.run import attach

    layers = slow_layers(len(plan.stages), width)
    pipe = Pipeline(plan, layers, nn.functional.mse_loss, timeout_s=30)
    params = list(pipe.parameters())
    optimizer = torch.optim.Adam(params) if adam else torch.optim.SGD(params, lr=0.05)
    run = None if fill is None else attach(pipe, fill, options, optimizer)
    torch.manual_seed(21)
    random.seed(21)
    np.random.seed(21)
    losses = []
    for number in range(steps):
        losses.append(pipe.step(*batch(plan.num_microbatches, width)))
        with pipe.optimizer_step():
            optimizer.step()
            optimizer.zero_grad()
        if each is not None:
            each(number, run)
    found = {name: param.tolist() for name, param in pipe.named_parameters()}
    return losses, found, run


def beside(rank, fill, steps, options=None):
    """Run without and with fill jobs; return what both gave and what the jobs did."""
    plain = run_main(fill.plan, None, steps)[:2]
    losses, params, run = run_main(fill.plan, fill, steps, options)
    run.close()
    return plain, (losses, params), summary(run)


def summary(run):
    return [
        (
            run.fill.jobs[each.job].name,
            each.work.counts.samples,
            each.work.failure,
            each.work.cancelled,
            each.started,
            each.ended,
        )
        for each in run.runs
    ]


def moving(rank, fill, steps, options):
    """Run a plan in which a job moves; return what became of it, and its last state."""
    _, _, run = run_main(fill.plan, fill, steps, options)
    states = {each.number: each.work.task.steps for each in run.runs if each.work.task is not None}
    run.close()
    return summary(run), states


def cancelling(rank, fill, steps, options):
    """Cancel job "a" from rank 1 after a few steps."""

    def each(number, run):
        if rank == 1 and number == 4:
            run.cancel("a")

    _, _, run = run_main(fill.plan, fill, steps, options, each)
    run.close()
    return summary(run)


def cancelling_by_file(rank, fill, steps, options):
    """Cancel job "a" by a file in the fill folder, which the last rank writes."""

    def each(number, run):
        if rank == 1 and number == 4:
            Path(options.folder, "cancel-a").touch()

    _, _, run = run_main(fill.plan, fill, steps, options, each)
    run.close()
    return summary(run)


def leaving(rank, fill, steps, options):
    """Train with Adam, whose moments leave; return both runs, what was away, and the jobs."""
    plain = run_main(fill.plan, None, steps, width=WIDE, adam=True)[:2]
    away = []

    def each(number, run):
        if number == 0:
            missing = run.away.missing_bytes

            def watched(instruction, deadline_ns):
                found = missing(instruction, deadline_ns)
                away.append((run.away._state.away_bytes, found))
                return found

            run.away.missing_bytes = watched

    losses, params, run = run_main(fill.plan, fill, steps, options, each, width=WIDE, adam=True)
    refused = [each.work.counts.refused_memory for each in run.runs]
    run.close()
    return plain, (losses, params), away, summary(run), refused


def confirming(rank, fill, steps, options):
    """Confirm the waits; return shares of all devices as the report has them, and the jobs."""
    _, _, run = run_main(fill.plan, fill, steps, options)
    outcome = run.report()
    run.close()
    shares = [device.confirmed for device in outcome.devices]
    return shares, outcome.filled_steps, [job.samples for job in outcome.jobs]


def ahead(rank, fill, steps, options):
    """Return what the jobs made, and the plan's samples, with and without working ahead."""
    found = []
    for on in (False, True):
        _, _, run = run_main(fill.plan, fill, steps, dataclasses.replace(options, ahead=on))
        outcome = run.report()
        run.close()
        found.append([(job.samples, job.predicted_samples, job.failure) for job in outcome.jobs])
    return found


def several(rank, cases):
    """Run functions of this module one after the other."""
    return [globals()[name](rank, *arguments) for name, *arguments in cases]
