"""Optimizer state on the host: out, back, and never missed."""

from __future__ import annotations

import pytest
import torch
from executor_tools import gpipe_rows, run_ranks
from test_executor_offload import WIDTH, batch, blocks, hosts, plan_of
from torch import nn
from torch.nn import functional

from executor.errors import MismatchError
from executor.offload.host_book import HostBook
from executor.offload.host_pool import HostPool
from executor.offload.lanes import Road
from executor.offload.state import StateOffload
from executor.offload.thread_lane import ThreadLane
from executor.pipeline import Pipeline


def lane(bandwidth=10**9, limit=None, timeout_s=5):
    road = Road(
        bandwidth=bandwidth,
        link=0,
        host=0,
        book=HostBook(1, [limit]),
        pool=HostPool(pinned=False),
    )
    return ThreadLane([], road, timeout_s)


def trained(steps=2, size=128):
    torch.manual_seed(0)
    model = nn.Linear(size, size)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, lambda: train(model, optimizer, steps)


def train(model, optimizer, steps):
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, model.in_features, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


def state_of(optimizer, lane_=None):
    return StateOffload(optimizer, lane_ or lane(), torch.device("cpu"), 5)


def moments(optimizer):
    return [
        state[name].untyped_storage().nbytes()
        for state in optimizer.state.values()
        for name in ("exp_avg", "exp_avg_sq")
    ]


def test_state_leaves_and_comes_back_as_it_was():
    _, optimizer, more = trained()
    more()
    before = [value.clone() for state in optimizer.state.values() for value in state.values()]
    state = state_of(optimizer)
    expected = 2 * 128 * 128 * 4
    assert state.state_bytes() == expected  # both moments of the weight; the bias is small
    state.leave()
    assert state.wait_left() == expected == state.away_bytes
    assert sorted(moments(optimizer)) == [0, 0, 512, 512]
    state.wait_back()
    assert state.away_bytes == 0
    after = [value for state_ in optimizer.state.values() for value in state_.values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_step_brings_the_state_back_by_itself():
    _, _, plain = trained(4)
    expected = plain()
    model, optimizer, _ = trained()
    state = state_of(optimizer, lane(bandwidth=10**8))
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        state.leave()
        model(torch.randn(4, 128, generator=generator)).square().mean().backward()
        if step % 2:
            state.wait_left()  # else it turns round on its way out
        optimizer.step()
        assert state.away_bytes == 0
        optimizer.zero_grad()
    for found, wanted in zip(model.parameters(), expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_state_dict_is_whole():
    _, optimizer, more = trained()
    more()
    state = state_of(optimizer)
    state.leave()
    state.wait_left()
    saved = optimizer.state_dict()
    assert state.away_bytes == 0
    assert saved["state"][0]["exp_avg"].abs().sum() > 0


def test_nothing_moves_before_the_first_step():
    _, optimizer, _ = trained()
    state = state_of(optimizer)
    state.leave()
    assert state.wait_left() == 0
    state.wait_back()


def test_waiting_without_leaving_is_nothing():
    _, optimizer, _ = trained()
    state = state_of(optimizer)
    assert state.wait_left() == 0
    state.come_back()
    state.wait_back()


def test_what_the_host_cannot_hold_stays_and_is_said():
    _, optimizer, more = trained()
    more()
    one = 128 * 128 * 4
    state = state_of(optimizer, lane(limit=one))
    state.leave()
    assert state.wait_left() == one
    assert "host_memory_bytes" in state.failure
    state.wait_back()
    assert state.away_bytes == 0


def test_a_slow_lane_takes_as_long_as_its_bandwidth_says():
    import time

    _, optimizer, more = trained()
    more()
    size = 2 * 128 * 128 * 4
    state = state_of(optimizer, lane(bandwidth=10 * size))
    began = time.perf_counter()
    state.leave()
    assert time.perf_counter() - began < 0.05
    state.wait_left()
    assert 0.09 < time.perf_counter() - began < 0.5


def test_waiting_has_an_end():
    _, optimizer, more = trained()
    more()
    state = state_of(optimizer, lane(bandwidth=1000))
    state.leave()
    with pytest.raises(TimeoutError, match=r"optimizer state was not moved within 0\.05 s"):
        state.wait_left(0.05)


def test_state_shares_the_lane_of_a_pipeline_with_activations():
    rows, count = gpipe_rows(2, 4), 4
    models = {key: [blocks(2) for _ in range(2)] for key in (True, False)}

    def body(transport, moves):
        plan = plan_of(rows, [(1, 0), (1, 1)], count, bandwidth=10**8, copied=moves)
        pipe = Pipeline(
            plan, models[moves][transport.rank], functional.mse_loss, transport=transport
        )
        optimizer = torch.optim.AdamW(pipe.parameters())
        state = pipe.offload_state(optimizer) if moves else None
        losses = []
        for step in range(3):
            if state is not None:
                state.leave()
            losses.append(pipe.step(*batch(count)))
            if state is not None and step:
                assert state.wait_left() == 4 * WIDTH * 2 * WIDTH * 4
            optimizer.step()
            optimizer.zero_grad()
        return losses

    with_moves = run_ranks(2, lambda transport: body(transport, True))
    assert with_moves == run_ranks(2, lambda transport: body(transport, False))


def test_a_device_without_bandwidth_is_told():
    cluster = hosts(1, device={"offload_bandwidth": 0})
    plan = plan_of(gpipe_rows(1, 1), [(1, 0)], 1, cluster=cluster, copied=False)
    pipe = Pipeline(plan, blocks(1), functional.mse_loss)
    with pytest.raises(MismatchError, match="device 0 cannot offload optimizer state"):
        pipe.offload_state(torch.optim.AdamW(pipe.parameters()))


def test_a_part_of_the_state_can_be_asked_for():
    _, optimizer, more = trained()
    more()
    one = 128 * 128 * 4
    state = state_of(optimizer)
    state.leave(most_bytes=one + 100)
    assert state.wait_left() == one
    optimizer.step()
    assert state.away_bytes == 0
