"""The cases of the fill runtime's benchmark: main jobs, fill jobs, and their plans."""

from __future__ import annotations

from typing import Any

import msgspec

from benchmarks import sleeping
from benchmarks.sleeping_plans import workload
from octotune.contract import Cluster, Plan, Workload
from octotune.fill.jobs import Configuration, FillJob, JobKind, MicroStep
from octotune.fill.make import make_fill_plan
from octotune.fill.packing import Margins
from octotune.fill.plan import FillPlan
from octotune.fill.policies import find_policy
from octotune.schedules import FAMILIES, plan_from

MS = 10**6
UNIT_MS = 20.0
LEAST_NS = 5 * MS
PROFILE_STEPS = 5
MARGINS = {
    "sleeping": Margins(threshold_ns=LEAST_NS, switch_ns=MS // 2, margin=0.08),
    "jitter": Margins(threshold_ns=LEAST_NS, switch_ns=MS // 2, margin=0.2),
    "computing": Margins(threshold_ns=LEAST_NS, switch_ns=MS // 2, margin=0.1),
}
JITTER = 0.2
ENTER_NS = 350_000  # measured: a job's own random numbers and modes take the main job's place
_ONE = (MicroStep(time_ns=1),)
FITTING_ROUNDS = 6


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of a main job and a kind of fill job."""

    name: str
    devices: int
    microbatches: int
    job: str
    margins: str
    jitter: float = 0.0
    ahead: bool = False
    gives_way: bool = True


CASES = {
    "sleeping-m4": Case(
        name="sleep 2 ms", devices=4, microbatches=4, job="sleeping", margins="sleeping"
    ),
    "sleeping-m8": Case(
        name="sleep 2 ms", devices=4, microbatches=8, job="sleeping", margins="sleeping"
    ),
    "jitter": Case(
        name="sleep 2 ms, main layers +-20 %",
        devices=4,
        microbatches=8,
        job="sleeping",
        margins="jitter",
        jitter=JITTER,
    ),
    "matrices": Case(
        name="matrix products", devices=2, microbatches=4, job="multiplying", margins="computing"
    ),
}
# each case takes most of a minute of a quiet machine
_LEFT_OUT = (
    ("training", 4, 4, True),
    ("training", 4, 4, False),
    ("inference", 4, 8, True),
)
CASES |= {
    f"{job}-{devices}x{m}{'' if gives_way else '-plain'}": Case(
        name=f"transformer {job}" + ("" if gives_way else ", not giving way"),
        devices=devices,
        microbatches=m,
        job=job,
        margins="computing",
        ahead=True,
        gives_way=gives_way,
    )
    for job in ("inference", "training")
    for devices, m, gives_way in ((2, 4, True), (4, 4, True), (4, 4, False), (4, 8, True))
    if (job, devices, m, gives_way) not in _LEFT_OUT
}


def with_overhead(cluster: Cluster, overhead_ns: int) -> Cluster:
    """Return a cluster whose devices take so much for each action beside its layers."""
    devices = tuple(
        msgspec.structs.replace(device, overhead_ns=overhead_ns) for device in cluster.devices
    )
    return msgspec.structs.replace(cluster, devices=devices)


def main_plan(case: Case, overhead_ns: int) -> Plan:
    """Return 1F1B of one sleeping layer a device: F of one unit, B of two."""
    layers = workload([(UNIT_MS,) * 3] * case.devices)
    cluster = with_overhead(Cluster.equal(case.devices), overhead_ns)
    return plan_from(FAMILIES["1f1b"], layers, cluster, case.microbatches)


def tuned_plan(layers: Workload, overhead_ns: int, seconds: float) -> Plan:
    """Return the tuner's plan of uneven layers for four devices."""
    from octotune import tune

    return tune(
        layers,
        with_overhead(Cluster.equal(4), overhead_ns),
        num_microbatches=sleeping.NUM_MICROBATCHES,
        seed=0,
        time_limit_s=seconds,
    )


def job_of(kind: str, name: str, samples: int) -> FillJob:
    """Return a job, measured alone on this machine."""
    from executor.fill.profile import profiled

    found: dict[str, tuple[JobKind, str, dict[str, Any], int]] = {
        "sleeping": ("inference", "sleeping", {"times_ms": [2.0]}, 1),
        "multiplying": ("inference", "multiplying", {"size": 192, "products": 4}, 4),
        "inference": ("inference", "transformer", {"kind": "inference"}, 2),
        "training": ("training", "transformer", {"kind": "training"}, 2),
    }
    fill_kind, factory, arguments, batch = found[kind]
    job = FillJob(
        name=name,
        kind=fill_kind,
        samples=samples,
        factory=f"benchmarks.fill_jobs:{factory}",
        arguments=arguments,
        configurations=(Configuration(batch_size=batch, micro_steps=_ONE),),
    )
    measured = profiled(
        job,
        passes=60 if kind != "training" else 20,
        # its large micro-steps find colder caches after each wait
        rest_s=0.02 if kind == "training" else 0.0,
    )
    # bytes on a CPU without a limit bind nothing, and the main job's layers say nothing of theirs
    configuration = measured.configurations[0]
    return msgspec.structs.replace(measured, configurations=(configuration,))


def slowed(job: FillJob, factor: float) -> FillJob:
    """Return a job whose micro-steps take so many times as long."""
    return msgspec.structs.replace(
        job,
        configurations=tuple(
            msgspec.structs.replace(
                configuration,
                micro_steps=tuple(
                    msgspec.structs.replace(step, time_ns=max(1, round(step.time_ns * factor)))
                    for step in configuration.micro_steps
                ),
            )
            for configuration in job.configurations
        ),
    )


def planned(case: Case, overhead_ns: int, job: FillJob, slower: float) -> FillPlan:
    """Return a fill plan with a job for each device, each so many times slower than alone."""
    job = slowed(job, slower)
    jobs = [msgspec.structs.replace(job, name=f"job {d}") for d in range(case.devices)]
    plan = main_plan(case, overhead_ns)
    return make_fill_plan(plan, jobs, find_policy("fifo"), margins=MARGINS[case.margins])
