"""The fill plan's runs on one device: which job's turn it is, and what becomes of it.

Runs follow each other in the plan's order, each not before its beginning and not before the one
ahead of it has ended. A job that comes from another device, or in another configuration, waits
for its state; meanwhile nothing runs, and nothing waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from executor.fill.instructions import following, home
from executor.fill.moves import Moves
from executor.fill.task import make_task
from executor.fill.work import Work, words
from octotune.fill.plan import FillPlan, PackingEntry, RunEntry

if TYPE_CHECKING:
    import torch

    from executor.fill.child import ChildWork


class PlannedOrder:
    """What the fill plan has for the bubbles so far and did not run yet.

    Where a bubble has time left after that, `more` says what the plan has for the next one.
    """

    def __init__(self) -> None:
        self.pending: deque[int] = deque()
        self.more: Callable[[], list[int]] | None = None

    def peek(self) -> int | None:
        """Return the next micro-step, or None where none is to run now."""
        if not self.pending and self.more is not None:
            self.pending.extend(self.more())
        return self.pending[0] if self.pending else None

    def pop(self) -> None:
        """Count it as run."""
        self.pending.popleft()


@dataclass(slots=True)
class DeviceRun:
    """A run of the fill plan on this device."""

    number: int  # in fill.runs
    entry: RunEntry
    job: int
    work: Work | ChildWork
    steps: tuple[tuple[tuple[int, ...], ...], ...]
    waits_for: int | None  # the run that the job has before, elsewhere
    moves_on: bool  # another run of the job comes later, elsewhere
    order: PlannedOrder = field(default_factory=PlannedOrder)
    started: int | None = None  # the fill step
    ended: int | None = None
    base_samples: int = 0
    made: int | None = None  # when it ended
    given: int = 0  # bubbles whose work was handed out, from the cycle's beginning
    first_step: int | None = None  # where the cycle began
    hungry: int = 0  # bubbles in a row that were all too short for what comes next

    def planned_to(self, step: int, index: int) -> list[int]:
        """Return what the plan has up to a bubble of a filled step, and was not returned yet.

        Bubbles that the runtime did not meet are made up for. A run whose turn comes in the
        middle of a step begins its cycle with the next.
        """
        if self.first_step is None:
            self.first_step = step if index == 0 else step + 1
        until = (step - self.first_step) * len(self.steps[0]) + index + 1
        found: list[int] = []
        while self.given < until:
            found += self._give()
        return found

    def planned_next(self) -> list[int]:
        """Return, ahead of time, what the plan has for the next bubble with any work."""
        for _ in range(len(self.steps) * len(self.steps[0])):
            if found := self._give():
                return found
        return []

    def _give(self) -> list[int]:
        at, bubble = divmod(self.given, len(self.steps[0]))
        self.given += 1
        return list(self.steps[at % len(self.steps)][bubble])

    @property
    def samples_done(self) -> int:
        """Samples that this run has made."""
        if self.made is not None:
            return self.made
        return 0 if self.started is None else self.work.counts.samples - self.base_samples


def rests_anywhere(fill: FillPlan, packing: PackingEntry) -> bool:
    """Whether a packing's passes may stay open between any two bubbles of their device.

    Ahead of the plan a pass may wait where the plan has it done: its bytes need room there.
    """
    configuration = fill.configuration(packing)
    last = len(configuration.micro_steps) - 1
    passes = most = 0
    for k in (k for step in packing.steps for bubble in step for k in bubble):
        passes += k == 0
        most = max(most, passes)
        passes -= k == last
    held = configuration.resident_bytes + most * configuration.carried_bytes
    return held <= fill.resting_bytes[packing.device]


class DeviceQueue:
    """Runs of one device.

    Args:
        fill: the fill plan.
        device: which device of it this rank is.
        moves: how states come and go.
        torch_device: where jobs run.
        isolate: "plan", "all" or "none": which jobs get a process of their own.
        timeout_s: for processes to start and to answer.
        ahead: whether what time a bubble has left goes to the work of later ones.
    """

    def __init__(
        self,
        fill: FillPlan,
        device: int,
        moves: Moves,
        torch_device: torch.device,
        isolate: str,
        timeout_s: float,
        ahead: bool = False,
    ) -> None:
        self.fill = fill
        self._device = device
        self._moves = moves
        self._torch_device = torch_device
        self._isolate = isolate
        self._timeout_s = timeout_s
        self._ahead = ahead
        self.runs: Sequence[DeviceRun] = self._make_runs()
        self._at = 0
        self._asked_step = -1

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return all(run.ended is not None for run in self.runs)

    def close(self) -> None:
        """Let all jobs go."""
        for run in self.runs:
            run.work.close()

    def _make_runs(self) -> list[DeviceRun]:
        fill = self.fill
        works: dict[tuple[int, int], Work | ChildWork] = {}
        found: list[DeviceRun] = []
        pairs = following(fill)
        before, after = {b: a for a, b in pairs}, dict(pairs)
        for number in sorted(range(len(fill.runs)), key=lambda n: (fill.runs[n].begin, n)):
            entry = fill.runs[number]
            packing = fill.packings[entry.packing]
            if packing.device != self._device or entry.samples == 0:
                continue
            key = (packing.job, packing.configuration)
            if key not in works:
                works[key] = self._make_work(*key)
            here = home(fill, number)
            came, goes = before.get(number), after.get(number)
            run = DeviceRun(
                number=number,
                entry=entry,
                job=packing.job,
                work=works[key],
                steps=packing.steps,
                waits_for=None if came is None or home(fill, came) == here else came,
                moves_on=goes is not None and home(fill, goes) != here,
            )
            if self._ahead and rests_anywhere(fill, packing):
                run.order.more = run.planned_next
            found.append(run)
        for work in works.values():
            work.setup()
        return found

    def _make_work(self, job_number: int, configuration_number: int) -> Work | ChildWork:
        job = self.fill.jobs[job_number]
        configuration = job.configurations[configuration_number]
        micro = configuration.micro_steps
        apart = self._isolate == "all" or (self._isolate == "plan" and not job.trusted)
        if apart:
            from executor.fill.child import ChildWork

            return ChildWork(
                job,
                configuration_number,
                device=self._torch_device,
                seed=job_number,
                timeout_s=self._timeout_s,
            )
        return Work(
            job.name,
            make_task(job, configuration),
            [step.time_ns for step in micro],
            device=self._torch_device,
            memory_bytes=[step.memory_bytes for step in micro],
            carried_bytes=configuration.carried_bytes,
            seed=job_number,
        )

    def active(self, step: int) -> DeviceRun | None:
        """Return the run whose turn it is in a filled step; None: nothing is to run."""
        while self._at < len(self.runs):
            run = self.runs[self._at]
            if run.ended is not None:
                self._at += 1
                continue
            if step < run.entry.begin:
                return None
            if self._asked_step != step:
                self._asked_step = step
                if self._moves.is_cancelled(run.job):
                    run.work.cancel()
                    self.end(run, step)
                    continue
            if run.started is None and not self._start(run, step):
                return None
            if run.ended is None:
                return run
        return None

    def _start(self, run: DeviceRun, step: int) -> bool:
        """Begin a run if its job is here; a job that comes from elsewhere brings its state."""
        if run.waits_for is not None and not run.work.stopped:
            found = self._moves.fetch(run.waits_for)
            if found is None:
                return False
            state, lost = found
            if lost:
                run.work.fail(lost)
            else:
                run.work.load(state)
        run.started = step
        if not run.work.stopped:
            run.base_samples = run.work.counts.samples
            run.work.samples = run.base_samples + run.entry.samples
            return True
        self.end(run, step)
        return True

    def end(self, run: DeviceRun, step: int) -> None:
        """End a run: hand its job on, if it goes on elsewhere."""
        run.made = run.samples_done
        run.ended = step
        run.order.pending.clear()
        run.work.forget_passes()
        if not run.moves_on:
            return
        if run.work.done:
            try:
                self._moves.leave(run.number, run.work.state())
                return
            except Exception as error:
                run.work.fail(f"state_dict raised {words(error)}")
        self._moves.lose(run.number)
