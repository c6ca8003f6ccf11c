"""Batches: what a step is given, cut into microbatches and checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from executor.errors import MismatchError
from executor.transport.base import Transport

Batch = Tensor | Sequence[Tensor]


class Batches:
    """Cuts one rank's minibatches, and notices when the microbatches' shape changes.

    The shapes between stages are learnt in the first step. When the inputs' shape changes they
    are learnt anew, which every rank must do in the same step: so every rank has to see the
    inputs, or they must keep their shape.
    """

    def __init__(
        self,
        transport: Transport,
        num_microbatches: int,
        num_devices: int,
        device: torch.device,
        key: str,
    ) -> None:
        self._transport = transport
        self._num_microbatches = num_microbatches
        self._num_devices = num_devices
        self._device = device
        self._key = key
        self._rank = transport.rank
        self._told = False
        self._signature: tuple[object, ...] | None = None

    def split(self, batch: Batch | None, name: str, needed: bool) -> list[Tensor] | None:
        """Return one tensor a microbatch; None where there is no batch and none is needed.

        Where a batch is given that is not needed, its first microbatch stands for all.

        Raises MismatchError if it does not divide.
        """
        many, rank = self._num_microbatches, self._rank
        if batch is None:
            if needed:
                raise MismatchError(f"rank {rank}: step() got no {name}; it needs them here", rank)
            return None
        if not isinstance(batch, Tensor):
            parts = list(batch)
            if len(parts) != many or not all(isinstance(part, Tensor) for part in parts):
                raise MismatchError(
                    f"rank {rank}: {name} has {len(parts)} parts; write one tensor for each of "
                    f"the {many} microbatches",
                    rank,
                )
        elif batch.dim() == 0 or batch.shape[0] % many or not batch.shape[0]:
            raise MismatchError(
                f"rank {rank}: {name} has shape {list(batch.shape)}; its first dimension must "
                f"divide into {many} microbatches",
                rank,
            )
        elif needed:
            parts = list(torch.split(batch, batch.shape[0] // many))
        else:
            parts = [batch[: batch.shape[0] // many]]
        if needed:
            parts = [part.to(self._device, non_blocking=True) for part in parts]
        return parts

    def changed(self, inputs: list[Tensor] | None) -> bool:
        """Whether the microbatches have another shape than in the step before.

        Raises MismatchError if they differ among each other, or if another rank was given no
        inputs in the first step and so cannot know of the change.
        """
        if not self._told:
            self._told = True
            self._transport.store.set(self._key_of(self._rank), "01"[inputs is not None])
        if inputs is None:
            return False
        rank, first = self._rank, inputs[0]
        for part in inputs:
            if part.shape != first.shape or part.dtype != first.dtype:
                raise MismatchError(
                    f"rank {rank}: a microbatch has shape {list(part.shape)} {part.dtype}, the "
                    f"first {list(first.shape)} {first.dtype}; all are of one shape",
                    rank,
                )
        before, self._signature = self._signature, (list(first.shape), first.dtype)
        if before is None or before == self._signature:
            return False
        begin = rank - rank % self._num_devices
        for other in range(begin, begin + self._num_devices):
            if self._transport.store.get(self._key_of(other)) != b"1":
                raise MismatchError(
                    f"rank {rank}: the microbatches' shape went from {before[0]} to "
                    f"{list(first.shape)}, which rank {other} cannot know; give step() the "
                    "inputs on every rank, or build a new Pipeline",
                    rank,
                )
        return True

    def _key_of(self, rank: int) -> str:
        return f"{self._key}/inputs/{rank}"
