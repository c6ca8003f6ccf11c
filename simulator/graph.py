"""What waits for what: the dependencies of a step, its critical path and its slack.

Everything that happens in a step is a node: actions, transfers, copies, reductions, exchanges and
optimizer runs. An edge says that one starts no earlier than another ends (plus a lag: a transfer's
latency). Each start in a simulated timeline is the latest such moment, so following the edge that
decided it, backwards from the end of the step, gives the critical path without a gap; and going
over all edges backwards gives how late everything could end.

The order in which NIC sides and shared host links are served depends on time. It is part of the
graph where a timeline is given, and taken as it was: slack is slack at the same order of service.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.actions import (
    CopyKind,
    CopySchedule,
    Schedule,
    kind_of,
    microbatch_of,
    stage_of,
    unpack,
)
from simulator.compiled import kernel
from simulator.costs import Costs
from simulator.timeline import Timeline
from simulator.validate import Positions, action_positions, copy_positions

if TYPE_CHECKING:
    import networkx as nx

Int64 = NDArray[np.int64]


class Node(IntEnum):
    """What a node of the graph is."""

    ACTION = 0
    TRANSFER = 1
    COPY = 2
    REDUCTION = 3
    EXCHANGE = 4
    OPTIMIZER = 5


class Why(IntEnum):
    """Why one node waits for another. Where several decide, the critical path takes the first."""

    ROW = 0  # the device is busy with it
    TENSOR = 1  # its activation or gradient is needed
    RELOAD = 2  # the copy brings the activations back
    CHANNEL = 3  # it holds the channel, or the reduction channel
    SENDING = 4  # it holds the source host's sending side
    RECEIVING = 5  # it holds the target host's receiving side
    LANE = 6  # the copy lane is busy with it
    LINK = 7  # it holds the shared host link
    SAVED = 8  # what it saved is needed: by B or I, by W, by the copy that takes it out
    GRADIENTS = 9  # reductions, exchanges and the optimizer wait for the last gradients
    ANCHOR = 10  # the copy is held back until it starts


class Piece(NamedTuple):
    """One part of the critical path: from its start to when it let the next part start.

    `device` is where it happens: of a transfer the source, of an exchange the first stage's.
    `why` is what it waited for the part before it for; None: it started with the step.
    """

    name: str
    node: Node
    device: int
    start_ns: int
    end_ns: int
    why: Why | None


def transfer_name(producer: object, source: int, target: int) -> str:
    """Return what a transfer is called: its producer and its channel, `0F3 0->1`."""
    return f"{producer} {source}->{target}"


def critical_path(timeline: Timeline) -> tuple[Piece, ...]:
    """Return the chain of events that makes the step as long as it is.

    In a simulated timeline the parts follow each other without a gap from 0 to `step_ns`; making
    any of them shorter is the only way to a shorter step. (Where several chains are as long, all
    would have to be; this is one of them.) Of a transfer that the next action waits for, the part
    includes the latency; of one that only holds up the next transfer, it does not.
    """
    graph = _dependencies(timeline.schedule, timeline.costs, timeline.copies, timeline)
    start, end = _times(graph, timeline)
    bound = np.where(graph.from_start, start[graph.source], end[graph.source] + graph.lag_ns)
    cause = _last_cause(graph.target, graph.why, bound, len(start))
    number = graph.begins[_OPTIMIZERS] + int(timeline.optimizer_end_ns.argmax())
    until = int(end[number])
    pieces: list[Piece] = []
    while True:
        edge = int(cause[number])
        why = None if edge < 0 else Why(int(graph.why[edge]))
        if len(pieces) > 0 or until > start[number]:  # an optimizer of 0 ns is no part
            name, node, device = graph.describe(number)
            pieces.append(Piece(name, node, device, int(start[number]), until, why))
        if edge < 0:
            return tuple(reversed(pieces))
        number, until = int(graph.source[edge]), int(bound[edge])


def slack_ns(timeline: Timeline) -> Int64:
    """Return how much longer each action [A] could last without a longer step.

    All else stays as it is: the actions' order, and the order in which NIC sides and shared host
    links were served. An action of slack 0 is critical. Where nothing is contended for, an action
    lengthened by its slack and 1 ns more makes the step exactly 1 ns longer.
    """
    graph = _dependencies(timeline.schedule, timeline.costs, timeline.copies, timeline)
    latest = _latest_ends(
        graph.source,
        graph.target,
        graph.lag_ns,
        graph.from_start,
        graph.duration_ns,
        timeline.step_ns,
    )
    slack: Int64 = latest[: timeline.schedule.num_actions] - timeline.end_ns
    return slack


def dependency_graph(
    schedule: Schedule, costs: Costs, copies: CopySchedule | None = None
) -> nx.DiGraph[str]:
    """Return what waits for what as a networkx graph, for queries; it may hold cycles.

    Nodes are names: actions `2F0`, transfers `2F0 0->1` (producer and channel), copies `3R5`,
    `reduction 3` (stage), `exchange 0-7` (stages), `optimizer 2` (device). Each has `node` (a
    `Node`), `device` and `duration_ns` (of a transfer how long it holds its channel). Each edge
    has `why` (a `Why`), `lag_ns`, and `from_start`: true where the source need only have started.
    The order of service of NIC sides and shared host links is not in it; see `timeline_graph`.

    Raises:
        ScheduleError: if the schedule is incomplete or breaks a rule of order in a row.
    """
    return _to_networkx(_dependencies(schedule, costs, copies, None))


def timeline_graph(timeline: Timeline) -> nx.DiGraph[str]:
    """Return `dependency_graph` with the order of service, and with `start_ns` and `end_ns`."""
    graph = _dependencies(timeline.schedule, timeline.costs, timeline.copies, timeline)
    found = _to_networkx(graph)
    start, end = _times(graph, timeline)
    for number in np.flatnonzero(graph.duration_ns >= 0).tolist():
        found.nodes[graph.describe(number)[0]].update(
            start_ns=int(start[number]), end_ns=int(end[number])
        )
    return found


# the ranges of node numbers, in order
_ACTIONS, _FORWARDS, _BACKWARDS, _COPIES, _REDUCTIONS, _EXCHANGES, _OPTIMIZERS = range(7)
_NODES = (
    Node.ACTION,
    Node.TRANSFER,
    Node.TRANSFER,
    Node.COPY,
    Node.REDUCTION,
    Node.EXCHANGE,
    Node.OPTIMIZER,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Dependencies:
    """Nodes by number, and edges between them.

    Numbers: actions as in `schedule.codes`; at stage * m + microbatch what each stage sends
    forwards, then what it sends backwards; copies as in `copies.codes`; reductions by stage;
    exchanges; optimizers by device.
    """

    schedule: Schedule
    costs: Costs
    copies: CopySchedule | None
    positions: Positions
    begins: tuple[int, ...]  # the first number of each range
    duration_ns: Int64  # [N] -1 where the number stands for nothing
    source: Int64  # [E]
    target: Int64  # [E]
    lag_ns: Int64  # [E]
    why: Int64  # [E]

    @property
    def from_start(self) -> NDArray[np.bool_]:
        """Whether the target waits for the source's start only."""
        anchors: NDArray[np.bool_] = self.why == Why.ANCHOR
        return anchors

    def describe(self, number: int) -> tuple[str, Node, int]:
        """Return name, kind and device of a node."""
        part = int(np.searchsorted(self.begins, number, side="right")) - 1
        index = number - self.begins[part]
        home = self.costs.stage_device
        node = _NODES[part]
        if node is Node.ACTION:
            action = unpack(int(self.schedule.codes[index]))
            return str(action), node, int(home[action.stage])
        if node is Node.TRANSFER:
            forwards = part == _FORWARDS
            stage = index // self.costs.num_microbatches
            made = self.positions.forward if forwards else self.positions.backward
            source, target = int(home[stage]), int(home[stage + (1 if forwards else -1)])
            producer = unpack(int(self.schedule.codes[made[index]]))
            return transfer_name(producer, source, target), node, source
        if node is Node.COPY:
            assert self.copies is not None
            code = self.copies.codes[index : index + 1]
            stage, microbatch = int(stage_of(code)[0]), int(microbatch_of(code)[0])
            kind = CopyKind(int(kind_of(code)[0]))
            return f"{stage}{kind.name}{microbatch}", node, int(home[stage])
        if node is Node.REDUCTION:
            return f"reduction {index}", node, int(home[index])
        if node is Node.EXCHANGE:
            first, second = self.costs.exchange_stages[index].tolist()
            return f"exchange {first}-{second}", node, int(home[first])
        return f"optimizer {index}", node, index


