"""Days of a fleet: replicas of a plan whose bubbles work through a trace of fill jobs.

A configuration file, format `octotune-fleet` (docs/fill.md), says what the main job runs, how many
replicas there are, which jobs come, and by which policy they get devices. What a kind of job makes
in a stage's bubbles is packed once; `simulator.fleet` plays the days.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from octotune.contract.form import add_header
from octotune.contract.plan import Plan
from octotune.contract.quantities import Amount, Count, Index, Microbatches, Name
from octotune.fill.bubbles import Bubble, find_bubbles, resting_bytes
from octotune.fill.jobs import Configuration, FillJob, MicroStep
from octotune.fill.models import configurations_of, find_hardware
from octotune.fill.packing import Margins, Packing, Room
from octotune.fill.policies import find_policy
from octotune.fill.rates import rates_of, refuse_endless
from octotune.fill.traces import Csv, Drawn, Part, Positive, Share, Synthetic, draw, read_csv
from simulator.fleet import Fleet, FleetResult, Policy, Rules, simulate_fleet

if TYPE_CHECKING:
    from simulator.overruns import Slowdown
    from simulator.timeline import Timeline


class MainJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published schedule of a workload on a cluster, cut evenly."""

    workload: Name
    cluster: Name
    schedule: Name
    microbatches: Microbatches


