"""Work: one fill job on one device, a micro-step at a time, with all that keeps it apart.

A micro-step cannot be interrupted, so it is begun only if it will be over in time: what it takes
is known from its configuration, and from then on learned, with its spread. It runs with random
numbers, gradient mode and dtype of its own (`own_world`), so that the main job's results keep
their bits. Whatever it raises stays in `failure`; memory it does not give back, and micro-steps
that come back far too late again and again, end it, too.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor.fill.task import graph_of

# how much more than the mean a micro-step is given, in mean deviations: 3 of them are 2.4
# standard deviations of a normal distribution
_DEVIATIONS = 3.0
_FIRST_DEVIATION = 0.02  # of the configuration's time
_LEARN = 0.1
_MOST_ABOVE = 3.0  # times the estimate: an outlier counts so much at most
_PATIENCE = 24  # bubbles refused in a row before an estimate fades
_FADE = 0.1
_STRIKES = 3
_FORGIVEN_AFTER = 100  # micro-steps in time
_LEAK_SLACK_BYTES = 64 << 20


class Estimate:
    """What a micro-step takes: a running mean and mean deviation, in ns.

    An estimate that is too long for any bubble would never be corrected: after many refusals in a
    row it fades towards what it was at first, until the micro-step gets another try.
    """

    __slots__ = ("count", "deviation_ns", "first_ns", "mean_ns", "refused", "worst_ns")

    def __init__(self, first_ns: float) -> None:
        self.first_ns = first_ns
        self.mean_ns = float(first_ns)
        self.deviation_ns = _FIRST_DEVIATION * first_ns
        self.worst_ns = 0
        self.count = 0
        self.refused = 0

    def refuse(self) -> None:
        """Learn that a bubble was too short."""
        self.refused += 1
        if self.refused > _PATIENCE:
            self.mean_ns += _FADE * min(0.0, self.first_ns - self.mean_ns)
            usual = _FIRST_DEVIATION * self.first_ns
            self.deviation_ns += _FADE * min(0.0, usual - self.deviation_ns)

    def note(self, took_ns: int) -> None:
        """Learn from one run."""
        self.refused = 0
        self.worst_ns = max(self.worst_ns, took_ns)
        if self.count == 0:  # the first run loads and allocates; it is no example
            self.count = 1
            return
        took = min(float(took_ns), _MOST_ABOVE * max(self.mean_ns, 1.0))
        self.count += 1
        learn = max(_LEARN, 1.0 / (self.count + 2))
        off = took - self.mean_ns
        self.mean_ns += learn * off
        self.deviation_ns += learn * (abs(off) - self.deviation_ns)

    @property
    def safe_ns(self) -> float:
        """A time within which it ends but for rare cases."""
        return self.mean_ns + _DEVIATIONS * self.deviation_ns


@dataclass(slots=True)
class WorkCounts:
    """What one job did on one device."""

    samples: int = 0
    passes: int = 0
    micro_steps: int = 0
    busy_ns: int = 0
    expected_ns: int = 0  # the same micro-steps by the configuration
    bubbles: int = 0  # in which it ran
    late: int = 0  # micro-steps that ended after what was handed over
    late_ns: int = 0  # by how much, in all
    worst_late_ns: int = 0
    refused_memory: int = 0  # bubbles that had too little memory after all


class Progress:
    """How far a job has come on a device, whatever runs it.

    Args:
        name: of the job.
        samples: how many it makes, or None for no end.
    """

    def __init__(self, name: str, samples: int | None) -> None:
        self.name = name
        self.samples = samples
        self.counts = WorkCounts()
        self.failure: str | None = None
        self.cancelled = False
        self.is_set_up = False

    @property
    def stopped(self) -> bool:
        """Whether it failed or was cancelled."""
        return self.failure is not None or self.cancelled

    @property
    def done(self) -> bool:
        """Whether all samples are made."""
        return self.samples is not None and self.counts.samples >= self.samples

    @property
    def ended(self) -> bool:
        """Whether it will not run again: done, failed or cancelled."""
        return self.stopped or self.done


class Work(Progress):
    """A job made ready on a device.

    Args:
        name: of the job.
        task: what runs (`executor.fill.task`).
        times_ns: of its micro-steps, alone on the device.
        device: where it runs.
        memory_bytes: of its micro-steps, resident bytes included; 0: not known.
        carried_bytes: of an open pass.
        samples: how many it makes, or None for no end.
        seed: of its own random numbers.
    """

    def __init__(
        self,
        name: str,
        task: Any,
        times_ns: Sequence[int],
        *,
        device: torch.device | None = None,
        memory_bytes: Sequence[int] = (),
        carried_bytes: int = 0,
        samples: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(name, samples)
        self.task = task
        self.device = torch.device("cpu") if device is None else device
        self.graph = graph_of(task, len(times_ns), name)
        self.times_ns = tuple(times_ns)
        self.memory_bytes = tuple(memory_bytes) or (0,) * len(times_ns)
        self.carried_bytes = carried_bytes
        self.estimates = [Estimate(each) for each in times_ns]
        self._open: list[deque[Any]] = [deque() for _ in times_ns]  # passes that wait for k
        self._strikes = 0
        self._clean = 0
        self._held_bytes = 0
        self._world = World(seed, self.device)
        self._memory = _Memory(self.device)

    # --- life ----------------------------------------------------------------------------

    def setup(self) -> None:
        """Make the task ready; a failure stays in `failure`."""
        with self.world():
            try:
                self.task.setup(self.device)
                self.is_set_up = True
            except Exception as error:
                self.fail(f"setup raised {words(error)}")

    def world(self) -> contextlib.AbstractContextManager[None]:
        """Enter the job's own random numbers, gradient mode, dtype, stream and memory pool."""
        return own_world(self._world)

    def fail(self, why: str) -> None:
        """Stop the job for good."""
        if self.failure is None:
            self.failure = why
            self._drop()

    def cancel(self) -> None:
        """Stop the job; that is no failure."""
        if not self.ended:
            self.cancelled = True
            self._drop()

    def close(self) -> None:
        """Let the task go, whatever it says to that."""
        self._drop()

    def forget_passes(self) -> None:
        """Give up the passes that have begun and not ended."""
        for waiting in self._open:
            waiting.clear()

    def _drop(self) -> None:
        self.forget_passes()
        task, self.task, self.graph = self.task, None, None
        if task is not None and self.is_set_up:
            with self.world(), contextlib.suppress(Exception):
                task.teardown()

    @property
    def num_open(self) -> int:
        """How many passes have begun and not ended."""
        return sum(map(len, self._open))

    def state(self) -> Any:
        """Return the task's state, between two passes."""
        with self.world():
            return self.task.state_dict()

    def load(self, state: Any) -> None:
        """Go on from a state; a failure stays in `failure`."""
        with self.world():
            try:
                self.task.load_state_dict(state)
            except Exception as error:
                self.fail(f"load_state_dict raised {words(error)}")

    # --- micro-steps ---------------------------------------------------------------------

    def next_of_one_pass(self) -> int:
        """Return the micro-step that comes next where one pass is open at a time."""
        for k in range(len(self._open) - 1, 0, -1):
            if self._open[k]:
                return k
        return 0

    def can_run(self, k: int) -> bool:
        """Whether a pass has come to micro-step k."""
        return k == 0 or bool(self._open[k])

    def needs_bytes(self, k: int) -> int:
        """Return what micro-step k needs, other open passes included."""
        others = self.num_open - (1 if k else 0)
        return self.memory_bytes[k] + others * self.carried_bytes

    def run(self, k: int) -> tuple[int, int]:
        """Run micro-step k on the pass that has waited longest for it, inside `world`.

        Returns when it began and ended. What it raises stops the job.
        """
        carry = self._open[k].popleft() if k else None
        began = time.perf_counter_ns()
        try:
            out = self.graph.run(k, carry)
            self._world.finish()
        except Exception as error:
            self.fail(f"micro-step {k} raised {words(error)}")
            return began, time.perf_counter_ns()
        ended = time.perf_counter_ns()
        took, counts = ended - began, self.counts
        self.estimates[k].note(took)
        counts.micro_steps += 1
        counts.busy_ns += took
        counts.expected_ns += self.times_ns[k]
        if k + 1 < len(self._open):
            self._open[k + 1].append(out)
            return began, ended
        counts.passes += 1
        try:
            counts.samples += int(out)
        except (TypeError, ValueError):
            self.fail(f"a pass ended with {type(out).__name__}; it returns the samples it made")
            return began, ended
        if self.samples is not None:
            counts.samples = min(counts.samples, self.samples)
        return began, ended

    def note_in_time(self) -> None:
        """Count a micro-step that ended before its deadline."""
        self._clean += 1
        if self._clean >= _FORGIVEN_AFTER:
            self._clean = self._strikes = 0

    def note_late(self, ended_ns: int, deadline_ns: int, must_ns: int) -> int:
        """Count a micro-step that ended after its deadline; return by how much.

        One that ends after `must_ns` again and again ends the job. That is when the main job goes
        on, and later by what others kept this thread off its core: no fault of the job's.
        """
        late = ended_ns - deadline_ns
        counts = self.counts
        counts.late += 1
        counts.late_ns += late
        counts.worst_late_ns = max(counts.worst_late_ns, late)
        if ended_ns > must_ns:
            self._strikes += 1
            self._clean = 0
            if self._strikes >= _STRIKES:
                self.fail(
                    f"overran: {counts.late} micro-steps came back late, the last one "
                    f"{(ended_ns - must_ns) / 1e6:.1f} ms into the main job's time"
                )
        return late

    def watch_memory(self, before: int, allowed_bytes: int | None) -> None:
        """Count what the job kept since `before`, and stop it if that is too much."""
        self._held_bytes += self._memory.now() - before
        declared = max(self.memory_bytes)
        limits = [limit for limit in (declared or None, allowed_bytes) if limit is not None]
        if not limits:
            return
        most = min(limits) + max(_LEAK_SLACK_BYTES, min(limits) // 2)
        if self._held_bytes > most:
            self.fail(
                f"holds {self._held_bytes >> 20} MiB after a bubble; it may hold "
                f"{min(limits) >> 20} MiB: it leaks, or was measured wrongly"
            )

    def memory_now(self) -> int:
        """Return what `watch_memory` compares with."""
        return self._memory.now()


def words(error: BaseException) -> str:
    """Return an exception in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"


class _Memory:
    """What the process, or on CUDA its allocator, holds now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._file = -1
        self._page = 4096
        if device.type != "cuda":
            with contextlib.suppress(OSError, ValueError):
                self._file = os.open("/proc/self/statm", os.O_RDONLY)
                self._page = os.sysconf("SC_PAGE_SIZE")

    def now(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.memory_allocated(self._device))
        if self._file < 0:
            return 0
        return int(os.pread(self._file, 128, 0).split()[1]) * self._page

    def __del__(self) -> None:
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)


