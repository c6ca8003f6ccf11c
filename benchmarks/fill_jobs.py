"""Fill jobs that benchmarks run: one that sleeps, one that multiplies matrices, a transformer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch


class Sleeping:
    """Micro-steps that sleep: they take no core, so that ranks may outnumber the cores."""

    def __init__(self, times_ms: list[float], batch_size: int) -> None:
        self.num_micro_steps = len(times_ms)
        self._seconds = [time_ms / 1e3 for time_ms in times_ms]
        self._batch_size = batch_size
        self.made = 0

    def setup(self, device: torch.device) -> None:
        """Need nothing."""

    def run(self, k: int, carry: Any) -> int:
        """Sleep."""
        time.sleep(self._seconds[k])
        self.made += self._batch_size if k + 1 == self.num_micro_steps else 0
        return self._batch_size

    def state_dict(self) -> dict[str, int]:
        """Return how many samples are made."""
        return {"made": self.made}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there."""
        self.made = state["made"]

    def teardown(self) -> None:
        """Keep nothing."""


def sleeping(times_ms: list[float], batch_size: int = 1) -> Sleeping:
    """Return a job of micro-steps that sleep."""
    return Sleeping(times_ms, batch_size)


class Multiplying:
    """One micro-step: products of square matrices; a sample is one product."""

    def __init__(self, size: int, products: int) -> None:
        self._size, self._products = size, products

    def setup(self, device: torch.device) -> None:
        """Make the matrices."""
        self._one = torch.rand(self._size, self._size, device=device)
        self._out = torch.empty_like(self._one)

    def step(self) -> int:
        """Multiply."""
        for _ in range(self._products):
            torch.mm(self._one, self._one, out=self._out)
        return self._products

    def state_dict(self) -> dict[str, Any]:
        """Nothing carries over."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing carries over."""

    def teardown(self) -> None:
        """Let the matrices go."""
        del self._one, self._out


def multiplying(size: int = 192, products: int = 4) -> Multiplying:
    """Return a job that multiplies matrices."""
    return Multiplying(size, products)