class Handover(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of a bubble is handed over, and how long work takes there.

    In a bubble a micro-step takes `slower` times what it takes alone.
    """

    threshold_ns: Count = 5_000_000
    switch_ns: Amount = 0
    margin: Annotated[float, Meta(ge=0, lt=1)] = 0.2
    slower: Annotated[float, Meta(ge=1)] = 1.0
    free_bytes: Amount | None = None  # in place of what the plan leaves


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a fleet runs. `plan` is a path beside the file, or `main` a published schedule."""

    format: Literal["octotune-fleet"] = "octotune-fleet"
    version: Literal[1] = 1
    name: str = ""
    plan: Name | None = None
    main: MainJob | None = None
    replicas: Count
    gpus_per_device: Count = 1
    hardware: Name
    mix: Annotated[tuple[Part, ...], Meta(min_length=1)]
    synthetic: Synthetic | None = None
    trace: Csv | None = None
    policy: str = "sjf"
    handover: Handover = Handover()
    main_spread: Share = 0.02
    fill_spread: Share = 0.05
    checkpoint_ns: Amount = 0
    move_ns: Amount = 0
    preempt_above: Positive | None = None
    failures_per_hour: Annotated[float, Meta(ge=0)] = 0.0
    most_failures: Index = 3
    horizon_ns: Count | None = None
    optimal: bool = False
    seed: Index = 0

    def __post_init__(self) -> None:
        for one, other in (("plan", "main"), ("synthetic", "trace")):
            if (getattr(self, one) is None) == (getattr(self, other) is None):
                raise ValueError(f"{one} or {other} is needed, and not both")


class _Header(msgspec.Struct):
    format: Literal["octotune-fleet"]
    version: Literal[1]


add_header(FleetConfig, _Header)


def read_fleet(source: str | Path) -> FleetConfig:
    """Read a fleet's configuration. Raises MalformedError: one line."""
    from octotune.contract.files import read_file

    return read_file(source, FleetConfig)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FleetReport:
    """What the days came to. T kinds of jobs, S stages' devices."""

    name: str
    policy: str
    timeline: Timeline
    jobs: Drawn
    packings: tuple[tuple[Packing | None, ...], ...]  # [T][S]
    result: FleetResult
    slowdown: Slowdown | None  # None: the cluster shares NICs, where it is not known
    replicas: int
    gpus_per_device: int
    alone_ns: tuple[float, ...]  # [T] of a sample on a GPU of its own
    fill_ns: int  # micro-steps of the work done, over all GPUs

    @property
    def num_gpus(self) -> int:
        """How many GPUs there are."""
        return self.result.fleet.num_devices

    @property
    def main_share(self) -> float:
        """The share of GPU time in which the main job computes."""
        return 1.0 - self.timeline.bubble_fraction

    @property
    def fill_share(self) -> float:
        """The share of GPU time in which fill jobs' micro-steps compute."""
        total = self.num_gpus * self.result.duration_ns
        return self.fill_ns / total if total else 0.0

    @property
    def filled_fraction(self) -> float:
        """The share of the main job's idle time that micro-steps take."""
        return self.fill_share / (1.0 - self.main_share) if self.main_share < 1 else 0.0

    @property
    def gpus_saved(self) -> float:
        """How many GPUs of their own would have done the fill work in the same time."""
        duration = self.result.duration_ns
        alone = np.array(self.alone_ns)[self.jobs.trace.kind]
        return float((self.result.samples_done * alone).sum()) / duration if duration else 0.0


def run_fleet(
    config: FleetConfig,
    *,
    folder: Path = Path(),
    policy: Policy | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> FleetReport:
    """Simulate a fleet.

    Args:
        config: what it runs.
        folder: where its paths begin.
        policy: in place of the one that the configuration names.
        progress: told what is done, and the share of it, now and then.

    Raises:
        MalformedError: if something it names is not there or malformed.
        InfeasibleError: if a kind of job fits in no bubble; it names the nearest miss.
        ScheduleError, OutOfMemoryError: if the plan breaks a rule.
    """
    from octotune.check import check

    policy = find_policy(config.policy) if policy is None else policy
    hardware = find_hardware(config.hardware)
    timeline = check(_plan_of(config, folder)).timeline
    if config.synthetic is not None:
        jobs = draw(config.synthetic, config.mix, hardware, seed=config.seed)
    else:
        assert config.trace is not None  # one of the two is there
        jobs = read_csv(config.trace, config.mix, hardware, folder=folder, seed=config.seed)
    return play(timeline, jobs, config, policy, progress=progress)


def play(
    timeline: Timeline,
    jobs: Drawn,
    config: FleetConfig,
    policy: Policy,
    *,
    time_scale: float = 1.0,
    misfits: bool = False,
    progress: Callable[[str, float], None] | None = None,
) -> FleetReport:
    """Simulate a fleet whose main job repeats a step, with jobs that are drawn already.

    `time_scale` multiplies the times of the ready models' micro-steps, as it did for `jobs`. With
    `misfits`, jobs that fit in no bubble wait for ever; else they are refused.
    """
    hardware, handover = find_hardware(config.hardware), config.handover
    margins = Margins(
        threshold_ns=handover.threshold_ns, switch_ns=handover.switch_ns, margin=handover.margin
    )
    bubbles = find_bubbles(timeline, threshold_ns=margins.threshold_ns)
    rooms = [
        _limited(Room.of(row, rests, margins), handover.free_bytes)
        for row, rests in zip(bubbles, resting_bytes(timeline), strict=True)
    ]
    fill_jobs = [
        FillJob(
            name=f"{model.name} {kind}",
            kind=kind,
            samples=1,
            configurations=tuple(
                _slower(configuration, handover.slower)
                for configuration in configurations_of(model, hardware, kind, time_scale)
            ),
        )
        for model, kind in jobs.kinds
    ]
    rates = rates_of(
        fill_jobs,
        rooms,
        timeline.step_ns,
        optimal=config.optimal,
        seed=config.seed,
        misfits=misfits,
        progress=None if progress is None else lambda share: progress("packing", share),
    )
    packings = tuple(rates.packings[kind] for kind in rates.kind)
    rows = list(rates.kind)
    late = _slowdown(timeline, bubbles, packings, fill_jobs, margins, config)
    step_ns = round(timeline.step_ns * (1 + (late.mean if late else 0)))
    num_stages = len(rooms)
    fleet = Fleet(
        step_ns=step_ns,
        device_class=np.tile(
            np.repeat(np.arange(num_stages, dtype=np.int64), config.gpus_per_device),
            config.replicas,
        ),
        cycle_samples=rates.fleet.cycle_samples[rows],
        cycle_steps=rates.fleet.cycle_steps[rows],
    )
    refuse_endless(fleet, jobs.trace, lambda job: f"job {job}")
    result = simulate_fleet(
        fleet,
        jobs.trace,
        policy,
        Rules(
            checkpoint_steps=-(-config.checkpoint_ns // step_ns),
            move_steps=-(-config.move_ns // step_ns),
            preempt_above=config.preempt_above,
            failures_per_hour=config.failures_per_hour,
            most_failures=config.most_failures,
            horizon_ns=config.horizon_ns,
            seed=config.seed,
        ),
        progress=None if progress is None else lambda share: progress("playing", share),
    )
    return FleetReport(
        name=config.name,
        policy=policy.name,
        timeline=timeline,
        jobs=jobs,
        packings=packings,
        result=result,
        slowdown=late,
        replicas=config.replicas,
        gpus_per_device=config.gpus_per_device,
        alone_ns=jobs.alone_ns,
        fill_ns=_fill_ns(result, packings),
    )


def _plan_of(config: FleetConfig, folder: Path) -> Plan:
    from octotune.contract import read_cluster, read_plan, read_workload
    from octotune.schedules import find_family, plan_from

    def beside(name: str) -> str:
        file = name.partition("#")[0]
        return str(folder / name) if (folder / file).exists() else name

    if config.plan is not None:
        return read_plan(folder / config.plan)
    assert config.main is not None  # one of the two is there
    return plan_from(
        find_family(config.main.schedule),
        read_workload(beside(config.main.workload)),
        read_cluster(beside(config.main.cluster)),
        config.main.microbatches,
    )


def _limited(room: Room, free_bytes: int | None) -> Room:
    if free_bytes is None:
        return room
    return Room(
        usable_ns=room.usable_ns,
        free_bytes=(free_bytes,) * len(room.free_bytes),
        copy_ns=room.copy_ns,
        resting_bytes=free_bytes,
    )


def _slower(configuration: Configuration, factor: float) -> Configuration:
    if factor == 1:
        return configuration
    return msgspec.structs.replace(
        configuration,
        micro_steps=tuple(
            MicroStep(
                name=step.name,
                time_ns=round(step.time_ns * factor),
                memory_bytes=step.memory_bytes,
                copy_ns=step.copy_ns,
            )
            for step in configuration.micro_steps
        ),
    )


def _fill_ns(result: FleetResult, packings: Sequence[Sequence[Packing | None]]) -> int:
    """Return the time of all micro-steps whose samples count."""
    per_sample = np.array([[p.busy_ns / p.samples if p else 0.0 for p in row] for row in packings])
    kind = result.trace.kind[result.run_job]
    of = result.fleet.device_class[result.run_device]
    return round(float((result.run_samples * per_sample[kind, of]).sum()))


def _slowdown(
    timeline: Timeline,
    bubbles: Sequence[Sequence[Bubble]],
    packings: Sequence[Sequence[Packing | None]],
    jobs: Sequence[FillJob],
    margins: Margins,
    config: FleetConfig,
) -> Slowdown | None:
    """Return what overruns cost the main job when every device runs what fills it most."""
    from simulator.actions import Action
    from simulator.overruns import Filled, slowdown

    if timeline.costs.transfer_uses_nic.any():
        return None
    place = {code: at for at, code in enumerate(timeline.schedule.codes.tolist())}
    before: list[int] = []
    length: list[int] = []
    busy: list[int] = []
    for device, row in enumerate(bubbles):
        most = np.zeros(len(row), dtype=np.int64)
        for job, of_kind in zip(jobs, packings, strict=True):
            packing = of_kind[device]
            if packing is None:
                continue
            times = np.array(
                [step.time_ns for step in job.configurations[packing.configuration].micro_steps]
            )
            for step in packing.steps:
                sums = [int(times[list(order)].sum()) if order else 0 for order in step]
                most = np.maximum(most, sums)
        for bubble, taken in zip(row, most.tolist(), strict=True):
            named = bubble.before not in ("optimizer", "end")
            before.append(place[Action.parse(bubble.before).code] if named else -1)
            length.append(bubble.length_ns)
            busy.append(taken + margins.switch_ns if taken else 0)
    return slowdown(
        timeline,
        Filled(
            before=np.array(before, dtype=np.int64),
            length_ns=np.array(length, dtype=np.int64),
            busy_ns=np.array(busy, dtype=np.int64),
        ),
        main_spread=config.main_spread,
        fill_spread=config.fill_spread,
        seed=config.seed,
    )
