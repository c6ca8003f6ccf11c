"""Policies: which waiting fill job gets a free device, as score functions f(job, state, device).

The job with the highest score wins. Built in, with p the job's remaining time here and p* on the
devices that suit it best:

- `sjf`, shortest job first: 1 / p*. Lowest mean completion time when there is little to do.
- `makespan`: 1 / max(p, r), r what remains at least whatever is chosen: the longest that a running
  job still takes, and the longest p* that waits. Jobs that do not lengthen it are equal, and the
  longest of them goes first. Devices are left to those jobs that suit them.
- `deadline`: a job whose slack runs out goes first, the least slack foremost; the rest by `sjf`.
  A job that can no longer be in time is not urgent any more.
- `fifo`: by arrival, for comparison.

A sum of weighted policies is one, too: `0.7*sjf + 0.3*makespan`. A user's own is
`module:function` or `file.py:function`, called as f(job, state, device) -> float for each waiting
job, or, where the function has a true attribute `takes_arrays`, once for all of them.

Source:
    Arfeen et al. 2024, arXiv:2410.07192, section on scheduling policies, for the first two scores.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octotune.contract.quantities import short
from octotune.errors import MalformedError
from simulator.fleet import NEVER, Policy, Score, State, Waiting

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

_URGENT = 2.0  # slack below this many times the job's own time is running out
_TERM = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]+)?)\s*\*\s*)?([a-z]+)\s*")


def _inverse(times_ns: Int64) -> Float64:
    scores: Float64 = 1.0 / times_ns.astype(np.float64)
    return scores


def _sjf(jobs: Waiting, state: State, device: int) -> Float64:
    return _inverse(np.maximum(1, jobs.best_ns))


def _makespan(jobs: Waiting, state: State, device: int) -> Float64:
    at_least = max(1, int(state.rem_ns.max(initial=0)), int(jobs.best_ns.max()))
    return _inverse(np.maximum(jobs.here_ns, at_least))


def _fifo(jobs: Waiting, state: State, device: int) -> Float64:
    return _inverse(1 + jobs.arrival_ns)


def deadline_aware(base: Score, urgent: float = _URGENT) -> Score:
    """Return a score that puts deadlines first when slack runs out, and is the base's else.

    Args:
        base: of scores at most 1, such as 1 / ns.
        urgent: slack below this many times the job's own time here is running out.
    """

    def score(jobs: Waiting, state: State, device: int) -> Float64:
        here = (jobs.deadline_ns - state.now_ns - jobs.here_ns).astype(np.float64)
        runs_out = (jobs.deadline_ns < NEVER) & (here >= 0) & (here < urgent * jobs.here_ns)
        # by the slack on the best device: of several free ones, the quickest is to get the job
        slack = np.maximum(jobs.deadline_ns - state.now_ns - jobs.best_ns, 0)
        found = np.where(runs_out, 2.0 + 1.0 / (1.0 + slack), base(jobs, state, device))
        return found

    return score


def mix(parts: Sequence[tuple[float, Score]]) -> Score:
    """Return the weighted sum of scores."""

    def score(jobs: Waiting, state: State, device: int) -> Float64:
        total = np.zeros(len(jobs.job))
        for weight, part in parts:
            total += weight * part(jobs, state, device)
        return total

    return score


BUILT_IN: dict[str, Policy] = {
    "sjf": Policy(name="sjf", score=_sjf),
    "makespan": Policy(name="makespan", score=_makespan, longest_first=True),
    "deadline": Policy(name="deadline", score=deadline_aware(_sjf)),
    "fifo": Policy(name="fifo", score=_fifo),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """A waiting job as a user's policy sees it. Times in ns.

    `proc_times` is what its remaining samples take on each device, infinite where it does not fit.
    """

    number: int
    proc_times: Float64  # [D]
    arrival_ns: int
    deadline_ns: int | None
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Now:
    """The state as a user's policy sees it: the time, and how long each device is still taken."""

    now_ns: int
    rem_times: Float64  # [D]


def find_policy(name: str) -> Policy:
    """Return a policy by name, by a sum of weighted names, or a user's by `module:function`.

    Raises:
        MalformedError: if there is none of that name, or the user's cannot be loaded.
    """
    if ":" in name:
        return _users(name)
    terms = [_TERM.fullmatch(part) for part in name.split("+")]
    if any(term is None or term[2] not in BUILT_IN for term in terms):
        raise MalformedError(
            f"policy: found {short(name)}; allowed: {', '.join(BUILT_IN)}, a sum such as "
            '"0.7*sjf + 0.3*makespan", or module:function'
        )
    parts = [(float(term[1] or 1), BUILT_IN[term[2]]) for term in terms if term is not None]
    if len(parts) == 1:
        return parts[0][1]
    heaviest = max(parts, key=lambda part: part[0])[1]
    return Policy(
        name=name,
        score=mix([(weight, policy.score) for weight, policy in parts]),
        longest_first=heaviest.longest_first,
    )


def _users(name: str) -> Policy:
    module, _, function = name.rpartition(":")
    try:
        if module.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(module).stem, module)
            if spec is None or spec.loader is None:
                raise ImportError(f"{module} is no Python file")
            loaded = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded)
        else:
            loaded = importlib.import_module(module)
        found: Callable[..., Any] = getattr(loaded, function)
    except Exception as error:
        raise MalformedError(
            f"policy {short(name)}: cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise MalformedError(
            f"policy {short(name)}: found no function; allowed: f(job, state, device)"
        )
    return Policy(name=name, score=users_score(found, name))


def users_score(function: Callable[..., Any], name: str) -> Score:
    """Return a user's function as a score that refuses, in one line, what is no number."""

    def refuse(job: int, device: int, why: str) -> MalformedError:
        return MalformedError(
            f"policy {short(name)}: for job {job} on device {device} {why}; a score is a finite "
            "number"
        )

    def score(jobs: Waiting, state: State, device: int) -> Float64:
        if getattr(function, "takes_arrays", False):
            try:
                found = np.asarray(function(jobs, state, device), dtype=np.float64)
            except Exception as error:
                raise refuse(
                    int(jobs.job[0]), device, f"it raised {type(error).__name__}: {error}"
                ) from error
            if found.shape != jobs.job.shape:
                raise refuse(
                    int(jobs.job[0]), device, f"it returned the shape {found.shape}, not one each"
                )
        else:
            found = np.empty(len(jobs.job))
            proc_ns = jobs.proc_ns
            now = Now(now_ns=state.now_ns, rem_times=state.rem_ns.astype(np.float64))
            for row, number in enumerate(jobs.job.tolist()):
                proc = proc_ns[row][state.device_class]
                deadline = int(jobs.deadline_ns[row])
                job = Job(
                    number=number,
                    proc_times=np.where(proc < NEVER, proc, math.inf),
                    arrival_ns=int(jobs.arrival_ns[row]),
                    deadline_ns=None if deadline >= NEVER else deadline,
                    samples=int(jobs.samples[row]),
                )
                try:
                    found[row] = float(function(job, now, device))
                except Exception as error:
                    raise refuse(
                        number, device, f"it raised {type(error).__name__}: {error}"
                    ) from error
        wrong = np.flatnonzero(~np.isfinite(found))
        if len(wrong):
            raise refuse(int(jobs.job[wrong[0]]), device, f"it returned {found[wrong[0]]}")
        return found

    return score
