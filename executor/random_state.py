"""Random numbers of a forward that runs twice: the second time the same as the first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

RandomState = tuple[Tensor, Tensor | None]  # of the host, of the GPU


def random_state(device: torch.device) -> RandomState:
    """Return the state of the generators that a stage on `device` draws from."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), cuda


@contextmanager
def random_as(state: RandomState, device: torch.device) -> Iterator[None]:
    """Draw again the random numbers drawn after `state` was taken, then go on as before."""
    before = random_state(device)
    _set(state, device)
    try:
        yield
    finally:
        _set(before, device)


def _set(state: RandomState, device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
