"""Offload on several ranks: replicas, devices of one host link, recompute beside it."""

from __future__ import annotations

from itertools import pairwise

import executor_ranks
import msgspec
import pytest
import torch
from executor_tools import make_plan, one_f_one_b_rows, run_plan, run_ranks

from benchmarks.saving import (
    saving_batches,
    saving_layers,
    saving_loss,
    saving_workload,
)
from executor.pipeline import Pipeline
from executor.transport import ThreadWorld
from octotune.contract import Cluster, DataParallel, build_costs
from octotune.offload.planning import plan_copies
from octotune.schedules import FAMILIES, plan_from
from simulator.actions import stage_of
from simulator.engine import simulate

TIMES = (0.2, 0.2, 0.2)
UNHURRIED = (5.0, 5.0, 5.0)  # copies have left by then, whatever else the machine does


def hosts(count, bandwidth=4 * 10**9, **fields):
    cluster = Cluster.equal(count)
    link = fields.pop("host_link", None)
    return msgspec.structs.replace(
        cluster,
        devices=tuple(
            msgspec.structs.replace(device, offload_bandwidth=bandwidth, host_link=link)
            for device in cluster.devices
        ),
        **fields,
    )


def plan_of(rows, count, *, offload, cluster=None, recompute=False):
    workload = saving_workload([TIMES] * len(rows), own_ms=(1.0, 1.0, 1.0))
    stages = [(1, device, recompute) for device in range(len(rows))]
    cluster = cluster or hosts(len(rows))
    return make_plan(rows, stages, count, cluster=cluster, workload=workload, offload=offload)


def all_leave(rows):
    """Out in the order of F, each back before its backward."""
    lanes = []
    for row in rows:
        words = [word for word in row.split() if "W" not in word]
        lanes.append(tuple(w.replace("F", "O").replace("I", "R").replace("B", "R") for w in words))
    return tuple(lanes)


@pytest.mark.parametrize("split", [False, True])
def test_replicas_with_offload_get_the_gradients_of_replicas_without(split):
    """Two replicas of two devices."""
    rows = one_f_one_b_rows(2, 4, split=split)
    inputs, targets = next(saving_batches(8))
    found = []
    for offload in (all_leave(rows), None):
        cluster = hosts(2, data_parallel=DataParallel(size=2, bandwidth=10**9))
        plan = plan_of(rows, 4, offload=offload, cluster=cluster)
        models = [saving_layers([UNHURRIED] * 2) for _ in range(4)]

        def body(transport, plan=plan, models=models):
            pipe = Pipeline(
                plan, models[transport.rank], saving_loss, transport=transport, timeout_s=20
            )
            loss = pipe.step(pipe.share(inputs), pipe.share(targets))
            grads = [param.grad.clone() for param in pipe.parameters()]
            return loss, grads, pipe.offloaded()

        found.append(run_ranks(4, body, world=ThreadWorld(4)))
    for rank in range(4):
        (loss, grads, copied), (plain_loss, plain_grads, _) = (each[rank] for each in found)
        assert loss == plain_loss
        assert all(map(torch.equal, grads, plain_grads))
        if rank % 2 == 0:  # the last device's activations are wanted as soon as they are there
            assert copied.moved_bytes > 0
    # the replicas reduced: what one has the other has
    assert all(map(torch.equal, found[0][0][1], found[0][2][1]))


def test_processes_take_turns_on_the_host_link_they_share():
    """Gloo ranks; copies of one direction never overlap."""
    rows = ["0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"]
    shared = hosts(2, bandwidth=10**9, host_link="switch")
    plan = plan_of(rows, 4, offload=all_leave(rows), cluster=shared)
    free = msgspec.structs.replace(plan, offload=None)
    answers = executor_ranks.spawn(2, executor_ranks.run_saving_plans, [plan, free], [TIMES] * 2)
    for (loss, grads, turns), (plain, plain_grads, _) in answers:
        assert loss == plain
        assert grads == plain_grads
        assert turns
    for side in (0, 1):
        turns = sorted(turn for found, _ in answers for turn in found[2] if turn[0] == side)
        assert turns
        for (_, begin, length), (_, after, _) in pairwise(turns):
            assert after >= begin + length


def test_recompute_with_a_deferred_w_measures_a_higher_peak_than_plain_1f1b():
    """Case D05: the recomputed activations live until W."""
    peaks = []
    inputs, targets = next(saving_batches(2))
    for row in ("0F0 0F1 0I0 0I1 0W0 0W1", "0F0 0B0 0F1 0B1"):
        plan = plan_of([row], 2, offload=None, recompute=True)
        _, _, (pipe,) = run_plan(
            plan,
            lambda: saving_layers([TIMES]),
            saving_loss,
            inputs,
            targets,
            watch_saved=True,
            float_limit="off",
        )
        found = pipe.offloaded()
        assert found.saved_peak_bytes == pytest.approx(found.planned_saved_peak_bytes, rel=0.05)
        peaks.append(found.saved_peak_bytes)
    assert peaks[0] > 1.4 * peaks[1]


def test_later_ranks_copy_less():
    """Case D08: equal activations on four ranks of 1F1B; the last one's never leave."""
    workload = saving_workload([TIMES] * 4, own_ms=(1.0, 1.0, 1.0))
    free = plan_from(FAMILIES["1f1b"], workload, hosts(4), 12)
    costs = build_costs(workload, free.cluster, free.stages, 12)
    peak = int(simulate(free.schedule(), costs).peak_bytes.max())
    tight = msgspec.structs.replace(
        free.cluster,
        devices=tuple(
            msgspec.structs.replace(device, memory_bytes=7 * peak // 10)
            for device in free.cluster.devices
        ),
    )
    costs = build_costs(workload, tight, free.stages, 12)
    made = plan_copies(free.schedule(), costs)
    assert made.shortfall_bytes == 0
    plan = msgspec.structs.replace(free, cluster=tight, offload=made.copies.words())
    inputs, targets = next(saving_batches(12))
    _, _, pipes = run_plan(plan, lambda: saving_layers([TIMES] * 4), saving_loss, inputs, targets)
    planned = [len(lane) for lane in plan.offload]
    assert planned == sorted(planned, reverse=True)
    copied = [pipe._offload.copies() if pipe._offload else [] for pipe in pipes]
    assert len(copied[0]) > 0
    assert copied[3] == []
    for device, copies in enumerate(copied):
        assert len(copies) <= planned[device]
        assert all(stage_of(copy.code) == device for copy in copies)


def test_weight_gradients_float_within_the_peak_of_a_plan_with_offload():
    """Also where the devices have no limit: what copies freed is not filled up with W's."""
    rows = ["0F0 0F1 0F2 0F3 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3"]
    plan = plan_of(rows, 4, offload=all_leave(rows))
    inputs, targets = next(saving_batches(4))
    limits = {}
    for limit in ("auto", "plan", "memory"):
        _, _, (pipe,) = run_plan(
            plan, lambda: saving_layers([TIMES]), saving_loss, inputs, targets, float_limit=limit
        )
        limits[limit] = pipe._floating._limit
        peak = int(pipe.predicted.peak_bytes[0] - pipe.costs.static_bytes[0])
    assert limits["auto"] == limits["plan"] == peak
    assert limits["memory"] > peak
    free = msgspec.structs.replace(plan, offload=None)
    _, _, (pipe,) = run_plan(free, lambda: saving_layers([TIMES]), saving_loss, inputs, targets)
    assert pipe._floating._limit == limits["memory"]
