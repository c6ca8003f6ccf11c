"""A fleet: the bubbles of many devices, and a queue of fill jobs over days.

The main job repeats its step on every replica of the pipeline; what its bubbles are worth to a
kind of job on a class of devices (a stage) is known: so many samples in a cycle of so many steps.
Time therefore passes in whole main steps, and jumps from one event to the next: a job arrives, is
cancelled, fails, reaches a checkpoint or ends. A free device gets the waiting job that the policy
scores highest. A job that gave its device up at a checkpoint, or failed, continues from there.

    device 0  |job 3        |job 7 ...x            (x: fails, back to its checkpoint)
    device 1  |job 1   |job 4                |job 7 ....
    queue      2 4 5 7 ...

Events of one step are taken in the order ends, checkpoints and failures; cancellations; arrivals;
then free devices are given out.

Source:
    Arfeen et al. 2024, arXiv:2410.07192, sections on the fill job scheduler and its simulator.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from simulator.fleet_values import (
    NEVER,
    Fleet,
    FleetResult,
    Policy,
    Rules,
    Score,
    State,
    Status,
    Trace,
    Waiting,
)

__all__ = [
    "NEVER",
    "Fleet",
    "FleetResult",
    "Policy",
    "Rules",
    "Score",
    "State",
    "Status",
    "Trace",
    "Waiting",
    "simulate_fleet",
]

Int64 = NDArray[np.int64]

_NS_PER_HOUR = 3600 * 10**9
_END, _CHECKPOINT, _FAILURE, _CANCEL, _ARRIVAL = range(5)


def simulate_fleet(
    fleet: Fleet,
    trace: Trace,
    policy: Policy,
    rules: Rules | None = None,
    progress: Callable[[float], None] | None = None,
) -> FleetResult:
    """Run the fleet until all jobs have ended, or to the rules' horizon.

    Takes one call of the policy for each event that leaves a device free and a job waiting (one
    for each class of free devices); a call is linear in the number of waiting jobs.

    Args:
        fleet: devices and rates.
        trace: jobs.
        policy: scores the waiting jobs.
        rules: checkpoints, moves, failures, horizon.
        progress: told the share of jobs that have ended, or of the time, now and then.
    """
    return _Run(fleet, trace, policy, Rules() if rules is None else rules, progress).result()


@dataclass(slots=True)
class _Device:
    """A device that runs a job. `event` is the only one of its events that still counts."""

    job: int
    begin: int  # step
    works_from: int  # step: after the checkpoint is restored
    end: int
    fails: int
    left: int  # samples, at works_from
    event: int


@dataclass(slots=True)
class _Log:
    job: list[int] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    begin: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)


class _Run:
    """The state of one simulation."""

    def __init__(
        self,
        fleet: Fleet,
        trace: Trace,
        policy: Policy,
        rules: Rules,
        progress: Callable[[float], None] | None,
    ) -> None:
        self.fleet, self.trace, self.policy, self.rules = fleet, trace, policy, rules
        self.progress = progress
        num_jobs, self.classes = trace.num_jobs, fleet.device_class.tolist()
        self.left = np.array(trace.samples, dtype=np.int64)
        self.need = np.full((num_jobs, fleet.num_classes), NEVER, dtype=np.int64)  # steps
        self.best = np.full(num_jobs, NEVER, dtype=np.int64)
        self.status = np.full(num_jobs, Status.WAITING, dtype=np.int64)
        self.end = np.full(num_jobs, NEVER, dtype=np.int64)
        self.first = np.full(num_jobs, NEVER, dtype=np.int64)
        self.failures = np.zeros(num_jobs, dtype=np.int64)
        self.moves = np.zeros(num_jobs, dtype=np.int64)
        self.queue = np.zeros(num_jobs, dtype=np.int64)
        self.place = np.full(num_jobs, -1, dtype=np.int64)  # in the queue
        self.waiting = 0
        self.idle: list[list[int]] = [[] for _ in range(fleet.num_classes)]
        for device in reversed(range(fleet.num_devices)):
            self.idle[self.classes[device]].append(device)
        self.running: dict[int, _Device] = {}
        self.on_device: dict[int, int] = {}  # job -> device
        self.end_step = np.zeros(fleet.num_devices, dtype=np.int64)
        self.log = _Log()
        self.rng = np.random.default_rng(rules.seed)
        self.ended = 0
        self.events: list[tuple[int, int, int, int]] = []  # step, kind, device or job, number
        self.number = 0

    # --- the loop

    def result(self) -> FleetResult:
        step_ns = self.fleet.step_ns
        arrival = -(-self.trace.arrival_ns // step_ns)
        self.events = [(int(s), _ARRIVAL, j, 0) for j, s in enumerate(arrival.tolist())]
        for j in np.flatnonzero(self.trace.cancel_ns < NEVER).tolist():
            step = max(-(-int(self.trace.cancel_ns[j]) // step_ns), int(arrival[j]))
            self.events.append((step, _CANCEL, j, 0))
        heapq.heapify(self.events)
        horizon = self.rules.horizon_ns
        last = NEVER if horizon is None else horizon // step_ns
        now, told = 0, 0
        while self.events and self.events[0][0] <= last:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, kind, which, number = heapq.heappop(self.events)
                self._handle(now, kind, which, number)
            self._give_out(now)
            told += 1
            if self.progress is not None and told % 256 == 0:
                share = self.ended / max(1, self.trace.num_jobs)
                self.progress(share if horizon is None else now / max(1, last))
        steps = now if horizon is None else last
        for device in sorted(self.running):
            self._stop(device, steps, self._progress(self.running[device], steps))
        log, num_jobs = self.log, self.trace.num_jobs

        def ints(values: list[int]) -> Int64:
            return np.array(values, dtype=np.int64)

        return FleetResult(
            fleet=self.fleet,
            trace=self.trace,
            steps=steps,
            status=self.status,
            end_ns=np.where(self.end < NEVER, self.end * step_ns, NEVER),
            first_ns=np.where(self.first < NEVER, self.first * step_ns, NEVER),
            samples_done=self.trace.samples - self.left if num_jobs else self.left,
            failures=self.failures,
            moves=self.moves,
            run_job=ints(log.job),
            run_device=ints(log.device),
            run_begin=ints(log.begin),
            run_end=ints(log.end),
            run_samples=ints(log.samples),
        )

    def _handle(self, now: int, kind: int, which: int, number: int) -> None:
        if kind == _ARRIVAL:
            if self.status[which] == Status.WAITING:
                self._enqueue(which)
            return
        if kind == _CANCEL:
            self._cancel(now, which)
            return
        device = self.running.get(which)
        if device is None or device.event != number:
            return  # it was stopped before
        if kind == _END:
            self._stop(which, now, device.left)
            self.status[device.job] = Status.DONE
            self.end[device.job] = now
            self.ended += 1
        elif kind == _FAILURE:
            self._fail(which, now)
        else:
            self._reconsider(which, now)

    # --- starting and stopping

    def _start(self, now: int, job: int, device: int) -> None:
        again = self.first[job] < NEVER
        self.moves[job] += again
        self.first[job] = min(int(self.first[job]), now)
        works_from = now + (self.rules.move_steps if again else 0)
        end = works_from + int(self.need[job, self.classes[device]])
        fails = NEVER
        if self.rules.failures_per_hour > 0:
            hours = self.rng.exponential(1 / self.rules.failures_per_hour)
            fails = works_from + int(hours * _NS_PER_HOUR / self.fleet.step_ns) + 1
        self.running[device] = _Device(job, now, works_from, end, fails, int(self.left[job]), 0)
        self.status[job] = Status.RUNNING
        self.on_device[job] = device
        self.end_step[device] = end
        self._schedule(now, device)

    def _schedule(self, now: int, device: int) -> None:
        """Push what happens next on a device."""
        run, every = self.running[device], self.rules.checkpoint_steps
        step, kind = (run.end, _END) if run.end <= run.fails else (run.fails, _FAILURE)
        if every:
            passed = max(0, now - run.works_from) // every
            checkpoint = run.works_from + (passed + 1) * every
            if checkpoint < step:
                step, kind = checkpoint, _CHECKPOINT
        self.number += 1
        run.event = self.number
        heapq.heappush(self.events, (step, kind, device, self.number))

    def _progress(self, run: _Device, now: int) -> int:
        """Return the samples made from `works_from` to now."""
        kind, of = self.trace.kind[run.job], self.classes_of(run.job)
        cycles = max(0, now - run.works_from) // int(self.fleet.cycle_steps[kind, of])
        return min(run.left, cycles * int(self.fleet.cycle_samples[kind, of]))

    def classes_of(self, job: int) -> int:
        return int(self.classes[self.on_device[job]])

    def _stop(self, device: int, now: int, samples: int) -> None:
        """Take a device from its job, which keeps so many of the samples it made there."""
        run = self.running.pop(device)
        log = self.log
        log.job.append(run.job)
        log.device.append(device)
        log.begin.append(run.begin)
        log.end.append(now)
        log.samples.append(samples)
        self.left[run.job] -= samples
        del self.on_device[run.job]
        self.end_step[device] = 0
        self.idle[self.classes[device]].append(device)

    def _fail(self, device: int, now: int) -> None:
        run, every = self.running[device], self.rules.checkpoint_steps
        saved = 0
        if every:
            last = run.works_from + max(0, now - run.works_from) // every * every
            saved = self._progress(run, last)
        self._stop(device, now, saved)
        self.failures[run.job] += 1
        if self.failures[run.job] > self.rules.most_failures:
            self.status[run.job] = Status.FAILED
            self.ended += 1
        else:
            self._enqueue(run.job)

    def _cancel(self, now: int, job: int) -> None:
        if self.status[job] not in (Status.WAITING, Status.RUNNING):
            return
        if self.status[job] == Status.RUNNING:
            device = self.on_device[job]
            self._stop(device, now, self._progress(self.running[device], now))
        elif self.place[job] >= 0:
            self._dequeue(job)
        self.status[job] = Status.CANCELLED
        self.ended += 1

    # --- the queue

    def _measure(self, job: int, left: int) -> None:
        """Note how many steps a job's remaining samples take on each class of devices."""
        kind = self.trace.kind[job]
        samples, steps = self.fleet.cycle_samples[kind], self.fleet.cycle_steps[kind]
        fits = (steps > 0) & (samples > 0)
        self.need[job, fits] = -(-left // samples[fits]) * steps[fits]
        self.best[job] = self.need[job].min()

    def _enqueue(self, job: int) -> None:
        self._measure(job, int(self.left[job]))
        self.status[job] = Status.WAITING
        self.place[job] = self.waiting
        self.queue[self.waiting] = job
        self.waiting += 1

    def _dequeue(self, job: int) -> None:
        place = self.place[job]
        self.waiting -= 1
        other = self.queue[self.waiting]
        self.queue[place] = other
        self.place[other] = place
        self.place[job] = -1

    # --- decisions

    def _state(self, now: int) -> State:
        rest = np.maximum(self.end_step - now, 0) * self.fleet.step_ns
        return State(
            now_ns=now * self.fleet.step_ns, rem_ns=rest, device_class=self.fleet.device_class
        )

    def _seen(self, jobs: Int64, of: int) -> Waiting:
        step_ns = self.fleet.step_ns
        return Waiting(
            job=jobs,
            here_ns=self.need[jobs, of] * step_ns,
            best_ns=self.best[jobs] * step_ns,
            arrival_ns=self.trace.arrival_ns[jobs],
            deadline_ns=self.trace.deadline_ns[jobs],
            samples=self.left[jobs],
            table=self.need,
            step_ns=step_ns,
        )

    def _choose(self, state: State, device: int) -> tuple[float, int, int] | None:
        """Return score, steps and number of the job that gets a device; None: none fits."""
        of = self.classes[device]
        jobs = self.queue[: self.waiting]
        jobs = jobs[self.need[jobs, of] < NEVER]
        if len(jobs) == 0:
            return None
        scores = self.policy.score(self._seen(jobs, of), state, device)
        best = jobs[scores == scores.max()]
        need = self.need[best, of]
        equal = best[need == (need.max() if self.policy.longest_first else need.min())]
        job = int(equal.min())
        return float(scores.max()), int(self.need[job, of]), job

    def _give_out(self, now: int) -> None:
        """Give free devices to waiting jobs, the highest score of all first."""
        state: State | None = None
        while self.waiting:
            chosen: tuple[float, int, int, int] | None = None
            for free in self.idle:
                if not free:
                    continue
                state = self._state(now) if state is None else state
                found = self._choose(state, free[-1])
                if found is None:
                    continue
                score, need, job = found
                # of equal scores, the device on which the job is done first
                if chosen is None or (score, -need) > (chosen[0], -chosen[1]):
                    chosen = (score, need, job, free[-1])
            if chosen is None:
                return
            _, _, job, device = chosen
            self.idle[self.classes[device]].pop()
            self._dequeue(job)
            self._start(now, job, device)
            state = None

    def _reconsider(self, device: int, now: int) -> None:
        """At a checkpoint: stay, move to a better free device, or make room for another job."""
        run, of = self.running[device], self.classes[device]
        rest = run.end - now
        made = self._progress(run, now)
        kind, left = self.trace.kind[run.job], run.left - made
        samples, steps = self.fleet.cycle_samples[kind], self.fleet.cycle_steps[kind]
        for other, free in enumerate(self.idle):
            if not free or steps[other] == 0 or other == of:
                continue
            there = self.rules.move_steps + -(-left // int(samples[other])) * int(steps[other])
            if there < rest:
                self._stop(device, now, made)
                self._enqueue(run.job)
                return
        if self.rules.preempt_above is not None and self.waiting:
            state = self._state(now)
            found = self._choose(state, device)
            if found is not None:
                self._measure(run.job, left)
                mine = self._seen(np.array([run.job]), of)
                if found[0] > self.rules.preempt_above * float(
                    self.policy.score(mine, state, device)[0]
                ):
                    self._stop(device, now, made)
                    self._enqueue(run.job)
                    return
        self._schedule(now, device)
