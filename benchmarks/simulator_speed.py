"""How fast does the engine run a schedule, against a plain event loop over the same contract?

One interleaved schedule of 98,304 actions (64 devices, two stages each, 256 microbatches, split
backward) in three worlds: channels only, hosts with a limited NIC, and that with copy lanes on
shared host links. Engine and event loop (`tests/oracle.py`) take turns, each with its input
already read, and each gives the times of everything and the peaks of memory; they must agree to
the nanosecond and byte before they are timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from benchmarks import record
from octotune.contract import (
    Cluster,
    Device,
    Layer,
    Link,
    Links,
    Plan,
    Stage,
    Workload,
    build_costs,
)
from simulator.actions import Action, Copy, CopyKind, Kind, Schedule
from simulator.engine import simulate
from simulator.memory import order_peak_bytes
from simulator.validate import validate
from tests import oracle

NUM_DEVICES, STAGES_A_DEVICE, NUM_MICROBATCHES = 64, 2, 256
DEVICES_A_HOST, DEVICES_A_LINK = 8, 2
AHEAD = 12  # a reload is held back until this many actions before the backward that needs it


def interleaved_rows() -> list[list[Action]]:
    """Interleaved 1F1B with I and W right after each other, in groups of a microbatch a device."""
    p, v, m = NUM_DEVICES, STAGES_A_DEVICE, NUM_MICROBATCHES
    groups = [range(begin, begin + p) for begin in range(0, m, p)]
    rows = []
    for device in range(p):
        stages = [device + p * chunk for chunk in range(v)]
        forward = [Action(s, Kind.F, i) for group in groups for s in stages for i in group]
        backward = [
            half
            for group in groups
            for s in reversed(stages)
            for i in group
            for half in (Action(s, Kind.I, i), Action(s, Kind.W, i))
        ]
        warmup = 2 * (p - device - 1) + (v - 1) * p
        row, rest = forward[:warmup], forward[warmup:]
        for index in range(len(forward)):
            row += rest[index : index + 1] + backward[2 * index : 2 * index + 2]
        rows.append(row)
    return rows


def lanes_of(rows: list[list[Action]]) -> list[list[Copy]]:
    """Take out every second microbatch that rests long enough, and bring it back in time."""
    lanes = []
    for row in rows:
        place = {action: position for position, action in enumerate(row)}
        entries = []
        for action, position in place.items():
            if action.kind is not Kind.F or action.microbatch % 2:
                continue
            back = place[Action(action.stage, Kind.I, action.microbatch)] - AHEAD
            if back - position < 2 * AHEAD:
                continue
            out = Copy(action.stage, CopyKind.O, action.microbatch)
            again = Copy(action.stage, CopyKind.R, action.microbatch, row[back])
            entries += [(position, 0, out), (back, 1, again)]
        lanes.append([copy for _, _, copy in sorted(entries)])
    return lanes


def plan_of(*, nic: bool, lanes: bool) -> Plan:
    """Return the plan in one of the worlds; stages are uneven by up to a fifth."""
    num_stages = NUM_DEVICES * STAGES_A_DEVICE
    layers = tuple(
        Layer(
            name=f"layers.{s}",
            forward_ns=1_000_000 + 37_000 * (s * 7 % 6),
            input_grad_ns=1_100_000 + 29_000 * (s * 5 % 7),
            weight_grad_ns=900_000 + 31_000 * (s * 3 % 5),
            param_bytes=10**8,
            state_bytes=16 * 10**8,
            saved_bytes=40 * 2**20,
            saved_w_bytes=20 * 2**20,
            held_w_bytes=4 * 2**20,
            workspace_bytes=8 * 2**20,
            output_bytes=8 * 2**20,
            offloadable_bytes=30 * 2**20,
        )
        for s in range(num_stages)
    )
    devices = tuple(
        Device(
            kind="any",
            memory_bytes=80 * 2**30,
            host=d // DEVICES_A_HOST,
            overhead_ns=5_000,
            offload_bandwidth=25 * 10**9,
            host_link=f"bus {d // DEVICES_A_LINK}",
        )
        for d in range(NUM_DEVICES)
    )
    rows = interleaved_rows()
    return Plan(
        workload=Workload(name="uneven layers", layers=layers),
        cluster=Cluster(
            name="hosts of 8",
            devices=devices,
            links=Links(
                intra_host=Link(latency_ns=5_000, bandwidth=200 * 10**9),
                inter_host=Link(latency_ns=10_000, bandwidth=50 * 10**9),
            ),
            nic_bandwidth=25 * 10**9 if nic else None,
        ),
        num_microbatches=NUM_MICROBATCHES,
        stages=tuple(Stage(layers=(s, s + 1), device=s % NUM_DEVICES) for s in range(num_stages)),
        actions=tuple(tuple(map(str, row)) for row in rows),
        offload=tuple(tuple(map(str, lane)) for lane in lanes_of(rows)) if lanes else None,
    )


def measure(plan: Plan, rounds: int, repeat: int) -> tuple[int, dict[str, record.Timing]]:
    """Return how many copies there are, and the timings of engine and event loop."""
    costs = build_costs(plan.workload, plan.cluster, plan.stages, plan.num_microbatches)
    schedule, copies = plan.schedule(), plan.copies()
    world = oracle.World(plan)

    timeline, expected = simulate(schedule, costs, copies), oracle.play(world, {})
    words = [word for row in plan.actions for word in row]
    assert timeline.end_ns.tolist() == [expected.end[word] for word in words]
    assert timeline.peak_bytes.tolist() == expected.peak_bytes
    assert timeline.step_ns == expected.step_ns

    def engine() -> None:
        for _ in range(repeat):
            simulate(schedule, costs, copies)

    timings = record.alternate(
        {"engine": engine, "event loop": lambda: oracle.play(world, {})},
        rounds=rounds,
        clock=time.process_time,
    )
    each = record.Timing(seconds=tuple(s / repeat for s in timings["engine"].seconds))
    return len(copies.codes) if copies is not None else 0, timings | {"engine": each}


def parts(plan: Plan, rounds: int) -> dict[str, record.Timing]:
    """Time what surrounds the engine on the way from a plan's words to its numbers."""
    costs = build_costs(plan.workload, plan.cluster, plan.stages, plan.num_microbatches)
    schedule = plan.schedule()
    functions: dict[str, Callable[[], object]] = {
        "words to Schedule": lambda: Schedule.from_words(plan.actions),
        "costs of the stages": lambda: build_costs(
            plan.workload, plan.cluster, plan.stages, plan.num_microbatches
        ),
        "rules (validate; part of simulate)": lambda: validate(schedule, costs),
        "peaks (part of simulate)": lambda: order_peak_bytes(schedule, costs),
        "simulate": lambda: simulate(schedule, costs),
    }
    return record.alternate(functions, rounds=rounds, warmup=3, clock=time.process_time)


