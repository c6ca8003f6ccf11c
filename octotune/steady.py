"""The periodic steady state: one repeating block a device, unrolled to an order.

After warmup and before cooldown a good schedule repeats itself: every period each device runs one
F, I and W of each of its stages, of different microbatches. Such a block is a modulo schedule:
times t of one microbatch's actions that obey its chain and do not meet, on any device, modulo the
period. Memory follows from lifetimes: bytes held from t to t' are held floor((t' - t) / period)
times over all the time, and once more for the rest of the ring.

Among the blocks within memory the one is sought around which warmup and cooldown cost least. A
device waits for its first gradient, which cannot come before the whole chain has run; what it can
do meanwhile are the Fs that come before that gradient in the block's order, and at the end the Ws
that come after its last I. So memory goes where it fills these two gaps.

Annealing over waits finds a block (`steady_kernels`), CP-SAT works on from there, on a grid of a
few dozen slots a period, until it is proven best or time is up. The order is what counts, its
times come from playing it: the keys `t + k period` are played as they are and by the list
scheduler, which lets actions overtake while the block is not there yet, and the shortest order
within memory is returned. Nothing but playing takes longer when there are more microbatches.

Sources:
    Rau 1994, Iterative modulo scheduling; Eichenberger and Davidson 1997, on modulo schedules by
    integer programs with minimum register requirements; Qi et al. 2024, arXiv:2405.15362, whose
    V schedules are such blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.actions import Kind, Schedule, pack
from simulator.costs import Costs

Int64 = NDArray[np.int64]

KINDS = (Kind.F, Kind.I, Kind.W)

# how many periods a microbatch may take beyond the shortest chain
EXTRA_PERIODS = 6
# the grid of the integer program has so many slots a period, or up to twice as many
SLOTS = 48
# above this many stages the integer program only costs time
MAX_STAGES = 64

# work of the annealing, in actions placed, and of unrolling, in actions played
PLACED = 6_000_000
PLAYED = 4_000_000

WINDOWS = (0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 100.0)
SLACKS = (0.0, 0.3, 0.5, 0.8, 1.0)
DELAYS = (0.0, 0.3, 1.0)
BACKLOGS = (2, 3, 4, 8, 2**30)


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyState:
    """When microbatch 0 runs, in ns of the layout; microbatch k runs k periods later."""

    period_ns: int
    forward_ns: tuple[int, ...]  # [S]
    input_grad_ns: tuple[int, ...]  # [S]
    weight_grad_ns: tuple[int, ...]  # [S]

    def keys(self, kind: Kind) -> tuple[int, ...]:
        """Return the times of F, I or W by stage."""
        if kind == Kind.F:
            return self.forward_ns
        return self.input_grad_ns if kind == Kind.I else self.weight_grad_ns


def modulo_schedule(
    costs: Costs, period_slack: float = 0.05, time_limit_s: float = 5.0, *, seed: int = 0
) -> Schedule | None:
    """Return the best order found around a periodic steady state; None if none fits the memory.

    Every backward is split.

    Args:
        costs: of the stages in their placement.
        period_slack: by what share the block's period may exceed the largest device load. Some
            slack lets a block be found where hops and uneven actions would not fit otherwise;
            actions still start as early as they can.
        time_limit_s: for the integer program, in the solver's deterministic seconds: the order
            depends on the arguments alone. 0: annealing alone.
        seed: of annealing, solver and unrolling.
    """
    best: tuple[int, Schedule] | None = None
    for state in steady_states(costs, period_slack, time_limit_s, seed=seed):
        found = unrolled(costs, state, seed=seed)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return None if best is None else best[1]


def steady_states(
    costs: Costs, period_slack: float = 0.05, time_limit_s: float = 5.0, *, seed: int = 0
) -> Iterator[SteadyState]:
    """Yield blocks: the annealed one, then what the integer program makes of it."""
    load = _loads(costs)
    period = max(1, int(int(load.max()) * (1 + period_slack)))
    state = _annealed(costs, period, seed)
    yield state
    if time_limit_s > 0 and costs.num_stages <= MAX_STAGES:
        block = _Block(costs, _Grid.of(costs, period, SLOTS))
        block.hint(state)
        found = block.solve(time_limit_s, seed)
        if found is not None:
            yield found


def _loads(costs: Costs) -> Int64:
    load = np.zeros(costs.num_devices, np.int64)
    np.add.at(
        load, costs.stage_device, costs.forward_ns + costs.input_grad_ns + costs.weight_grad_ns
    )
    return load


def _annealed(costs: Costs, period: int, seed: int) -> SteadyState:
    from octotune.steady_kernels import Task, anneal

    num_stages, num_devices = costs.num_stages, costs.num_devices
    length = np.stack([costs.forward_ns, costs.input_grad_ns, costs.weight_grad_ns])
    hop = costs.transfer_hold_ns + costs.transfer_latency_ns
    counts = np.bincount(costs.stage_device, minlength=num_devices)
    begin, gradient, after, workspace = np.zeros((4, num_devices), np.int64)
    for device in range(num_devices):
        stages = np.flatnonzero(costs.stage_device == device)
        if len(stages):
            begin[device], gradient[device], after[device] = _ends(
                length.tolist(), hop.tolist(), int(stages[0]), int(stages[-1])
            )
            workspace[device] = costs.workspace_bytes[stages].max()
    # recompute keeps the input up to I; what comes back then is held until W at most
    again = np.where(costs.recompute, costs.saved_bytes + costs.saved_w_bytes, 0)
    task = Task(
        length=length,
        hop=hop,
        stage_device=costs.stage_device,
        first=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        local=np.argsort(costs.stage_device, kind="stable").astype(np.int64),
        period=period,
        num_microbatches=costs.num_microbatches,
        saved=np.where(costs.recompute, costs.input_bytes, costs.saved_bytes),
        saved_w=np.where(costs.recompute, 0, costs.saved_w_bytes),
        held=costs.held_w_bytes + again,
        workspace=workspace,
        room=costs.memory_bytes - costs.static_bytes,
        load=_loads(costs),
        begin=begin,
        gradient=gradient,
        after=after,
    )
    time = np.zeros((3, num_stages), np.int64)
    anneal(task, max(2000, PLACED // (3 * num_stages)), seed, time)
    forward, input_grad, weight_grad = (tuple(row) for row in time.tolist())
    return SteadyState(
        period_ns=period,
        forward_ns=forward,
        input_grad_ns=input_grad,
        weight_grad_ns=weight_grad,
    )


def _ends(
    lengths: Sequence[list[int]], hops: list[int], low: int, high: int
) -> tuple[int, int, int]:
    """Return of a device with stages `low` to `high`: begin, first gradient, time after last I."""
    f, i, w = lengths
    begin = sum(f[:low]) + sum(hops[:low])
    gradient = sum(f) + sum(hops) + sum(i[high + 1 :]) + sum(hops[high:])
    return begin, gradient, sum(i[:low]) + sum(hops[:low]) + w[0]


def unrolled(costs: Costs, state: SteadyState, *, seed: int = 0) -> tuple[int, Schedule] | None:
    """Return the step and the order of a block repeated for all microbatches, within memory.

    The block's own order, and list schedules by its keys under rules drawn at random: as many as
    their number of actions allows.
    """
    from octotune.schedules.family import on_devices
    from octotune.schedules.list_schedule import NO_LIMIT, Phases, Rule, list_schedule
    from octotune.schedules.weights import DONE
    from octotune.schedules.world import world_of
    from simulator.engine import simulate

    devices = sorted(set(costs.stage_device.tolist()))
    world = world_of(costs, devices)
    phases = Phases(
        np.array(state.forward_ns, np.int64),
        np.array(state.input_grad_ns, np.int64),
        np.arange(costs.num_microbatches) * state.period_ns,
        state.period_ns,
    )
    orders = [plain_order(costs, state)]
    rules = list(product(WINDOWS, SLACKS, DELAYS, BACKLOGS))
    Random(seed).shuffle(rules)
    soonest = NO_LIMIT
    for rule in rules[: max(12, PLAYED // orders[0].num_actions)]:
        played = list_schedule(phases, world, Rule(*rule), limit_ns=soonest)
        if played.state == DONE and played.end_ns < soonest:
            soonest = played.end_ns
            orders.append(on_devices(played.schedule(), devices, costs.num_devices))
    best: tuple[int, Schedule] | None = None
    for order in (orders[0], *orders[1:][-2:]):
        timeline = simulate(order, costs)
        fits = bool((timeline.peak_bytes <= costs.memory_bytes).all())
        if fits and (best is None or timeline.step_ns < best[0]):
            best = timeline.step_ns, order
    return best


def plain_order(costs: Costs, state: SteadyState) -> Schedule:
    """Return each device's actions in the order of the endless block."""
    m = costs.num_microbatches
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(costs.num_devices)]
    for stage, device in enumerate(costs.stage_device.tolist()):
        for step, kind in enumerate(KINDS):
            start = state.keys(kind)[stage]
            rows[device] += [
                (start + k * state.period_ns, step, pack(stage, kind, k)) for k in range(m)
            ]
    return Schedule.from_codes([[code for _, _, code in sorted(row)] for row in rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """Durations and hops in whole slots, and how long a slot and a period are."""

    slot_ns: float
    period: int
    lengths: dict[Kind, list[int]]
    hops: list[int]

    @classmethod
    def of(cls, costs: Costs, period_ns: int, slots: int) -> _Grid:
        """Choose, of `slots` to twice as many a period, the number that fits durations best.

        An action takes at least one slot, a transfer is rounded up: it may not be late.
        """
        times = {
            Kind.F: costs.forward_ns,
            Kind.I: costs.input_grad_ns,
            Kind.W: costs.weight_grad_ns,
        }
        hop = costs.transfer_hold_ns + costs.transfer_latency_ns
        best: tuple[float, float, int] | None = None
        for count in range(slots, 2 * slots):
            slot = period_ns / count
            rounded = {
                kind: np.maximum(1, np.floor(column / slot + 0.5).astype(np.int64))
                for kind, column in times.items()
            }
            load = np.zeros(costs.num_devices, np.int64)
            for column in rounded.values():
                np.add.at(load, costs.stage_device, column)
            error = sum(
                float(np.abs(rounded[kind] * slot - column).sum())
                for kind, column in times.items()
            )
            rating = (max(int(load.max()), count) * slot, error, count)
            best = rating if best is None else min(best, rating)
        assert best is not None
        slot = period_ns / best[2]
        lengths = {
            kind: np.maximum(1, np.floor(column / slot + 0.5).astype(np.int64)).tolist()
            for kind, column in times.items()
        }
        return cls(
            slot_ns=slot,
            period=round(best[0] / slot),
            lengths=lengths,
            hops=np.ceil(hop / slot).astype(np.int64).tolist(),
        )


class _Block:
    """The integer program of one block."""

    def __init__(self, costs: Costs, grid: _Grid) -> None:
        from ortools.sat.python import cp_model

        self.costs, self.grid = costs, grid
        self.model = model = cp_model.CpModel()
        self.num_stages = costs.num_stages
        period, lengths, hops = grid.period, grid.lengths, grid.hops
        chain = sum(map(sum, (lengths[Kind.F], lengths[Kind.I], hops, hops)))
        self.turns = chain // period + EXTRA_PERIODS
        self.horizon = (self.turns + 1) * period
        self.offset: dict[tuple[int, Kind], Any] = {}  # where in the ring
        self.turn: dict[tuple[int, Kind], Any] = {}  # in which period
        self.time: dict[tuple[int, Kind], Any] = {}
        self.chain = model.new_int_var(0, self.horizon, "")
        rings: dict[int, list[Any]] = defaultdict(list)
        self.stages_on: dict[int, list[int]] = defaultdict(list)
        for stage, device in enumerate(costs.stage_device.tolist()):
            self.stages_on[device].append(stage)
            for kind in KINDS:
                at, length = (stage, kind), lengths[kind][stage]
                offset = self.offset[at] = model.new_int_var(0, period - 1, "")
                self.turn[at] = model.new_int_var(0, self.turns, "")
                self.time[at] = offset + period * self.turn[at]
                model.add(self.time[at] + length <= self.chain)
                # twice around, so that what reaches past the end meets what begins there
                rings[device] += [
                    model.new_fixed_size_interval_var(offset + start, length, "")
                    for start in (0, period)
                ]
        for intervals in rings.values():
            model.add_no_overlap(intervals)
        self._chain()
        for device, stages in self.stages_on.items():
            self._memory(device, stages)
        self.cost = model.new_int_var(0, 2**40, "")
        for stages in self.stages_on.values():
            self._fill(stages)

    def _chain(self) -> None:
        model, time, last = self.model, self.time, self.num_stages - 1
        lengths, hops = self.grid.lengths, self.grid.hops
        f, i = lengths[Kind.F], lengths[Kind.I]
        model.add(time[0, Kind.F] == 0)
        model.add(time[last, Kind.I] >= time[last, Kind.F] + f[last])
        for stage, hop in enumerate(hops):
            after = stage + 1
            model.add(time[after, Kind.F] >= time[stage, Kind.F] + f[stage] + hop)
            model.add(time[stage, Kind.I] >= time[after, Kind.I] + i[after] + hop)
        for stage in range(self.num_stages):
            model.add(time[stage, Kind.W] >= time[stage, Kind.I] + i[stage])

    def _memory(self, device: int, stages: list[int]) -> None:
        """Keep what lifetimes hold at any slot of the ring within the device's room."""
        costs, model, period = self.costs, self.model, self.grid.period
        room = int(costs.memory_bytes[device] - costs.static_bytes[device])
        base: Any = 0
        intervals, sizes, most = [], [], 0
        for stage in stages:
            for size, since, until in self._lifetimes(stage):
                whole = model.new_int_var(0, self.turns + 1, "")
                rest = model.new_int_var(0, period - 1, "")
                begin = self.time[stage, since]
                end = self.time[stage, until] + self.grid.lengths[until][stage]
                model.add(end - begin == whole * period + rest)
                base += size * whole
                most += size * (self.turns + 2)
                offset = self.offset[stage, since]
                for start in (0, period):
                    until_slot = model.new_int_var(0, 3 * period, "")
                    intervals.append(model.new_interval_var(offset + start, rest, until_slot, ""))
                    sizes.append(size)
        if most > room:
            left = model.new_int_var(0, max(room, 0), "")
            model.add(left + base <= room)
            model.add_cumulative(intervals, sizes, left)

    def _lifetimes(self, stage: int) -> Iterator[tuple[int, Kind, Kind]]:
        """Yield bytes, from whose start, to whose end."""
        costs = self.costs
        saved, saved_w = int(costs.saved_bytes[stage]), int(costs.saved_w_bytes[stage])
        if costs.recompute[stage]:
            # the input from F on, and all of it again while I and W run: never less than it is
            kept = [(int(costs.input_bytes[stage]), Kind.F, Kind.I), (saved, Kind.I, Kind.I)]
            kept.append((saved_w, Kind.I, Kind.W))
        else:
            kept = [(saved, Kind.F, Kind.I), (saved_w, Kind.F, Kind.W)]
        kept.append((int(costs.held_w_bytes[stage]), Kind.I, Kind.W))
        kept += [(int(costs.workspace_bytes[stage]), kind, kind) for kind in KINDS]
        for size, since, until in kept:
            if size:
                yield size, since, until

    def _fill(self, stages: list[int]) -> None:
        """Let `cost` be at least the device's load and what warmup and cooldown leave idle."""
        costs, model, time, period = self.costs, self.model, self.time, self.grid.period
        lengths, m = self.grid.lengths, costs.num_microbatches
        f, i, w = (lengths[kind] for kind in KINDS)
        low, high = stages[0], stages[-1]
        begin, gradient, after = _ends((f, i, w), self.grid.hops, low, high)

        def before(limit: int, earlier: Any, later: Any) -> Any:
            """Return how many periods fit between two times, at most; none if they are swapped."""
            count = model.new_int_var(0, min(m, self.turns + 2), "")
            any_fit = model.new_bool_var("")
            model.add(count * period <= later - earlier + period - 1).only_enforce_if(any_fit)
            model.add(count == 0).only_enforce_if(~any_fit)
            return limit * count

        first, last = time[high, Kind.I], time[low, Kind.I]
        fs = sum(before(f[stage], time[stage, Kind.F], first) for stage in stages)
        ws = sum(before(w[stage], last, time[stage, Kind.W]) for stage in stages)
        warmup = model.new_int_var(begin, self.horizon * 2, "")
        cooldown = model.new_int_var(0, self.horizon * 2, "")
        model.add(warmup >= gradient - fs)
        model.add(cooldown >= after - ws)
        load = m * sum(f[stage] + i[stage] + w[stage] for stage in stages)
        model.add(self.cost >= load + warmup + cooldown)

    def hint(self, state: SteadyState) -> None:
        """Start from a block found on another grid."""
        for (stage, kind), turn in self.turn.items():
            time = round(state.keys(kind)[stage] / self.grid.slot_ns)
            self.model.add_hint(turn, min(time // self.grid.period, self.turns))
            self.model.add_hint(self.offset[stage, kind], time % self.grid.period)

    def solve(self, time_limit_s: float, seed: int) -> SteadyState | None:
        """Return the block that is filled best, of shortest chain among equals."""
        from ortools.sat.python import cp_model

        self.model.minimize(self.cost * 1024 + self.chain)
        solver = cp_model.CpSolver()
        solver.parameters.catch_sigint_signal = False  # else Ctrl-C kills afterwards
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        solver.parameters.max_deterministic_time = time_limit_s
        if solver.solve(self.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None

        def times(kind: Kind) -> tuple[int, ...]:
            return tuple(
                round(solver.value(self.time[stage, kind]) * self.grid.slot_ns)
                for stage in range(self.num_stages)
            )

        return SteadyState(
            period_ns=round(self.grid.period * self.grid.slot_ns),
            forward_ns=times(Kind.F),
            input_grad_ns=times(Kind.I),
            weight_grad_ns=times(Kind.W),
        )