# --- a world of its own ------------------------------------------------------------------------


class World:
    """A job's random numbers, gradient mode and dtype between its bubbles; on CUDA its stream."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.Generator().manual_seed(seed).get_state()
        self.python: Any = random.Random(seed).getstate()
        self.numpy = np.random.MT19937(seed % 2**32)
        self.cuda: Tensor | None = None
        self.grad = True
        self.dtype = torch.get_default_dtype()
        self.stream: Any = None
        self.pool: Any = None
        if device.type == "cuda":
            self.cuda = torch.Generator(device).manual_seed(seed).get_state()
            self.stream = torch.cuda.Stream(device)
            self.pool = torch.cuda.MemPool()

    def finish(self) -> None:
        """Wait until the device has done all of it: a queued kernel cannot be taken back."""
        if self.stream is not None:
            self.stream.synchronize()


@contextlib.contextmanager
def own_world(world: World) -> Iterator[None]:
    """Put a job's world in place of the main job's, and back, whatever happens inside.

    Random numbers of torch, Python and numpy, gradient mode, default dtype, autocast; on CUDA the
    stream and the allocator's pool, too. 0.3 ms to enter, 0.05 ms to leave.
    """
    before_cpu, before_python = torch.get_rng_state(), random.getstate()
    before_grad, before_dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    # numpy's generator is exchanged whole, which is quick; but one normal number that it may
    # have in store stands outside of it and would be lost
    before_numpy, stored = np.random.mtrand.get_bit_generator(), np.random.get_state(legacy=False)
    torch.set_rng_state(world.cpu)
    random.setstate(world.python)
    np.random.mtrand.set_bit_generator(world.numpy)
    torch.set_grad_enabled(world.grad)
    if world.dtype != before_dtype:
        torch.set_default_dtype(world.dtype)
    before_cuda: Tensor | None = None
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autocast("cpu", enabled=False))
            if world.stream is not None:
                before_cuda = torch.cuda.get_rng_state(world.device)
                assert world.cuda is not None
                torch.cuda.set_rng_state(world.cuda, world.device)
                stack.enter_context(torch.autocast("cuda", enabled=False))
                stack.enter_context(torch.cuda.stream(world.stream))
                stack.enter_context(torch.cuda.use_mem_pool(world.pool, world.device))
            yield
            world.finish()
    finally:
        world.cpu, world.python = torch.get_rng_state(), random.getstate()
        world.grad, world.dtype = torch.is_grad_enabled(), torch.get_default_dtype()
        torch.set_rng_state(before_cpu)
        random.setstate(before_python)
        np.random.mtrand.set_bit_generator(before_numpy)
        if stored["has_gauss"]:
            np.random.set_state(stored)
        torch.set_grad_enabled(before_grad)
        if world.dtype != before_dtype:
            torch.set_default_dtype(before_dtype)
        if before_cuda is not None:
            world.cuda = torch.cuda.get_rng_state(world.device)
            torch.cuda.set_rng_state(before_cuda, world.device)
