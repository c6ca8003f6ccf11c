"""What the executor's tests share: plans by hand, thread ranks, the unsplit model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from executor.pipeline import Pipeline
from executor.transport import ThreadWorld
from octotune.contract import Cluster, Layer, Plan, Stage, Workload


def make_workload(num_layers: int, tied: Sequence[tuple[int, int]] = (), **fields) -> Workload:
    """Layers of one size; each saves 4 bytes until I, 4 until W and keeps 2 from I to W."""
    sizes = {
        "forward_ns": 100,
        "input_grad_ns": 100,
        "weight_grad_ns": 100,
        "param_bytes": 10,
        "state_bytes": 30,
        "saved_bytes": 4,
        "saved_w_bytes": 4,
        "held_w_bytes": 2,
        "output_bytes": 8,
    } | fields
    return Workload(
        name="test",
        layers=tuple(Layer(name=f"layer{i}", **sizes) for i in range(num_layers)),
        tied=tuple(tied),
    )


def make_plan(
    rows: Sequence[str],
    stages: Sequence[tuple[int, int]] | Sequence[tuple[int, int, bool]],
    num_microbatches: int,
    **fields,
) -> Plan:
    """A plan of rows of words; `stages` holds (number of layers, device[, recompute])."""
    made, begin = [], 0
    for count, device, *recompute in stages:
        made.append(
            Stage(layers=(begin, begin + count), device=device, recompute=bool(sum(recompute)))
        )
        begin += count
    cluster = fields.pop("cluster", None) or Cluster.equal(len(rows))
    workload = fields.pop("workload", None) or make_workload(begin)
    return Plan(
        workload=workload,
        cluster=cluster,
        num_microbatches=num_microbatches,
        stages=tuple(made),
        actions=tuple(tuple(row.split()) for row in rows),
        **fields,
    )


def run_ranks(size: int, body: Callable[..., object], *, world: ThreadWorld | None = None) -> list:
    """Run `body(transport)` in a thread a rank; return what each gave, raise what one raised."""
    world = world or ThreadWorld(size)
    results: list[object] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def main(rank: int, transport) -> None:
        try:
            results[rank] = body(transport)
        except BaseException as error:
            errors[rank] = error
            transport.abort()

    threads = [
        threading.Thread(target=main, args=(rank, transport), daemon=True)
        for rank, transport in enumerate(world.transports())
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    first = next((error for error in errors if error is not None), None)
    if first is not None:
        raise first
    return results


def unsplit(
    layers: Sequence[nn.Module], loss_fn, inputs: Tensor, targets: Tensor, order: Sequence[int]
) -> tuple[float, list[Tensor]]:
    """Run the microbatches one by one on the whole model; return losses, leave gradients."""
    model = nn.Sequential(*layers)
    parts = inputs.split(inputs.shape[0] // len(order))
    wanted = targets.split(targets.shape[0] // len(order))
    losses = [torch.zeros(())] * len(order)
    for microbatch in order:
        loss = loss_fn(model(parts[microbatch]), wanted[microbatch])
        (loss / len(order)).backward()
        losses[microbatch] = loss.detach()
    return float(torch.stack(losses).double().mean()), losses


def run_plan(plan: Plan, make_layers, loss_fn, inputs, targets, *, world=None, steps=1, **options):
    """Run a plan on threads; return (loss of each step, gradients by name, pipelines)."""

    size = world.size if world else len(plan.cluster.devices)
    models = [make_layers() for _ in range(size)]  # here: threads share one random generator

    def body(transport):
        layers = models[transport.rank]
        pipe = Pipeline(plan, layers, loss_fn, transport=transport, timeout_s=20, **options)
        losses = []
        for _ in range(steps):
            for param in pipe.parameters():
                param.grad = None
            losses.append(pipe.step(inputs, targets))
        return losses, {name: p.grad for name, p in pipe.named_parameters()}, pipe

    results = run_ranks(size, body, world=world)
    grads = {name: grad for _, found, _ in results for name, grad in found.items()}
    return [losses for losses, _, _ in results], grads, [pipe for _, _, pipe in results]
