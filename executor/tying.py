"""Tied layers: parameters that two layers share, on one rank or on two.

On one rank they become one parameter. On two, each rank holds a copy; the copies begin equal,
their gradients are exchanged and added once the step has them, and so they stay equal. Without
this, each copy would silently train on its own part of the gradient.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from executor.agree import agree, gather
from executor.errors import MismatchError
from executor.stages import LayerSource, StageModule
from executor.transport.base import ASIDE, Buffer, Transport
from octotune.contract import Plan

Pair = tuple[int, int]
Names = Sequence[tuple[str, str]]


def tied_devices(plan: Plan) -> dict[int, Pair]:
    """Return the two devices of each tied pair that lies on two, by the pair's index."""
    device_of = _device_of(plan)
    return {
        index: (device_of[i], device_of[j])
        for index, (i, j) in enumerate(plan.workload.tied)
        if device_of[i] != device_of[j]
    }


def _device_of(plan: Plan) -> dict[int, int]:
    return {layer: stage.device for stage in plan.stages for layer in range(*stage.layers)}


def refuse_hidden_sharing(plan: Plan, layers: Sequence[LayerSource]) -> None:
    """Refuse layers on two devices that share a parameter the workload does not name.

    Raises MismatchError. Layers made by callables are not seen: each rank makes its own.
    """
    owner: dict[int, int] = {}
    device_of = _device_of(plan)
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            continue
        for name, param in layer.named_parameters():
            other = owner.setdefault(id(param), index)
            if device_of[other] != device_of[index] and (other, index) not in plan.workload.tied:
                raise MismatchError(
                    f"layers {other} and {index} share the parameter {name!r} and are on "
                    f"devices {device_of[other]} and {device_of[index]}, but the workload's "
                    f"'tied' does not list [{other}, {index}]"
                )


def names_shared_by_identity(plan: Plan, layers: Sequence[LayerSource]) -> dict[Pair, Names]:
    """Return which parameters of tied layers are one object, where the layers are modules."""
    found: dict[Pair, Names] = {}
    for i, j in plan.workload.tied:
        first, second = layers[i], layers[j]
        if isinstance(first, nn.Module) and isinstance(second, nn.Module):
            names = {id(param): name for name, param in first.named_parameters()}
            same = [
                (names[id(param)], name)
                for name, param in second.named_parameters()
                if id(param) in names
            ]
            if same:
                found[i, j] = same
    return found


def shared_names(
    first: Sequence[tuple[str, Sequence[int], str]],
    second: Sequence[tuple[str, Sequence[int], str]],
    pair: Pair,
) -> Names:
    """Return which parameters of two tied layers are one.

    All of them where both layers have the same by name and shape, else that of the only shape
    which each has once. `first` and `second` list (name, shape, type).

    Raises:
        MismatchError: if that does not say which.
    """
    if sorted(map(str, first)) == sorted(map(str, second)):
        return [(name, name) for name, _, _ in first]

    def once(rows: Sequence[tuple[str, Sequence[int], str]]) -> dict[Any, str]:
        found: dict[Any, list[str]] = {}
        for name, shape, dtype in rows:
            found.setdefault((tuple(shape), dtype), []).append(name)
        return {key: names[0] for key, names in found.items() if len(names) == 1}

    mine, other = once(first), once(second)
    common = [key for key in mine if key in other]
    if len(common) != 1:
        raise MismatchError(
            f"layers {pair[0]} and {pair[1]} are tied, but which parameters they share is not "
            f"clear from their shapes; give tied_parameters={{({pair[0]}, {pair[1]}): "
            "[(name in one, name in the other)]}"
        )
    return [(mine[common[0]], other[common[0]])]


