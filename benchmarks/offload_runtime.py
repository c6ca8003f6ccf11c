"""Do real steps with offload keep their bits, their planned peak and their time?

Four gloo ranks run sleeping layers that save real tensors (`benchmarks.saving`), one order with
its copies and the same without, in turns. Losses and every gradient of every step are compared;
the peak of saved bytes is counted from the lifetimes of storages and held against the plan's.

The plan counts an action's saved bytes for as long as it runs, and so do the layers that are
measured: they save, and then sleep. Where layers sleep first, what F saves is there only as it
ends; such layers run some steps too, and hold less than the plan says.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from benchmarks import ranks, record
from benchmarks.saving import (
    SAVED_BYTES,
    saving_batches,
    saving_layers,
    saving_loss,
    saving_workload,
)
from executor.offload.planned import saved_peak_bytes, saved_usage
from octotune.contract import Cluster, Plan, Workload, build_costs
from octotune.model.run_queue import run_queue_ns
from octotune.offload.planning import plan_copies
from octotune.schedules import FAMILIES, plan_from
from simulator.actions import Kind
from simulator.engine import simulate

RANKS = 4
NUM_MICROBATCHES = 8
# F, I and W of a device's layers: a copy out (k / 2 of them all) is longer than F
TIMES_MS = (14.0, 26.0, 20.0)
ORDERS = ("interleaved-v2", "v-half")
_BYTES = 2 * SAVED_BYTES


def times_of(order: str) -> list[tuple[float, float, float]]:
    """Return F, I and W of the layers, one a stage; two stages of a device share its time."""
    num_stages = len(FAMILIES[order].placement(RANKS))
    f, i, w = (time_ms * RANKS / num_stages for time_ms in TIMES_MS)
    return [(f, i, w)] * num_stages


def free_plan(order: str, own_ms: Sequence[float]) -> Plan:
    """Return an order on devices without a memory limit, without copies.

    `own_ms`: what a stage takes in F, I and W beside its layer's sleep.
    """
    workload = saving_workload(times_of(order), own_ms)
    return plan_from(FAMILIES[order], workload, Cluster.equal(RANKS), NUM_MICROBATCHES)


def offloading_cluster(workload: Workload, k: float, memory_bytes: int) -> Cluster:
    """Return devices whose round trip of a layer's bytes takes k of its forward and backward."""
    layer = workload.layers[0]
    work_ns = layer.forward_ns + layer.input_grad_ns + layer.weight_grad_ns
    cluster = Cluster.equal(RANKS)
    return msgspec.structs.replace(
        cluster,
        devices=tuple(
            msgspec.structs.replace(
                device,
                memory_bytes=memory_bytes,
                offload_bandwidth=round(2 * _BYTES * 1e9 / (k * work_ns)),
            )
            for device in cluster.devices
        ),
    )


def with_copies(free: Plan, k: float, longer: float = 0.005) -> Plan:
    """Return the order with the copies of the least memory at which its step is hardly longer.

    `longer`: by how large a part the planned step may grow.
    """
    schedule = free.schedule()

    def planned(memory_bytes: int) -> tuple[Plan, int] | None:
        cluster = offloading_cluster(free.workload, k, memory_bytes)
        costs = build_costs(free.workload, cluster, free.stages, free.num_microbatches)
        found = plan_copies(schedule, costs)
        if found.shortfall_bytes or found.copies is None:
            return None
        plan = msgspec.structs.replace(free, cluster=cluster, offload=found.copies.words())
        return plan, found.timeline.step_ns

    costs = build_costs(free.workload, free.cluster, free.stages, free.num_microbatches)
    timeline = simulate(schedule, costs)
    most_ns = timeline.step_ns * (1 + longer)
    best: Plan | None = None
    low, high = 0, int(timeline.peak_bytes.max())
    while high - low > SAVED_BYTES // 8:
        middle = (low + high) // 2
        found = planned(middle)
        if found is not None and found[1] <= most_ns:
            best, high = found[0], middle
        else:
            low = middle
    if best is None:
        raise ValueError(f"nothing can leave at k = {k} without a longer step")
    return best


