"""What does the executor add to a step, beside a bare loop and torch's runtime?

Four gloo ranks on this machine run one order in three ways, in turns: the floor (sleeps and
messages, no autograd), ours, and torch's runtime for action lists. Layers sleep, so that ranks do
not fight for the cores; then they cost nothing, so that host work is all there is. Further:
receive buffers over the number of microbatches, how much of large messages' time is hidden, and
what the readings of the timeline cost. `--part` runs one of them, a record each.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from benchmarks import ranks, record
from benchmarks.models import sleeping_batch, sleeping_layers, sleeping_loss, thin_loss
from benchmarks.peers import FloorLoop, TorchRuntime
from octotune.check import check
from octotune.contract import Cluster, Layer, Plan, Workload

RANKS = 4
PARTS = ("10 ms units", "30 ms units", "host work", "receive buffers", "large messages", "trace")
SINGLE, MULTI = ("gpipe", "1f1b"), ("interleaved-v2", "zb-v")
Times = list[tuple[float, float, float]]


def workload(times_ms: Times, message_bytes: int = 1024) -> Workload:
    """Return sleeping layers as the contract sees them."""
    return Workload(
        name="sleeping layers",
        layers=tuple(
            Layer(
                name=f"layer{index}",
                forward_ns=round(f * 1e6),
                input_grad_ns=round(i * 1e6),
                weight_grad_ns=round(w * 1e6),
                param_bytes=4,
                state_bytes=12,
                saved_bytes=message_bytes,
                saved_w_bytes=message_bytes,
                held_w_bytes=message_bytes,
                output_bytes=message_bytes,
            )
            for index, (f, i, w) in enumerate(times_ms)
        ),
    )


def plan_of(name: str, num_microbatches: int, times_ms: Times, message_bytes: int = 1024) -> Plan:
    """Return a published schedule's plan, or the tuner's for "tuned"."""
    layers, cluster = workload(times_ms, message_bytes), Cluster.equal(RANKS)
    if name == "tuned":
        from octotune import tune

        return tune(layers, cluster, num_microbatches=num_microbatches, seed=0, time_limit_s=10)
    from octotune.schedules import FAMILIES, plan_from

    return plan_from(FAMILIES[name], layers, cluster, num_microbatches)


def uneven(unit_ms: float) -> Times:
    """Return ten layers of unequal size for the tuner: 8 to 12 units of F, I and W each."""
    sizes = (0.5, 1, 1, 0.5, 1, 1, 0.5, 1, 1, 2)
    return [(unit_ms * size,) * 3 for size in sizes]


def clocked(action: Callable[[], Any], before: Callable[[], Any] | None = None) -> tuple:
    """Run one step on all ranks; return its length in seconds and rank's mean CPU seconds."""
    if before is not None:
        before()
    dist.barrier()
    cpu, began = time.process_time(), time.perf_counter()
    action()
    ended, cpu = time.perf_counter(), time.process_time() - cpu
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, (began, ended, cpu))
    length = max(end for _, end, _ in found) - min(begin for begin, _, _ in found)
    return length, statistics.mean(used for _, _, used in found)


def compare(rank: int, plan: Plan, times_ms: Times, rounds: int, with_torch: bool) -> dict:
    """Time floor, ours and torch in turns; return seconds and CPU seconds of each round."""
    from executor import Pipeline

    inputs, targets = sleeping_batch(plan.num_microbatches, 1024)
    floor = FloorLoop(plan, times_ms, 1024)
    pipe = Pipeline(
        plan, sleeping_layers(times_ms), sleeping_loss, timeout_s=60, float_limit="off"
    )
    ways: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]] = {
        "floor": (floor.step, floor.prepare),
        "ours": (lambda: pipe.step(inputs, targets), None),
    }
    if with_torch:
        ways["torch"] = (TorchRuntime(plan, times_ms, inputs, targets).step, None)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, (action, before) in ways.items():
            taken = clocked(action, before)
            if name == "floor":
                floor.finish()
            if turn:
                found[name].append(taken)
    return found


def run_comparisons(rank: int, cases: list[tuple[Plan, Times, int, bool]]) -> list[dict]:
    """Run all comparisons in one process group."""
    return [compare(rank, *case) for case in cases]


