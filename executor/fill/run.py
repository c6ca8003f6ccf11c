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

from executor.agree import agree, gather
from executor.bubble import Handover, run_until
from executor.errors import MismatchError
from executor.fill import confirm
from executor.fill.giving_way import hurry, relax
from executor.fill.instructions import (
    BEFORE_OPTIMIZER,
    TAIL,
    BubbleInstruction,
    bubble_instructions,
    moves_at_all,
    refuse_other_plan,
)
from executor.fill.lengths import Lengths
from executor.fill.moves import Moves
from executor.fill.queue import DeviceQueue, DeviceRun
from executor.fill.state import StateAway
from executor.fill.work import Work, words
from executor.transport.threads import ThreadTransport
from octotune.errors import MalformedError
from octotune.fill.plan import FillPlan

if TYPE_CHECKING:
    import torch

    from executor.pipeline import Pipeline
    from octotune.fill.outcome import FillOutcome

_SHRINK, _GROW, _LEAST_FACTOR = 0.9, 1.01, 0.3
_KEPT_STEPS = 8
_KEPT_TIMES = 1024
_HUNGRY_STEPS = 16
KEPT_OF_MARGIN = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class FillOptions:
    """How a fill plan is run.

    Args:
        profile_steps: so many steps at the start measure the waits; 0: the plan's lengths stand.
        alternate: fill every second step only, to see what it costs the main job.
        steps_end_together: whether all ranks wait for each other between two steps. Where they
            do not, a rank whose first action needs no message has no time to give after its
            optimizer: it begins the next step.
        margin: share of a wait that is kept; by default 0.7 of the fill plan's, so that what it
            packs fits with its spread.
        confirm: after profiling, lengthen one wait of each device until the main step gets longer,
            and hand over no larger share than did no harm; takes steps (`confirm.num_steps`).
        isolate: run jobs in processes of their own: "plan": those that the jobs file does not
            trust; "all"; "none".
        folder: where jobs that move between devices leave their state; all ranks see it.
        ahead: give what time a bubble has left after its planned work to that of later bubbles:
            more samples than the plan has, at a pace that only the real bubbles say. Not for jobs
            in processes of their own, nor where a pass that waits may find no room.
    """

    profile_steps: int = 4
    alternate: bool = False
    steps_end_together: bool = False
    margin: float | None = None
    confirm: bool = False
    isolate: Literal["plan", "all", "none"] = "plan"
    folder: str | None = None
    ahead: bool = False


@dataclass(slots=True)
class FilledStep:
    """What was filled in one main step."""

    number: int  # of the main job
    filled: bool
    began_ns: int
    ended_ns: int = 0
    handovers: list[tuple[int, Handover]] = field(default_factory=list)  # bubble's index


