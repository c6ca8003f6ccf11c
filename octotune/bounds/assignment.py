"""Whole layers on devices: the integer program of the joint bound, by CP-SAT.

Contiguity is dropped: any device may hold any layers, of which only the number of each type
counts. What stays is that layers are whole, and that devices begin and end in turn. Number the
devices by their first layer: the k-th cannot begin before k layers have run forward on others.
Number them by their last layer, from the end: the r-th gets its first gradient only after the
whole forward chain and the I of r layers. In between, for a step of T:

    all work                      fits into  T - begin(k)
    all work, less F that memory holds before the first gradient,  into  T - back(r)
    all work, less W that memory holds after the last I,           into  T - begin(k) - leave(k)
    all work, less both                                            into  T - back(r) - leave(k)

What memory holds is itself counted by whole layers: with y_t microbatches of layers of type t
held, at most m a layer, sum y_t bytes_t is within the device's room. Recompute does not undercut
this: a layer that keeps nothing runs its F twice, which takes from the window what it adds.

The step is found by bisection: for a given T the windows are constants, so that the solver sees
plain knapsacks, and a T that it proves impossible is a bound whatever else happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octotune.bounds.relaxed import Relaxed
from octotune.contract.costs import NS_PER_S

# no step is longer, and twice it is still within the solver's numbers
MOST_NS = 2**60
# Sums of times and of bytes are kept below this by counting them in larger units: the solver's
# presolve has been seen to refuse what is possible with numbers around 2^38.
MAX_SUM = 2**36
# above this many (type, device) pairs it hardly matters that layers are whole
MAX_NUMBERS = 8192
# above this many devices the order of their first gradients is left open: each may be the first
MAX_RANKED = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """No assignment has a step below `ns`; `finished` where one with that step was found."""

    ns: int
    finished: bool


def assignment_bound(
    relaxed: Relaxed,
    *,
    least_ns: int,
    memory: bool,
    time_limit_s: float,
    seed: int = 0,
) -> Proof:
    """Return the least step of any assignment of whole layers to devices.

    Args:
        relaxed: the joint problem.
        least_ns: a bound known already.
        memory: count what memory holds before the first gradient and after the last.
        time_limit_s: in the solver's deterministic seconds, so that the bound is reproducible.
        seed: of the solver.
    """
    num_types, num_devices = len(relaxed.example), relaxed.num_devices
    if num_types * num_devices > MAX_NUMBERS:
        return Proof(ns=least_ns, finished=False)
    relaxed, unit = relaxed.in_units(MAX_SUM)
    # building a program is not in the solver's time
    build_s = (num_types * num_devices + 6 * num_devices**2 * memory) / 1e5
    low = begin = least_ns // unit
    top: int | None = None  # one with this step was found, or nothing is known from here on
    found = False
    left, pace, below = time_limit_s, max(low // 100, 1), False
    hint: dict[tuple[int, int], int] = {}
    # where no plan fits at all, every step is impossible: stop before the solver's numbers end
    while left > 0 and low < MOST_NS and (top is None or low < top):
        if top is None:
            target = low if low == begin else min(low + pace, MOST_NS)
            budget = left / 3
        else:
            below = found and not below
            target = top - 1 if below else (low + top) // 2
            budget = left / 2
        answer = _Program(relaxed, target, memory=memory).solve(budget, seed, hint)
        left -= max(answer.took_s, 0.01) + build_s
        if answer.step_ns is not None:
            top, found, hint = answer.step_ns, True, answer.counts
        elif answer.impossible:
            low = target + 1
            pace *= 2
        elif top is None or target < top:
            top, found = target, False
    finished = found and top is not None and low >= top
    return Proof(ns=max(least_ns, low * unit), finished=finished)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What the solver says of one step: an assignment, that there is none, or neither."""

    step_ns: int | None
    counts: dict[tuple[int, int], int]
    impossible: bool
    took_s: float


