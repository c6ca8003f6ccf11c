"""The fleet benchmark's main job and its fill: PipeFill's simulated 40B run, fitted once.

40B parameters, tensor parallel 8, 16 stages, minibatches of 1,024 sequences of 2,048 tokens in
microbatches of 2, on V100s of 16 GB. `fitted_main` and `fitted_scale` fit the three constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from octotune.check import check
from octotune.contract import Cluster, Layer, Plan, Workload
from octotune.fill.fleet import FleetConfig, FleetReport, Handover, play
from octotune.fill.models import find_hardware
from octotune.fill.policies import BUILT_IN
from octotune.fill.traces import Part, Synthetic, draw
from octotune.schedules import find_family, plan_from
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
