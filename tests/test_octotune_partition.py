"""Partition: published cases with the value named, brute force on random ones, and bad input.

A weight of 1 is 1 us of F, and as much of I and W together.
"""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_instances import random_instance

from octotune.contract import Cluster, Device, Layer, Link, Links, Workload
from octotune.errors import InfeasibleError, MalformedError
from octotune.partition import (
    balanced_cuts,
    device_loads_ns,
    equal_cuts,
    explicit_cuts,
    one_f_one_b_in_flight,
    stages_of,
)

US = 1000


def weighted(weights, *, state=None, saved=None):
    """Return a workload whose layers take so many us forward, and as many backward."""
    return Workload(
        name="weights",
        layers=tuple(
            Layer(
                name=str(index),
                forward_ns=round(weight * US),
                input_grad_ns=round(weight * US / 2),
                weight_grad_ns=round(weight * US) - round(weight * US / 2),
                param_bytes=0,
                state_bytes=0 if state is None else state[index],
                saved_bytes=0 if saved is None else saved[index],
                output_bytes=0,
            )
            for index, weight in enumerate(weights)
        ),
    )


def balance(weights, num_devices, placement=None, *, memory=2**60, num_microbatches=16, **sizes):
    """Return the best partition of weighted layers on equal devices."""
    return balanced_cuts(
        weighted(weights, **sizes),
        Cluster.equal(num_devices, memory_bytes=memory),
        range(num_devices) if placement is None else placement,
        num_microbatches=num_microbatches,
    )


def bottleneck(partition):
    """Return the largest device load in weights."""
    return partition.bottleneck_ns / (2 * US)


def counts(partition):
    """Return the number of layers of each stage."""
    return [end - begin for begin, end in pairwise(partition.cuts)]


@pytest.mark.parametrize(
    ("case", "weights", "num_devices", "expected"),
    [
        ("A01", [1] * 30, 4, 8),
        ("A02", [1] * 7, 2, 4),
        ("A03", [1] * 10, 3, 4),
        ("A04", [1] * 62, 4, 16),
        ("A06", [1] * 38, 8, 5),
        ("A07", [1] * 5, 4, 2),
        ("A09", [1, 4, 2, 2], 3, 4),
        ("A11", [2, 1, 1, 1, 1, 2], 4, 2),
        ("A14", [0] + [1] * 32 + [2.41], 4, 9),
        ("A15", [1] * 126 + [0.66], 16, 8),
        ("A16", [1] * 48 + [5.5], 8, 7),
        ("A18", [1] * 46 + [2.08], 8, 6.08),
    ],
)
def test_bottleneck_of_published_cases(case, weights, num_devices, expected):
    found = balance(weights, num_devices)
    assert bottleneck(found) == expected, case
    assert found.proven
    assert found.cuts[0] == 0
    assert found.cuts[-1] == len(weights)
    assert all(count >= 1 for count in counts(found))


def test_a02_seven_layers_on_two_devices_are_three_and_four():
    assert sorted(counts(balance([1] * 7, 2))) == [3, 4]


def test_a11_embedding_and_head_stand_alone():
    assert balance([2, 1, 1, 1, 1, 2], 4).cuts == (0, 1, 3, 5, 6)


def test_a12_a_memory_cap_puts_embedding_and_head_alone():
    """Layers take 10 bytes, embedding and head 13; a device of 20 holds two layers, no more."""
    weights, state = [0.2, *[1] * 6, 0.2], [13, *[10] * 6, 13]
    free = balance(weights, 5, state=state)
    capped = balance(weights, 5, memory=20, state=state)
    assert counts(free)[0] > 1
    assert (counts(capped)[0], counts(capped)[-1]) == (1, 1)


def test_a14_uniform_counts_are_worse_by_the_head():
    weights = [1] * 32 + [2.41]
    cuts = (0, 8, 16, 24, 33)
    loads = device_loads_ns(weighted(weights), Cluster.equal(4), range(4), cuts)
    assert max(loads) / (2 * US) == 10.41