class _Edges:
    """Edges while they are collected."""

    def __init__(self) -> None:
        self.parts: list[tuple[Int64, Int64, Int64, Int64]] = []

    def add(self, source: Int64, target: Int64, why: Why, lag_ns: Int64 | int = 0) -> None:
        source, target, lag = np.broadcast_arrays(source, target, lag_ns)
        source, target, lag = source.reshape(-1), target.reshape(-1), lag.reshape(-1)
        self.parts.append((source, target, lag, np.full(len(source), why, dtype=np.int64)))

    def chain(self, nodes: Int64, key: Int64, why: Why) -> None:
        """Let each node wait for the one before it that has the same key."""
        order = np.argsort(key, kind="stable")
        nodes, key = nodes[order], key[order]
        same = key[1:] == key[:-1]
        self.add(nodes[:-1][same], nodes[1:][same], why)


def _dependencies(
    schedule: Schedule, costs: Costs, copies: CopySchedule | None, timeline: Timeline | None
) -> _Dependencies:
    """Return the graph; with a timeline, the order in which contended things were served too."""
    positions = action_positions(schedule, costs)
    num_stages, m = costs.num_stages, costs.num_microbatches
    total, num_actions = num_stages * m, schedule.num_actions
    num_copies = 0 if copies is None else len(copies.codes)
    sizes = (num_actions, total, total, num_copies, num_stages, len(costs.exchange_ns))
    begins = (0, *np.cumsum(sizes).tolist())
    home = costs.stage_device
    forward = positions.forward.reshape(num_stages, m)
    backward = positions.backward.reshape(num_stages, m)
    weight = positions.weight.reshape(num_stages, m)
    edges = _Edges()

    # rows, and what is needed within a stage
    filled = schedule.offsets[1:] > schedule.offsets[:-1]
    follows = np.ones(num_actions, dtype=np.bool_)
    follows[schedule.offsets[:-1][filled]] = False
    edges.add(np.flatnonzero(follows) - 1, np.flatnonzero(follows), Why.ROW)
    edges.add(forward, backward, Why.SAVED)
    edges.add(backward[weight >= 0], weight[weight >= 0], Why.SAVED)

    # tensors between stages
    crosses = home[:-1] != home[1:]
    near, far = np.flatnonzero(~crosses), np.flatnonzero(crosses)
    grid = np.arange(total, dtype=np.int64).reshape(num_stages, m)
    forwards, backwards = begins[_FORWARDS] + grid[far], begins[_BACKWARDS] + grid[far + 1]
    latency = costs.transfer_latency_ns[far][:, None]
    edges.add(forward[near], forward[near + 1], Why.TENSOR)
    edges.add(backward[near + 1], backward[near], Why.TENSOR)
    edges.add(forward[far], forwards, Why.TENSOR)
    edges.add(forwards, forward[far + 1], Why.TENSOR, latency)
    edges.add(backward[far + 1], backwards, Why.TENSOR)
    edges.add(backwards, backward[far], Why.TENSOR, latency)

    # transfers behind each other: in the order of their producers, then of their service
    transfers = np.concatenate((forwards, backwards)).reshape(-1)
    producers = np.concatenate((forward[far], backward[far + 1])).reshape(-1)
    sending = np.repeat(np.concatenate((home[far], home[far + 1])), m)
    receiving = np.repeat(np.concatenate((home[far + 1], home[far])), m)
    order = np.argsort(producers, kind="stable")
    channel = sending * costs.num_devices + receiving
    edges.chain(transfers[order], channel[order], Why.CHANNEL)
    nic = np.tile(np.repeat(costs.transfer_uses_nic[far], m), 2)
    if timeline is not None and nic.any():
        # numbers rise by direction, stage, microbatch, which is the order of ties
        order = np.lexsort((transfers, timeline.end_ns[producers]))
        order = order[nic[order]]
        edges.chain(transfers[order], costs.device_host[sending[order]], Why.SENDING)
        edges.chain(transfers[order], costs.device_host[receiving[order]], Why.RECEIVING)

    copy_ns = np.zeros(0, dtype=np.int64)
    if copies is not None and num_copies:
        copy_ns = costs.copy_ns[stage_of(copies.codes)]
        _add_copies(edges, copies, costs, schedule, positions, begins[_COPIES], timeline)

    # after the last gradients
    last = np.where(weight >= 0, weight, backward).max(axis=1)
    stages = np.arange(num_stages, dtype=np.int64)
    reduced = stages[costs.reduce_ns >= 0]
    reduced = reduced[np.argsort(last[reduced])]
    reductions = begins[_REDUCTIONS] + reduced
    edges.add(last[reduced], reductions, Why.GRADIENTS)
    edges.chain(reductions, home[reduced], Why.CHANNEL)
    exchanges = begins[_EXCHANGES] + np.arange(len(costs.exchange_ns), dtype=np.int64)
    optimizers = begins[_OPTIMIZERS] + np.arange(costs.num_devices, dtype=np.int64)
    edges.add(schedule.offsets[1:][filled] - 1, optimizers[filled], Why.ROW)
    edges.add(reductions, optimizers[home[reduced]], Why.GRADIENTS)
    for side in (0, 1):
        of_side = costs.exchange_stages[:, side]
        edges.add(last[of_side], exchanges, Why.GRADIENTS)
        edges.add(exchanges, optimizers[home[of_side]], Why.GRADIENTS)

    table = np.stack(
        (costs.forward_ns, costs.backward_ns, costs.input_grad_ns, costs.weight_grad_ns)
    )
    holds = np.full((2, num_stages, m), -1, dtype=np.int64)
    holds[0, far] = holds[1, far + 1] = costs.transfer_hold_ns[far][:, None]
    durations = (
        table[kind_of(schedule.codes), stage_of(schedule.codes)],
        holds.reshape(-1),
        copy_ns,
        costs.reduce_ns,
        costs.exchange_ns,
        costs.optimizer_ns,
    )
    source, target, lag, why = (
        np.concatenate(column) for column in zip(*edges.parts, strict=True)
    )
    return _Dependencies(
        schedule=schedule,
        costs=costs,
        copies=copies,
        positions=positions,
        begins=begins,
        duration_ns=np.concatenate(durations),
        source=source,
        target=target,
        lag_ns=lag,
        why=why,
    )


