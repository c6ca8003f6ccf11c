"""Whatever the plan, the gradients and losses are those of the unsplit model."""

from __future__ import annotations

import random

import pytest
import torch
from executor_tools import (
    gpipe_rows,
    make_plan,
    one_f_one_b_rows,
    random_rows,
    rising,
    run_plan,
    unsplit,
)
from torch import nn

from executor.transport import ThreadWorld

WIDTH = 6


class Mixed(nn.Module):
    """A residual block whose weights are partly deferred (linear), partly not (norm, scale)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.scale


def layers_of(count, seed=0):
    def make():
        torch.manual_seed(seed)
        made = [Mixed() for _ in range(count - 1)]
        return [*made, nn.Linear(WIDTH, 3)]

    return make


def batch(num_microbatches, rows=2):
    generator = torch.Generator().manual_seed(num_microbatches)
    inputs = torch.randn(rows * num_microbatches, WIDTH, generator=generator)
    return inputs, torch.randint(3, (rows * num_microbatches,), generator=generator)


LOSS = nn.functional.cross_entropy


def compare(plan, *, exact, world=None, **options):
    """Run a plan and hold it against the unsplit model."""
    count = len(plan.workload.layers)
    inputs, targets = batch(plan.num_microbatches)
    losses, grads, pipes = run_plan(
        plan, layers_of(count), LOSS, inputs, targets, world=world, **options
    )
    layers = layers_of(count)()
    expected, of_each = unsplit(layers, LOSS, inputs, targets, range(plan.num_microbatches))
    assert all(loss == [expected] for loss in losses)
    last = pipes[plan.stages[-1].device]
    assert all(torch.equal(a, b) for a, b in zip(last.losses, of_each, strict=True))
    seen = 0
    for index, layer in enumerate(layers):
        for name, param in layer.named_parameters():
            found = grads[f"layer{index}.{name}"]
            seen += 1
            if exact:
                assert torch.equal(found, param.grad), (index, name)
            else:
                # another order of summation: only rounding differs
                error = (found - param.grad).norm() / param.grad.norm()
                assert error <= 1e-6, (index, name, float(error))
    assert seen == len(grads)
    return pipes


@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("rows", [gpipe_rows, one_f_one_b_rows])
def test_single_stage_schedules_are_bit_equal(rows, num_devices, num_microbatches):
    plan = make_plan(
        rows(num_devices, num_microbatches), [(1, d) for d in range(num_devices)], num_microbatches
    )
    compare(plan, exact=True)


@pytest.mark.parametrize("name", ["interleaved-v2", "zb-h1", "zb-v"])
@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(2, 1), (2, 4), (4, 8), (4, 9)])
@pytest.mark.parametrize("float_limit", ["off", "plan", "memory"])
def test_published_multi_stage_schedules_match(name, num_devices, num_microbatches, float_limit):
    from executor_tools import make_workload

    from octotune.contract import Cluster
    from octotune.schedules import FAMILIES, plan_from

    plan = plan_from(
        FAMILIES[name],
        make_workload(2 * num_devices),
        Cluster.equal(num_devices),
        num_microbatches,
    )
    compare(plan, exact=rising(plan), float_limit=float_limit)


def random_plan(seed):
    rng = random.Random(seed)
    num_devices = rng.randint(1, 4)
    num_stages = rng.randint(1, 6)
    num_microbatches = rng.randint(1, 5)
    homes = [rng.randrange(num_devices) for _ in range(num_stages)]
    rows = random_rows(rng, homes, num_devices, num_microbatches, rising=rng.random() < 0.5)
    stages = [(rng.choice((1, 1, 2)), home, rng.random() < 0.2) for home in homes]
    plan = make_plan(rows, stages, num_microbatches)
    world = ThreadWorld(num_devices, fifo=rng.random() < 0.7, buffered=rng.random() < 0.5)
    options = {
        "float_limit": rng.choice(("off", "plan", "memory")),
        "receive_window": rng.randint(1, 4),
        "send_window": rng.choice((1, 2, 16)),
        "defer": rng.random() < 0.9,
    }
    return plan, world, options


@pytest.mark.parametrize("block", range(10))
def test_random_plans_match(block):
    """200 plans: any placement, any order, recompute, any windows, FIFO channels or tags."""
    for seed in range(20 * block, 20 * block + 20):
        plan, world, options = random_plan(seed)
        compare(plan, exact=rising(plan), world=world, **options)


def test_a_second_step_adds_to_the_gradients_as_autograd_does():
    plan = make_plan(one_f_one_b_rows(2, 3, split=True), [(1, 0), (2, 1)], 3)
    inputs, targets = batch(3)

    from executor_tools import run_ranks

    from executor.pipeline import Pipeline

    models = [layers_of(3)() for _ in range(2)]

    def body(transport):
        pipe = Pipeline(plan, models[transport.rank], LOSS, transport=transport, timeout_s=20)
        for _ in range(2):
            pipe.step(inputs, targets)
        return {name: param.grad for name, param in pipe.named_parameters()}

    grads = {name: grad for found in run_ranks(2, body) for name, grad in found.items()}
    layers = layers_of(3)()
    for _ in range(2):
        unsplit(layers, LOSS, inputs, targets, range(3))
    for index, layer in enumerate(layers):
        for name, param in layer.named_parameters():
            assert torch.equal(grads[f"layer{index}.{name}"], param.grad)
