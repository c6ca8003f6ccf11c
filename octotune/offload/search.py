"""Look for the shortest step within memory: orders, copies and recompute weighed together.

Starts are plans that need not fit: published schedules, what the tuner finds without a limit. Each
is played under a few rules (`kernel.Rule`), its keys first as they ran and then as they run within
memory. Then the best of different origin are changed, one thing at a time, and a change is kept
when the simulator says that it fits and ends no later: a rule, the keys of a stage or device, or
whether a stage is recomputed.

Recompute costs its forward again on its device, offload the waits for late copies. What each is
worth shows in the step alone, so the step decides; but stages are tried for recompute in the order
of forward time per byte freed, and given it up in the opposite one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import numpy as np
from msgspec.structs import replace as changed
from numpy.typing import NDArray

from octotune.contract import Cluster, Stage, Workload, build_costs
from octotune.offload.kernel import BACKWARD, FORWARD, NEVER, WEIGHT, Pages, Rule
from octotune.offload.planning import Keys, Paged, keys_of, memory_over, paged, pages_of, simulated
from simulator.actions import Action, CopySchedule, Kind, Schedule
from simulator.costs import Costs
from simulator.engine import simulate
from simulator.timeline import Timeline

Int64 = NDArray[np.int64]

LEAST_TRIPS = (0.8, 1.0, 1.3, 2.0, 3.0)
LEADS = (0.0, 0.3, 0.7, 1.2)
NOTICES = (0, 1, 2, 3, 4, 6)
REACHES = (0.0, 0.5, 1.0, 2.0)
SLACKS = (0.3, 0.5, 0.7, 0.9, 1.0)
OVERTAKES = (0.0, 0.2, 0.5, 1.0)
WINDOWS = (0.0, 0.1, 0.3, 1.0, 3.0)  # of a period
LIVES = (0.0, 0.0, 0.5, 1.0, 2.0, 3.0, 5.0)  # periods
HOT, COLD = 0.004, 0.0001  # of the step: by how much a change may be worse, first and last
NUM_FULL = 6  # starts that are played under all first rules
FAR_BEHIND = 1.1  # a start this much slower than the best so far is given up
NUM_KEPT = 4  # how many of different origin are changed


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


def first_rules(period_ns: int, offload: bool) -> Iterator[Rule]:
    """Yield the rules that every start is played under; without offload few of them differ."""
    for window, overtake in ((0.0, 0.0), (1.0, 0.3)):
        for notice in (1, 4, 0, 2) if offload else (1,):
            for lead, reach in ((0.0, 0.0), (0.7, 1.0)) if offload else ((0.0, 0.0),):
                yield Rule(
                    lead=lead,
                    notice=notice,
                    reach=reach,
                    window_ns=int(window * period_ns),
                    overtake=overtake,
                    slack=0.7,
                )


def search_within(
    workload: Workload,
    cluster: Cluster,
    num_microbatches: int,
    starts: Sequence[Start],
    *,
    offload: bool = True,
    recompute: bool = True,
    time_limit_s: float | None = None,
    max_evaluations: int | None = None,
    seed: int = 0,
    target_ns: int = 0,
    found: Sequence[Found] = (),
) -> Found | None:
    """Return the shortest plan found within memory, or None.

    Args:
        workload: the layers.
        cluster: devices, host links and limits.
        num_microbatches: m.
        starts: plans to begin from.
        offload: whether activations may leave.
        recompute: whether stages may be recomputed beyond those that a start recomputes.
        time_limit_s: seconds to search.
        max_evaluations: plays to try; with it alone the result is repeatable.
        seed: of all random choices.
        target_ns: stop at a step this short, such as a lower bound.
        found: plans that are known to fit, to go on from; the result is never behind them.
    """
    rng = Random(seed)
    limits = Limits(time_limit_s=time_limit_s, max_evaluations=max_evaluations)
    bench = Bench(
        workload, cluster, num_microbatches, limits, offload=offload, target_ns=target_ns
    )
    kept: list[Found] = list(found)
    best = min(kept, key=lambda one: one.step_ns, default=None)
    # all starts under few rules, then the best of them under all
    tried: list[tuple[int, Start, tuple[Stage, ...]]] = []
    for few in (True, False):
        for start, stages in (
            _with_recompute(bench, starts, recompute)
            if few
            else [
                (start, stages)
                for _, start, stages in sorted(tried, key=lambda one: one[0])[:NUM_FULL]
            ]
        ):
            if kept and limits.spent() > (0.2 if few else 0.4):
                break
            made = _first(bench, start, stages, best, few)
            if made is not None:
                kept.append(made)
                tried.append((made.step_ns, start, stages))
                if best is None or made.step_ns < best.step_ns:
                    best = made
    kept = _distinct(kept)
    if best is None:
        return None
    lowest = [one.step_ns for one in kept]
    turn, from_part = 0, limits.spent()
    while not bench.done(best):
        part = (limits.spent() - from_part) / max(1e-9, 1.0 - from_part)
        worse = HOT * (COLD / HOT) ** part * rng.random()
        # the best more often than the others, and those ever less
        spot = min(turn // 2 % len(kept), int(len(kept) * (1.0 - part))) if turn % 2 else 0
        turn += 1
        limit = int(kept[spot].step_ns * (1.0 + worse)) + 1
        made = _changed(bench, kept[spot], rng, recompute, limit)
        if made is None:
            continue
        kept[spot] = made
        if made.step_ns < lowest[spot]:
            lowest[spot] = made.step_ns
            if lowest[spot] < lowest[0]:
                lowest[0], lowest[spot] = lowest[spot], lowest[0]
                kept[0], kept[spot] = kept[spot], kept[0]
        if made.step_ns < best.step_ns:
            best = made
    return best


def finer(start: Start, workload: Workload, pieces: int) -> Start | None:
    """Return the plan with each stage cut into pieces on its device, or None where none can be.

    Nothing else changes, so the step is the same but for each action's overhead; but activations
    come and go in smaller parts. Pieces are as equal in time as whole layers allow.
    """
    cuts: list[list[int]] = []
    for stage in start.stages:
        begin, end = stage.layers
        layers = workload.layers[begin:end]
        total = np.cumsum(
            [one.forward_ns + one.input_grad_ns + one.weight_grad_ns for one in layers]
        )
        wanted = total[-1] * np.arange(1, pieces) / pieces
        inner = {begin + 1 + int(np.abs(total - want).argmin()) for want in wanted}
        cuts.append(sorted({begin, end} | {cut for cut in inner if begin < cut < end}))
    counts = [len(cut) - 1 for cut in cuts]
    if max(counts) == 1:
        return None
    firsts = np.concatenate(([0], np.cumsum(counts)))
    stages = tuple(
        Stage(layers=(low, high), device=stage.device, recompute=stage.recompute)
        for stage, cut in zip(start.stages, cuts, strict=True)
        for low, high in pairwise(cut)
    )
    rows = []
    for row in start.schedule.rows:
        words: list[Action] = []
        for action in row:
            parts = range(int(firsts[action.stage]), int(firsts[action.stage + 1]))
            words += [
                Action(part, action.kind, action.microbatch)
                for part in (parts if action.kind == Kind.F else reversed(parts))
            ]
        rows.append(words)
    return Start(
        name=f"{start.name}, in {pieces}", stages=stages, schedule=Schedule.from_rows(rows)
    )


def _with_recompute(
    bench: Bench, starts: Sequence[Start], recompute: bool
) -> Iterator[tuple[Start, tuple[Stage, ...]]]:
    """Yield the starts as they are, and then with some of their stages recomputed."""
    yield from ((start, start.stages) for start in starts)
    if recompute:
        for start in starts:
            yield from ((start, stages) for stages in _recompute_starts(bench, start))


def _first(
    bench: Bench, start: Start, stages: tuple[Stage, ...], best: Found | None, few: bool
) -> Found | None:
    """Play a start under the first rules, each twice: by its own keys, and by those it got."""
    timeline = simulate(start.schedule, bench.costs(stages))
    keys = keys_of(timeline)
    period = max(1, timeline.step_ns // bench.num_microbatches)
    found: Found | None = None
    limit = NEVER if best is None else int(best.step_ns * FAR_BEHIND)
    rules = list(first_rules(period, bench.offload))
    for rule in rules[:: 3 if few else 1]:
        again = keys
        for _ in range(2):
            made = bench.try_out(start.name, stages, again, rule, limit)
            if made is None:
                break
            if found is None or made[0].step_ns < found.step_ns:
                found = made[0]
            again = keys_of(made[1])
        if bench.done(best) and found is not None:
            break
    return found


def _recompute_starts(bench: Bench, start: Start) -> Iterator[tuple[Stage, ...]]:
    """Yield stages with the cheapest recompute that fits by the order, if they do not without.

    With offload also halfway there: the copies may do the rest.
    """
    costs = bench.costs(start.stages)
    timeline = simulate(start.schedule, costs)
    over = timeline.peak_bytes - costs.memory_bytes
    if (over <= 0).all():
        return
    freed = np.maximum(1, costs.saved_bytes + costs.saved_w_bytes - costs.input_bytes)
    price = costs.forward_ns / freed
    stages = list(start.stages)
    chosen: list[int] = []
    for stage in np.argsort(price, kind="stable").tolist():
        device = stages[stage].device
        if over[device] <= 0 or stages[stage].recompute or freed[stage] <= 1:
            continue
        stages[stage] = changed(stages[stage], recompute=True)
        chosen.append(stage)
        now = simulate(start.schedule, bench.costs(tuple(stages)))
        over = now.peak_bytes - costs.memory_bytes
    if not chosen:
        return
    if bench.offload:
        half = list(start.stages)
        for stage in chosen[: len(chosen) // 2]:
            half[stage] = changed(half[stage], recompute=True)
        yield tuple(half)
    yield tuple(stages)


def _distinct(found: list[Found]) -> list[Found]:
    """Return the best of each source, the best first."""
    chosen: list[Found] = []
    for one in sorted(found, key=lambda one: one.step_ns):
        if len(chosen) < NUM_KEPT and not any(
            one.source == other.source and one.stages == other.stages for other in chosen
        ):
            chosen.append(one)
    return chosen


def _changed(
    bench: Bench, found: Found, rng: Random, recompute: bool, limit_ns: int
) -> Found | None:
    """Change one thing; return the plan if it fits and ends before the limit."""
    stages, keys, rule = found.stages, found.keys, found.rule
    period = max(1, found.step_ns // bench.num_microbatches)
    dice = rng.random()
    if recompute and dice < 0.15:
        costs = bench.costs(stages)
        spot = rng.randrange(len(stages))
        if not stages[spot].recompute and costs.saved_bytes[spot] + costs.saved_w_bytes[spot] == 0:
            return None
        other = list(stages)
        other[spot] = changed(other[spot], recompute=not other[spot].recompute)
        stages = tuple(other)
    elif bench.offload and dice < 0.22:
        stays = keys.stays.copy()
        stays[rng.randrange(len(stages))] ^= True
        keys = replace(keys, stays=stays)
    elif dice < 0.45:
        rule = _other_rule(rule, rng, period, bench.offload)
    elif dice < 0.55:
        timeline = simulate(found.schedule, bench.costs(stages), found.copies)
        keys = replace(keys_of(timeline), stays=keys.stays)
        if rng.random() < 0.5:
            rule = _other_rule(rule, rng, period, bench.offload)
    else:
        keys = _shifted(keys, bench.costs(stages), rng, period)
    made = bench.try_out(found.source, stages, keys, rule, limit_ns=limit_ns)
    return None if made is None else made[0]


def _other_rule(rule: Rule, rng: Random, period_ns: int, offload: bool) -> Rule:
    dice = rng.randrange(8 if offload else 3)
    if dice == 0:
        return rule._replace(window_ns=int(rng.choice(WINDOWS) * period_ns))
    if dice == 1:
        return rule._replace(overtake=rng.choice(OVERTAKES))
    if dice == 2:
        return rule._replace(slack=rng.choice(SLACKS))
    if dice == 3:
        return rule._replace(notice=rng.choice(NOTICES))
    if dice == 4:
        return rule._replace(lead=rng.choice(LEADS))
    if dice == 5:
        return rule._replace(reach=rng.choice(REACHES))
    if dice == 6:
        return rule._replace(least_life_ns=int(rng.choice(LIVES) * period_ns))
    return rule._replace(least_trips=rng.choice(LEAST_TRIPS))


def _shifted(keys: Keys, costs: Costs, rng: Random, period_ns: int) -> Keys:
    """Move the keys of some stages, kinds and microbatches, all by one amount."""
    num_stages, m = costs.num_stages, costs.num_microbatches
    times = keys.times.copy()
    amount = int(rng.gauss(0.0, 0.4) * period_ns) or 1
    rows: Sequence[int] = rng.choice(
        ((FORWARD,), (FORWARD,), (BACKWARD,), (WEIGHT,), (BACKWARD, WEIGHT))
    )
    dice = rng.random()
    if dice < 0.3:
        which = [rng.randrange(num_stages)]
    elif dice < 0.6:
        device = rng.randrange(costs.num_devices)
        which = np.flatnonzero(costs.stage_device == device).tolist()
    elif dice < 0.9:
        low, high = sorted((rng.randrange(num_stages), rng.randrange(num_stages)))
        which = list(range(low, high + 1))
    else:
        which = list(range(num_stages))
    begin, end = 0, m
    if rng.random() < 0.5:
        begin, end = sorted((rng.randrange(m + 1), rng.randrange(m + 1)))
    for row in rows:
        for stage in which:
            if row == WEIGHT and not keys.split[stage]:
                continue
            times[row, stage, begin:end] += amount
            times[row, stage].sort()
    return replace(keys, times=times)


def fewer_copies(
    workload: Workload, cluster: Cluster, num_microbatches: int, found: Found
) -> Found:
    """Return the plan with the short lives kept on the device, as far as its step allows.

    First by the length of lives, then stage by stage, the shortest lives first.
    """
    bench = Bench(workload, cluster, num_microbatches, Limits(), offload=True)
    best = found
    period = max(1, found.step_ns // num_microbatches)

    def better(keys: Keys, rule: Rule) -> bool:
        nonlocal best
        made = bench.try_out(best.source, best.stages, keys, rule, best.step_ns + 1)
        if made is None or made[0].num_copies >= best.num_copies:
            return False
        best = made[0]
        return True

    for share in (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0):
        life = int(share * period)
        if life > best.rule.least_life_ns:
            better(best.keys, best.rule._replace(least_life_ns=life))
    lives = (best.keys.times[BACKWARD] - best.keys.times[FORWARD]).mean(axis=1)
    for stage in np.argsort(lives, kind="stable").tolist():
        if not best.keys.stays[stage]:
            stays = best.keys.stays.copy()
            stays[stage] = True
            better(replace(best.keys, stays=stays), best.rule)
    return best
