"""Plans and timelines as tables that a person reads at a glance."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from octotune.contract.plan import Plan
from octotune.offload.usage import usage_of
from octotune.report.offload import offload_table
from octotune.report.path import critical_path_text
from octotune.report.style import plain_table
from octotune.report.words import (
    NOTHING,
    above,
    count,
    duration,
    limit,
    milliseconds,
    percent,
    share,
    size,
)
from simulator.actions import Kind, kind_of, stage_of

if TYPE_CHECKING:
    from simulator.bubbles import Bubbles
    from simulator.difference import Difference
    from simulator.graph import Piece
    from simulator.timeline import Timeline

_MOST_ROWS = 24  # longer tables show what stands out, and say how much they leave out
_WIDTH = 120  # where the output is no terminal
_NARROWEST = 100


def stage_table(plan: Plan, timeline: Timeline) -> Table:
    """Return one row a stage: its layers, device, durations, activations and transfer.

    k is a round trip of what a microbatch moves over the stage's forward and backward.
    """
    costs = timeline.costs
    kinds = kind_of(timeline.schedule.codes)
    used = [kind for kind in Kind if (kinds == kind).any()]
    durations = {
        Kind.F: costs.forward_ns,
        Kind.B: costs.backward_ns,
        Kind.I: costs.input_grad_ns,
        Kind.W: costs.weight_grad_ns,
    }
    in_flight = _most_in_flight(timeline)
    usage = usage_of(timeline)
    sends = np.append(costs.transfer_hold_ns + costs.transfer_latency_ns, 0)

    table = plain_table("Stages")
    table.add_column("stage", justify="right", no_wrap=True)
    table.add_column("layers", overflow="ellipsis", no_wrap=True, max_width=34)
    table.add_column("device", justify="right", no_wrap=True)
    for kind in used:
        table.add_column(f"{kind.name} ms", justify="right", no_wrap=True)
    table.add_column("saved", justify="right", no_wrap=True)
    table.add_column("in flight", justify="right", no_wrap=True)
    table.add_column("send ms", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    compute = sum((durations[kind] for kind in used), np.zeros(costs.num_stages, np.int64))
    saved = costs.saved_bytes + costs.saved_w_bytes
    rows = _rows_to_show(costs.num_stages, compute, saved * in_flight)
    for number in rows:
        stage = plan.stages[number]
        notes = []
        if stage.recompute:
            notes.append("recomputes")
        if usage.copied[number]:
            notes.append(
                f"offloads {usage.copied[number]} of {costs.num_microbatches}, "
                f"k {usage.trip_share[number]:.2f}"
            )
        table.add_row(
            str(number),
            _layer_words(plan, *stage.layers),
            str(stage.device),
            *(milliseconds(int(durations[kind][number])) for kind in used),
            size(int(saved[number])) if saved[number] else NOTHING,
            str(in_flight[number]),
            milliseconds(int(sends[number])),
            ", ".join(notes),
        )
    _say_what_is_left_out(table, costs.num_stages - len(rows), "stage")
    return table


def device_table(plan: Plan, timeline: Timeline, bubbles: Bubbles | None = None) -> Table:
    """Return one row a device: stages, load, idle time by cause, peak memory.

    Shares are of the step, and the causes add up to idle; cooldown includes waiting for reductions
    and tied exchanges. "input: for" names the stage that most waiting for inputs is to blame on;
    "depth" where that is no stage but the way through the pipeline.
    """
    from simulator.bubbles import COOLDOWN_CAUSES, Cause

    costs = timeline.costs
    bubbles = timeline.bubbles() if bubbles is None else bubbles
    found = bubbles.ns_by_cause()
    waits = found[Cause.INPUT]
    found[Cause.COOLDOWN] = np.sum([found.pop(cause) for cause in COOLDOWN_CAUSES], axis=0)
    by_cause = {cause: found[cause] for cause in Cause if cause in found and found[cause].any()}
    step = timeline.step_ns
    idle = np.sum([*by_cause.values(), np.zeros(costs.num_devices, np.int64)], axis=0)
    busy = timeline.busy_ns
    blame = bubbles.input_ns_by_stage(costs.num_stages)
    kinds = len({device.kind for device in plan.cluster.devices}) > 1

    table = plain_table("Devices")
    table.add_column("device", justify="right", no_wrap=True)
    if kinds:
        table.add_column("kind", overflow="ellipsis", no_wrap=True, max_width=12)
    table.add_column("stages", overflow="ellipsis", no_wrap=True, max_width=16)
    table.add_column("busy ms", justify="right", no_wrap=True)
    table.add_column("idle %", justify="right", no_wrap=True, style="bold")
    for cause in by_cause:
        longest = max(map(len, cause.words.split()))
        table.add_column(cause.words, justify="right", min_width=longest)
    if waits.any():
        table.add_column("input: for", no_wrap=True)
    table.add_column("peak", justify="right", no_wrap=True)
    table.add_column("limit %", justify="right", no_wrap=True)
    rows = _rows_to_show(costs.num_devices, busy, timeline.peak_bytes, idle)
    for device in rows:
        stages = [number for number, stage in enumerate(plan.stages) if stage.device == device]
        cells = [str(device)]
        if kinds:
            cells.append(plan.cluster.devices[device].kind)
        cells += [
            _number_words(stages),
            milliseconds(int(busy[device])),
            share(int(idle[device]), step),
            *(share(int(ns[device]), step) for ns in by_cause.values()),
        ]
        if waits.any():
            cells.append(_culprit(blame[device], int(waits[device])))
        most = int(costs.memory_bytes[device])
        peak = int(timeline.peak_bytes[device])
        cells += [size(peak), "none" if limit(most) == "none" else share(peak, most)]
        table.add_row(*cells)
    _say_what_is_left_out(table, costs.num_devices - len(rows), "device")
    return table


def plan_table(plan: Plan, timeline: Timeline) -> RenderableType:
    """Return a plan's stages, devices and copies, with what its timeline makes of them."""
    tables: list[RenderableType] = [stage_table(plan, timeline)]
    tables.append(_spaced(device_table(plan, timeline)))
    copies = offload_table(plan, timeline)
    if copies is not None:
        tables.append(_spaced(copies))
    return Group(*tables)


