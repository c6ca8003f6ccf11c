"""Fill: other jobs' work in the bubbles of a pipeline, by a fill plan.

    run = attach(pipe, fill_plan)        # every rank; jobs are made ready here
    for inputs, targets in batches:
        pipe.step(inputs, targets)       # waits are handed over
        with pipe.optimizer_step():
            optimizer.step()
    report = run.report()                # every rank

The plan's bubbles become bubble instructions: before which action, how long, how much memory. In
the first steps nothing is filled, the real waits are measured. From then on, where a rank would
wait, it works through what the fill plan has for that bubble, a micro-step at a time: a deadline
inside the usual wait, never until the message comes. What did not fit in time waits for a later
bubble. A micro-step that ends late makes less of that bubble handed over the next times.

The wait for the first forward and the time after the optimizer are bubbles like the others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from executor.agree import agree
from executor.bubble import Handover, run_until
from executor.errors import MismatchError
from executor.fill_instructions import (
    BEFORE_OPTIMIZER,
    TAIL,
    BubbleInstruction,
    bubble_instructions,
    following,
    refuse_other_plan,
)
from executor.fill_lengths import Lengths
from executor.fill_moves import Moves
from executor.fill_task import make_task
from executor.fill_work import Work, words
from executor.transport.threads import ThreadTransport
from octotune.errors import MalformedError
from octotune.fill.plan import FillPlan, RunEntry

if TYPE_CHECKING:
    from executor.fill_child import ChildWork
    from executor.pipeline import Pipeline

_SHRINK, _GROW, _LEAST_FACTOR = 0.9, 1.01, 0.3
_KEPT_STEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FillOptions:
    """How a fill plan is run.

    Args:
        profile_steps: so many steps at the start measure the waits; 0: the plan's lengths stand.
        alternate: fill every second step only, to see what it costs the main job.
        steps_end_together: whether all ranks wait for each other between two steps. Where they
            do not, a rank whose first action needs no message has no time to give after its
            optimizer: it begins the next step.
        margin: share of a wait that is kept, in place of the fill plan's.
        isolate: run jobs in processes of their own: "plan": those that the jobs file does not
            trust; "all"; "none".
        folder: where jobs that move between devices leave their state; all ranks see it.
    """

    profile_steps: int = 4
    alternate: bool = False
    steps_end_together: bool = False
    margin: float | None = None
    isolate: Literal["plan", "all", "none"] = "plan"
    folder: str | None = None


class PlannedOrder:
    """What the fill plan has for the bubbles so far and did not run yet."""

    def __init__(self) -> None:
        self.pending: deque[int] = deque()

    def peek(self) -> int | None:
        """Return the next micro-step, or None where none is to run now."""
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
    order: PlannedOrder
    waits_for: int | None  # the run that the job has before, elsewhere
    moves_on: bool  # another run of the job comes later, elsewhere
    started: int | None = None  # the fill step
    ended: int | None = None
    base_samples: int = 0


@dataclass(slots=True)
class FilledStep:
    """What was filled in one main step."""

    number: int  # of the main job
    filled: bool
    began_ns: int
    ended_ns: int = 0
    handovers: list[tuple[int, Handover]] = field(default_factory=list)  # bubble's index


def attach(pipe: Pipeline, fill: FillPlan, options: FillOptions | None = None) -> FillRun:
    """Run a fill plan beside a pipeline from its next step on. Every rank calls it.

    Raises:
        MismatchError: if the fill plan is for another plan, or a job cannot be made; on every
            rank.
    """
    name = pipe.transport.next_name() + "/fill"
    refused: Exception | None = None
    run: FillRun | None = None
    try:
        if isinstance(pipe.transport, ThreadTransport) and pipe.transport.world_size > 1:
            raise MismatchError(
                "fill jobs need a process a rank: ranks that are threads share the random "
                "numbers that a job is kept away from"
            )
        refuse_other_plan(pipe.plan, fill)
        run = FillRun(pipe, fill, FillOptions() if options is None else options, name)
    except (MalformedError, ValueError) as error:
        refused = error
    agree(pipe.transport, f"{name}/attach", refused, pipe.timeout_s)
    assert run is not None
    pipe.attach_fill(run)
    return run


class FillRun:
    """One rank's part of a fill plan. `Pipeline` and `Runtime` call the hooks."""

    def __init__(self, pipe: Pipeline, fill: FillPlan, options: FillOptions, name: str) -> None:
        self.fill = fill
        self.options = options
        self._pipe = pipe
        self.device = pipe.device_index
        self._leads = pipe.replica == 0  # other replicas' bubbles stay empty
        runtime = pipe.runtime
        self._mailbox = runtime.mailbox
        self._clock = runtime.clock
        self._on_cuda = pipe.device.type == "cuda"
        program = runtime.program
        self._program = program
        row = [str(op.action) for op in program.ops]
        self.instructions = bubble_instructions(fill, self.device, row)
        self._table = {each.position: each for each in self.instructions}
        self.lengths = Lengths(
            program, {i.position: i.length_ns for i in self.instructions if i.position >= 0}
        )
        self._factor = dict.fromkeys(self._table, 1.0)
        self._margin = fill.margins.margin if options.margin is None else options.margin
        self._switch_ns = fill.margins.switch_ns
        self._waits_first = bool(program.ops) and program.ops[0].needs is not None
        self._began = [-1] * len(program.ops)
        self._stretch = 1.0  # measured step / planned step
        self._moves = Moves(
            pipe.transport,
            name,
            any(self._home(number) != self._home(before) for before, number in following(fill)),
            options.folder,
            pipe.timeout_s,
        )
        self._queue = self._make_runs() if self._leads else []
        self._at = 0
        self._number = -1
        self._fill_step = -1
        self._filling = False
        self._tail_open = False
        self._tail_from_ns = 0
        self._asked_step = -1
        self._plain_ns: list[int] = []
        self._filled_ns: list[int] = []
        self.steps: deque[FilledStep] = deque(maxlen=_KEPT_STEPS)
        self.busy_ns = 0
        self.handed_ns = 0
        self.bubble_ns = 0
        self.num_filled_steps = 0
        self.notes: list[str] = []
        self._now: FilledStep | None = None
        runtime.pool.watch()

    # --- making ready ----------------------------------------------------------------------

    def _make_runs(self) -> list[DeviceRun]:
        fill = self.fill
        works: dict[tuple[int, int], Work | ChildWork] = {}
        found: list[DeviceRun] = []
        pairs = following(fill)
        before, after = {b: a for a, b in pairs}, dict(pairs)
        for number in sorted(range(len(fill.runs)), key=lambda n: (fill.runs[n].begin, n)):
            entry = fill.runs[number]
            packing = fill.packings[entry.packing]
            if packing.device != self.device or entry.samples == 0:
                continue
            key = (packing.job, packing.configuration)
            if key not in works:
                works[key] = self._make_work(*key)
            here = self._home(number)
            came, goes = before.get(number), after.get(number)
            found.append(
                DeviceRun(
                    number=number,
                    entry=entry,
                    job=packing.job,
                    work=works[key],
                    steps=packing.steps,
                    order=PlannedOrder(),
                    waits_for=None if came is None or self._home(came) == here else came,
                    moves_on=goes is not None and self._home(goes) != here,
                )
            )
        for work in works.values():
            work.setup()
        return found

    def _home(self, number: int) -> tuple[int, int]:
        """Return where a run is: device, configuration."""
        packing = self.fill.packings[self.fill.runs[number].packing]
        return packing.device, packing.configuration

    def _make_work(self, job_number: int, configuration_number: int) -> Work | ChildWork:
        job = self.fill.jobs[job_number]
        configuration = job.configurations[configuration_number]
        micro = configuration.micro_steps
        apart = self.options.isolate == "all" or (
            self.options.isolate == "plan" and not job.trusted
        )
        if apart:
            from executor.fill_child import ChildWork

            return ChildWork(
                job,
                configuration_number,
                device=self._pipe.device,
                seed=job_number,
                timeout_s=self._pipe.timeout_s,
            )
        return Work(
            job.name,
            make_task(job, configuration),
            [step.time_ns for step in micro],
            device=self._pipe.device,
            memory_bytes=[step.memory_bytes for step in micro],
            carried_bytes=configuration.carried_bytes,
            seed=job_number,
        )

    # --- hooks -----------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a main step."""
        if self._tail_open:  # the loop does not say where its optimizer ends
            self.end_step()
        self._number += 1
        profiling = self._number < self.options.profile_steps
        since = self._number - self.options.profile_steps
        self._filling = (
            self._leads and not profiling and (since % 2 == 1 or not self.options.alternate)
        )
        if self._filling:
            self._fill_step += 1
            self.num_filled_steps += 1
        now = time.perf_counter_ns()
        self._now = FilledStep(number=self._number, filled=self._filling, began_ns=now)
        self.steps.append(self._now)
        self._tail_open = True

    def before(self, position: int) -> None:
        """Be where the rank would wait for the message of an action: hand the device over."""
        if position not in self._table or not self._filling:
            self._began[position] = time.perf_counter_ns()
            return
        if self._on_cuda:
            self._clock.synchronize()  # the host is ahead of the device
        now = self._began[position] = time.perf_counter_ns()
        must_ns = now + self.lengths.length_ns(position)
        before, gap_ns = self.lengths.before(position), self.lengths.gap_ns(position)
        if before is not None and gap_ns is not None:
            must_ns = min(must_ns, self._mailbox.arrived_ns(before) + gap_ns)
        self._hand_over(
            self._table[position], now, must_ns, partial(self._mailbox.is_here, position)
        )

    def before_optimizer(self) -> None:
        """Be where the rank has run its actions and would wait for reductions."""
        self._open_end(BEFORE_OPTIMIZER)

    def end_step(self) -> None:
        """Be where the rank's optimizer has run and the others' may not have."""
        if not self._tail_open:
            return
        self._tail_open = False
        now, step = time.perf_counter_ns(), self._now
        assert step is not None
        step.ended_ns = now
        self._learn(step)
        if self.options.steps_end_together or self._waits_first:
            self._open_end(TAIL)

    def _open_end(self, position: int) -> None:
        instruction = self._table.get(position)
        if instruction is None or not self._filling:
            return
        now = time.perf_counter_ns()
        must_ns = now + int(instruction.length_ns * min(1.0, self._stretch))
        self._hand_over(instruction, now, must_ns, _not_known)

    def _learn(self, step: FilledStep) -> None:
        arrived = [-1] * len(self._began)
        for position in self.lengths.positions:
            arrived[position] = self._mailbox.arrived_ns(position)
        self.lengths.note(self._began, arrived, step.began_ns, not step.filled)
        for position in range(len(self._began)):
            self._began[position] = -1
        if self._number + 1 == self.options.profile_steps:
            # the first step learns shapes, and is no example
            self.lengths.settle(skip=1 if self.options.profile_steps > 1 else 0)

    # --- a bubble --------------------------------------------------------------------------

    def _hand_over(
        self, instruction: BubbleInstruction, now: int, must_ns: int, arrived: Any
    ) -> None:
        run = self._active()
        length = must_ns - now
        self.bubble_ns += max(0, length)
        if run is None:
            return
        cycle = run.steps[(self._fill_step - (run.started or 0)) % len(run.steps)]
        if isinstance(run.work, Work):
            run.order.pending.extend(cycle[instruction.index])
        else:
            run.work.allow(len(cycle[instruction.index]))
        factor = self._factor[instruction.position]
        handed = int((length - self._switch_ns) * (1.0 - self._margin) * factor)
        if handed <= 0:
            return
        self.handed_ns += handed
        handover = Handover(began_ns=now, deadline_ns=now + handed)
        self._spend(run, handover, must_ns, instruction, arrived)
        handover.over_ns = time.perf_counter_ns()
        self.busy_ns += handover.busy_ns
        if handover.late_ns:
            self._factor[instruction.position] = max(_LEAST_FACTOR, factor * _SHRINK)
        elif factor < 1.0:
            self._factor[instruction.position] = min(1.0, factor * _GROW)
        assert self._now is not None
        self._now.handovers.append((instruction.index, handover))

    def _spend(
        self,
        run: DeviceRun,
        handover: Handover,
        must_ns: int,
        instruction: BubbleInstruction,
        arrived: Any,
    ) -> None:
        # a plan whose cluster has no memory limit leaves "all" free
        free = instruction.free_bytes
        if isinstance(run.work, Work):
            run_until(
                run.work,
                run.order,
                handover,
                must_ns=must_ns,
                free_bytes=free,
                arrived=arrived,
            )
        else:
            run.work.run_until(handover, must_ns=must_ns, free_bytes=free, arrived=arrived)
        if run.work.ended:
            self._end(run, handover)

    def _active(self) -> DeviceRun | None:
        """Return the run whose turn it is; None where there is none yet, or no more."""
        while self._at < len(self._queue):
            run = self._queue[self._at]
            if run.started is None:
                if self._fill_step < run.entry.begin or not self._start(run):
                    return None
                continue
            if run.ended is None:
                if self._asked_step != self._fill_step:
                    self._asked_step = self._fill_step
                    if self._moves.is_cancelled(run.job):
                        run.work.cancel()
                        self._end(run, None)
                        continue
                return run
            self._at += 1
        return None

    def _start(self, run: DeviceRun) -> bool:
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
        run.started = self._fill_step
        if not run.work.stopped:
            run.base_samples = run.work.counts.samples
            run.work.samples = run.base_samples + run.entry.samples
            return True
        self._end(run, None)
        return True

    def _end(self, run: DeviceRun, handover: Handover | None) -> None:
        """End a run: hand its job on, if it goes on elsewhere."""
        run.ended = self._fill_step
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

    # --- from outside ----------------------------------------------------------------------

    def cancel(self, name: str) -> None:
        """Cancel a job, from any rank: it stops with the main step after the next at the latest.

        Raises MalformedError if there is no such job.
        """
        names = [job.name for job in self.fill.jobs]
        if name not in names:
            raise MalformedError(f"there is no fill job {name!r}; there are {', '.join(names)}")
        self._moves.cancel(names.index(name))

    @property
    def done(self) -> bool:
        """Whether nothing is left to do on this rank."""
        return all(run.ended is not None for run in self._queue)

    @property
    def runs(self) -> Sequence[DeviceRun]:
        """This device's runs of the fill plan, by their beginning."""
        return self._queue

    def close(self) -> None:
        """Let all jobs go; call it after the last step."""
        for run in self._queue:
            run.work.close()
        self._moves.close()


def _not_known() -> bool:
    return False