def _add_copies(
    edges: _Edges,
    copies: CopySchedule,
    costs: Costs,
    schedule: Schedule,
    positions: Positions,
    begin: int,
    timeline: Timeline | None,
) -> None:
    """Add what copies wait for and what waits for them; `begin` is the number of the first."""
    waits = copy_positions(copies, costs, schedule, positions)
    stages, back = stage_of(copies.codes), kind_of(copies.codes) == CopyKind.R
    numbers = begin + np.arange(len(back), dtype=np.int64)
    devices = costs.stage_device[stages]
    edges.chain(numbers, devices, Why.LANE)
    edges.add(waits.after[~back], numbers[~back], Why.SAVED)
    anchored = waits.anchor >= 0
    edges.add(waits.anchor[anchored], numbers[anchored], Why.ANCHOR)
    index = stages * costs.num_microbatches + microbatch_of(copies.codes)
    edges.add(numbers[back], positions.backward[index[back]], Why.RELOAD)
    if timeline is not None:
        # on one side of a link copies follow each other, each at least 1 ns: start is order
        order = np.argsort(timeline.copy_start_ns, kind="stable")
        side = 2 * costs.host_link[devices] + back
        edges.chain(numbers[order], side[order], Why.LINK)


def _times(graph: _Dependencies, timeline: Timeline) -> tuple[Int64, Int64]:
    """Return start and end of every node [N]; a transfer ends when it frees its channel."""
    start = np.concatenate(
        (
            timeline.start_ns,
            timeline.forward_sent_ns.reshape(-1),
            timeline.backward_sent_ns.reshape(-1),
            timeline.copy_start_ns,
            timeline.reduce_start_ns,
            timeline.exchange_start_ns,
            timeline.optimizer_start_ns,
        )
    )
    return start, start + graph.duration_ns


