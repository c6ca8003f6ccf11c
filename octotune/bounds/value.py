"""What a bound says, and which argument said it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """No plan in question takes less than `ns`, the largest of `parts`.

    `parts` maps each argument's name to what it proves alone. `finished` is False where a time
    limit kept an argument from proving all it could.
    """

    ns: int
    parts: Mapping[str, int]
    finished: bool = True

    @property
    def reason(self) -> str:
        """The argument that gives the bound; the first of equals."""
        return max(self.parts, key=lambda name: self.parts[name])

    def gap(self, step_ns: int) -> float:
        """Return by what share a step is above the bound: step / bound - 1."""
        return step_ns / self.ns - 1 if self.ns else 0.0
