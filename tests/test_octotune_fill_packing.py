"""Bubbles by closed forms; packings against brute force, and never past time or memory."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octotune.check import check
from octotune.contract import Cluster, Device, Layer, Link, Links, Workload
from octotune.fill.bubbles import find_bubbles, resting_bytes
from octotune.fill.jobs import Configuration, FillJob, MicroStep
from octotune.fill.packing import (
    Margins,
    Room,
    best_packing,
    greedy_packing,
    nearest_miss,
    optimal_packing,
)
from octotune.schedules import find_family, plan_from

P, M = 4, 8
F, B = 10**7, 2 * 10**7


def plan(schedule="gpipe", *, microbatches=M, memory=100, state=40, saved=5, optimizer=0):
    layers = tuple(
        Layer(
            name=str(i),
            forward_ns=F,
            input_grad_ns=B // 2,
            weight_grad_ns=B // 2,
            optimizer_ns=optimizer,
            param_bytes=0,
            state_bytes=state,
            saved_bytes=saved,
            output_bytes=0,
        )
        for i in range(P)
    )
    workload = Workload(name="even", layers=layers)
    cluster = Cluster.equal(P, memory_bytes=memory)
    return plan_from(find_family(schedule), workload, cluster, microbatches)


def test_gpipe_leaves_three_bubbles_a_device_of_known_length():
    """Before the first forward s F, in the middle (p-1-s)(F+B), after the last backward s B."""
    bubbles = find_bubbles(check(plan()).timeline)
    for stage, row in enumerate(bubbles):
        expected = {
            ("start", f"{stage}F0"): stage * F,
            (f"{stage}F{M - 1}", f"{stage}B0"): (P - 1 - stage) * (F + B),
            (f"{stage}B{M - 1}", "end"): stage * B,
        }
        found = {(bubble.after, bubble.before): bubble.length_ns for bubble in row}
        assert found == {key: length for key, length in expected.items() if length}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-v2", "zb-h1"])
def test_bubbles_and_busy_time_make_up_the_step(schedule):
    layers = 2 * P if schedule == "interleaved-v2" else P
    workload = Workload(
        name="even",
        layers=tuple(
            Layer(
                name=str(i),
                forward_ns=F + i * 1000,
                input_grad_ns=F,
                weight_grad_ns=F,
                optimizer_ns=777,
                param_bytes=0,
                state_bytes=0,
                saved_bytes=1,
                output_bytes=10,
            )
            for i in range(layers)
        ),
    )
    cluster = Cluster.equal(P, bandwidth=10**6, latency_ns=500)
    timeline = check(plan_from(find_family(schedule), workload, cluster, M)).timeline
    idle = [sum(bubble.length_ns for bubble in row) for row in find_bubbles(timeline)]
    assert idle == (timeline.step_ns - timeline.busy_ns).tolist()


def test_free_bytes_are_what_the_main_job_leaves_during_the_bubble():
    timeline = check(plan()).timeline
    row = find_bubbles(timeline)[1]
    before, middle, after = row
    assert (before.free_bytes, after.free_bytes) == (60, 60)
    assert middle.free_bytes == 60 - 5 * M
    assert resting_bytes(timeline) == (100 - 40 - 5 * M,) * P


def test_short_bubbles_are_left_out():
    bubbles = find_bubbles(check(plan("1f1b")).timeline, threshold_ns=F + 1)
    assert min(bubble.length_ns for row in bubbles for bubble in row) > F


def test_copies_inside_a_bubble_are_counted():
    from octotune.contract import Plan, Stage

    layer = Layer(
        name="0",
        forward_ns=10,
        input_grad_ns=10,
        weight_grad_ns=10,
        param_bytes=0,
        state_bytes=0,
        saved_bytes=8,
        output_bytes=0,
        offloadable_bytes=8,
    )
    other = Layer(
        name="1",
        forward_ns=50,
        input_grad_ns=25,
        weight_grad_ns=25,
        param_bytes=0,
        state_bytes=0,
        saved_bytes=0,
        output_bytes=0,
    )
    found = Plan(
        workload=Workload(name="two", layers=(layer, other)),
        cluster=Cluster(
            name="two",
            devices=(
                Device(kind="a", memory_bytes=100, offload_bandwidth=10**9),
                Device(kind="a", memory_bytes=100),
            ),
            links=Links(intra_host=Link(latency_ns=0, bandwidth=10**18)),
        ),
        num_microbatches=1,
        stages=(Stage(layers=(0, 1), device=0), Stage(layers=(1, 2), device=1)),
        actions=(("0F0", "0B0"), ("1F0", "1B0")),
        offload=(("0O0", "0R0"), ()),
    )
    middle = find_bubbles(check(found).timeline)[0][0]
    assert (middle.after, middle.before) == ("0F0", "0B0")
    assert middle.copy_ns == 16  # 8 bytes out and back at 1 byte a ns
    assert middle.free_bytes == 92


# --- packing


def configuration(times, memory=None, *, carried=0, resident=0, batch=1):
    memory = [resident] * len(times) if memory is None else memory
    return Configuration(
        batch_size=batch,
        carried_bytes=carried,
        resident_bytes=resident,
        micro_steps=tuple(
            MicroStep(name=str(k), time_ns=time, memory_bytes=size)
            for k, (time, size) in enumerate(zip(times, memory, strict=True))
        ),
    )


def room(times, free=None, resting=10**9):
    free = [10**9] * len(times) if free is None else free
    return Room(
        usable_ns=tuple(times), free_bytes=tuple(free), copy_ns=tuple(times), resting_bytes=resting
    )


def obeys(packing, config, where, *, one_open):
    """Walk through a cycle as docs/fill.md says, apart from the code that packs."""
    num = len(config.micro_steps)
    passes, complete = [], 0
    for step in packing.steps:
        for b, order in enumerate(step):
            assert sum(config.micro_steps[k].time_ns for k in order) <= where.usable_ns[b]
            for k in order:
                if k == 0:
                    passes.append(0)
                index = next(i for i, at in enumerate(passes) if at == k)
                others = (len(passes) - 1) * config.carried_bytes
                assert config.micro_steps[k].memory_bytes + others <= where.free_bytes[b]
                passes[index] += 1
                if passes[index] == num:
                    passes.pop(index)
                    complete += 1
                assert not one_open or len(passes) <= 1
            held = len(passes) * config.carried_bytes + config.resident_bytes
            assert held <= where.resting_bytes
    assert not passes
    assert packing.samples == complete * config.batch_size
    assert packing.busy_ns == complete * config.pass_ns


def most_passes(config, where, steps):
    """Brute force: the most passes, one open at a time, by trying every count in each bubble."""
    num = len(config.micro_steps)
    reached = {0}
    for usable, free in list(zip(where.usable_ns, where.free_bytes, strict=True)) * steps:
        after = set()
        for position in reached:
            left = usable
            while True:
                after.add(position)
                micro = config.micro_steps[position % num]
                if micro.time_ns > left or micro.memory_bytes > free:
                    break
                left -= micro.time_ns
                position += 1
        reached = after
    return max(reached) // num


small = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@given(small, st.lists(st.integers(0, 14), min_size=1, max_size=4), st.data())
@settings(max_examples=150, deadline=None)
def test_greedy_obeys_the_rules_and_no_order_of_single_passes_does_better(times, bubbles, data):
    memory = data.draw(st.lists(st.integers(1, 5), min_size=len(times), max_size=len(times)))
    free = data.draw(st.lists(st.integers(2, 6), min_size=len(bubbles), max_size=len(bubbles)))
    config, where = configuration(times, memory), room(bubbles, free)
    packing = greedy_packing(config, where, max_cycle=3)
    if packing is None:
        assert most_passes(config, where, 3) == 0
        return
    obeys(packing, config, where, one_open=True)
    cycle = len(packing.steps)
    assert packing.samples == most_passes(config, where, cycle)


@given(small, st.lists(st.integers(0, 14), min_size=1, max_size=4), st.integers(0, 2), st.data())
@settings(max_examples=25, deadline=None)
def test_optimal_obeys_the_rules_and_is_no_worse_than_greedy(times, bubbles, carried, data):
    memory = data.draw(st.lists(st.integers(1, 5), min_size=len(times), max_size=len(times)))
    free = data.draw(st.lists(st.integers(2, 9), min_size=len(bubbles), max_size=len(bubbles)))
    config = configuration(times, memory, carried=carried)
    where = room(bubbles, free, resting=data.draw(st.integers(1, 6)))
    greedy = greedy_packing(config, where, max_cycle=2)
    if greedy is None:
        return
    best = optimal_packing(config, where, greedy, time_limit_s=1)
    obeys(best, config, where, one_open=False)
    assert len(best.steps) == len(greedy.steps)
    assert best.samples >= greedy.samples


def test_optimal_fills_the_rest_of_a_bubble_with_another_pass():
    """Bubbles of 5 and passes of 3 + 2: greedy wraps well; of 4 + 3 it strands the ends."""
    config, where = configuration([4, 3]), room([7, 8, 6])
    greedy = greedy_packing(config, where, max_cycle=1)
    best = optimal_packing(config, where, greedy)
    assert (greedy.samples, best.samples) == (2, 3)
    obeys(best, config, where, one_open=False)


def test_optimal_opens_no_pass_that_memory_cannot_carry():
    config = configuration([4, 3], [1, 1], carried=1)
    where = room([7, 8, 6], [1, 1, 1], resting=1)
    greedy = greedy_packing(config, where, max_cycle=1)
    assert optimal_packing(config, where, greedy).samples == greedy.samples == 2


def test_a_pass_longer_than_all_bubbles_spans_steps():
    config = configuration([5, 5, 5])
    packing = greedy_packing(config, room([6]))
    assert packing.steps == (((0,),), ((1,),), ((2,),))
    assert packing.samples_per_step == pytest.approx(1 / 3)


def test_the_configuration_with_most_samples_a_step_wins():
    slow = configuration([3], batch=1)
    large = configuration([5], [50], batch=2)
    job = FillJob(name="a", kind="inference", samples=9, configurations=(slow, large))
    assert best_packing(job, room([10])).configuration == 1
    assert best_packing(job, room([10], [49])).configuration == 0


def test_training_is_never_packed_with_two_open_passes():
    job = FillJob(name="a", kind="training", samples=9, configurations=(configuration([4, 3]),))
    assert best_packing(job, room([7, 8, 6]), optimal=True).samples_per_step == pytest.approx(
        greedy_packing(job.configurations[0], room([7, 8, 6])).samples_per_step
    )


def test_copies_stay_within_what_is_left_of_the_lane():
    micro = MicroStep(time_ns=2, copy_ns=2)
    config = Configuration(batch_size=1, micro_steps=(micro,))
    where = Room(usable_ns=(10,), free_bytes=(0,), copy_ns=(5,), resting_bytes=0)
    assert greedy_packing(config, where).samples == 2


def test_margins_take_switch_and_share():
    margins = Margins(threshold_ns=1, switch_ns=10, margin=0.25)
    bubble = find_bubbles(check(plan()).timeline)[0][0]
    assert margins.usable_ns(bubble) == int((bubble.length_ns - 10) * 0.75)


@pytest.mark.parametrize(
    ("config", "where", "words"),
    [
        (configuration([30, 5]), room([10, 20]), "'0' takes 30 ns, the longest bubble takes 20"),
        (configuration([3], [80]), room([9], [40]), "needs 80 bytes, the roomiest bubble has 40"),
        (
            configuration([3], [80], resident=80),
            room([9], [80], resting=8),
            "80 bytes stay between bubbles, 8 are free",
        ),
        (configuration([3]), room([]), "no bubble is long enough"),
        (
            configuration([8], [8]),
            room([9, 4], [4, 9]),
            "no bubble has both the time and the memory",
        ),
    ],
)
def test_the_nearest_miss_is_named(config, where, words):
    job = FillJob(name="a", kind="inference", samples=1, configurations=(config,))
    assert best_packing(job, where) is None
    assert words in nearest_miss(job, where)


def test_orders_of_packings_hold_all_micro_steps():
    packing = greedy_packing(configuration([2, 1]), room([7, 5]))
    flat = list(itertools.chain.from_iterable(itertools.chain.from_iterable(packing.steps)))
    assert flat.count(0) == flat.count(1) == packing.samples
