"""What are a fleet's bubbles worth, at 1K to 8K GPUs, and by which policy?

The main job is PipeFill's simulated one: 40B parameters, tensor parallel 8, 16 stages, minibatches
of 1,024 sequences of 2,048 tokens in microbatches of 2, on V100s of 16 GB. Three constants are
fitted: the time of a microbatch slot and the fixed slots of an iteration, from the 82 days at 1K
and the 26 days at 8K, and one fill rate for each mix of jobs: the factor on the ready models'
roofline times that gives the published utilisation of that mix at 8K. Iterations come from our
simulator, what a job makes in a bubble from the packing, and days of a fleet are played event by
event; all else is prediction, beside what was published.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import cache

import numpy as np

from benchmarks import record
from octotune.check import check
from octotune.contract import Cluster, Layer, Plan, Workload
from octotune.fill.fleet import FleetConfig, FleetReport, Handover, play
from octotune.fill.models import find_hardware
from octotune.fill.policies import BUILT_IN
from octotune.fill.traces import Part, Synthetic, draw
from octotune.schedules import find_family, plan_from
from simulator.fleet import FleetResult
from simulator.timeline import Timeline

DAY_NS, HOUR_NS = 86_400 * 10**9, 3_600 * 10**9
STAGES, TENSOR_PARALLEL = 16, 8
GPUS_A_REPLICA = STAGES * TENSOR_PARALLEL
PARAMETERS, SEQUENCE, MINIBATCH, MICROBATCH = 40e9, 2048, 1024, 2
TOKENS = 1e12  # assumed: only the absolute time of a slot depends on it
SCALES = (1024, 2048, 4096, 8192)
PUBLISHED_DAYS = {1024: 82, 4096: 34, 8192: 26}
MODELS = ("efficientnet", "bert-base", "bert-large", "swin-large", "xlm-r-xl")
MIXED = tuple(
    Part(model=model, kind=kind) for model in MODELS for kind in ("inference", "training")
)
INFERENCE = tuple(Part(model=model, kind="inference") for model in ("bert-base", "bert-large"))
FREE_GIB = 4  # about a quarter of the GPU, as published
# Published: about 30 % slower than on a GPU of its own, with 68 % of bubble time filled.
SLOWER, MARGIN = 1 / 0.7, 0.27
THRESHOLD_NS, SWITCH_NS = 10**8, 4 * 10**7
MEDIAN_NS = 2 * HOUR_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class Main:
    """The fitted constants of the main job."""

    slot_ns: float
    fixed_slots: float

    def days(self, num_gpus: int) -> float:
        """Return the days of training by the simulated step."""
        iterations = TOKENS / (MINIBATCH * SEQUENCE)
        return self.timeline(num_gpus, "gpipe").step_ns * iterations / DAY_NS

    def timeline(
        self, num_gpus: int, schedule: str, *, shrink: float = 1.0, free_gib: int = FREE_GIB
    ) -> Timeline:
        """Return the simulated step; `shrink` 0.5 halves all its times."""
        return check(self.plan(num_gpus, schedule, shrink=shrink, free_gib=free_gib)).timeline

    def plan(
        self, num_gpus: int, schedule: str, *, shrink: float = 1.0, free_gib: int = FREE_GIB
    ) -> Plan:
        """Return a published schedule of the main job."""
        return plan_from(
            find_family(schedule),
            self.workload(shrink=shrink, free_gib=free_gib),
            Cluster.equal(STAGES, memory_bytes=16 * 2**30),
            microbatches(num_gpus),
        )

    def workload(self, *, shrink: float = 1.0, free_gib: int = FREE_GIB, cut: int = 1) -> Workload:
        """Return the main job as `cut` layers a stage; a slot is a stage's F and B, 1 to 2."""
        third = self.slot_ns * shrink / 3 / cut
        return Workload(
            name="40B",
            layers=tuple(
                Layer(
                    name=f"layers.{i}",
                    forward_ns=round(third),
                    input_grad_ns=round(third),
                    weight_grad_ns=round(third),
                    optimizer_ns=round(self.fixed_slots * self.slot_ns * shrink / cut),
                    param_bytes=0,
                    state_bytes=(16 - free_gib) * 2**30 // cut,
                    saved_bytes=0,
                    output_bytes=0,
                )
                for i in range(STAGES * cut)
            ),
        )


