"""Where a plan's time goes, and so which moves to try: the bubble-aware part of the search.

Three numbers steer. The order's loss is how far the step lies above the plan's own device bound,
which no order can beat: small, and only another partition or placement helps. The imbalance is how
far the largest device load lies above the mean. The edge is the share of idle time in warmup,
cooldown and transfers, which placement and stage counts move; the rest is the order's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octotune.tune.genome import Float64
from octotune.tune.moves import (
    DEVICE,
    EXCHANGE,
    FUSE,
    LIMIT,
    MERGE,
    MOVE,
    NUM_MOVES,
    PHASE,
    RECOMPUTE,
    RELAY,
    SHIFT,
    SPLIT,
    SWAP,
    WEIGHT,
)
from simulator.bubbles import Cause, find_bubbles
from simulator.timeline import Timeline

EDGE_CAUSES = (Cause.WARMUP, Cause.COOLDOWN, Cause.QUEUED, Cause.IN_FLIGHT)
SMALL_LOSS = 0.003


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Parts of 1."""

    order_loss: float
    imbalance: float
    edge: float
    binding: bool  # memory stands in the way of some forward

    @property
    def partition_share(self) -> float:
        """How much of the structural effort goes to cuts rather than to placement."""
        idle = self.imbalance + 0.5 * self.edge
        return min(0.8, max(0.3, self.imbalance / idle if idle > 0 else 0.5))

    @property
    def structure_share(self) -> float:
        """How much of all effort goes to partition and placement rather than to the rule."""
        return 0.7 if self.order_loss < SMALL_LOSS else 0.5

    def repair_slack(self) -> float:
        """How far below the acceptance limit balance repair aims, at most."""
        return 0.05 if self.order_loss < SMALL_LOSS else 0.03

    def weights(self, *, strict: bool, overhead: bool) -> Float64:
        """Return how often each move is made, for a walk of this kind."""
        weights = np.zeros(NUM_MOVES)
        structure, rule = self.structure_share, 1.0 - self.structure_share
        if strict:
            structure, rule = structure * 0.8, rule + structure * 0.2
        cuts, places = self.partition_share, 1.0 - self.partition_share
        weights[SHIFT], weights[RELAY] = 0.7 * structure * cuts, 0.3 * structure * cuts
        for move, share in ((MOVE, 0.3), (SWAP, 0.3), (EXCHANGE, 0.08), (SPLIT, 0.16)):
            weights[move] = share * structure * places
        weights[MERGE] = 0.16 * structure * places
        for move, share in ((PHASE, 0.5), (LIMIT, 0.16), (DEVICE, 0.22), (WEIGHT, 0.12)):
            weights[move] = share * rule
        if overhead:
            weights[FUSE] = 0.15 * rule
        if self.binding:
            weights[RECOMPUTE] = 0.06
        return weights


def diagnose(timeline: Timeline, bound_ns: int, binding: bool) -> Diagnosis:
    """Return where the time of a simulated plan goes; `bound_ns` is its device bound."""
    idle = {cause: int(ns.sum()) for cause, ns in find_bubbles(timeline).ns_by_cause().items()}
    busy = timeline.busy_ns.astype(np.float64)
    total = max(1, sum(idle.values()))
    mean = float(busy.mean())
    return Diagnosis(
        order_loss=timeline.step_ns / max(1, bound_ns) - 1.0,
        imbalance=float(busy.max()) / mean - 1.0 if mean > 0 else 0.0,
        edge=sum(idle[cause] for cause in EDGE_CAUSES) / total,
        binding=binding,
    )
