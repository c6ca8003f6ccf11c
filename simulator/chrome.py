"""Timeline <-> the JSON that chrome://tracing and Perfetto open.

One process a device; its threads are the compute row, the idle row (bubbles by cause), the copy
lane, reductions, tied exchanges, and one row a channel it sends on. Flow arrows lead from an
action through its transfer to the action that needed the tensor; a counter shows the bytes held.

Trace times are microseconds. They are written, and read back, as decimals with three digits after
the point, so no nanosecond is lost, whatever the length of the step. What events cannot carry (the
order of actions, the costs, times of which only one half was recorded) stands in `otherData`,
so that reading a trace gives back an equal Timeline. Idle, flow and counter events follow from
the rest and are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from simulator.actions import CopyKind, Kind, kind_of, microbatch_of, stage_of, unpack
from simulator.bubbles import Bubbles, action_devices
from simulator.chrome_read import PAIRS, loads
from simulator.fills import FillSpan
from simulator.memory import usage
from simulator.timeline import Timeline

__all__ = ["dumps", "loads"]

Int64 = NDArray[np.int64]

_COMPUTE, _IDLE, _LANE, _REDUCTIONS, _EXCHANGES, _CHANNELS = range(6)
_THREADS = ("compute", "idle", "copy lane", "reductions", "tied exchanges")
_THREADS_A_DEVICE = 10_000
_FILLS = _THREADS_A_DEVICE - 1  # after all channels; shown below the compute row
# chrome://tracing's own colour names; Perfetto picks its own by the name of the event
_COLOURS = {
    "F": "thread_state_running",
    "B": "rail_response",
    "I": "thread_state_iowait",
    "W": "rail_animation",
}


def dumps(timeline: Timeline, *, derived: bool = True, fills: Sequence[FillSpan] = ()) -> bytes:
    """Return a timeline as the text of a trace file.

    Args:
        timeline: simulated or measured.
        fills: fill work in its bubbles, in a row of its own; not read back.
        derived: also write what only people look at: bubbles, flow arrows and memory. Without,
            the text is about a third as long, and reads back just the same.
    """
    parts = [_names(timeline), _things(timeline)]
    if derived:
        parts += [_idle(timeline.bubbles()), _flows(timeline), _memory(timeline)]
    if fills:
        parts.append(_fills(fills))
    events = ",\n".join(event for part in parts for event in part)
    other = msgspec.json.encode({"octotune": _rest(timeline)}).decode()
    text = f'{{"displayTimeUnit":"ms","otherData":{other},"traceEvents":[\n{events}\n]}}\n'
    return text.encode()


def _at(device: int, row: int) -> str:
    """Return where an event belongs.

    Perfetto takes thread 0 for the idle task and may take equal numbers in two processes for one
    thread, so numbers start at 1 and are different in all processes.
    """
    return f'"pid":{device + 1},"tid":{(device + 1) * _THREADS_A_DEVICE + row}'


def _us(time_ns: int) -> str:
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"


def _span(
    name: str, category: str, device: int, thread: int, start: int, end: int, more: str = ""
) -> str:
    return (
        f'{{"ph":"X","name":"{name}","cat":"{category}",{_at(device, thread)},'
        f'"ts":{_us(start)},"dur":{_us(end - start)}{more}}}'
    )


def _fills(fills: Sequence[FillSpan]) -> Iterator[str]:
    for device in sorted({span.device for span in fills}):
        at = _at(device, _FILLS)
        yield f'{{"ph":"M","name":"thread_name",{at},"args":{{"name":"fill work"}}}}'
        yield f'{{"ph":"M","name":"thread_sort_index",{at},"args":{{"sort_index":0}}}}'
    for span in fills:
        name = msgspec.json.encode(f"{span.job} {span.name}".strip()).decode()[1:-1]
        yield _span(name, "fill", span.device, _FILLS, span.start_ns, span.end_ns)


def _names(timeline: Timeline) -> Iterator[str]:
    def metadata(device: int, thread: int, name: str, key: str, value: str) -> str:
        return f'{{"ph":"M","name":"{name}",{_at(device, thread)},"args":{{"{key}":{value}}}}}'

    costs = timeline.costs
    targets: list[set[int]] = [set() for _ in range(costs.num_devices)]
    for source, target in pairwise(costs.stage_device.tolist()):
        if source != target:
            targets[source].add(target)
            targets[target].add(source)
    for device, reached in enumerate(targets):
        yield metadata(device, 0, "process_name", "name", f'"device {device}"')
        yield metadata(device, 0, "process_sort_index", "sort_index", str(device))
        for thread, name in enumerate(_THREADS):
            yield metadata(device, thread, "thread_name", "name", f'"{name}"')
            yield metadata(device, thread, "thread_sort_index", "sort_index", str(thread))
        for target in sorted(reached):
            thread = _CHANNELS + target
            yield metadata(device, thread, "thread_name", "name", f'"to device {target}"')
            yield metadata(device, thread, "thread_sort_index", "sort_index", str(thread))


def _things(timeline: Timeline) -> Iterator[str]:
    """Yield the events that carry the timeline's times: all of which both halves are known."""
    costs = timeline.costs
    devices = action_devices(timeline).tolist()
    codes = timeline.schedule.codes
    names = [name for row in timeline.schedule.words() for name in row]
    letters = [Kind(kind).name for kind in range(len(Kind))]
    for name, kind, device, start, end in zip(
        names,
        kind_of(codes).tolist(),
        devices,
        timeline.start_ns.tolist(),
        timeline.end_ns.tolist(),
        strict=True,
    ):
        if start >= 0 and end >= 0:
            colour = f',"cname":"{_COLOURS[letters[kind]]}"'
            yield _span(name, "action", device, _COMPUTE, start, end, colour)

    yield from _transfers(timeline)

    if timeline.copies is not None:
        lanes = [
            (device, word.partition("@")[0])
            for device, row in enumerate(timeline.copies.words())
            for word in row
        ]
        for (device, name), start, end in zip(
            lanes, timeline.copy_start_ns.tolist(), timeline.copy_end_ns.tolist(), strict=True
        ):
            if start >= 0 and end >= 0:
                yield _span(name, "copy", device, _LANE, start, end)

    stage_device = costs.stage_device.tolist()
    spans = zip(timeline.reduce_start_ns.tolist(), timeline.reduce_end_ns.tolist(), strict=True)
    for stage, (start, end) in enumerate(spans):
        if start >= 0 and end >= 0:
            yield _span(
                f"reduce stage {stage}",
                "reduction",
                stage_device[stage],
                _REDUCTIONS,
                start,
                end,
                f',"args":{{"index":{stage}}}',
            )
    for pair, ((first, second), start, end) in enumerate(
        zip(
            costs.exchange_stages.tolist(),
            timeline.exchange_start_ns.tolist(),
            timeline.exchange_end_ns.tolist(),
            strict=True,
        )
    ):
        if start >= 0 and end >= 0:
            yield _span(
                f"tied stages {first} and {second}",
                "exchange",
                stage_device[first],
                _EXCHANGES,
                start,
                end,
                f',"args":{{"index":{pair}}}',
            )
    spans = zip(
        timeline.optimizer_start_ns.tolist(), timeline.optimizer_end_ns.tolist(), strict=True
    )
    for device, (start, end) in enumerate(spans):
        if start >= 0 and end >= 0:
            index = f',"args":{{"index":{device}}}'
            yield _span("optimizer", "optimizer", device, _COMPUTE, start, end, index)


