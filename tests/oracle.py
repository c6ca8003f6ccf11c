"""A second simulator, to hold the engine against: slow, plain, and written from the contract only.

It reads a plan's workload and cluster itself and shares no code with `simulator` or with
`build_costs`. Time is a heap of events; everything is a dictionary keyed by the words of the plan;
fractions are exact. At each moment things happen in the order that docs/contract.md implies:
what ends, ends; then transfers and reductions that were queued by it get their turn; what they
bring may start an action at once; and last, copies that could start ask for their link.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction

WORD = re.compile(r"([0-9]+)([FBIWOR])([0-9]+)(?:@(.+))?")


class StuckError(Exception):
    """The order cannot run to its end."""


@dataclass
class Outcome:
    """When everything happened, by the words of the plan."""

    start: dict[str, int] = field(default_factory=dict)
    end: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)  # by the word of the producer
    arrived: dict[str, int] = field(default_factory=dict)
    copy_start: dict[str, int] = field(default_factory=dict)  # by the word without its anchor
    copy_end: dict[str, int] = field(default_factory=dict)
    reduce_start: dict[int, int] = field(default_factory=dict)  # by stage
    reduce_end: dict[int, int] = field(default_factory=dict)
    exchange_start: dict[tuple[int, int], int] = field(default_factory=dict)  # by tied layers
    exchange_end: dict[tuple[int, int], int] = field(default_factory=dict)
    optimizer_start: list[int] = field(default_factory=list)
    optimizer_end: list[int] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    host_peak_bytes: dict[int, int] = field(default_factory=dict)
    step_ns: int = 0
    bubble_fraction: Fraction = Fraction(0)
    device_bytes: list[dict[int, int]] = field(default_factory=list)  # bytes held from a moment on
    channel_order: dict[tuple[int, int], list[str]] = field(default_factory=dict)


def ceil_div(numerator: int, denominator: int) -> int:
    return math.ceil(Fraction(numerator, denominator))


def split(word):
    """Return the word without its anchor, its stage, kind and microbatch, and the anchor."""
    stage, kind, microbatch, anchor = WORD.fullmatch(word).groups()
    return word.partition("@")[0], int(stage), kind, int(microbatch), anchor


class World:
    """What the contract says of one plan's stages on its cluster."""

    def __init__(self, plan):
        self.plan = plan
        self.layers = plan.workload.layers
        self.devices = plan.cluster.devices
        self.stages = plan.stages
        self.device_of = [stage.device for stage in plan.stages]
        self.last = len(plan.stages) - 1
        self.duration = {}
        for index, stage in enumerate(plan.stages):
            device = self.devices[stage.device]
            forward = input_grad = weight_grad = 0
            for layer in self.layers[stage.layers[0] : stage.layers[1]]:
                if device.kind in layer.times_ns:
                    times = layer.times_ns[device.kind]
                else:
                    base = (layer.forward_ns, layer.input_grad_ns, layer.weight_grad_ns)
                    times = [math.floor(time / device.speed + 0.5) for time in base]
                forward += times[0]
                input_grad += times[1]
                weight_grad += times[2]
            again = forward if stage.recompute else 0
            for kind, time in (
                ("F", forward),
                ("I", input_grad + again),
                ("W", weight_grad),
                ("B", input_grad + weight_grad + again),
            ):
                self.duration[index, kind] = max(1, time + device.overhead_ns)
        self.links = {}
        self.rows = [[split(word) for word in row] for row in plan.actions]
        lanes = plan.offload or [[]] * len(plan.actions)
        self.lanes = [[split(word) for word in lane] for lane in lanes]

    def of_stage(self, stage, name):
        begin, end = self.stages[stage].layers
        return [getattr(layer, name) for layer in self.layers[begin:end]]

    def between_hosts(self, source, target):
        return self.devices[source].host != self.devices[target].host

    def link(self, source, target):
        """Latency and bandwidth, the NIC's limit included, and whether the NIC is used."""
        links = self.plan.cluster.links
        pair = links.pairs.get(f"{source}-{target}") or links.pairs.get(f"{target}-{source}")
        crosses = self.between_hosts(source, target)
        link = pair or (links.inter_host if crosses else links.intra_host)
        nic = self.plan.cluster.nic_bandwidth
        if crosses and nic is not None:
            return link.latency_ns, min(nic, link.bandwidth), True
        return link.latency_ns, link.bandwidth, False

    def transfer(self, boundary, source, target):
        """Hold, latency and whether the NIC is used, of what crosses a boundary."""
        key = boundary, source, target
        if key not in self.links:
            size = self.layers[self.stages[boundary].layers[1] - 1].output_bytes
            latency, bandwidth, nic = self.link(source, target)
            self.links[key] = ceil_div(size * 10**9, bandwidth), latency, nic
        return self.links[key]

    def copy_ns(self, stage):
        size = sum(self.of_stage(stage, "offloadable_bytes"))
        device = self.devices[self.device_of[stage]]
        return max(1, ceil_div(size * 10**9, device.offload_bandwidth))


