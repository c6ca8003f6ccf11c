"""What a search within memory tries and finds: plans to begin from, one play, and its limits."""

from __future__ import annotations

import time
from dataclasses import dataclass

from octotune.contract import Cluster, Stage, Workload, build_costs
from octotune.offload.pages import NEVER, Pages, Rule
from octotune.offload.planning import Keys, Paged, memory_over, paged, pages_of, simulated
from simulator.actions import CopySchedule, Schedule
from simulator.costs import Costs
from simulator.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A plan to begin from; it need not fit the memory."""

    name: str
    stages: tuple[Stage, ...]
    schedule: Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan that fits, and what made it."""

    source: str
    stages: tuple[Stage, ...]
    schedule: Schedule
    copies: CopySchedule | None
    step_ns: int
    bubble_fraction: float
    peak_bytes: tuple[int, ...]
    keys: Keys
    rule: Rule

    @property
    def num_copies(self) -> int:
        """How many copies it makes, both ways."""
        return 0 if self.copies is None else len(self.copies.codes)


@dataclass(slots=True, kw_only=True)
class Limits:
    """How much may be tried; evaluations alone make a search repeatable."""

    time_limit_s: float | None = None
    max_evaluations: int | None = None
    evaluations: int = 0
    begin_s: float = 0.0

    def __post_init__(self) -> None:
        self.begin_s = time.monotonic()

    def spent(self) -> float:
        """Return the part that is used up."""
        parts = [0.0]
        if self.time_limit_s is not None:
            parts.append((time.monotonic() - self.begin_s) / self.time_limit_s)
        if self.max_evaluations is not None:
            parts.append(self.evaluations / self.max_evaluations)
        return max(parts)


class Bench:
    """One problem: plays keys under rules and lets the simulator judge."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        num_microbatches: int,
        limits: Limits,
        *,
        offload: bool,
        target_ns: int = 0,
    ) -> None:
        self.workload = workload
        self.cluster = cluster
        self.num_microbatches = num_microbatches
        self.limits = limits
        self.offload = offload
        self.target_ns = target_ns
        self._costs: dict[tuple[Stage, ...], Costs] = {}
        self._pages: dict[tuple[tuple[Stage, ...], bytes], Pages] = {}

    def costs(self, stages: tuple[Stage, ...]) -> Costs:
        """Return the costs of stages."""
        known = self._costs.get(stages)
        if known is None:
            if len(self._costs) > 64:
                self._costs.clear()
                self._pages.clear()
            known = build_costs(self.workload, self.cluster, stages, self.num_microbatches)
            self._costs[stages] = known
        return known

    def try_out(
        self, source: str, stages: tuple[Stage, ...], keys: Keys, rule: Rule, limit_ns: int = NEVER
    ) -> tuple[Found, Timeline] | None:
        """Play once; None where it does not fit, or ends at `limit_ns` or later."""
        self.limits.evaluations += 1
        costs = self.costs(stages)
        key = stages, keys.split.tobytes() + keys.stays.tobytes()
        pages = self._pages.get(key)
        if pages is None:
            pages = self._pages[key] = pages_of(
                costs, keys.split, stays=keys.stays | (not self.offload)
            )
        played = paged(pages, keys, rule, limit_ns=limit_ns)
        if played is None:
            return None
        timeline = simulated(played, costs)
        if timeline.step_ns >= limit_ns or memory_over(timeline) > 0:
            return None
        return _found(source, stages, keys, rule, played, timeline), timeline

    def done(self, best: Found | None) -> bool:
        """Whether to stop."""
        return self.limits.spent() >= 1.0 or (best is not None and best.step_ns <= self.target_ns)


def _found(
    source: str,
    stages: tuple[Stage, ...],
    keys: Keys,
    rule: Rule,
    played: Paged,
    timeline: Timeline,
) -> Found:
    return Found(
        source=source,
        stages=stages,
        schedule=played.schedule,
        copies=played.copies,
        step_ns=timeline.step_ns,
        bubble_fraction=timeline.bubble_fraction,
        peak_bytes=tuple(timeline.peak_bytes.tolist()),
        keys=keys,
        rule=rule,
    )
