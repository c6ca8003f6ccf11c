"""What the executor's tests share: plans by hand, thread ranks, the unsplit model."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from executor.pipeline import Pipeline
from executor.transport import ThreadWorld
from octotune.contract import Cluster, Layer, Plan, Stage, Workload

# ranks are threads here; more threads inside each would only fight for the cores
torch.set_num_threads(1)


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


def run_plan(
    plan: Plan,
    make_layers,
    loss_fn,
    inputs,
    targets,
    *,
    world=None,
    steps=1,
    prepare=None,
    **options,
):
    """Run a plan on threads; return (loss of each step, gradients by name, pipelines).

    `prepare(pipe)` is called before the first step.
    """

    size = world.size if world else len(plan.cluster.devices)
    models = [make_layers() for _ in range(size)]  # here: threads share one random generator

    def body(transport):
        layers = models[transport.rank]
        pipe = Pipeline(plan, layers, loss_fn, transport=transport, timeout_s=20, **options)
        if prepare is not None:
            prepare(pipe)
        losses = []
        for _ in range(steps):
            for param in pipe.parameters():
                param.grad = None
            losses.append(pipe.step(inputs, targets))
        return losses, {name: p.grad for name, p in pipe.named_parameters()}, pipe

    results = run_ranks(size, body, world=world)
    grads = {name: grad for _, found, _ in results for name, grad in found.items()}
    return [losses for losses, _, _ in results], grads, [pipe for _, _, pipe in results]


def one_f_one_b_rows(num_devices: int, num_microbatches: int, *, split: bool = False) -> list[str]:
    """1F1B, one stage a device; with `split`, W right after I."""
    rows = []
    for device in range(num_devices):
        warmup = min(num_microbatches, num_devices - device - 1)
        words = [f"{device}F{m}" for m in range(warmup)]
        for m in range(num_microbatches):
            if warmup + m < num_microbatches:
                words.append(f"{device}F{warmup + m}")
            words += [f"{device}I{m}", f"{device}W{m}"] if split else [f"{device}B{m}"]
        rows.append(" ".join(words))
    return rows


def gpipe_rows(num_devices: int, num_microbatches: int) -> list[str]:
    """All forwards, then all backwards in the same order."""
    return [
        " ".join(f"{d}{kind}{m}" for kind in "FB" for m in range(num_microbatches))
        for d in range(num_devices)
    ]


def random_rows(
    rng: random.Random,
    homes: Sequence[int],
    num_devices: int,
    num_microbatches: int,
    *,
    rising: bool = False,
) -> list[str]:
    """A random order that can run: actions are drawn one by one from those whose inputs exist.

    `rising`: each stage's backwards and W's run in the order of their microbatches.
    """
    num_stages = len(homes)
    split = {
        (s, m): rng.random() < 0.6 for s in range(num_stages) for m in range(num_microbatches)
    }
    done: set[tuple[int, str, int]] = set()
    open_ = {(0, "F", m) for m in range(num_microbatches)}
    rows: list[list[str]] = [[] for _ in range(num_devices)]
    patience = {
        (s, "F", m): rng.random() for s in range(num_stages) for m in range(num_microbatches)
    }

    def allowed(action):
        stage, kind, microbatch = action
        if not rising or kind == "F":
            return True
        for m in range(microbatch):
            if kind in "BI" and not ({(stage, "B", m), (stage, "I", m)} & done):
                return False
            if kind in "BW" and not ({(stage, "B", m), (stage, "W", m)} & done):
                return False
        return True

    while open_:
        choices = sorted(action for action in open_ if allowed(action))
        action = min(choices, key=lambda a: rng.random() + 0.3 * patience.get(a, 0.5))
        stage, kind, m = action
        open_.discard(action)
        done.add(action)
        rows[homes[stage]].append(f"{stage}{kind}{m}")
        back = "I" if split.get((stage, m)) else "B"
        if kind == "F":
            if stage + 1 < num_stages:
                open_.add((stage + 1, "F", m))
            else:
                open_.add((stage, back, m))
        elif kind in "BI":
            if kind == "I":
                open_.add((stage, "W", m))
            if stage:
                open_.add((stage - 1, "I" if split[stage - 1, m] else "B", m))
    return [" ".join(row) for row in rows]


def rising(plan: Plan) -> bool:
    """Whether each stage adds to its weights in the order of microbatches, in I and in W."""
    last: dict[tuple[int, str], int] = {}
    for row in plan.schedule().rows:
        for stage, kind, microbatch in row:
            for half in {"B": "IW", "F": ""}.get(kind.name, kind.name):
                if last.get((stage, half), -1) > microbatch:
                    return False
                last[stage, half] = microbatch
    return True