def tie(
    plan: Plan,
    stages: Mapping[int, StageModule],
    given: Mapping[Pair, Names],
    transport: Transport,
    key: str,
    device: torch.device,
    timeout_s: float,
) -> list[TiedPair]:
    """Make tied layers share; return this rank's sides of the pairs that lie on two devices.

    Every rank calls it. `given` says which parameters are one where shapes do not.

    Raises:
        MismatchError: on every rank, if what a pair shares is not clear or does not exist.
    """
    pairs: list[TiedPair] = []
    across = tied_devices(plan)
    replica, device_index = divmod(transport.rank, len(plan.cluster.devices))
    for index, (i, j) in enumerate(plan.workload.tied):
        layers = (_layer(stages, i), _layer(stages, j))
        rows = [
            None
            if layer is None
            else [
                [name, list(param.shape), str(param.dtype)]
                for name, param in layer.named_parameters()
            ]
            for layer in layers
        ]
        everyone = gather(transport, f"{key}/tied{index}", rows, timeout_s)
        refused: MismatchError | None = None
        names: Names = []
        try:
            first, second = (
                next(found[side] for found in everyone if found[side] is not None)
                for side in (0, 1)
            )
            names = given[i, j] if (i, j) in given else shared_names(first, second, (i, j))
            _refuse_unknown(names, (first, second), (i, j))
        except MismatchError as error:
            refused = error
        agree(transport, f"{key}/tie{index}", refused, timeout_s)
        if index not in across:
            if layers[0] is not None and layers[1] is not None:
                for one, other in names:
                    where, _, leaf = other.rpartition(".")
                    setattr(layers[1].get_submodule(where), leaf, layers[0].get_parameter(one))
            continue
        devices = across[index]
        if device_index not in devices:
            continue
        side = devices.index(device_index)
        layer = layers[side]
        assert layer is not None
        pair = TiedPair(
            transport,
            # numbered as Costs numbers them: pairs on two devices only, in the workload's order
            sorted(across).index(index),
            [layer.get_parameter(name[side]) for name in names],
            replica * len(plan.cluster.devices) + devices[1 - side],
            device,
            timeout_s,
        )
        pair.share_values(give=side == 0)
        pairs.append(pair)
    return pairs


def _refuse_unknown(names: Names, rows: tuple[Any, Any], pair: Pair) -> None:
    for side in (0, 1):
        known = {name: tuple(shape) for name, shape, _ in rows[side]}
        for both in names:
            if both[side] not in known:
                raise MismatchError(
                    f"tied_parameters names {both[side]!r}, which layer {pair[side]} does not "
                    f"have; it has {', '.join(known)}"
                )


def _layer(stages: Mapping[int, StageModule], layer: int) -> nn.Module | None:
    for stage in stages.values():
        if stage.begin <= layer < stage.begin + len(stage.layers):
            return stage.layers[layer - stage.begin]
    return None


class TiedPair:
    """This rank's side of two tied layers, the other of which is on rank `peer`."""

    def __init__(
        self,
        transport: Transport,
        index: int,
        params: Sequence[nn.Parameter],
        peer: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._transport = transport
        self.index = index
        self._params = list(params)
        self._peer = peer
        self._timeout_s = timeout_s
        self._tag = 1 << 30 | index << 2 | ASIDE
        size = sum(param.numel() for param in self._params)
        self._buffer = Buffer((size,), self._params[0].dtype, device)
        self._began = 0
        self.times: list[list[int]] = []

    def share_values(self, give: bool) -> None:
        """Make the second layer's copy equal to the first's."""
        if give:
            flat = torch.cat([param.detach().reshape(-1) for param in self._params])
            self._transport.send(flat, self._peer, self._tag | 1).wait(self._timeout_s)
            return
        self._transport.receive(self._buffer, self._peer, self._tag | 1).wait(self._timeout_s)
        with torch.no_grad():
            self._unpack([param.data for param in self._params])

    def start(self) -> None:
        """Post both ways."""
        self._began = time.perf_counter_ns()
        self._mine = torch.cat(
            [
                torch.zeros_like(param).view(-1) if param.grad is None else param.grad.reshape(-1)
                for param in self._params
            ]
        )
        self._receive = self._transport.receive(self._buffer, self._peer, self._tag)
        self._send = self._transport.send(self._mine, self._peer, self._tag)

    def finish(self) -> None:
        """Wait, and add the other's share."""
        self._receive.wait(self._timeout_s)
        self._send.wait(self._timeout_s)
        for param in self._params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        # a + b and b + a have the same bits, so both copies stay equal
        self._buffer.tensor.add_(self._mine)
        self._unpack([param.grad for param in self._params if param.grad is not None])
        self.times = [[self.index, self._began, time.perf_counter_ns()]]

    def _unpack(self, targets: Sequence[Tensor]) -> None:
        at = 0
        for target in targets:
            target.copy_(self._buffer.tensor[at : at + target.numel()].view_as(target))
            at += target.numel()
