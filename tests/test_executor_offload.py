"""Offload: what leaves comes back bit for bit, whatever the lane does."""

from __future__ import annotations

import dataclasses
import random
import threading
import weakref

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
    run_ranks,
)
from torch import nn
from torch.nn import functional

from benchmarks.saving import (
    SAVED_BYTES,
    saving_batches,
    saving_layers,
    saving_loss,
    saving_workload,
)
from executor.errors import MismatchError, StepError
from executor.pipeline import Pipeline
from octotune.contract import Cluster
from octotune.errors import OutOfMemoryError
from octotune.schedules import plan_from
from octotune.schedules.interleaved import interleaved_family
from simulator.actions import CopyKind, kind_of, microbatch_of, stage_of
from simulator.chrome import dumps
from simulator.chrome_read import loads

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


# --- what is measured -------------------------------------------------------------------


def saving_plan(rows, count, bandwidth, num_devices=2, **more):
    workload = saving_workload([(0.2, 0.2, 0.2)] * num_devices, own_ms=(1.0, 1.0, 1.0))
    return make_plan(
        rows,
        [(1, device) for device in range(num_devices)],
        count,
        cluster=more.pop("cluster", None) or hosts(num_devices, bandwidth),
        workload=workload,
        offload=lanes(rows, [(1, device) for device in range(num_devices)]),
    )


def run_saving(plan, steps=2, **options):
    inputs, targets = next(saving_batches(plan.num_microbatches))
    return run_plan(
        plan,
        lambda: saving_layers([(0.2, 0.2, 0.2)] * len(plan.workload.layers)),
        saving_loss,
        inputs,
        targets,
        steps=steps,
        **options,
    )


@pytest.mark.parametrize("split", [False, True])
def test_the_measured_peak_is_the_plans(split):
    """By the lifetimes of storages; what the plan has on the device, no more and no less."""
    rows = one_f_one_b_rows(2, 6, split=split)
    rows[0] = gpipe_rows(2, 6)[0] if not split else rows[0]
    plan = saving_plan(rows, 6, bandwidth=4 * 10**9)
    _, _, pipes = run_saving(plan, watch_saved=True, float_limit="off")
    for pipe in pipes:
        found = pipe.offloaded()
        assert found.saved_peak_bytes <= 1.05 * found.planned_saved_peak_bytes
        assert found.saved_peak_bytes >= 2 * SAVED_BYTES
        # everything is let go of at the end of the step
        assert pipe._offload.watch.usage()[-1][1] == 0
    free = saving_plan(rows, 6, bandwidth=4 * 10**9)
    free = msgspec.structs.replace(free, offload=None)
    _, _, plain = run_saving(free, watch_saved=True, float_limit="off")
    for pipe in plain:
        found = pipe.offloaded()
        # the loss saves a little that the workload does not know of
        assert found.saved_peak_bytes == pytest.approx(found.planned_saved_peak_bytes, rel=0.01)
    if not split:
        most = plain[0].offloaded().saved_peak_bytes
        for _ in range(5):  # copies that come late on a busy machine leave the peak where it was
            if pipes[0].offloaded().saved_peak_bytes < most:
                break
            _, _, pipes = run_saving(plan, watch_saved=True, float_limit="off")
        assert pipes[0].offloaded().saved_peak_bytes < most


def test_the_timeline_has_the_copies_on_their_lane():
    plan = saving_plan(gpipe_rows(2, 3), 3, bandwidth=4 * 10**9)
    models = [saving_layers([(0.2, 0.2, 0.2)] * 2) for _ in range(2)]
    inputs, targets = next(saving_batches(3))

    def body(transport):
        pipe = Pipeline(plan, models[transport.rank], saving_loss, transport=transport)
        pipe.step(inputs, targets)
        return pipe.timeline()

    timeline = run_ranks(2, body)[0]
    assert timeline.copies is not None
    words = timeline.copies.words()
    assert sorted(words[0]) == sorted(plan.offload[0])
    at = {word: index for index, word in enumerate(word for row in words for word in row)}
    actions = [str(a) for row in timeline.schedule.rows for a in row]
    for microbatch in range(3):
        out, back = at[f"0O{microbatch}"], at[f"0R{microbatch}"]
        f, b = actions.index(f"0F{microbatch}"), actions.index(f"0B{microbatch}")
        assert timeline.end_ns[f] <= timeline.copy_start_ns[out]
        assert timeline.copy_end_ns[out] <= timeline.copy_start_ns[back]
        assert timeline.copy_end_ns[back] <= timeline.start_ns[b]
        least = timeline.costs.copy_ns[0]
        assert timeline.copy_end_ns[out] - timeline.copy_start_ns[out] >= 0.99 * least
    assert loads(dumps(timeline)) == timeline
    assert timeline.bubbles() is not None