def _transfers(timeline: Timeline) -> Iterator[str]:
    """Yield the transfers, each in its channel's row.

    A bar ends where the tensor arrives, or where the next begins, as bars of a row cannot
    overlap; when it arrived stands in its arguments.
    """
    stage_device = timeline.costs.stage_device
    m = timeline.costs.num_microbatches
    columns: list[list[Int64]] = []
    for is_gradient, sent, arrived in (
        (0, timeline.forward_sent_ns, timeline.forward_arrived_ns),
        (1, timeline.backward_sent_ns, timeline.backward_arrived_ns),
    ):
        places = np.flatnonzero((sent >= 0).reshape(-1) & (arrived >= 0).reshape(-1))
        stage, microbatch = places // m, places % m
        source = stage_device[stage]
        target = stage_device[stage + (-1 if is_gradient else 1)]
        columns.append(
            [
                np.full(len(places), is_gradient, dtype=np.int64),
                stage,
                microbatch,
                source,
                target,
                sent.reshape(-1)[places],
                arrived.reshape(-1)[places],
            ]
        )
    all_columns = [np.concatenate(parts) for parts in zip(*columns, strict=True)]
    _, _, _, source, target, begin, arrival = all_columns
    order = np.lexsort((arrival, begin, target, source))
    ordered = [column[order] for column in all_columns]
    _, _, _, source, target, begin, arrival = ordered
    follows = (source[1:] == source[:-1]) & (target[1:] == target[:-1])
    until = arrival.copy()
    until[:-1][follows] = np.minimum(until[:-1], begin[1:])[follows]
    until = np.maximum(until, begin)
    letters = _backward_letters(timeline)
    for is_gradient, of_stage, of_microbatch, device, to, sends, arrives, ends in zip(
        *(column.tolist() for column in ordered), until.tolist(), strict=True
    ):
        letter = letters[of_stage][of_microbatch] if is_gradient else "F"
        yield _span(
            f"{of_stage}{letter}{of_microbatch}",
            "gradient" if is_gradient else "activation",
            device,
            _CHANNELS + to,
            sends,
            ends,
            f',"args":{{"arrived_ns":{arrives}}}',
        )


def _backward_letters(timeline: Timeline) -> list[list[str]]:
    """Return which of B and I each stage and microbatch runs."""
    costs = timeline.costs
    codes = timeline.schedule.codes
    split = np.zeros((costs.num_stages, costs.num_microbatches), dtype=np.int64)
    rows = codes[kind_of(codes) == Kind.I]
    split[stage_of(rows), microbatch_of(rows)] = 1
    return [["I" if each else "B" for each in row] for row in split.tolist()]


