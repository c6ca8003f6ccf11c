"""Offload: what leaves comes back bit for bit, whatever the lane does."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch
from executor_tools import (
    gpipe_rows,
    make_plan,
    make_workload,
    one_f_one_b_rows,
    random_rows,
    run_plan,
)
from torch import nn
from torch.nn import functional

from octotune.contract import Cluster

WIDTH, ROWS = 32, 64
STORAGE = ROWS * 2 * WIDTH * 4  # of one hidden activation


def blocks(count, seed=0):
    torch.manual_seed(seed)
    return [
        nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.GELU(),
            nn.Linear(2 * WIDTH, WIDTH),
        )
        for _ in range(count)
    ]


def batch(num_microbatches):
    generator = torch.Generator().manual_seed(1)
    rows = ROWS * num_microbatches
    return (
        torch.randn(rows, WIDTH, generator=generator),
        torch.randn(rows, WIDTH, generator=generator),
    )


def hosts(num_devices, bandwidth=10**9, **fields):
    cluster = Cluster.equal(num_devices)
    device = {"offload_bandwidth": bandwidth} | fields.pop("device", {})
    return msgspec.structs.replace(
        cluster,
        devices=tuple(msgspec.structs.replace(each, **device) for each in cluster.devices),
        **fields,
    )


def heavy(num_layers, offloadable=2 * STORAGE):
    return make_workload(
        num_layers, saved_bytes=2 * STORAGE, saved_w_bytes=STORAGE, offloadable_bytes=offloadable
    )


def lanes(rows, stages, keep=lambda stage, microbatch: False, recompute=()):
    """Copy lanes that can run: out in the order of F, each back before its backward."""
    found = []
    for row in rows:
        lane, out = [], []
        for word in row.split():
            kind = next(letter for letter in word if letter.isalpha())
            stage, microbatch = map(int, word.split(kind))
            if keep(stage, microbatch) or stage in recompute or kind == "W":
                continue
            if kind == "F":
                lane.append(f"{stage}O{microbatch}")
                out.append((stage, microbatch))
            else:
                lane.append(f"{stage}R{microbatch}")
        found.append(tuple(lane))
    return tuple(found)


def plan_of(rows, stages, num_microbatches, *, copied=True, bandwidth=10**9, cluster=None, **more):
    keep = more.pop("keep", lambda stage, microbatch: False)
    recompute = {index for index, stage in enumerate(stages) if any(stage[2:])}
    return make_plan(
        rows,
        stages,
        num_microbatches,
        cluster=cluster or hosts(len(rows), bandwidth),
        workload=more.pop("workload", None) or heavy(sum(stage[0] for stage in stages)),
        offload=lanes(rows, stages, keep, recompute) if copied else None,
        **more,
    )


def both(rows, stages, num_microbatches, **options):
    """Run with and without copies; return (losses, gradients, pipelines) of each."""
    run_options = {"steps": 2} | options.pop("run", {})
    count = sum(stage[0] for stage in stages)
    results = []
    for copied in (True, False):
        plan = plan_of(rows, stages, num_microbatches, copied=copied, **options)
        results.append(
            run_plan(
                plan,
                lambda: blocks(count),
                functional.mse_loss,
                *batch(num_microbatches),
                **run_options,
            )
        )
    return results


def same(results):
    (losses, grads, pipes), (plain_losses, plain_grads, _) = results
    assert losses == plain_losses
    assert grads.keys() == plain_grads.keys()
    for name, grad in grads.items():
        assert torch.equal(grad, plain_grads[name]), name
    return pipes


def copied_words(pipe):
    """The copies that a rank made in its last step."""
    from simulator.actions import CopyKind, kind_of, microbatch_of, stage_of

    if pipe._offload is None:
        return []
    return [
        f"{stage_of(c.code)}{CopyKind(kind_of(c.code)).name}{microbatch_of(c.code)}"
        for c in pipe._offload.copies()
    ]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
def test_gradients_are_bit_equal_with_and_without_offload(split, num_microbatches):
    rows = one_f_one_b_rows(3, num_microbatches, split=split)
    pipes = same(both(rows, [(2, 0), (1, 1), (1, 2)], num_microbatches))
    assert pipes[0]._offload.moved_bytes[0] > 0
    assert any(copied_words(pipe) for pipe in pipes)


def test_every_copy_of_the_plan_is_made_where_there_is_time():
    rows = gpipe_rows(2, 4)
    pipes = same(both(rows, [(1, 0), (1, 1)], 4))
    for pipe in pipes[:1]:
        assert sorted(copied_words(pipe)) == sorted(pipe.plan.offload[pipe.device_index])


@pytest.mark.parametrize("seed", range(25))
def test_random_orders_with_random_copies_are_bit_equal(seed):
    rng = random.Random(seed)
    devices = rng.randint(1, 3)
    homes = [rng.randrange(devices) for _ in range(rng.randint(1, 4))]
    count = rng.randint(1, 4)
    rows = random_rows(rng, homes, devices, count, rising=True)
    stages = [(rng.randint(1, 2), home, rng.random() < 0.25) for home in homes]
    stays = {(s, m) for s in range(len(homes)) for m in range(count) if rng.random() < 0.3}
    same(
        both(
            rows,
            stages,
            count,
            bandwidth=rng.choice((10**7, 10**8, 10**10)),
            keep=lambda stage, microbatch: (stage, microbatch) in stays,
            run={"float_limit": rng.choice(("off", "plan", "memory"))},
        )
    )
