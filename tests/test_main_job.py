"""The main job's pieces at small sizes: the GPT and its text."""

import math
from itertools import islice

import numpy as np
import pytest
import torch

from benchmarks import gpt
from octotune.model import profile


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory))
        yield directory


def test_the_text_is_the_same_from_the_cache_and_made_anew(cache):
    made = gpt.corpus(gpt.TINY)
    (file,) = cache.rglob("*.npy")
    assert np.array_equal(gpt.corpus(gpt.TINY), made)
    file.unlink()
    assert np.array_equal(gpt.corpus(gpt.TINY), made)
    assert made.max() < gpt.TINY.vocabulary
    assert len(np.unique(made)) > 100


def test_targets_are_the_next_tokens_and_every_caller_sees_the_same_batches(cache):
    (ids, target), (later, _) = islice(gpt.tiny_factory()[2], 2)
    rows = gpt.TINY.microbatch * gpt.TINY.num_microbatches
    assert ids.shape == target.shape == (rows, gpt.TINY.length)
    assert torch.equal(ids[:, 1:], target[:, :-1])
    assert not torch.equal(ids, later)
    assert torch.equal(ids, next(gpt.tiny_factory()[2])[0])


def test_a_layer_starts_alike_whichever_rank_makes_it_and_in_whatever_order(cache):
    makers = gpt.layer_makers(gpt.TINY)
    assert len(makers) == len(gpt.TINY.layer_names) == 6
    forwards = [make().state_dict() for make in makers]
    torch.manual_seed(99)
    backwards = [make().state_dict() for make in reversed(makers)][::-1]
    for own, other in zip(forwards, backwards, strict=True):
        assert own.keys() == other.keys()
        assert all(torch.equal(own[key], other[key]) for key in own)


def test_the_gpt_learns(cache):
    makers, loss_fn, batches, make_optimizer = gpt.tiny_factory()
    model = torch.nn.Sequential(*[make() for make in makers])
    optimizer = make_optimizer(model.parameters())
    losses = []
    for ids, target in islice(batches, 30):
        optimizer.zero_grad()
        loss = loss_fn(model(ids), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(gpt.TINY.vocabulary), rel=0.05)
    assert np.mean(losses[-5:]) < losses[0] - 0.2


def test_attention_looks_back_only():
    settings = gpt.TINY
    torch.manual_seed(0)
    layer = gpt.Attention(settings, settings.blocks[0])
    inputs = torch.randn(1, settings.length, settings.width)
    changed = inputs.clone()
    changed[:, 5:] += 1
    assert torch.allclose(layer(inputs)[:, :5], layer(changed)[:, :5])


def test_the_gpts_layers_are_unequal_and_its_head_is_the_largest(cache):
    makers, loss_fn, batches, make_optimizer = gpt.tiny_factory()
    ids, target = (each[: gpt.TINY.microbatch] for each in next(batches))
    workload = profile(
        makers, ids, loss_fn, example_target=target, optimizer_fn=make_optimizer,
        names=gpt.TINY.layer_names, repeats=1, warmup=0,
    )  # fmt: skip
    assert [layer.name for layer in workload.layers] == gpt.TINY.layer_names
    kinds = ["embedding", "attention", "mlp", "attention", "mlp", "head"]
    assert [layer.kind for layer in workload.layers] == kinds
    assert len({layer.param_bytes for layer in workload.layers[1:5]}) == 4
    settings = gpt.SETTINGS
    head = settings.vocabulary * settings.width
    blocks = [
        settings.width * (4 * block.attention_width + 2 * block.mlp_width)
        for block in settings.blocks
    ]
    assert head > 5 * np.mean(blocks) / 2  # a block is two layers
