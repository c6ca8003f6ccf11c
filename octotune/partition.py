"""Partition: which consecutive layers make each stage, for a given placement.

`balanced_cuts` minimises the largest device load, memory respected, exactly: with one stage a
device by a dynamic program over cut positions, with several by a local search that CP-SAT then
improves on and proves. Among equally good partitions it prefers the one whose stages are most even
(least sum of squares): exactly with one stage a device, as far as the search finds it with more.
`equal_cuts` is the layer count split that frameworks use by default, `explicit_cuts` checks one
given by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octotune.contract import Cluster, Stage, Workload
from octotune.contract.costs import layer_times_ns
from octotune.errors import InfeasibleError, MalformedError

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

Int64 = NDArray[np.int64]

# above this many (stage, layer) pairs the integer program would take longer to build than to help
MAX_PAIRS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Cuts `0 = cuts[0] < ... < cuts[S] = L`: stage s holds the layers `[cuts[s], cuts[s + 1])`.

    `loads_ns[d]` is what one microbatch takes on device d, and `bound_ns` what the largest of them
    is at least, for this placement and memory.
    """

    cuts: tuple[int, ...]
    stage_device: tuple[int, ...]
    loads_ns: tuple[int, ...]
    bound_ns: int

    @property
    def bottleneck_ns(self) -> int:
        """The largest device load."""
        return max(self.loads_ns)

    @property
    def proven(self) -> bool:
        """Whether no partition for this placement has a smaller bottleneck."""
        return self.bottleneck_ns <= self.bound_ns

    def stages(self, *, recompute: bool = False) -> tuple[Stage, ...]:
        """Return the stages of a plan."""
        return stages_of(self.cuts, self.stage_device, recompute=recompute)


def stages_of(
    cuts: Sequence[int], stage_device: Sequence[int], *, recompute: bool = False
) -> tuple[Stage, ...]:
    """Return the stages between cuts on their devices."""
    return tuple(
        Stage(layers=(begin, end), device=device, recompute=recompute)
        for (begin, end), device in zip(pairwise(cuts), stage_device, strict=True)
    )


def equal_cuts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return cuts into equal layer counts; what does not divide goes to the first stages.

    Raises:
        InfeasibleError: if there are fewer layers than stages.
    """
    _refuse_empty(num_layers, num_stages)
    size, extra = divmod(num_layers, num_stages)
    return (0, *accumulate(size + (stage < extra) for stage in range(num_stages)))


def explicit_cuts(counts: Sequence[int], num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the cuts for layer counts given by hand, one a stage.

    Raises:
        MalformedError: if there is not one count a stage, a count is below 1, or they do not add
            up to the number of layers.
    """
    if len(counts) != num_stages:
        raise MalformedError(
            f"split {list(counts)} has {len(counts)} parts; there are {num_stages} stages"
        )
    for stage, count in enumerate(counts):
        if count < 1:
            raise MalformedError(f"split {list(counts)} gives stage {stage} {count} layers; >= 1")
    if sum(counts) != num_layers:
        raise MalformedError(
            f"split {list(counts)} adds up to {sum(counts)}; the workload has {num_layers} layers"
        )
    return (0, *accumulate(counts))


