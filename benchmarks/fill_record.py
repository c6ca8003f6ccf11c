"""The record of the fill runtime's benchmark, from the answers of its parts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.fill_cases import (
    CASES,
    FITTING_ROUNDS,
    MARGINS,
    MS,
    PROFILE_STEPS,
    UNIT_MS,
)


def paired(answer: dict[str, Any]) -> tuple[float, float]:
    """Return the slowdown by medians, and the median of the turns' ratios, in %."""
    on, off = answer["on"], answer["off"]
    ratio = statistics.median(a / b for a, b in zip(on, off, strict=True))
    by_medians = statistics.median(on) / statistics.median(off)
    return 100 * (by_medians - 1), 100 * (ratio - 1)


def case_row(key: str, answer: dict[str, Any]) -> tuple[record.Cell, ...]:
    """Return one line of the main table."""
    case = CASES[key]
    step_ns = answer["simulated_step_ns"]
    on_ns, off_ns = statistics.median(answer["on"]), statistics.median(answer["off"])
    slowdown, ratio = paired(answer)
    filled = statistics.median(answer["busy"]) / statistics.median(answer["bubbles"])
    jobs = answer["outcome"]["jobs"]
    steps = answer["outcome"]["filled_steps"]
    samples = sum(job["samples"] for job in jobs) / steps
    predicted = answer["predicted_samples"]
    real_rate = samples / on_ns
    simulated_rate = answer["simulated_samples"] / step_ns
    busy, alone = (sum(job[name] for job in jobs) for name in ("busy_ns", "alone_ns"))
    return (
        case.name,
        case.devices,
        case.microbatches,
        round(off_ns / MS, 1),
        round(step_ns / MS, 1),
        round(slowdown, 2),
        round(ratio, 2),
        round(100 * filled, 1),
        round(100 * samples / predicted, 1),
        round(100 * (simulated_rate / real_rate - 1), 1),
        round(100 * (busy / alone * answer.get("slower", 1.0) - 1), 1),
        sum(job["late"] for job in jobs),
        sum(job["micro_steps"] for job in jobs),
    )


def _range(rows: Sequence[Any], column: int, form: str = ".0f") -> str:
    """Return the least and the most of a column, in words."""
    low, high = (format(pick(row[column] for row in rows), form) for pick in (min, max))
    return low if low == high else f"{low} to {high}"


def _shared_cores(four: Sequence[Any], plain: Sequence[Any]) -> list[str]:
    """Say what four computing ranks on two cores come to; nothing where they did not run."""
    if not four:
        return []
    said = (
        f"Four computing ranks share two cores: {_range(four, 7)} % used, the main step changes "
        f"by {_range(four, 5, '+.2f')} %; samples a second are simulated off by "
        f"{_range([*four, *plain], 9, '+.1f')} %."
    )
    if plain:
        said += (
            " Where fill work does not give way to the main job's threads: "
            f"{_range(plain, 7)} % and {_range(plain, 5, '+.2f')} %."
        )
    return [said]


def queue_tables(answer: dict[str, Any]) -> tuple[record.Table, record.Table, float]:
    """Return the jobs' ends, simulated and real, what they come to, and the largest difference."""
    rows = []
    for number, (begin, end, samples) in sorted(
        answer["predicted"].items(), key=lambda item: (item[1][0], int(item[0]))
    ):
        started, ended, made = answer["jobs"].get(number, (None, None, 0))
        real_end = None if ended is None else ended + 1
        rows.append((answer["names"][int(number)], samples, made, begin, started, end, real_end))
    step_ns = statistics.median(answer["steps"][PROFILE_STEPS:])
    arrivals = dict(zip(answer["names"], answer["arrivals"], strict=True))

    def mean(column: int) -> float:
        times = [row[column] - arrivals[row[0]] for row in rows if row[column] is not None]
        return statistics.mean(times)

    simulated, real = mean(5), mean(6)
    last_simulated, last_real = max(r[5] for r in rows), max(r[6] or 0 for r in rows)
    s_ns = answer["predicted_step_ns"]
    summary = (
        ("main step, ms", s_ns / MS, step_ns / MS),
        ("mean completion time, s", simulated * s_ns / 1e9, real * step_ns / 1e9),
        ("makespan, s", last_simulated * s_ns / 1e9, last_real * step_ns / 1e9),
        (
            "samples a second",
            sum(r[1] for r in rows) / (last_simulated * s_ns / 1e9),
            sum(r[2] for r in rows) / (last_real * step_ns / 1e9),
        ),
    )
    off = max(abs(real / simulated - 1) for _, simulated, real in summary[1:])
    return (
        record.Table(
            title="A queue of jobs on a tuned plan of uneven layers, 4 ranks; in main steps",
            columns=("job", "samples", "made", "begin", "real begin", "end", "real end"),
            rows=tuple(rows),
        ),
        record.Table(
            title="What it comes to",
            columns=("", "simulated", "real", "real / simulated"),
            rows=tuple(
                (name, round(a, 3), round(b, 3), round(b / a, 3)) for name, a, b in summary
            ),
        ),
        100 * off,
    )