def run(plan, longer=None):
    """Run a valid plan. `longer` lengthens single actions: word -> ns. Raises StuckError."""
    return play(World(plan), longer or {})


def play(world, longer):
    """Run a plan that has been read."""
    plan, rows, lanes = world.plan, world.rows, world.lanes
    out = Outcome()
    taken_out = {(stage, microbatch) for lane in lanes for _, stage, _, microbatch, _ in lane}
    ended_copies = set()
    num_devices = len(world.devices)
    parallel = plan.cluster.data_parallel
    reduces = parallel is not None and parallel.size > 1

    next_action = [0] * num_devices
    next_copy = [0] * num_devices
    device_busy = [False] * num_devices
    lane_busy = [False] * num_devices
    channel_free = defaultdict(int)
    sending_free = defaultdict(int)
    receiving_free = defaultdict(int)
    link_free = defaultdict(int)
    reduction_free = defaultdict(int)
    there = set()  # ("F" or "G", stage, microbatch): activation or gradient is at its target
    left = [plan.num_microbatches] * len(world.stages)
    device_end = [0] * num_devices
    stage_end = {}

    events = [(0, 0, "begin", None)]
    count = 0

    def at(time, what, value):
        nonlocal count
        count += 1
        heapq.heappush(events, (time, count, what, value))

    def has_inputs(stage, kind, microbatch):
        if kind == "F":
            return stage == 0 or ("F", stage, microbatch) in there
        if kind == "W":
            return f"{stage}I{microbatch}" in out.end
        if f"{stage}F{microbatch}" not in out.end:
            return False
        if stage < world.last and ("G", stage, microbatch) not in there:
            return False
        reload = f"{stage}R{microbatch}"
        return (stage, microbatch) not in taken_out or reload in ended_copies

    def could_start(device):
        _, stage, kind, microbatch, anchor = lanes[device][next_copy[device]]
        if anchor is not None and anchor not in out.start:
            return False
        if kind == "O":
            return f"{stage}F{microbatch}" in out.end
        return f"{stage}O{microbatch}" in ended_copies

    while events:
        time = events[0][0]
        queued = []
        touched = set()
        while True:
            while events and events[0][0] == time:
                _, _, what, value = heapq.heappop(events)
                if what == "begin":
                    touched |= set(range(num_devices))
                elif what == "action":
                    device, word, stage, kind, microbatch = value
                    out.end[word] = time
                    device_busy[device] = False
                    device_end[device] = time
                    touched.add(device)
                    if kind == "F" and stage < world.last:
                        queued.append((0, stage, microbatch, word))
                    if kind in "BI" and stage > 0:
                        queued.append((1, stage, microbatch, word))
                    if kind in "BW":
                        left[stage] -= 1
                        if left[stage] == 0:
                            stage_end[stage] = time
                            if reduces:
                                size = sum(world.of_stage(stage, "param_bytes"))
                                n = parallel.size
                                takes = ceil_div(
                                    2 * (n - 1) * size * 10**9, n * parallel.bandwidth
                                )
                                begin = max(time, reduction_free[device])
                                reduction_free[device] = begin + takes
                                out.reduce_start[stage] = begin
                                out.reduce_end[stage] = begin + takes
                elif what == "arrival":
                    there.add(value)
                    touched.add(world.device_of[value[1]])
                elif what == "copy":
                    device, word = value
                    ended_copies.add(word)
                    lane_busy[device] = False
                    touched.add(device)
            if not queued:
                break
            # in the order queued each transfer reserves all it needs
            for direction, stage, microbatch, word in sorted(queued):
                target_stage = stage + 1 if direction == 0 else stage - 1
                source, target = world.device_of[stage], world.device_of[target_stage]
                arrival = ("FG"[direction], target_stage, microbatch)
                if source == target:
                    at(time, "arrival", arrival)
                    continue
                hold, latency, nic = world.transfer(min(stage, target_stage), source, target)
                hosts = world.devices[source].host, world.devices[target].host
                begin = max(time, channel_free[source, target])
                if nic:
                    begin = max(begin, sending_free[hosts[0]], receiving_free[hosts[1]])
                    sending_free[hosts[0]] = receiving_free[hosts[1]] = begin + hold
                channel_free[source, target] = begin + hold
                out.channel_order.setdefault((source, target), []).append(word)
                out.sent[word] = begin
                out.arrived[word] = begin + hold + latency
                at(begin + hold + latency, "arrival", arrival)
            queued = []
        for device in sorted(touched):
            if device_busy[device] or next_action[device] == len(rows[device]):
                continue
            word, stage, kind, microbatch, _ = rows[device][next_action[device]]
            if not has_inputs(stage, kind, microbatch):
                continue
            out.start[word] = time
            device_busy[device] = True
            next_action[device] += 1
            takes = world.duration[stage, kind] + longer.get(word, 0)
            at(time + takes, "action", (device, word, stage, kind, microbatch))
        for device in sorted(touched):
            if lane_busy[device] or next_copy[device] == len(lanes[device]):
                continue
            if not could_start(device):
                continue
            word, stage, kind, microbatch, _ = lanes[device][next_copy[device]]
            name = world.devices[device].host_link
            side = (device if name is None else name, kind)
            begin = max(time, link_free[side])
            link_free[side] = begin + world.copy_ns(stage)
            out.copy_start[word] = begin
            out.copy_end[word] = link_free[side]
            lane_busy[device] = True
            next_copy[device] += 1
            at(link_free[side], "copy", (device, word))

    if next_action != list(map(len, rows)) or next_copy != list(map(len, lanes)):
        raise StuckError

    finish_step(world, out, device_end, stage_end)
    count_bytes(world, out, rows, lanes)
    return out