def attach(
    pipe: Pipeline,
    fill: FillPlan,
    options: FillOptions | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> FillRun:
    """Run a fill plan beside a pipeline from its next step on. Every rank calls it.

    Args:
        pipe: not stepped yet.
        fill: made for its plan.
        options: how.
        optimizer: this rank's, whose state leaves for the host where the fill plan has it so.

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
        run.away = StateAway.of(pipe, fill, optimizer)
    except (MalformedError, ValueError) as error:
        refused = error
    agree(pipe.transport, f"{name}/attach", refused, pipe.timeout_s)
    assert run is not None
    pipe.attach_fill(run)
    hurry()
    return run


class FillRun:
    """One rank's part of a fill plan. `Pipeline` and `Runtime` call the hooks."""

    def __init__(self, pipe: Pipeline, fill: FillPlan, options: FillOptions, name: str) -> None:
        self.fill = fill
        self.options = options
        self._pipe = pipe
        self._name = name
        self.transport = pipe.transport
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
        # the plan fills what it hands over to the brim; here micro-steps' spread needs some room
        self._margin = (
            KEPT_OF_MARGIN * fill.margins.margin if options.margin is None else options.margin
        )
        self._switch_ns = fill.margins.switch_ns
        self._waits_first = bool(program.ops) and program.ops[0].needs is not None
        self._began = [-1] * len(program.ops)
        self._moves = Moves(
            pipe.transport,
            name,
            [job.name for job in fill.jobs],
            moves_at_all(fill),
            options.folder,
            pipe.timeout_s,
        )
        self._queue: DeviceQueue | None = None
        if self._leads:
            self._queue = DeviceQueue(
                fill,
                self.device,
                self._moves,
                pipe.device,
                options.isolate,
                pipe.timeout_s,
                options.ahead,
            )
        self._number = -1
        self._fill_step = -1
        self._filling = False
        self._tail_open = False
        self._times: deque[tuple[int, int, int, bool]] = deque(maxlen=_KEPT_TIMES)
        self.steps: deque[FilledStep] = deque(maxlen=_KEPT_STEPS)
        self.busy_ns = 0
        self.handed_ns = 0
        self.bubble_ns = 0
        self.num_filled_steps = 0
        self.confirmed: float | None = None
        self._sleep_share = 0.0
        self._num_devices = len(fill.plan.cluster.devices)
        self._first_filled = options.profile_steps + (
            confirm.num_steps(self._num_devices) if options.confirm else 0
        )
        self._now: FilledStep | None = None
        self.away: StateAway | None = None
        self._num_reports = 0
        runtime.pool.watch()

    # --- hooks -----------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a main step."""
        if self._tail_open:  # the loop does not say where its optimizer ends
            self.end_step()
        self._number += 1
        since = self._number - self._first_filled
        self._filling = since >= 0 and (since % 2 == 1 or not self.options.alternate)
        tried = confirm.trial(self._number - self.options.profile_steps, self._num_devices)
        self._sleep_share = 0.0
        if since < 0 and tried is not None and tried[0] == self.device and self._leads:
            self._sleep_share = tried[1]
        if self._filling:
            self._fill_step += 1
            self.num_filled_steps += 1
        now = time.perf_counter_ns()
        self._now = FilledStep(number=self._number, filled=self._filling, began_ns=now)
        self.steps.append(self._now)
        self._tail_open = True
        if self._filling and self.away is not None:
            self.away.leave()

    def before(self, position: int) -> None:
        """Be where the rank would wait for the message of an action: hand the device over."""
        if position not in self._table or not self._filling:
            self._began[position] = time.perf_counter_ns()
            if self._sleep_share and position == self._longest:
                time.sleep(self.lengths.length_ns(position) * self._sleep_share / 1e9)
                self._began[position] = -1  # no example
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
        if self.away is not None:
            self.away.come_back()
        self._open_end(BEFORE_OPTIMIZER)

    def end_step(self) -> None:
        """Be where the rank's optimizer has run and the others' may not have."""
        if not self._tail_open:
            return
        self._tail_open = False
        now, step = time.perf_counter_ns(), self._now
        assert step is not None
        step.ended_ns = now
        self._times.append((step.number, step.began_ns, now, step.filled))
        self._learn(step)
        if self.options.steps_end_together or self._waits_first:
            self._open_end(TAIL)

    def _open_end(self, position: int) -> None:
        instruction = self._table.get(position)
        if instruction is None or not self._filling:
            return
        now = time.perf_counter_ns()
        must_ns = now + instruction.length_ns
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
        if self.options.confirm and self._number + 1 == self._first_filled:
            self._confirm()

    def _confirm(self) -> None:
        """Put all ranks' times together, and say what this device's waits are good for."""
        found = gather(
            self.transport,
            f"{self._name}/confirm",
            [time[1:3] for time in self._times],
            self._pipe.timeout_s,
        )
        found = found[: self._num_devices]
        lengths = [
            max(time[1] for time in times) - min(time[0] for time in times)
            for times in zip(*found, strict=True)
        ]
        plain = lengths[min(1, self.options.profile_steps - 1) : self.options.profile_steps]
        tried = lengths[self.options.profile_steps :]
        self.confirmed = confirm.confirmed(plain, tried, self._num_devices)[self.device]

    @property
    def _longest(self) -> int:
        """The position of the longest wait for a message."""
        return max(
            (i.position for i in self.instructions if i.position >= 0),
            key=self.lengths.length_ns,
            default=-1,
        )

    # --- a bubble --------------------------------------------------------------------------

    def _hand_over(
        self, instruction: BubbleInstruction, now: int, must_ns: int, arrived: Any
    ) -> None:
        """Hand a bubble over; whatever goes wrong ends fill work here, and never the main job."""
        try:
            self._give(instruction, now, must_ns, arrived)
        except Exception as error:
            for run in self.runs:
                if run.ended is None:
                    run.work.fail(f"the fill runtime could not go on: {words(error)}")
                    run.ended = self._fill_step
            self._filling = False

    def _give(self, instruction: BubbleInstruction, now: int, must_ns: int, arrived: Any) -> None:
        run = None if self._queue is None else self._queue.active(self._fill_step)
        length = must_ns - now
        self.bubble_ns += max(0, length)
        if self.confirmed is not None:
            length = int(length * min(1.0, self.confirmed))
        if run is None:
            return
        planned = run.planned_to(self._fill_step, instruction.index)
        if isinstance(run.work, Work):
            run.order.pending.extend(planned)
        else:
            run.work.allow(len(planned))
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
        self._refuse_hungry(run, handover)

    def _refuse_hungry(self, run: DeviceRun, handover: Handover) -> None:
        """End a run whose next micro-step is longer than all that is ever handed over."""
        if handover.ran or handover.stopped_early or not run.order.pending:
            run.hungry = 0 if handover.ran else run.hungry
            return
        run.hungry += 1
        if run.hungry < _HUNGRY_STEPS * len(self.instructions) or not isinstance(run.work, Work):
            return
        k, longest = run.order.pending[0], max(map(self.lengths.length_ns, self._table))
        safe_ns = run.work.estimates[k].safe_ns
        if safe_ns <= (longest - self._switch_ns) * (1.0 - self._margin):
            run.hungry = 0  # late work made too little of the bubbles handed over: once more
            self._factor = dict.fromkeys(self._table, 1.0)
            return
        run.work.fail(
            f"its micro-step {k} takes {safe_ns / 1e6:.1f} ms with its spread and fits in no "
            f"bubble; the longest one is {longest / 1e6:.1f} ms"
        )
        self._end(run)

    def _end(self, run: DeviceRun) -> None:
        assert self._queue is not None
        self._queue.end(run, self._fill_step)

    def _spend(
        self,
        run: DeviceRun,
        handover: Handover,
        must_ns: int,
        instruction: BubbleInstruction,
        arrived: Any,
    ) -> None:
        free = instruction.free_bytes
        if self.away is not None:
            free -= self.away.missing_bytes(instruction, handover.deadline_ns)
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
        if self.away is not None:
            self.away.after(instruction)
        if run.work.ended:
            self._end(run)

    # --- from outside ----------------------------------------------------------------------

    def cancel(self, name: str) -> None:
        """Cancel a job, from any rank: it stops with the main step after the next at the latest.

        Raises MalformedError if there is no such job.
        """
        names = [job.name for job in self.fill.jobs]
        if name not in names:
            raise MalformedError(f"there is no fill job {name!r}; there are {', '.join(names)}")
        self._moves.cancel(names.index(name))

    def step_times(self) -> list[tuple[int, int, int, bool]]:
        """Return number, begin, end (on rank 0's clock), and whether it was filled, by step."""
        offset = self._pipe.clock_offset_ns
        return [(n, began + offset, end + offset, f) for n, began, end, f in self._times]

    def report(self) -> FillOutcome:
        """Return what all ranks did. Every rank calls it, before `close`."""
        from executor.fill.report import report

        self._num_reports += 1
        key = f"{self._name}/report/{self._num_reports}"
        return report(self, key, self._pipe.timeout_s)

    @property
    def done(self) -> bool:
        """Whether nothing is left to do on this rank."""
        return self._queue is None or self._queue.done

    @property
    def runs(self) -> Sequence[DeviceRun]:
        """This device's runs of the fill plan, by their beginning."""
        return () if self._queue is None else self._queue.runs

    def close(self) -> None:
        """Let all jobs go; call it after the last step."""
        if self._queue is not None:
            self._queue.close()
        self._moves.close()
        relax()


def _not_known() -> bool:
    return False
