"""Random plans that obey every rule, with every feature of the contract mixed.

A plan's order comes from one random order of all its actions and copies in which each comes after
what it needs; cut into rows, that can always run. `random_plan` takes a `random.Random`, so that
a seed names a plan; hypothesis can pass its own.
"""

from __future__ import annotations

from octotune.contract import (
    Cluster,
    DataParallel,
    Device,
    Layer,
    Link,
    Links,
    Plan,
    Stage,
    Workload,
)

KINDS = ("old", "new")


def random_plan(rng, *, contended=None, most_stages=8, most_microbatches=7, most_devices=6):
    """Return a valid plan.

    Half of them, or those with `contended`, mix everything that several devices contend for in
    small numbers: a limited NIC, shared host links, much of it at the same moment.
    """
    contended = rng.random() < 0.5 if contended is None else contended
    num_stages = rng.randint(1, most_stages)
    num_devices = rng.randint(min(3, most_devices) if contended else 1, most_devices)
    num_microbatches = rng.randint(1, most_microbatches)
    scale = "ties" if contended else rng.choice(("ties", "plain", "huge"))
    cuts = [0]
    for _ in range(num_stages):
        cuts.append(cuts[-1] + rng.choice((1, 1, 1, 2, 3)))
    workload = random_workload(rng, cuts[-1], scale)
    offloads = rng.random() < (0.8 if contended else 0.4)
    cluster = random_cluster(rng, num_devices, scale, offloads, contended)
    if rng.random() < 0.4:
        homes = [stage % num_devices for stage in range(num_stages)]
    else:
        homes = [rng.randrange(num_devices) for _ in range(num_stages)]
    stages = tuple(
        Stage(layers=(cuts[s], cuts[s + 1]), device=homes[s], recompute=rng.random() < 0.2)
        for s in range(num_stages)
    )
    actions, lanes = random_order(rng, cluster, stages, num_microbatches, offloads)
    return Plan(
        workload=workload,
        cluster=cluster,
        num_microbatches=num_microbatches,
        stages=stages,
        actions=actions,
        offload=lanes if offloads or rng.random() < 0.2 else None,
    )


def is_contended(plan):
    """Say whether devices contend for a NIC or a host link, so that time decides an order."""
    links = [device.host_link for device in plan.cluster.devices if device.host_link is not None]
    return plan.cluster.nic_bandwidth is not None or len(links) > len(set(links))


def amounts(rng, scale):
    """Return two functions that draw a time in ns and a size in bytes."""
    if scale == "ties":  # small numbers, so that much happens at the same moment
        return (lambda: rng.choice((0, 1, 1, 2, 3))), (lambda: rng.choice((0, 1, 1, 2, 3, 7)))
    if scale == "plain":
        return (lambda: rng.randrange(5000)), (lambda: rng.randrange(10**6))
    return (lambda: rng.randrange(10**15)), (lambda: rng.randrange(10**15))


def random_workload(rng, num_layers, scale):
    time, size = amounts(rng, scale)
    layers = []
    for index in range(num_layers):
        saved, saved_w = size(), size() if rng.random() < 0.5 else 0
        offloadable = rng.choice((0, saved, saved + saved_w, rng.randint(0, saved + saved_w)))
        measured = {kind: (time(), time(), time()) for kind in KINDS if rng.random() < 0.15}
        layers.append(
            Layer(
                name=f"layer {index}",
                forward_ns=time(),
                input_grad_ns=time(),
                weight_grad_ns=time(),
                optimizer_ns=time() if rng.random() < 0.3 else 0,
                param_bytes=size(),
                state_bytes=size(),
                saved_bytes=saved,
                saved_w_bytes=saved_w,
                held_w_bytes=size() if rng.random() < 0.5 else 0,
                workspace_bytes=size() if rng.random() < 0.5 else 0,
                output_bytes=size(),
                offloadable_bytes=offloadable,
                times_ns=measured,
            )
        )
    free = list(range(num_layers))
    rng.shuffle(free)
    tied = []
    while len(free) > 1 and rng.random() < 0.4:
        tied.append(tuple(sorted((free.pop(), free.pop()))))
    return Workload(name="random", layers=tuple(layers), tied=tuple(tied))