def bubble_table(named: Mapping[str, Timeline]) -> Table:
    """Return idle time by cause, summed over devices, in % of devices x step: one column each."""
    idle = {name: timeline.idle_by_cause() for name, timeline in named.items()}
    causes = [
        cause
        for cause in next(iter(idle.values()), {})
        if any(found[cause].any() for found in idle.values())
    ]
    table = plain_table("Idle time, % of devices x step")
    table.add_column("cause")
    for name in named:
        table.add_column(name, justify="right")
    whole = {
        name: timeline.step_ns * timeline.schedule.num_devices for name, timeline in named.items()
    }
    for cause in causes:
        table.add_row(
            cause.words, *(share(int(idle[name][cause].sum()), whole[name]) for name in named)
        )
    table.add_section()
    table.add_row(
        "all",
        *(share(sum(int(ns.sum()) for ns in idle[name].values()), whole[name]) for name in named),
        style="bold",
    )
    return table


def check_report(
    plan: Plan,
    timeline: Timeline,
    *,
    fixed_bound_ns: int | None = None,
    claimed_bound_ns: int | None = None,
    joint_bound_ns: int | None = None,
    critical_path: Sequence[Piece] | None = None,
) -> RenderableType:
    """Return all that a person wants to know of a plan.

    Args:
        plan: what was checked.
        timeline: its simulation.
        fixed_bound_ns: lower bound for this partition and placement.
        claimed_bound_ns: the bound over all plans that the file claims.
        joint_bound_ns: the same, recomputed.
        critical_path: as `simulator.graph` finds it.
    """
    bubbles = timeline.bubbles()
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    facts.add_row("plan", _plan_words(plan))
    step = timeline.step_ns
    busiest = int(timeline.busy_ns.max())
    idle_words = _idle_words(bubbles, step)
    facts.add_row(
        "step",
        Text.assemble(
            (duration(step), "bold"),
            f", {percent(timeline.bubble_fraction, 1)} of it bubbles"
            + (f": {idle_words}" if idle_words else ""),
        ),
    )
    facts.add_row("busiest device", f"computes for {duration(busiest)}")
    facts.add_row("memory", _memory_words(timeline))
    for name, bound in (
        ("bound, these stages", fixed_bound_ns),
        ("bound, all plans", joint_bound_ns),
        ("claimed, all plans", claimed_bound_ns),
    ):
        if bound is not None:
            facts.add_row(name, f"{duration(bound)}; {above(step, bound)}")
    if critical_path:
        for name, line in zip(
            ("critical path", "", ""), critical_path_text(critical_path), strict=False
        ):
            facts.add_row(name, line)
    said = plan.search.get("offload")
    if said is not None:
        facts.add_row("offload", str(said))
    tables = [stage_table(plan, timeline), device_table(plan, timeline, bubbles)]
    copies = offload_table(plan, timeline)
    if copies is not None:
        tables.append(copies)
    return Group(facts, *map(_spaced, tables))


