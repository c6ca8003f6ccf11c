"""Data parallel: each stage's gradients, summed over the replicas of its device, once a step.

When a stage has run its last W (or B), its gradients are copied into one flat
tensor and summed over the replicas of its device, beside compute. All replicas post the sums of
one device in the plan's order of last W's, whatever order floating gave them. A parameter that
two stages of a rank share is reduced with the later one, so each is reduced once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from executor.stages import StageModule
from executor.transport.base import Handle, Transport


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
