"""Measure a model's layers on this device: nn.Modules in, a contract workload out.

    layers ──▶ one sound pass ──▶ byte pass ──▶ warm-up and timed passes ──▶ optimizer ──▶ Workload
               (refuse early)     (storages)    (medians, `chain`)

The aim is that a step simulated from the workload takes as long as the step that is run from it,
so each layer is timed as a stage will run it: after its neighbours and on their real tensors
(`chain`), its backward split where the executor splits it (`split`), on as many threads as a rank
has, and with other processes computing if other ranks will (`neighbours`). Bytes are what autograd
really saves, by storage (`storages`); nothing is computed from shapes.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octotune.contract.workload import Layer, Workload
from octotune.errors import MalformedError
from octotune.model.chain import (
    GRADIENT_SCALE,
    ActivationBytes,
    Link,
    Stopwatch,
    byte_pass,
    sound_chain,
    time_pass,
)
from octotune.model.neighbours import busy_neighbours
from octotune.model.run_queue import run_queue_ns
from octotune.model.split import BackwardSplit, autograd_split
from octotune.model.storages import storage_bytes, storage_key

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    LayerOrFactory = nn.Module | Callable[[], nn.Module]
    OptimizerFactory = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def profile(
    layers: Sequence[LayerOrFactory],
    example_input: Tensor,
    loss_fn: Callable[[Tensor, Any], Tensor],
    *,
    example_target: Any = None,
    name: str = "profiled model",
    names: Sequence[str] | None = None,
    optimizer_fn: OptimizerFactory | None = None,
    device: torch.device | str | None = None,
    repeats: int = 10,
    warmup: int = 3,
    threads: int = 1,
    neighbours: int = 0,
    split: BackwardSplit = autograd_split,
    seed: int = 0,
    progress: bool = True,
) -> Workload:
    """Measure each layer for one microbatch and return the workload.

    Times are medians over `repeats` passes after `warmup` passes. A pass runs F of all layers,
    then I of all, then W of all; what a layer's W is, `split` decides. By default the weight
    gradients of linear, convolutions and embedding are W and all else of the backward is I. On a
    CPU, the time for which another process held this thread's core is taken off where the system
    tells it (Linux), so that a busy machine gives the times of an idle one.

    The loss belongs to the last layer: its F includes `loss_fn`, its I begins there, and its
    `output_bytes` are those of the loss. A layer's input belongs to it where autograd saves it
    for that layer; a storage that several layers save counts once, with one that keeps it until
    W if there is any. `state_bytes` are parameters, buffers, gradients, and what the optimizer
    keeps after a step (AdamW: two moments and one 4-byte counter a parameter). Frozen parameters
    are in `state_bytes` but not in `param_bytes`, as they have no gradient to reduce.
    `offloadable_bytes` are the saved storages that are neither the layer's input nor its output,
    but for small ones, which are not worth a copy.
    `workspace_bytes` leave out, on a CPU, what one kernel allocates for itself.

    Modules are left as they were: gradients, buffers and training mode; parameters are not
    changed. Dropout and the like draw from `seed`, and the caller's random state is kept.

    Args:
        layers: in forward order; each a module, or a callable that makes one. Modules are measured
            in one chain, so that all of them and their activations fit on the device; each layer
            that is given as a callable is made, measured and dropped by itself, so that models
            fit that are larger than the device, at caches warmer than in training.
        example_input: one microbatch as the first layer takes it, [microbatch, ...].
        loss_fn: `loss_fn(output, target)`, one number for a microbatch.
        example_target: the target that goes with the input.
        name: the workload's name.
        names: one a layer; default the names in a Sequential or ModuleList, else `layers.<i>`.
        optimizer_fn: makes the optimizer from parameters; AdamW by default.
        device: where to measure; default where the first parameter is, or the input. Modules that
            are elsewhere are refused, made ones are moved.
        repeats: timed passes, at least 1.
        warmup: passes before, at least 0.
        threads: of torch on a CPU meanwhile, as many as a rank has when the plan runs (the
            executor: 1).
        neighbours: how many other processes compute meanwhile; ranks - 1 where ranks share the
            machine's memory.
        split: how a layer's backward comes apart.
        seed: for random gradients and for layers that draw.
        progress: show a bar on stderr if that is a terminal.

    Raises:
        MalformedError: if layers, names or counts are not as said above, in one line.
    """
    import torch

    if repeats < 1 or warmup < 0 or threads < 1 or neighbours < 0:
        raise MalformedError(
            f"repeats, warmup, threads, neighbours are {repeats}, {warmup}, {threads}, "
            f"{neighbours}; they are at least 1, 0, 1, 0"
        )
    if not isinstance(example_input, torch.Tensor):
        raise MalformedError(
            f"example_input is a {type(example_input).__name__}; "
            "it is one tensor [microbatch, ...]"
        )
    if not callable(loss_fn):
        raise MalformedError(
            f"loss_fn is a {type(loss_fn).__name__}; it is a callable (output, target) -> loss"
        )
    all_names = _names(layers, names)
    where = torch.device(device) if device is not None else _device_of(layers, example_input)
    inputs = example_input.detach().to(where)
    target = example_target.to(where) if hasattr(example_target, "to") else example_target
    total = (warmup + repeats) * len(layers)
    measured: list[_Measured] = []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[where] if where.type == "cuda" else []))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_threads(threads, where))
        stack.enter_context(_no_garbage_collection())
        advance = stack.enter_context(_progress(total, progress))
        stopwatch = Stopwatch(where, stack.enter_context(run_queue_ns()))
        stack.enter_context(busy_neighbours(neighbours))
        torch.manual_seed(seed)
        for begin, end in _parts(layers):
            part, inputs = _measure_part(
                [_module(layers[index], all_names[index], where) for index in range(begin, end)],
                all_names[begin:end],
                inputs,
                lossy=(lambda output: loss_fn(output, target)) if end == len(layers) else None,
                split=split,
                stopwatch=stopwatch,
                make_optimizer=optimizer_fn or torch.optim.AdamW,
                repeats=repeats,
                warmup=warmup,
                advance=advance,
            )
            measured += part
    return Workload(
        name=name,
        layers=tuple(
            _layer(own_name, each) for own_name, each in zip(all_names, measured, strict=True)
        ),
        tied=_tied(
            [
                each.shares if isinstance(layer, torch.nn.Module) else ()
                for layer, each in zip(layers, measured, strict=True)
            ],
            all_names,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """What a layer holds whether or not a microbatch is in flight, and what updating it takes."""

    optimizer_ns: int
    param_bytes: int
    state_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    kind: str
    times_ns: tuple[int, int, int]
    activations: ActivationBytes
    state: _State
    shares: tuple[int, ...]  # the storages of its parameters


def _measure_part(
    modules: Sequence[nn.Module],
    names: Sequence[str],
    inputs: Tensor,
    *,
    lossy: Callable[[Tensor], Tensor] | None,
    split: BackwardSplit,
    stopwatch: Stopwatch,
    make_optimizer: OptimizerFactory,
    repeats: int,
    warmup: int,
    advance: Callable[[int], None],
) -> tuple[list[_Measured], Tensor]:
    """Measure layers that are all here; `lossy` makes the last one's output the loss.

    Returns:
        One value a layer, and the input of the layer after them.
    """

    def with_loss(module: nn.Module, loss: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        return lambda given: loss(module(given))

    chain = [
        Link(
            name=name,
            function=module
            if lossy is None or module_index < len(modules) - 1
            else with_loss(module, lossy),
            parameters=_trained(module),
            is_last=lossy is not None and module_index == len(modules) - 1,
        )
        for module_index, (name, module) in enumerate(zip(names, modules, strict=True))
    ]
    times: list[list[tuple[int, int, int]]] = []
    with _as_they_were(modules):
        chain, output = sound_chain(chain, inputs)
        sizes = byte_pass(chain, inputs, split, _constants(modules))
        for turn in range(warmup + repeats):
            once = time_pass(chain, inputs, split, stopwatch)
            if turn >= warmup:
                times.append(once)
            advance(len(chain))
        states = [
            _measure_state(module, make_optimizer, stopwatch, repeats, min(warmup, 2))
            for module in modules
        ]
    medians = [
        tuple(round(statistics.median(kind)) for kind in zip(*of_layer, strict=True))
        for of_layer in zip(*times, strict=True)
    ]
    return [
        _Measured(
            kind=_kind(module),
            times_ns=(forward, input_grad, weight_grad),
            activations=activations,
            state=state,
            shares=tuple(storage_key(each) for each in module.parameters()),
        )
        for module, (forward, input_grad, weight_grad), activations, state in zip(
            modules, medians, sizes, states, strict=True
        )
    ], output


def _layer(name: str, measured: _Measured) -> Layer:
    forward, input_grad, weight_grad = measured.times_ns
    sizes, state = measured.activations, measured.state
    return Layer(
        name=name,
        kind=measured.kind,
        forward_ns=forward,
        input_grad_ns=input_grad,
        weight_grad_ns=weight_grad,
        optimizer_ns=state.optimizer_ns,
        param_bytes=state.param_bytes,
        state_bytes=state.state_bytes,
        saved_bytes=sizes.saved_bytes,
        saved_w_bytes=sizes.saved_w_bytes,
        held_w_bytes=sizes.held_w_bytes,
        workspace_bytes=sizes.workspace_bytes,
        output_bytes=sizes.output_bytes,
        offloadable_bytes=sizes.offloadable_bytes,
    )


def _measure_state(
    module: nn.Module,
    make_optimizer: OptimizerFactory,
    stopwatch: Stopwatch,
    repeats: int,
    warmup: int,
) -> _State:
    """Step an optimizer on copies of the layer's parameters."""
    import torch

    trained = _trained(module)
    own = [*module.parameters(), *module.buffers()]
    resident = storage_bytes(own)
    param_bytes = storage_bytes(trained)
    if not trained:
        return _State(optimizer_ns=0, param_bytes=0, state_bytes=resident)
    copies = [torch.nn.Parameter(each.detach().clone()) for each in trained]
    for copy in copies:
        copy.grad = torch.randn_like(copy) * GRADIENT_SCALE
    optimizer = make_optimizer(copies)
    for _ in range(warmup + repeats):
        with stopwatch:
            optimizer.step()
    times = stopwatch.read_ns()[warmup:]
    kept = [
        value
        for of_parameter in optimizer.state.values()
        for value in of_parameter.values()
        if isinstance(value, torch.Tensor) and value.device.type == trained[0].device.type
    ]
    grads = [copy.grad for copy in copies if copy.grad is not None]
    return _State(
        optimizer_ns=round(statistics.median(times)),
        param_bytes=param_bytes,
        state_bytes=resident + storage_bytes(grads) + storage_bytes(kept),
    )