def test_a_link_slower_than_planned_makes_steps_longer_and_says_which_reloads_were_late():
    """The gradients are those of the unsplit model all the same."""
    rows = gpipe_rows(2, 4)
    fast, slow = saving_plan(rows, 4, 4 * 10**9), saving_plan(rows, 4, 4 * 10**9)
    quick, quick_grads, _ = run_saving(fast)

    def slower(pipe):
        lane = pipe._offload.lane
        lane.road = dataclasses.replace(lane.road, bandwidth=10**8)

    losses, grads, pipes = run_saving(slow, prepare=slower)
    assert losses == quick
    assert all(torch.equal(grads[name], quick_grads[name]) for name in grads)
    late = [late for pipe in pipes for late in pipe.offloaded().late]
    kept = [kept for pipe in pipes for kept in pipe.offloaded().kept]
    assert late or kept
    assert all(each.most_ns > 0 for each in late)
    assert all("called back" in each.why for each in kept)


def test_memory_waits_for_a_slow_link_where_the_plan_needs_it():
    """F waits for copies out that the plan has ended by then; the peak stays the plan's."""
    rows = gpipe_rows(2, 6)
    plan = saving_plan(rows, 6, 4 * 10**9)

    def slower(pipe):
        lane = pipe._offload.lane
        lane.road = dataclasses.replace(lane.road, bandwidth=3 * 10**8)

    _, _, pipes = run_saving(plan, prepare=slower, watch_saved=True, float_limit="plan")
    for pipe in pipes:
        found = pipe.offloaded()
        assert found.saved_peak_bytes <= 1.05 * found.planned_saved_peak_bytes


# --- bad input --------------------------------------------------------------------------


def test_a_host_that_refuses_memory_keeps_activations_on_the_device_and_says_so():
    rows = gpipe_rows(2, 4)

    def refuse(pipe):
        def no(size):
            raise MemoryError("no more")

        pipe._offload.lane.road.pool._make = no

    (losses, grads, pipes), (plain, plain_grads, _) = both(
        rows, [(1, 0), (1, 1)], 4, run={"prepare": refuse}
    )
    assert losses == plain
    assert all(torch.equal(grads[name], plain_grads[name]) for name in grads)
    for pipe in pipes:
        found = pipe.offloaded()
        assert len(found.kept) == 4
        # but those whose backward came before the lane had got to them
        assert all("no more" in kept.why or "called back" in kept.why for kept in found.kept)
        assert found.moved_bytes == 0


def test_host_memory_is_shared_by_the_devices_of_a_host_and_respected():
    rows = gpipe_rows(2, 4)
    plan = plan_of(rows, [(1, 0), (1, 1)], 4)
    assert plan.cluster.host_memory_bytes is None
    books = []

    def little(pipe):
        pipe._offload.lane.road.book._limits = [3 * STORAGE]
        books.append(pipe._offload.lane.road.book)

    _, _, pipes = run_plan(
        plan, lambda: blocks(2), functional.mse_loss, *batch(4), prepare=little, steps=2
    )
    assert any("host_memory_bytes" in kept.why for pipe in pipes for kept in pipe.offloaded().kept)
    assert all(book.in_use_bytes(0) == 0 for book in books)  # one file: what all gave back


def test_a_plan_beyond_host_memory_is_refused():
    rows = gpipe_rows(2, 4)
    plan = plan_of(rows, [(1, 0), (1, 1)], 4, cluster=hosts(2, host_memory_bytes=STORAGE))
    with pytest.raises(OutOfMemoryError, match="host 0 needs"):
        run_plan(plan, lambda: blocks(2), functional.mse_loss, *batch(4))