def finish_step(world, out, device_end, stage_end):
    """Add exchanges, optimizers and what the step as a whole took."""
    plan = world.plan
    stage_of_layer = {
        layer: index
        for index, stage in enumerate(plan.stages)
        for layer in range(stage.layers[0], stage.layers[1])
    }
    ready = list(device_end)
    for stage, end in out.reduce_end.items():
        device = world.device_of[stage]
        ready[device] = max(ready[device], end)
    for first, second in plan.workload.tied:
        stages = stage_of_layer[first], stage_of_layer[second]
        source, target = (world.device_of[stage] for stage in stages)
        if source == target:
            continue
        latency, bandwidth, _ = world.link(source, target)
        begin = max(stage_end[stage] for stage in stages)
        end = begin + ceil_div(world.layers[first].param_bytes * 10**9, bandwidth) + latency
        out.exchange_start[first, second] = begin
        out.exchange_end[first, second] = end
        for device in (source, target):
            ready[device] = max(ready[device], end)
    busy = 0
    for device, begin in enumerate(ready):
        takes = sum(
            math.floor(layer.optimizer_ns / world.devices[device].speed + 0.5)
            for index, layer in enumerate(world.layers)
            if world.device_of[stage_of_layer[index]] == device
        )
        out.optimizer_start.append(begin)
        out.optimizer_end.append(begin + takes)
        busy += takes
    out.step_ns = max(out.optimizer_end)
    busy += sum(out.end[word] - out.start[word] for word in out.end)
    out.bubble_fraction = 1 - Fraction(busy, len(world.devices) * out.step_ns)


def count_bytes(world, out, rows, lanes):
    """Add the bytes on every device and host over time, and their peaks."""
    plan = world.plan
    stage_of_layer = {
        layer: index
        for index, stage in enumerate(plan.stages)
        for layer in range(stage.layers[0], stage.layers[1])
    }
    names = ("workspace_bytes", "saved_bytes", "saved_w_bytes", "held_w_bytes")
    sizes = [[world.of_stage(stage, name) for name in names] for stage in range(world.last + 1)]
    sizes = [(max(workspace), *map(sum, kept)) for workspace, *kept in sizes]
    hosts = defaultdict(lambda: defaultdict(int))
    for device, row in enumerate(rows):
        changes = defaultdict(int)
        changes[0] += world.devices[device].reserved_bytes
        for index, layer in enumerate(world.layers):
            if world.device_of[stage_of_layer[index]] == device:
                changes[0] += layer.state_bytes
        for first, second in plan.workload.tied:
            if all(world.device_of[stage_of_layer[x]] == device for x in (first, second)):
                states = [world.layers[x].state_bytes for x in (first, second)]
                changes[0] += max(states) - sum(states)
        for word, stage, kind, microbatch, _ in row:
            begin, end = out.start[word], out.end[word]
            workspace, saved, saved_w, held_w = sizes[stage]
            held = [(workspace, begin, end)]
            if kind == "F":
                back = f"{stage}B{microbatch}"
                half, weights = (
                    (back, back)
                    if back in out.end
                    else (f"{stage}I{microbatch}", f"{stage}W{microbatch}")
                )
                from_here = begin
                if plan.stages[stage].recompute:
                    first_layer = plan.stages[stage].layers[0]
                    kept = world.layers[first_layer - 1].output_bytes if stage else 0
                    held.append((kept, begin, out.start[half]))
                    from_here = out.start[half]
                held.append((saved, from_here, out.end[half]))
                held.append((saved_w, from_here, out.end[weights]))
                held.append((held_w, out.start[half], out.end[weights]))
            for size, from_time, to_time in held:
                changes[from_time] += size
                changes[to_time] -= size
        for word, stage, kind, _, _ in lanes[device]:
            size = sum(world.of_stage(stage, "offloadable_bytes"))
            on_host = hosts[world.devices[device].host]
            if kind == "O":
                changes[out.copy_end[word]] -= size
                on_host[out.copy_start[word]] += size
            else:
                changes[out.copy_start[word]] += size
                on_host[out.copy_end[word]] -= size
        out.device_bytes.append(add_up(changes))
        out.peak_bytes.append(max(out.device_bytes[-1].values()))
    for device in world.devices:
        changes = hosts[device.host]
        out.host_peak_bytes[device.host] = max(add_up(changes).values(), default=0)


def add_up(changes):
    """Return what is held from each moment on."""
    held, total = {}, 0
    for time in sorted(changes):
        total += changes[time]
        held[time] = total
    return held
