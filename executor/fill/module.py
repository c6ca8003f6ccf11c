"""Any nn.Module as a fill job: inference or training, cut into micro-steps by its layers.

    def make(batch_size, technique):
        return ModuleTask(
            model, lambda size: DataLoader(data, size), batch_size, technique=technique,
            loss_fn=loss_fn, optimizer_fn=torch.optim.AdamW,        # without these: inference
        )

Inference runs a micro-step a piece. Training runs the pieces' forwards, the loss, their backwards
and their updates. With "checkpointing" a piece keeps only its input and runs again for its
backward; with "offload" its parameters are on the device only while it runs, and gradients and
optimizer state stay on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from executor.fill.pieces import INPUT, Piece, cut, tensors_of, value_of
from octotune.errors import MalformedError

_TECHNIQUES = ("none", "checkpointing", "offload", "checkpointing and offload")


class _Pass:
    """One batch on its way."""

    __slots__ = ("made", "rng", "size", "target", "values")

    def __init__(self, values: dict[str, Any], target: Any, size: int, num: int) -> None:
        self.values = values
        self.target = target
        self.size = size
        self.made: list[Any] = [None] * num  # what each piece made, with its graph
        self.rng: list[Tensor | None] = [None] * num


class ModuleTask:
    """A module's inference or training as a task.

    Args:
        model: of one tensor, or its layers in order.
        loader: batches of a size, `(size) -> iterable`, or an iterable of batches; a batch is an
            input tensor, or an input and a target. It begins again when it ends.
        batch_size: handed to `loader`.
        loss_fn: (output, target) -> scalar; with it the job trains.
        optimizer_fn: (parameters) -> optimizer, one a piece; AdamW by default.
        technique: "none", "checkpointing", "offload", "checkpointing and offload".
        pieces: into how many pieces the model is cut at most; by default one a layer.
        on_output: called with each batch's output, in inference.

    Raises:
        MalformedError: if the model cannot be cut, or an argument does not fit the others.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        loader: Callable[[int], Iterable[Any]] | Iterable[Any],
        batch_size: int = 1,
        *,
        loss_fn: Callable[[Tensor, Any], Tensor] | None = None,
        optimizer_fn: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        technique: str = "none",
        pieces: int | None = None,
        on_output: Callable[[Tensor], None] | None = None,
    ) -> None:
        if technique not in _TECHNIQUES:
            raise MalformedError(f"technique is {technique!r}; allowed: {', '.join(_TECHNIQUES)}")
        self._checkpoints = "checkpointing" in technique
        if self._checkpoints and loss_fn is None:
            raise MalformedError("technique 'checkpointing' is for training; give loss_fn")
        found = cut(model, pieces)
        self._pieces, self._result = found.pieces, found.result
        hosts: dict[int, Any] = {}  # pieces may share parameters
        offloads = "offload" in technique
        self._homes = [_Home(piece, hosts) for piece in self._pieces] if offloads else []
        self._make: Callable[[int], Iterable[Any]] = (
            loader if callable(loader) else lambda _: loader
        )
        self._batch_size = batch_size
        self._loss_fn = loss_fn
        self._optimizer_fn = torch.optim.AdamW if optimizer_fn is None else optimizer_fn
        self._optimizers: list[torch.optim.Optimizer | None] = []
        self._on_output = on_output
        self._device = torch.device("cpu")
        self._rows: Iterator[Any] = iter(())
        self._at = 0  # batches taken since the loader began
        num = len(self._pieces)
        labels = [piece.label for piece in self._pieces]
        self.micro_step_names = [f"{label} forward" for label in labels]
        if loss_fn is not None:
            self.micro_step_names += ["loss"]
            self.micro_step_names += [f"{label} backward" for label in reversed(labels)]
            self.micro_step_names += [f"{label} update" for label in labels]
        self.num_micro_steps = len(self.micro_step_names)
        self._num = num

    def setup(self, device: torch.device) -> None:
        """Put the pieces on the device, make optimizers, begin the data."""
        self._device = device
        for at, piece in enumerate(self._pieces):
            piece.module.train(self._loss_fn is not None)
            if self._homes:
                self._homes[at].leave(device)
            else:
                piece.module.to(device)
        if self._loss_fn is not None:
            seen: set[int] = set()
            for at, piece in enumerate(self._pieces):
                own = self._homes[at].host if self._homes else piece.parameters()
                mine = [p for p in own if p.requires_grad and id(p) not in seen]
                seen |= {id(p) for p in mine}
                self._optimizers.append(self._optimizer_fn(mine) if mine else None)
        self._rows = iter(self._make(self._batch_size))

    def run(self, k: int, carry: Any) -> Any:
        """Run micro-step k of a pass."""
        if k == 0:
            carry = self._begin()
        if k < self._num:
            self._forward(k, carry)
            if self._loss_fn is None and k + 1 == self._num:
                return self._finish(carry)
            return carry
        k -= self._num
        if k == 0:
            self._loss(carry)
        elif k <= self._num:
            self._backward(self._num - k, carry)
        else:
            at = k - self._num - 1
            self._update(at)
            if at + 1 == self._num:
                return carry.size
        return carry

    # --- one pass ------------------------------------------------------------------------

    def _begin(self) -> _Pass:
        row = next(self._rows, None)
        if row is None:
            self._rows, self._at = iter(self._make(self._batch_size)), 0
            row = next(self._rows, None)
            if row is None:
                raise ValueError("the loader has no batches")
        self._at += 1
        x, target = row if isinstance(row, (tuple, list)) else (row, None)
        x = x.to(self._device)
        if isinstance(target, Tensor):
            target = target.to(self._device)
        return _Pass({INPUT: x}, target, int(x.shape[0]), self._num)

    def _call(self, at: int, on: _Pass) -> Any:
        piece = self._pieces[at]
        return piece.module(*(value_of(on.values, name) for name in piece.arguments))

    def _forward(self, at: int, on: _Pass) -> None:
        if self._homes:
            self._homes[at].fetch(self._device)
        if self._loss_fn is None:
            with torch.no_grad():
                out = self._call(at, on)
        elif self._checkpoints:
            on.rng[at] = _rng_of(self._device)
            with torch.no_grad():
                out = self._call(at, on)
        else:
            with torch.enable_grad():
                out = on.made[at] = self._call(at, on)
        if self._homes:
            self._homes[at].leave(self._device)
        on.values[self._pieces[at].output] = _leaf(out, self._loss_fn is not None)
        if self._loss_fn is None:
            self._forget(at, on)

    def _forget(self, at: int, on: _Pass) -> None:
        """Let go of values that no later piece reads."""
        needed = {
            name.name
            for piece in self._pieces[at + 1 :]
            for name in piece.arguments
            if hasattr(name, "name")
        } | {self._result.name}
        for name in list(on.values):
            if name not in needed:
                del on.values[name]

    def _finish(self, on: _Pass) -> int:
        if self._on_output is not None:
            self._on_output(value_of(on.values, self._result))
        return on.size

    def _loss(self, on: _Pass) -> None:
        assert self._loss_fn is not None
        with torch.enable_grad():
            self._loss_fn(value_of(on.values, self._result), on.target).backward()

    def _backward(self, at: int, on: _Pass) -> None:
        output = self._pieces[at].output
        leaves = tensors_of(on.values[output])
        if self._homes:
            self._homes[at].fetch(self._device)
        if self._checkpoints:
            with _rng_as(on.rng[at], self._device), torch.enable_grad():
                made = self._call(at, on)
        else:
            made = on.made[at]
        pairs = [
            (out, leaf.grad)
            for out, leaf in zip(tensors_of(made), leaves, strict=True)
            if leaf.grad is not None and out.requires_grad
        ]
        if pairs:
            outs, grads = zip(*pairs, strict=True)
            torch.autograd.backward(outs, grads)
        on.made[at] = None
        del on.values[output], made, pairs
        if self._homes:
            self._homes[at].take_gradients()
            self._homes[at].leave(self._device)

    def _update(self, at: int) -> None:
        optimizer = self._optimizers[at]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    # --- between passes ------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return parameters, optimizers' states, and how far the data have been read."""
        models = []
        for at, piece in enumerate(self._pieces):
            if self._homes:
                self._homes[at].fetch(self._device)
            found = piece.module.state_dict()
            models.append({name: value.detach().cpu().clone() for name, value in found.items()})
            if self._homes:
                self._homes[at].leave(self._device)
        optimizers = [None if each is None else each.state_dict() for each in self._optimizers]
        return {"pieces": models, "optimizers": optimizers, "batches": self._at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: as many batches of the data are left out as had been read."""
        for at, (piece, values) in enumerate(zip(self._pieces, state["pieces"], strict=True)):
            if self._homes:
                self._homes[at].fetch(self._device)
            piece.module.load_state_dict(values)
            if self._homes:
                self._homes[at].keep()
                self._homes[at].leave(self._device)
        for optimizer, values in zip(self._optimizers, state["optimizers"], strict=True):
            if optimizer is not None:
                optimizer.load_state_dict(values)
        self._at = int(state["batches"])
        self._rows = itertools.islice(iter(self._make(self._batch_size)), self._at, None)

    def teardown(self) -> None:
        """Let go of everything."""
        self._pieces = ()
        self._homes, self._optimizers, self._rows = [], [], iter(())


class _Home:
    """A piece's parameters and buffers on the host; on the device only when fetched."""

    def __init__(self, piece: Piece, hosts: dict[int, Any]) -> None:
        self._params = list(piece.module.parameters())
        self._buffers = list(piece.module.buffers())
        for p in self._params:
            if id(p) not in hosts:
                hosts[id(p)] = nn.Parameter(
                    p.detach().cpu().clone(), requires_grad=p.requires_grad
                )
        for b in self._buffers:
            if id(b) not in hosts:
                hosts[id(b)] = b.detach().cpu().clone()
        self.host: list[nn.Parameter] = [hosts[id(p)] for p in self._params]
        self._host_buffers: list[Tensor] = [hosts[id(b)] for b in self._buffers]

    def fetch(self, device: torch.device) -> None:
        """Copy to the device."""
        for param, host in zip(self._params, self.host, strict=True):
            param.data = host.detach().to(device, copy=True)
        for buffer, kept in zip(self._buffers, self._host_buffers, strict=True):
            buffer.data = kept.to(device, copy=True)

    def leave(self, device: torch.device) -> None:
        """Free the device; buffers, which a forward may have written, are kept first."""
        for buffer, kept in zip(self._buffers, self._host_buffers, strict=True):
            if buffer.numel():
                kept.copy_(buffer)
            buffer.data = torch.empty(0, dtype=kept.dtype, device=device)
        for param, host in zip(self._params, self.host, strict=True):
            param.data = torch.empty(0, dtype=host.dtype, device=device)

    def keep(self) -> None:
        """Take what is on the device for the host's copy."""
        for param, host in zip(self._params, self.host, strict=True):
            host.data.copy_(param.data)

    def take_gradients(self) -> None:
        """Add the gradients to the host's parameters."""
        for param, host in zip(self._params, self.host, strict=True):
            if param.grad is None:
                continue
            grad = param.grad.to(host.device)
            host.grad = grad if host.grad is None else host.grad.add_(grad)
            param.grad = None


def _leaf(value: Any, trains: bool) -> Any:
    """Return a value cut off from its graph; gradients of what reads it add up in it."""
    if isinstance(value, (tuple, list)):
        return tuple(_leaf(part, trains) for part in value)
    if not isinstance(value, Tensor):
        return value
    found = value.detach()
    if trains and (found.is_floating_point() or found.is_complex()):
        found.requires_grad_()
    return found


def _rng_of(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


class _rng_as:  # noqa: N801 - a context manager
    """Draw again what was drawn after a state was taken, then go on as before."""

    def __init__(self, state: Tensor | None, device: torch.device) -> None:
        assert state is not None
        self._state, self._device = state, device

    def __enter__(self) -> None:
        self._before = _rng_of(self._device)
        self._set(self._state)

    def __exit__(self, *_: object) -> None:
        self._set(self._before)

    def _set(self, state: Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state, self._device)
        else:
            torch.set_rng_state(state)