def test_a_stage_with_nothing_to_move_runs_and_says_so():
    """Case D10's kind: the plan believes in bytes that the model does not save."""
    rows = gpipe_rows(1, 2)
    plan = plan_of(rows, [(1, 0)], 2)
    _, _, (pipe,) = run_plan(
        plan, lambda: [nn.Linear(WIDTH, WIDTH)], lambda out, _: out.sum(), *batch(2)
    )
    found = pipe.offloaded()
    assert [kept.copy for kept in found.kept] == ["0O0", "0O1"]
    assert "nothing could leave" in found.kept[0].why


def test_lanes_without_copies_run_as_plans_without_offload():
    """Case D10: a fraction of 0 is no refusal, and changes nothing."""
    rows = one_f_one_b_rows(2, 4, split=True)
    results = both(rows, [(1, 0), (1, 1)], 4, keep=lambda stage, microbatch: True)
    same(results)
    pipes, plain = (found[2] for found in results)
    for pipe, other in zip(pipes, plain, strict=True):
        assert pipe.predicted.step_ns == other.predicted.step_ns
        assert pipe.predicted.peak_bytes.tolist() == other.predicted.peak_bytes.tolist()
        assert pipe.offloaded().moved_bytes == 0
        assert pipe.offloaded().late == pipe.offloaded().kept == []


def test_a_layer_that_fails_in_the_middle_ends_the_lane_and_the_step():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.count = 0

        def forward(self, x):
            self.count += 1
            if self.count == 3:
                raise ArithmeticError("a layer broke")
            return x * 1.0

    rows = gpipe_rows(1, 4)
    plan = plan_of(rows, [(1, 0)], 4, bandwidth=10**7)
    pipe = Pipeline(plan, [nn.Sequential(*blocks(1), Fails())], functional.mse_loss)
    with pytest.raises(MismatchError, match="at 0F2: ArithmeticError: a layer broke"):
        pipe.step(*batch(4))
    thread = pipe._offload.lane._thread
    if thread is not None:
        thread.join(5)
        assert not thread.is_alive()
    with pytest.raises(StepError, match="an earlier step failed"):
        pipe.step(*batch(4))


def test_what_goes_wrong_on_the_lane_is_raised_on_the_rank():
    plan = plan_of(gpipe_rows(1, 3), [(1, 0)], 3)
    pipe = Pipeline(plan, blocks(1), functional.mse_loss)

    def broken(*_):
        raise RuntimeError("the copy failed")

    pipe._offload.lane._take_out = broken
    with pytest.raises(MismatchError, match="the copy failed"):
        pipe.step(*batch(3))


# --- many ranks --------------------------------------------------------------------------


def test_activations_on_their_way_do_not_grow_with_the_microbatches():
    """Case D13: p = 4, v = 4; what a stage handed on is let go of once it is not needed."""
    peaks = {}
    for count in (8, 32):
        plan = plan_from(interleaved_family(4), heavy(16, offloadable=0), hosts(4), count)
        counter = Counter()
        run_plan(
            plan,
            lambda counter=counter: [CountedLinear(counter) for _ in range(16)],
            functional.mse_loss,
            torch.randn(count, WIDTH),
            torch.zeros(count, WIDTH),
        )
        assert counter.now == 0
        peaks[count] = counter.most
    assert peaks[32] <= 1.25 * peaks[8]


class Counter:
    """How many of something live now, and how many did at most."""

    def __init__(self):
        self.now = self.most = 0
        self.lock = threading.RLock()

    def add(self, change):
        with self.lock:
            self.now += change
            self.most = max(self.most, self.now)


class CountedLinear(nn.Linear):
    """Its outputs are counted while they live."""

    def __init__(self, counter):
        super().__init__(WIDTH, WIDTH)
        self.counter = counter

    def forward(self, x):
        out = super().forward(x)
        self.counter.add(1)
        weakref.finalize(out.untyped_storage(), self.counter.add, -1)
        return out