def one_f_one_b_in_flight(num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """Return how many microbatches each stage of 1F1B holds, one stage a device: min(m, S - s)."""
    return tuple(min(num_microbatches, num_stages - stage) for stage in range(num_stages))


def device_loads_ns(
    workload: Workload,
    cluster: Cluster,
    stage_device: Sequence[int],
    cuts: Sequence[int],
    *,
    split_backward: bool = False,
    recompute: bool = False,
) -> tuple[int, ...]:
    """Return what one microbatch takes on each device: F and B (or I and W) of its stages."""
    problem = _problem(workload, cluster, stage_device, None, 1, split_backward, recompute)
    return problem.loads(cuts)


def balanced_cuts(
    workload: Workload,
    cluster: Cluster,
    stage_device: Sequence[int],
    *,
    num_microbatches: int,
    in_flight: Sequence[int] | None = None,
    split_backward: bool = False,
    recompute: bool = False,
    time_limit_s: float = 1.0,
    seed: int = 0,
) -> Partition:
    """Return the partition that minimises the largest device load of one microbatch.

    Memory: static bytes, the activations of `in_flight[s]` microbatches of each stage, and on top
    the largest workspace and gradients held for W of one action. A device's load is the time of
    its stages' F and B, overhead included.

    Args:
        workload: the layers.
        cluster: the devices; each layer's time is taken on the device that its stage is on.
        stage_device: the device of each stage, in order; any map.
        num_microbatches: m.
        in_flight: microbatches each stage holds at once. By default those of 1F1B where every
            device has one stage, and else one a stage, the least that any order needs.
        split_backward: count I and W, with an overhead each, in place of B.
        recompute: every stage keeps its input alone until I or B, which then runs F again.
        time_limit_s: for the integer program, in the solver's deterministic seconds, so that the
            result depends on the arguments alone. Not used with one stage a device.
        seed: of local search and solver.

    Raises:
        InfeasibleError: if there are fewer layers than stages or no partition fits the memory; it
            names the device that lacks least in the best case, and by how much.
    """
    num_layers, num_stages = len(workload.layers), len(stage_device)
    _refuse_empty(num_layers, num_stages)
    if in_flight is None:
        several = max(Counter(stage_device).values()) > 1
        in_flight = (
            (1,) * num_stages if several else one_f_one_b_in_flight(num_stages, num_microbatches)
        )
    problem = _problem(
        workload,
        cluster,
        stage_device,
        in_flight,
        num_microbatches,
        split_backward,
        recompute,
    )
    cuts, bound_ns = problem.solve(time_limit_s, seed)
    return Partition(
        cuts=cuts,
        stage_device=tuple(stage_device),
        loads_ns=problem.loads(cuts),
        bound_ns=bound_ns,
    )


def _refuse_empty(num_layers: int, num_stages: int) -> None:
    if num_layers < num_stages:
        raise InfeasibleError(
            f"{num_layers} layers cannot fill {num_stages} stages; use at most {num_layers} stages"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**25 else f"{num_bytes} bytes"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Problem:
    """The arrays of one partition problem. S stages, D devices, L layers."""

    stage_device: Int64  # [S]
    in_flight: Int64  # [S]
    times: Int64  # [D, 3, L] F, I, W
    overhead: Int64  # [D]
    split: bool
    recompute: bool
    state: Int64  # [L]
    saved: Int64  # [L] saved and saved_w
    held: Int64  # [L]
    workspace: Int64  # [L]
    inputs: Int64  # [L] what a stage that begins here keeps under recompute
    tie_to: Int64  # [L] the later layer of a tied pair, at the earlier one; else -1
    tie_bytes: Int64  # [L] what both on one device save, at the earlier one
    reserved: Int64  # [D]
    limit: Int64  # [D]

    def prefix(self) -> tuple[Int64, Int64]:
        """Return prefix sums of times [D, 3, L + 1] and of state, saved, held bytes [3, L + 1]."""
        times = np.zeros((*self.times.shape[:2], self.times.shape[2] + 1), np.int64)
        np.cumsum(self.times, axis=2, out=times[:, :, 1:])
        sizes = np.zeros((3, len(self.state) + 1), np.int64)
        np.cumsum(np.stack([self.state, self.saved, self.held]), axis=1, out=sizes[:, 1:])
        return times, sizes

    def loads(self, cuts: Sequence[int]) -> tuple[int, ...]:
        loads = [0] * len(self.overhead)
        for stage, (begin, end) in enumerate(pairwise(cuts)):
            device = int(self.stage_device[stage])
            forward, input_grad, weight_grad = map(
                int, self.times[device, :, begin:end].sum(axis=1)
            )
            overhead = int(self.overhead[device])
            input_grad += forward if self.recompute else 0
            loads[device] += max(1, forward + overhead)
            if self.split:
                loads[device] += max(1, input_grad + overhead) + max(1, weight_grad + overhead)
            else:
                loads[device] += max(1, input_grad + weight_grad + overhead)
        return tuple(loads)

    def demands(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes each device needs."""
        needs = [int(reserved) for reserved in self.reserved]
        most = [0] * len(needs)
        where = np.empty(len(self.state), np.int64)
        for stage, (begin, end) in enumerate(pairwise(cuts)):
            device = int(self.stage_device[stage])
            where[begin:end] = device
            saved, in_flight = int(self.saved[begin:end].sum()), int(self.in_flight[stage])
            needs[device] += int(self.state[begin:end].sum())
            if self.recompute:
                needs[device] += in_flight * int(self.inputs[begin])
                saved = max(0, saved - int(self.inputs[begin]))
            else:
                needs[device] += in_flight * saved
                saved = 0
            during = saved + int(self.held[begin:end].sum() + self.workspace[begin:end].max())
            most[device] = max(most[device], during)
        for first in np.flatnonzero(self.tie_to >= 0):
            if where[first] == where[self.tie_to[first]]:
                needs[where[first]] -= int(self.tie_bytes[first])
        return tuple(need + peak for need, peak in zip(needs, most, strict=True))

    def solve(self, time_limit_s: float, seed: int) -> tuple[tuple[int, ...], int]:
        """Return cuts, and a lower bound of the largest load."""
        from octotune.partition_kernels import even_cuts, improve_cuts

        counts = np.bincount(self.stage_device, minlength=len(self.overhead))
        times, sizes = self.prefix()
        arrays = (
            self.stage_device,
            counts,
            self.in_flight,
            times,
            self.overhead,
            self.split,
            self.recompute,
            sizes,
            self.workspace,
            self.inputs,
            self.tie_to,
            self.tie_bytes,
            self.reserved,
            self.limit,
        )
        if counts.max() == 1:
            cuts = tuple(even_cuts(*arrays, False).tolist())
            if not cuts:
                self.refuse(tuple(even_cuts(*arrays, True).tolist()))
            return cuts, max(self.loads(cuts))

        # Several stages a device: balance the stages first, then the devices.
        start = even_cuts(*arrays[:-1], np.full_like(self.limit, np.iinfo(np.int64).max), False)
        moves = 10_000 * len(self.stage_device)
        limited = bool((self.most_bytes() > self.limit).any())
        cuts = tuple(improve_cuts(start, moves, seed, *arrays, limited).tolist())
        bound_ns = self.load_bound()
        if self.fits(cuts) and max(self.loads(cuts)) <= bound_ns:
            return cuts, bound_ns
        if len(self.stage_device) * len(self.state) <= MAX_PAIRS:
            solved, solved_ns = _solve_cuts(self, cuts, time_limit_s, seed)
            bound_ns = max(bound_ns, solved_ns)
            if solved != cuts:  # which knows nothing of evenness
                best = np.array(solved, np.int64)
                cuts = tuple(improve_cuts(best, moves, seed, *arrays, limited).tolist())
        if not self.fits(cuts):
            self.refuse(cuts)
        return cuts, bound_ns

    def most_bytes(self) -> Int64:
        """Return [D] more than any partition needs: all layers at once, all in flight."""
        each = self.saved.sum() + self.inputs.sum()
        once = self.state.sum() + self.held.sum() + self.workspace.sum() + self.saved.sum()
        most: Int64 = self.reserved + once + int(self.in_flight.max()) * each
        return most

    def fits(self, cuts: Sequence[int]) -> bool:
        return all(
            need <= limit for need, limit in zip(self.demands(cuts), self.limit, strict=True)
        )

    def load_bound(self) -> int:
        """Return a bound by all work over all speeds, each layer at its fastest."""
        used = np.unique(self.stage_device)
        work = self.times[used].sum(axis=1)
        if self.recompute:
            work = work + self.times[used, 0]
        actions = 3 if self.split else 2
        overhead = actions * int(self.overhead[self.stage_device].sum())
        total = int(work.min(axis=0).sum()) + overhead
        return max(-(-total // len(used)), int(work.min(axis=0).max()))

    def refuse(self, cuts: Sequence[int]) -> None:
        """Raise for cuts that exceed the memory least."""
        needs = self.demands(cuts)
        device = max(range(len(needs)), key=lambda index: needs[index] - int(self.limit[index]))
        limit = int(self.limit[device])
        layers = [
            f"{begin}-{end - 1}"
            for (begin, end), where in zip(pairwise(cuts), self.stage_device, strict=True)
            if where == device
        ]
        raise InfeasibleError(
            f"no partition fits: at best device {device} needs {_size(needs[device])} for layers "
            f"{', '.join(layers)} and has {_size(limit)}, {needs[device] - limit} bytes too few; "
            "use more devices, fewer microbatches in flight, recompute or offload"
        )


def _problem(
    workload: Workload,
    cluster: Cluster,
    stage_device: Sequence[int],
    in_flight: Sequence[int] | None,
    num_microbatches: int,
    split_backward: bool,
    recompute: bool,
) -> _Problem:
    layers, devices = workload.layers, cluster.devices
    for stage, device in enumerate(stage_device):
        if not 0 <= device < len(devices):
            raise MalformedError(
                f"stage_device[{stage}] is {device}; the cluster has devices 0-{len(devices) - 1}"
            )
    if in_flight is None:
        in_flight = (1,) * len(stage_device)
    if len(in_flight) != len(stage_device):
        raise MalformedError(
            f"in_flight has {len(in_flight)} entries; there are {len(stage_device)} stages"
        )
    for stage, count in enumerate(in_flight):
        if not 1 <= count <= num_microbatches:
            raise MalformedError(
                f"in_flight[{stage}] is {count}; it is 1 to {num_microbatches}, the microbatches"
            )
    by_kind: dict[tuple[str, float], list[tuple[int, int, int]]] = {}
    keys = [(device.kind, device.speed) for device in devices]
    for key, kind in zip(keys, devices, strict=True):
        if key not in by_kind:
            by_kind[key] = [layer_times_ns(layer, kind) for layer in layers]

    def ints(values: Sequence[int]) -> Int64:
        return np.array(values, dtype=np.int64)

    tie_to, tie_bytes = [-1] * len(layers), [0] * len(layers)
    for first, second in workload.tied:
        tie_to[first] = second
        tie_bytes[first] = min(layers[first].state_bytes, layers[second].state_bytes)
    return _Problem(
        stage_device=ints(stage_device),
        in_flight=ints(in_flight),
        times=np.stack([np.array(by_kind[key], dtype=np.int64).T for key in keys]),
        overhead=ints([device.overhead_ns for device in devices]),
        split=split_backward,
        recompute=recompute,
        state=ints([layer.state_bytes for layer in layers]),
        saved=ints([layer.saved_bytes + layer.saved_w_bytes for layer in layers]),
        held=ints([layer.held_w_bytes for layer in layers]),
        workspace=ints([layer.workspace_bytes for layer in layers]),
        inputs=ints([0, *(layer.output_bytes for layer in layers[:-1])]),
        tie_to=ints(tie_to),
        tie_bytes=ints(tie_bytes),
        reserved=ints([device.reserved_bytes for device in devices]),
        limit=ints([device.memory_bytes for device in devices]),
    )


def _solve_cuts(
    problem: _Problem, start: tuple[int, ...], time_limit_s: float, seed: int
) -> tuple[tuple[int, ...], int]:
    """Improve cuts by CP-SAT; return them and a lower bound of the largest load.

    Order encoding: `at[s][l]` is true when stage s begins at layer l or before, so layer l is in
    stage s exactly when `at[s][l] - at[s + 1][l]` is 1, and loads and bytes are linear in it.
    Where `start` exceeds the memory, the first aim is the least excess.
    """
    from ortools.sat.python import cp_model

    num_stages, num_layers = len(problem.stage_device), len(problem.state)
    model = cp_model.CpModel()
    at: list[list[Any]] = [[1] * num_layers]
    for stage in range(1, num_stages):
        row = [model.new_bool_var("") for _ in range(num_layers)]
        for layer in range(num_layers):
            if layer < stage:
                model.add(row[layer] == 0)
            elif layer >= num_layers - (num_stages - stage):
                model.add(row[layer] == 1)
            if layer:
                model.add_implication(row[layer - 1], row[layer])
                if stage > 1:  # at least one layer in the stage before
                    model.add_implication(row[layer], at[stage - 1][layer - 1])
            model.add_hint(row[layer], int(start[stage] <= layer))
        at.append(row)
    at.append([0] * num_layers)

    def inside(stage: int, weights: Int64) -> Any:
        return sum(
            int(weight) * (at[stage][layer] - at[stage + 1][layer])
            for layer, weight in enumerate(weights)
            if weight
        )

    devices = sorted(set(problem.stage_device.tolist()))
    stages_on = {
        device: np.flatnonzero(problem.stage_device == device).tolist() for device in devices
    }
    largest = model.new_int_var(0, int(problem.times.sum()) * 2 + 10**9, "")
    actions = 3 if problem.split else 2
    for device in devices:
        work = problem.times[device].sum(axis=0)
        if problem.recompute:
            work = work + problem.times[device, 0]
        overhead = actions * int(problem.overhead[device]) * len(stages_on[device])
        model.add(sum(inside(stage, work) for stage in stages_on[device]) + overhead <= largest)

    needs = problem.demands(start)
    excess = max(need - int(limit) for need, limit in zip(needs, problem.limit, strict=True))
    over = model.new_int_var(0, max(0, excess), "")
    model.add_hint(over, max(0, excess))
    for device in devices:
        _add_memory(model, problem, device, stages_on[device], at, inside, over)
    model.add_hint(largest, max(problem.loads(start)))

    def solve() -> tuple[tuple[int, ...] | None, int]:
        solver = cp_model.CpSolver()
        solver.parameters.catch_sigint_signal = False  # else Ctrl-C kills afterwards
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        solver.parameters.max_deterministic_time = time_limit_s
        status = solver.solve(model)
        bound = max(0, int(np.ceil(solver.best_objective_bound - 1e-6)))
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, bound
        begins = [
            next(layer for layer in range(num_layers) if solver.boolean_value(row[layer]))
            for row in at[1:num_stages]
        ]
        return (0, *begins, num_layers), bound

    if excess > 0:
        model.minimize(over)
        found, least = solve()
        if found is not None:
            start = found
        if least > 0 or not problem.fits(start):
            return start, 0
        model.clear_hints()  # type: ignore[no-untyped-call]
        for stage in range(1, num_stages):
            for layer in range(num_layers):
                model.add_hint(at[stage][layer], int(start[stage] <= layer))
    model.add(over == 0)
    model.minimize(largest)
    found, bound_ns = solve()
    if found is not None and max(problem.loads(found)) < max(problem.loads(start)):
        start = found
    return start, bound_ns


def _add_memory(
    model: cp_model.CpModel,
    problem: _Problem,
    device: int,
    stages: list[int],
    at: list[list[Any]],
    inside: Any,
    over: Any,
) -> None:
    """Add the limit of one device: what it holds, and the most that one action adds."""
    limit = int(problem.limit[device])
    total = int(problem.most_bytes()[device])
    if total <= limit:
        return
    most = model.new_int_var(0, total, "")
    needs: Any = int(problem.reserved[device]) + most
    for stage in stages:
        needs += inside(stage, problem.state)
        saved, held = inside(stage, problem.saved), inside(stage, problem.held)
        in_flight = int(problem.in_flight[stage])
        if problem.recompute:
            # the input of layer l where the stage begins at l
            kept = sum(
                int(problem.inputs[layer]) * (at[stage][layer] - at[stage][layer - 1])
                for layer in range(1, len(problem.inputs))
                if problem.inputs[layer]
            )
            needs += in_flight * kept
            during = [held, held + saved - kept]
        else:
            needs += in_flight * saved
            during = [held]
        for layer, size in enumerate(problem.workspace):
            here = int(size) * (at[stage][layer] - at[stage + 1][layer])
            for bytes_held in during:
                model.add(bytes_held + here <= most)
    for first in np.flatnonzero(problem.tie_to >= 0).tolist():
        both = model.new_bool_var("")
        for layer in (first, int(problem.tie_to[first])):
            model.add(sum(at[stage][layer] - at[stage + 1][layer] for stage in stages) >= both)
        needs -= int(problem.tie_bytes[first]) * both
    model.add(needs - over <= limit)