def _names(layers: Sequence[LayerOrFactory], names: Sequence[str] | None) -> list[str]:
    import torch

    if isinstance(layers, torch.nn.Module) and not hasattr(layers, "__len__"):
        raise MalformedError(
            f"layers is a {type(layers).__name__}; give its parts in forward order, "
            "as a Sequential or a list"
        )
    if len(layers) == 0:
        raise MalformedError("layers is empty; give at least one")
    for index, layer in enumerate(layers):
        if not callable(layer):
            raise MalformedError(
                f"layers[{index}] is a {type(layer).__name__}; "
                "it is an nn.Module or a callable that makes one"
            )
    if names is not None:
        found = list(names)
        if len(found) != len(layers):
            raise MalformedError(f"names has {len(found)} entries; there are {len(layers)} layers")
    elif isinstance(layers, torch.nn.Module):
        found = [own_name for own_name, _ in layers.named_children()]
        if len(found) != len(layers):  # one module twice in a Sequential is one child
            found = [f"layers.{index}" for index in range(len(layers))]
    else:
        found = [f"layers.{index}" for index in range(len(layers))]
    for index, own_name in enumerate(found):
        if own_name in found[:index]:
            raise MalformedError(f"names[{index}] is {own_name!r} a second time; they are unique")
    return found


