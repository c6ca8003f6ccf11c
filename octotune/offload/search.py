"""Look for the shortest step within memory: orders, copies and recompute weighed together.

Starts are plans that need not fit: published schedules, what the tuner finds without a limit. Each
is played under a few rules (`pages.Rule`), its keys first as they ran and then as they run within
memory. Then the best of different origin are changed, one thing at a time, and a change is kept
when the simulator says that it fits and ends no later: a rule, the keys of a stage or device, or
whether a stage is recomputed.

Recompute costs its forward again on its device, offload the waits for late copies. What each is
worth shows in the step alone, so the step decides; but stages are tried for recompute in the order
of forward time per byte freed, and given it up in the opposite one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np

from octotune.contract import Cluster, Stage, Workload
from octotune.offload.bench import Bench, Found, Limits, Start
from octotune.offload.moves import changed_once, first_rules
from octotune.offload.pages import BACKWARD, FORWARD, NEVER, Rule
from octotune.offload.planning import Keys, keys_of
from octotune.offload.starts import with_recompute
from simulator.engine import simulate

HOT, COLD = 0.004, 0.0001  # of the step: by how much a change may be worse, first and last
NUM_FULL = 6  # starts that are played under all first rules
FAR_BEHIND = 1.1  # a start this much slower than the best so far is given up
NUM_KEPT = 4  # how many of different origin are changed


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
            with_recompute(bench, starts, recompute)
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
        made = changed_once(bench, kept[spot], rng, recompute, limit)
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


def _distinct(found: list[Found]) -> list[Found]:
    """Return the best of each source, the best first."""
    chosen: list[Found] = []
    for one in sorted(found, key=lambda one: one.step_ns):
        if len(chosen) < NUM_KEPT and not any(
            one.source == other.source and one.stages == other.stages for other in chosen
        ):
            chosen.append(one)
    return chosen


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
