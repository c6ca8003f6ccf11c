"""Islands: searches that run side by side and never share anything but their results.

An island owns all it writes, its random numbers included, and works in slices of a fixed number of
evaluations. So slices may run on any number of threads (the kernels hold no interpreter lock) and
the same seed gives the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octotune.tune.anneal import BEST, COST, EVALUATED, GAINS, anneal, empty_tally
from octotune.tune.balance import RandomState
from octotune.tune.genome import (
    NUM_STAGES,
    STRICT,
    Float64,
    Genome,
    I,
    W,
    capacity_for,
    copy_genome,
    empty_genome,
    empty_run,
    empty_shape,
)
from octotune.tune.graph import empty_graph, fill_tails, read_order
from octotune.tune.moves import MOVE_NAMES, copy_into
from octotune.tune.order import BEST as BEST_STEP
from octotune.tune.order import MOST_STAGES, STEP, TRIALS, replays, search_order
from octotune.tune.plans import Candidate, order_schedule
from octotune.tune.problem import FAR, Int64, World
from octotune.tune.replay import empty_order, empty_replay, has_room, replay
from octotune.tune.restructure import WEIGHTS, WEIGHTS_BINDING
from octotune.tune.ripple import empty_ripple
from octotune.tune.scheduler import list_schedule
from octotune.tune.shape import REJECTED, device_bound, shape_stages
from simulator.actions import KIND_MASK, STAGE_SHIFT, Kind, Schedule

# A slice runs about this many actions: some 50 ms, whatever the size of the problem; less of an
# order, whose moves may take 1 or 50 microseconds.
ACTIONS_A_SLICE = 600_000
ORDER_ACTIONS_A_SLICE = 400_000
MOVES_AN_EVALUATION = 16  # of an order, where a move is felt only as far as it reaches


def slice_length(num_actions: int, actions: int) -> int:
    """Return how many evaluations a slice has."""
    return max(1, actions // max(1, num_actions))


class Walk:
    """Annealing over genomes: partition, placement, and the rule that orders the work."""

    def __init__(
        self,
        world: World,
        genome: Genome,
        step_ns: int,
        rng: RandomState,
        source: str,
        heat: float = 1.0,
        more_rules: float = 0.15,
    ):
        self.world = world
        self.source = source
        self.rng = rng
        self.heat = heat  # its temperature, against that of others
        self.more_rules = more_rules
        capacity = len(genome.device)
        self._current = copy_genome(genome)
        self._trial = empty_genome(world, capacity)
        copy_into(genome, self._trial)
        self.best = copy_genome(genome)
        self._shape = empty_shape(world, capacity)
        self._run = empty_run(world, capacity)
        self._bound = np.zeros(world.num_devices, np.int64)
        self._tally = empty_tally()
        self._tally[COST] = self._tally[BEST] = step_ns
        self.judged_ns = FAR  # the best step that the simulator was asked about

    @property
    def best_ns(self) -> int:
        """The best step so far, as the list scheduler has it."""
        return int(self._tally[BEST])

    @property
    def strict(self) -> bool:
        """Whether the rule is a pattern that devices follow even when they have to wait."""
        return bool(self.best.meta[STRICT])

    @property
    def evaluations(self) -> int:
        """How many neighbours were tried."""
        return int(self._tally[EVALUATED])

    @property
    def gains_ns(self) -> dict[str, int]:
        """What each kind of move took off the best step."""
        return dict(zip(MOVE_NAMES, self._tally[GAINS:].tolist(), strict=True))

    def bound_ns(self) -> int:
        """Return the device bound of the best genome: what no order can beat."""
        shape_stages(self.world, self.best, self._shape)
        return device_bound(self.world, self._shape)

    def run_slice(
        self, temperature: float, weights: Float64, slack: float, evaluations: int | None = None
    ) -> None:
        """Try a fixed number of neighbours."""
        actions = 3 * int(self._current.meta[NUM_STAGES]) * self.world.num_microbatches
        anneal(
            self.world,
            self._current,
            self._trial,
            self.best,
            self._shape,
            self._run,
            self._bound,
            self.rng,
            weights,
            self._tally,
            temperature,
            slack,
            self.more_rules,
            evaluations or slice_length(actions, ACTIONS_A_SLICE),
        )

    def restart(self, heat: float) -> None:
        """Go on from the best."""
        self.heat = heat
        copy_into(self.best, self._current)
        self._tally[COST] = self._tally[BEST]

    def schedule(self) -> Schedule:
        """Return the order of the best genome."""
        shape_stages(self.world, self.best, self._shape)
        list_schedule(self.world, self.best, self._shape, self._run, FAR)
        return order_schedule(self._run.order, self._run.begin, self.best.split)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A candidate's partition, placement and order as the order search has them."""

    genome: Genome
    token: Int64
    begin: Int64


