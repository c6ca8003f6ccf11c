"""Critical path, slack, the networkx graph, and deadlocks in words."""

import random
from itertools import pairwise

import msgspec
import networkx as nx
import pytest

from octotune.contract import Cluster, DataParallel, Layer, Stage, Workload, build_costs
from simulator.actions import CopySchedule, Schedule
from simulator.engine import simulate
from simulator.errors import DeadlockError, ScheduleError
from simulator.graph import (
    Node,
    Why,
    critical_path,
    dependency_graph,
    slack_ns,
    timeline_graph,
)
from tests import oracle
from tests.random_plans import is_contended, random_plan
from tests.small_plans import run


def chain_costs(num_stages, num_microbatches, *, homes=None, cluster=None, forward_ns=1, **layer):
    homes = list(range(num_stages)) if homes is None else homes
    values = {
        "forward_ns": forward_ns,
        "input_grad_ns": 1,
        "weight_grad_ns": 1,
        "param_bytes": 0,
        "state_bytes": 0,
        "saved_bytes": 1,
        "output_bytes": 1,
    } | layer
    workload = Workload(
        name="chain", layers=tuple(Layer(name=str(i), **values) for i in range(num_stages))
    )
    cluster = Cluster.equal(max(homes) + 1) if cluster is None else cluster
    stages = [Stage(layers=(s, s + 1), device=home) for s, home in enumerate(homes)]
    return build_costs(workload, cluster, stages, num_microbatches)


def rows(*texts):
    return Schedule.from_words([text.split() for text in texts])


@pytest.mark.parametrize("block", range(4))
def test_critical_path_has_no_gap_and_every_part_is_an_edge_of_the_graph(block):
    for seed in range(30 * block, 30 * block + 30):
        timeline = run(random_plan(random.Random(seed)))
        path = critical_path(timeline)
        assert path[0].start_ns == 0
        assert path[0].why is None
        assert path[-1].end_ns == timeline.step_ns
        graph = timeline_graph(timeline)
        for before, piece in pairwise(path):
            assert before.end_ns == piece.start_ns
            assert graph.edges[before.name, piece.name]["why"] is not None
        for piece in path:
            node = graph.nodes[piece.name]
            assert (node["node"], node["device"]) == (piece.node, piece.device)
            assert node["start_ns"] == piece.start_ns
            # a transfer's latency may follow; of an anchor only the start counts
            assert piece.end_ns - piece.start_ns >= 0
            if piece.node is not Node.TRANSFER and piece.end_ns > piece.start_ns:
                assert piece.end_ns == node["end_ns"]


def test_critical_path_of_a_pipeline_is_told_in_words():
    """The slow link to device 1 delays its only forward, and with it everything."""
    cluster = Cluster.equal(2, latency_ns=5, bandwidth=10**9)
    timeline = simulate(rows("0F0 0B0", "1F0 1B0"), chain_costs(2, 1, cluster=cluster))
    told = [
        (piece.name, piece.start_ns, piece.end_ns, piece.why) for piece in critical_path(timeline)
    ]
    assert told == [
        ("0F0", 0, 1, None),
        ("0F0 0->1", 1, 7, Why.TENSOR),
        ("1F0", 7, 8, Why.TENSOR),
        ("1B0", 8, 10, Why.ROW),
        ("1B0 1->0", 10, 16, Why.TENSOR),
        ("0B0", 16, 18, Why.TENSOR),
    ]


def test_critical_path_ends_with_reduction_and_optimizer():
    cluster = msgspec.structs.replace(
        Cluster.equal(1), data_parallel=DataParallel(size=2, bandwidth=10**9)
    )
    costs = chain_costs(1, 1, cluster=cluster, param_bytes=10, optimizer_ns=7)
    path = critical_path(simulate(rows("0F0 0B0"), costs))
    assert [(piece.name, piece.start_ns, piece.end_ns) for piece in path] == [
        ("0F0", 0, 1),
        ("0B0", 1, 3),
        ("reduction 0", 3, 13),
        ("optimizer 0", 13, 20),
    ]


@pytest.mark.parametrize("block", range(4))
def test_slack_is_how_much_longer_an_action_may_last(block):
    """Without contention the order of service is fixed: 1 ns beyond the slack is 1 ns of step."""
    tried = 0
    for seed in range(40 * block, 40 * block + 40):
        rng = random.Random(seed)
        plan = random_plan(rng, contended=False, most_stages=5, most_microbatches=4)
        if is_contended(plan):
            continue
        tried += 1
        timeline = run(plan)
        slack = slack_ns(timeline)
        assert slack.min() == 0
        words = [word for row in plan.actions for word in row]
        for index in rng.sample(range(len(words)), min(4, len(words))):
            for more in (int(slack[index]), int(slack[index]) + 1):
                expected = timeline.step_ns + more - int(slack[index])
                assert oracle.run(plan, {words[index]: more}).step_ns == expected
    assert tried >= 10


@pytest.mark.parametrize("block", range(2))
def test_actions_on_the_critical_path_have_no_slack(block):
    for seed in range(50 * block, 50 * block + 50):
        plan = random_plan(random.Random(seed))
        timeline = run(plan)
        slack = slack_ns(timeline)
        assert slack.min() >= 0
        index = {word: at for at, word in enumerate(word for row in plan.actions for word in row)}
        for piece in critical_path(timeline):
            if piece.node is Node.ACTION and piece.end_ns > piece.start_ns:
                assert slack[index[piece.name]] == 0


