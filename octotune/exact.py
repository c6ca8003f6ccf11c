"""The best order of a small whole instance, to proven optimality, by CP-SAT.

Partition and placement are given; the order of every action, and whether a stage's backward is
split, are free. Microbatches are alike, so the k-th action of a stage and kind may be called that
of microbatch k: swapping two names changes neither times nor bytes. That leaves one sequence a
stage and kind, and the solver only interleaves them.

Transfers that share a channel or a host's side go in the order in which their producers end. What
the solver may do and the contract may not is to let an action wait for no reason; so its bound
holds for the contract, and the step that is reported is the simulator's for the order found.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octotune.errors import InfeasibleError, OutOfTimeError
from simulator.actions import Action, Kind, Schedule
from simulator.costs import Costs

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

Int64 = NDArray[np.int64]

# up to this many actions the solver finds its first order soon enough by itself
UNAIDED = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactOrder:
    """The best order found, its step, and what no order can go below."""

    schedule: Schedule
    step_ns: int
    bound_ns: int

    @property
    def optimal(self) -> bool:
        """Whether the order is proven best."""
        return self.step_ns <= self.bound_ns


def exact_order(
    costs: Costs,
    *,
    time_limit_s: float = 60.0,
    split: bool | None = None,
    hint: Schedule | None = None,
    prune: bool = True,
    seed: int = 0,
    num_workers: int = 1,
) -> ExactOrder:
    """Return the order of least step for one partition and placement, without offload.

    Practical up to a few hundred actions.

    Args:
        costs: of the stages in their placement.
        time_limit_s: with one worker in the solver's deterministic seconds, so that the answer
            depends on the arguments alone, unless the wall clock gets to four times as many;
            with more, of the wall clock.
        split: True: every backward as I and W; False: as B; None: whichever is better.
        hint: an order to start from. Without one, larger instances start from a steady state.
        prune: give the solver the earliest starts and the bound that `octotune.bounds` proves.
        seed: of the solver.
        num_workers: of the solver.

    Raises:
        InfeasibleError: if no order fits the memory.
        OutOfTimeError: if none was found in time.
    """
    from ortools.sat.python import cp_model

    from octotune.steady import modulo_schedule
    from simulator.engine import simulate

    for device in np.flatnonzero(costs.static_bytes > costs.memory_bytes).tolist():
        raise InfeasibleError(
            f"device {device} has {costs.memory_bytes[device]} bytes and its layers alone "
            f"take {costs.static_bytes[device]}; use more devices"
        )
    model = cp_model.CpModel()
    reduced, unit = _in_units(costs)
    instance = _Instance(reduced, model, split)
    if prune:
        instance.prune()
    if (
        hint is None
        and split is not False
        and 3 * costs.num_stages * costs.num_microbatches > UNAIDED
    ):
        hint = modulo_schedule(costs, time_limit_s=0.0, seed=seed)
    if hint is not None:
        instance.hint(hint)
    model.minimize(instance.step)
    solver = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False  # else Ctrl-C kills afterwards
    solver.parameters.random_seed = seed
    solver.parameters.num_workers = num_workers
    if num_workers == 1:
        solver.parameters.max_deterministic_time = time_limit_s
    solver.parameters.max_time_in_seconds = time_limit_s * (4 if num_workers == 1 else 1)
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        raise InfeasibleError(
            "no order of these stages fits the memory: "
            f"{costs.memory_bytes.tolist()} bytes on the devices, of which "
            f"{costs.static_bytes.tolist()} are taken; use more stages, recompute or offload"
        )
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise OutOfTimeError(f"no order found in {time_limit_s} s; raise time_limit_s")
    schedule = instance.schedule(solver)
    return ExactOrder(
        schedule=schedule,
        step_ns=simulate(schedule, costs).step_ns,
        bound_ns=int(np.ceil(solver.best_objective_bound - 1e-6)) * unit,
    )


def _in_units(costs: Costs) -> tuple[Costs, int]:
    """Return the costs in the largest exact units of time and bytes, and the unit of time in ns.

    Small numbers are what the solver is quick with. Sums of bytes are whole units, so a part of
    one in a device's room is of no use.
    """
    times = (
        "forward_ns",
        "backward_ns",
        "input_grad_ns",
        "weight_grad_ns",
        "transfer_hold_ns",
        "transfer_latency_ns",
        "exchange_ns",
        "optimizer_ns",
    )
    sizes = ("saved_bytes", "saved_w_bytes", "held_w_bytes", "workspace_bytes", "input_bytes")
    reductions = costs.reduce_ns[costs.reduce_ns >= 0]
    unit = _divisor(*(getattr(costs, name) for name in times), reductions)
    byte_unit = _divisor(*(getattr(costs, name) for name in sizes))
    reduced = replace(
        costs,
        reduce_ns=np.where(costs.reduce_ns >= 0, costs.reduce_ns // unit, -1),
        static_bytes=np.zeros_like(costs.static_bytes),
        memory_bytes=(costs.memory_bytes - costs.static_bytes) // byte_unit,
        **{name: getattr(costs, name) // unit for name in times},
        **{name: getattr(costs, name) // byte_unit for name in sizes},
    )
    return reduced, unit


def _divisor(*columns: Int64) -> int:
    return max(1, int(np.gcd.reduce(np.concatenate(columns))))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """A transfer: when its tensor is made, when it is sent, and what it keeps for how long."""

    made: Any
    sent: Any
    hold: int
    takes: frozenset[tuple[str, int, int]]


class _Instance:
    """The integer program of one instance: its variables by stage and microbatch."""

    def __init__(self, costs: Costs, model: cp_model.CpModel, split: bool | None) -> None:
        self.costs = costs
        self.model = model
        self.num_stages, self.m = costs.num_stages, costs.num_microbatches
        self.horizon = self._horizon()
        self.step = model.new_int_var(0, self.horizon, "step")
        shape = (self.num_stages, self.m)
        self.forward: dict[tuple[int, int], Any] = {}  # starts
        self.backward: dict[tuple[int, int], Any] = {}  # start of I or B
        self.weight: dict[tuple[int, int], Any] = {}
        self.whole: dict[tuple[int, int], Any] = {}  # literal: B
        self.forward_end: dict[tuple[int, int], Any] = {}
        self.backward_end: dict[tuple[int, int], Any] = {}  # of I or B
        self.last_end: dict[tuple[int, int], Any] = {}  # of W or B
        on_device: dict[int, list[Any]] = defaultdict(list)
        work: dict[int, Any] = defaultdict(int)
        self.memory: dict[int, list[tuple[Any, int]]] = defaultdict(list)
        for stage, microbatch in np.ndindex(*shape):
            device, weight = int(costs.stage_device[stage]), int(costs.weight_grad_ns[stage])
            intervals = self._actions(stage, microbatch, split)
            on_device[device] += intervals
            work[device] += sum(interval.size_expr() for interval in intervals[:2])
            work[device] += weight * ~self.whole[stage, microbatch]
        for device, intervals in on_device.items():
            model.add_no_overlap(intervals)
            # implied, but the solver does not see it by itself
            model.add(self.step >= work[device] + int(costs.optimizer_ns[device]))
        self._order()
        self._transfers()
        self._ends()
        for device, held in self.memory.items():
            room = int(costs.memory_bytes[device] - costs.static_bytes[device])
            if sum(size for _, size in held) > room:
                model.add_cumulative(
                    [interval for interval, _ in held], [size for _, size in held], room
                )

    def _horizon(self) -> int:
        costs = self.costs
        work = costs.forward_ns + costs.input_grad_ns + costs.weight_grad_ns
        moves = costs.transfer_hold_ns + costs.transfer_latency_ns
        ends = np.maximum(0, costs.reduce_ns).sum() + costs.exchange_ns.sum()
        return int(self.m * (work.sum() + 2 * moves.sum()) + ends + costs.optimizer_ns.sum())

    def _time(self) -> Any:
        return self.model.new_int_var(0, self.horizon, "")

    def _between(self, start: Any, end: Any, device: int, num_bytes: int) -> None:
        """Hold bytes on a device from a moment to another."""
        if num_bytes:
            length = self._time()
            interval = self.model.new_interval_var(start, length, end, "")
            self.memory[device].append((interval, num_bytes))

    def _actions(self, stage: int, microbatch: int, split: bool | None) -> list[Any]:
        costs, model, at = self.costs, self.model, (stage, microbatch)
        device = int(costs.stage_device[stage])
        f, i = int(costs.forward_ns[stage]), int(costs.input_grad_ns[stage])
        b, w = int(costs.backward_ns[stage]), int(costs.weight_grad_ns[stage])
        whole = self.whole[at] = model.new_bool_var("")
        if split is not None:
            model.add(whole == (not split))
        start = self.forward[at] = self._time()
        self.forward_end[at] = start + f
        back = self.backward[at] = self._time()
        back_end = self.backward_end[at] = self._time()
        length = model.new_int_var(min(i, b), max(i, b), "")
        model.add(length == i + (b - i) * whole)
        weight = self.weight[at] = self._time()
        last = self.last_end[at] = self._time()
        model.add(last == back_end).only_enforce_if(whole)
        model.add(weight == back_end).only_enforce_if(whole)  # not there: one value will do
        model.add(last == weight + w).only_enforce_if(~whole)
        model.add(weight >= back_end)
        model.add(back >= self.forward_end[at])
        intervals = [
            model.new_fixed_size_interval_var(start, f, ""),
            model.new_interval_var(back, length, back_end, ""),
            model.new_optional_fixed_size_interval_var(weight, w, ~whole, ""),
        ]
        workspace = int(costs.workspace_bytes[stage])
        if workspace:
            self.memory[device] += [(interval, workspace) for interval in intervals]
        saved, saved_w = int(costs.saved_bytes[stage]), int(costs.saved_w_bytes[stage])
        if costs.recompute[stage]:
            self._between(start, back, device, int(costs.input_bytes[stage]))
            self._between(back, back_end, device, saved)
            self._between(back, last, device, saved_w)
        else:
            self._between(start, back_end, device, saved)
            self._between(start, last, device, saved_w)
        self._between(back, last, device, int(costs.held_w_bytes[stage]))
        return intervals

    def _order(self) -> None:
        """Keep each stage's actions of one kind in the order of microbatches."""
        for stage, microbatch in np.ndindex(self.num_stages, self.m - 1):
            now, then = (stage, microbatch), (stage, microbatch + 1)
            self.model.add(self.forward[then] >= self.forward_end[now])
            self.model.add(self.backward[then] >= self.backward_end[now])
        for stage in range(self.num_stages):
            for one, two in combinations(range(self.m), 2):
                now, then = (stage, one), (stage, two)
                self.model.add(self.weight[then] >= self.weight[now]).only_enforce_if(
                    ~self.whole[now], ~self.whole[then]
                )

    def _transfers(self) -> None:
        """Hand on activations and gradients, through channels and the sides of hosts."""
        costs, model = self.costs, self.model
        moves: list[_Move] = []
        for boundary, microbatch in np.ndindex(self.num_stages - 1, self.m):
            low, high = (boundary, microbatch), (boundary + 1, microbatch)
            devices = [int(costs.stage_device[stage]) for stage in (boundary, boundary + 1)]
            if devices[0] == devices[1]:
                model.add(self.forward[high] >= self.forward_end[low])
                model.add(self.backward[low] >= self.backward_end[high])
                continue
            hold = int(costs.transfer_hold_ns[boundary])
            latency = int(costs.transfer_latency_ns[boundary])
            for made, used, source, target in (
                (self.forward_end[low], self.forward[high], *devices),
                (self.backward_end[high], self.backward[low], *reversed(devices)),
            ):
                sent = self._time()
                model.add(sent >= made)
                model.add(used >= sent + hold + latency)
                takes: set[tuple[str, int, int]] = {("channel", source, target)}
                if costs.transfer_uses_nic[boundary]:
                    takes.add(("out", int(costs.device_host[source]), -1))
                    takes.add(("in", int(costs.device_host[target]), -1))
                moves.append(_Move(made=made, sent=sent, hold=hold, takes=frozenset(takes)))
        for one, two in combinations(moves, 2):
            if one.takes & two.takes and (one.hold or two.hold):
                first = model.new_bool_var("")
                model.add(one.made <= two.made).only_enforce_if(first)
                model.add(two.sent >= one.sent + one.hold).only_enforce_if(first)
                model.add(two.made <= one.made).only_enforce_if(~first)
                model.add(one.sent >= two.sent + two.hold).only_enforce_if(~first)

    def _ends(self) -> None:
        """Reductions, exchanges and optimizers after the last backwards."""
        costs, model = self.costs, self.model
        ends: dict[int, list[Any]] = defaultdict(list)
        reductions: dict[int, list[Any]] = defaultdict(list)
        finished: list[Any] = []
        for stage, device in enumerate(costs.stage_device.tolist()):
            done = self._time()
            model.add_max_equality(done, [self.last_end[stage, k] for k in range(self.m)])
            ends[device].append(done)
            finished.append(done)
            reduce = int(costs.reduce_ns[stage])
            if reduce >= 0:
                start = self._time()
                model.add(start >= done)
                reductions[device].append(model.new_fixed_size_interval_var(start, reduce, ""))
                ends[device].append(start + reduce)
        for intervals in reductions.values():
            model.add_no_overlap(intervals)
        for pair, exchange in zip(costs.exchange_stages, costs.exchange_ns, strict=True):
            end = self._time()
            for stage in pair.tolist():
                model.add(end >= finished[stage] + int(exchange))
                ends[int(costs.stage_device[stage])].append(end)
        for device, moments in ends.items():
            for moment in moments:
                model.add(self.step >= moment + int(costs.optimizer_ns[device]))
        model.add(self.step >= int(costs.optimizer_ns.max()))

    def prune(self) -> None:
        """Give the solver what is proven without it."""
        from octotune.bounds.fixed import fixed_bound, heads_and_tails_of

        heads, tails = heads_and_tails_of(self.costs, copies=False)
        self.model.add(self.step >= fixed_bound(self.costs, copies=False).ns)
        for at, start in self.forward.items():
            self.model.add(start >= int(heads[0][at]))
            self.model.add(self.step >= self.forward_end[at] + int(tails[0][at]))
        for at, start in self.backward.items():
            length = int(self.costs.input_grad_ns[at[0]])
            self.model.add(start >= int(heads[1][at]))
            self.model.add(self.step >= start + length + int(tails[1][at]))

    def hint(self, schedule: Schedule) -> None:
        """Start from an order: its times as simulated."""
        from simulator.engine import simulate

        timeline = simulate(schedule, self.costs)
        times: dict[Kind, dict[int, list[int]]] = {kind: defaultdict(list) for kind in Kind}
        actions = [action for row in schedule.rows for action in row]
        for action, start in sorted(
            zip(actions, timeline.start_ns.tolist(), strict=True), key=lambda pair: pair[1]
        ):
            times[action.kind][action.stage].append(start)
        for stage in range(self.num_stages):
            backs = sorted(
                [(start, True) for start in times[Kind.B][stage]]
                + [(start, False) for start in times[Kind.I][stage]]
            )
            weights = iter(times[Kind.W][stage])
            for microbatch, start in enumerate(times[Kind.F][stage]):
                at = (stage, microbatch)
                back, whole = backs[microbatch]
                self.model.add_hint(self.forward[at], start)
                self.model.add_hint(self.backward[at], back)
                self.model.add_hint(self.whole[at], whole)
                if not whole:
                    self.model.add_hint(self.weight[at], next(weights))
        self.model.add_hint(self.step, timeline.step_ns)

    def schedule(self, solver: cp_model.CpSolver) -> Schedule:
        """Return the order of the solution."""
        rows: list[list[tuple[int, Action]]] = [[] for _ in range(self.costs.num_devices)]
        for (stage, microbatch), start in self.forward.items():
            at = (stage, microbatch)
            row = rows[int(self.costs.stage_device[stage])]
            row.append((solver.value(start), Action(stage, Kind.F, microbatch)))
            whole = solver.boolean_value(self.whole[at])
            kind = Kind.B if whole else Kind.I
            row.append((solver.value(self.backward[at]), Action(stage, kind, microbatch)))
            if not whole:
                row.append((solver.value(self.weight[at]), Action(stage, Kind.W, microbatch)))
        return Schedule.from_rows([action for _, action in sorted(row)] for row in rows)
