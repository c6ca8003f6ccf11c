"""Models that benchmarks share.

`sleeping_layers`: layers that sleep where real ones compute. Their forward, input gradient and
weight gradient take a given time each and no core, so that a pipeline of more ranks than cores
shows the bubbles its schedule has. Each has one parameter, so that gradients can be checked; the
tensor they hand on is their input, of any size, which sets the size of the messages.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd import Function

from executor import weight_queue


class _Weight(Function):
    """The weight's own node, so that a backward that can split at nodes sleeps W apart."""

    @staticmethod
    def forward(ctx, weight, seconds):
        ctx.seconds = seconds
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


class _Sleep(Function):
    """Sleeps F forwards and I backwards; W in the queue if there is one, else in `_Weight`."""

    @staticmethod
    def forward(ctx, x, weight, layer, queue):
        ctx.layer, ctx.queue = layer, queue
        time.sleep(layer.seconds[0])
        return x.clone()  # a real layer writes its output anew

    @staticmethod
    def backward(ctx, grad):
        layer, queue = ctx.layer, ctx.queue
        time.sleep(layer.seconds[1])
        share = grad.view(-1)[:1].clone()
        if queue is not None:

            def weight_grad():
                time.sleep(layer.seconds[2])
                return (share,)

            queue.defer((layer.weight,), (share,), weight_grad)
        of_weight = share if queue is None else None
        return grad if ctx.needs_input_grad[0] else None, of_weight, None, None


class SleepingLayer(nn.Module):
    """Sleeps `times_ms` = (F, I, W) milliseconds; its output is a copy of its input.

    The weight's gradient is the first element of the output's, whatever the weight is.
    """

    def __init__(self, times_ms: Sequence[float]) -> None:
        super().__init__()
        self.seconds = tuple(time_ms / 1e3 for time_ms in times_ms)
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return x `[...]`, floating point."""
        queue = weight_queue()
        if queue is None:
            return _Sleep.apply(x, _Weight.apply(self.weight, self.seconds[2]), self, None)
        anchor = torch.zeros(1, requires_grad=True)  # makes the output differentiable
        return _Sleep.apply(x, anchor, self, queue)


def sleeping_layers(times_ms: Sequence[Sequence[float]]) -> list[SleepingLayer]:
    """Return one sleeping layer for each (F, I, W) in milliseconds."""
    return [SleepingLayer(times) for times in times_ms]


def sleeping_batch(num_microbatches: int, message_bytes: int) -> tuple[Tensor, Tensor]:
    """Return a minibatch whose microbatches are `message_bytes` (a multiple of 4) each."""
    inputs = torch.ones(num_microbatches, message_bytes // 4)
    return inputs, torch.zeros(num_microbatches, 1)


def sleeping_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean of the first elements: it costs nothing, whatever the message's size."""
    return output[:, :1].mean() - target.mean()