class _Program:
    """Is there an assignment whose devices all end within `step`?"""

    def __init__(self, relaxed: Relaxed, step: int, *, memory: bool) -> None:
        from ortools.sat.python import cp_model

        self.relaxed, self.step, self.memory = relaxed, step, memory
        self.model = model = cp_model.CpModel()
        num_devices, self.m = relaxed.num_devices, relaxed.num_microbatches
        self.types = range(len(relaxed.example))
        self.number = {
            (kind, device): model.new_int_var(0, relaxed.count[kind], "")
            for kind in self.types
            for device in range(num_devices)
        }
        for kind in self.types:
            every = [self.number[kind, device] for device in range(num_devices)]
            model.add(sum(every) == relaxed.count[kind])

        # fewer devices than this cannot do the work in time; the chain passes all that are used
        work = self.m * int(relaxed.least.sum())
        used = min(num_devices, max(1, -(-work // max(step, 1))))
        overhead = int(relaxed.overhead.min())
        chain = relaxed.forward_ns + relaxed.cross[used - 1] + used * overhead
        self.latest = chain + max(max(back) for back in relaxed.back)
        begins = self._ranks(alike=len(relaxed.overhead) == 1)
        self.begin, self.leave = self._positions(begins, [relaxed.begin, relaxed.leave])
        self.begins = begins
        self.back: list[Any] | None = None
        if memory and num_devices > MAX_RANKED:
            self.back = [chain] * num_devices
        elif memory:
            back = [[chain + time for time in times] for times in relaxed.back]
            (self.back,) = self._positions(self._ranks(alike=False), [back], from_end=True)
        self.limits: list[tuple[Any, int]] = []  # (expression, constant): their sum is <= step
        for device in range(num_devices):
            self._add_device(device)

    def _ranks(self, *, alike: bool) -> list[list[Any]]:
        """Return a literal for each device and rank; devices of one class are ordered."""
        relaxed, model = self.relaxed, self.model
        devices = range(relaxed.num_devices)
        if alike:
            return [[int(device == rank) for rank in devices] for device in devices]
        literals = [[model.new_bool_var("") for _ in devices] for _ in devices]
        for index in devices:
            model.add_exactly_one(literals[index])
            model.add_exactly_one([row[index] for row in literals])
        return literals

    def _positions(
        self, ranks: list[list[Any]], moments: Sequence[Any], *, from_end: bool = False
    ) -> list[list[Any]]:
        """Return for each of `moments` its value at each device.

        The k-th device in turn either holds the k-th layer, and then so do all before it, or its
        first layer comes later, and with it the moment.
        """
        relaxed, model = self.relaxed, self.model
        devices = range(relaxed.num_devices)
        order = relaxed.type_of[::-1] if from_end else relaxed.type_of
        holds: list[Any] = [1] + [model.new_bool_var("") for _ in devices[1:]]
        for k in devices[1:]:
            if k >= len(order):
                model.add(holds[k] == 0)
            elif k > 1:
                model.add_implication(holds[k], holds[k - 1])
        for device in devices:
            for k in range(min(relaxed.num_devices, len(order))):
                literal = ranks[device][k]
                if isinstance(literal, int) and literal == 0:
                    continue
                both = [each for each in (literal, holds[k]) if not isinstance(each, int)]
                model.add(self.number[order[k], device] >= 1).only_enforce_if(*both)
        # whether the device of this rank comes late, as far as it can matter
        late: list[list[Any]] = []
        for device in devices:
            row: list[Any] = []
            for k in devices:
                literal = ranks[device][k]
                if isinstance(literal, int) or isinstance(holds[k], int):
                    row.append((1 - holds[k]) * literal)
                    continue
                row.append(model.new_bool_var(""))
                model.add_bool_or(~literal, holds[k], row[k])
            late.append(row)
        return [
            [
                sum(
                    int(early) * ranks[device][k] + (int(later) - int(early)) * late[device][k]
                    for k, (early, later) in enumerate(zip(*moment, strict=True))
                )
                for device in devices
            ]
            for moment in moments
        ]

    def order_alike(self) -> None:
        """Break the symmetry of equal devices: they begin in the order of their index."""
        relaxed = self.relaxed
        for device in range(1, relaxed.num_devices):
            before = device - 1
            while before >= 0 and relaxed.class_of[before] != relaxed.class_of[device]:
                before -= 1
            if before >= 0:
                rank = [
                    sum(index * literal for index, literal in enumerate(self.begins[which]))
                    for which in (before, device)
                ]
                self.model.add(rank[0] < rank[1])

    def _add_device(self, device: int) -> None:
        relaxed, model, m = self.relaxed, self.model, self.m
        kind_of = relaxed.class_of[device]
        times, overhead = relaxed.times[kind_of], int(relaxed.overhead[kind_of])

        def over(values: Any, factor: int = 1) -> Any:
            return sum(
                factor * int(values[layer]) * self.number[kind, device]
                for kind, layer in enumerate(relaxed.example)
                if values[layer]
            )

        begin, leave = self.begin[device], self.leave[device]
        forward, input_grad, weight_grad = (over(times[part], m) for part in range(3))
        optimizer = over(relaxed.optimizer[kind_of])
        # a device that stays empty has no window to keep; one that is used pays for the actions
        # of one stage at least
        used: Any = 0
        latest = max(map(max, relaxed.begin)) + max(map(max, relaxed.leave))
        if overhead or self.back is not None or latest > self.step:
            used = model.new_bool_var("")
            for kind in self.types:
                model.add(self.number[kind, device] == 0).only_enforce_if(~used)
        once = m * overhead * used

        def within(*terms: Any) -> None:
            """Let the sum be at most the step, where the device is used."""
            total = sum(terms)
            self.limits.append((total, device))
            if isinstance(used, int):
                model.add(total <= self.step)
            else:
                model.add(total <= self.step).only_enforce_if(used)

        work = forward + input_grad + weight_grad
        within(begin, work, 2 * once, optimizer)
        if self.back is None:
            within(begin, leave, forward, input_grad, 2 * once)
            return
        back = self.back[device]
        held = self._held(device, relaxed.kept, times[0], offload=True)
        pending = self._held(device, relaxed.pending, times[2], offload=False)
        within(back, work, once, optimizer, -1 * held)
        within(begin, leave, work, 2 * once, -1 * pending)
        within(back, leave, work, once, -1 * held, -1 * pending)

    def _held(self, device: int, sizes: Any, times: Any, *, offload: bool) -> Any:
        """Return the most time that microbatches held at once on a device can stand for."""
        relaxed, model, m = self.relaxed, self.model, self.m
        kind_of = relaxed.class_of[device]
        room = relaxed.room[kind_of]
        bandwidth = relaxed.offload_bandwidth[kind_of] if offload else 0
        every = m * int((relaxed.kept + relaxed.pending).sum()) + int(relaxed.state.sum())
        time: Any = 0
        takes: list[tuple[int, int, Any]] = []  # bytes that stay, that can be copied out, how many
        for kind, layer in enumerate(relaxed.example):
            size = int(sizes[layer])
            out = min(size, int(relaxed.offloadable[layer])) if bandwidth else 0
            number: Any = m * self.number[kind, device]
            if size and every > room:
                most = m * relaxed.count[kind]
                number = model.new_int_var(0, most, "")
                model.add(number <= m * self.number[kind, device])
                takes.append((size - out, out, number))
            time += int(times[layer]) * number
        if takes:
            state = sum(
                int(relaxed.state[layer]) * self.number[kind, device]
                for kind, layer in enumerate(relaxed.example)
            )
            room += relaxed.tie_bytes
            model.add(sum(size * number for size, _, number in takes) + state <= room)
            # as much as the copy lane carries before the device's first gradient
            copied = bandwidth * self.latest // NS_PER_S + 1
            if bandwidth and copied < every:
                both = sum((size + out) * number for size, out, number in takes)
                model.add(both + state <= room + copied)
        return time

    def solve(self, time_limit_s: float, seed: int, hint: dict[tuple[int, int], int]) -> _Answer:
        from ortools.sat.python import cp_model

        if not all(isinstance(literal, int) for literal in self.begins[0]):
            self.order_alike()
        for at, count in hint.items():
            self.model.add_hint(self.number[at], count)
        solver = cp_model.CpSolver()
        solver.parameters.catch_sigint_signal = False  # else Ctrl-C kills afterwards
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        solver.parameters.max_deterministic_time = max(time_limit_s, 0.01)
        status = solver.solve(self.model)
        took_s = solver.response_proto.deterministic_time
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            impossible = status == cp_model.INFEASIBLE
            return _Answer(step_ns=None, counts={}, impossible=impossible, took_s=took_s)
        counts = {at: solver.value(variable) for at, variable in self.number.items()}
        used = {device for (_, device), count in counts.items() if count}
        step = max(solver.value(total) for total, device in self.limits if device in used)
        return _Answer(step_ns=step, counts=counts, impossible=False, took_s=took_s)
