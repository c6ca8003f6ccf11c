"""Given stages: a bound of every order, and for small ones the best order, by the solver."""

from __future__ import annotations

from octotune.bounds import Bound
from octotune.bounds.fixed import fixed_bound
from octotune.contract import Workload
from octotune.errors import InfeasibleError, OutOfTimeError
from octotune.exact import exact_order
from simulator.actions import Schedule
from simulator.costs import Costs

SOLVED = "whole order"
MOST_ACTIONS = 150
# the solver's deterministic seconds; the wall clock may get to four times as many
MOST_TIME_S, PART = 4.0, 4.0


def solved(
    workload: Workload, costs: Costs, time_limit_s: float | None, seed: int
) -> tuple[Bound, Schedule | None]:
    """Return a bound of all orders of given stages, and the best order found if it was sought.

    The solver has at most the search's time limit by the wall clock, and works beside it.
    """
    bound = fixed_bound(costs)
    if not solvable(workload, costs):
        return bound, None
    limit = MOST_TIME_S if time_limit_s is None else min(MOST_TIME_S, time_limit_s / PART)
    try:
        found = exact_order(costs, time_limit_s=limit, seed=seed)
    except (InfeasibleError, OutOfTimeError):
        return bound, None  # the search itself says what is missing
    parts = {**bound.parts, "all orders": found.bound_ns}
    return Bound(ns=max(parts.values()), parts=parts), found.schedule


def solvable(workload: Workload, costs: Costs) -> bool:
    """Whether the solver finds the best order of given stages, and soon.

    It splits all of a stage's backwards or none, and offloads nothing: its bound holds where
    splitting costs neither time nor bytes and nothing can be offloaded.
    """
    halves = costs.input_grad_ns + costs.weight_grad_ns
    return bool(
        3 * costs.num_stages * costs.num_microbatches <= MOST_ACTIONS
        and (costs.backward_ns >= halves).all()
        and not costs.held_w_bytes.any()
        and not any(layer.offloadable_bytes for layer in workload.layers)
    )
