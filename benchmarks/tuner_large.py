"""Does the tuner's quality last at 64 devices and 256 microbatches, in bounded time and memory?

Equal layers, 4 a device, and llama3-70B's layers repeated to 320. ZB-V, interleaved zero bubble
and DualPipeV are made without a memory limit first; then the tuner gets the least memory that one
of them takes, and its step is held against all three. Time is the processor's, over the cores.
"""

from __future__ import annotations

import argparse
import os
import resource
import time

from msgspec.structs import replace

from benchmarks import record
from benchmarks.tuner_cases import DATA
from octotune.check import check
from octotune.contract import Cluster, Layer, Workload, build_costs, read_workload
from octotune.schedules import FAMILIES, plan_from
from octotune.tune import tune
from octotune.tune.warm import warm_up
from simulator.engine import simulate

NUM_DEVICES, NUM_MICROBATCHES = 64, 256
PUBLISHED = ("zb-v", "interleaved-zb-v4", "dualpipe-v")
LATENCY_NS, BANDWIDTH = 50_000, 10**15


def equal_layers() -> Workload:
    """Return uniform A: F, I and W of a device's share take 1 ms each."""
    layers = tuple(
        Layer(
            name=f"layers.{index}",
            forward_ns=250_000,
            input_grad_ns=250_000,
            weight_grad_ns=250_000,
            param_bytes=0,
            state_bytes=0,
            saved_bytes=0,
            saved_w_bytes=250_000_000,
            output_bytes=0,
        )
        for index in range(4 * NUM_DEVICES)
    )
    return Workload(name="uniform A", layers=layers)


def repeated_llama() -> Workload:
    """Return llama3-70B with its inner layers repeated, 320 in all."""
    layers = read_workload(f"{DATA / 'octopipe' / 'llama3-70B.json'}#workload").layers
    inner = [replace(layers[1], name=f"layers.{index}") for index in range(1, 319)]
    return Workload(name="llama3-70B x 4", layers=(layers[0], *inner, layers[-1]))


def main(arguments: list[str]) -> int:
    """Run both, print and write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tuner_large")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--only", choices=("equal", "llama"))
    options = parser.parse_args(arguments)
    warm_up()
    cores = os.cpu_count() or 1
    rows: list[tuple[record.Cell, ...]] = []
    made = {"equal": equal_layers, "llama": repeated_llama}
    for name, make in made.items():
        if options.only not in (None, name):
            continue
        workload = make()
        free = Cluster.equal(NUM_DEVICES, latency_ns=LATENCY_NS, bandwidth=BANDWIDTH)
        steps, peaks = {}, {}
        for family in PUBLISHED:
            plan = plan_from(FAMILIES[family], workload, free, NUM_MICROBATCHES)
            costs = build_costs(workload, free, plan.stages, NUM_MICROBATCHES)
            timeline = simulate(plan.schedule(), costs)
            steps[family], peaks[family] = timeline.step_ns, int(timeline.peak_bytes.max())
            print(name, family, steps[family] / 1e6, peaks[family] / 1e9, flush=True)
        room = min(peaks.values())
        cluster = Cluster.equal(
            NUM_DEVICES, memory_bytes=room, latency_ns=LATENCY_NS, bandwidth=BANDWIDTH
        )
        begin = time.process_time()
        found = tune(
            workload,
            cluster,
            num_microbatches=NUM_MICROBATCHES,
            time_limit_s=options.seconds * cores,
            clock=time.process_time,
            progress=lambda phase, step_ns, at_s: print(phase, step_ns / 1e6, at_s, flush=True),
        )
        took = (time.process_time() - begin) / cores
        step = check(found).step_ns
        assert found.predicted is not None
        bound = found.predicted.lower_bound_ns or 0
        rows.append(
            (
                workload.name,
                round(room / 1e9, 2),
                *(round(value / 1e6, 2) for value in steps.values()),
                round(step / 1e6, 2),
                round(min(steps.values()) / step, 4),
                round(100 * (step / max(1, bound) - 1), 2),
                len(found.stages),
                str(found.search["found_by"]),
                round(took, 1),
                round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
            )
        )
        print(*rows[-1], sep="  ", flush=True)
    record.write(
        record.Record(
            benchmark="tuner_large",
            workload="64x256" if options.only is None else f"64x256-{options.only}",
            question="Does the tuner's quality last at 64 devices and 256 microbatches?",
            command=record.command("tuner_large", arguments),
            seed=0,
            tables=(
                record.Table(
                    title="64 devices, 256 microbatches",
                    columns=(
                        *("workload", "memory GB", *(f"{name} ms" for name in PUBLISHED)),
                        *("tuned ms", "best of them / tuned", "gap %", "stages", "found by"),
                        *("seconds", "peak resident GB"),
                    ),
                    rows=tuple(rows),
                ),
            ),
            shows=(
                "The tuner has the least memory that one of the three takes; they have what they "
                "take. Their layers are cut into equal numbers a stage.",
                "Seconds are the processor's over the number of cores; the limit is by the same.",
            ),
            does_not_show=("Spread over seeds: it is one run.",),
        )
    )
    return 0
