"""How a layer's backward comes apart into its input half (I) and its weight half (W).

A layer's I and W are two durations, so something has to run them apart to time them. What runs
them is a `BackwardSplit`: called with the layer's function and its input it runs F, and gives a
`SplitRun` that runs I and then W. The executor's own split can stand in its place, so that what is
measured is what will run; `autograd_split` is the one that needs nothing but autograd:

    F   every weight that linear, a convolution or embedding uses goes in as a view of its own;
        the views and the outputs of these calls are noted
    I   one `autograd.grad` from the layer's output to its input, to the noted outputs, and to
        the parameters nobody noted (norms, biases outside of linear): no noted weight is on
        the way, so none of their gradients is computed
    W   one `autograd.grad` from each noted output to its own weight's view

A weight's view belongs to one call, so that the way from a noted output to its view is that call
alone, also where a weight is used twice in a layer or shared between layers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.autograd.graph import GradientEdge

# the functions of torch.nn.functional whose weight gradients wait for W
DEFERRED_FUNCTIONS = ("linear", "conv1d", "conv2d", "conv3d", "embedding")

_patching = threading.RLock()


class SplitRun(Protocol):
    """One microbatch in one layer, after its F."""

    @property
    def output(self) -> Tensor:
        """What the layer's function returned."""
        ...

    def input_grad(self, grad: Tensor | None) -> Tensor | None:
        """Run I: from the gradient of the output (none where that is a loss) to the input's.

        Adds to `.grad` what does not wait for W. Returns nothing where the input needs none.
        """
        ...

    def weight_grad(self) -> None:
        """Run W: add the gradients that I left to `.grad`."""
        ...

    def kept_inputs(self) -> Sequence[Tensor]:
        """Return what F saved and W needs: asked between I and W."""
        ...

    def kept_grads(self) -> Sequence[Tensor]:
        """Return the gradients that I left for W: asked between I and W."""
        ...


class BackwardSplit(Protocol):
    """Runs a layer's F so that its I and W can follow one by one."""

    def __call__(
        self,
        function: Callable[[Tensor], Tensor],
        inputs: Tensor,
        parameters: Sequence[torch.nn.Parameter],
    ) -> SplitRun:
        """Run `function(inputs)`.

        Args:
            function: one layer, the last one with its loss.
            inputs: a leaf; it requires grad where its gradient is wanted.
            parameters: the layer's parameters that require grad.
        """
        ...


@dataclass(slots=True, kw_only=True)
class _Use:
    """One call of a deferred function: where its gradient comes in, and where it is to go."""

    inputs: Tensor
    output: GradientEdge
    parameters: list[torch.nn.Parameter]
    views: list[GradientEdge]
    grad: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class AutogradRun:
    """A layer's F under `autograd_split`; see the module's text."""

    output: Tensor
    input_edge: GradientEdge | None
    undeferred: list[torch.nn.Parameter]
    uses: list[_Use] = field(default_factory=list)

    def input_grad(self, grad: Tensor | None) -> Tensor | None:
        import torch

        wanted: list[Any] = [use.output for use in self.uses]
        wanted += self.undeferred
        if self.input_edge is not None:
            wanted.append(self.input_edge)
        if not wanted:
            return None
        grads = torch.autograd.grad(
            self.output, wanted, grad, retain_graph=True, allow_unused=True
        )
        for use, arrived in zip(self.uses, grads, strict=False):
            use.grad = arrived
        _add(self.undeferred, grads[len(self.uses) : len(self.uses) + len(self.undeferred)])
        return grads[-1] if self.input_edge is not None else None

    def weight_grad(self) -> None:
        import torch

        for use in self.uses:
            if use.grad is None:
                continue
            grads = torch.autograd.grad(use.output, use.views, use.grad, allow_unused=True)
            _add(use.parameters, grads)

    def kept_inputs(self) -> Sequence[Tensor]:
        return [use.inputs for use in self.uses]

    def kept_grads(self) -> Sequence[Tensor]:
        return [use.grad for use in self.uses if use.grad is not None]


def autograd_split(
    function: Callable[[Tensor], Tensor],
    inputs: Tensor,
    parameters: Sequence[torch.nn.Parameter],
) -> SplitRun:
    """Run a layer's F with plain autograd such that I and W can follow apart.

    Weights that linear, convolutions and embedding take as they are (leaves) wait for W; all
    others, and those inside of activation checkpointing, are part of I. Every gradient equals
    that of an unsplit backward up to the order of summation where a weight is used several times.
    """
    from torch.autograd.graph import get_gradient_edge

    uses: list[_Use] = []
    edge = get_gradient_edge(inputs) if inputs.requires_grad else None
    with _noting(uses):
        output = function(inputs)
    deferred = {id(parameter) for use in uses for parameter in use.parameters}
    return AutogradRun(
        output=output,
        input_edge=edge,
        undeferred=[each for each in parameters if id(each) not in deferred],
        uses=uses,
    )


def _add(parameters: Iterable[torch.nn.Parameter], grads: Iterable[Tensor | None]) -> None:
    for parameter, grad in zip(parameters, grads, strict=True):
        if grad is None:
            continue
        if parameter.grad is None:
            parameter.grad = grad
        else:
            parameter.grad.add_(grad)


@contextmanager
def _noting(uses: list[_Use]) -> Iterator[None]:
    """Note each call of a deferred function meanwhile, composite functions' own calls included."""
    from torch.nn import functional

    with _patching:
        originals = {name: getattr(functional, name) for name in DEFERRED_FUNCTIONS}
        for name, original in originals.items():
            setattr(functional, name, _noted(original, uses))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(functional, name, original)


def _noted(original: Callable[..., Tensor], uses: list[_Use]) -> Callable[..., Tensor]:
    import torch
    from torch.autograd.graph import get_gradient_edge

    def waits(value: object) -> bool:
        return isinstance(value, torch.nn.Parameter) and value.is_leaf and value.requires_grad

    def call(input: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Tensor:
        if not (waits(weight) and torch.is_grad_enabled()):
            return original(input, weight, *rest, **named)
        parameters: list[torch.nn.Parameter] = []
        views: list[GradientEdge] = []

        def view(value: Any) -> Any:
            if not waits(value):
                return value
            own = value.view_as(value)
            parameters.append(value)
            views.append(get_gradient_edge(own))
            return own

        output = original(
            input,
            view(weight),
            *map(view, rest),
            **{name: view(value) for name, value in named.items()},
        )
        # A view that is changed in place leaves the gradient's way; what it views stays on it.
        origin = output._base if output._is_view() and output._base is not None else output
        uses.append(
            _Use(
                inputs=input,
                output=get_gradient_edge(origin),
                parameters=parameters,
                views=views,
            )
        )
        return output

    return call