def tokens_of(world: World, candidate: Candidate) -> Tokens | None:
    """Return a candidate as tokens, or None where its order is not by rising microbatch.

    A stage whose backward is split for some microbatches is split for all.
    """
    num_stages = candidate.num_stages
    genome = empty_genome(world, num_stages)
    genome.meta[NUM_STAGES] = num_stages
    genome.cut[:] = [*(stage.layers[0] for stage in candidate.stages), world.num_layers]
    genome.device[:] = [stage.device for stage in candidate.stages]
    genome.recompute[:] = [stage.recompute for stage in candidate.stages]
    codes = candidate.schedule.codes
    kinds, stages = codes & KIND_MASK, codes >> STAGE_SHIFT
    genome.split[:] = 0
    genome.split[stages[kinds == int(Kind.W)]] = 1
    as_kind = np.zeros(len(Kind), np.int64)
    as_kind[int(Kind.B)] = as_kind[int(Kind.I)] = I
    as_kind[int(Kind.W)] = W
    tokens = 3 * stages + as_kind[kinds]
    # B of a stage that splits elsewhere becomes I, then W
    both = (kinds == int(Kind.B)) & (genome.split[stages] == 1)
    counts = np.where(both, 2, 1)
    token = np.repeat(tokens, counts)
    second = np.cumsum(counts)[both] - 1
    token[second] += W - I
    ends = np.concatenate(([0], np.cumsum(counts)))
    return Tokens(genome=genome, token=token, begin=ends[candidate.schedule.offsets])


class Polish:
    """Annealing over the order of actions of one partition and placement, cuts included."""

    def __init__(
        self,
        world: World,
        tokens: Tokens,
        rng: RandomState,
        source: str,
        heat: float = 1.0,
        *,
        binding: bool = False,
    ):
        self.world = world
        self._weights = WEIGHTS_BINDING if binding else WEIGHTS  # memory binds
        self.source = source
        self.rng = rng
        self.heat = heat  # its temperature, against that of others
        num_stages, num_actions = len(tokens.genome.device), len(tokens.token)
        capacity = max(capacity_for(world), num_stages)
        self.best = empty_genome(world, capacity)
        copy_into(tokens.genome, self.best)
        self._graph = empty_graph(copy_genome(self.best), world)
        self._other = empty_graph(copy_genome(self.best), world)
        self._order = empty_order(capacity, world)
        self._best_token = self._order.token.copy()
        self._best_token[:num_actions] = tokens.token
        self._best_begin = tokens.begin.copy()
        self._trial = empty_replay(capacity, world)
        self._ripple = empty_ripple(len(self._graph.row), world)
        self._path = self._graph.row.copy()
        self._bound = np.zeros(world.num_devices, np.int64)
        self._moves = 1 if replays(world) else MOVES_AN_EVALUATION
        most = min(capacity, num_stages + 2 + num_stages // 5)
        self._tally = np.zeros(4, np.int64)
        self._tally[MOST_STAGES] = most
        self.restart()
        self._tally[BEST_STEP] = self._tally[STEP]
        self.judged_ns = FAR

    @property
    def fits(self) -> bool:
        """Whether the order is complete and within the memory: what does not is no start."""
        return self.best_ns >= 0

    @property
    def best_ns(self) -> int:
        """The best step so far."""
        return int(self._tally[BEST_STEP])

    @property
    def num_actions(self) -> int:
        """How many actions the current order has."""
        return int(self._order.begin[-1])

    @property
    def evaluations(self) -> int:
        """How many neighbours were tried; some moves of an order count as one."""
        return self.trials // self._moves

    @property
    def trials(self) -> int:
        """How many moves of the order, and changes of its partition or placement, were tried."""
        return int(self._tally[TRIALS])

    def bound_ns(self) -> int:
        """Return the device bound of the best partition: what no order can beat."""
        shape_stages(self.world, self.best, self._other.shape)
        return device_bound(self.world, self._other.shape)

    def restart(self) -> None:
        """Go on from the best."""
        world, graph, order, trial = self.world, self._graph, self._order, self._trial
        copy_into(self.best, graph.genome)
        order.token[:] = self._best_token
        order.begin[:] = self._best_begin
        shape_stages(world, graph.genome, graph.shape)
        step = replay(world, graph.genome, graph.shape, order, trial, FAR)
        if step < 0 or not has_room(graph.shape, order):
            self._tally[STEP] = REJECTED
            return
        self._tally[STEP] = step
        read_order(world, graph, order, trial)
        scratch = self._ripple.next
        fill_tails(graph.actions, graph.row, order.begin, graph.shape.optimizer, scratch)

    def run_slice(
        self, temperature: float, structure_share: float, evaluations: int | None = None
    ) -> None:
        """Try a fixed number of neighbours, a part of them of other partitions or placements."""
        if evaluations is None:
            evaluations = slice_length(self.num_actions, ORDER_ACTIONS_A_SLICE)
        search_order(
            self.world,
            self._graph,
            self._order,
            self.best,
            self._best_token,
            self._best_begin,
            self._other,
            self._trial,
            self._ripple,
            self._path,
            self._weights,
            self._bound,
            self.rng,
            self._tally,
            temperature,
            structure_share / self._moves,
            evaluations * self._moves,
        )

    def result(self) -> tuple[Genome, Schedule]:
        """Return the best partition and placement, and the order."""
        genome = copy_genome(self.best)
        return genome, order_schedule(self._best_token, self._best_begin, genome.split)
