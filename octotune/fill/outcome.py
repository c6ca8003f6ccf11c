"""What a fill plan came to when it ran: the part `fill` of the executor's report.json."""

from __future__ import annotations

from typing import Literal

import msgspec

JobStatus = Literal["waiting", "running", "done", "cancelled", "failed"]


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One fill job, all its runs together.

    `predicted_samples` is what the fill plan has for the main steps that were filled. `busy_ns` is
    micro-step time, `alone_ns` what the same micro-steps take alone by their configuration:
    `slowdown` is the one over the other. `late` counts micro-steps that ended after what was
    handed over.
    """

    name: str
    devices: tuple[int, ...]
    status: JobStatus
    failure: str | None
    samples: int
    predicted_samples: int
    micro_steps: int
    busy_ns: int
    alone_ns: int
    slowdown: float | None
    late: int
    late_ns: int
    worst_late_ns: int


class DeviceOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One device, over the filled steps: its bubbles of at least the threshold, as measured.

    `confirmed` is the share of a measured bubble that could be lengthened without making the main
    step longer, where that was tried.
    """

    bubble_ns: int
    handed_ns: int
    busy_ns: int
    reprofiled: int
    confirmed: float | None


class FillOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. `step_ns` and `plain_step_ns` are medians of the main step with and without.

    `predicted_step_ns` is the simulator's. `filled` is the share of bubble time spent in fill
    work.
    """

    jobs: tuple[JobOutcome, ...]
    devices: tuple[DeviceOutcome, ...]
    filled_steps: int
    plain_steps: int
    step_ns: int | None
    plain_step_ns: int | None
    predicted_step_ns: int
    filled: float

    @property
    def main_slowdown(self) -> float | None:
        """How much longer the main step takes with fill work: 0.01 is 1 %."""
        if not self.step_ns or not self.plain_step_ns:
            return None
        return self.step_ns / self.plain_step_ns - 1.0
