"""Modules as fill jobs: pieces give what the whole gives, in inference and in training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from executor.fill.module import ModuleTask
from executor.fill.pieces import cut
from octotune.errors import MalformedError


class Skips(nn.Module):
    """Connections that skip pieces, and a layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.middle = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        one = self.first(x).relu()
        two = self.middle(one) + x
        three = self.norm(two) * one
        return self.last(self.middle(three) + one)


def chain():
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.GELU(),
        nn.Dropout(0.3),
        nn.Linear(8, 6),
        nn.BatchNorm1d(6),
        nn.Linear(6, 3),
    )


def data(num=24):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(num, 6, generator=generator), torch.randn(num, 3, generator=generator)
    )


def loader(size):
    # a list: each beginning of a DataLoader draws a random number
    return list(DataLoader(data(), size, generator=torch.Generator()))


def one_pass(task):
    carry = None
    for k in range(task.num_micro_steps):
        carry = task.run(k, carry)
    return carry


@pytest.mark.parametrize("make", [chain, Skips])
@pytest.mark.parametrize("pieces", [None, 2, 100])
@pytest.mark.parametrize("technique", ["none", "offload"])
def test_inference_gives_what_the_whole_module_gives(make, pieces, technique):
    torch.manual_seed(0)
    model = make().eval()
    expected = [copy.deepcopy(model)(x) for x, _ in loader(4)]
    found = []
    task = ModuleTask(model, loader, 4, pieces=pieces, technique=technique, on_output=found.append)
    task.setup(torch.device("cpu"))
    for _ in expected:
        assert one_pass(task) == 4
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert one_pass(task) == 4  # from the beginning again
    assert torch.equal(found[-1], expected[0])


@pytest.mark.parametrize("make", [chain, Skips])
@pytest.mark.parametrize(
    "technique", ["none", "checkpointing", "offload", "checkpointing and offload"]
)
def test_training_gives_what_the_whole_module_gives(make, technique):
    torch.manual_seed(0)
    model = make()
    whole = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    if "checkpointing" in technique:
        # running statistics are updated by the second run, too: no part of this comparison
        for module in (*model.modules(), *whole.modules()):
            if isinstance(module, nn.BatchNorm1d):
                module.momentum = 0.0
    torch.manual_seed(3)
    for x, y in [*loader(4), *loader(4)]:
        nn.functional.mse_loss(whole(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    task = ModuleTask(
        model,
        loader,
        4,
        loss_fn=nn.functional.mse_loss,
        optimizer_fn=lambda params: torch.optim.AdamW(params, lr=0.01),
        technique=technique,
        pieces=3,
    )
    task.setup(torch.device("cpu"))
    torch.manual_seed(3)
    for _ in range(2 * len(loader(4))):
        assert one_pass(task) == 4
    values = {}
    for piece in task.state_dict()["pieces"]:
        values |= {f"{len(values)}": value for value in piece.values()}
    expected = {tuple(v.shape): [] for v in whole.state_dict().values()}
    for value in whole.state_dict().values():
        expected[tuple(value.shape)].append(value)
    for value in values.values():
        assert any(
            torch.allclose(value, one, rtol=1e-5, atol=1e-6)
            for one in expected[tuple(value.shape)]
        ), technique


def test_offload_keeps_nothing_on_the_device_between_micro_steps():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    task = ModuleTask(model, loader, 4, loss_fn=nn.functional.mse_loss, technique="offload")
    task.setup(torch.device("cpu"))
    carry = None
    for k in range(task.num_micro_steps):
        carry = task.run(k, carry)
        assert sum(p.numel() for p in model.parameters()) == 0
        assert all(p.grad is None for p in model.parameters())


def test_training_goes_on_from_its_state_as_if_it_had_not_moved():
    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
        task = ModuleTask(model, loader, 4, loss_fn=nn.functional.mse_loss)
        task.setup(torch.device("cpu"))
        return task

    stays, leaves, comes = made(), made(), made()
    for _ in range(8):
        one_pass(stays)
    for _ in range(4):
        one_pass(leaves)
    comes.load_state_dict(leaves.state_dict())
    for _ in range(4):
        one_pass(comes)
    for a, b in zip(stays.state_dict()["pieces"], comes.state_dict()["pieces"], strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_what_cannot_be_cut_is_refused_in_a_line():
    class Asks(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    class Two(nn.Module):
        def forward(self, x, y):
            return x + y

    for model, words in ((Asks(), "torch.fx cannot trace Asks"), (Two(), "takes 2 inputs")):
        with pytest.raises(MalformedError, match=words) as raised:
            cut(model)
        assert "\n" not in str(raised.value)
    with pytest.raises(MalformedError, match="for training"):
        ModuleTask(chain(), loader, 4, technique="checkpointing")
    with pytest.raises(MalformedError, match="allowed: none"):
        ModuleTask(chain(), loader, 4, technique="magic")
