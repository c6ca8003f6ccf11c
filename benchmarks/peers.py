"""What the executor is measured against, on the same order of the same sleeping layers.

`FloorLoop`: the least that can run an order on gloo: sleeps, and tagged sends and receives of the
process group, all receives posted before the clock starts, no autograd, no waiting for sends.
`TorchRuntime`: torch.distributed.pipelining's own runtime for action lists, fed the order as CSV.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.models import doze, sleeping_layers, sleeping_loss
from executor.program import lower
from octotune.contract import Plan
from simulator.actions import Kind


class FloorLoop:
    """One rank of an order, as bare as can be."""

    def __init__(self, plan: Plan, times_ms: list[tuple[float, float, float]], size: int) -> None:
        rank = dist.get_rank()
        self._group: Any = dist.distributed_c10d._get_default_group()
        program = lower(plan.schedule(), [stage.device for stage in plan.stages])[rank]
        self._ops = []
        for op in program.ops:
            begin, end = plan.stages[op.stage].layers
            naps: list[float] = []
            for f, i, w in times_ms[begin:end]:
                naps += {Kind.F: [f], Kind.B: [i, w], Kind.I: [i], Kind.W: [w]}[op.kind]
            self._ops.append(([nap / 1e3 for nap in naps], op.needs, op.sends))
        # each message has memory of its own, written once: a fresh torch.zeros is one page of
        # zeros, read out of the nearest cache
        self._tensors = {
            sends: torch.ones(size // 4) for _, _, sends in self._ops if sends is not None
        }
        self._buffers = {
            needs: torch.zeros(size // 4) for _, needs, _ in self._ops if needs is not None
        }
        self._num_microbatches = plan.num_microbatches

    def _tag(self, message: Any) -> int:
        return (message.stage * self._num_microbatches + message.microbatch) << 2 | int(
            message.kind
        )

    def prepare(self) -> None:
        """Post every receive."""
        self._works = {
            message: self._group.recv([buffer], message.source, self._tag(message))
            for message, buffer in self._buffers.items()
        }

    def step(self) -> None:
        """Run the order once."""
        self._sent = []
        for naps, needs, sends in self._ops:
            if needs is not None:
                self._works[needs].wait()
            for nap in naps:
                doze(nap)
            if sends is not None:
                tensor = self._tensors[sends]
                self._sent.append(self._group.send([tensor], sends.target, self._tag(sends)))

    def finish(self) -> None:
        """Wait for the sends."""
        for work in self._sent:
            work.wait()


class TorchRuntime:
    """One rank of an order on `_PipelineScheduleRuntime`."""

    def __init__(
        self,
        plan: Plan,
        times_ms: list[tuple[float, float, float]],
        inputs: torch.Tensor,
        targets: torch.Tensor,
    ) -> None:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

        rank = dist.get_rank()
        # torch splits a backward by walking the graph; ours by queue
        split = any("W" in word for row in plan.actions for word in row)
        layers = sleeping_layers(times_ms, two_nodes=split)
        example = inputs[: inputs.shape[0] // plan.num_microbatches]
        inner = example.clone().requires_grad_()  # says that gradients come back
        stages = [
            PipelineStage(
                torch.nn.Sequential(*layers[slice(*stage.layers)]),
                index,
                len(plan.stages),
                torch.device("cpu"),
                input_args=(inner if index else example,),
                output_args=(inner,),
            )
            for index, stage in enumerate(plan.stages)
            if stage.device == rank
        ]
        self._schedule = _PipelineScheduleRuntime(
            stages, plan.num_microbatches, loss_fn=sleeping_loss
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "plan.csv")
            path.write_text("\n".join(",".join(row) for row in plan.actions) + "\n")
            with contextlib.redirect_stdout(None):
                self._schedule._load_csv(str(path))
        self._inputs, self._targets = inputs, targets
        self._first = any(stage.is_first for stage in stages)
        self._last = any(stage.is_last for stage in stages)
        self.stages = stages

    def step(self) -> None:
        """Run the order once."""
        arguments = (self._inputs,) if self._first else ()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self._last:
                self._schedule.step(*arguments, target=self._targets, losses=[])
            else:
                self._schedule.step(*arguments)

    def buffer_bytes(self) -> int:
        """Return the bytes of the receive buffers it keeps."""
        total = 0
        for stage in self.stages:
            for infos in (stage.args_recv_info, stage.grad_recv_info):
                for info in infos.values():
                    for item in info:
                        buffer = getattr(item, "buffer", None)
                        if buffer is not None:
                            total += buffer.nbytes
        return total
