"""Bubbles handed over to fill jobs, in any training loop.

    filler = Filler([Work("mine", task, times_ns)])
    ...
    with filler.bubble(deadline_ns, free_bytes, arrived=is_here):   # handed over until then
        message.wait()                                              # taken back by now

Entering runs micro-steps, each only if it ends before the deadline with its own spread, and
returns by the deadline, or at once when `arrived()` says that the loop can go on. What is inside
runs with the device in the loop's hands again. A task that cannot be trusted to return runs in a
process of its own (`executor.fill.child`), which is paused when the bubble ends.

On a GPU micro-steps run on a stream of their own, and the filler waits for each to end: a kernel
that has been queued cannot be stopped, neither by this nor by pausing a process. What the loop
itself has queued is done first: give `before`, a function that waits for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from executor.fill.giving_way import giving_way, hurry, kept_off_ns, relax
from executor.fill.work import Work

if TYPE_CHECKING:
    from executor.fill.child import ChildWork

_NAP_S = 0.0003


@dataclass(slots=True)
class Handover:
    """One bubble: what ran in it. Times are `time.perf_counter_ns`."""

    began_ns: int
    deadline_ns: int
    over_ns: int = 0  # when the device was taken back
    busy_ns: int = 0
    late_ns: int = 0  # of the micro-step that ended last, after the deadline
    stopped_early: bool = False  # the loop could go on
    ran: list[tuple[str, int, int, int]] = field(default_factory=list)  # job, k, start, end


class Order:
    """Which micro-step of a job comes next; this one: pass after pass."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def peek(self) -> int | None:
        """Return the next micro-step, or None where none is to run now."""
        return self._work.next_of_one_pass()

    def pop(self) -> None:
        """Count it as run."""


def never() -> bool:
    """Say that the loop cannot go on yet."""
    return False


def run_until(
    work: Work,
    order: Order | Any,
    handover: Handover,
    *,
    must_ns: int,
    free_bytes: int | None,
    arrived: Callable[[], bool] = never,
) -> None:
    """Run micro-steps of one job until nothing more ends before the handover's deadline.

    Args:
        work: set up, not ended.
        order: says which micro-step is next.
        handover: what ran is noted there.
        must_ns: when the main job is thought to go on.
        free_bytes: what the job may hold; None: not limited.
        arrived: whether the main job can go on now; asked before each micro-step.
    """
    deadline, before = handover.deadline_ns, work.memory_now()
    clock, ran, off_ns = time.perf_counter_ns, False, kept_off_ns()
    with giving_way(), work.world():
        while (k := order.peek()) is not None:
            if clock() + work.estimates[k].safe_ns > deadline:
                if not ran:
                    work.estimates[k].refuse()
                break
            if free_bytes is not None and work.needs_bytes(k) > free_bytes:
                work.counts.refused_memory += 1
                break
            if arrived():
                handover.stopped_early = True
                break
            began, ended = work.run(k)
            order.pop()
            ran = True
            handover.ran.append((work.name, k, began, ended))
            handover.busy_ns += ended - began
            late = 0
            if ended > deadline:
                late = work.note_late(ended, deadline, must_ns + kept_off_ns() - off_ns)
            else:
                work.note_in_time()
            if late:
                handover.late_ns = late
                break
            if work.ended:
                break
    if ran:
        work.counts.bubbles += 1
        work.watch_memory(before, free_bytes)


class Filler:
    """Fill jobs of one device, one after the other, in whatever bubbles a loop announces.

    Args:
        works: jobs, cooperative or in processes of their own; the first that has not ended runs.
        before: called when a bubble begins, to wait for what the loop has queued on the device.
    """

    def __init__(
        self, works: Sequence[Work | ChildWork], before: Callable[[], None] | None = None
    ) -> None:
        self.works = list(works)
        self._before = before
        hurry()
        for work in self.works:
            if not work.is_set_up:
                work.setup()

    def current(self) -> Work | ChildWork | None:
        """Return the job that runs now; None where all have ended."""
        return next((work for work in self.works if not work.ended), None)

    @contextmanager
    def bubble(
        self,
        deadline_ns: int,
        free_bytes: int | None = None,
        *,
        arrived: Callable[[], bool] = never,
        must_ns: int | None = None,
    ) -> Iterator[Handover]:
        """Hand the device over until a deadline, and take it back.

        Args:
            deadline_ns: on the clock of `time.perf_counter_ns`; some time before the loop goes on.
            free_bytes: of the device's memory, for the job; None: not limited.
            arrived: whether the loop can go on now, then the device is taken back at once.
            must_ns: when the loop is thought to go on, by default at the deadline: a job that
                comes back later than this again and again is stopped.

        Yields what ran. Failures of jobs stay in them (`Work.failure`).
        """
        if self._before is not None:
            self._before()
        handover = Handover(began_ns=time.perf_counter_ns(), deadline_ns=deadline_ns)
        must_ns = deadline_ns if must_ns is None else must_ns
        while time.perf_counter_ns() < deadline_ns and not handover.stopped_early:
            work = self.current()
            if work is None:
                break
            if isinstance(work, Work):
                run_until(
                    work,
                    Order(work),
                    handover,
                    must_ns=must_ns,
                    free_bytes=free_bytes,
                    arrived=arrived,
                )
            else:
                work.run_until(handover, must_ns=must_ns, free_bytes=free_bytes, arrived=arrived)
            if not work.ended:
                break
        handover.over_ns = time.perf_counter_ns()
        yield handover

    def close(self) -> None:
        """Let all jobs go."""
        for work in self.works:
            work.close()
        relax()
