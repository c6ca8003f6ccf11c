"""Trace JSON -> Timeline: the way back from what `simulator.chrome.dumps` writes.

Only events that carry times of the plan are looked at, found by category and name; all else is
for the eye. What comes from a file is checked before it is used: lengths, indices, the plan's
order, and that every event belongs to it once.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from simulator.actions import CopySchedule, Kind, Schedule, kind_of, microbatch_of, stage_of
from simulator.costs import Costs
from simulator.errors import ScheduleError, TraceError
from simulator.timeline import Timeline
from simulator.validate import validate

Int64 = NDArray[np.int64]

_MAX_NS = 2**62

# the category of an event -> the fields of a Timeline that its start and its end stand in
PAIRS = {
    "action": ("start_ns", "end_ns"),
    "activation": ("forward_sent_ns", "forward_arrived_ns"),
    "gradient": ("backward_sent_ns", "backward_arrived_ns"),
    "copy": ("copy_start_ns", "copy_end_ns"),
    "reduction": ("reduce_start_ns", "reduce_end_ns"),
    "exchange": ("exchange_start_ns", "exchange_end_ns"),
    "optimizer": ("optimizer_start_ns", "optimizer_end_ns"),
}


class _Args(msgspec.Struct):
    index: int = -1
    arrived_ns: int = -1


class _Event(msgspec.Struct):
    ph: str
    name: str = ""
    cat: str = ""
    pid: int | str = -1
    ts: Decimal | None = None
    dur: Decimal | None = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _CostLists(msgspec.Struct, forbid_unknown_fields=True):
    num_microbatches: int
    stage_device: list[int]
    forward_ns: list[int]
    backward_ns: list[int]
    input_grad_ns: list[int]
    weight_grad_ns: list[int]
    transfer_bytes: list[int]
    transfer_hold_ns: list[int]
    transfer_latency_ns: list[int]
    transfer_uses_nic: list[bool]
    reduce_ns: list[int]
    exchange_stages: list[tuple[int, int]]
    exchange_ns: list[int]
    optimizer_ns: list[int]
    saved_bytes: list[int]
    saved_w_bytes: list[int]
    held_w_bytes: list[int]
    workspace_bytes: list[int]
    input_bytes: list[int]
    recompute: list[bool]
    static_bytes: list[int]
    memory_bytes: list[int]
    offload_bytes: list[int]
    copy_ns: list[int]
    host_link: list[int]
    device_host: list[int]
    host_memory_bytes: int | None


class _Rest(msgspec.Struct, forbid_unknown_fields=True):
    version: Literal[1]
    num_events: dict[str, int]
    actions: list[list[str]]
    offload: list[list[str]] | None
    costs: _CostLists
    peak_bytes: list[int]
    partial: dict[str, list[tuple[int, int]]]


class _Other(msgspec.Struct):
    octotune: _Rest


class _Trace(msgspec.Struct):
    otherData: _Other  # noqa: N815 - the format's own name
    traceEvents: list[_Event]  # noqa: N815


def loads(text: bytes | str) -> Timeline:
    """Return the timeline that `dumps` made a trace of.

    Raises:
        TraceError: if the text is no such trace, or one that was cut off or changed so that it
            no longer holds a timeline; the message is one line.
    """
    try:
        trace = msgspec.json.decode(text, type=_Trace)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TraceError(f"no trace of a timeline: {error}") from None
    rest = trace.otherData.octotune
    costs = _costs(rest.costs)
    try:
        schedule = Schedule.from_words(rest.actions)
        copies = None if rest.offload is None else CopySchedule.from_words(rest.offload)
        validate(schedule, costs, copies)
    except ScheduleError as error:
        raise TraceError(f"otherData.octotune.{error}") from None

    num_stages, m = costs.num_stages, costs.num_microbatches
    sizes = {
        "action": schedule.num_actions,
        "activation": num_stages * m,
        "gradient": num_stages * m,
        "copy": 0 if copies is None else len(copies.codes),
        "reduction": num_stages,
        "exchange": len(costs.exchange_ns),
        "optimizer": costs.num_devices,
    }
    times = {
        name: np.full(sizes[category], -1, dtype=np.int64)
        for category, pair in PAIRS.items()
        for name in pair
    }
    found = _place_events(trace.traceEvents, times, _indices(schedule, copies, costs))
    if found != rest.num_events:
        raise TraceError(
            f"traceEvents has {found} events of this plan; otherData.octotune.num_events is "
            f"{rest.num_events}: some are missing"
        )
    for name, entries in rest.partial.items():
        if name not in times:
            raise TraceError(f"otherData.octotune.partial has {name!r}, which is no time")
        for place, time in entries:
            if not 0 <= place < len(times[name]) or not 0 <= time <= _MAX_NS:
                raise TraceError(
                    f"otherData.octotune.partial.{name} has [{place}, {time}]; a place is below "
                    f"{len(times[name])}, a time 0 to 2^62"
                )
            times[name][place] = time
    per_microbatch: tuple[str, ...] = (*PAIRS["activation"], *PAIRS["gradient"])
    return Timeline(
        schedule=schedule,
        copies=copies,
        costs=costs,
        peak_bytes=_array(rest.peak_bytes, costs.num_devices, "peak_bytes"),
        **{name: times[name].reshape(num_stages, m) for name in per_microbatch},
        **{name: array for name, array in times.items() if name not in per_microbatch},
    )


def _indices(
    schedule: Schedule, copies: CopySchedule | None, costs: Costs
) -> dict[str, dict[str, int]]:
    """Return where the times of each event belong: category -> name -> place."""
    m = costs.num_microbatches
    actions = {word: at for at, word in enumerate(w for row in schedule.words() for w in row)}
    activations = {}
    gradients = {}
    codes = schedule.codes
    places = (stage_of(codes) * m + microbatch_of(codes)).tolist()
    for word, kind, place in zip(actions, kind_of(codes).tolist(), places, strict=True):
        if kind == Kind.F:
            activations[word] = place
        elif kind != Kind.W:
            gradients[word] = place
    lanes = [] if copies is None else [word for row in copies.words() for word in row]
    return {
        "action": actions,
        "activation": activations,
        "gradient": gradients,
        "copy": {word.partition("@")[0]: at for at, word in enumerate(lanes)},
    }


def _place_events(
    events: list[_Event], times: dict[str, Int64], indices: dict[str, dict[str, int]]
) -> dict[str, int]:
    """Fill in the times; return how many events of each category there are."""
    num_events = dict.fromkeys(PAIRS, 0)
    decode = msgspec.json.Decoder(_Args).decode
    lists = {name: array.tolist() for name, array in times.items()}
    for number, event in enumerate(events):
        pair = PAIRS.get(event.cat)
        if pair is None or event.ph != "X":
            continue
        begin, end = lists[pair[0]], lists[pair[1]]
        place: int | None
        arrived = None
        if event.cat in indices:
            place = indices[event.cat].get(event.name)
        else:
            place = _args(decode, event, number).index
        if place is None or not 0 <= place < len(begin):
            raise TraceError(
                f"traceEvents[{number}]: {event.name[:40]!r} is no {event.cat} of this plan"
            )
        if begin[place] >= 0:
            raise TraceError(
                f"traceEvents[{number}]: {event.cat} {event.name!r} is there a second time"
            )
        start = _ns(event.ts, number, "ts")
        if event.cat in ("activation", "gradient"):
            arrived = _args(decode, event, number).arrived_ns
            if not 0 <= arrived <= _MAX_NS:
                raise TraceError(
                    f"traceEvents[{number}]: args.arrived_ns is {arrived}; it is 0 to 2^62"
                )
        num_events[event.cat] += 1
        begin[place] = start
        end[place] = start + _ns(event.dur, number, "dur") if arrived is None else arrived
    for name, values in lists.items():
        times[name][:] = values
    return num_events


def _args(decode: Callable[[msgspec.Raw], _Args], event: _Event, number: int) -> _Args:
    try:
        return decode(event.args)
    except msgspec.MsgspecError as error:
        raise TraceError(f"traceEvents[{number}].args: {error}") from None


def _ns(time_us: Decimal | None, number: int, name: str) -> int:
    """Return microseconds as whole nanoseconds."""
    if time_us is not None and time_us.is_finite():
        exact = time_us.as_tuple().exponent
        # the exponent is bounded before anything is scaled: 1e999999 is a short text
        if isinstance(exact, int) and -30 <= exact <= 18 and abs(time_us) <= _MAX_NS // 1000:
            time_ns = int(time_us.scaleb(3))
            if time_ns >= 0 and time_us.scaleb(3) == time_ns:
                return time_ns
    found = "missing" if time_us is None else f"{str(time_us)[:40]}"
    raise TraceError(
        f"traceEvents[{number}].{name} is {found}; write microseconds from 0 with at most three "
        "decimals"
    )


def _array(values: list[int], length: int, name: str) -> Int64:
    if len(values) != length:
        raise TraceError(f"otherData.octotune.{name} has {len(values)} values; it needs {length}")
    if values and not -1 <= min(values) <= max(values) < 2**63:
        raise TraceError(f"otherData.octotune.{name} has a value outside -1 to 2^63 - 1")
    return np.array(values, dtype=np.int64)


def _costs(lists: _CostLists) -> Costs:
    """Return the costs, with lengths and indices checked."""
    num_stages, num_devices = len(lists.stage_device), len(lists.static_bytes)
    if num_stages < 1 or num_devices < 1:
        raise TraceError("otherData.octotune.costs has no stage or no device; it needs one each")
    if not 1 <= lists.num_microbatches <= 2**24:
        raise TraceError(
            f"otherData.octotune.costs.num_microbatches is {lists.num_microbatches}; it is 1 to "
            "2^24"
        )
    per_boundary = (
        "transfer_bytes",
        "transfer_hold_ns",
        "transfer_latency_ns",
    )
    per_stage = (
        "stage_device",
        "forward_ns",
        "backward_ns",
        "input_grad_ns",
        "weight_grad_ns",
        "reduce_ns",
        "saved_bytes",
        "saved_w_bytes",
        "held_w_bytes",
        "workspace_bytes",
        "input_bytes",
        "offload_bytes",
        "copy_ns",
    )
    per_device = ("optimizer_ns", "static_bytes", "memory_bytes", "host_link", "device_host")
    arrays: dict[str, Any] = {
        name: _array(getattr(lists, name), length, f"costs.{name}")
        for names, length in (
            (per_boundary, num_stages - 1),
            (per_stage, num_stages),
            (per_device, num_devices),
            (("exchange_ns",), len(lists.exchange_stages)),
        )
        for name in names
    }
    flat = [stage for pair in lists.exchange_stages for stage in pair]
    arrays["exchange_stages"] = _array(flat, len(flat), "costs.exchange_stages").reshape(-1, 2)
    flags: dict[str, NDArray[np.bool_]] = {}
    for name, length in (("transfer_uses_nic", num_stages - 1), ("recompute", num_stages)):
        values = getattr(lists, name)
        if len(values) != length:
            raise TraceError(
                f"otherData.octotune.costs.{name} has {len(values)} values; it needs {length}"
            )
        flags[name] = np.array(values, dtype=np.bool_)
    for name, below in (("stage_device", num_devices), ("exchange_stages", num_stages)):
        if arrays[name].size and not 0 <= arrays[name].min() <= arrays[name].max() < below:
            raise TraceError(
                f"otherData.octotune.costs.{name} has a number outside 0 to {below - 1}"
            )
    return Costs(
        num_microbatches=lists.num_microbatches,
        host_memory_bytes=lists.host_memory_bytes,
        transfer_uses_nic=flags["transfer_uses_nic"],
        recompute=flags["recompute"],
        **arrays,
    )