def own_times(rank: int, order: str, steps: int) -> list[float]:
    """Return what a stage takes in F, I and W beside its sleep, in ms: medians of real steps."""
    from executor import Pipeline, settle

    settle(rank, RANKS)
    pipe = Pipeline(
        free_plan(order, (0.0, 0.0, 0.0)),
        saving_layers(times_of(order)),
        saving_loss,
        timeout_s=60,
        float_limit="off",
    )
    batches = saving_batches(NUM_MICROBATCHES)
    beside: dict[Kind, list[float]] = {kind: [] for kind in Kind}
    f, i, w = times_of(order)[0]
    sleeps = {Kind.F: f, Kind.I: i, Kind.W: w, Kind.B: i + w}
    for turn in range(steps):
        pipe.step(*next(batches))
        starts, ends = pipe.runtime.clock.times_ns()
        for op in pipe.runtime.program.ops if turn else ():
            took = (ends[op.position] - starts[op.position]) / 1e6
            beside[op.kind].append(took - sleeps[op.kind])
    middle = {kind: statistics.median(found) for kind, found in beside.items() if found}
    whole = middle.get(Kind.B, 0.0)
    mine = [middle[Kind.F], middle.get(Kind.I, whole / 2), middle.get(Kind.W, whole / 2)]
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, mine)
    return [statistics.median(column) for column in zip(*everyone, strict=True)]


def measured(
    rank: int, plans: dict[str, Plan], order: str, steps: int, warmup: int
) -> dict[str, Any]:
    """Run plans in turns; return rank 0's view of every rank's answers."""
    from executor import Pipeline, settle

    settle(rank, RANKS)
    pipes, optimizers, batches = {}, {}, {}
    for name, plan in plans.items():
        pipe = Pipeline(
            plan,
            saving_layers(times_of(order)),
            saving_loss,
            timeout_s=60,
            float_limit="off",
            watch_saved=name != "free",
        )
        pipes[name] = pipe
        optimizers[name] = torch.optim.SGD(pipe.parameters(), lr=0.05)
        batches[name] = saving_batches(NUM_MICROBATCHES)
    names = list(plans)
    losses: dict[str, list[float]] = {name: [] for name in names}
    digests: dict[str, list[str]] = {name: [] for name in names}
    lengths: dict[str, list[float]] = {name: [] for name in names}
    spans: dict[str, dict[tuple[int, int], list[int]]] = {name: {} for name in names}
    with run_queue_ns() as queued_ns:
        taken: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(steps):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                pipe = pipes[name]
                inputs, targets = next(batches[name])
                dist.barrier()
                before, began = queued_ns(), time.perf_counter()
                losses[name].append(pipe.step(inputs, targets))
                took = time.perf_counter() - began
                # the slowest rank's step, and the share that other processes took
                both = torch.tensor([took, (queued_ns() - before) / 1e9 / took])
                dist.all_reduce(both, dist.ReduceOp.MAX)
                digest = hashlib.sha256()
                for param in pipe.parameters():
                    digest.update(param.grad.numpy().tobytes())
                digests[name].append(digest.hexdigest())
                optimizers[name].step()
                optimizers[name].zero_grad()
                if turn >= warmup:
                    starts, ends = pipe.runtime.clock.times_ns()
                    for op in pipe.runtime.program.ops:
                        took_ns = ends[op.position] - starts[op.position]
                        spans[name].setdefault((op.stage, int(op.kind)), []).append(took_ns)
                    lengths[name].append(float(both[0]))
                    taken[name].append(float(both[1]))
    mine = {
        "losses": losses,
        "digests": digests,
        "spans": {
            name: [(key, statistics.median(times)) for key, times in found.items()]
            for name, found in spans.items()
        },
        "offload": {
            name: msgspec.to_builtins(pipe.offloaded())
            for name, pipe in pipes.items()
            if name != "free"
        },
        "as_planned": {name: as_planned(pipes[name]) for name in names if name != "free"},
        "late_savers": {
            name: late_savers(plan, order, 6) for name, plan in plans.items() if name != "free"
        },
    }
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, mine)
    return {"ranks": everyone, "lengths": lengths, "taken": taken}


def late_savers(plan: Plan, order: str, steps: int) -> int:
    """Return this rank's peak of saved bytes with layers that sleep before they save."""
    from executor import Pipeline

    pipe = Pipeline(
        plan,
        saving_layers(times_of(order), sleeps_first=True),
        saving_loss,
        timeout_s=60,
        float_limit="off",
        watch_saved=True,
    )
    batches = saving_batches(NUM_MICROBATCHES)
    for _ in range(steps):
        pipe.step(*next(batches))
    found = pipe.offloaded()
    assert found is not None
    return found.saved_peak_bytes