def buffers(rank: int, cases: list[tuple[Plan, Times]], message_bytes: int) -> list[tuple]:
    """Return the bytes of receive buffers on all ranks: ours, torch's."""
    from executor import Pipeline

    answer = []
    for plan, times_ms in cases:
        inputs, targets = sleeping_batch(plan.num_microbatches, message_bytes)
        pipe = Pipeline(plan, sleeping_layers(times_ms), sleeping_loss, float_limit="off")
        pipe.step(inputs, targets)
        theirs = TorchRuntime(plan, times_ms, inputs, targets)
        theirs.step()
        found: list[Any] = [None] * RANKS
        dist.all_gather_object(found, (pipe.runtime.pool.made_bytes, theirs.buffer_bytes()))
        answer.append(tuple(max(column) for column in zip(*found, strict=True)))
    return answer


def overlaps(rank: int, names: tuple[str, ...], sizes: tuple[int, ...], rounds: int) -> list:
    """Return, by schedule and size: ours, floor, the busiest rank's messages, one alone."""
    from executor import Pipeline

    times: Times = [(10, 10, 10)] * 8
    group: Any = dist.distributed_c10d._get_default_group()
    alone: dict[int, float] = {}
    for size in sizes:
        tensor, took = torch.zeros(size // 4), []
        for turn in range(8):
            dist.barrier()
            began = time.perf_counter()
            if rank == 0:
                group.send([tensor], 1, 7).wait()
                group.recv([tensor], 1, 7).wait()
            elif rank == 1:
                group.recv([tensor], 0, 7).wait()
                group.send([tensor], 0, 7).wait()
            if turn:
                took.append((time.perf_counter() - began) / 2)
        alone[size] = statistics.median(took)
    answer = []
    for name in names:
        pipes, floors = {}, {}
        for size in sizes:
            plan = plan_of(name, 8, times, size)
            pipes[size] = (
                Pipeline(plan, sleeping_layers(times, thin=True), thin_loss, float_limit="off"),
                sleeping_batch(8, size),
            )
            floors[size] = FloorLoop(plan, times, size)
        steps: dict[int, list[float]] = {size: [] for size in sizes}
        bare: dict[int, list[float]] = {size: [] for size in sizes}
        for turn in range(rounds + 1):
            for size, (pipe, (inputs, targets)) in pipes.items():
                length, _ = clocked(lambda p=pipe, i=inputs, t=targets: p.step(i, t))
                least, _ = clocked(floors[size].step, floors[size].prepare)
                floors[size].finish()
                if turn:
                    steps[size].append(length)
                    bare[size].append(least)
        row = plan.schedule().rows
        homes = [stage.device for stage in plan.stages]
        received = [0] * RANKS
        for device, actions in enumerate(row):
            for stage, kind, _ in actions:
                other = stage - 1 if kind.name == "F" else stage + 1
                if kind.name != "W" and 0 <= other < len(homes) and homes[other] != device:
                    received[device] += 1
        answer += [
            (
                *(name, size, statistics.median(steps[size]), statistics.median(bare[size])),
                *(max(received), alone[size]),
            )
            for size in sizes
        ]
    return answer


def median_ms(rounds: list[tuple[float, float]]) -> float:
    """Return the median step of some rounds, in ms."""
    return 1e3 * statistics.median(length for length, _ in rounds)


def ratio(found: dict, one: str, other: str) -> float:
    """Return the median over rounds of one way's step to another's in the same round."""
    return statistics.median(a[0] / b[0] for a, b in zip(found[one], found[other], strict=True))


def step_table(unit_ms: float, counts: tuple[int, ...], rounds: int) -> tuple[record.Table, dict]:
    """Compare all schedules at one unit."""
    cases, names = [], []
    for count in counts:
        for name in (*SINGLE, *MULTI, "tuned"):
            times = uneven(unit_ms) if name == "tuned" else [(unit_ms,) * 3] * 8
            cases.append((plan_of(name, count, times), times, rounds, True))
            names.append((name, count))
    results = ranks.run(RANKS, run_comparisons, cases)
    rows = []
    ratios: dict[str, list[float]] = {"floor": [], "single": [], "multi": []}
    for (name, count), case, found in zip(names, cases, results, strict=True):
        of_torch = ratio(found, "torch", "ours")
        ratios["single" if name in SINGLE else "multi"].append(of_torch)
        rows.append(
            (
                name,
                count,
                round(check(case[0]).step_ns / 1e6, 1),
                *(round(median_ms(found[way]), 1) for way in ("floor", "ours", "torch")),
                round(ratio(found, "ours", "floor"), 3),
                round(of_torch, 3),
            )
        )
    columns = ("schedule", "microbatches", "ideal ms", "floor ms", "ours ms", "torch ms")
    return (
        record.Table(
            title=f"Step at {unit_ms:g} ms a unit, {rounds} rounds in turns",
            columns=(*columns, "ours / floor", "torch / ours"),
            rows=tuple(rows),
        ),
        ratios,
    )


def host_table(rounds: int) -> record.Table:
    """Compare host work alone: one layer a stage, which costs nothing but its autograd."""
    names = (*SINGLE, *MULTI)
    layers = [RANKS if name in SINGLE else 2 * RANKS for name in names]
    cases = [
        (plan_of(name, 8, [(1, 1, 1)] * count), [(0, 0, 0)] * count, rounds, True)
        for name, count in zip(names, layers, strict=True)
    ]
    rows = []
    for name, case, found in zip(
        names, cases, ranks.run(RANKS, run_comparisons, cases), strict=True
    ):
        actions = case[0].schedule().num_actions / RANKS
        cpu = {
            way: 1e3 * statistics.median(used for _, used in found[way]) / actions for way in found
        }
        rows.append(
            (
                name,
                *(round(median_ms(found[way]), 1) for way in ("floor", "ours", "torch")),
                round(ratio(found, "torch", "ours"), 2),
                *(round(cpu[way], 2) for way in ("floor", "ours", "torch")),
            )
        )
    return record.Table(
        title=f"Layers that cost nothing, one a stage, 8 microbatches, {rounds} rounds in turns",
        columns=(
            *("schedule", "floor ms", "ours ms", "torch ms", "torch / ours"),
            *(f"{way}, CPU ms an action" for way in ("floor", "ours", "torch")),
        ),
        rows=tuple(rows),
    )


def buffer_table() -> record.Table:
    """Compare receive buffers over the number of microbatches."""
    size, times = 1 << 20, [(0, 0, 0)] * 8
    cases = [
        (name, count, plan_of(name, count, [(1, 1, 1)] * 8, size))
        for name in ("1f1b", "zb-v")
        for count in (8, 16, 32)
    ]
    found = ranks.run(RANKS, buffers, [(plan, times) for _, _, plan in cases], size)
    return record.Table(
        title="Receive buffers of the fullest rank, 1 MiB messages",
        columns=("schedule", "microbatches", "ours MiB", "torch MiB"),
        rows=tuple(
            (name, count, round(ours / 2**20), round(theirs / 2**20))
            for (name, count, _), (ours, theirs) in zip(cases, found, strict=True)
        ),
    )


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
    smallest = {row[0]: (row[2], row[3]) for row in found if row[1] == sizes[0]}
    rows = []
    for name, size, step, bare, count, alone in found:
        serial = count * alone
        hidden: list[int | None] = [
            None if size == sizes[0] else round(100 * hidden_at_best(name, size, alone, serial))
        ]
        hidden += [
            None if size == sizes[0] else round(100 * (1 - (taken - least) / serial))
            for taken, least in zip((step, bare), smallest[name], strict=True)
        ]
        rows.append(
            (
                name,
                f"{size >> 10} KiB",
                round(step * 1e3, 1),
                round(bare * 1e3, 1),
                round(alone * 1e3, 2),
                round(serial * 1e3, 1),
                *hidden,
            )
        )
    return record.Table(
        title=f"Large messages, 10 ms units, 8 microbatches, {rounds} rounds in turns",
        columns=(
            *("schedule", "message", "ours ms", "floor ms", "one message alone ms"),
            *("all received by the busiest rank, one by one, ms", "can be hidden %"),
            "hidden by ours %",
            "hidden by the floor %",
        ),
        rows=tuple(rows),
    )


class NoClock:
    """In the place of `executor.trace.Clock`: reads nothing."""

    def start(self, position: int) -> None:
        """Do not note that an action begins."""

    def end(self, position: int) -> int:
        """Do not note that an action ends."""
        return 0


def trace_costs(rank: int, cases: list[tuple[Plan, Times]], rounds: int) -> list[list[float]]:
    """Return, of each case, the seconds of a step with readings to that without, by round."""
    from executor import Pipeline

    answer = []
    for plan, times_ms in cases:
        inputs, targets = sleeping_batch(plan.num_microbatches, 1024)
        pipe = Pipeline(
            plan, sleeping_layers(times_ms), sleeping_loss, timeout_s=60, float_limit="off"
        )
        clocks: list[Any] = [pipe.runtime.clock, NoClock()]
        ratios = []
        for turn in range(rounds + 1):
            taken = [0.0, 0.0]
            for way in (0, 1) if turn % 2 else (1, 0):
                pipe.runtime.clock = clocks[way]
                taken[way], _ = clocked(lambda p=pipe, i=inputs, t=targets: p.step(i, t))
            if turn:
                ratios.append(taken[0] / taken[1])
        answer.append(ratios)
    return answer


def trace_table(rounds: int) -> record.Table:
    """Say what the readings of a timeline add to a step."""
    cases = [
        (name, unit, plan_of(name, 8, [(max(1, unit),) * 3] * 8), [(unit,) * 3] * 8, turns)
        for unit, turns in ((10, rounds), (0, 10 * rounds))
        for name in ("1f1b", "zb-v")
    ]
    rows = []
    for name, unit, plan, times, turns in cases:
        (ratios,) = ranks.run(RANKS, trace_costs, [(plan, times)], turns)
        spread = statistics.quantiles(ratios, n=4)
        rows.append(
            (
                *(name, unit, turns),
                *(round(100 * (r - 1), 2) for r in (statistics.median(ratios), *spread[::2])),
            )
        )
    return record.Table(
        title="A step with readings against one without, in turns",
        columns=("schedule", "unit ms", "rounds", "median %", "lower quartile %", "upper %"),
        rows=tuple(rows),
    )


def mean(values: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(statistics.mean(map(math.log, values)))


def main(arguments: list[str]) -> None:
    """Run the parts asked for and write a record each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", choices=PARTS, help="one part alone")
    parser.add_argument("--microbatches", type=int, choices=(8, 16), help="steps of these alone")
    options = parser.parse_args(arguments)
    counts = (options.microbatches,) if options.microbatches else (8, 16)
    for part in (options.part,) if options.part else PARTS:
        for unit_counts in [(count,) for count in counts] if "unit" in part else [(8,)]:
            write_part(part, unit_counts, options.rounds, arguments)


def write_part(part: str, counts: tuple[int, ...], rounds: int, arguments: list[str]) -> None:
    """Run one part and write its record."""
    workload_name, shows = part, ["Ratios are medians over rounds in the same processes."]
    if "unit" in part:
        workload_name = f"{part} {counts[0]} microbatches"
        unit = float(part.split()[0])
        table, ratios = step_table(unit, counts, rounds if unit < 30 else max(1, rounds - 2))
        shows.append(
            f"torch / ours, geometric mean: {mean(ratios['single']):.3f} on single-stage "
            f"schedules, {mean(ratios['multi']):.3f} on multi-stage ones and the tuned plan."
        )
    elif part == "host work":
        table = host_table(4 * rounds)
    elif part == "receive buffers":
        table = buffer_table()
        shows = ["The receive buffers of ours do not grow with the number of microbatches."]
    elif part == "large messages":
        table = overlap_table(rounds)
        shows.append(
            "Hidden: 1 - what large messages add to the step / what they take one by one on an "
            "idle machine. Can be hidden: the same, simulated, with links that carry each message "
            "in that time whatever else there is: 1F1B waits for its messages.",
        )
        shows.append(
            "Each message in flight keeps two threads busy copying: where several are, the two "
            "cores are what they wait for, in the bare loop, too."
        )
    else:
        table = trace_table(4 * rounds)
    path, _ = record.write(
        record.Record(
            benchmark="executor_overhead",
            workload=workload_name,
            question="What does the executor add to a step, beside a bare loop and torch?",
            command=record.command("executor_overhead", arguments),
            seed=0,
            tables=(table,),
            shows=tuple(shows),
            does_not_show=(
                "Kernels that compute: sleeping layers leave cores cold, which makes host work "
                "dearer than beside real compute.",
                "GPUs, NCCL and several hosts.",
            ),
            notes=(
                f"{RANKS} gloo ranks on loopback, one thread each; layers of F = I = W = one "
                "unit, 8 (tuned: ten of unequal size) unless said; 1 KiB messages unless said.",
                "The floor posts all receives before the clock starts, has no autograd, and does "
                "not wait for its sends; ours has both inside the clock. W's in the plan's order.",
            ),
        )
    )
    print(path.read_text())