def _to_networkx(graph: _Dependencies) -> nx.DiGraph[str]:
    # loads in a quarter of a second; only who asks for such a graph waits for it
    import networkx as nx

    found: nx.DiGraph[str] = nx.DiGraph()
    names: dict[int, str] = {}
    for number in np.flatnonzero(graph.duration_ns >= 0).tolist():
        name, node, device = graph.describe(number)
        names[number] = name
        duration = int(graph.duration_ns[number])
        found.add_node(name, node=node, device=device, duration_ns=duration)
    order = np.argsort(graph.why, kind="stable")
    columns = (graph.source, graph.target, graph.lag_ns, graph.why)
    for source, target, lag, why in zip(
        *(column[order].tolist() for column in columns), strict=True
    ):
        edge = names[source], names[target]
        if not found.has_edge(*edge):
            found.add_edge(*edge, why=Why(why), lag_ns=lag, from_start=why == Why.ANCHOR)
    return found


@kernel
def _last_cause(target: Int64, why: Int64, bound: Int64, num_nodes: int) -> Int64:
    """Return for each node the edge of the latest bound, of the first reason among equals."""
    cause = np.full(num_nodes, -1, dtype=np.int64)
    for edge in range(len(target)):
        best = cause[target[edge]]
        if (
            best < 0
            or bound[edge] > bound[best]
            or (bound[edge] == bound[best] and why[edge] < why[best])
        ):
            cause[target[edge]] = edge
    return cause