def _idle(bubbles: Bubbles) -> Iterator[str]:
    for bubble in bubbles:
        about = []
        if bubble.waits_for >= 0:
            waits_for = _word(bubble.waits_for)
            about.append(f'"waits for":"{waits_for}"')
        if bubble.root_stage >= 0:
            about.append(f'"stage to blame":{bubble.root_stage}')
        more = f',"args":{{{",".join(about)}}}' if about else ""
        yield _span(
            bubble.cause.words, "idle", bubble.device, _IDLE, bubble.start_ns, bubble.end_ns, more
        )


def _word(code: int) -> str:
    """Return a packed action or copy as its word."""
    array = np.array([code], dtype=np.int64)
    kind = int(kind_of(array)[0])
    if kind < len(Kind):
        return str(unpack(code))
    return f"{int(stage_of(array)[0])}{CopyKind(kind).name}{int(microbatch_of(array)[0])}"


def _flows(timeline: Timeline) -> Iterator[str]:
    """Yield arrows producer -> transfer -> consumer, where all three were recorded.

    An arrow's end belongs to the bar that holds its moment: the producer's last nanosecond, the
    transfer's first, the consumer's first.
    """
    costs = timeline.costs
    codes = timeline.schedule.codes
    stage, kind, microbatch = stage_of(codes), kind_of(codes), microbatch_of(codes)
    recorded = (timeline.start_ns >= 0) & (timeline.end_ns >= 0)
    place = np.full((2, costs.num_stages, costs.num_microbatches), -1, dtype=np.int64)
    rows = np.flatnonzero(recorded & (kind != Kind.W))
    place[(kind[rows] != Kind.F).astype(np.int64), stage[rows], microbatch[rows]] = rows
    stage_device = costs.stage_device.tolist()
    number = 0
    for backward, sent, arrived in (
        (0, timeline.forward_sent_ns, timeline.forward_arrived_ns),
        (1, timeline.backward_sent_ns, timeline.backward_arrived_ns),
    ):
        step = -1 if backward else 1
        name = "gradient" if backward else "activation"
        at, number_in_stage = np.nonzero((sent >= 0) & (arrived >= 0))
        made = place[backward, at, number_in_stage]
        used = place[backward, at + step, number_in_stage]
        whole = (made >= 0) & (used >= 0)
        at, number_in_stage, made, used = (
            at[whole],
            number_in_stage[whole],
            made[whole],
            used[whole],
        )
        for of_stage, end, begin, start in zip(
            at.tolist(),
            np.maximum(timeline.end_ns[made] - 1, timeline.start_ns[made]).tolist(),
            sent[at, number_in_stage].tolist(),
            timeline.start_ns[used].tolist(),
            strict=True,
        ):
            source, target = stage_device[of_stage], stage_device[of_stage + step]
            common = f'"name":"{name}","cat":"flow","id":{number}'
            yield f'{{"ph":"s",{common},{_at(source, _COMPUTE)},"ts":{_us(end)}}}'
            yield (f'{{"ph":"t",{common},{_at(source, _CHANNELS + target)},"ts":{_us(begin)}}}')
            yield (f'{{"ph":"f","bp":"e",{common},{_at(target, _COMPUTE)},"ts":{_us(start)}}}')
            number += 1


def _memory(timeline: Timeline) -> Iterator[str]:
    offsets = timeline.schedule.offsets
    for device in range(timeline.schedule.num_devices):
        row = slice(offsets[device], offsets[device + 1])
        if (timeline.start_ns[row] < 0).any() or (timeline.end_ns[row] < 0).any():
            continue  # what was not recorded cannot be added up
        times, held = usage(timeline, device)
        for time, count in zip(times.tolist(), held.tolist(), strict=True):
            if time >= 0:
                yield (
                    f'{{"ph":"C","name":"memory",{_at(device, _COMPUTE)},"ts":{_us(time)},'
                    f'"args":{{"bytes":{count}}}}}'
                )


def _rest(timeline: Timeline) -> dict[str, Any]:
    """Return what the events do not carry."""
    costs = timeline.costs
    partial: dict[str, list[list[int]]] = {}
    num_events: dict[str, int] = {}
    for category, pair in PAIRS.items():
        begin, end = (getattr(timeline, name).reshape(-1) for name in pair)
        num_events[category] = int(((begin >= 0) & (end >= 0)).sum())
        half = (begin < 0) != (end < 0)
        for name, times in zip(pair, (begin, end), strict=True):
            places = np.flatnonzero(half & (times >= 0))
            if len(places):
                partial[name] = np.stack((places, times[places]), axis=1).tolist()
    return {
        "version": 1,
        "num_events": num_events,
        "actions": timeline.schedule.words(),
        "offload": None if timeline.copies is None else timeline.copies.words(),
        "costs": {
            field.name: value.tolist() if isinstance(value, np.ndarray) else value
            for field in fields(costs)
            for value in (getattr(costs, field.name),)
        },
        "peak_bytes": timeline.peak_bytes.tolist(),
        "partial": partial,
    }