def write_record(
    answers: dict[str, Any], rounds: int, without: Sequence[str]
) -> tuple[Path, Path]:
    """Write the record of all parts but some cases; it says which."""
    by_key = {key: case_row(key, answers[key]) for key in CASES if key not in without}
    arguments = ["--without", ",".join(without)] if without else []
    rows = tuple(by_key.values())
    queue, summary, off = queue_tables(answers["queue"])
    losses = answers["losses"]
    equal = losses["with"] == losses["without"]
    sleeping = [row for key, row in by_key.items() if CASES[key].margins == "sleeping"]
    two, four, plain = (
        [
            row
            for key, row in by_key.items()
            if (case := CASES[key]).margins == "computing"
            and case.devices == devices
            and case.gives_way == gives_way
        ]
        for devices, gives_way in ((2, True), (4, True), (4, False))
    )
    return record.write(
        record.Record(
            benchmark="fill_runtime",
            workload="1f1b-20ms",
            question="Do fill jobs use the bubbles of a real pipeline, and what does that cost?",
            command=record.command("fill_runtime", arguments),
            seed=0,
            tables=(
                record.Table(
                    title=f"1F1B, F {UNIT_MS:g} ms and B {2 * UNIT_MS:g} ms, {rounds} steps with "
                    "fill work and as many without, in turns",
                    columns=(
                        "fill work",
                        "ranks",
                        "m",
                        "step ms",
                        "simulated ms",
                        "main slower %",
                        "by turns %",
                        "bubble time filled %",
                        "samples of predicted %",
                        "simulated / real samples a second - 1 %",
                        "fill slower than alone %",
                        "late",
                        "micro-steps",
                    ),
                    rows=rows,
                ),
                queue,
                summary,
            ),
            shows=(
                f"Sleeping fill work uses {_range(sleeping, 7)} % of all bubble time of at least "
                f"5 ms, and the main step changes by {_range(sleeping, 5, '+.2f')} %; under "
                f"jitter of 20 % by {by_key['jitter'][5]:+.2f} %.",
                f"Computing fill work on two ranks, a core each, uses {_range(two, 7)} %, and the "
                f"main step changes by {_range(two, 5, '+.2f')} %.",
                *_shared_cores(four, plain),
                "Simulated samples a second are off by "
                f"{_range([*sleeping, by_key['jitter']], 9, '+.1f')} % for sleeping fill work, "
                f"{_range(two, 9, '+.1f')} % for computing on two ranks; the queue's times and "
                f"throughput by {off:.1f} %.",
                f"The losses of a GPT beside {losses['micro_steps']} micro-steps of a job that "
                f"trains on the same ranks are {'' if equal else 'not '}bit-equal to those "
                f"without it, over {len(losses['with'])} steps.",
            ),
            does_not_show=(
                "GPUs: kernels already queued cannot be taken back, and streams share a device.",
                "Main jobs that compute: these sleep, so that the cores are the fill work's and "
                "the network threads'.",
                "Where four ranks share two cores: fill works wait for each other there, and how "
                "long is fitted and differs from run to run.",
                "Long runs: each case is a minute.",
            ),
            notes=(
                f"bubbles of at least 5 ms of the steps without fill work count: waits, the wait "
                f"for the first forward, and the time after the last action; "
                f"{PROFILE_STEPS} steps measure them first",
                f"an action takes {answers['calibration']['overhead_ns'] / MS:.2f} ms beside its "
                "layers, fitted once on steps without fill work; how much slower a computing job "
                f"is in bubbles than alone is fitted on {FITTING_ROUNDS} filled steps, one "
                "number a job; the rest is prediction",
                "margins: "
                + ", ".join(f"{name} {m.margin:g}" for name, m in MARGINS.items())
                + "; 0.5 ms for handing over",
                "gloo, one torch thread a rank, 1 KiB messages",
                *([f"not run: {', '.join(without)}"] if without else []),
            ),
        )
    )