def _parts(layers: Sequence[LayerOrFactory]) -> list[tuple[int, int]]:
    """Return the chains `[begin, end)`: modules side by side are one, each callable is one."""
    import torch

    parts: list[tuple[int, int]] = []
    joins = False
    for index, layer in enumerate(layers):
        is_module = isinstance(layer, torch.nn.Module)
        if is_module and joins:
            parts[-1] = (parts[-1][0], index + 1)
        else:
            parts.append((index, index + 1))
        joins = is_module
    return parts


def _module(layer: LayerOrFactory, name: str, device: torch.device) -> nn.Module:
    import torch

    if not isinstance(layer, torch.nn.Module):
        made = layer()
        if not isinstance(made, torch.nn.Module):
            raise MalformedError(
                f"layer {name!r} is a callable that returns a {type(made).__name__}; "
                "it returns an nn.Module"
            )
        return made.to(device)
    for key, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        if tensor.device.type != device.type:
            raise MalformedError(
                f"layer {name!r} has {key!r} on {tensor.device}, "
                f"the profile is taken on {device}; move the module or say device="
            )
    return layer


def _device_of(layers: Sequence[LayerOrFactory], example_input: Tensor) -> torch.device:
    import torch

    for layer in layers:
        if isinstance(layer, torch.nn.Module):
            for parameter in layer.parameters():
                return parameter.device
    return example_input.device