def test_a15_two_layers_less_at_the_ends_gain_nothing():
    """126 layers as 7, 8 x 14, 7 with the head: 8 too, the bottleneck of the best partition."""
    weights = [1] * 126 + [0.66]
    cuts = (0, *range(7, 120, 8), 127)
    loads = device_loads_ns(weighted(weights), Cluster.equal(16), range(16), cuts)
    assert max(loads) == balance(weights, 16).bottleneck_ns == 8 * 2 * US


def test_a16_the_head_leaves_its_rank_at_most_one_layer():
    found = balance([1] * 48 + [5.5], 8)
    assert counts(found)[-1] - 1 <= 1


def test_a18_the_last_rank_holds_four_layers_and_the_head():
    assert counts(balance([1] * 46 + [2.08], 8))[-1] == 4 + 1


def test_a21_a_layout_by_hand_names_its_new_limit():
    """Stages of 2 layers on 8 ranks, round robin, with two of 3 in them and 1 at the head."""
    weights = [1] * 80 + [1.23]
    sizes = [2] + [2] * 34 + [3] + [2] * 3 + [2]  # the last: one layer and the head
    cuts = explicit_cuts(sizes, 81, 40)
    placement = [stage % 8 for stage in range(40)]
    loads = device_loads_ns(weighted(weights), Cluster.equal(8), placement, cuts)
    assert [load / (2 * US) for load in loads] == [10, 10, 10, 11, 10, 10, 10, 9 + 1.23]
    uniform = (*range(0, 80, 2), 81)
    before = device_loads_ns(weighted(weights), Cluster.equal(8), placement, uniform)
    assert max(before) / (2 * US) == 11.23


def test_a23_eighty_layers_in_twenty_stages_are_four_each():
    found = balance([1] * 80, 4, [stage % 4 for stage in range(20)])
    assert counts(found) == [4] * 20
    assert found.proven


def test_a25_cutting_by_cost_beats_cutting_by_count():
    """98 mixer layers of three kinds, 98 mod 4 != 0."""
    rng = random.Random(47)
    kinds = [2.9] * 45 + [1.8] * 5 + [4.1] * 48
    rng.shuffle(kinds)
    by_cost = balance(kinds, 4)
    loads = device_loads_ns(weighted(kinds), Cluster.equal(4), range(4), equal_cuts(98, 4))
    assert by_cost.bottleneck_ns < max(loads)


def test_a27_a_repeating_pattern_gives_equal_stages():
    """32 layers, attention at i mod 8 = 4, experts at odd i: four stages of eight."""
    weights = [(2 if i % 8 == 4 else 1) + (3 if i % 2 else 1) for i in range(32)]
    found = balance(weights, 4)
    assert found.cuts == (0, 8, 16, 24, 32)
    assert len(set(found.loads_ns)) == 1


def test_a28_alternating_layers_pair_up():
    """48 layers, dense and experts in turn: six a device, three of each."""
    found = balance([1, 2] * 24, 8)
    assert counts(found) == [6] * 8


def test_a29_cuts_follow_the_sequence_length():
    """36 layers, window and full attention in turn, full first: its share grows, cuts move."""
    head = 6
    short = balance([1.0, 1.1] * 18 + [head], 4)
    long = balance([1.0, 4.0] * 18 + [head], 4)
    assert short.cuts != long.cuts


def test_a30_only_a_memory_cap_sees_stored_experts():
    """Dense and expert layers take the same time; experts store twenty times as much."""
    state = [58] * 3 + [1150] * 12
    assert counts(balance([1] * 15, 3, state=state)) == [5, 5, 5]
    assert counts(balance([1] * 15, 3, memory=4800, state=state)) == [7, 4, 4]