def microbatches(num_gpus: int) -> int:
    """Return the microbatches of a replica."""
    return MINIBATCH * GPUS_A_REPLICA // (num_gpus * MICROBATCH)


def fitted_main() -> Main:
    """Fit slot and fixed slots to the days at 1K and 8K: two equations in two unknowns.

    A day is slots x slot time x iterations, and an iteration has m + 15 + fixed slots.
    """
    (low, low_days), (high, high_days) = (
        (microbatches(num), PUBLISHED_DAYS[num]) for num in (8192, 1024)
    )
    iterations = TOKENS / (MINIBATCH * SEQUENCE)
    days_a_slot = (high_days - low_days) / (high - low)
    return Main(
        slot_ns=days_a_slot * DAY_NS / iterations,
        fixed_slots=low_days / days_a_slot - low - (STAGES - 1),
    )


def main_flops_a_slot() -> float:
    """Return the useful operations of a GPU in a slot: 6 a parameter and token."""
    return 6 * PARAMETERS / STAGES / TENSOR_PARALLEL * MICROBATCH * SEQUENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What filling came to."""

    report: FleetReport
    gain: float  # fill operations over the main job's, in the same time
    tera_a_second: float  # fill operations a second and GPU


def fill(
    main: Main,
    num_gpus: int,
    mix: tuple[Part, ...],
    scale: float,
    *,
    schedule: str = "gpipe",
    timeline: Timeline | None = None,
    shrink: float = 1.0,
    free_gib: int = FREE_GIB,
    replicas: int | None = None,
    hours: int = 24,
    margin: float = MARGIN,
    spreads: tuple[float, float] = (0.02, 0.05),
    seed: int = 0,
) -> Outcome:
    """Play `hours` of a fleet that never runs out of jobs.

    `replicas` fewer than there are give the same shares sooner.
    """
    if timeline is None:
        timeline = main.timeline(num_gpus, schedule, shrink=shrink, free_gib=free_gib)
    replicas = num_gpus // GPUS_A_REPLICA if replicas is None else replicas
    simulated = replicas * GPUS_A_REPLICA
    what = Synthetic(
        num_jobs=4 * simulated,
        backlog=2 * simulated,
        arrivals_per_hour=simulated / 12,
        median_ns=MEDIAN_NS,
    )
    jobs = draw(what, mix, find_hardware("v100"), time_scale=scale, seed=seed)
    config = FleetConfig(
        plan="made here",
        replicas=replicas,
        gpus_per_device=TENSOR_PARALLEL,
        hardware="v100",
        mix=mix,
        synthetic=what,
        policy="fifo",
        handover=Handover(
            threshold_ns=THRESHOLD_NS, switch_ns=SWITCH_NS, margin=margin, slower=SLOWER
        ),
        main_spread=spreads[0],
        fill_spread=spreads[1],
        horizon_ns=hours * HOUR_NS,
        seed=seed,
    )
    report = play(timeline, jobs, config, BUILT_IN["fifo"], time_scale=scale, misfits=True)
    flops = np.array([model.flops(kind) for model, kind in jobs.kinds], dtype=float)
    done = float((report.result.samples_done * flops[jobs.trace.kind]).sum())
    of_main = main_flops_a_slot() * microbatches(num_gpus) * report.result.steps * simulated
    seconds = report.result.duration_ns / 1e9
    return Outcome(
        report=report,
        gain=done / (of_main * shrink),
        tera_a_second=done / seconds / simulated / 1e12,
    )


def fitted_scale(main: Main, mix: tuple[Part, ...], gain: float) -> float:
    """Return the factor on the fill models' times that makes the gain at 8K the published one."""
    scale = 2.5
    for _ in range(5):
        found = fill(main, 8192, mix, scale, replicas=8).gain
        if abs(found / gain - 1) < 0.003:
            break
        scale *= found / gain
    return scale


def relative_utilisation(main: Main, num_gpus: int) -> float:
    """Return the share of a GPU's time in the main job's compute, the fixed slots left out."""
    slots = main.timeline(num_gpus, "gpipe").step_ns / main.slot_ns
    return microbatches(num_gpus) / slots


@cache
def tuned_timeline(main: Main, num_gpus: int, seconds: float) -> Timeline:
    """Return the step of a tuned plan of the main job, two layers a stage of the baseline."""
    from octotune.tune import tune

    plan = tune(
        main.workload(cut=2),
        Cluster.equal(STAGES, memory_bytes=16 * 2**30),
        num_microbatches=microbatches(num_gpus),
        time_limit_s=seconds,
    )
    return check(plan).timeline