def baseline_table(
    step_ns: int | None,
    baselines: Mapping[str, int | str],
    *,
    bound_ns: int | None = None,
    tuned_name: str = "this plan",
    tuned_words: str = "",
) -> Table:
    """Return the baselines and the plan, quickest first, with their ratios to the plan.

    Args:
        step_ns: of the plan.
        baselines: name -> step in ns, or why it cannot run: `Predicted.baselines`.
        bound_ns: lower bound over all plans, as a last row.
        tuned_name: what to call the plan.
        tuned_words: what else to say of it.
    """
    runs = {name: value for name, value in baselines.items() if isinstance(value, int)}
    table = plain_table("Plans")
    table.add_column("plan", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("to this plan", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    rows = [(value, name, False) for name, value in runs.items()]
    if step_ns is not None:
        rows.append((step_ns, tuned_name, True))
    for value, name, tuned in sorted(rows, key=lambda row: (row[0], not row[2])):
        table.add_row(
            name,
            duration(value),
            f"{value / step_ns:.3f}x" if step_ns else NOTHING,
            tuned_words if tuned else "",
            style="bold" if tuned else None,
        )
    if bound_ns is not None:
        table.add_section()
        words = above(step_ns, bound_ns) if step_ns is not None else ""
        ratio = f"{bound_ns / step_ns:.3f}x" if step_ns else NOTHING
        table.add_row("lower bound", duration(bound_ns), ratio, words)
    unable = {name: value for name, value in baselines.items() if isinstance(value, str)}
    if unable:
        table.add_section()
        for name, reason in unable.items():
            table.add_row(name, NOTHING, NOTHING, reason)
    return table


def difference_table(found: Difference, num_stages: int, *, count_largest: int = 6) -> Table:
    """Return where a measured step left its prediction, by stage and kind, and in total."""
    means = found.duration_by_stage(num_stages)
    kinds = [kind for kind in Kind if (kind_of(found.codes) == kind).any()]
    table = plain_table("Measured minus predicted")
    table.add_column("", no_wrap=True)
    for kind in kinds:
        table.add_column(f"{kind.name}, mean", justify="right")
    rows = _rows_to_show(num_stages, np.abs(means).sum(axis=1))
    for stage in rows:
        table.add_row(f"stage {stage}", *(_signed(int(means[stage, kind])) for kind in kinds))
    _say_what_is_left_out(table, num_stages - len(rows), "stage")
    largest = ", ".join(f"{word} {_signed(ns)}" for word, ns in found.largest(count_largest))
    idle = ", ".join(
        f"{cause.words} {_signed(int(ns.sum()))}"
        for cause, ns in found.idle_by_cause.items()
        if ns.any()
    )
    table.caption = (
        f"step {_signed(found.step_ns)}; busy {_signed(int(found.busy_ns.sum()))} and idle "
        f"{_signed(int(found.idle_ns.sum()))} over all devices"
        + (f" ({idle})" if idle else "")
        + (f"\nlargest: {largest}" if largest else "")
    )
    return table


def print_plan(plan: Plan, *, file: TextIO | None = None) -> None:
    """Print what a tuned plan comes to, beside the baselines that it was measured against."""
    from octotune.check import check

    timeline = check(plan).timeline
    claims = plan.predicted
    claimed = None if claims is None else claims.lower_bound_ns
    parts: list[RenderableType] = [check_report(plan, timeline, claimed_bound_ns=claimed)]
    if claims is not None and claims.baselines:
        table = baseline_table(timeline.step_ns, claims.baselines, bound_ns=claimed)
        parts.append(_spaced(table))
    _print(Group(*parts), file)


def print_check(report: RenderableType, *, file: TextIO | None = None) -> None:
    """Print a `check_report`."""
    _print(report, file)


def print_comparison(plan: Plan, *, file: TextIO | None = None) -> None:
    """Print every baseline that a plan's file names, and the plan, in one table."""
    claims = plan.predicted
    table = baseline_table(
        None if claims is None else claims.step_ns,
        {} if claims is None else claims.baselines,
        bound_ns=None if claims is None else claims.lower_bound_ns,
        tuned_name="tuned",
        tuned_words=_offload_words(plan),
    )
    _print(Group(Text(_plan_words(plan)), _spaced(table)), file)


def _offload_words(plan: Plan) -> str:
    """Return how many activations leave for the host, or why none do, where somebody asked."""
    away = plan.num_offloaded
    every = len(plan.stages) * plan.num_microbatches
    if away:
        return f"offloads {away} of {count(every, 'activation')}"
    said = str(plan.search.get("offload", ""))
    return f"no offload: {said.removeprefix('none: ')}" if said else ""


def _print(what: RenderableType, file: TextIO | None) -> None:
    target = sys.stdout if file is None else file
    terminal = target.isatty()
    console = Console(file=target, width=None if terminal else _WIDTH, highlight=False)
    if console.width < _NARROWEST:
        console = Console(file=target, width=_NARROWEST, highlight=False)
    console.print(what)


def _spaced(table: Table) -> Group:
    """Leave a line before a table."""
    return Group("", table)  # a Padding takes a column off tables whose edge has none


def _rows_to_show(num_rows: int, *importance: np.ndarray) -> list[int]:
    """Return all rows, or of many the first, the last and those largest in some respect."""
    if num_rows <= _MOST_ROWS:
        return list(range(num_rows))
    keep = {0, 1, num_rows - 2, num_rows - 1}
    orders = [np.argsort(-values, kind="stable").tolist() for values in importance]
    orders += [np.argsort(values, kind="stable").tolist() for values in importance]
    rank = 0
    while len(keep) < _MOST_ROWS:
        for order in orders:
            if len(keep) < _MOST_ROWS:
                keep.add(order[rank])
        rank += 1
    return sorted(keep)


def _say_what_is_left_out(table: Table, left_out: int, thing: str) -> None:
    if left_out:
        table.caption = (
            f"{count(left_out, f'{thing}')} not shown: the first, the last, and the largest and "
            "smallest are"
        )


def _layer_words(plan: Plan, begin: int, end: int) -> str:
    layers = plan.workload.layers
    name = layers[begin].name
    if end - begin > 1:
        name = f"{name} .. {layers[end - 1].name}"
    return f"{begin}-{end - 1}: {name}" if end - begin > 1 else f"{begin}: {name}"


def _number_words(numbers: Sequence[int]) -> str:
    """Return `0-3, 7` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(words) or "none"


def _plan_words(plan: Plan) -> str:
    return (
        f"{plan.workload.name} on {plan.cluster.name}: "
        f"{count(len(plan.workload.layers), 'layer')} in {count(len(plan.stages), 'stage')} on "
        f"{count(len(plan.cluster.devices), 'device')}, "
        f"{count(plan.num_microbatches, 'microbatch')}"
    )


def _idle_words(bubbles: Bubbles, step_ns: int) -> str:
    whole = step_ns * bubbles.num_devices
    causes = sorted(
        ((int(ns.sum()), cause) for cause, ns in bubbles.ns_by_cause().items() if ns.any()),
        key=lambda item: -item[0],
    )
    return ", ".join(f"{cause.words} {percent(ns, whole)}" for ns, cause in causes)


def _memory_words(timeline: Timeline) -> str:
    costs = timeline.costs
    used = timeline.peak_bytes / np.maximum(costs.memory_bytes, 1)
    fullest = int(used.argmax())
    peak, most = int(timeline.peak_bytes[fullest]), int(costs.memory_bytes[fullest])
    if limit(most) == "none":
        fullest = int(timeline.peak_bytes.argmax())
        return (
            f"at most {size(int(timeline.peak_bytes[fullest]))}, on device {fullest}; "
            "the cluster has no limit"
        )
    return f"fullest: device {fullest} with {size(peak)} of {size(most)} ({percent(peak, most)})"


def _culprit(blame: np.ndarray, waits_ns: int) -> str:
    """Return the stage that most waiting for inputs is to blame on, with its share of it."""
    stage = int(blame.argmax())
    depth = waits_ns - int(blame.sum())
    if waits_ns == 0:
        return NOTHING
    if depth > blame[stage]:
        return f"depth ({100 * depth / waits_ns:.0f} %)"
    return f"stage {stage} ({100 * int(blame[stage]) / waits_ns:.0f} %)"


def _signed(time_ns: int) -> str:
    return NOTHING if time_ns == 0 else f"{'+' if time_ns > 0 else ''}{duration(time_ns)}"


def _most_in_flight(timeline: Timeline) -> np.ndarray:
    """Return how many microbatches each stage [S] holds at most, F begun and I or B not ended."""
    schedule = timeline.schedule
    stages, kinds = stage_of(schedule.codes), kind_of(schedule.codes)
    change = np.where(kinds == Kind.F, 1, np.where(kinds == Kind.W, 0, -1))
    order = np.argsort(stages, kind="stable")
    held = np.cumsum(change[order])  # each stage's changes add up to 0, so the sum starts anew
    most = np.zeros(timeline.costs.num_stages, np.int64)
    np.maximum.at(most, stages[order], held)
    return most
