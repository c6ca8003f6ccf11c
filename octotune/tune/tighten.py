"""Islands of justification: orders too long for moves one by one, and a different way for others.

A slice plays the order backwards and forwards a few times and lets some waits be filled by what
does not quite fit there (`octotune.tune.justify`): a random share of those in a random part of the
step, of any action or of one kind, so that devices may change in step, or mostly just a few
anywhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from octotune.contract import build_costs
from octotune.tune.balance import RandomState
from octotune.tune.genome import Genome, empty_shape
from octotune.tune.justify import UNDISTURBED, Disturbed, Scratch, justify, ways_of
from octotune.tune.plans import Candidate
from octotune.tune.problem import FAR, Int64, World
from octotune.tune.shape import device_bound, shape_stages
from simulator.actions import Kind, Schedule
from simulator.engine import simulate

if TYPE_CHECKING:
    from octotune.contract import Cluster, Workload

ACTIONS_A_SLICE = 400_000
MOST_WAITS = 1000.0  # of single ones, where all actions waited
SHORTEST_PART = 0.01  # of the step
KINDS = (-1, -1, int(Kind.F), int(Kind.B), int(Kind.I), int(Kind.W))  # -1: any
REACHES = (0.2, 0.5, 1.0, 2.0, 4.0)  # parts of the longest action


class Tighten:
    """One plan's order under justification; the partition and placement stay."""

    def __init__(
        self,
        world: World,
        workload: Workload,
        cluster: Cluster,
        candidate: Candidate,
        genome: Genome,
        rng: RandomState,
    ):
        self.source = candidate.source
        self.heat = 1.0  # as polishes have it
        self._genome = genome
        shape = empty_shape(world, candidate.num_stages)
        shape_stages(world, genome, shape)
        self._bound_ns = device_bound(world, shape)
        self._schedule = candidate.schedule
        costs = build_costs(workload, cluster, candidate.stages, world.num_microbatches)
        timeline = simulate(candidate.schedule, costs)
        self._forward, self._backward = ways_of(candidate.schedule, costs)
        num_actions = len(candidate.schedule.codes)
        self._order = np.arange(num_actions)
        self._best = self._order.copy()
        self._start = timeline.start_ns.copy()
        self._scratch = Scratch(*(np.zeros(num_actions, np.int64) for _ in Scratch._fields))
        self._tally: Int64 = np.array([timeline.step_ns, timeline.step_ns, 0])
        self._rng = rng
        self._random = np.random.default_rng(int(rng[0]))
        self._longest = int(self._forward.duration.max())
        self.judged_ns = FAR

    @property
    def best_ns(self) -> int:
        """The best step so far, transfers that queue for their channel left out."""
        return int(self._tally[1])

    @property
    def evaluations(self) -> int:
        """How often an order was played."""
        return int(self._tally[2])

    def bound_ns(self) -> int:
        """Return the device bound of the partition: what no order can beat."""
        return self._bound_ns

    def close_gaps(self, rounds: int) -> None:
        """Play it backwards and forwards, nothing disturbed: it does not get longer."""
        self._run(rounds, UNDISTURBED, 0.0)

    def restart(self) -> None:
        """Go on from where it is: it never strays far."""

    def run_slice(self, temperature: float, structure_share: float = 0.0) -> None:
        """Disturb and justify a fixed number of times; partition and placement stay."""
        self._run(self._rounds(), self._disturbance(), temperature)

    def _rounds(self) -> int:
        return max(1, ACTIONS_A_SLICE // (2 * len(self._order)))

    def _disturbance(self) -> Disturbed:
        """Draw one: single waits anywhere, or most waits of a kind in a part of the step."""
        draw = self._random
        reach = int(self._longest * REACHES[draw.integers(len(REACHES))])
        if draw.random() < 0.7:
            count = math.exp(draw.uniform(0.0, math.log(MOST_WAITS)))
            return Disturbed(count / len(self._order), reach, -1, 0.0, 1.0)
        kind = int(KINDS[draw.integers(len(KINDS))])
        length = math.exp(draw.uniform(math.log(SHORTEST_PART), 0.0))
        since = draw.uniform(0.0, 1.0 - length)
        share = math.exp(draw.uniform(math.log(1.0 / len(self._order)), 0.0))
        return Disturbed(share, reach, kind, since, since + length)

    def _run(self, rounds: int, disturbed: Disturbed, tolerance: float) -> None:
        justify(
            self._forward,
            self._backward,
            self._order,
            self._start,
            self._best,
            self._scratch,
            self._tally,
            rounds,
            disturbed,
            tolerance,
            self._rng,
        )

    def result(self) -> tuple[Genome, Schedule]:
        """Return the partition and placement, and the best order."""
        schedule = self._schedule
        return self._genome, Schedule(schedule.codes[self._best], schedule.offsets.copy())
