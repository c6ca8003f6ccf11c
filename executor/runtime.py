"""Runtime: one rank's row, action by action.

What there is to know of the order is in the `RankProgram`, what travels in the `Mailbox`; here are
the tensors. A `Flight` holds what one microbatch leaves in one stage between its F and its W. A
receive buffer belongs to its microbatch until W has run, since the input and the output's
gradient that a deferred weight gradient keeps may be that very buffer; a network that writes into
it changes no tensor version, so nothing else would notice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import _FunctionBase
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from executor.backward import WeightQueue, activate, routing
from executor.errors import MismatchError
from executor.floating import FloatingWeights
from executor.mailbox import Mailbox
from executor.offload.run import Offload
from executor.program import Op, RankProgram
from executor.random_state import RandomState, random_as, random_state
from executor.stages import StageModule
from executor.trace import Clock
from executor.transport.base import Buffer, BufferPool, Transport
from simulator.actions import Kind

_F, _B, _I, _W = Kind.F, Kind.B, Kind.I, Kind.W


class Flight:
    """What one microbatch leaves in one stage between its F and its W (or B)."""

    __slots__ = ("buffer", "grad_buffer", "input", "queue", "random", "root")

    def __init__(self) -> None:
        self.input: Tensor | None = None
        self.buffer: Buffer | None = None
        self.grad_buffer: Buffer | None = None
        self.root: GradientEdge | None = None
        self.queue: WeightQueue | None = None
        self.random: RandomState | None = None


class FillHook(Protocol):
    """Other work for the time in which this rank would wait (`executor.fill`)."""

    def begin_step(self) -> None:
        """A step begins."""

    def before(self, position: int) -> None:
        """The rank would wait for the message of the action at `position`."""

    def before_optimizer(self) -> None:
        """The rank's actions are done, reductions may not be."""

    def end_step(self) -> None:
        """The rank's optimizer is done, the other ranks' may not be."""


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
        offload: the copies to the host and back, or None where there are none.
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
        offload: Offload | None,
        defer: bool,
        scale: float,
        device: torch.device,
        timeout_s: float,
        name: str,
        stage_done: Callable[[int], None],
        losses_done: Callable[[], None],
    ) -> None:
        self._program = program
        self._layers = {index: stage.run for index, stage in stages.items()}
        self._loss_fn = loss_fn
        self._last_stage = num_stages - 1
        self._num_microbatches = num_microbatches
        self._recompute = tuple(recompute)
        self._floating = floating
        self._offload = offload
        self._scale = scale
        self._device = device
        self._stage_done = stage_done
        self._losses_done = losses_done

        self.rank = transport.rank
        self.pool = BufferPool(device, watched=floating is not None)
        self.mailbox = Mailbox(
            program,
            transport,
            ranks,
            num_microbatches,
            self.pool,
            timeout_s,
            f"{name}/{transport.rank // len(ranks)}",
            f"{name}/fault",
        )
        self.clock = Clock(len(program.ops), device)
        self.losses: list[Tensor | None] = [None] * num_microbatches
        self._seeds: dict[torch.dtype, Tensor] = {}
        self.doing: Op | str = "the start of the step"
        self.waiting = False  # for the message that `doing` needs
        self._defers = {(op.stage, op.microbatch) for op in program.ops if defer and op.kind == _I}
        self._order = [op for op in program.ops if floating is None or op.kind != _W]
        self._per_stage = dict.fromkeys(stages, 0)
        for op in program.ops:
            if op.kind in (_B, _W):
                self._per_stage[op.stage] += 1
        self.fill: FillHook | None = None  # what is told where this rank would wait
        self._act = [self._forward, self._backward, self._backward, self._weight]  # by kind

        self._inputs: Sequence[Tensor] | None = None
        self._targets: Sequence[Tensor] | None = None
        self._reset()

    # --- one step ------------------------------------------------------------------------

    @property
    def program(self) -> RankProgram:
        """What this rank does in a step."""
        return self._program

    def step(self, inputs: Sequence[Tensor] | None, targets: Sequence[Tensor] | None) -> None:
        """Run every action once. `inputs` and `targets` are one tensor a microbatch.

        What goes wrong is raised as it is; `doing` and `waiting` say where.
        """
        self._reset()
        self._inputs, self._targets = inputs, targets
        mailbox, floating = self.mailbox, self._floating
        with routing():
            mailbox.begin()
            if self._offload is not None:
                self._offload.begin()
            if floating is None:
                for op in self._order:
                    if op.needs is not None:
                        self._wait(op)
                    self._run(op)
            else:
                floating.reset()
                for op in self._order:
                    while (weight := floating.must_run_before(op)) is not None:
                        self._run_weight(weight, floating)
                    if op.needs is not None:
                        while not self._is_here(op) and (weight := floating.take()) is not None:
                            self._run_weight(weight, floating)
                        self._wait(op)
                    self._run(op)
                    floating.note(op)
                while (weight := floating.take()) is not None:
                    self._run_weight(weight, floating)
            self.doing, self.waiting = "the end of the step", False
            mailbox.finish()
            if self._offload is not None:
                self._offload.finish()

    def _wait(self, op: Op) -> None:
        """Wait for the message that an action needs."""
        self.doing, self.waiting = op, True
        if self.fill is not None:
            self.fill.before(op.position)
        self.mailbox.wait(op.position)

    def _run_weight(self, weight: Op, floating: FloatingWeights) -> None:
        self._run(weight)
        floating.note(weight)

    def _is_here(self, op: Op) -> bool:
        if self._device.type == "cuda":
            # the host runs ahead of the device; what is late is known when the device is there
            self.clock.synchronize()
        return self.mailbox.is_here(op.position)

    def _reset(self) -> None:
        self._flights: dict[tuple[int, int], Flight] = {}
        self._handed: dict[tuple[int, int], Tensor] = {}  # activations to a stage of this rank
        self._answered: dict[tuple[int, int], Tensor | None] = {}  # gradients likewise
        self._backwards_left = dict(self._per_stage)
        self._losses_left = self._num_microbatches

    def _run(self, op: Op) -> None:
        self.doing, self.waiting = op, False
        offload = self._offload
        if offload is not None:
            offload.before(op)
        if torch.autograd.profiler._is_profiler_enabled:
            with torch.profiler.record_function(str(op.action)):
                out, ended_ns = self._timed(op)
        else:
            out, ended_ns = self._timed(op)
        self.mailbox.after(op, out, ended_ns)
        if offload is not None:
            offload.after(op)
        kind = op.kind
        if kind in (_B, _W):
            self._backwards_left[op.stage] -= 1
            if not self._backwards_left[op.stage]:
                self._stage_done(op.stage)

    def _timed(self, op: Op) -> tuple[Tensor | None, int]:
        self.clock.start(op.position)
        out = self._act[op.kind](op)
        return out, self.clock.end(op.position)

    # --- actions -------------------------------------------------------------------------

    def _forward(self, op: Op) -> Tensor | None:
        stage, microbatch = op.stage, op.microbatch
        flight = self._flights[stage, microbatch] = Flight()
        if stage == 0:
            assert self._inputs is not None
            x = self._inputs[microbatch]
        else:
            if op.needs is not None:
                flight.buffer = buffer = self.mailbox.take(op.position)
                assert buffer is not None
                x = buffer.tensor.detach()
            else:
                x = self._handed.pop((stage, microbatch))
            if x.is_floating_point() or x.is_complex():
                x.requires_grad_()
        flight.input = x
        if (stage, microbatch) in self._defers:
            flight.queue = WeightQueue()
        if self._recompute[stage]:
            flight.random = random_state(self._device)
            if self._offload is not None:
                self._offload.holds_input(op, x)
            with torch.no_grad():
                out = self._compute(op, x)
        elif flight.queue is None:
            out = self._compute_saving(op, x, flight)
        else:
            activate(flight.queue)
            try:
                out = self._compute_saving(op, x, flight)
            finally:
                activate(None)
        if out.requires_grad:
            flight.root = _edge(out)
        if stage == self._last_stage:
            self.losses[microbatch] = out.detach()
            self._losses_left -= 1
            if not self._losses_left:
                self._losses_done()
            return None
        self.mailbox.know(stage, out)
        handed = out.detach()
        if op.sends is not None:
            return handed if handed.is_contiguous() else handed.contiguous()
        if flight.buffer is not None and _shares(handed, flight.buffer.tensor):
            handed = handed.clone()  # the buffer may go before the next stage is done with it
        self._handed[stage + 1, microbatch] = handed
        return None

    def _compute_saving(self, op: Op, x: Tensor, flight: Flight) -> Tensor:
        """Run a stage's forward; what F saves leaves for the host where the plan says so."""
        offload = self._offload
        if offload is None:
            return self._compute(op, x)
        listening = offload.listening(op, x if flight.buffer or not op.stage else None)
        if listening is None:
            return self._compute(op, x)
        with listening:
            out = self._compute(op, x)
        offload.close(op, (x, out))
        return out

    def _compute(self, op: Op, x: Tensor) -> Tensor:
        """Run the stage, and the loss after the last one."""
        for layer in self._layers[op.stage]:
            x = layer(x)
        if not isinstance(x, Tensor):
            raise MismatchError(
                f"rank {self.rank}: stage {op.stage} gives a {type(x).__name__}; a layer hands "
                "one tensor to the next",
                self.rank,
            )
        if op.stage != self._last_stage:
            return x
        assert self._targets is not None
        loss = self._loss_fn(x, self._targets[op.microbatch])
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
        grad: Tensor | None = None
        if op.needs is not None:
            flight.grad_buffer = buffer = self.mailbox.take(op.position)
            if buffer is not None:
                grad = buffer.tensor
        elif stage == self._last_stage:
            grad = self._seed(self.losses[microbatch])
        else:
            grad = self._answered.pop((stage, microbatch))
        root, queue = flight.root, flight.queue
        flight.root = flight.input = None
        if queue is not None or self._recompute[stage]:
            activate(queue)
            try:
                if self._recompute[stage]:
                    root = self._again(op, x, flight)
                if root is not None and grad is not None:
                    _engine_run_backward(
                        (root,),
                        (grad,),
                        False,
                        False,
                        (),
                        allow_unreachable=True,
                        accumulate_grad=True,
                    )
            finally:
                activate(None)
        elif root is not None and grad is not None:
            # autograd.backward without its checks of what is known here
            _engine_run_backward(
                (root,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        answer = self._answer(op, x, flight) if stage else None
        if op.kind == _B:
            self._release(op, flight)
        return answer

    def _again(self, op: Op, x: Tensor, flight: Flight) -> GradientEdge | None:
        """Run a stage's forward a second time, for its backward."""
        assert flight.random is not None
        with torch.enable_grad(), random_as(flight.random, self._device):
            out = self._compute_saving(op, x, flight)
        return _edge(out) if out.requires_grad else None

    def _seed(self, loss: Tensor | None) -> Tensor:
        """Return the gradient of one microbatch's loss."""
        assert loss is not None
        seed = self._seeds.get(loss.dtype)
        if seed is None or seed.shape != loss.shape:
            seed = self._seeds[loss.dtype] = torch.full_like(loss, self._scale)
        return seed

    def _answer(self, op: Op, x: Tensor, flight: Flight) -> Tensor | None:
        """Return the input's gradient to send on, or keep it for a stage of this rank."""
        grad = x.grad
        if grad is None and (x.is_floating_point() or x.is_complex()):
            # a stage that the loss does not depend on still answers: with zeros
            grad = torch.zeros_like(x)
        if grad is not None:
            if op.sends is not None and not grad.is_contiguous():
                grad = grad.contiguous()
            elif flight.grad_buffer is not None and _shares(grad, flight.grad_buffer.tensor):
                grad = grad.clone()  # used on while the buffer takes the next message
        if op.sends is None:
            self._answered[op.stage - 1, op.microbatch] = grad
        return grad

    def _weight(self, op: Op) -> None:
        flight = self._flights[op.stage, op.microbatch]
        if flight.queue is not None:
            flight.queue.run()
        self._release(op, flight)

    def _release(self, op: Op, flight: Flight) -> None:
        """Give the receive buffers back: nothing refers to them any more."""
        if flight.buffer is not None:
            self.pool.give(flight.buffer)
        if flight.grad_buffer is not None:
            self.pool.give(flight.grad_buffer)
        if self._offload is not None:
            self._offload.released(op)
        del self._flights[op.stage, op.microbatch]


def _edge(out: Tensor) -> GradientEdge:
    """Return `get_gradient_edge(out)` at half its cost; gradients are enabled."""
    node: Any = out.grad_fn
    if node is None:
        return get_gradient_edge(out)
    # a Python Function's node does not own the graph behind it; a view's node does
    owner = out.view_as(out).grad_fn if isinstance(node, _FunctionBase) else None
    return GradientEdge(node, out.output_nr, owner)


def _shares(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
