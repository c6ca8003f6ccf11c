"""Plans of layers that sleep on four ranks, and what times a step of them on all at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from octotune.contract import Cluster, Layer, Plan, Workload

RANKS = 4
Times = list[tuple[float, float, float]]


def workload(times_ms: Times, message_bytes: int = 1024) -> Workload:
    """Return sleeping layers as the contract sees them."""
    return Workload(
        name="sleeping layers",
        layers=tuple(
            Layer(
                name=f"layer{index}",
                forward_ns=round(f * 1e6),
                input_grad_ns=round(i * 1e6),
                weight_grad_ns=round(w * 1e6),
                param_bytes=4,
                state_bytes=12,
                saved_bytes=message_bytes,
                saved_w_bytes=message_bytes,
                held_w_bytes=message_bytes,
                output_bytes=message_bytes,
            )
            for index, (f, i, w) in enumerate(times_ms)
        ),
    )


def plan_of(name: str, num_microbatches: int, times_ms: Times, message_bytes: int = 1024) -> Plan:
    """Return a published schedule's plan, or the tuner's for "tuned"."""
    layers, cluster = workload(times_ms, message_bytes), Cluster.equal(RANKS)
    if name == "tuned":
        from octotune import tune

        return tune(layers, cluster, num_microbatches=num_microbatches, seed=0, time_limit_s=10)
    from octotune.schedules import FAMILIES, plan_from

    return plan_from(FAMILIES[name], layers, cluster, num_microbatches)


def uneven(unit_ms: float) -> Times:
    """Return ten layers of unequal size for the tuner: 8 to 12 units of F, I and W each."""
    sizes = (0.5, 1, 1, 0.5, 1, 1, 0.5, 1, 1, 2)
    return [(unit_ms * size,) * 3 for size in sizes]


def clocked(action: Callable[[], Any], before: Callable[[], Any] | None = None) -> tuple:
    """Run one step on all ranks; return its length in seconds and rank's mean CPU seconds."""
    if before is not None:
        before()
    dist.barrier()
    cpu, began = time.process_time(), time.perf_counter()
    action()
    ended, cpu = time.perf_counter(), time.process_time() - cpu
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, (began, ended, cpu))
    length = max(end for _, end, _ in found) - min(begin for begin, _, _ in found)
    return length, statistics.mean(used for _, _, used in found)


def ours(plan: Plan, layers: Any, loss_fn: Any, *, shared_memory: bool = True) -> Any:
    """Return a Pipeline that keeps the plan's order, W's included."""
    from executor import Pipeline
    from executor.transport import GlooTransport

    transport = GlooTransport(shared_memory=shared_memory)
    return Pipeline(plan, layers, loss_fn, transport=transport, timeout_s=60, float_limit="off")