def test_a32_every_stage_stays_under_its_own_device_cap():
    gib = 2**30
    devices = (
        Device(kind="slow", memory_bytes=32 * gib, speed=0.5),
        Device(kind="slow", memory_bytes=32 * gib, speed=0.5),
        Device(kind="fast", memory_bytes=80 * gib, speed=1.0),
    )
    cluster = Cluster(
        name="unlike",
        devices=devices,
        links=Links(intra_host=Link(latency_ns=0, bandwidth=10**18)),
    )
    workload = weighted([1] * 40, state=[3 * gib] * 40)
    found = balanced_cuts(workload, cluster, range(3), num_microbatches=8)
    assert [3 * count <= cap for count, cap in zip(counts(found), (32, 32, 80), strict=True)]
    assert counts(found)[2] == 20
    with pytest.raises(InfeasibleError, match=r"device \d needs .* bytes too few; use more dev"):
        balanced_cuts(
            weighted([1] * 50, state=[3 * gib] * 50), cluster, range(3), num_microbatches=8
        )


def test_a33_more_stages_than_layers_is_refused_with_what_fits():
    with pytest.raises(InfeasibleError, match="5 layers cannot fill 8 stages; use at most 5"):
        balance([1] * 5, 8)
    with pytest.raises(InfeasibleError, match="5 layers cannot fill 8 stages; use at most 5"):
        equal_cuts(5, 8)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [(30, 4, [8, 8, 7, 7]), (7, 2, [4, 3]), (10, 3, [4, 3, 3]), (8, 8, [1] * 8), (62, 1, [62])],
)
def test_equal_cuts_give_what_is_left_over_to_the_first_stages(num_layers, num_stages, expected):
    cuts = equal_cuts(num_layers, num_stages)
    assert [end - begin for begin, end in pairwise(cuts)] == expected


def test_a04_an_explicit_split_is_honoured_or_refused():
    assert explicit_cuts([14, 28], 42, 2) == (0, 14, 42)
    with pytest.raises(MalformedError, match=r"\[14, 27\] adds up to 41; .* has 42 layers"):
        explicit_cuts([14, 27], 42, 2)
    with pytest.raises(MalformedError, match=r"\[14, 14, 14\] has 3 parts; there are 2 stages"):
        explicit_cuts([14, 14, 14], 42, 2)
    with pytest.raises(MalformedError, match=r"\[0, 42\] gives stage 0 0 layers"):
        explicit_cuts([0, 42], 42, 2)


def test_infeasible_memory_names_device_and_shortfall():
    with pytest.raises(InfeasibleError, match=r"device 1 needs .*, 5 bytes too few; use more"):
        balance([1, 1, 1], 2, memory=10, state=[10, 10, 5])
    with pytest.raises(InfeasibleError, match=r"device 1 needs .*, 3 bytes too few; use more"):
        balance([1] * 5, 2, [0, 1, 0, 1], memory=10, state=[10, 5, 5, 2, 3])


def test_bad_arguments_are_refused():
    with pytest.raises(MalformedError, match=r"stage_device\[1\] is 2; .* devices 0-1"):
        balance([1, 1, 1], 2, [0, 2])
    with pytest.raises(MalformedError, match="in_flight has 1 entries; there are 2 stages"):
        balanced_cuts(
            weighted([1, 1]), Cluster.equal(2), [0, 1], num_microbatches=2, in_flight=[1]
        )
    with pytest.raises(MalformedError, match=r"in_flight\[0\] is 3; it is 1 to 2"):
        balanced_cuts(
            weighted([1, 1]), Cluster.equal(2), [0, 1], num_microbatches=2, in_flight=[3, 1]
        )


def test_one_f_one_b_holds_a_microbatch_less_at_each_stage():
    assert one_f_one_b_in_flight(8, 16) == (8, 7, 6, 5, 4, 3, 2, 1)
    assert one_f_one_b_in_flight(4, 2) == (2, 2, 2, 1)


def test_the_evenest_of_the_best_partitions_is_taken():
    """A head of 6 sets the bottleneck; the layers before it are spread evenly."""
    assert counts(balance([1] * 12 + [6], 4)) == [4, 4, 4, 1]