def random_cluster(rng, num_devices, scale, offloads, contended):
    time, _ = amounts(rng, "ties" if scale == "ties" else "plain")
    quick = rng.choice((0.1, 0.1, 0.5))  # how often a link takes no time

    def bandwidth():
        if rng.random() < quick:
            return 10**18
        if scale == "ties":  # about 1 byte a ns
            return rng.choice((10**9, 5 * 10**8, 3 * 10**8))
        if scale == "plain":
            return rng.choice((10**9, 7 * 10**8, 123456789))
        return rng.choice((10**15, 10**15 - 1, 999999999989, 3 * 10**14 + 7, 2**60 + 1))

    def link():
        return Link(latency_ns=rng.choice((0, time())), bandwidth=bandwidth())

    hosts = (0, 3, 7)[: rng.randint(2 if contended else 1, 3)]
    links = rng.choice((("a",), ("a", "b", None))) if contended else (None, None, "a")
    even = contended and rng.random() < 0.5
    devices = tuple(
        Device(
            kind=rng.choice(KINDS),
            memory_bytes=2**50,
            reserved_bytes=rng.choice((0, 5)),
            speed=1.0 if even else rng.choice((1.0, 1.0, 0.7, 1.3, 3.0, 0.1)),
            host=rng.choice(hosts),
            overhead_ns=rng.choice((0, 0, time())),
            offload_bandwidth=bandwidth() if offloads and rng.random() < 0.8 else 0,
            host_link=rng.choice(links),
        )
        for _ in range(num_devices)
    )
    pairs = {}
    for a in range(num_devices):
        for b in range(a + 1, num_devices):
            if rng.random() < 0.15:
                pairs[rng.choice((f"{a}-{b}", f"{b}-{a}"))] = link()
    limited = rng.random() < (0.9 if contended else 0.3)
    parallel = DataParallel(size=rng.randint(1, 4), bandwidth=bandwidth())
    return Cluster(
        name="random",
        devices=devices,
        links=Links(intra_host=link(), inter_host=link(), pairs=pairs),
        nic_bandwidth=bandwidth() if limited else None,
        host_memory_bytes=2**50 if rng.random() < 0.3 else None,
        data_parallel=parallel if rng.random() < 0.5 else None,
    )


def random_order(rng, cluster, stages, num_microbatches, offloads):
    """Return rows of actions, and lanes of copies, cut from one order that can run."""
    last = len(stages) - 1
    split_share = rng.choice((0.0, 0.5, 1.0))
    done, words = set(), {}
    rows = [[] for _ in cluster.devices]
    lanes = [[] for _ in cluster.devices]
    needs = {}
    for s, stage in enumerate(stages):
        device = cluster.devices[stage.device]
        for m in range(num_microbatches):
            split = rng.random() < split_share
            words[s, m] = "I" if split else "B"
            copies = (
                offloads
                and not stage.recompute
                and device.offload_bandwidth > 0
                and rng.random() < 0.6
            )
            needs[s, "F", m] = [(s - 1, "F", m)] if s else []
            back = needs[s, words[s, m], m] = [(s, "F", m)]
            if s < last:
                back.append((s + 1, "back", m))
            if split:
                needs[s, "W", m] = [(s, "I", m)]
            if copies:
                needs[s, "O", m] = [(s, "F", m)]
                needs[s, "R", m] = [(s, "O", m)]
                back.append((s, "R", m))
    needs = {
        node: [(s, words[s, m] if kind == "back" else kind, m) for s, kind, m in before]
        for node, before in needs.items()
    }
    users = {node: [] for node in needs}
    missing = {}
    for node, before in needs.items():
        missing[node] = len(before)
        for other in before:
            users[other].append(node)
    ready = [node for node in needs if missing[node] == 0]
    # how eager a kind is; 0 for all is a shuffle, else something like GPipe, 1F1B or zero bubble
    eager = rng.choice(
        ({}, {}, {"B": 2, "I": 2, "W": 2}, {"B": 1, "I": 1, "W": -1}, {"F": 1}, {"R": -2, "O": 2})
    )
    while ready:
        few = rng.sample(ready, min(len(ready), rng.choice((1, 2, 4))))
        node = max(few, key=lambda node: (eager.get(node[1], 0), -node[2]))
        ready.remove(node)
        done.add(node)
        s, kind, m = node
        device = stages[s].device
        if kind in "OR":
            word = f"{s}{kind}{m}"
            if rows[device] and rng.random() < 0.4:
                word += f"@{rng.choice(rows[device][-4:])}"
            lanes[device].append(word)
        else:
            rows[device].append(f"{s}{kind}{m}")
        for user in users[node]:
            missing[user] -= 1
            if missing[user] == 0:
                ready.append(user)
    assert len(done) == len(needs)
    return tuple(map(tuple, rows)), tuple(map(tuple, lanes))
