"""This rank's stages: their layers, run one after the other, and nothing of other ranks' layers.

Layers come as modules or as callables that make one. A callable's layer is made only on the rank
that runs it, after seeding with the run's seed and the layer's index: its parameters are the same
whatever the partition and the number of ranks.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from executor.errors import MismatchError
from octotune.contract import Plan

# ranks that are threads of one process share its random number generators
_drawing = threading.Lock()

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")

LayerSource = nn.Module | Callable[[], nn.Module]


class StageModule(nn.Module):
    """Consecutive layers `[begin, end)` of the model."""

    def __init__(self, index: int, begin: int, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.index = index
        self.begin = begin
        self.layers = nn.ModuleList(layers)
        self.run = tuple(layers)  # a tuple is quicker to walk than a ModuleList

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers in order."""
        for layer in self.run:
            x = layer(x)
        return x


def layer_seed(seed: int, layer: int) -> int:
    """Return the seed under which a layer made by a callable draws its parameters."""
    return (seed * 1_000_003 + layer * 7919 + 12_345) % (1 << 63)


def make_layer(source: LayerSource, seed: int, layer: int) -> nn.Module:
    """Return a module as it is, or what its callable makes under the layer's own seed.

    Raises TypeError if the callable makes no module.
    """
    if isinstance(source, nn.Module):
        return source
    with _drawing:
        before = torch.get_rng_state(), random.getstate()
        torch.manual_seed(layer_seed(seed, layer))
        random.seed(layer_seed(seed, layer))
        try:
            made = source()
        finally:
            torch.set_rng_state(before[0])
            random.setstate(before[1])
    if not isinstance(made, nn.Module):
        raise TypeError(f"layer {layer} is a {type(made).__name__}; it must be an nn.Module")
    return made


def build_stages(
    plan: Plan, layers: Sequence[LayerSource], device_index: int, seed: int, device: torch.device
) -> dict[int, StageModule]:
    """Make and place the stages of one device of the plan.

    Raises:
        MismatchError: if the number of layers is not the workload's, or one cannot be made.
    """
    expected = len(plan.workload.layers)
    if len(layers) != expected:
        raise MismatchError(
            f"the model has {len(layers)} layers, the plan's workload "
            f"{plan.workload.name!r} has {expected}; tune a plan for this model"
        )
    stages: dict[int, StageModule] = {}
    for index, stage in enumerate(plan.stages):
        if stage.device != device_index:
            continue
        begin, end = stage.layers
        made: list[nn.Module] = []
        for layer in range(begin, end):
            try:
                made.append(make_layer(layers[layer], seed, layer).to(device))
            except Exception as error:
                name = plan.workload.layers[layer].name
                raise MismatchError(
                    f"layer {layer} ({name!r}) cannot be made: {type(error).__name__}: "
                    f"{_first_line(error)}"
                ) from error
            _refuse_wrapped(made[-1], layer)
        stages[index] = StageModule(index, begin, made)
    return stages


def _refuse_wrapped(made: nn.Module, layer: int) -> None:
    """Refuse modules that reduce or shard by hooks which deferred weight gradients never fire."""
    for module in made.modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
                raise MismatchError(
                    f"layer {layer} is wrapped in {kind.__name__}; give the plain module: the "
                    "plan's data_parallel reduces gradients once, after their last W"
                )


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else "no message"
