"""The executor's split of the backward, as `octotune.profile` takes it: measure what will run.

    workload = octotune.profile(layers, inputs, loss_fn, split=deferred_split)

`octotune` does not import the executor, so its profile splits with plain autograd unless it is
given this: F under the replaced functions, I with the queue active, W by running the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from executor.backward import WeightQueue, activate, routing


class DeferredRun:
    """One microbatch in one layer: a `octotune.model.split.SplitRun`."""

    def __init__(self, function: Callable[[Tensor], Tensor], inputs: Tensor) -> None:
        self._inputs = inputs
        self._queue = WeightQueue()
        with routing():
            activate(self._queue)
            try:
                self.output = function(inputs)
            finally:
                activate(None)

    def input_grad(self, grad: Tensor | None) -> Tensor | None:
        """Run I; gradients that are not put off are added to `.grad`."""
        with routing():
            activate(self._queue)
            try:
                torch.autograd.backward(get_gradient_edge(self.output), grad)
            finally:
                activate(None)
        found, self._inputs.grad = self._inputs.grad, None
        return found

    def weight_grad(self) -> None:
        """Run W."""
        self._queue.run()

    def kept_inputs(self) -> Sequence[Tensor]:
        """Return the tensors that W needs, but for the output's gradients."""
        return [tensor for entry in self._queue.entries for tensor in entry.tensors[:-1]]

    def kept_grads(self) -> Sequence[Tensor]:
        """Return the gradients of outputs that W needs."""
        return [entry.tensors[-1] for entry in self._queue.entries]


def deferred_split(
    function: Callable[[Tensor], Tensor],
    inputs: Tensor,
    parameters: Sequence[torch.nn.Parameter],
) -> DeferredRun:
    """Run a layer's F with its weight gradients put off; the parameters say for themselves."""
    return DeferredRun(function, inputs)
