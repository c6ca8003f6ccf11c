"""Two timelines of the same actions side by side: where a run left its prediction.

Actions are matched by what they are, not by where they stand in a row, as a run may let weight
gradients float. All differences are second minus first: above 0, the second is later or longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.actions import Kind, kind_of, stage_of, unpack
from simulator.bubbles import Bubbles, Cause
from simulator.errors import MismatchError
from simulator.timeline import Timeline, recorded_ns

Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Difference:
    """The second timeline minus the first, in ns.

    A actions in the order of the first's `schedule.codes`, S stages, m microbatches, D devices.
    Where one of the timelines did not record a thing, its difference is 0 and `known` is False.
    """

    codes: Int64  # [A] packed actions
    known: Bool  # [A] both timelines recorded start and end
    start_ns: Int64  # [A]
    duration_ns: Int64  # [A]
    gap_ns: Int64  # [A] idle time of the device directly before the action

    forward_known: Bool  # [S, m] both recorded when the transfer left and arrived
    forward_flight_ns: Int64  # [S, m] from leaving to arriving
    backward_known: Bool  # [S, m]
    backward_flight_ns: Int64  # [S, m]

    step_ns: int
    busy_ns: Int64  # [D]
    idle_ns: Int64  # [D] the sum of the next
    idle_by_cause: dict[Cause, Int64]  # [D] each

    def duration_by_stage(self, num_stages: int) -> Int64:
        """Return the mean difference in duration by stage and kind [num_stages, 4], rounded.

        0 where no action of that stage and kind was recorded by both.
        """
        place = stage_of(self.codes) * len(Kind) + kind_of(self.codes)
        place = place[self.known]
        size = num_stages * len(Kind)
        sums = np.zeros(size, np.int64)
        np.add.at(sums, place, self.duration_ns[self.known])
        counts = np.bincount(place, minlength=size)
        means: Int64 = np.rint(sums / np.maximum(counts, 1)).astype(np.int64)
        return means.reshape(num_stages, len(Kind))

    def largest(self, count: int) -> tuple[tuple[str, int], ...]:
        """Return the actions whose durations differ most, as (word, ns), largest first."""
        order = np.argsort(-np.abs(self.duration_ns), kind="stable")
        order = order[self.known[order]][:count]
        return tuple((str(unpack(self.codes[at])), int(self.duration_ns[at])) for at in order)


def difference(first: Timeline, second: Timeline) -> Difference:
    """Return how the second timeline differs from the first: measured from simulated, say.

    Raises:
        MismatchError: if they do not run the same actions on the same devices.
    """
    match = _matching(first, second)
    known_first = (first.start_ns >= 0) & (first.end_ns >= 0)
    known_second = ((second.start_ns >= 0) & (second.end_ns >= 0))[match]
    known = known_first & known_second
    bubbles, other_bubbles = first.bubbles(), second.bubbles()
    gaps = _gaps(other_bubbles, first.schedule.codes) - _gaps(bubbles, first.schedule.codes)
    idle, other_idle = bubbles.ns_by_cause(), other_bubbles.ns_by_cause()
    by_cause = {cause: other_idle[cause] - idle[cause] for cause in Cause}
    forward_known, forward_flight = _flights(
        (first.forward_sent_ns, first.forward_arrived_ns),
        (second.forward_sent_ns, second.forward_arrived_ns),
    )
    backward_known, backward_flight = _flights(
        (first.backward_sent_ns, first.backward_arrived_ns),
        (second.backward_sent_ns, second.backward_arrived_ns),
    )
    return Difference(
        codes=first.schedule.codes,
        known=known,
        start_ns=np.where(known, second.start_ns[match] - first.start_ns, 0),
        duration_ns=np.where(
            known,
            recorded_ns(second.start_ns, second.end_ns)[match]
            - recorded_ns(first.start_ns, first.end_ns),
            0,
        ),
        gap_ns=np.where(known, gaps, 0),
        forward_known=forward_known,
        forward_flight_ns=forward_flight,
        backward_known=backward_known,
        backward_flight_ns=backward_flight,
        step_ns=second.step_ns - first.step_ns,
        busy_ns=second.busy_ns - first.busy_ns,
        idle_ns=np.sum(list(by_cause.values()), axis=0, dtype=np.int64),
        idle_by_cause=by_cause,
    )


def _matching(first: Timeline, second: Timeline) -> Int64:
    """Return where each action of the first stands in the second [A]."""
    ours, theirs = first.schedule, second.schedule
    if ours.num_devices != theirs.num_devices:
        raise MismatchError(
            f"one timeline has {ours.num_devices} devices, the other {theirs.num_devices}; "
            "only runs of the same plan have a difference"
        )
    if not np.array_equal(first.costs.stage_device, second.costs.stage_device):
        raise MismatchError(
            "the timelines' stages are on different devices; only runs of the same plan have a "
            "difference"
        )
    if first.forward_sent_ns.shape != second.forward_sent_ns.shape:
        raise MismatchError(
            f"one timeline has {first.forward_sent_ns.shape[1]} microbatches, the other "
            f"{second.forward_sent_ns.shape[1]}; only runs of the same plan have a difference"
        )
    odd = np.setxor1d(ours.codes, theirs.codes)
    if len(odd):
        which = "first" if odd[0] in ours.codes else "second"
        raise MismatchError(
            f"only the {which} timeline runs {unpack(odd[0])}; only runs of the same plan have a "
            "difference"
        )
    # same stages on the same devices: same actions in all means same actions in each row
    match = np.empty(ours.num_actions, dtype=np.int64)
    match[np.argsort(ours.codes)] = np.argsort(theirs.codes)
    return match


def _gaps(bubbles: Bubbles, codes: Int64) -> Int64:
    """Return the idle time directly before each action."""
    before = bubbles.before >= 0
    order = np.argsort(codes)
    place = order[np.searchsorted(codes[order], bubbles.before[before])]
    gaps = np.zeros(len(codes), np.int64)
    np.add.at(gaps, place, bubbles.duration_ns[before])
    return gaps


def _flights(first: tuple[Int64, Int64], second: tuple[Int64, Int64]) -> tuple[Bool, Int64]:
    known = np.logical_and.reduce([times >= 0 for times in (*first, *second)])
    flight = (second[1] - second[0]) - (first[1] - first[0])
    return known, np.where(known, flight, 0)
