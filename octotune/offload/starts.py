"""What a search within memory begins from: plans cut finer, or with some stages recomputed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from msgspec.structs import replace as changed

from octotune.contract import Stage, Workload
from octotune.offload.bench import Bench, Start
from simulator.actions import Action, Kind, Schedule
from simulator.engine import simulate


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


def with_recompute(
    bench: Bench, starts: Sequence[Start], recompute: bool
) -> Iterator[tuple[Start, tuple[Stage, ...]]]:
    """Yield the starts as they are, and then with some of their stages recomputed."""
    yield from ((start, start.stages) for start in starts)
    if recompute:
        for start in starts:
            yield from ((start, stages) for stages in _recompute_starts(bench, start))


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
