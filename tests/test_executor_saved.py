"""Saved tensors as storages: once each, views as views, and never what others hold."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from executor.offload.host_pool import HostPool, _slab_sizes
from executor.offload.saved import Parcel, choose, fixed_storages
from executor.offload.saved_watch import SavedWatch

CPU = torch.device("cpu")


def leave(parcel, pool):
    """Take everything chosen to the host; overwrite what was left behind."""
    for piece in parcel.chosen:
        block = pool.take(piece.num_bytes)
        source = piece.bytes()
        block.bytes.copy_(source)
        source.fill_(0xAB)  # whoever still reads it gets nonsense
        piece.leave(block)


def come_back(parcel, pool):
    for piece in parcel.chosen:
        memory = torch.empty(piece.num_bytes, dtype=torch.uint8)
        memory.copy_(piece.block.bytes)
        pool.give(piece.come_back(memory))


def grads_with(function, modules, x, *, moves, budget=1 << 40, smallest=1):
    x = x.clone().requires_grad_()
    for module in modules:
        module.zero_grad()
    if not moves:
        function(x).sum().backward()
        return [x.grad, *(p.grad.clone() for m in modules for p in m.parameters())], None
    parcel = Parcel(fixed_storages(modules), CPU, smallest_bytes=smallest)
    with parcel.listening():
        out = function(x)
    parcel.close([x, out], budget)
    pool = HostPool(pinned=False)
    leave(parcel, pool)
    come_back(parcel, pool)
    assert pool.in_use_bytes == 0
    out.sum().backward()
    return [x.grad, *(p.grad.clone() for m in modules for p in m.parameters())], parcel


def both_ways(function, modules, x, **options):
    torch.manual_seed(0)
    plain, _ = grads_with(function, modules, x, moves=False)
    torch.manual_seed(0)
    moved, parcel = grads_with(function, modules, x, moves=True, **options)
    for one, other in zip(plain, moved, strict=True):
        assert torch.equal(one, other)
    return parcel


def block(width=32):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, width)
    )


def test_a_block_with_dropout_is_bit_equal():
    model = block()
    parcel = both_ways(model, [model], torch.randn(8, 32))
    assert len(parcel.chosen) >= 4


def test_attention_and_batched_views_are_bit_equal():
    torch.manual_seed(1)
    model = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    both_ways(model, [model], torch.randn(2, 6, 32))


def test_views_of_one_storage_move_once_and_come_back_as_views():
    def function(x):
        wide = x * 2.0
        a, b = wide.chunk(2, dim=1)
        c = wide.t()[1:, ::2]
        d = wide.as_strided((3, 3), (2, 5), 7)
        e = wide[:1].expand(4, -1)
        return (a * b).sum() + (c * c).sum() + (d * d).sum() + (e * e).sum() + (wide * wide).sum()

    parcel = both_ways(function, [], torch.randn(8, 16))
    assert [piece.num_bytes for piece in parcel.chosen] == [8 * 16 * 4]


def test_types_shapes_and_strides_survive():
    kept = []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *others):
            ctx.save_for_backward(*others)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            kept.extend(ctx.saved_tensors)
            return (grad, *(None for _ in ctx.saved_tensors))

    others = [
        torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
        torch.rand(5).to(torch.bfloat16)[1:4],
        torch.tensor([True, False, True]),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.tensor(2.5),
        torch.empty(0),
    ]
    expected = [other.clone() for other in others]
    facts = [(o.dtype, o.shape, o.stride(), o.storage_offset(), o.is_conj()) for o in others]
    x = torch.randn(2, requires_grad=True)
    parcel = Parcel(frozenset(), CPU, smallest_bytes=1)
    with parcel.listening():
        out = Keep.apply(x, *others)
    del others
    parcel.close([x, out], 1 << 30)
    pool = HostPool(pinned=False)
    leave(parcel, pool)
    come_back(parcel, pool)
    out.sum().backward()
    assert [(o.dtype, o.shape, o.stride(), o.storage_offset(), o.is_conj()) for o in kept] == facts
    assert all(torch.equal(one, other) for one, other in zip(kept, expected, strict=True))


def test_parameters_buffers_inputs_and_small_tensors_stay():
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())
    x = torch.randn(32, 64, requires_grad=True)
    parcel = Parcel(fixed_storages([model]), CPU)
    with parcel.listening():
        out = model(x)
    moved = parcel.close([x, out], 1 << 30)
    # the batch norm's input; its means are small, x is the input and the ReLU's result the output
    assert moved == 32 * 64 * 4
    assert len(parcel.chosen) == 1


def test_what_somebody_else_holds_stays():
    held = []

    class Holds(nn.Module):
        def forward(self, x):
            y = x * 2.0
            held.append(y)
            return y * y

    model = Holds()
    x = torch.randn(64, 64, requires_grad=True)
    parcel = Parcel(fixed_storages([model]), CPU)
    with parcel.listening():
        out = model(x)
    assert parcel.close([x, out], 1 << 30) == 0
    assert parcel.held_bytes == 64 * 64 * 4
    assert "nothing could leave" in parcel.why_not


@pytest.mark.parametrize("moves", [False, True])
def test_a_tensor_changed_in_place_raises_as_autograd_does(moves):
    base = torch.randn(64, 64)
    x = torch.randn(64, 64, requires_grad=True)
    parcel = Parcel(frozenset(), CPU)
    with parcel.listening():
        out = x * base.view(-1).view(64, 64)
    parcel.close([x, out], 1 << 30)
    if moves:
        assert not parcel.chosen  # `base` is held here, so it stays
    base.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_tensor_changed_during_f_raises_too():
    x = torch.randn(64, 64, requires_grad=True)

    def function(given):
        y = given * 2.0
        z = y * y
        y.add_(1.0)
        return z.sum()

    parcel = Parcel(frozenset(), CPU)
    with parcel.listening():
        out = function(x)
    assert parcel.close([x, out], 1 << 30) == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_what_was_asked_for_before_its_turn_comes_at_once():
    """Between leaving and coming back: the bytes are fetched past the lane."""
    model = block()
    x = torch.randn(8, 32, requires_grad=True)
    torch.manual_seed(0)
    model(x).sum().backward()
    expected, x.grad = x.grad, None
    parcel = Parcel(fixed_storages([model]), CPU, smallest_bytes=1)
    torch.manual_seed(0)
    with parcel.listening():
        out = model(x)
    parcel.close([x, out], 1 << 30)
    pool = HostPool(pinned=False)
    leave(parcel, pool)
    out.sum().backward()
    assert torch.equal(x.grad, expected)
    come_back(parcel, pool)  # the lane's turn, after it
    assert pool.in_use_bytes == 0


def test_in_place_activations_are_bit_equal():
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(inplace=True), nn.Linear(64, 32))
    both_ways(model, [model], torch.randn(8, 32))


def test_checkpointed_blocks_are_bit_equal():
    from torch.utils.checkpoint import checkpoint

    model = block()
    tail = nn.Linear(32, 32)
    both_ways(
        lambda x: tail(checkpoint(model, x, use_reentrant=False)),
        [model, tail],
        torch.randn(8, 32),
    )


def test_memory_is_freed_when_it_leaves_and_when_backward_is_done():
    """Measured by the lifetimes of storages, not by what the parcel believes."""
    watch = SavedWatch()
    watch.restart()
    x = torch.randn(64, 64, requires_grad=True)
    parcel = Parcel(frozenset(), CPU, watch.note)
    size = 64 * 64 * 4
    with parcel.listening():
        out = torch.exp(torch.sin(x * 2.0) * 3.0).square().sum()
    assert watch.usage()[-1][1] == 2 * size == parcel.close([x, out], 1 << 30)
    pool = HostPool(pinned=False)
    leave(parcel, pool)
    assert watch.usage()[-1][1] == 0
    come_back(parcel, pool)
    for piece in parcel.chosen:
        watch.note(piece.storage)
    del piece
    assert watch.usage()[-1][1] == 2 * size
    parcel.empty()
    out.backward()
    assert watch.usage()[-1][1] == 0
    assert watch.peak_bytes == 2 * size


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(0, 200))
@settings(max_examples=200, deadline=None)
def test_chosen_sizes_come_as_near_as_any_subset(sizes, budget):
    chosen = choose(tuple(sizes), budget)
    assert len(set(chosen)) == len(chosen)
    sums = {0}
    for size in sizes:
        sums |= {size + other for other in sums}
    assert sum(sizes[at] for at in chosen) == max(total for total in sums if total <= budget)


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_blocks_of_the_pool_never_overlap_and_are_all_given_back(seed):
    rng = random.Random(seed)
    pool = HostPool(pinned=False, expected_bytes=rng.choice((0, 100_000)))
    out = {}
    for turn in range(40):
        if out and rng.random() < 0.5:
            key = rng.choice(list(out))
            block_, mark = out.pop(key)
            assert bool((block_.bytes == mark).all())
            pool.give(block_)
        else:
            block_ = pool.take(rng.randint(1, 60_000))
            mark = turn + 1
            block_.bytes.fill_(mark)
            out[turn] = block_, mark
    for block_, _ in out.values():
        pool.give(block_)
    assert pool.in_use_bytes == 0
    assert all(slab.gaps == [(0, slab.memory.numel())] for slab in pool._slabs)


@pytest.mark.parametrize("expected", [1, 10**6, 65 << 20, 700 << 20, (3 << 30) + 5])
def test_slabs_are_powers_of_two_and_hold_what_is_expected_without_doubling(expected):
    sizes = _slab_sizes(expected)
    assert all(size & (size - 1) == 0 for size in sizes)
    assert expected <= sum(sizes) <= max(2 << 20, int(1.25 * expected))


def test_functions_of_many_sizes_fall_back_to_the_largest_that_fit():
    rng = random.Random(3)
    sizes = tuple(rng.randrange(1, 10**9) for _ in range(60))
    budget = sum(sizes) // 2
    total = sum(sizes[at] for at in choose(sizes, budget))
    assert 0.9 * budget < total <= budget