def as_planned(pipe: Any) -> float:
    """Return in how large a part of the last step's actions, halfway, the plan's bytes were held.

    Within 5 % of the plan's peak: a copy may begin a little earlier or later.
    """
    predicted, device = pipe.predicted, pipe.device_index
    row = slice(*predicted.schedule.offsets[device : device + 2])
    planned_at, planned = saved_usage(predicted, device)
    at, held = (np.array(column) for column in zip(*pipe.saved_usage(), strict=True))
    starts, ends = (np.array(times) for times in pipe.runtime.clock.times_ns())
    halfway = (predicted.start_ns[row] + predicted.end_ns[row]) // 2
    expected = planned[np.searchsorted(planned_at, halfway, side="right") - 1]
    found = held[np.searchsorted(at, (starts + ends) // 2, side="right") - 1]
    return float((abs(found - expected) <= 0.05 * planned.max()).mean())


def replayed_peaks(plan: Plan, everyone: Any, name: str) -> list[int]:
    """Return each device's peak of saved bytes in the plan simulated with the measured times."""
    costs = build_costs(plan.workload, plan.cluster, plan.stages, plan.num_microbatches)
    columns = {
        kind: getattr(costs, field).copy()
        for kind, field in (
            (Kind.F, "forward_ns"),
            (Kind.I, "input_grad_ns"),
            (Kind.W, "weight_grad_ns"),
        )
    }
    for one in everyone:
        for (stage, kind), took_ns in one["spans"][name]:
            if kind == Kind.B:  # split as planned
                halves = columns[Kind.I][stage] + columns[Kind.W][stage]
                columns[Kind.I][stage] = round(took_ns * columns[Kind.I][stage] / halves)
                columns[Kind.W][stage] = round(took_ns) - columns[Kind.I][stage]
            else:
                columns[Kind(kind)][stage] = round(took_ns)
    costs = dataclasses.replace(
        costs,
        forward_ns=columns[Kind.F],
        backward_ns=columns[Kind.I] + columns[Kind.W],
        input_grad_ns=columns[Kind.I],
        weight_grad_ns=columns[Kind.W],
    )
    timeline = simulate(plan.schedule(), costs, plan.copies())
    return [saved_peak_bytes(timeline, device) for device in range(RANKS)]


def rows_of(
    order: str, ks: dict[str, float], plans: dict[str, Plan], found: Any
) -> tuple[Any, Any]:
    """Return the rows of both tables."""
    everyone = found["ranks"]
    times, peaks = [], []
    free_losses = everyone[0]["losses"]["free"]
    for name, k in ks.items():
        steps = len(free_losses)
        same = everyone[0]["losses"][name] == free_losses and all(
            one["digests"][name] == one["digests"]["free"] for one in everyone
        )
        pairs = list(zip(found["lengths"][name], found["lengths"]["free"], strict=True))
        with_ms, without_ms = (
            1e3 * statistics.median(column) for column in zip(*pairs, strict=True)
        )
        devices = [one["offload"][name] for one in everyone]
        late = sum(entry["steps"] for device in devices for entry in device["late"])
        kept = sum(entry["steps"] for device in devices for entry in device["kept"])
        plan = plans[name]
        costs = build_costs(plan.workload, plan.cluster, plan.stages, plan.num_microbatches)
        predicted = simulate(plan.schedule(), costs, plan.copies()).step_ns / 1e6
        times.append(
            (
                *(order, k, sum(len(row) for row in plan.offload or ()) // 2),
                f"{steps} of {steps}" if same else "no",
                round(predicted, 1),
                round(with_ms, 1),
                round(without_ms, 1),
                round(100 * (statistics.median(a / b for a, b in pairs) - 1), 2),
                round(100 * (with_ms / without_ms - 1), 2),
                late,
                kept,
                round(100 * statistics.median(found["taken"][name]), 1),
                round(100 * statistics.median(found["taken"]["free"]), 1),
            )
        )
        without = simulate(
            plans["free"].schedule(),
            build_costs(plan.workload, plan.cluster, plan.stages, plan.num_microbatches),
        )

        replayed = replayed_peaks(plan, everyone, name)
        peaks += [
            (
                *(order, k, device["device"]),
                round(saved_peak_bytes(without, device["device"]) / 2**20, 2),
                round(device["planned_saved_peak_bytes"] / 2**20, 2),
                round(replayed[device["device"]] / 2**20, 2),
                round(device["saved_peak_bytes"] / 2**20, 2),
                round(
                    100 * (device["saved_peak_bytes"] / device["planned_saved_peak_bytes"] - 1),
                    2,
                ),
                round(100 * (device["saved_peak_bytes"] / replayed[device["device"]] - 1), 2),
                round(100 * one["as_planned"][name]),
                round(one["late_savers"][name] / 2**20, 2),
                round(device["moved_bytes"] / 2**20, 1),
                round(100 * device["lane_busy"]),
            )
            for one, device in zip(everyone, devices, strict=True)
        ]
    return times, peaks


def main(arguments: list[str]) -> None:
    """Plan, measure, write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", nargs="*", default=list(ORDERS), choices=ORDERS)
    parser.add_argument("--k", nargs="*", type=float, default=[0.7])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dry", action="store_true", help="print, write no record")
    options = parser.parse_args(arguments)
    beside: list[str] = []
    times: list[Any] = []
    peaks: list[Any] = []
    for order in options.orders:
        ks = {f"k {k}": k for k in options.k}
        own = ranks.run(RANKS, own_times, order, 6)
        beside.append(f"{order}: " + ", ".join(f"{each:.2f}" for each in own))
        free = free_plan(order, own)
        plans = {"free": free, **{name: with_copies(free, k) for name, k in ks.items()}}
        found = ranks.run(RANKS, measured, plans, order, options.steps, 2)
        one, two = rows_of(order, ks, plans, found)
        times += one
        peaks += two
    made = record.Record(
        benchmark="offload_runtime",
        workload=f"saving layers, {' and '.join(options.orders)}",
        question="Do real steps with offload keep their bits, their planned peak and their time?",
        command=record.command("offload_runtime", arguments),
        seed=0,
        tables=(
            record.Table(
                title=f"{options.steps} steps of each, in turns; 2 of them warm up",
                columns=(
                    *("order", "k", "copied a step", "losses, gradients bit-equal"),
                    *("plan ms", "with ms", "without ms", "pairs' median %", "medians %"),
                    *("late reloads", "stayed", "others took, with %", "without %"),
                ),
                rows=tuple(times),
            ),
            record.Table(
                title="Peak of saved bytes, MiB",
                columns=(
                    *("order", "k", "device", "plan without", "plan"),
                    *("plan, measured times", "measured", "off plan %", "off measured times %"),
                    *("actions as planned %", "measured, layers that save last"),
                    *("moved MiB a step", "lane busy %"),
                ),
                rows=tuple(peaks),
            ),
        ),
        shows=(
            "Bit-equal: the loss of each step and every gradient of each step on every rank, with "
            "the optimizer's steps between.",
            "Measured peaks are counted from the lifetimes of the storages that autograd saved "
            "and reloads made, over all steps; the plan's are the simulator's, of saved bytes "
            "alone.",
            "`plan, measured times` is the same plan simulated with the median times that its "
            "actions took in this run.",
            "Actions as planned: in the last step, halfway through an action, the bytes held were "
            "within 5 % of the plan's peak of what the plan has there.",
            "The plan counts what an action saves from the start of F to the end of I or B. The "
            "layers keep to that: they save and then sleep, sleep and then let go. With `layers "
            "that save last` it is the other way round, in 6 steps: the plan is what they stay "
            "below.",
            "Others took: how much of the slowest rank's step other processes of the machine held "
            "its core, medians.",
            "Late and stayed count copies over all steps: a late reload held a backward up by "
            "0.5 ms or more, one that stayed was called back before it had left.",
        ),
        does_not_show=(
            "A real link: on a CPU the copies are real, their pace is that of a thread that keeps "
            "to the plan's bandwidth.",
            "Kernels that copies slow down: the layers sleep. GPUs.",
        ),
        notes=(
            f"{RANKS} gloo ranks, one thread each, {NUM_MICROBATCHES} microbatches; a layer "
            f"sleeps {TIMES_MS} ms in F, I and W (half of it where two stages share a device), "
            "and all else took, in real steps without copies, from which the plan was made: "
            f"{'; '.join(beside)} ms.",
            "k is a round trip of a layer's bytes over its forward and backward. Copies are those "
            "of the least memory at which the planned step is at most 0.5 % longer than without.",
            "W's keep the plan's order (float_limit='off').",
        ),
    )
    if options.dry:
        print(record.to_markdown(made, record.environment()))
        return
    path, _ = record.write(made)
    print(path.read_text())