def needs(workload, cluster, stage_device, cuts, in_flight):
    """Return the bytes each device needs, straight from the definition."""
    found = [device.reserved_bytes for device in cluster.devices]
    most = [0] * len(found)
    home = {}
    for (begin, end), device, flight in zip(pairwise(cuts), stage_device, in_flight, strict=True):
        layers = workload.layers[begin:end]
        home |= dict.fromkeys(range(begin, end), device)
        found[device] += sum(layer.state_bytes for layer in layers)
        found[device] += flight * sum(layer.saved_bytes + layer.saved_w_bytes for layer in layers)
        held = sum(layer.held_w_bytes for layer in layers)
        most[device] = max(most[device], held + max(layer.workspace_bytes for layer in layers))
    for one, two in workload.tied:
        if home[one] == home[two]:
            states = (workload.layers[one].state_bytes, workload.layers[two].state_bytes)
            found[home[one]] -= min(states)
    return [a + b for a, b in zip(found, most, strict=True)]


def brute_force(workload, cluster, stage_device, in_flight):
    """Return the least bottleneck of all partitions within memory; None: there is none."""
    num_layers, best = len(workload.layers), None
    for inner in combinations(range(1, num_layers), len(stage_device) - 1):
        cuts = (0, *inner, num_layers)
        takes = needs(workload, cluster, stage_device, cuts, in_flight)
        if all(n <= d.memory_bytes for n, d in zip(takes, cluster.devices, strict=True)):
            load = max(device_loads_ns(workload, cluster, stage_device, cuts))
            best = load if best is None else min(best, load)
    return best


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_random_partitions_are_the_best_of_all(seed):
    """One or several stages a device, unequal devices, overhead, ties, memory."""
    rng = random.Random(seed)
    workload, cluster, num_microbatches, _ = random_instance(rng, max_layers=8)
    num_layers, num_devices = len(workload.layers), len(cluster.devices)
    if rng.random() < 0.5:
        placement = rng.sample(range(num_devices), min(num_layers, num_devices))
    else:
        num_stages = rng.randint(1, min(num_layers, 5))
        placement = [rng.randrange(num_devices) for _ in range(num_stages)]
    in_flight = [rng.randint(1, num_microbatches) for _ in placement]
    best = brute_force(workload, cluster, placement, in_flight)

    def solve():
        return balanced_cuts(
            workload,
            cluster,
            placement,
            num_microbatches=num_microbatches,
            in_flight=in_flight,
        )

    if best is None:
        with pytest.raises(InfeasibleError, match=r"no partition fits: at best device \d needs"):
            solve()
        return
    found = solve()
    assert found.bottleneck_ns == best
    assert found.bound_ns <= best
    takes = needs(workload, cluster, placement, found.cuts, in_flight)
    assert all(n <= d.memory_bytes for n, d in zip(takes, cluster.devices, strict=True))


def test_recompute_lets_a_partition_fit():
    """Eight microbatches of 10 bytes a layer do not fit into 50 bytes; inputs of 1 do."""
    layers = tuple(
        Layer(
            name=str(index),
            forward_ns=10,
            input_grad_ns=10,
            weight_grad_ns=10,
            param_bytes=0,
            state_bytes=0,
            saved_bytes=10,
            output_bytes=1,
        )
        for index in range(8)
    )
    workload = Workload(name="recompute", layers=layers)
    cluster = Cluster.equal(2, memory_bytes=50)
    with pytest.raises(InfeasibleError, match="recompute or offload"):
        balanced_cuts(workload, cluster, [0, 1], num_microbatches=8, in_flight=[8, 8])
    found = balanced_cuts(
        workload, cluster, [0, 1], num_microbatches=8, in_flight=[8, 8], recompute=True
    )
    assert found.loads_ns == (4 * 40, 4 * 40)
    assert all(stage.recompute for stage in found.stages(recompute=True))


def test_thousands_of_layers_are_cut_exactly():
    rng = random.Random(5)
    weights = [rng.randint(1, 100) / 100 for _ in range(3000)]
    found = balance(weights, 64)
    assert found.proven
    assert found.bottleneck_ns - min(found.loads_ns) < 2 * 2 * US


def test_the_same_arguments_give_the_same_cuts():
    rng = random.Random(9)
    weights = [rng.randint(50, 400) / 100 for _ in range(40)]
    placement = [0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3]
    first, second = (balance(weights, 4, placement) for _ in range(2))
    assert first == second
    assert stages_of(first.cuts, placement) == first.stages()
