"""Sleeping layers that save real tensors: what a layer keeps until I, until W and from I to W.

    x [rows, 64] ─ repeat ─▶ wide ─ * scale ─▶ scaled ─ squared ─ mean ─ sleep ─▶ [rows, 64]

`wide` is kept until W (the scale's gradient is deferred as a linear's is), `scaled` until I, and
from I to W the gradient of `scaled`. Each is `SAVED_BYTES` large, nothing else of size is saved,
and both may leave. The arithmetic is light next to the sleeps, and every gradient goes through
what was saved.

The contract counts saved bytes from the start of F to the end of I (or B). A layer that sleeps
last does just that: F saves and then sleeps, I sleeps and then lets go. With `sleeps_first` F
saves as it ends and I lets go as it begins, and the device holds less than the contract says
while they run. Layers that compute lie between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from benchmarks.models import SleepingLayer
from executor import weight_queue
from octotune import Layer, Workload

WIDTH, ROWS = 64, 64
TIMES = 32  # how often a row is repeated
SAVED_BYTES = ROWS * WIDTH * TIMES * 4
_LOSS_BYTES = 2 * ROWS * WIDTH * 4  # what the loss saves: its clamped input and the difference


class _Scale(Function):
    """wide [rows, n] * scale [n]; the scale's gradient waits for W where there is a queue."""

    @staticmethod
    def forward(ctx: Any, wide: Tensor, scale: Tensor, param: nn.Parameter, queue: Any) -> Tensor:
        ctx.save_for_backward(wide)
        ctx.scale, ctx.param, ctx.queue = scale.detach(), param, queue
        return wide * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (wide,) = ctx.saved_tensors
        weight_grad = None
        if ctx.queue is None:
            weight_grad = (wide * grad).sum(0)
        else:
            ctx.queue.defer((ctx.param,), (wide, grad), lambda: ((wide * grad).sum(0),))
        return grad * ctx.scale, weight_grad, None, None


class SavingLayer(nn.Module):
    """Sleeps `times_ms` = (F, I, W) and saves 2 x SAVED_BYTES a microbatch; x is [rows, WIDTH]."""

    def __init__(
        self, times_ms: Sequence[float], seed: int = 0, sleeps_first: bool = False
    ) -> None:
        super().__init__()
        self.sleep = SleepingLayer(times_ms)
        self.sleeps_first = sleeps_first
        generator = torch.Generator().manual_seed(seed)
        self.scale = nn.Parameter(torch.rand(WIDTH * TIMES, generator=generator) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, WIDTH]."""
        if self.sleeps_first:
            x = self.sleep(x)
        wide = x.repeat(1, TIMES)
        queue = weight_queue()
        scale = self.scale if queue is None else self.scale.detach()
        scaled = _Scale.apply(wide, scale, self.scale, queue)
        out = (scaled * scaled).view(-1, TIMES, WIDTH).mean(1)
        return out if self.sleeps_first else self.sleep(out)


def saving_layers(
    times_ms: Sequence[Sequence[float]], sleeps_first: bool = False
) -> list[SavingLayer]:
    """Return one layer for each (F, I, W) in milliseconds."""
    return [SavingLayer(times, seed, sleeps_first) for seed, times in enumerate(times_ms)]


def saving_batches(num_microbatches: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield minibatches without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = ROWS * num_microbatches
        yield (
            torch.rand(rows, WIDTH, generator=generator) + 0.5,
            torch.rand(rows, WIDTH, generator=generator),
        )


def saving_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean of squares of what is missing; values are kept near 1."""
    return (output.clamp(0.0, 2.0) - target).square().mean()


def saving_workload(
    times_ms: Sequence[Sequence[float]], own_ms: Sequence[float] = (0.0, 0.0, 0.0)
) -> Workload:
    """Return the layers' workload at their nominal times and what else F, I and W take."""
    f, i, w = own_ms
    return Workload(
        name="saving",
        layers=tuple(
            Layer(
                name=f"block{index}",
                kind="saving",
                forward_ns=round((forward + f) * 1e6),
                input_grad_ns=round((input_grad + i) * 1e6),
                weight_grad_ns=round((weight_grad + w) * 1e6),
                param_bytes=4 * WIDTH * TIMES + 4,
                state_bytes=16 * WIDTH * TIMES + 16,
                saved_bytes=SAVED_BYTES + (_LOSS_BYTES if index == len(times_ms) - 1 else 0),
                saved_w_bytes=SAVED_BYTES,
                held_w_bytes=SAVED_BYTES,
                workspace_bytes=2 * SAVED_BYTES,
                output_bytes=4 * ROWS * WIDTH,
                offloadable_bytes=2 * SAVED_BYTES,
            )
            for index, (forward, input_grad, weight_grad) in enumerate(times_ms)
        ),
    )


Factory = tuple[
    list[SavingLayer],
    Callable[[Tensor, Tensor], Tensor],
    Iterator[tuple[Tensor, Tensor]],
]
