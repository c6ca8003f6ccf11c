"""I and W give what one backward gives, bit for bit, whatever the layers do."""

from __future__ import annotations

import copy

import pytest
import torch
from executor_tools import make_plan, run_plan
from torch import nn
from torch.autograd import Function
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from executor.backward import WeightQueue, activate, routing, weight_queue


def split_backward(model, x, loss_of=lambda y: (y.float() ** 2).sum(), microbatches=1):
    """F, I and W of each microbatch; return the queues' sizes after I."""
    sizes = []
    with routing():
        for _ in range(microbatches):
            queue = WeightQueue()
            activate(queue)
            try:
                loss = loss_of(model(x))
                if loss.requires_grad:
                    loss.backward()
            finally:
                activate(None)
            sizes.append(len(queue.entries))
            queue.run()
    return sizes


def check(model, x, deferred, *, microbatches=2, tolerance=0.0):
    """Hold split against whole backward on copies; `deferred` uses must be in the queue."""
    whole, split = copy.deepcopy(model), copy.deepcopy(model)
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for _ in range(2)]
    for _ in range(microbatches):
        (whole(inputs[0]).float() ** 2).sum().backward()
    sizes = split_backward(split, inputs[1], microbatches=microbatches)
    assert sizes == [deferred] * microbatches
    if x.is_floating_point():
        assert torch.equal(inputs[0].grad, inputs[1].grad)
    for (name, a), b in zip(whole.named_parameters(), split.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None and tolerance:
            assert (a.grad - b.grad).norm() <= tolerance * a.grad.norm(), name
        elif a.grad is not None:
            assert torch.equal(a.grad, b.grad), name


class Apply(nn.Module):
    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def attention():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def frozen(module, *names):
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


class Experts(nn.Module):
    def __init__(self, grouped):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 8) / 3)
        self.grouped = grouped

    def forward(self, x):
        if not self.grouped:
            return torch.bmm(x.view(3, -1, 8), self.weight).view_as(x)
        offsets = torch.tensor([1, 1, 6], dtype=torch.int32)
        return functional.grouped_mm(x, self.weight, offs=offsets)


CASES = {
    "linear": (lambda: nn.Linear(8, 4), (6, 8), 1),
    "linear without bias, 3-d": (lambda: nn.Linear(8, 4, bias=False), (2, 3, 8), 1),
    "linear, 1-d": (lambda: nn.Linear(8, 4), (8,), 1),
    "frozen weight": (lambda: frozen(nn.Linear(8, 8), "weight"), (6, 8), 0),
    "frozen bias": (lambda: frozen(nn.Linear(8, 8), "bias"), (6, 8), 0),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1), (2, 3, 9), 1),
    "conv2d strided grouped": (
        lambda: nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2),
        (2, 4, 9, 9),
        1,
    ),
    "conv2d same padding falls back": (
        lambda: nn.Conv2d(2, 2, 3, padding="same"),
        (2, 2, 5, 5),
        0,
    ),
    "conv3d dilated": (lambda: nn.Conv3d(2, 2, 2, dilation=2), (1, 2, 5, 5, 5), 1),
    "experts by bmm": (lambda: Experts(False), (6, 8), 1),
    "experts by grouped_mm": (lambda: Experts(True), (6, 8), 1),
    "self-attention": (lambda: attention(), (2, 5, 8), 4),
    "weight used twice": (
        lambda: Apply(lambda m, x: m.a(torch.relu(m.a(x))), a=nn.Linear(8, 8)),
        (6, 8),
        2,
    ),
    "parametrised weight": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        (6, 8),
        0,
    ),
    "x @ w.t() stays in I": (
        lambda: Apply(lambda m, x: x @ m.a.weight.t(), a=nn.Linear(8, 8, bias=False)),
        (6, 8),
        0,
    ),
    "in-place activation": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)),
        (2, 3, 8),
        2,
    ),
    "norms and embedding-less mix": (
        lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)),
        (6, 8),
        1,
    ),
    "checkpoint, not reentrant": (
        lambda: Apply(
            lambda m, x: checkpoint(m.a, x, use_reentrant=False),
            a=nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
        ),
        (6, 8),
        2,
    ),
    "checkpoint, reentrant": (
        lambda: Apply(
            lambda m, x: checkpoint(m.a, x, use_reentrant=True),
            a=nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
        ),
        (6, 8),
        2,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_split_is_bit_equal_to_whole(name):
    make, shape, deferred = CASES[name]
    torch.manual_seed(0)
    check(make(), torch.randn(shape), deferred)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"scale_grad_by_freq": True}])
def test_embedding_is_deferred(options):
    torch.manual_seed(0)
    check(nn.Embedding(7, 4, **options), torch.randint(7, (3, 5)), 1)


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"sparse": True}])
def test_unusual_embeddings_fall_back(options):
    torch.manual_seed(0)
    layer = nn.Embedding(7, 4, **options)
    assert split_backward(layer, torch.randint(7, (3, 5))) == [0]
    assert layer.weight.grad is not None


