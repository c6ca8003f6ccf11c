"""What does the executor add to a step, beside a bare loop and torch's runtime?

Four ranks on this machine run one order in four ways, in turns: the floor (sleeps and messages
over gloo, no autograd), ours as it comes (ranks of one host share memory), ours with every
message over gloo, and torch's runtime for action lists, over gloo too. Layers sleep, so that
ranks do not fight for the cores; then they cost nothing, so that host work is all there is. Also:
receive buffers over the number of microbatches, how much of large messages' time is hidden, and
what the readings of the timeline cost. `--part` runs one of them, a record each.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from benchmarks import ranks, record
from benchmarks.executor_messages import overlap_table
from benchmarks.models import sleeping_batch, sleeping_layers, sleeping_loss
from benchmarks.peers import FloorLoop, TorchRuntime
from benchmarks.sleeping_plans import RANKS, Times, clocked, ours, plan_of, uneven
from octotune.check import check
from octotune.contract import Plan

PARTS = ("10 ms units", "30 ms units", "host work", "receive buffers", "large messages", "trace")
SINGLE, MULTI = ("gpipe", "1f1b"), ("interleaved-v2", "zb-v")
WAYS = ("floor", "ours", "gloo", "torch")
WORDS = {"floor": "floor", "ours": "ours", "gloo": "ours over gloo", "torch": "torch"}


def compare(rank: int, plan: Plan, times_ms: Times, rounds: int, with_torch: bool) -> dict:
    """Time all ways in turns; return seconds and CPU seconds of each round."""
    inputs, targets = sleeping_batch(plan.num_microbatches, 1024)
    floor = FloorLoop(plan, times_ms, 1024)
    pipes = {
        "ours": ours(plan, sleeping_layers(times_ms), sleeping_loss),
        "gloo": ours(plan, sleeping_layers(times_ms), sleeping_loss, shared_memory=False),
    }
    ways: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]] = {
        "floor": (floor.step, floor.prepare),
        **{
            name: (lambda pipe=pipe: pipe.step(inputs, targets), None)
            for name, pipe in pipes.items()
        },
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
    for pipe in pipes.values():
        pipe.close()
    return found


def run_comparisons(rank: int, cases: list[tuple[Plan, Times, int, bool]]) -> list[dict]:
    """Run all comparisons in one process group."""
    return [compare(rank, *case) for case in cases]


def buffers(rank: int, cases: list[tuple[Plan, Times]], message_bytes: int) -> list[tuple]:
    """Return the bytes of the fullest rank's receive buffers: ours, over gloo, torch's."""
    answer = []
    for plan, times_ms in cases:
        inputs, targets = sleeping_batch(plan.num_microbatches, message_bytes)
        held = []
        for shared_memory in (True, False):
            layers = sleeping_layers(times_ms)
            pipe = ours(plan, layers, sleeping_loss, shared_memory=shared_memory)
            for _ in range(3):
                pipe.step(inputs, targets)
            held.append(pipe.runtime.pool.made_bytes + pipe.transport.lent_bytes)
            pipe.close()
        theirs = TorchRuntime(plan, times_ms, inputs, targets)
        theirs.step()
        found: list[Any] = [None] * RANKS
        dist.all_gather_object(found, (*held, theirs.buffer_bytes()))
        answer.append(tuple(max(column) for column in zip(*found, strict=True)))
    return answer


def median_ms(rounds: list[tuple[float, float]]) -> float:
    """Return the median step of some rounds, in ms."""
    return 1e3 * statistics.median(length for length, _ in rounds)


def ratio(found: dict, one: str, other: str) -> float:
    """Return the median over rounds of one way's step to another's in the same round."""
    return statistics.median(a[0] / b[0] for a, b in zip(found[one], found[other], strict=True))


def step_table(unit_ms: float, counts: tuple[int, ...], rounds: int) -> tuple[record.Table, dict]:
    """Compare all schedules at one unit; also return torch's steps to each other way's."""
    cases, names = [], []
    for count in counts:
        for name in (*SINGLE, *MULTI, "tuned"):
            times = uneven(unit_ms) if name == "tuned" else [(unit_ms,) * 3] * 8
            cases.append((plan_of(name, count, times), times, rounds, True))
            names.append((name, count))
    results = ranks.run(RANKS, run_comparisons, cases)
    rows = []
    ratios: dict[str, dict[str, list[float]]] = {
        way: {"single": [], "multi": []} for way in ("ours", "gloo", "floor")
    }
    for (name, count), case, found in zip(names, cases, results, strict=True):
        rows.append(
            (
                name,
                count,
                round(check(case[0]).step_ns / 1e6, 1),
                *(round(median_ms(found[way]), 1) for way in WAYS),
                *(
                    round(ratio(found, one, other), 3)
                    for one, other in (
                        *(("ours", "floor"), ("torch", "ours")),
                        *(("gloo", "floor"), ("torch", "gloo")),
                    )
                ),
            )
        )
        kind = "single" if name in SINGLE else "multi"
        for way, values in ratios.items():
            values[kind].append(ratio(found, "torch", way))
    columns = ("schedule", "microbatches", "ideal ms", *(f"{WORDS[way]} ms" for way in WAYS))
    return (
        record.Table(
            title=f"Step at {unit_ms:g} ms a unit, {rounds} rounds in turns",
            columns=(
                *(*columns, "ours / floor", "torch / ours"),
                *("ours over gloo / floor", "torch / ours over gloo"),
            ),
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
                *(round(median_ms(found[way]), 1) for way in WAYS),
                round(ratio(found, "torch", "ours"), 2),
                round(ratio(found, "torch", "gloo"), 2),
                *(round(cpu[way], 3) for way in WAYS),
            )
        )
    return record.Table(
        title=f"Layers that cost nothing, one a stage, 8 microbatches, {rounds} rounds in turns",
        columns=(
            *("schedule", *(f"{WORDS[way]} ms" for way in WAYS)),
            *("torch / ours", "torch / ours over gloo"),
            *(f"{WORDS[way]}, CPU ms an action" for way in WAYS),
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
        columns=("schedule", "microbatches", "ours MiB", "ours over gloo MiB", "torch MiB"),
        rows=tuple(
            (name, count, *(round(held / 2**20) for held in row))
            for (name, count, _), row in zip(cases, found, strict=True)
        ),
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
    answer = []
    for plan, times_ms in cases:
        inputs, targets = sleeping_batch(plan.num_microbatches, 1024)
        pipe = ours(plan, sleeping_layers(times_ms), sleeping_loss)
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
        shows += [
            f"torch / {WORDS[way]}, geometric mean: {mean(values['single']):.3f} on single-stage "
            f"schedules, {mean(values['multi']):.3f} on multi-stage ones and the tuned plan."
            for way, values in ratios.items()
        ]
        shows.append("An executor as quick as the bare loop would have torch / floor.")
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
            "Over gloo each message in flight keeps two threads busy copying: where several are, "
            "the two cores are what they wait for, in the bare loop, too. Through shared memory "
            "a message is copied once, by its sender, from 4 MiB on by a thread of its own."
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
                f"{RANKS} ranks on one host, one thread each; layers of F = I = W = one unit, 8 "
                "(tuned: ten of unequal size) unless said; 1 KiB messages unless said.",
                "Ours is the Pipeline as it comes: ranks of one host share memory. Ours over gloo "
                "sends every message over gloo on loopback, as floor and torch do.",
                "The floor posts all receives before the clock starts, has no autograd, and does "
                "not wait for its sends; ours has both inside the clock. W's in the plan's order.",
            ),
        )
    )
    print(path.read_text())