def published_tables(main: Main, scales: dict[str, float]) -> list[record.Table]:
    """Predict what was published: days, utilisation and GPUs saved by scale and mix."""
    days = record.Table(
        title="Days to train 40B",
        columns=("GPUs", "microbatches", "simulated days", "published days", "use"),
        rows=tuple(
            (
                num,
                microbatches(num),
                main.days(num),
                PUBLISHED_DAYS.get(num),
                "fitted" if num in (1024, 8192) else "predicted",
            )
            for num in SCALES
        ),
    )
    plain = {num: relative_utilisation(main, num) for num in SCALES}
    outcomes = {
        (name, num): fill(main, num, mix, scales[name])
        for name, mix in (("mixed", MIXED), ("inference", INFERENCE))
        for num in SCALES
    }
    rows = []
    saved = {
        ("mixed", 2048): "200-300",
        ("mixed", 4096): "600-900",
        ("mixed", 8192): "1500-2000",
        ("inference", 8192): "2000-2600",
    }
    for (name, num), outcome in outcomes.items():
        report = outcome.report
        assert report.slowdown is not None
        rows.append(
            (
                name,
                num,
                100 * outcome.gain,
                100 * report.filled_fraction,
                100 * report.slowdown.mean,
                round(report.gpus_saved),
                saved.get((name, num)),
                int(report.result.done.sum()),
            )
        )
    fleet = record.Table(
        title="24 hours of the filled fleet, GPipe",
        columns=(
            "mix",
            "GPUs",
            "more work %",
            "bubble time filled %",
            "main slower %",
            "GPUs saved",
            "published GPUs saved",
            "fill jobs done",
        ),
        rows=tuple(rows),
    )

    def filled(name: str, num: int) -> float:
        return plain[num] * (1 + outcomes[name, num].gain)

    claims = (
        (
            "mixed, 4K filled / plain 2K",
            100 * filled("mixed", 4096) / plain[2048],
            89.0,
            "predicted",
        ),
        ("mixed, 8K filled / plain 4K", 100 * filled("mixed", 8192) / plain[4096], 92.0, "fitted"),
        (
            "BERT inference, 8K filled / plain 4K",
            100 * filled("inference", 8192) / plain[4096],
            106.5,
            "predicted",
        ),
        ("BERT inference, 8K, more work", 100 * outcomes["inference", 8192].gain, 63.0, "fitted"),
        ("mixed, 1K, more work", 100 * outcomes["mixed", 1024].gain, "5-15", "predicted"),
    )
    return [
        days,
        fleet,
        record.Table(
            title="Utilisation",
            columns=("claim", "simulated %", "published %", "use"),
            rows=claims,
        ),
    ]


def direction_table(main: Main, scales: dict[str, float]) -> record.Table:
    """Change one thing at a time: schedule, bubble size, free memory."""
    scale = scales["mixed"]

    def run(num: int, **changed: object) -> float:
        return fill(main, num, MIXED, scale, replicas=4, **changed).tera_a_second  # type: ignore[arg-type]

    pairs = (
        ("GPipe instead of 1F1B, 1K", run(1024, schedule="1f1b"), run(1024), "about +20"),
        ("GPipe instead of 1F1B, 8K", run(8192, schedule="1f1b"), run(8192), "about +5"),
        ("bubbles half as long, 8K", run(8192), run(8192, shrink=0.5), "-5.3"),
        ("4 GiB free instead of 2, 8K", run(8192, free_gib=2), run(8192, free_gib=4), "+30"),
        ("8 GiB free instead of 4, 8K", run(8192, free_gib=4), run(8192, free_gib=8), "+12.2"),
    )
    return record.Table(
        title="One change at a time, mixed jobs: fill TFLOPS a GPU",
        columns=("change", "before", "after", "difference %", "published %"),
        rows=tuple(
            (name, before, after, 100 * (after / before - 1), published)
            for name, before, after, published in pairs
        ),
    )


