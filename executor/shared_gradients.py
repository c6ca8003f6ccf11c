"""Gradients that more than one rank has a share of: replicas' and tied layers'.

Data parallel: when a stage has run its last W (or B), its gradients are copied into one flat
tensor and summed over the replicas of its device, beside compute. All replicas post the sums of
one device in the plan's order of last W's, whatever order floating gave them. A parameter that
two stages of a rank share is reduced with the later one, so each is reduced once.

Tied layers on two devices hold a copy each of the parameters they share. The copies begin equal,
their gradients are exchanged and added after the last W of both, and so they stay equal. Without
this, each copy would silently train on its own part of the gradient.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from executor.errors import MismatchError
from executor.stages import StageModule
from executor.transport.base import Buffer, Handle, Transport


class Reducer:
    """Sums this device's gradients over the replicas, stage by stage, once a step.

    Args:
        stages: this rank's stages.
        order: its stages by their last W or B in the plan's row.
        ranks: the ranks of this device in all replicas.
    """

    def __init__(
        self,
        transport: Transport,
        stages: dict[int, StageModule],
        order: Sequence[int],
        ranks: Sequence[int],
        timeout_s: float,
    ) -> None:
        self._transport = transport
        self._ranks = tuple(ranks)
        self._order = tuple(order)
        self._timeout_s = timeout_s
        owner: dict[int, int] = {}
        params: dict[int, nn.Parameter] = {}
        for stage in order:
            for param in stages[stage].parameters():
                owner[id(param)] = stage
                params[id(param)] = param
        self._params = {
            stage: [
                params[key]
                for key, where in owner.items()
                if where == stage and params[key].requires_grad
            ]
            for stage in order
        }
        self.times: list[list[int]] = []
        self._reset()

    def _reset(self) -> None:
        self._done: set[int] = set()
        self._next = 0
        self._under_way: list[tuple[int, int, list[nn.Parameter], Tensor, Handle]] = []

    def stage_done(self, stage: int) -> None:
        """Post what may be posted now that a stage has its whole gradient."""
        self._done.add(stage)
        while self._next < len(self._order) and self._order[self._next] in self._done:
            self._post(self._order[self._next])
            self._next += 1

    def _post(self, stage: int) -> None:
        by_type: dict[torch.dtype, list[nn.Parameter]] = {}
        for param in self._params[stage]:
            by_type.setdefault(param.dtype, []).append(param)
        for params in by_type.values():
            flat = torch.cat(
                [
                    torch.zeros_like(param).view(-1)
                    if param.grad is None
                    else param.grad.reshape(-1)
                    for param in params
                ]
            )
            began = time.perf_counter_ns()
            handle = self._transport.all_reduce(flat, self._ranks)
            self._under_way.append((stage, began, params, flat, handle))

    def finish(self) -> None:
        """Wait for the sums and put them in place of the gradients."""
        self.times = []
        for stage, began, params, flat, handle in self._under_way:
            handle.wait(self._timeout_s)
            self.times.append([stage, began, time.perf_counter_ns()])
            at = 0
            for param in params:
                part = flat[at : at + param.numel()].view_as(param)
                at += param.numel()
                if param.grad is None:
                    param.grad = part.clone()
                else:
                    param.grad.copy_(part)
        self._reset()


def shared_names(
    first: Sequence[tuple[str, Sequence[int], str]],
    second: Sequence[tuple[str, Sequence[int], str]],
    pair: tuple[int, int],
) -> list[tuple[str, str]]:
    """Return which parameters of two tied layers are one, by name in each.

    `first` and `second` list (name, shape, type). What occurs in both under one name and shape is
    shared; if nothing does, the one shape that each has exactly once is.

    Raises:
        MismatchError: if that does not say which.
    """
    theirs = {(name, tuple(shape), dtype) for name, shape, dtype in second}
    same = [(name, name) for name, shape, dtype in first if (name, tuple(shape), dtype) in theirs]
    if same:
        return same

    def once(rows: Sequence[tuple[str, Sequence[int], str]]) -> dict[Any, str]:
        found: dict[Any, list[str]] = {}
        for name, shape, dtype in rows:
            found.setdefault((tuple(shape), dtype), []).append(name)
        return {key: names[0] for key, names in found.items() if len(names) == 1}

    mine, other = once(first), once(second)
    common = [key for key in mine if key in other]
    if len(common) != 1:
        raise MismatchError(
            f"layers {pair[0]} and {pair[1]} are tied, but which parameters they share is not "
            f"clear from names and shapes; give tied_parameters={{({pair[0]}, {pair[1]}): "
            "[(name in one, name in the other)]}"
        )
    return [(mine[common[0]], other[common[0]])]


class TiedPair:
    """This rank's side of two tied layers, the other of which is on rank `peer`."""

    def __init__(
        self,
        transport: Transport,
        index: int,
        params: Sequence[nn.Parameter],
        peer: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._transport = transport
        self.index = index
        self._params = list(params)
        self._peer = peer
        self._timeout_s = timeout_s
        self._tag = 1 << 30 | index << 1
        size = sum(param.numel() for param in self._params)
        self._buffer = Buffer((size,), self._params[0].dtype, device)
        self._began = 0
        self.times: list[list[int]] = []

    def share_values(self, give: bool) -> None:
        """Make the second layer's copy equal to the first's."""
        if give:
            flat = torch.cat([param.detach().reshape(-1) for param in self._params])
            self._transport.send(flat, self._peer, self._tag | 1).wait(self._timeout_s)
            return
        self._transport.receive(self._buffer, self._peer, self._tag | 1).wait(self._timeout_s)
        with torch.no_grad():
            self._unpack([param.data for param in self._params])

    def start(self) -> None:
        """Post both ways."""
        self._began = time.perf_counter_ns()
        self._mine = torch.cat(
            [
                torch.zeros_like(param).view(-1) if param.grad is None else param.grad.reshape(-1)
                for param in self._params
            ]
        )
        self._receive = self._transport.receive(self._buffer, self._peer, self._tag)
        self._send = self._transport.send(self._mine, self._peer, self._tag)

    def finish(self) -> None:
        """Wait, and add the other's share."""
        self._receive.wait(self._timeout_s)
        self._send.wait(self._timeout_s)
        for param in self._params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        # a + b and b + a have the same bits, so both copies stay equal
        self._buffer.tensor.add_(self._mine)
        self._unpack([param.grad for param in self._params if param.grad is not None])
        self.times = [[self.index, self._began, time.perf_counter_ns()]]

    def _unpack(self, targets: Sequence[Tensor]) -> None:
        at = 0
        for target in targets:
            target.copy_(self._buffer.tensor[at : at + target.numel()].view_as(target))
            at += target.numel()
