"""What does splitting the backward into I and W cost, beside one backward and torch's split?

One process, one thread; the three ways alternate. The gradients of ours are compared with the
whole backward's bit for bit before anything is timed. "Held" is what must stay from I to W.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import functional

from benchmarks import record
from executor.backward import WeightQueue, activate, routing


class Block(nn.Module):
    """A transformer block by hand, so that nothing fuses what a split would have to cut."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return x `[batch, tokens, width]`."""
        batch, tokens, width = x.shape
        packed = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = packed.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def _linears(count: int, width: int) -> nn.Module:
    return nn.Sequential(*(m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "8 x Linear 64 + GELU, 4 rows": (lambda: _linears(8, 64), (4, 64), 20),
    "8 x Linear 512 + GELU, 256 rows": (lambda: _linears(8, 512), (256, 512), 5),
    "4 blocks d256, 2 x 128 tokens": (
        lambda: nn.Sequential(*(Block(256) for _ in range(4))),
        (2, 128, 256),
        4,
    ),
    "4 TransformerEncoderLayer d256, 2 x 128 tokens": (
        lambda: nn.Sequential(
            *(nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True) for _ in range(4))
        ),
        (2, 128, 256),
        4,
    ),
}


def whole(model: nn.Module, x: Tensor) -> tuple[float, ...]:
    """Return the seconds of F, of B, and nothing held."""
    began = time.perf_counter()
    y = model(x)
    forward = time.perf_counter() - began
    grad = torch.ones_like(y)
    began = time.perf_counter()
    torch.autograd.backward(y, grad)
    return forward, time.perf_counter() - began, 0.0, 0.0


def ours(model: nn.Module, x: Tensor) -> tuple[float, ...]:
    """Return the seconds of F, I + W and W, and the bytes held from I to W."""
    queue = WeightQueue()
    activate(queue)
    began = time.perf_counter()
    y = model(x)
    forward = time.perf_counter() - began
    grad = torch.ones_like(y)
    began = time.perf_counter()
    torch.autograd.backward(y, grad)
    activate(None)
    input_half = time.perf_counter() - began
    held = queue.held_bytes()
    began = time.perf_counter()
    queue.run()
    weight_half = time.perf_counter() - began
    return forward, input_half + weight_half, weight_half, held


def torchs(model: nn.Module, x: Tensor) -> tuple[float, ...]:
    """Return the seconds of F, I + W and W; at least what forward saved is held beside."""
    saved: dict[int, int] = {}
    params = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in params:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    began = time.perf_counter()
    y = model(x)
    forward = time.perf_counter() - began
    grad = torch.ones_like(y)
    began = time.perf_counter()
    _, groups = stage_backward_input([y], [grad], [x], model.parameters())
    input_half = time.perf_counter() - began
    kept: dict[int, int] = {}
    for group in groups:
        for grads in group.get("grads", []) or []:
            for tensor in grads if isinstance(grads, tuple | list) else (grads,):
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage()
                    kept[storage.data_ptr()] = storage.nbytes()
    began = time.perf_counter()
    stage_backward_weight(model.parameters(), groups)
    weight_half = time.perf_counter() - began
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(x)
    return forward, input_half + weight_half, weight_half, sum((saved | kept).values())


def measure(name: str, rounds: int) -> tuple[Any, ...]:
    """Return one row."""
    make, shape, inner = CASES[name]
    torch.manual_seed(0)
    model, example = make(), torch.randn(shape)
    ways = {"whole": whole, "ours": ours, "torch": torchs}
    models = {way: copy.deepcopy(model) for way in ways}
    found: dict[str, list[list[float]]] = {way: [] for way in ways}
    with routing():
        for turn in range(rounds + 1):
            for way, run in ways.items():
                for param in models[way].parameters():
                    param.grad = None
                taken = [run(models[way], example.clone().requires_grad_()) for _ in range(inner)]
                if turn:
                    found[way].append(
                        [statistics.median(column) for column in zip(*taken, strict=True)]
                    )
            if not turn:
                for a, b in zip(
                    models["whole"].parameters(), models["ours"].parameters(), strict=True
                ):
                    assert a.grad is not None
                    assert b.grad is not None
                    assert torch.equal(a.grad, b.grad)

    def ratio(way: str, column: int) -> float:
        pairs = zip(found[way], found["whole"], strict=True)
        return round(statistics.median(a[column] / b[column] for a, b in pairs), 3)

    backward = statistics.median(row[1] for row in found["whole"])
    share = statistics.median(row[2] / row[1] for row in found["ours"])
    return (
        name,
        round(1e3 * backward, 3),
        ratio("ours", 0),
        ratio("ours", 1),
        ratio("torch", 1),
        round(share, 2),
        round(found["ours"][0][3] / 1e6, 2),
        round(found["torch"][0][3] / 1e6, 2),
    )


def main(arguments: list[str]) -> None:
    """Measure all cases and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = tuple(measure(name, options.rounds) for name in CASES)
    path, _ = record.write(
        record.Record(
            benchmark="executor_split",
            workload="linears and transformer blocks",
            question="What does splitting the backward into I and W cost?",
            command=record.command("executor_split", arguments),
            seed=0,
            tables=(
                record.Table(
                    title=f"Medians of per-round ratios, {options.rounds} rounds in turns",
                    columns=(
                        *("layers", "B ms", "F ours / plain", "(I + W) / B ours"),
                        *("(I + W) / B torch", "W / (I + W) ours"),
                        *("held from I to W, ours MB", "held, torch MB"),
                    ),
                    rows=rows,
                ),
            ),
            shows=(
                "The gradients of ours are bit-equal to the whole backward's in every case.",
                "Held by torch: what forward saved (its graph stays until W) and the gradients it "
                "keeps at the cuts, each storage once.",
            ),
            does_not_show=(
                "GPUs; layers whose weights are not deferred, which cost I a whole B.",
            ),
            notes=("One process, one thread, float32, CPU.",),
        )
    )
    print(path.read_text())