def _trained(module: nn.Module) -> tuple[nn.Parameter, ...]:
    return tuple(each for each in module.parameters() if each.requires_grad)


def _constants(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Return the tensors that the layers have anyway: parameters, buffers and attributes."""
    import torch

    found: list[Tensor] = []
    for module in modules:
        found += [*module.parameters(), *module.buffers()]
        found += [each.grad for each in module.parameters() if each.grad is not None]
        for part in module.modules():
            found += [value for value in vars(part).values() if isinstance(value, torch.Tensor)]
    return found


def _kind(module: nn.Module) -> str:
    own = getattr(module, "kind", None)
    return own if isinstance(own, str) else type(module).__name__


def _tied(shares: Sequence[Sequence[int]], names: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of layers that share parameters."""
    first_of: dict[int, int] = {}
    pairs: set[tuple[int, int]] = set()
    for index, keys in enumerate(shares):
        for key in keys:
            first = first_of.setdefault(key, index)
            if first != index:
                pairs.add((first, index))
    for pair in pairs:
        for other in pairs - {pair}:
            if set(pair) & set(other):
                common = names[(set(pair) & set(other)).pop()]
                raise MalformedError(
                    f"layer {common!r} shares parameters with more than one layer; "
                    "a layer is tied to at most one other"
                )
    return tuple(sorted(pairs))


@contextmanager
def _as_they_were(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Give every trained parameter a zero gradient meanwhile; put gradients and buffers back."""
    import torch

    grads: dict[nn.Parameter, Tensor | None] = {
        each: each.grad for module in modules for each in _trained(module)
    }
    buffers = [(each, each.clone()) for module in modules for each in module.buffers()]
    for parameter in grads:
        parameter.grad = torch.zeros_like(parameter)
    try:
        yield
    finally:
        for parameter, grad in grads.items():
            parameter.grad = grad
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


@contextmanager
def _threads(count: int, device: torch.device) -> Iterator[None]:
    import torch

    if device.type != "cpu":
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep the collector out of timed passes; nothing here makes cycles worth collecting."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _progress(total: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that is drawn between passes only, never while one is timed."""
    import sys

    if not (wanted and sys.stderr.isatty()):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("profiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("layer passes,"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        auto_refresh=False,
    )
    with bar:
        task = bar.add_task("", total=total)

        def advance(steps: int) -> None:
            bar.update(task, advance=steps, refresh=True)

        yield advance