def margin_table(main: Main, scale: float) -> record.Table:
    """Hand over more and more of each bubble, under durations that vary much."""
    rows = []
    for margin in (0.0, 0.05, 0.1, 0.2, MARGIN):
        outcome = fill(main, 8192, MIXED, scale, replicas=1, margin=margin, spreads=(0.05, 0.2))
        late = outcome.report.slowdown
        assert late is not None
        rows.append(
            (
                margin,
                100 * outcome.report.filled_fraction,
                100 * late.mean,
                100 * late.worst,
                100 * late.late_share,
            )
        )
    return record.Table(
        title="Margins at 8K: main actions +-5 %, fill work +-20 %",
        columns=(
            "margin",
            "bubble time filled %",
            "main slower %, mean",
            "main slower %, worst step",
            "bubbles overrun %",
        ),
        rows=tuple(rows),
    )


def tuned_table(main: Main, scales: dict[str, float], seconds: float) -> record.Table:
    """Fill what a tuned plan leaves, beside GPipe and 1F1B."""
    rows = []
    for num in SCALES:
        base = main.timeline(num, "gpipe")
        for name in ("gpipe", "1f1b", "tuned"):
            timeline = (
                tuned_timeline(main, num, seconds) if name == "tuned" else main.timeline(num, name)
            )
            outcome = fill(main, num, MIXED, scales["mixed"], timeline=timeline, replicas=4)
            fits = sum(any(row) for row in outcome.report.packings)
            faster = base.step_ns / timeline.step_ns
            rows.append(
                (
                    num,
                    name,
                    timeline.step_ns / 1e9,
                    100 * timeline.bubble_fraction,
                    fits,
                    100 * outcome.report.filled_fraction,
                    faster,
                    100 * outcome.gain,
                    faster * (1 + outcome.gain),
                )
            )
    return record.Table(
        title="Tuned plans, filled with mixed jobs",
        columns=(
            "GPUs",
            "plan",
            "step s",
            "bubbles %",
            "kinds of jobs that fit, of 10",
            "of them filled %",
            "main job, GPipe = 1",
            "more work %",
            "main and fill work, GPipe's main = 1",
        ),
        rows=tuple(rows),
    )


def compared(tables: list[record.Table]) -> list[str]:
    """Say in words which of tuning and filling is worth more at which scale."""
    rows = next(table for table in tables if table.title.startswith("Tuned plans")).rows
    total = {(row[0], row[1]): float(row[-1] or 0) for row in rows}
    alone = {row[0]: float(row[6] or 0) for row in rows if row[1] == "tuned"}
    return [
        f"At {num} GPUs filling GPipe's bubbles gives {100 * (total[num, 'gpipe'] - 1):.0f} % "
        f"more work, tuning alone {100 * (alone[num] - 1):.0f} %, and both together "
        f"{100 * (total[num, 'tuned'] - 1):.0f} %, of main and fill work in equal operations."
        for num in SCALES
    ]


# Without the training of large models, whose longest job alone would make the makespan.
POLICY_MIX = tuple(
    part
    for part in MIXED
    if part.kind == "inference" or part.model in ("efficientnet", "bert-base")
)
POLICY_SIGMA = 0.5


def policy_jobs(load: float, num_jobs: int, num_gpus: int, seed: int) -> Synthetic:
    """Say which jobs keep the fleet busy to a load; half of them have a deadline.

    A GPU's bubbles do about a twelfth of what a GPU of its own does at 1K GPUs.
    """
    work_hours = MEDIAN_NS / HOUR_NS * np.exp(POLICY_SIGMA**2 / 2) / 0.08
    return Synthetic(
        num_jobs=num_jobs,
        arrivals_per_hour=load * num_gpus / work_hours,
        median_ns=MEDIAN_NS,
        sigma=POLICY_SIGMA,
        deadline_share=0.5,
        slack=(14.0, 60.0),
    )


