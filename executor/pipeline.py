"""Pipeline: a plan, a model and a loss, ready to step.

    pipe = Pipeline(plan, layers, loss_fn)
    optimizer = torch.optim.AdamW(pipe.parameters())
    for inputs, targets in batches:
        loss = pipe.step(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()
    pipe.close()

Every rank makes one, with the same plan; each builds only its own stages. `step` leaves the
gradients of the mean loss over the microbatches (and replicas) in the parameters; all else, the
optimizer included, stays the user's. What is wrong is raised on every rank, in one line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor, nn

from executor.agree import agree, gather
from executor.batches import Batch, Batches
from executor.errors import MismatchError, StepError
from executor.faults import Faults
from executor.floating import FloatLimit, floating_weights
from executor.loss import StepLoss
from executor.offload.host_book import open_book
from executor.offload.run import Offload
from executor.offload.saved_watch import SavedWatch
from executor.offload.state import StateOffload
from executor.program import SEND_WINDOW, lower, receive_window_for
from executor.replicas import Reducer
from executor.runtime import FillHook, Runtime
from executor.stages import LayerSource, StageModule, build_stages
from executor.trace import RankTrace, clock_offset_ns, message_times, to_timeline
from executor.transport import Transport
from executor.tying import names_shared_by_identity, refuse_hidden_sharing, tie
from executor.wiring import connect, default_transport, plan_of
from octotune.check import check
from octotune.contract import Plan
from octotune.errors import MalformedError
from octotune.offload.measured import MeasuredOffload
from simulator.actions import Kind
from simulator.timeline import Timeline


class Pipeline:
    """One rank of a plan.

    Args:
        plan: a plan or its file; or a CSV file of torch.distributed.pipelining, whose stages then
            get equal numbers of layers (see `executor.torch_csv` for other cuts). Checked here.
        layers: the workload's layers, as modules or callables that make one.
        loss_fn: (output, target) -> scalar, for one microbatch.
        transport: how ranks talk; by default the initialised torch.distributed, or nothing at all
            where the plan has one device and torch.distributed is not initialised.
        device: where this rank's tensors live; by default the CPU.
        float_limit: how far W may float. "memory": up to the device's memory in the plan's
            cluster; "plan": up to the plan's own peak, its fullest device's, and with offload
            each device's own; "off": not at all. "auto": "plan" with offload, else "memory".
        defer: whether a split backward puts weight gradients off; without, I does all of it.
        receive_window: receives of one channel posted ahead of their use; by default 4, and more
            of messages that are small in the plan's workload.
        send_window: messages of one channel that may be on their way.
        seed: layers made by callables draw their parameters from it.
        tied_parameters: for tied layers (i, j), which parameters are one, as (name in i, name in
            j); by default found by name and shape.
        watch_saved: count the bytes that autograd's saved tensors really hold, for `offloaded`.
        timeout_s: how long any wait may take.

    Raises:
        MismatchError: if plan, model and ranks do not fit, on every rank.
        ScheduleError, DeadlockError, OutOfMemoryError: if the plan breaks a rule.
    """

    def __init__(
        self,
        plan: Plan | str | Path,
        layers: Sequence[LayerSource],
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        *,
        transport: Transport | None = None,
        device: torch.device | str = "cpu",
        float_limit: FloatLimit = "auto",
        defer: bool = True,
        receive_window: int | None = None,
        send_window: int = SEND_WINDOW,
        seed: int = 0,
        tied_parameters: Mapping[tuple[int, int], Sequence[tuple[str, str]]] | None = None,
        watch_saved: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        self.plan = plan_of(plan, len(layers))
        self.device = torch.device(device)
        self.timeout_s = timeout_s
        self.transport = default_transport(self.plan) if transport is None else transport
        self._name = self.transport.next_name()
        refused: Exception | None = None
        try:
            self._plan_ahead(float_limit, receive_window, send_window)
            self._stages = build_stages(self.plan, layers, self.device_index, seed, self.device)
            refuse_hidden_sharing(self.plan, layers)
        except (MalformedError, ValueError) as error:
            refused = error
        self._agree("build", refused)
        hosts = gather(self.transport, self._key("hosts"), self.transport.host, timeout_s)
        connect(self.transport, self.plan, self._programs, self._replicas, hosts)
        self._offset_ns = clock_offset_ns(self.transport, hosts, timeout_s, self.device)
        self._pairs = tie(
            self.plan,
            self._stages,
            names_shared_by_identity(self.plan, layers) | dict(tied_parameters or {}),
            self.transport,
            self._name,
            self.device,
            timeout_s,
        )
        self._batches = Batches(
            self.transport,
            self.plan.num_microbatches,
            self._num_devices,
            self.device,
            self._name,
        )
        self._offload = self._build_offload(hosts, float_limit, watch_saved)
        self._build_runtime(loss_fn, defer)
        self._optimizer_ns: list[int] = []
        self._began_ns = 0
        self._fill: FillHook | None = None
        self._broken: Exception | None = None
        self._closed = False
        self._num_gathers = 0
        self.num_steps = 0

    # --- building ------------------------------------------------------------------------

    def _key(self, what: str) -> str:
        return f"{self._name}/{what}"

    def _agree(self, what: str, error: Exception | None) -> None:
        """Raise on every rank if one rank failed; on that rank what it found itself."""
        agree(self.transport, self._key(what), error, self.timeout_s)

    def _plan_ahead(self, limit: FloatLimit, receive_window: int | None, send_window: int) -> None:
        """Check the plan and lay out every rank's program."""
        plan, transport = self.plan, self.transport
        if receive_window is None:
            receive_window = receive_window_for(
                max(layer.output_bytes for layer in plan.workload.layers)
            )
        if receive_window < 1 or send_window < 1:
            raise MismatchError(
                f"receive_window is {receive_window}, send_window {send_window}; "
                "both are at least 1"
            )
        if limit not in get_args(FloatLimit):
            raise MismatchError(
                f"float_limit is {limit!r}; write 'auto', 'memory', 'plan' or 'off'"
            )
        parallel = plan.cluster.data_parallel
        self._replicas = 1 if parallel is None else parallel.size
        self._num_devices = len(plan.cluster.devices)
        needed = self._num_devices * self._replicas
        if transport.world_size != needed:
            raise MismatchError(
                f"there are {transport.world_size} ranks; the plan needs {needed} "
                f"({self._num_devices} devices x data-parallel size {self._replicas})"
            )
        self.replica, self.device_index = divmod(transport.rank, self._num_devices)
        checked = check(plan)
        self.predicted = checked.timeline
        self.costs = checked.timeline.costs
        self._schedule = checked.timeline.schedule
        self._programs = lower(
            self._schedule,
            [stage.device for stage in plan.stages],
            receive_window=receive_window,
            send_window=send_window,
        )
        self._program = self._programs[self.device_index]
        self._floating = floating_weights(
            self._program.ops, self.predicted, self.device_index, limit
        )

    def _build_offload(
        self, hosts: Sequence[str], limit: FloatLimit, watch_saved: bool
    ) -> Offload | None:
        """Make what copies to the host. Every rank calls it; None where there is nothing to do."""
        if not (
            watch_saved or any(device.offload_bandwidth for device in self.plan.cluster.devices)
        ):
            return None
        book = open_book(
            self.transport,
            hosts,
            self.replica,
            self._num_devices,
            self.costs,
            self._key("book"),
            self.timeout_s,
        )
        if not watch_saved and not self._can_offload:
            return None
        most = int(self.costs.memory_bytes[self.device_index])
        if limit != "memory":
            most = min(most, int(self.predicted.peak_bytes[self.device_index]))
        offload = Offload(
            plan=self.plan,
            predicted=self.predicted,
            device_index=self.device_index,
            ops=self._program.ops,
            stages=self._stages,
            floats=self._floating is not None,
            limit_bytes=most,
            watch=SavedWatch() if watch_saved else None,
            book=book,
            device=self.device,
            timeout_s=self.timeout_s,
        )
        if self._floating is not None and offload.copies_any:
            self._floating.fits = offload.fits
            offload.room.put_off_bytes = self._floating.largest_rise_bytes
        return offload

    def _build_runtime(self, loss_fn: Callable[[Tensor, Tensor], Tensor], defer: bool) -> None:
        self._reducer: Reducer | None = None
        if self._replicas > 1:
            last: dict[int, int] = {}
            for op in self._program.ops:
                if op.kind in (Kind.B, Kind.W):
                    last[op.stage] = op.position
            self._reducer = Reducer(
                self.transport,
                self._stages,
                sorted(last, key=last.__getitem__),
                [r * self._num_devices + self.device_index for r in range(self._replicas)],
                self.timeout_s,
            )
        base = self.replica * self._num_devices
        ranks = range(base, base + self._num_devices)
        self._runtime = Runtime(
            program=self._program,
            stages=self._stages,
            loss_fn=loss_fn,
            transport=self.transport,
            ranks=ranks,
            num_stages=len(self.plan.stages),
            num_microbatches=self.plan.num_microbatches,
            recompute=[stage.recompute for stage in self.plan.stages],
            floating=self._floating,
            offload=self._offload,
            defer=defer,
            scale=1.0 / (self.plan.num_microbatches * self._replicas),
            device=self.device,
            timeout_s=self.timeout_s,
            name=self._name,
            stage_done=(lambda stage: None) if self._reducer is None else self._reducer.stage_done,
            losses_done=lambda: self._loss.done(self.losses),
        )
        self._faults = Faults(self.transport, self._key("fault"), ranks, self.timeout_s)
        self._loss = StepLoss(
            self.transport,
            ranks,
            self.plan.stages[-1].device,
            self._replicas,
            self.device,
            self.timeout_s,
        )

    # --- stepping ------------------------------------------------------------------------

    def step(self, inputs: Batch | None, targets: Batch | None) -> float:
        """Run one step and return the mean loss over its microbatches and replicas.

        Args:
            inputs: this replica's minibatch `[microbatches * n, ...]`, or its microbatches one by
                one. Only the rank with the first stage uses it; other ranks may give None if the
                shapes never change.
            targets: likewise, for the rank with the last stage.

        Raises:
            MismatchError: if the batch does not divide, a layer fails or shapes do not fit.
            PeerError: if a rank is gone or does not answer in time.
        """
        if self._broken is not None:
            raise StepError(
                f"an earlier step failed ({self._broken}); build the Pipeline anew",
                self.transport.rank,
            )
        if self._closed:
            raise StepError("the Pipeline is closed; build it anew", self.transport.rank)
        try:
            return self._step(inputs, targets)
        except KeyboardInterrupt:
            self.fail(StepError(f"rank {self.transport.rank}: interrupted", self.transport.rank))
            raise
        except Exception as error:
            runtime = self._runtime
            told = self.fail(self._faults.in_words(error, runtime.doing, runtime.waiting))
            if told is error:
                raise
            raise told from error

    def fail(self, error: StepError | MismatchError) -> StepError | MismatchError:
        """Stop the other ranks too, for this reason, and return it: no further step can run."""
        self._broken = error
        if self._offload is not None:
            self._offload.abort()
        self._faults.publish(error)
        self.transport.abort()
        return error

    def close(self) -> None:
        """Let go of connections, shared memory and threads; no further step can run.

        Between steps nothing is on its way, so ranks need not come here together. It also happens
        when the interpreter ends, and at the end of a `with` block; where that ends by an
        exception the other ranks are stopped, too.
        """
        if self._broken is None and not self._closed:
            self._closed = True
            if self._offload is not None:
                self._offload.abort()
            self.transport.close()

    def __enter__(self) -> Pipeline:
        """Return itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close, or stop the other ranks for what went wrong."""
        if error is not None and self._broken is None and not self._closed:
            rank, words = self.transport.rank, str(error).partition("\n")[0]
            words = f"rank {rank}, between steps: {type(error).__name__}: {words}"
            self.fail(StepError(words, rank))
        self.close()

    def share(self, batch: Tensor) -> Tensor:
        """Return this replica's part of a minibatch for all replicas: its slice of dimension 0."""
        if not isinstance(batch, Tensor) or self._replicas == 1:
            return batch
        if batch.dim() == 0 or batch.shape[0] % self._replicas:
            raise MismatchError(
                f"a minibatch has shape {list(batch.shape)}; its first dimension must divide into "
                f"{self._replicas} replicas",
                self.transport.rank,
            )
        return batch.chunk(self._replicas)[self.replica]

    def _step(self, inputs: Batch | None, targets: Batch | None) -> float:
        runtime = self._runtime
        first, last = 0 in self._stages, len(self.plan.stages) - 1 in self._stages
        split_inputs = self._batches.split(inputs, "inputs", first)
        split_targets = self._batches.split(targets, "targets", last)
        if self._batches.changed(split_inputs):
            runtime.mailbox.forget_shapes()
        self._optimizer_ns = []
        self._loss.begin()
        self._began_ns = time.perf_counter_ns()
        if self._fill is not None:
            self._fill.begin_step()
        runtime.step(split_inputs, split_targets)
        if self._fill is not None:
            self._fill.before_optimizer()
        if self._reducer is not None:
            self._reducer.finish()
        for pair in self._pairs:
            pair.start()
        for pair in self._pairs:
            pair.finish()
        loss = self._loss.finish()
        self.num_steps += 1
        return loss

    def attach_fill(self, fill: FillHook) -> None:
        """Tell `fill` from now on where this rank waits; `executor.fill.run.attach` calls it."""
        self._fill = self._runtime.fill = fill

    # --- what there is to see ------------------------------------------------------------

    @property
    def losses(self) -> list[Tensor]:
        """The last step's loss of each microbatch, on the rank of the last stage; else empty."""
        return [loss for loss in self._runtime.losses if loss is not None]

    @property
    def stages(self) -> dict[int, StageModule]:
        """This rank's stages by their index."""
        return self._stages

    @property
    def clock_offset_ns(self) -> int:
        """What to add to this rank's clock to read rank 0's."""
        return self._offset_ns

    @property
    def runtime(self) -> Runtime:
        """What runs the steps."""
        return self._runtime

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters once each, named `<layer's name>.<parameter's name>`."""
        seen: set[int] = set()
        for stage in self._stages.values():
            for offset, layer in enumerate(stage.layers):
                prefix = self.plan.workload.layers[stage.begin + offset].name
                for name, param in layer.named_parameters():
                    if id(param) not in seen:
                        seen.add(id(param))
                        yield f"{prefix}.{name}", param

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this rank's parameters once each."""
        for _, param in self.named_parameters():
            yield param

    @property
    def _can_offload(self) -> bool:
        return self.plan.cluster.devices[self.device_index].offload_bandwidth > 0

    def offload_state(self, optimizer: torch.optim.Optimizer) -> StateOffload:
        """Return what takes an optimizer's state to the host and back on this rank's copy lane.

        Raises MismatchError where this rank's device has no `offload_bandwidth`.
        """
        if self._offload is None or not self._can_offload:
            raise MismatchError(
                f"device {self.device_index} cannot offload optimizer state: its "
                "offload_bandwidth in the plan's cluster is 0",
                self.transport.rank,
            )
        return StateOffload(optimizer, self._offload.lane, self.device, self.timeout_s)

    @contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """Count what runs inside as the step's optimizer in `timeline`."""
        began = time.perf_counter_ns()
        yield
        self._optimizer_ns = [began, time.perf_counter_ns()]
        if self._fill is not None:
            self._fill.end_step()

    def sum_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Add numbers over all ranks by name; a rank may lack names that others have.

        Every rank calls it, a rank with nothing to add with an empty mapping.
        """
        self._num_gathers += 1
        key = self._key(f"metrics/{self._num_gathers}")
        total: dict[str, float] = {}
        for found in gather(self.transport, key, dict(metrics), self.timeout_s):
            for name, value in found.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def trace(self) -> RankTrace:
        """Return this rank's readings of the last step."""
        runtime, offset = self._runtime, self._offset_ns
        start, end = runtime.clock.times_ns()
        sent, arrived = runtime.mailbox.times_ns()

        def moved(rows: Sequence[Sequence[int]]) -> list[list[int]]:
            return [[number, from_ns + offset, to_ns + offset] for number, from_ns, to_ns in rows]

        return RankTrace(
            device=self.device_index,
            began_ns=self._began_ns + offset,
            codes=[op.action.code for op in self._program.ops],
            start_ns=[at + offset for at in start],
            end_ns=[at + offset for at in end],
            sent=message_times(sent, offset),
            arrived=message_times(arrived, offset),
            reduced=moved([] if self._reducer is None else self._reducer.times),
            exchanged=moved([times for pair in self._pairs for times in pair.times]),
            optimizer_ns=[at + offset for at in self._optimizer_ns],
            copies=[]
            if self._offload is None
            else [
                [copy.code, copy.start_ns + offset, copy.end_ns + offset]
                for copy in self._offload.copies()
            ],
        )

    def offloaded(self) -> MeasuredOffload | None:
        """Return what this rank's copies did in the steps so far; None where there are none.

        Its `saved_peak_bytes` are measured where the Pipeline was made with `watch_saved`, else 0.
        """
        if self._offload is None:
            return None
        return self._offload.measured(*self._runtime.clock.times_ns())

    def saved_usage(self) -> list[tuple[int, int]]:
        """Return the saved bytes this rank held in the last step, from each moment on.

        Moments are this rank's `perf_counter_ns`. Empty without `watch_saved`.
        """
        watch = None if self._offload is None else self._offload.watch
        return [] if watch is None else watch.usage()

    def timeline(self) -> Timeline:
        """Return the last step of this rank's replica as it was measured. Every rank calls it."""
        self._num_gathers += 1
        traces = gather(
            self.transport,
            self._key(f"trace/{self._num_gathers}"),
            self.trace().to_json(),
            self.timeout_s,
        )
        begin = self.replica * self._num_devices
        mine = traces[begin : begin + self._num_devices]
        return to_timeline([RankTrace.from_json(trace) for trace in mine], self.costs)
