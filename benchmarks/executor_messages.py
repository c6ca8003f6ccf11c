"""How much of the time of large messages a step hides: a part of `executor_overhead`."""

from __future__ import annotations

import statistics
import time
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from benchmarks import ranks, record
from benchmarks.models import sleeping_batch, sleeping_layers, thin_loss
from benchmarks.peers import FloorLoop
from benchmarks.sleeping_plans import RANKS, Times, clocked, ours, plan_of
from executor.transport import Buffer
from octotune.check import check
from octotune.contract import Cluster, Plan


def alone_s(rank: int, size: int, transport: Any) -> float:
    """Return what one message takes on an idle machine: half of there and back, in seconds."""
    tensor, took = torch.ones(size // 4), []
    buffer = Buffer((size // 4,), torch.float32, torch.device("cpu"))
    for turn in range(12):
        dist.barrier()
        if rank > 1:
            continue
        landing = transport.expect(buffer.key[0], torch.float32, 1 - rank, 0)
        received = landing or transport.receive(buffer, 1 - rank, 0)
        began = time.perf_counter()
        sent = transport.send(tensor, 1, 0) if rank == 0 else None
        received.wait(60)
        if sent is None:
            sent = transport.send(tensor, 0, 0)
        sent.wait(60)
        if landing is not None:
            landing.buffer.give_back()
        if turn > 1:
            took.append((time.perf_counter() - began) / 2)
    return statistics.median(took) if took else 0.0


def overlaps(rank: int, names: tuple[str, ...], sizes: tuple[int, ...], rounds: int) -> list:
    """Return, by schedule and size: steps of ours, over gloo, floor; messages; one alone."""
    from executor.transport import GlooTransport

    times: Times = [(10, 10, 10)] * 8
    alone: dict[int, tuple[float, ...]] = {}
    for size in sizes:
        taken = []
        for shared_memory in (True, False):
            transport = GlooTransport(shared_memory=shared_memory)
            transport.prepare([(0, 1), (1, 0)], [])
            taken.append(alone_s(rank, size, transport))
            transport.close()
        alone[size] = tuple(taken)
    answer = []
    for name in names:
        plans = {size: plan_of(name, 8, times, size) for size in sizes}
        pipes = {
            (way, size): ours(
                plan, sleeping_layers(times, thin=True), thin_loss, shared_memory=way == "ours"
            )
            for size, plan in plans.items()
            for way in ("ours", "gloo")
        }
        floors = {size: FloorLoop(plan, times, size) for size, plan in plans.items()}
        batches = {size: sleeping_batch(8, size) for size in sizes}
        steps: dict[tuple[str, int], list[float]] = {}
        for turn in range(rounds + 1):
            for size in sizes:
                for way in ("ours", "gloo"):
                    length, _ = clocked(lambda p=pipes[way, size], b=batches[size]: p.step(*b))
                    steps.setdefault((way, size), []).extend([length] if turn else [])
                length, _ = clocked(floors[size].step, floors[size].prepare)
                floors[size].finish()
                steps.setdefault(("floor", size), []).extend([length] if turn else [])
        for pipe in pipes.values():
            pipe.close()
        received = received_by_device(plans[sizes[0]])
        answer += [
            (
                *(name, size),
                tuple(statistics.median(steps[way, size]) for way in ("ours", "gloo", "floor")),
                *(max(received), alone[size]),
            )
            for size in sizes
        ]
    return answer


def received_by_device(plan: Plan) -> list[int]:
    """Return how many messages each device receives in a step."""
    homes = [stage.device for stage in plan.stages]
    received = [0] * len(plan.actions)
    for device, actions in enumerate(plan.schedule().rows):
        for stage, kind, _ in actions:
            other = stage - 1 if kind.name == "F" else stage + 1
            if kind.name != "W" and 0 <= other < len(homes) and homes[other] != device:
                received[device] += 1
    return received


def hidden_at_best(name: str, size: int, alone_s: float, serial_s: float) -> float:
    """Return what part of messages' time the schedule can hide: simulated, links of their own."""
    plan = plan_of(name, 8, [(10, 10, 10)] * 8, size)
    cluster = Cluster.equal(RANKS, bandwidth=round(size / alone_s))
    slow = msgspec.structs.replace(plan, cluster=cluster)
    added_ns = check(slow).step_ns - check(plan).step_ns
    return 1 - added_ns / 1e9 / serial_s


def overlap_table(rounds: int) -> record.Table:
    """Say how much of the time of large messages is hidden."""
    sizes = (1 << 10, 2 << 20, 16 << 20)
    found = ranks.run(RANKS, overlaps, ("1f1b", "interleaved-v2"), sizes, rounds)
    smallest = {row[0]: row[2] for row in found if row[1] == sizes[0]}
    rows = []
    for name, size, steps, count, (alone, over_gloo) in found:
        serial_s = [count * alone, count * over_gloo, count * over_gloo]
        added_s = [step - least for step, least in zip(steps, smallest[name], strict=True)]
        hidden: list[int | None] = [None] * 4
        if size > sizes[0]:
            hidden = [round(100 * hidden_at_best(name, size, over_gloo, serial_s[1]))]
            hidden += [
                round(100 * (1 - added / serial))
                for added, serial in zip(added_s, serial_s, strict=True)
            ]
        rows.append(
            (
                *(name, f"{size >> 10} KiB"),
                *(round(step * 1e3, 1) for step in steps),
                *(round(1e3 * each, 2) for each in (alone, over_gloo)),
                *(round(1e3 * serial, 1) for serial in serial_s[:2]),
                *(None if size == sizes[0] else round(1e3 * added, 1) for added in added_s),
                *hidden,
            )
        )
    ways = ("ours", "ours over gloo", "floor")
    return record.Table(
        title=f"Large messages, 10 ms units, 8 microbatches, {rounds} rounds in turns",
        columns=(
            *("schedule", "message", *(f"{way} ms" for way in ways)),
            *(f"one message alone, {way}, ms" for way in ("ours", "gloo")),
            *(f"the busiest rank's one by one, {way}, ms" for way in ("ours", "gloo")),
            *(f"added, {way}, ms" for way in ways),
            *("can be hidden %", *(f"hidden by {way} %" for way in ways)),
        ),
        rows=tuple(rows),
    )
