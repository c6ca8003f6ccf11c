"""How short a step can get by moving its W's, whatever the rule.

The order of F, I and B stays. Without any W each of them starts as early as it ever can; a W may
start when its I has ended. A device then has jobs with release times, and it cannot end before
any one time plus all the work that is released from then on. A rule that knew every duration
beforehand would be bound by it too.
"""

from __future__ import annotations

import numpy as np

from simulator.actions import Kind, Schedule, kind_of, microbatch_of, stage_of
from simulator.costs import Costs
from simulator.floating import Int64, nominal_durations, simulate_floating


def least_step_ns(schedule: Schedule, costs: Costs, *, durations_ns: Int64 | None = None) -> int:
    """Return a time in which no step with this order of F, I and B ends, without memory limits.

    Args:
        schedule: obeys `simulator.validate`, has an end.
        costs: links, and the durations where `durations_ns` gives none.
        durations_ns: of each action [A], each at least 1.

    Raises:
        ScheduleError: if transfers share NICs.
        DeadlockError: if the order cannot run.
    """
    if durations_ns is None:
        durations_ns = nominal_durations(schedule, costs)
    codes = np.asarray(schedule.codes)
    stages, kinds, microbatches = stage_of(codes), kind_of(codes), microbatch_of(codes)
    is_w = kinds == int(Kind.W)
    spans = [slice(a, b) for a, b in zip(schedule.offsets, schedule.offsets[1:], strict=False)]
    bare = Schedule.from_codes([codes[span][~is_w[span]].tolist() for span in spans])
    run = simulate_floating(bare, costs, durations_ns=durations_ns[~is_w], floating=False)

    released = np.zeros(len(codes), dtype=np.int64)
    released[~is_w] = run.start_ns
    ended = np.zeros((costs.num_stages, costs.num_microbatches), dtype=np.int64)
    is_i = kinds == int(Kind.I)
    ended[stages[is_i], microbatches[is_i]] = run.end_ns[is_i[~is_w]]
    released[is_w] = ended[stages[is_w], microbatches[is_w]]

    least = 0
    for span in spans:
        if span.start == span.stop:
            continue
        order = np.argsort(released[span], kind="stable")
        work = durations_ns[span][order]
        from_here = np.cumsum(work[::-1])[::-1]
        least = max(least, int((released[span][order] + from_here).max()))
    return least
