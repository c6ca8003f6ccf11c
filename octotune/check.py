"""Check a plan by the contract: its order, its memory, and what it claims about itself.

A plan is checked without knowing how it was found: costs are built from the workload, cluster and
stages that it holds, its order is simulated, and the numbers it predicts are compared with what
comes out. The first rule that is broken is raised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octotune.contract.costs import build_costs
from octotune.errors import BrokenPlanError

if TYPE_CHECKING:
    from octotune.contract.plan import Plan
    from simulator.timeline import Timeline

# A bubble fraction lies between 0 and 1 and comes from one division; sums in another order and
# another libm move its last digits only.
BUBBLE_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A plan that obeys every rule, and what its step comes to."""

    plan: Plan
    timeline: Timeline
    step_ns: int
    bubble_fraction: float
    peak_bytes: tuple[int, ...]  # [D]


def check(plan: Plan) -> Checked:
    """Recompute a plan.

    Raises:
        ScheduleError: if a word is no action, or the order breaks a rule or is incomplete.
        DeadlockError: if the order cannot run; it holds the cycle.
        OutOfMemoryError: if a device or host needs more than it has.
        BrokenPlanError: if a predicted `step_ns` or `peak_bytes` differs, a `bubble_fraction`
            differs by more than 1e-9, or a `lower_bound_ns` is above the step.
        MalformedError: if times or sizes add up to more than 2^62.
    """
    from simulator.engine import simulate
    from simulator.memory import check_memory

    schedule, copies = plan.schedule(), plan.copies()
    costs = build_costs(plan.workload, plan.cluster, plan.stages, plan.num_microbatches)
    timeline = simulate(schedule, costs, copies)
    check_memory(timeline)
    checked = Checked(
        plan=plan,
        timeline=timeline,
        step_ns=timeline.step_ns,
        bubble_fraction=timeline.bubble_fraction,
        peak_bytes=tuple(timeline.peak_bytes.tolist()),
    )
    _refuse_wrong_claims(checked)
    return checked


def _refuse_wrong_claims(checked: Checked) -> None:
    claims = checked.plan.predicted
    if claims is None:
        return
    if claims.step_ns is not None and claims.step_ns != checked.step_ns:
        raise BrokenPlanError(
            f"predicted.step_ns is {claims.step_ns}; the step takes {checked.step_ns} ns"
        )
    fraction = claims.bubble_fraction
    if fraction is not None and not abs(fraction - checked.bubble_fraction) <= BUBBLE_TOLERANCE:
        raise BrokenPlanError(
            f"predicted.bubble_fraction is {fraction!r}; it is {checked.bubble_fraction!r}"
        )
    if claims.peak_bytes is not None and claims.peak_bytes != checked.peak_bytes:
        if len(claims.peak_bytes) != len(checked.peak_bytes):
            raise BrokenPlanError(
                f"predicted.peak_bytes has {len(claims.peak_bytes)} entries; it has one a device, "
                f"so {len(checked.peak_bytes)}"
            )
        device, claimed, found = next(
            (device, claimed, found)
            for device, (claimed, found) in enumerate(
                zip(claims.peak_bytes, checked.peak_bytes, strict=True)
            )
            if claimed != found
        )
        raise BrokenPlanError(
            f"predicted.peak_bytes[{device}] is {claimed}; device {device} holds up to {found} "
            "bytes"
        )
    if claims.lower_bound_ns is not None and claims.lower_bound_ns > checked.step_ns:
        raise BrokenPlanError(
            f"predicted.lower_bound_ns is {claims.lower_bound_ns}; the step takes only "
            f"{checked.step_ns} ns, so it is no bound"
        )
