"""A module cut into pieces that run one after the other, by its layers or by its traced graph.

A piece reads named values and makes one: a tensor, or a tuple of tensors where what lies between
two cuts is more than one (skip connections). `cut` takes an nn.Sequential, or a sequence of
layers, as it is; any other module is traced by torch.fx and cut between its calls of submodules.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from octotune.errors import MalformedError

INPUT = "x"


@dataclass(slots=True)
class Piece:
    """One piece: `module(*values of arguments)` is the value `output`."""

    module: nn.Module
    arguments: tuple[Any, ...]  # Name, or a constant
    output: str
    label: str

    def parameters(self) -> list[nn.Parameter]:
        """Return its parameters."""
        return list(self.module.parameters())


@dataclass(frozen=True, slots=True)
class Name:
    """A value by name; `index` where it is one of a tuple."""

    name: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """A module in pieces; `result` is what the last ones make."""

    pieces: tuple[Piece, ...]
    result: Name


def cut(model: nn.Module | Sequence[nn.Module], most: int | None = None) -> Cut:
    """Cut a module of one input into at most so many pieces of about as many layers.

    Raises:
        MalformedError: if it is no sequence of layers and torch.fx cannot trace it.
    """
    if isinstance(model, nn.Sequential) or not isinstance(model, nn.Module):
        layers = list(model)
        if not layers or not all(isinstance(layer, nn.Module) for layer in layers):
            raise MalformedError(
                f"a fill job's layers are {len(layers)} things, not all of them nn.Module"
            )
        groups = _groups(len(layers), most)
        pieces = []
        for number, (begin, end) in enumerate(groups):
            before = INPUT if number == 0 else f"piece{number - 1}"
            pieces.append(
                Piece(
                    module=nn.Sequential(*layers[begin:end]),
                    arguments=(Name(before),),
                    output=f"piece{number}",
                    label=f"layers {begin}-{end - 1}" if end - begin > 1 else f"layer {begin}",
                )
            )
        return Cut(tuple(pieces), Name(pieces[-1].output))
    return _traced(model, most)


def _groups(count: int, most: int | None) -> list[tuple[int, int]]:
    """Return bounds of consecutive groups whose sizes differ by one at most."""
    parts = count if most is None else max(1, min(most, count))
    edges = [round(at * count / parts) for at in range(parts + 1)]
    return list(pairwise(edges))


def _traced(model: nn.Module, most: int | None) -> Cut:
    from torch.fx import Node, symbolic_trace
    from torch.fx.passes.split_module import split_module

    try:
        traced = symbolic_trace(model)
    except Exception as error:
        text = str(error).strip().splitlines()
        raise MalformedError(
            f"torch.fx cannot trace {type(model).__name__} ({text[0] if text else error!r}); give "
            "its layers as an nn.Sequential or a list"
        ) from error
    nodes = [node for node in traced.graph.nodes if node.op not in ("placeholder", "output")]
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise MalformedError(
            f"{type(model).__name__} takes {len(inputs)} inputs; a fill job's model takes one"
        )
    # a cut lies before each call of a submodule; what follows a call belongs to it
    starts = [at for at, node in enumerate(nodes) if node.op == "call_module"]
    bounds = _groups(max(1, len(starts)), most)
    part: dict[Node, int] = {}
    for number, (begin, end) in enumerate(bounds):
        first = 0 if number == 0 else starts[begin]
        last = starts[end] if end < len(starts) else len(nodes)
        part |= dict.fromkeys(nodes[first:last], number)
    split = split_module(traced, model, lambda node: part[node])
    names: dict[Node, Name] = {}
    pieces: list[Piece] = []
    result: Name | None = None
    for node in split.graph.nodes:
        if node.op == "placeholder":
            names[node] = Name(INPUT)
        elif node.op == "call_module":
            arguments = tuple(names[a] if isinstance(a, Node) else a for a in node.args)
            module = split.get_submodule(str(node.target))
            pieces.append(Piece(module, arguments, node.name, f"part {len(pieces)}"))
            names[node] = Name(node.name)
        elif node.op == "call_function" and node.target is operator.getitem:
            source, index = node.args
            names[node] = Name(names[source].name, int(index))
        elif node.op == "output" and isinstance(node.args[0], Node):
            result = names[node.args[0]]
        else:
            raise MalformedError(
                f"{type(model).__name__} gives more than one tensor; give its layers as an "
                "nn.Sequential or a list"
            )
    assert result is not None  # every graph has an output
    return Cut(tuple(pieces), result)


def value_of(values: dict[str, Any], name: Any) -> Any:
    """Return what an argument stands for."""
    if not isinstance(name, Name):
        return name
    found = values[name.name]
    return found if name.index is None else found[name.index]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value: one, or those of a tuple."""
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return [part for part in parts if isinstance(part, torch.Tensor)]