def policy_tables(
    main: Main, scale: float, num_jobs: int = 10_000, num_gpus: int = 1024, seed: int = 0
) -> tuple[record.Table, dict[str, dict[str, FleetResult]]]:
    """Give the same jobs to each policy, at a low and a high load."""
    timeline = main.timeline(num_gpus, "gpipe")
    rows, named = [], {}
    for label, load in (("low load", 1.15), ("high load", 2.5)):
        what = policy_jobs(load, num_jobs, num_gpus, seed)
        jobs = draw(what, POLICY_MIX, find_hardware("v100"), time_scale=scale, seed=seed)
        named[label] = {}
        for name in ("fifo", "sjf", "makespan", "deadline"):
            config = FleetConfig(
                plan="made here",
                replicas=num_gpus // GPUS_A_REPLICA,
                gpus_per_device=TENSOR_PARALLEL,
                hardware="v100",
                mix=POLICY_MIX,
                synthetic=what,
                handover=Handover(
                    threshold_ns=THRESHOLD_NS, switch_ns=SWITCH_NS, margin=MARGIN, slower=SLOWER
                ),
                seed=seed,
            )
            begin = time.perf_counter()
            result = play(timeline, jobs, config, BUILT_IN[name], time_scale=scale).result
            seconds = time.perf_counter() - begin
            named[label][name] = result
            rows.append(
                (
                    label,
                    name,
                    result.mean_completion_ns / HOUR_NS,
                    result.makespan_ns / DAY_NS,
                    result.deadlines_met,
                    result.num_deadlines,
                    100 * result.occupied_share,
                    seconds,
                )
            )
    table = record.Table(
        title=f"Policies, {num_jobs} jobs over {num_gpus} devices",
        columns=(
            "load",
            "policy",
            "mean completion h",
            "makespan days",
            "deadlines met",
            "of",
            "devices taken %",
            "packing and playing s",
        ),
        rows=tuple(rows),
    )
    return table, named


def main(arguments: list[str]) -> None:
    """Simulate and record."""
    parser = argparse.ArgumentParser(prog="fleet", description=__doc__)
    parser.add_argument("--tune-seconds", type=float, default=20, help="of each tuned plan")
    options = parser.parse_args(arguments)
    job = fitted_main()
    # 92 % of plain 4K at 8K, as more work at 8K; and the paper's 63 %
    mixed_gain = 0.92 * relative_utilisation(job, 4096) / relative_utilisation(job, 8192) - 1
    scales = {
        "mixed": fitted_scale(job, MIXED, mixed_gain),
        "inference": fitted_scale(job, INFERENCE, 0.63),
    }
    tables = published_tables(job, scales)
    tables.append(direction_table(job, scales))
    tables.append(margin_table(job, scales["mixed"]))
    tables.append(tuned_table(job, scales, options.tune_seconds))
    policies, named = policy_tables(job, scales["mixed"])
    tables.append(policies)
    path, _ = record.write(
        record.Record(
            benchmark="fleet",
            workload="40B-1k-8k",
            question="What are a fleet's bubbles worth at 1K to 8K GPUs, and by which policy?",
            command=record.command("fleet", arguments),
            seed=0,
            notes=(
                f"fitted: a slot of {job.slot_ns / 1e6:.1f} ms and {job.fixed_slots:.2f} fixed "
                "slots an iteration (82 days at 1K, 26 at 8K); factors on the ready models' "
                f"V100 times of {scales['mixed']:.2f} for the mix (92 % of plain 4K at 8K) and "
                f"{scales['inference']:.2f} for BERT inference (+63 % at 8K)",
                "taken from what was published, not fitted: fill work 1 / 0.7 times as slow in a "
                f"bubble as alone, a margin of {MARGIN} so that about 68 % is filled, "
                f"{FREE_GIB} GiB free",
                f"assumed: 10^12 tokens, bubbles of at least {THRESHOLD_NS / 1e6:.0f} ms, "
                f"{SWITCH_NS / 1e6:.0f} ms of each for handing over, a slot is one third "
                "forward; the mix is the five models in equal shares, half inference, half "
                "training; times alone log-normal, median 2 h, sigma 1; jobs never run out; "
                "first come, first served; the fixed slots are no bubbles",
                "main slower: the worst-filled step, main actions +-2 % and fill work +-5 %",
                "a job's speed alone is that of its best configuration in 16 GB",
                "the policies are drawn in the picture of this record's name",
                f"tuned plans: two layers a stage, {options.tune_seconds:.0f} s of search, no "
                "memory limit on activations (none are counted here)",
            ),
            tables=tuple(tables),
            shows=(
                "With no constant per row, days, utilisation and GPUs saved come out beside the "
                "published values; rows marked predicted had no part in the fit.",
                *compared(tables),
            ),
            does_not_show=(
                "How fast real fill jobs run: the roofline's factor and the 30 % are constants.",
                "Published numbers are second-hand, some of them read off charts.",
            ),
        )
    )
    from octotune.report.fleet import policies_picture

    policies_picture(named, path.with_suffix(".png"))
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
