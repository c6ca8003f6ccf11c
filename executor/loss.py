"""The loss of a step: from the rank of the last stage to every other rank of its replica.

Microbatches' losses are averaged as soon as the last one is there, so that the loss's way to the
others costs no wait; over replicas their sum is reduced first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from executor.transport.base import ASIDE, Buffer, Handle, Transport

_TAG = ASIDE


class StepLoss:
    """The mean loss over microbatches and replicas, known to every rank when a step ends.

    Args:
        transport: connects the ranks of all replicas.
        ranks: the rank of each device of this replica [D].
        last_device: the device of the last stage.
        replicas: the data-parallel size.
        device: where tensors live.
        timeout_s: how long any one wait may take.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        last_device: int,
        replicas: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._transport = transport
        self._source = ranks[last_device]
        self._others = [rank for rank in ranks if rank != self._source]
        num_devices = len(ranks)
        self._group = [replica * num_devices + last_device for replica in range(replicas)]
        self._timeout_s = timeout_s
        self._buffer = Buffer((1,), torch.float64, device)
        self._receives = transport.rank != self._source
        # untagged messages keep their order, sums over replicas end late: then the loss is last
        self._early = transport.tagged and replicas == 1
        self._received: Handle | None = None
        self._sum: Handle | None = None
        self._sends: list[Handle] = []

    def begin(self) -> None:
        """Begin a step."""
        self._sum, self._sends = None, []
        if self._receives and self._early:
            self._receive()

    def done(self, losses: Sequence[Tensor]) -> None:
        """Take the microbatches' losses [m], on the rank that has them, once all are there."""
        mean = torch.stack([loss.reshape(()) for loss in losses]).double().mean()
        replicas = len(self._group)
        self._buffer.tensor[0] = mean / replicas
        if replicas > 1:
            # posted before any gradient's sum on this device: those need all losses
            self._sum = self._transport.all_reduce(self._buffer.tensor, self._group)
        elif self._early:
            self._send()

    def finish(self) -> float:
        """Return the loss, once every transfer of it has ended."""
        if self._receives:
            if self._received is None:
                self._receive()
            assert self._received is not None
            self._received.wait(self._timeout_s)
            self._received = None
        elif not self._early:
            if self._sum is not None:
                self._sum.wait(self._timeout_s)
            self._send()
        for sent in self._sends:
            sent.wait(self._timeout_s)
        return float(self._buffer.tensor)

    def _receive(self) -> None:
        self._received = self._transport.receive(self._buffer, self._source, _TAG)

    def _send(self) -> None:
        for rank in self._others:
            self._sends.append(self._transport.send(self._buffer.tensor, rank, _TAG))
