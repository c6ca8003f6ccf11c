"""Optimizer state on the host while no optimizer needs it.

    state = pipe.offload_state(optimizer)
    state.leave()          # returns at once; the lane takes the state out between its copies
    state.wait_left()      # optional: from here on `away_bytes` more are free on the device
    state.come_back()      # returns at once
    state.wait_back()      # before the optimizer's step

The optimizer's own tensors stay the same objects: their storages are emptied and filled again, so
nobody has to be told. The optimizer waits by itself: its step, and its `state_dict`, first bring
back what is away. Small tensors (step counters) stay.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from executor.offload.lanes import Lane, Move, StateItem
from executor.offload.saved import choose
from octotune.model.storages import SMALLEST_COPY_BYTES


class StateOffload:
    """Takes one optimizer's state out and back over a rank's copy lane.

    Args:
        optimizer: whose `state` moves.
        lane: the rank's.
        device: where the state lives; what is elsewhere stays there.
        timeout_s: how long any one wait may take.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, lane: Lane, device: torch.device, timeout_s: float
    ) -> None:
        self._optimizer = optimizer
        self._lane = lane
        self._device = device
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._items: list[StateItem] = []
        self._out: Move | None = None
        self._back: Move | None = None
        self.failure = ""  # why some of it stayed, the last time
        optimizer.register_step_pre_hook(lambda *_: self.wait_back())
        optimizer.register_state_dict_pre_hook(lambda *_: self.wait_back())

    @property
    def away_bytes(self) -> int:
        """Bytes that are on the host now and not on the device."""
        return sum(item.num_bytes for item in self._items if item.storage.nbytes() == 0)

    def state_bytes(self) -> int:
        """Return the bytes that would leave: the state's storages, each once, but for small ones.

        0 before the optimizer's first step, which is when most optimizers make their state.
        """
        return sum(item.num_bytes for item in self._items) or sum(
            item.num_bytes for item in self._find()
        )

    def leave(self, most_bytes: int | None = None) -> None:
        """Start taking the state out; returns at once. Nothing happens where it is out already.

        With `most_bytes`, as much of it as adds up to no more.
        """
        with self._lock:
            if self._out is not None:
                return
            self._items = self._find()
            if most_bytes is not None:
                chosen = choose(tuple(item.num_bytes for item in self._items), most_bytes)
                self._items = [self._items[at] for at in chosen]
            self._back = None
            self._out = self._lane.move(self._items, back=False)

    def wait_left(self, timeout_s: float | None = None) -> int:
        """Return when the state is out; how many bytes that freed on the device.

        0 where it was not asked to leave. What found no room on the host stays, and `failure`
        says why. Raises TimeoutError.
        """
        with self._lock:
            out = self._out
        if out is None:
            return 0
        self._lane.wait_move(out, self._limit(timeout_s))
        self.failure = out.failure
        return self.away_bytes

    def come_back(self) -> None:
        """Start bringing the state back; returns at once."""
        with self._lock:
            if self._out is not None and self._back is None:
                # after the move out on the same lane, so what is still on its way turns round
                self._back = self._lane.move(self._items, back=True)

    def wait_back(self, timeout_s: float | None = None) -> None:
        """Return when all state is on the device again. Raises TimeoutError."""
        with self._lock:
            self.come_back()
            out, back = self._out, self._back
            if out is None or back is None:
                return
            self._lane.wait_move(back, self._limit(timeout_s))
            self.failure = out.failure
            self._out = self._back = None
            self._items = []

    def _limit(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s

    def _find(self) -> list[StateItem]:
        """Return the state's storages on the device, each once."""
        found: dict[int, StateItem] = {}
        own = {
            param.untyped_storage().data_ptr()
            for group in self._optimizer.param_groups
            for param in group["params"]
        }
        values: list[Any] = [
            value for state in self._optimizer.state.values() for value in state.values()
        ]
        for value in values:
            if (
                not isinstance(value, Tensor)
                or value.layout is not torch.strided
                or value.device != self._device
            ):
                continue
            storage = value.untyped_storage()
            if (
                storage.nbytes() >= SMALLEST_COPY_BYTES
                and storage.resizable()  # numpy arrays that share it would be left with nothing
                and storage.data_ptr() not in own
            ):
                found.setdefault(storage.data_ptr(), StateItem(storage))
        return list(found.values())
