"""From the search's arrays to plans that the simulator has judged, and back to numbers.

Everything reported comes through `judge`: the contract's exact costs and the compiled engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octotune.contract import Cluster, Plan, Stage, Workload, build_costs
from octotune.partition import stages_of
from octotune.tune.genome import NUM_STAGES, Genome, Run
from octotune.tune.problem import Int64
from simulator.actions import MICROBATCH_SHIFT, STAGE_SHIFT, CopySchedule, Kind, Schedule
from simulator.costs import Costs
from simulator.engine import simulate
from simulator.timeline import Timeline

_F, _I, _W = int(Kind.F), int(Kind.I), int(Kind.W)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A feasible plan in parts, with the step and peaks that the simulator gives it."""

    source: str
    stages: tuple[Stage, ...]
    schedule: Schedule
    step_ns: int
    bubble_fraction: float
    peak_bytes: tuple[int, ...]
    copies: CopySchedule | None = None

    @property
    def num_stages(self) -> int:
        """How many stages the plan has."""
        return len(self.stages)


def genome_stages(genome: Genome) -> tuple[Stage, ...]:
    """Return the stages of a plan."""
    num_stages = int(genome.meta[NUM_STAGES])
    stages = stages_of(genome.cut[: num_stages + 1].tolist(), genome.device[:num_stages].tolist())
    return tuple(
        Stage(layers=stage.layers, device=stage.device, recompute=bool(again))
        for stage, again in zip(stages, genome.recompute, strict=False)
    )


def order_schedule(order: Int64, begin: Int64, split: Int64) -> Schedule:
    """Return the schedule of tokens (3 x stage + kind), one row a device.

    `split[s] == 0` makes the I of stage s a B. The n-th token of a stage and kind is microbatch n.
    """
    total = int(begin[-1])
    tokens = order[:total]
    kinds = np.array([_F, _I, _W], dtype=np.int64)[tokens % 3]
    stages = tokens // 3
    kinds[(kinds == _I) & (split[stages] == 0)] = int(Kind.B)
    # a stable sort by token lists each token's occurrences in order
    by_token = np.argsort(tokens, kind="stable")
    counts = np.bincount(tokens)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    microbatches = np.empty(total, dtype=np.int64)
    microbatches[by_token] = np.arange(total) - firsts
    codes = (stages << STAGE_SHIFT) | (microbatches << MICROBATCH_SHIFT) | kinds
    return Schedule(codes, begin.copy())


def run_schedule(genome: Genome, run: Run) -> Schedule:
    """Return the order that the list scheduler left behind."""
    return order_schedule(run.order, run.begin, genome.split)


def judge(
    workload: Workload,
    cluster: Cluster,
    num_microbatches: int,
    stages: Sequence[Stage],
    schedule: Schedule,
    source: str,
) -> Candidate | None:
    """Return the plan with its simulated numbers, or None where it exceeds some memory."""
    costs = build_costs(workload, cluster, stages, num_microbatches)
    timeline = simulate(schedule, costs)
    if memory_shortfall(costs, timeline) is not None:
        return None
    return Candidate(
        source=source,
        stages=tuple(stages),
        schedule=schedule,
        step_ns=timeline.step_ns,
        bubble_fraction=timeline.bubble_fraction,
        peak_bytes=tuple(timeline.peak_bytes.tolist()),
    )


def memory_shortfall(costs: Costs, timeline: Timeline) -> tuple[int, int] | None:
    """Return the device that exceeds its memory most, and by how much; None: none does."""
    over = timeline.peak_bytes - costs.memory_bytes
    worst = int(np.argmax(over))
    return (worst, int(over[worst])) if over[worst] > 0 else None


def candidate_plan(
    candidate: Candidate, workload: Workload, cluster: Cluster, num_microbatches: int
) -> Plan:
    """Return the plan file's value, without predictions."""
    return Plan(
        workload=workload,
        cluster=cluster,
        num_microbatches=num_microbatches,
        stages=candidate.stages,
        actions=candidate.schedule.words(),
        offload=None if candidate.copies is None else candidate.copies.words(),
    )
