"""Workload: one microbatch through the model, layer by layer."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from octotune.contract.quantities import Amount, Index, short

Times = tuple[Amount, Amount, Amount]


class Layer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The unit the partition keeps whole. Times in ns at speed 1, sizes in bytes a microbatch."""

    name: str
    kind: str = ""
    forward_ns: Amount
    input_grad_ns: Amount
    weight_grad_ns: Amount
    optimizer_ns: Amount = 0
    param_bytes: Amount
    state_bytes: Amount
    saved_bytes: Amount
    saved_w_bytes: Amount = 0
    held_w_bytes: Amount = 0
    workspace_bytes: Amount = 0
    output_bytes: Amount
    offloadable_bytes: Amount = 0
    times_ns: dict[str, Times] = {}

    def __post_init__(self) -> None:
        most = self.saved_bytes + self.saved_w_bytes
        if self.offloadable_bytes > most:
            raise ValueError(
                f"offloadable_bytes of layer {short(self.name)} is {self.offloadable_bytes}; "
                f"it is at most saved_bytes + saved_w_bytes = {most}"
            )


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The layers in forward order; embedding, head and loss are layers like any other."""

    format: Literal["octotune-workload"] = "octotune-workload"
    version: Literal[1] = 1
    name: str
    layers: Annotated[tuple[Layer, ...], Meta(min_length=1)]
    tied: tuple[tuple[Index, Index], ...] = ()

    def __post_init__(self) -> None:
        names: set[str] = set()
        for index, layer in enumerate(self.layers):
            if layer.name in names:
                raise ValueError(
                    f"layers[{index}].name is {short(layer.name)} a second time; names are unique"
                )
            names.add(layer.name)
        tied: set[int] = set()
        for index, (first, second) in enumerate(self.tied):
            if not first < second < len(self.layers):
                raise ValueError(
                    f"tied[{index}] is [{first}, {second}]; write two layers i < j "
                    f"below {len(self.layers)}"
                )
            if first in tied or second in tied:
                raise ValueError(
                    f"tied[{index}] is [{first}, {second}]; a layer is in at most one pair"
                )
            tied |= {first, second}
