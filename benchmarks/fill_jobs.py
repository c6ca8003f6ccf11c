"""Fill jobs that benchmarks run: one that sleeps, one that multiplies, a small transformer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from executor.fill.module import ModuleTask


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


_VOCABULARY, _WIDTH, _LENGTH = 512, 96, 32


class _Block(nn.Module):
    """A transformer's layer: attention and MLP with their norms, [batch, length, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            _WIDTH, 4, 2 * _WIDTH, dropout=0.1, batch_first=True, norm_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def transformer(
    kind: str = "inference", batch_size: int = 2, technique: str = "none"
) -> ModuleTask:
    """Return a small transformer as a fill job: embedding, four layers, head; random tokens."""
    torch.manual_seed(0)
    layers = [nn.Embedding(_VOCABULARY, _WIDTH), *(_Block() for _ in range(4))]
    layers.append(nn.Linear(_WIDTH, _VOCABULARY))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(_VOCABULARY, (16 * batch_size, _LENGTH + 1), generator=generator)
    rows = [(part[:, :-1], part[:, 1:]) for part in tokens.split(batch_size)]

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    return ModuleTask(
        layers,
        lambda _: rows,
        batch_size,
        loss_fn=loss_fn if kind == "training" else None,
        technique=technique,
    )