def main(arguments: list[str]) -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(prog="simulator_speed", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="measured turns of each")
    parser.add_argument("--repeat", type=int, default=20, help="engine runs in one turn")
    options = parser.parse_args(arguments)
    worlds = {
        "channels": plan_of(nic=False, lanes=False),
        "channels and NIC": plan_of(nic=True, lanes=False),
        "channels, NIC, lanes on shared links": plan_of(nic=True, lanes=True),
    }
    rows = []
    for name, plan in worlds.items():
        num_actions = sum(map(len, plan.actions))
        num_copies, timings = measure(plan, options.rounds, options.repeat)
        engine, loop = timings["engine"], timings["event loop"]
        ratio = loop.median / engine.median
        rows.append(
            (
                name,
                num_actions,
                num_copies,
                1000 * engine.median,
                engine.spread,
                num_actions / engine.median / 1e6,
                1000 * loop.median,
                loop.spread,
                num_actions / loop.median,
                round(ratio),
            )
        )
    around = parts(worlds["channels"], 10 * options.rounds)
    rate, ratio, contended = rows[0][5], rows[0][9], rows[2][9]
    path, _ = record.write(
        record.Record(
            benchmark="simulator_speed",
            workload="98304-actions",
            question="How fast does the engine run a schedule, against a plain event loop?",
            command=record.command("simulator_speed", arguments),
            seed=None,
            notes=(
                "interleaved, 64 devices, 128 stages, 256 microbatches, split backward; one core",
                f"1 turn of warmup, {options.rounds} measured turns; a turn is {options.repeat} "
                "engine runs or 1 run of the event loop, alternating; seconds of the process",
                "an engine run is `simulate`: rules checked, every start, end and transfer, "
                "memory peaks; the event loop is `oracle.play`: the same results",
            ),
            tables=(
                record.Table(
                    title="Engine against event loop",
                    columns=(
                        "world",
                        "actions",
                        "copies",
                        "engine ms",
                        "spread",
                        "engine million actions/s",
                        "event loop ms",
                        "spread ",
                        "event loop actions/s",
                        "ratio",
                    ),
                    rows=tuple(rows),
                ),
                record.Table(
                    title="Around the engine, world of channels",
                    columns=("part", "ms", "spread"),
                    rows=tuple(
                        (name, 1000 * timing.median, timing.spread)
                        for name, timing in around.items()
                    ),
                ),
            ),
            shows=(
                f"The engine runs {rate:.0f} million actions a second with channels and peaks, "
                f"{ratio} times the event loop; {contended} times with NIC and lanes.",
                "Both agree on every end, the step and every peak; that is asserted before.",
            ),
            does_not_show=(
                "How fast small schedules run: below some thousand actions the fixed cost of a "
                "call, some tens of microseconds, prevails.",
                "How the event loop would do if written for speed; it is written to be read.",
            ),
        )
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