def test_tied_embedding_and_head_in_one_stage():
    torch.manual_seed(0)
    table = nn.Embedding(7, 8)
    model = Apply(lambda m, x: functional.linear(m.table(x), m.table.weight), table=table)
    check(model, torch.randint(7, (3, 5)), 2)


def test_autocast_is_exact():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(model, torch.randn(6, 8), 2)


def test_compiled_layers_keep_their_backward_in_i():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    whole, split = copy.deepcopy(inner), copy.deepcopy(inner)
    model = torch.compile(split, backend="aot_eager")
    x = torch.randn(6, 8)
    (whole(x) ** 2).sum().backward()
    assert split_backward(nn.Sequential(model), x) == [0]
    for a, b in zip(whole.parameters(), split.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


class Scale(Function):
    """A user's Function that knows nothing of queues."""

    calls = 0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        Scale.calls += 1
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


def test_a_foreign_function_runs_once_and_whole():
    torch.manual_seed(0)
    model = Apply(
        lambda m, x: Scale.apply(m.a(x), m.w), a=nn.Linear(8, 8), w=nn.Parameter(torch.ones(8))
    )
    Scale.calls = 0
    check(model, torch.randn(6, 8), 1, microbatches=1)
    assert Scale.calls == 2  # once in each of the two models


class Queued(Function):
    """A user's Function that puts its weight gradient off."""

    @staticmethod
    def forward(ctx, x, anchor, weight, queue):
        ctx.queue, ctx.weight = queue, weight
        ctx.save_for_backward(x)
        return x * weight.detach()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        ctx.queue.defer((ctx.weight,), (x, grad), lambda: ((grad * x).sum(0),))
        return grad * ctx.weight.detach(), None, None, None


def test_a_users_function_may_use_the_queue():
    torch.manual_seed(0)

    def forward(module, x):
        queue = weight_queue()
        if queue is None:
            return x * module.w
        return Queued.apply(x, torch.zeros(1, requires_grad=True), module.w, queue)

    check(Apply(forward, w=nn.Parameter(torch.randn(8))), torch.randn(6, 8), 1)


def test_hooks_of_a_weight_run_once_a_microbatch_at_w():
    layer = nn.Linear(4, 4)
    order = []
    layer.weight.register_hook(lambda grad: order.append("tensor") or grad * 2)
    layer.weight.register_post_accumulate_grad_hook(lambda param: order.append("post"))
    plain = copy.deepcopy(layer)
    plain.weight.register_hook(lambda grad: grad * 2)
    x = torch.randn(3, 4)
    queue = WeightQueue()
    with routing():
        activate(queue)
        layer(x).sum().backward()
        activate(None)
        assert order == []
        queue.run()
    plain(x).sum().backward()
    assert order == ["tensor", "post"]
    assert torch.equal(layer.weight.grad, plain.weight.grad)


def test_nothing_is_held_but_inputs_and_output_gradients():
    """4 linears of [16, 8]: each holds x and g, and inner ones share nothing else."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    queue = WeightQueue()
    with routing():
        activate(queue)
        model(torch.randn(16, 8)).pow(2).sum().backward()
        activate(None)
    assert queue.held_bytes() == 4 * 2 * 16 * 8 * 4


@pytest.mark.parametrize("which", ["input", "gradient"])
def test_a_change_in_place_between_i_and_w_is_refused(which):
    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    queue = WeightQueue()
    with routing():
        activate(queue)
        y = layer(x)
        g = torch.ones_like(y)
        y.backward(g)
        activate(None)
        (x if which == "input" else queue.entries[0].tensors[1]).add_(1)
        with pytest.raises(RuntimeError, match="changed in place between I and W"):
            queue.run()


def test_second_order_gradients_are_refused():
    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)
    with routing():
        activate(WeightQueue())
        try:
            y = layer(x).pow(2).sum()
            with pytest.raises(RuntimeError, match="create_graph=True"):
                torch.autograd.grad(y, x, create_graph=True)
        finally:
            activate(None)


def test_the_functions_are_put_back():
    before = functional.linear, functional.conv2d, functional.embedding, torch.bmm
    with routing():
        assert functional.linear is not before[0]
    assert (functional.linear, functional.conv2d, functional.embedding, torch.bmm) == before


def test_dropout_in_a_recomputed_stage_draws_the_same_numbers():
    """One rank, so that no other thread draws: recompute gives the same gradients as keeping."""
    grads = []
    for recompute in (False, True):
        plan = make_plan(
            ["0F0 0F1 1F0 1F1 1I0 0B0 1W0 1B1 0B1"], [(1, 0, recompute), (1, 0, recompute)], 2
        )

        def make():
            torch.manual_seed(3)
            return [
                nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)),
                nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)),
            ]

        inputs = torch.linspace(-1, 1, 24).view(4, 6)
        _, found, _ = run_plan(plan, make, functional.mse_loss, inputs, torch.zeros(4, 6))
        grads.append(found)
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name
