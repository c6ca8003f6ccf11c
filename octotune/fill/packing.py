"""Packing: which micro-steps of a job run in which bubble of a device, for a cycle of main steps.

    bubble 0  [ 0 1 2 3 ]      a pass is micro-steps 0 to 5; what does not fit waits for the next
    bubble 1  [ 4 5 0 1 2 3 ]  bubble, and at the end of the step for the next step
    bubble 2  [ 4 5 ]

The greedy packing is Algorithm 1 of PipeFill: the job's passes, one after the other, as many as
the bubbles could hold, walked through bubble by bubble, each micro-step in the first bubble that
has the time and memory. Passes that end in a later step are cut where most are complete a step.

With one pass open at a time greedy is optimal: whoever is further along before a bubble is further
along after it. What it leaves is the rest of each bubble that the next micro-step is too long for.
Inference passes are independent, so several may be open at once, and a shorter micro-step of
another pass can fill that rest: `optimal_packing` counts by CP-SAT how often each micro-step runs
in each bubble, so that most passes are complete in a cycle, starting from the greedy one.

Source:
    Arfeen et al. 2024, arXiv:2410.07192, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octotune.fill.bubbles import Bubble
from octotune.fill.jobs import Configuration, FillJob

Int64 = NDArray[np.int64]
Steps = tuple[tuple[tuple[int, ...], ...], ...]

MAX_CYCLE = 32
_AS_GOOD = 0.995
_MAX_VARIABLES = 60_000
_MOST_IMPROVED = 3  # configurations, the best by greedy, that CP-SAT works on


@dataclass(frozen=True, slots=True, kw_only=True)
class Margins:
    """How much of a bubble is handed over.

    A bubble shorter than `threshold_ns` is left alone. Of the others `switch_ns` goes to handing
    over and taking back, and a `margin` share of the rest is kept, so that what takes longer than
    measured still ends in time.
    """

    threshold_ns: int = 5_000_000
    switch_ns: int = 0
    margin: float = 0.2

    def usable_ns(self, bubble: Bubble) -> int:
        """Return how much micro-step time a bubble takes."""
        return max(0, int((bubble.length_ns - self.switch_ns) * (1.0 - self.margin)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A device's bubbles as bins: time, memory and copy lane of each, and what may rest between.

    B bubbles.
    """

    usable_ns: tuple[int, ...]
    free_bytes: tuple[int, ...]
    copy_ns: tuple[int, ...]  # that are left on the copy lane
    resting_bytes: int

    @classmethod
    def of(cls, bubbles: Sequence[Bubble], resting_bytes: int, margins: Margins) -> Room:
        """Return the bins that a device's bubbles make."""
        return cls(
            usable_ns=tuple(margins.usable_ns(bubble) for bubble in bubbles),
            free_bytes=tuple(bubble.free_bytes for bubble in bubbles),
            copy_ns=tuple(bubble.length_ns - bubble.copy_ns for bubble in bubbles),
            resting_bytes=resting_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """What a configuration of a job runs in each bubble of each main step of a cycle.

    `steps[s][b]` are the micro-steps of bubble b, in order, each applied to the pass that has
    waited longest for it. A cycle begins and ends without an open pass, and then repeats.
    """

    configuration: int
    steps: Steps
    samples: int  # a cycle
    busy_ns: int  # a cycle

    @property
    def samples_per_step(self) -> float:
        """Samples made in one main step, in the mean."""
        return self.samples / len(self.steps)


def best_packing(
    job: FillJob, room: Room, *, optimal: bool = False, time_limit_s: float = 5.0, seed: int = 0
) -> Packing | None:
    """Return the packing with most samples a main step over a job's configurations, or None.

    Of equals the first configuration wins. None: no configuration fits (`nearest_miss` says why).

    Args:
        job: with its configurations.
        room: the device's bubbles.
        optimal: improve the greedy packings of the best configurations by CP-SAT, where passes
            are independent (inference).
        time_limit_s: of each of the solver's runs.
        seed: of the solver.
    """
    walks = [
        (walk.rate * job.configurations[index].batch_size, -index, walk)
        for index, configuration in enumerate(job.configurations)
        if (walk := _walk(configuration, room, MAX_CYCLE)) is not None
    ]
    if not walks:
        return None
    walks.sort(key=lambda entry: entry[:2], reverse=True)
    best = _written(job.configurations[-walks[0][1]], walks[0][2], -walks[0][1])
    if not optimal or job.kind == "training":
        return best
    for _, negative, walk in walks[:_MOST_IMPROVED]:
        configuration = job.configurations[-negative]
        most = configuration.batch_size * sum(room.usable_ns) / configuration.pass_ns
        if most <= best.samples_per_step:
            continue
        better = optimal_packing(
            configuration,
            room,
            _written(configuration, walk, -negative),
            time_limit_s=time_limit_s,
            seed=seed,
        )
        if better.samples_per_step > best.samples_per_step:
            best = better
    return best


def greedy_packing(
    configuration: Configuration, room: Room, index: int = 0, *, max_cycle: int = MAX_CYCLE
) -> Packing | None:
    """Return Algorithm 1's packing, or None where not one pass completes within `max_cycle` steps.

    Logarithmic in the number of micro-steps for each bubble, but for writing them down.
    """
    walk = _walk(configuration, room, max_cycle)
    return None if walk is None else _written(configuration, walk, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walk:
    """How far the greedy walk comes: micro-steps in each bubble of each step of a cycle."""

    counts: list[list[int]]
    passes: int  # complete in the cycle

    @property
    def rate(self) -> float:
        """Passes a main step."""
        return self.passes / len(self.counts)


def _walk(configuration: Configuration, room: Room, max_cycle: int) -> _Walk | None:
    if configuration.resident_bytes + configuration.carried_bytes > room.resting_bytes:
        return None
    steps = configuration.micro_steps
    num = len(steps)
    times = _Unrolled.of([step.time_ns for step in steps])
    copies = _Unrolled.of([step.copy_ns for step in steps])
    memory = np.array([step.memory_bytes for step in steps], dtype=np.int64)
    if memory.max() > max(room.free_bytes, default=0):
        return None
    blocked = [np.flatnonzero(memory > free) for free in room.free_bytes]
    position, reached = 0, [0]
    counts: list[list[int]] = []
    for _ in range(max_cycle):
        row = []
        for bubble, usable in enumerate(room.usable_ns):
            stop = times.reach(position, usable)
            if copies.total:
                stop = min(stop, copies.reach(position, room.copy_ns[bubble]))
            if len(blocked[bubble]):
                here = position % num
                after = blocked[bubble][np.searchsorted(blocked[bubble], here) :]
                first = int(after[0]) if len(after) else num + int(blocked[bubble][0])
                stop = min(stop, position - here + first)
            row.append(stop - position)
            position = stop
        counts.append(row)
        reached.append(position)
        if position == reached[-2] or position % num == 0:
            break
    complete = [position // num for position in reached]
    most = max(complete[s] / s for s in range(1, len(reached)))
    if most == 0:
        return None
    # the shortest cycle that is as good, but for what no one would notice
    cycle = next(s for s in range(1, len(reached)) if complete[s] / s >= _AS_GOOD * most)
    return _Walk(counts=counts[:cycle], passes=complete[cycle])


def _written(configuration: Configuration, walk: _Walk, index: int) -> Packing:
    """Return the packing that a walk comes to, without the pass that its cycle leaves open."""
    num = len(configuration.micro_steps)
    position, left = 0, walk.passes * num
    packed: list[tuple[tuple[int, ...], ...]] = []
    for row in walk.counts:
        bubbles = []
        for count in row:
            taken = min(count, left)
            bubbles.append(tuple((position + k) % num for k in range(taken)))
            position, left = position + taken, left - taken
        packed.append(tuple(bubbles))
    return Packing(
        configuration=index,
        steps=tuple(packed),
        samples=walk.passes * configuration.batch_size,
        busy_ns=walk.passes * configuration.pass_ns,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unrolled:
    """Sums over a row of numbers that repeats without end."""

    sums: Int64  # [n + 1] from 0
    total: int

    @classmethod
    def of(cls, values: Sequence[int]) -> _Unrolled:
        sums = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
        return cls(sums=sums, total=int(sums[-1]))

    def reach(self, position: int, most: int) -> int:
        """Return the furthest position whose sum from `position` is at most `most`."""
        num = len(self.sums) - 1
        rounds, at = divmod(int(self.sums[position % num]) + most, self.total)
        return (position // num + rounds) * num + (
            int(np.searchsorted(self.sums, at, side="right")) - 1
        )


def optimal_packing(
    configuration: Configuration,
    room: Room,
    greedy: Packing,
    *,
    time_limit_s: float = 5.0,
    seed: int = 0,
) -> Packing:
    """Return a packing that completes most passes in the greedy one's cycle, at least as many.

    An integer for each micro-step k and bubble counts how often k has run by the bubble's end. By
    then k has run no more often than k - 1, so every pass takes its micro-steps in order, and all
    end with the cycle. In a bubble passes are advanced one after the other, the oldest first, so
    that beside the one at hand no more are open than at its start or its end, less one; each of
    them keeps `carried_bytes`. Where the model would be too large, the greedy packing is returned.
    """
    from ortools.sat.python import cp_model

    steps = configuration.micro_steps
    num, num_bubbles = len(steps), len(room.usable_ns)
    cycle = len(greedy.steps)
    bins = [bubble for _ in range(cycle) for bubble in range(num_bubbles)]
    if num * len(bins) > _MAX_VARIABLES:
        return greedy
    carried = configuration.carried_bytes
    most = cycle * sum(room.usable_ns) // configuration.pass_ns
    least = greedy.samples // configuration.batch_size
    if least >= most:
        return greedy
    peak = [
        max((s.memory_bytes for s in steps if s.memory_bytes <= free), default=0)
        for free in room.free_bytes
    ]
    resting = room.resting_bytes - configuration.resident_bytes

    model = cp_model.CpModel()
    passes = model.new_int_var(least, most, "passes")
    done: list[list[cp_model.IntVar]] = []  # [k][b] up to the end of the bubble
    hint = _cumulated(greedy, num)
    for k, step in enumerate(steps):
        row: list[cp_model.IntVar] = []
        for b, bubble in enumerate(bins):
            variable = model.new_int_var(0, most, f"{k},{b}")
            model.add_hint(variable, int(hint[k, b]))
            before = row[-1] if row else 0
            model.add(variable >= before)
            if step.memory_bytes > room.free_bytes[bubble] or (
                step.time_ns > room.usable_ns[bubble]
            ):
                model.add(variable == before)
            if k:
                model.add(variable <= done[k - 1][b])
            row.append(variable)
        model.add(row[-1] == passes)
        done.append(row)
    for b, bubble in enumerate(bins):
        for weights, room_left in (
            ([step.time_ns for step in steps], room.usable_ns[bubble]),
            ([step.copy_ns for step in steps], room.copy_ns[bubble]),
        ):
            ran = sum(
                weight * (done[k][b] - (done[k][b - 1] if b else 0))
                for k, weight in enumerate(weights)
                if weight
            )
            if any(weights):
                model.add(ran <= room_left)
        if carried:
            # the passes open at the end of b; they are open when the next bubble begins, too
            allowed = min(
                1 + (room.free_bytes[held] - peak[held]) // carried
                for held in (bubble, *bins[b + 1 : b + 2])
            )
            model.add(done[0][b] - done[-1][b] <= min(allowed, resting // carried))
    model.add_hint(passes, least)
    model.maximize(passes)
    solver = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False  # else Ctrl-C kills afterwards
    solver.parameters.random_seed = seed
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.max_deterministic_time = time_limit_s
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return greedy
    found = round(solver.objective_value)
    if found <= least:
        return greedy
    counted = np.array([[solver.value(v) for v in row] for row in done], dtype=np.int64)
    orders = _pass_by_pass(counted)
    return Packing(
        configuration=greedy.configuration,
        steps=tuple(
            tuple(orders[step * num_bubbles + bubble] for bubble in range(num_bubbles))
            for step in range(cycle)
        ),
        samples=found * configuration.batch_size,
        busy_ns=found * configuration.pass_ns,
    )


def _cumulated(packing: Packing, num: int) -> Int64:
    """Return how often each micro-step [k, bubble of the cycle] has run by a bubble's end."""
    flat = [bubble for step in packing.steps for bubble in step]
    counts = np.zeros((num, len(flat)), dtype=np.int64)
    for b, order in enumerate(flat):
        np.add.at(counts[:, b], np.array(order, dtype=np.int64), 1)
    return np.cumsum(counts, axis=1)


def _pass_by_pass(done: Int64) -> list[tuple[int, ...]]:
    """Return the order in each bubble: each pass, the oldest first, as far as it gets there.

    `done[k, b]` passes have micro-step k behind them at the end of bubble b; pass i runs k in the
    first bubble where that is more than i.
    """
    num_bubbles = done.shape[1]
    orders: list[list[int]] = [[] for _ in range(num_bubbles)]
    for one in range(int(done[0, -1])):
        for k, row in enumerate(done):
            orders[int(np.searchsorted(row, one, side="right"))].append(k)
    return [tuple(order) for order in orders]


def nearest_miss(job: FillJob, room: Room) -> str:
    """Return in words why a job fits in no bubble of a device, by the configuration closest to it.

    `best_packing` is None.
    """
    if not room.usable_ns or max(room.usable_ns) == 0:
        return "no bubble is long enough to be handed over"
    longest, roomiest = max(room.usable_ns), max(room.free_bytes)

    def lacks(configuration: Configuration) -> tuple[float, str]:
        slowest = max(configuration.micro_steps, key=lambda step: step.time_ns)
        largest = max(configuration.micro_steps, key=lambda step: step.memory_bytes)
        rests = configuration.resident_bytes + configuration.carried_bytes
        ratios = [
            (
                slowest.time_ns / longest,
                f"micro-step {slowest.name!r} takes {slowest.time_ns} ns, the longest bubble "
                f"takes {longest} ns",
            ),
            (
                largest.memory_bytes / max(1, roomiest),
                f"micro-step {largest.name!r} needs {largest.memory_bytes} bytes, the roomiest "
                f"bubble has {roomiest}",
            ),
            (
                rests / max(1, room.resting_bytes),
                f"{rests} bytes stay between bubbles, {room.resting_bytes} are free all the time",
            ),
        ]
        worst = max(ratios)
        if worst[0] <= 1:
            return (
                1.0,
                "no bubble has both the time and the memory, or a pass takes too many steps",
            )
        return worst

    ratio, why = min(lacks(configuration) for configuration in job.configurations)
    name = min(job.configurations, key=lambda configuration: lacks(configuration)[0]).label
    return f"nearest miss: {name}: {why}" + (f" ({ratio:.2f} times as much)" if ratio > 1 else "")
