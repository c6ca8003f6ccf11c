"""The main job's optimizer state on the host while fill jobs use its room, as a fill plan has it.

It leaves when the step begins; a bubble that counts on its bytes first makes sure that it is out;
it turns back after the last such bubble, and is back before the optimizer steps.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from executor.errors import MismatchError
from octotune.fill.plan import FillPlan, StateEntry

if TYPE_CHECKING:
    import torch

    from executor.fill.instructions import BubbleInstruction
    from executor.offload.state import StateOffload
    from executor.pipeline import Pipeline


class StateAway:
    """One rank's optimizer state, away in the middle of each filled step."""

    def __init__(self, state: StateOffload, entry: StateEntry, fill: FillPlan) -> None:
        self._state = state
        self._entry = entry
        self._row = fill.bubbles[entry.device]
        self._uses = [
            entry.out_ns <= bubble.start_ns and bubble.end_ns <= entry.back_ns
            for bubble in self._row
        ]
        self._last = max((index for index, uses in enumerate(self._uses) if uses), default=-1)

    @classmethod
    def of(
        cls, pipe: Pipeline, fill: FillPlan, optimizer: torch.optim.Optimizer | None
    ) -> StateAway | None:
        """Return what moves on this rank; None: nothing does.

        Raises MismatchError where the fill plan moves state and there is no optimizer to take it
        from.
        """
        entry = next((e for e in fill.state if e.device == pipe.device_index), None)
        if entry is None or pipe.replica:
            return None
        if optimizer is None:
            raise MismatchError(
                f"the fill plan moves optimizer state of device {pipe.device_index} to the host; "
                "hand the optimizer over: attach(pipe, fill, options, optimizer)"
            )
        return cls(pipe.offload_state(optimizer), entry, fill)

    def leave(self) -> None:
        """Start the way out; returns at once."""
        self._state.leave()

    def come_back(self) -> None:
        """Start the way back; returns at once."""
        self._state.come_back()

    def missing_bytes(self, instruction: BubbleInstruction, deadline_ns: int) -> int:
        """Return how many of the bytes that a bubble counts on are still on the device.

        Waits for the way out, to the bubble's deadline at most.
        """
        if not self._uses[instruction.index]:
            return 0
        left_s = (deadline_ns - time.perf_counter_ns()) / 1e9
        try:
            away = self._state.wait_left(max(0.001, left_s))
        except TimeoutError:
            away = 0
        return max(0, self._entry.num_bytes - away)

    def after(self, instruction: BubbleInstruction) -> None:
        """Turn back after the last bubble that counts on the bytes."""
        if instruction.index >= self._last:
            self._state.come_back()
