"""Fill work in a main job's step: what ran in whose bubble, and when."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FillSpan:
    """One micro-step of a fill job, or one stretch of a job in a process of its own.

    Times are nanoseconds from the start of the step, as in its Timeline.
    """

    device: int
    job: str
    name: str
    start_ns: int
    end_ns: int