@kernel
def _latest_ends(
    source: Int64,
    target: Int64,
    lag: Int64,
    from_start: NDArray[np.bool_],
    duration: Int64,
    step: int,
) -> Int64:
    """Return how late each node could end: backwards over the edges, targets before sources."""
    num_nodes = len(duration)
    first = np.zeros(num_nodes + 1, dtype=np.int64)  # edges by target
    users = np.zeros(num_nodes, dtype=np.int64)  # edges by source that are not yet looked at
    for edge in range(len(source)):
        first[target[edge] + 1] += 1
        users[source[edge]] += 1
    first = np.cumsum(first)
    place = first[:-1].copy()
    by_target = np.empty(len(source), dtype=np.int64)
    for edge in range(len(source)):
        by_target[place[target[edge]]] = edge
        place[target[edge]] += 1

    latest_end = np.full(num_nodes, step, dtype=np.int64)
    latest_start = np.full(num_nodes, step, dtype=np.int64)
    stack = np.empty(num_nodes, dtype=np.int64)
    height = 0
    for node in range(num_nodes):
        if users[node] == 0:
            stack[height] = node
            height += 1
    while height > 0:
        height -= 1
        node = stack[height]
        start = min(latest_start[node], latest_end[node] - duration[node])
        for index in range(first[node], first[node + 1]):
            edge = by_target[index]
            before = source[edge]
            if from_start[edge]:
                latest_start[before] = min(latest_start[before], start)
            else:
                latest_end[before] = min(latest_end[before], start - lag[edge])
            users[before] -= 1
            if users[before] == 0:
                stack[height] = before
                height += 1
    return latest_end
