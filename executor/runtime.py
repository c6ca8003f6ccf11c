"""Runtime: one rank's row, action by action.

What there is to know of the order is in the `RankProgram`; here are the tensors. A `Flight` holds
what one microbatch leaves in one stage between its F and its W. Receives are posted in the order
of their channel as the program says; the first step learns the shapes: the producer of an
activation writes its shape into the store, the receiver reads it when it would post the receive,
and a gradient has the shape of the activation it answers. A receive buffer belongs to its
microbatch until W has run, since the input and the output's gradient that a deferred weight
gradient keeps may be that very buffer; a network that writes into it changes no tensor version,
so nothing else would notice.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from executor.backward import WeightQueue, activate, routing
from executor.errors import MismatchError, PeerError, StepError
from executor.floating import FloatingWeights
from executor.program import Op, RankProgram
from executor.stages import StageModule
from executor.transport.base import Buffer, BufferPool, Handle, Transport
from simulator.actions import Kind
from simulator.channels import Message

Meta = tuple[tuple[int, ...], torch.dtype]

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_F, _B, _I, _W = Kind.F, Kind.B, Kind.I, Kind.W
# how long a rank that lost its peer looks for the reason that another rank gave
_FAULT_GRACE_S = 1.0


class Flight:
    """What one microbatch leaves in one stage between its F and its W (or B)."""

    __slots__ = ("buffer", "grad_buffer", "input", "queue", "rng", "root")

    def __init__(self) -> None:
        self.input: Tensor | None = None
        self.buffer: Buffer | None = None
        self.grad_buffer: Buffer | None = None
        self.root: GradientEdge | None = None
        self.queue: WeightQueue | None = None
        self.rng: Any = None


class Runtime:
    """Runs one rank's program, step after step.

    Args:
        program: this rank's.
        stages: its stages by index.
        loss_fn: (output, target) -> scalar, of one microbatch.
        transport: connects the ranks of all replicas.
        ranks: the rank of each device of this replica [D].
        num_stages: S.
        num_microbatches: m.
        recompute: which stages run their forward again in I or B [S].
        floating: the W's to float, or None for the plan's own order.
        scale: the gradient of each microbatch's loss.
        device: where tensors live.
        timeout_s: how long any one wait may take.
        name: keeps the keys of several pipelines on one store apart.
        stage_done: called with a stage after its last W or B.
        losses_done: called once the losses of all microbatches are there.
    """

    def __init__(
        self,
        *,
        program: RankProgram,
        stages: dict[int, StageModule],
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        transport: Transport,
        ranks: Sequence[int],
        num_stages: int,
        num_microbatches: int,
        recompute: Sequence[bool],
        floating: FloatingWeights | None,
        defer: bool,
        scale: float,
        device: torch.device,
        timeout_s: float,
        name: str,
        stage_done: Callable[[int], None],
        losses_done: Callable[[], None],
    ) -> None:
        self._program = program
        self._stages = stages
        self._loss_fn = loss_fn
        self._transport = transport
        self._ranks = tuple(ranks)
        self._num_stages = num_stages
        self._num_microbatches = num_microbatches
        self._recompute = tuple(recompute)
        self._floating = floating
        self._defer = defer
        self._scale = scale
        self._device = device
        self._timeout_s = timeout_s
        self._name = name
        self._stage_done = stage_done
        self._losses_done = losses_done
        self._replica = transport.rank // len(ranks)

        self.rank = transport.rank
        self.pool = BufferPool(device)
        self.start_ns = [-1] * len(program.ops)
        self.end_ns = [-1] * len(program.ops)
        self.sent_ns: dict[Message, int] = {}
        self.arrived_ns: dict[Message, int] = {}
        self.losses: list[Tensor | None] = [None] * num_microbatches
        self.most_held_bytes = 0
        self._doing: Any = "the start of the step"
        self._split = {op.stage for op in program.ops if op.kind == _W}
        self._split_at = {(op.stage, op.microbatch) for op in program.ops if op.kind == _I}
        self._last_stage_here = num_stages - 1 in stages
        self._order = [op for op in program.ops if floating is None or op.kind != _W]
        self._per_stage = dict.fromkeys(stages, 0)
        for op in program.ops:
            if op.kind in (_B, _W):
                self._per_stage[op.stage] += 1
        self._act = {_F: self._forward, _B: self._backward, _I: self._backward, _W: self._weight}

        self._inputs: Sequence[Tensor] | None = None
        self._targets: Sequence[Tensor] | None = None
        self._meta: dict[int, Meta] = {}  # of the activation that each stage produces
        self._epoch = 0
        self._reset()

    # --- one step ------------------------------------------------------------------------

    def step(self, inputs: Sequence[Tensor] | None, targets: Sequence[Tensor] | None) -> None:
        """Run every action once. `inputs` and `targets` are one tensor a microbatch.

        What goes wrong is raised as it is; `fault` puts it in words.
        """
        self._reset()
        self._inputs, self._targets = inputs, targets
        floating = self._floating
        with routing():
            for message in self._program.first_posts:
                self._to_post[message.source].append(message)
            self._post()
            if floating is None:
                for op in self._order:
                    if op.needs is not None:
                        self._await(op, op.needs)
                    self._run(op)
            else:
                floating.reset()
                for op in self._order:
                    while (weight := floating.must_run_before(op)) is not None:
                        self._run_weight(weight, floating)
                    if op.needs is not None:
                        self._float_until(op.needs, floating)
                        self._await(op, op.needs)
                    self._run(op)
                    floating.note(op)
                while (weight := floating.take()) is not None:
                    self._run_weight(weight, floating)
            self._doing = "the end of the step"
            for handle in self._sent.values():
                handle.wait(self._timeout_s)
            self._sent.clear()

    def _run_weight(self, weight: Op, floating: FloatingWeights) -> None:
        self._run(weight)
        floating.note(weight)

    def _reset(self) -> None:
        self._flights: dict[tuple[int, int], Flight] = {}
        self._local: dict[tuple[Kind, int, int], Tensor | None] = {}
        self._handles: dict[Message, Handle | None] = {}
        self._buffers: dict[Message, Buffer] = {}
        self._sent: dict[Message, Handle] = {}
        self._to_post: dict[int, deque[Message]] = {
            source: deque() for source, _ in self._program.pairs
        }
        self._backwards_left = dict(self._per_stage)
        self._losses_left = self._num_microbatches
        self.sent_ns = {}
        self.arrived_ns = {}

    def _run(self, op: Op) -> None:
        self._doing = op
        position = op.position
        named = (
            torch.profiler.record_function(str(op.action))
            if torch.autograd.profiler._is_profiler_enabled
            else None
        )
        with named or contextlib.nullcontext():
            self.start_ns[position] = time.perf_counter_ns()
            out = self._act[op.kind](op)
            self.end_ns[position] = time.perf_counter_ns()
        if op.settle:
            for message in op.settle:
                handle = self._sent.pop(message, None)
                if handle is not None:
                    handle.wait(self._timeout_s)
        if op.sends is not None and out is not None:
            message = op.sends
            self._sent[message] = self._transport.send(
                out, self._ranks[message.target], self._tag(message)
            )
            self.sent_ns[message] = self.end_ns[position]
        if op.posts:
            for message in op.posts:
                self._to_post[message.source].append(message)
            self._post()
        if op.kind == _B or op.kind == _W:
            self._backwards_left[op.stage] -= 1
            if not self._backwards_left[op.stage]:
                self._stage_done(op.stage)

    # --- messages ------------------------------------------------------------------------

    def _tag(self, message: Message) -> int:
        number = message.stage * self._num_microbatches + message.microbatch
        return number << 2 | (message.kind == _I)

    def _post(self, needed: Message | None = None) -> None:
        """Post what may be posted, in each channel's order.

        A receive whose shape is not known yet holds up those behind it; for `needed` the shape
        is waited for, and the wait is one that its message would take anyway.
        """
        for queue in self._to_post.values():
            while queue:
                message = queue[0]
                boundary = message.stage if message.kind == _F else message.stage - 1
                meta = self._meta.get(boundary)
                if meta is None:
                    if message.kind == _I:
                        break  # its activation has not run forward here yet
                    must = needed is not None and needed.source == message.source
                    meta = self._ask(boundary, must)
                    if meta is None:
                        break
                queue.popleft()
                shape, dtype = meta
                if message.kind == _I and not dtype.is_floating_point and not dtype.is_complex:
                    self._handles[message] = None  # such values have no gradient
                else:
                    buffer = self.pool.take(shape, dtype)
                    self._buffers[message] = buffer
                    self._handles[message] = self._transport.receive(
                        buffer, self._ranks[message.source], self._tag(message)
                    )
                if message == needed:
                    needed = None

    def _meta_key(self, boundary: int) -> str:
        return f"{self._name}/{self._replica}/shape/{self._epoch}/{boundary}"

    def _ask(self, boundary: int, must: bool) -> Meta | None:
        """Return the shape that another rank wrote down; without `must` only if it has."""
        store, key = self._transport.store, self._meta_key(boundary)
        if not store.check([key]):
            if not must:
                return None
            self._wait_for_key(key)
        shape, dtype = json.loads(store.get(key))
        meta = (tuple(shape), _DTYPES[dtype])
        self._meta[boundary] = meta
        return meta

    def _wait_for_key(self, key: str) -> None:
        """Wait for a key of the store, with an eye on other ranks' faults."""
        store, end, nap = self._transport.store, time.monotonic() + self._timeout_s, 0.0002
        fault = f"{self._name}/fault"
        while not store.check([key]):
            if store.check([fault]):
                raise ConnectionError("another rank failed")
            if time.monotonic() > end:
                raise TimeoutError(f"nothing came within {self._timeout_s} s")
            time.sleep(nap)
            nap = min(nap * 1.5, 0.05)

    def _await(self, op: Op, message: Message) -> None:
        """Return once the message is here."""
        self._doing = (op, message)
        if message not in self._handles:
            self._post(message)
        handle = self._handles[message]
        if handle is not None:
            handle.wait(self._timeout_s)
        self.arrived_ns[message] = time.perf_counter_ns()

    def _float_until(self, message: Message, floating: FloatingWeights) -> None:
        """Run W's while the message is not here."""
        if message not in self._handles:
            self._post()
        while True:
            if message in self._handles:
                handle = self._handles[message]
                if handle is None or handle.done():
                    return
            weight = floating.take()
            if weight is None:
                return
            self._run_weight(weight, floating)

    def _know(self, stage: int, out: Tensor) -> None:
        """Write down an activation's shape the first time, refuse another one later."""
        meta = (tuple(out.shape), out.dtype)
        known = self._meta.get(stage)
        if known is None:
            self._meta[stage] = meta
            self._transport.store.set(
                self._meta_key(stage), json.dumps([list(out.shape), str(out.dtype)])
            )
        elif known != meta:
            raise MismatchError(
                f"rank {self.rank}: stage {stage} gives {list(out.shape)} {out.dtype}, and gave "
                f"{list(known[0])} {known[1]} for another microbatch; all are of one shape",
                self.rank,
            )

    def forget_shapes(self) -> None:
        """Learn the shapes anew in the next step; every rank does this before the same step."""
        self._epoch += 1
        self._meta.clear()
        self.pool.clear()

    # --- actions -------------------------------------------------------------------------

    def _forward(self, op: Op) -> Tensor | None:
        stage, microbatch = op.stage, op.microbatch
        flight = self._flights[stage, microbatch] = Flight()
        if stage == 0:
            assert self._inputs is not None
            x = self._inputs[microbatch]
        else:
            if op.needs is not None:
                flight.buffer = self._buffers.pop(op.needs)
                del self._handles[op.needs]
                x = flight.buffer.tensor.detach()
            else:
                local = self._local.pop((_F, stage - 1, microbatch))
                assert local is not None
                x = local
            if x.is_floating_point() or x.is_complex():
                x.requires_grad_()
        flight.input = x
        if self._defer and (stage, microbatch) in self._split_at:
            flight.queue = WeightQueue()
        if self._recompute[stage]:
            flight.rng = _rng_state(self._device)
            with torch.no_grad():
                out = self._compute(op, x)
        else:
            activate(flight.queue)
            try:
                out = self._compute(op, x)
            finally:
                activate(None)
            if out.requires_grad:
                flight.root = get_gradient_edge(out)
        if stage == self._num_stages - 1:
            self.losses[microbatch] = out.detach()
            self._losses_left -= 1
            if not self._losses_left:
                self._losses_done()
            return None
        self._know(stage, out)
        handed = out.detach()
        if op.sends is not None:
            return handed if handed.is_contiguous() else handed.contiguous()
        if flight.buffer is not None and _shares(handed, flight.buffer.tensor):
            handed = handed.clone()  # the buffer may go before the next stage is done with it
        self._local[_F, stage, microbatch] = handed
        return None

    def _compute(self, op: Op, x: Tensor) -> Tensor:
        """Run the stage, and the loss after the last one."""
        out = self._stages[op.stage](x)
        if not isinstance(out, Tensor):
            raise MismatchError(
                f"rank {self.rank}: stage {op.stage} gives a {type(out).__name__}; a layer hands "
                "one tensor to the next",
                self.rank,
            )
        if op.stage != self._num_stages - 1:
            return out
        assert self._targets is not None
        loss = self._loss_fn(out, self._targets[op.microbatch])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise MismatchError(
                f"rank {self.rank}: loss_fn gives {found}; it must give one number", self.rank
            )
        return loss

    def _backward(self, op: Op) -> Tensor | None:
        """Run I or B: all that is not in the queue gets its gradient now."""
        stage, microbatch = op.stage, op.microbatch
        flight = self._flights[stage, microbatch]
        x = flight.input
        assert x is not None
        grad: Tensor | None
        if op.needs is not None:
            handle = self._handles.pop(op.needs)
            if handle is not None:
                flight.grad_buffer = self._buffers.pop(op.needs)
            grad = None if flight.grad_buffer is None else flight.grad_buffer.tensor
        elif stage == self._num_stages - 1:
            grad = None
        else:
            grad = self._local.pop((_I, stage + 1, microbatch))
        activate(flight.queue)
        try:
            root = flight.root
            if self._recompute[stage]:
                with torch.enable_grad(), _rng_as(flight.rng, self._device):
                    out = self._compute(op, x)
                root = get_gradient_edge(out) if out.requires_grad else None
                del out
            if root is not None:
                if stage == self._num_stages - 1:
                    loss = self.losses[microbatch]
                    assert loss is not None
                    grad = torch.full_like(loss, self._scale)
                if grad is not None:
                    torch.autograd.backward(root, grad)
        finally:
            activate(None)
        flight.root = None
        given = x.grad if stage else None
        flight.input = None
        out_grad: Tensor | None = None
        if stage and (x.is_floating_point() or x.is_complex()):
            # a stage that the loss does not depend on still answers: with zeros
            out_grad = torch.zeros_like(x) if given is None else given
            if op.sends is not None:
                if not out_grad.is_contiguous():
                    out_grad = out_grad.contiguous()
                elif flight.grad_buffer is not None and _shares(
                    out_grad, flight.grad_buffer.tensor
                ):
                    out_grad = out_grad.clone()  # sent on while the buffer takes the next message
            elif flight.grad_buffer is not None and _shares(out_grad, flight.grad_buffer.tensor):
                out_grad = out_grad.clone()
        if stage and op.sends is None:
            self._local[_I, stage, microbatch] = out_grad
        if op.kind == _B:
            self._release(stage, microbatch, flight)
        return out_grad

    def _weight(self, op: Op) -> None:
        flight = self._flights[op.stage, op.microbatch]
        if flight.queue is not None:
            flight.queue.run()
        self._release(op.stage, op.microbatch, flight)

    def _release(self, stage: int, microbatch: int, flight: Flight) -> None:
        """Give the receive buffers back: nothing refers to them any more."""
        if flight.buffer is not None:
            self.pool.give(flight.buffer)
        if flight.grad_buffer is not None:
            self.pool.give(flight.grad_buffer)
        del self._flights[stage, microbatch]

    # --- faults --------------------------------------------------------------------------

    def times_ns(self) -> tuple[list[int], list[int]]:
        """Return when each action of the last step began and ended, by the plan's order."""
        return self.start_ns, self.end_ns

    def fault(self, error: Exception) -> StepError | MismatchError:
        """Return what to raise for what went wrong: the rank, the action, the reason."""
        if isinstance(error, (StepError, MismatchError)):
            return error
        doing = self._doing
        if isinstance(error, (ConnectionError, TimeoutError)):
            what = f"at {doing}"
            if isinstance(doing, tuple):
                op, message = doing
                what = (
                    f"waiting for {message} from rank {self._ranks[message.source]} "
                    f"to run {op.action}"
                )
            elif isinstance(doing, Op):
                what = f"at {doing.action}"
            known = self.known_fault(_FAULT_GRACE_S)
            if known is not None:
                return known
            lost = (
                f"nothing came within {self._timeout_s:g} s"
                if isinstance(error, TimeoutError)
                else "the connection closed"
            )
            return PeerError(f"rank {self.rank}, {what}: {lost}", self.rank)
        where = f"at {doing.action}" if isinstance(doing, Op) else f"at {doing}"
        text = str(error).strip().splitlines()
        return MismatchError(
            f"rank {self.rank}, {where}: {type(error).__name__}: {text[0] if text else ''}",
            self.rank,
        )

    def publish(self, error: StepError | MismatchError) -> None:
        """Tell the other ranks why this one stops; the first reason stands, and names its rank."""
        kind = "mismatch" if isinstance(error, MismatchError) else "step"
        # where the store went with the rank that held it, every rank speaks for itself
        with contextlib.suppress(RuntimeError):
            stands = self._transport.store.compare_set(
                f"{self._name}/fault", "", json.dumps([error.rank, kind, str(error)])
            )
            error.rank = json.loads(stands)[0]

    def known_fault(self, grace_s: float) -> StepError | MismatchError | None:
        """Return the reason another rank gave for stopping, if one gave it."""
        key, end = f"{self._name}/fault", time.monotonic() + grace_s
        try:
            while not self._transport.store.check([key]):
                if time.monotonic() > end:
                    return None
                time.sleep(0.02)
            rank, kind, text = json.loads(self._transport.store.get(key))
        except RuntimeError:
            return None
        return MismatchError(text, rank) if kind == "mismatch" else PeerError(text, rank)


def _shares(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _rng_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), cuda


class _rng_as:  # noqa: N801 - a context manager
    """Draw again the random numbers drawn after `state` was taken, then go on as before."""

    def __init__(self, state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
        self._state, self._device = state, device

    def __enter__(self) -> None:
        self._before = _rng_state(self._device)
        self._set(self._state)

    def __exit__(self, *_: object) -> None:
        self._set(self._before)

    def _set(self, state: tuple[Tensor, Tensor | None]) -> None:
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self._device)
