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


def doze(seconds: float) -> None:
    """Sleep, or do nothing at all: even `time.sleep(0)` is a system call of 50 us and more."""
    if seconds:
        time.sleep(seconds)


class _Weight(Function):
    """The weight's own node: a backward that is split by walking the graph sleeps W here."""

    @staticmethod
    def forward(ctx, weight, layer):
        ctx.layer = layer
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        doze(ctx.layer.seconds[2])
        return grad, None


class _Sleep(Function):
    """Sleeps F forwards, I backwards, and W where nothing else does."""

    @staticmethod
    def forward(ctx, x, weight, layer, queue):
        ctx.layer, ctx.queue = layer, queue
        ctx.seconds = layer.seconds_of(x)
        doze(ctx.seconds[0])
        return layer.output(x)

    @staticmethod
    def backward(ctx, grad):
        layer, queue = ctx.layer, ctx.queue
        doze(ctx.seconds[1])
        nap = ctx.seconds[2]
        if queue is not None:
            queue.defer((layer.weight,), (), lambda: layer.weight_grad(nap))
        elif not layer.two_nodes:
            doze(nap)
        share = None if queue is not None else layer.one
        return layer.output(grad) if ctx.needs_input_grad[0] else None, share, None, None


class SleepingLayer(nn.Module):
    """Sleeps `times_ms` = (F, I, W) milliseconds; its output is a copy of its input.

    Each backward adds 1 to its weight's gradient. `two_nodes`: its weight is a node of the
    autograd graph by itself, which executors need that split backward by walking the graph.
    `factors` scales the times of each microbatch. `thin`: only the first element of each row is
    written, so that large messages cost no copies in layers, only in transfers.
    """

    def __init__(
        self,
        times_ms: Sequence[float],
        two_nodes: bool = False,
        factors: Sequence[float] | None = None,
        thin: bool = False,
    ) -> None:
        super().__init__()
        self.thin = thin
        self.factors = factors
        self.seconds = tuple(time_ms / 1e3 for time_ms in times_ms)
        self.two_nodes = two_nodes
        self.weight = nn.Parameter(torch.zeros(1))
        self.one = torch.ones(1)
        self.anchor = torch.zeros(1, requires_grad=True)

    def output(self, x: Tensor) -> Tensor:
        """Return a new tensor like x: a real layer writes what it hands on anew."""
        if not self.thin:
            return x.clone()
        out = torch.empty_like(x)
        out[..., :1] = x[..., :1]
        return out

    def seconds_of(self, x: Tensor) -> tuple[float, ...]:
        """Return the times for a microbatch; with `factors`, its number stands first in it."""
        if self.factors is None:
            return self.seconds
        factor = self.factors[int(x.view(-1)[0])]
        return tuple(nap * factor for nap in self.seconds)

    def weight_grad(self, nap: float) -> tuple[Tensor]:
        """Sleep W."""
        doze(nap)
        return (self.one.clone(),)

    def forward(self, x: Tensor) -> Tensor:
        """Return x `[...]`, floating point."""
        queue = weight_queue()
        if queue is not None:  # the anchor makes the output differentiable
            return _Sleep.apply(x, self.anchor, self, queue)
        weight = _Weight.apply(self.weight, self) if self.two_nodes else self.weight
        return _Sleep.apply(x, weight, self, None)


def sleeping_layers(
    times_ms: Sequence[Sequence[float]], two_nodes: bool = False, thin: bool = False
) -> list[SleepingLayer]:
    """Return one sleeping layer for each (F, I, W) in milliseconds."""
    return [SleepingLayer(times, two_nodes, thin=thin) for times in times_ms]


def sleeping_batch(num_microbatches: int, message_bytes: int) -> tuple[Tensor, Tensor]:
    """Return a minibatch whose microbatches are `message_bytes` (a multiple of 4) each."""
    inputs = torch.ones(num_microbatches, message_bytes // 4)
    return inputs, torch.zeros(num_microbatches, 1)


class _FirstOfRows(Function):
    """The mean of the first element of each row; its gradient is written there alone."""

    @staticmethod
    def forward(ctx, output):
        ctx.save_for_backward(output)
        return output[:, 0].mean()

    @staticmethod
    def backward(ctx, grad):
        (output,) = ctx.saved_tensors
        answer = torch.empty_like(output)
        answer[:, 0] = grad / len(output)
        return answer


def sleeping_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean of the output, whatever the target: one operation forward and one back."""
    return output.mean()


def thin_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean of the first element of each row `[n, size]`, for thin layers.

    It costs the same at any size: autograd's own gradient of a slice writes zeros to all the
    rest, which takes as long as a layer where messages are large.
    """
    return _FirstOfRows.apply(output)
