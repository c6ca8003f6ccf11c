"""Sleeping layers with a light embedding and a heavy head, for four ranks on any machine.

Sleeping takes no core, so four ranks show on two cores, too, what their schedule does: the bubbles
of the measured timeline are the plan's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from benchmarks.models import SleepingLayer, sleeping_batch, sleeping_layers, sleeping_loss
from octotune import Layer, Workload

NUM_MICROBATCHES = 8
MESSAGE_BYTES = 4096
# F, I and W of each layer in ms: an embedding, ten blocks, a head as long as four of them
TIMES_MS = ((2.0, 0.0, 2.0), *((10.0, 10.0, 10.0),) * 10, (40.0, 40.0, 40.0))


def workload() -> Workload:
    """Return the model's workload at its nominal times."""
    last = len(TIMES_MS) - 1
    return Workload(
        name="sleeping",
        layers=tuple(
            Layer(
                name="embedding" if index == 0 else "head" if index == last else f"block{index}",
                kind="sleep",
                forward_ns=round(forward * 1e6),
                input_grad_ns=round(input_grad * 1e6),
                weight_grad_ns=round(weight_grad * 1e6),
                param_bytes=4,
                state_bytes=20,
                saved_bytes=0,
                output_bytes=MESSAGE_BYTES,
            )
            for index, (forward, input_grad, weight_grad) in enumerate(TIMES_MS)
        ),
    )


def factory() -> tuple[
    list[SleepingLayer], Callable[[Tensor, Tensor], Tensor], Iterator[tuple[Tensor, Tensor]]
]:
    """Return layers, loss and endless minibatches, as the executor takes them."""

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield sleeping_batch(NUM_MICROBATCHES, MESSAGE_BYTES)

    return sleeping_layers(TIMES_MS), sleeping_loss, batches()