def test_graph_without_contention_has_the_step_as_its_longest_path():
    tried = 0
    for seed in range(40):
        plan = random_plan(random.Random(seed), contended=False, most_stages=5)
        if is_contended(plan):
            continue
        tried += 1
        costs = build_costs(plan.workload, plan.cluster, plan.stages, plan.num_microbatches)
        graph = dependency_graph(plan.schedule(), costs, plan.copies())
        start = dict.fromkeys(graph, 0)
        for node in nx.topological_sort(graph):
            for _, user, edge in graph.out_edges(node, data=True):
                lasts = 0 if edge["from_start"] else graph.nodes[node]["duration_ns"]
                start[user] = max(start[user], start[node] + lasts + edge["lag_ns"])
        longest = max(start[node] + graph.nodes[node]["duration_ns"] for node in graph)
        assert longest == run(plan).step_ns
    assert tried >= 10


def test_graph_answers_queries_by_name():
    cluster = Cluster.equal(2, latency_ns=5, bandwidth=10**9)
    graph = dependency_graph(
        rows("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), chain_costs(2, 2, cluster=cluster)
    )
    assert set(graph.predecessors("0F1 0->1")) == {"0F1", "0F0 0->1"}
    assert graph.edges["0F0 0->1", "1F0"]["lag_ns"] == 5
    assert graph.edges["0F0 0->1", "0F1 0->1"]["why"] is Why.CHANNEL
    assert "1F0" in nx.ancestors(graph, "0B1")
    assert graph.nodes["1F0"]["device"] == 1


def test_deadlock_names_actions_and_channels_of_the_cycle():
    """Each device waits for a forward that the other has put behind."""
    costs = chain_costs(4, 1, homes=[0, 1, 0, 1])
    order = rows("2F0 2B0 0F0 0B0", "1F0 3F0 3B0 1B0")
    with pytest.raises(
        DeadlockError,
        match=r"^this order cannot run: 2F0 waits for 1F0 over the channel 1->0; "
        r"1F0 waits for 0F0 over the channel 0->1; 0F0 stands behind 2F0 on device 0$",
    ) as caught:
        simulate(order, costs)
    assert caught.value.cycle == ("2F0", "1F0 1->0", "1F0", "0F0 0->1", "0F0")


def test_deadlock_within_one_device_is_told_without_channels():
    with pytest.raises(
        DeadlockError,
        match=r"cannot run: 1F0 waits for 0F0; 0F0 stands behind 1F0 on device 0$",
    ):
        simulate(rows("1F0 0F0 1B0 0B0"), chain_costs(2, 1, homes=[0, 0]))


def test_deadlock_of_copies_names_the_lane():
    """R is held back for the very backward that waits for it."""
    device = msgspec.structs.replace(Cluster.equal(1).devices[0], offload_bandwidth=10**9)
    cluster = msgspec.structs.replace(Cluster.equal(1), devices=(device,))
    costs = chain_costs(1, 2, cluster=cluster, offloadable_bytes=1)
    order = rows("0F0 0F1 0B0 0B1")
    with pytest.raises(
        DeadlockError,
        match=r"0B0 waits for the copy 0R0@0B0; 0R0@0B0 is held back for 0B0$",
    ) as caught:
        simulate(order, costs, CopySchedule.from_words([["0O0", "0R0@0B0"]]))
    assert caught.value.cycle == ("0B0", "0R0@0B0")
    with pytest.raises(
        DeadlockError,
        match=r"0B0 waits for the copy 0R0; 0R0 stands behind 0R1@0B0 in the copy lane of device "
        r"0; 0R1@0B0 is held back for 0B0$",
    ):
        simulate(order, costs, CopySchedule.from_words([["0O0", "0O1", "0R1@0B0", "0R0"]]))


def test_long_cycle_is_cut_in_the_message_and_whole_in_the_exception():
    p = 20
    order = rows(*(f"{p + d}F0 {p + d}B0 {d}F0 {d}B0" for d in range(p)))
    costs = chain_costs(2 * p, 1, homes=[*range(p), *range(p)])
    with pytest.raises(DeadlockError, match=r"and so on, 9 more, back to 20F0$") as caught:
        simulate(order, costs)
    actions = [name for name in caught.value.cycle if "->" not in name]
    assert actions == ["20F0", "19F0", *(f"{s}F0" for s in range(39, 20, -1))]


def test_deadlock_is_raised_exactly_where_the_graph_has_a_cycle():
    """Random orders that obey the rules of a row, made of valid ones by swaps."""
    stuck = 0
    for seed in range(600):
        rng = random.Random(seed)
        plan = random_plan(rng, most_stages=5, most_microbatches=4, most_devices=3)
        actions = [list(row) for row in plan.actions]
        lanes = [list(row) for row in plan.offload or [()] * len(actions)]
        for row in actions + lanes:
            for _ in range(rng.randint(0, 8) if len(row) > 1 else 0):
                at = rng.randrange(1, len(row))
                row[at - 1], row[at] = row[at], row[at - 1]
        costs = build_costs(plan.workload, plan.cluster, plan.stages, plan.num_microbatches)
        schedule, copies = Schedule.from_words(actions), CopySchedule.from_words(lanes)
        try:
            graph = dependency_graph(schedule, costs, copies)
        except ScheduleError:
            continue
        if nx.is_directed_acyclic_graph(graph):
            simulate(schedule, costs, copies)
            continue
        stuck += 1
        with pytest.raises(DeadlockError, match=r"^this order cannot run: ") as caught:
            simulate(schedule, costs, copies)
        cycle = [name.partition("@")[0] for name in caught.value.cycle]
        component = next(
            part for part in nx.strongly_connected_components(graph) if cycle[0] in part
        )
        assert set(cycle) <= component
    assert stuck > 30
