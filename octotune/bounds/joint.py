"""A lower bound of the step over all plans: any partition, placement and order.

The largest of several arguments, each of which holds for every plan (see `relaxed` for what is
left out):

- load: all work spread over the devices without a gap;
- begin: the same, the devices beginning in turn;
- chain: what must run before, between and after the microbatches of one layer;
- energetic: work that cannot lie outside an interval fits into the devices within it;
- residence: activations take memory for as long as a microbatch needs for its way there and back;
- device: whole layers on devices that begin and end in turn (`assignment`);
- memory: the same, with what memory holds before the first gradient.
"""

from __future__ import annotations

from octotune.bounds.assignment import assignment_bound
from octotune.bounds.relaxed import Relaxed, relax
from octotune.bounds.value import Bound
from octotune.contract import Cluster, Workload


def lower_bound(
    workload: Workload,
    cluster: Cluster,
    num_microbatches: int,
    *,
    time_limit_s: float = 5.0,
    seed: int = 0,
) -> Bound:
    """Return a bound of `step_ns` over all plans of a workload on a cluster.

    Args:
        workload: the layers.
        cluster: the devices.
        num_microbatches: m.
        time_limit_s: for the integer programs, in the solver's deterministic seconds, so that the
            bound depends on the arguments alone.
        seed: of the solver.
    """
    relaxed = relax(workload, cluster, num_microbatches)
    parts = _closed_forms(relaxed)
    least = max(parts.values())
    proof = assignment_bound(
        relaxed, least_ns=least, memory=False, time_limit_s=time_limit_s / 2, seed=seed
    )
    parts["device"] = proof.ns
    finished = proof.finished
    if not relaxed.unlimited:
        parts["residence"] = _residence(relaxed)
        least = max(parts.values())
        proof = assignment_bound(
            relaxed, least_ns=least, memory=True, time_limit_s=time_limit_s / 2, seed=seed
        )
        parts["memory"] = proof.ns
        finished = finished and proof.finished
    return Bound(ns=max(parts.values()), parts=parts, finished=finished)


def _closed_forms(relaxed: Relaxed) -> dict[str, int]:
    """Return load, chain and energetic bounds.

    A plan uses some number of devices: fewer make the load larger, more make the chain pass more
    transfers. The bound is the least over that number.
    """
    import numpy as np

    from octotune.bounds.kernels import energetic_bound, heads_and_tails

    m, num_layers = relaxed.num_microbatches, relaxed.num_layers
    forward, input_grad, rest = relaxed.least
    overhead = int(relaxed.overhead.min())
    nothing = np.zeros(num_layers - 1, np.int64)
    after = relaxed.optimizer.min(axis=0)
    alone, always = np.arange(num_layers), np.full(num_layers, m)
    best: dict[str, int] = {}
    for used in range(min(relaxed.num_devices, num_layers), 0, -1):
        load = _load(relaxed, used)
        if best and load >= max(best.values()):
            break  # so it is for fewer still
        cross = nothing.copy()
        cross[-1:] = relaxed.cross[used - 1] + (used - 1) * overhead  # none where L = 1
        # All transfers lie between the first layer and the last: before what the last layer
        # does, and after its gradient for the first; where exactly is not known.
        heads, _ = heads_and_tails(
            forward, input_grad, rest, nothing, cross, nothing, alone, after, always, always, m
        )
        _, tails = heads_and_tails(
            forward, input_grad, rest, nothing, nothing, cross, alone, after, always, always, m
        )
        left = np.arange(m - 1, -1, -1)
        release = np.stack([heads[0], heads[1], heads[1] + input_grad[:, None]])
        length = np.repeat(relaxed.least[:, :, None], m, axis=2)
        tail = np.stack([tails[0], tails[1], left * rest[:, None] + after[:, None]])
        chain = int((release + length + tail).max())
        least = max(load, chain)
        energetic = energetic_bound(
            release.reshape(-1), length.reshape(-1), tail.reshape(-1), used, least
        )
        parts = {
            "load": load,
            "begin": _load(relaxed, used, in_turn=True),
            "chain": chain,
            "energetic": energetic,
        }
        if not best or max(parts.values()) < max(best.values()):
            best = parts
    return best


def _load(relaxed: Relaxed, used: int, *, in_turn: bool = False) -> int:
    """Return all work over so many devices: layer by layer where it weighs least.

    With weights w on the devices, T sum(w_d) >= sum(w_d load_d) >= the sum over layers of the
    least weighted time. A device's weight is its speed over all layers. With `in_turn`, T less
    what the k-th device to begin must wait; the fastest begin first, which costs least.
    """
    totals = [max(1, int(times.sum())) for times in relaxed.times]
    scale = 10**6 * max(totals)
    weight = [scale // total for total in totals]
    work = sum(
        min(
            factor * int(times[:, layer].sum())
            for factor, times in zip(weight, relaxed.times, strict=True)
        )
        for layer in range(relaxed.num_layers)
    )
    heaviest = sorted((weight[kind] for kind in relaxed.class_of), reverse=True)[:used]
    wait = 0
    if in_turn:
        wait = sum(
            factor * begin for factor, begin in zip(heaviest, relaxed.begin[0], strict=False)
        )
    overhead = int(relaxed.overhead.min())
    return -(-(relaxed.num_microbatches * work + wait) // sum(heaviest)) + (
        2 * relaxed.num_microbatches * overhead
    )


def _residence(relaxed: Relaxed) -> int:
    """Return the step in which memory could hold every activation for as long as it must.

    A layer's activations stay from its F to its I, and what W needs to its W: bytes times time,
    over all microbatches, is at most the devices' memory times the step. Recompute buys the time
    from F to I for one more F, as far as the devices have time left. With offload it says nothing.
    """
    import numpy as np

    if any(relaxed.offload_bandwidth) and relaxed.offloadable.any():
        return 0
    m = relaxed.num_microbatches
    forward, input_grad, rest = (times.astype(object) for times in relaxed.least)
    ahead = (forward[::-1].cumsum() + input_grad[::-1].cumsum())[::-1]  # F to end of I
    kept, pending = relaxed.kept.astype(object), relaxed.pending.astype(object)
    saved_w = np.minimum(kept, pending)
    saves = m * kept * (ahead - input_grad)  # while a layer that recomputes keeps nothing
    stays = m * (kept * input_grad + saved_w * rest)
    price = m * forward
    # a layer whose F takes no time is recomputed for nothing
    order = [layer for layer in range(relaxed.num_layers) if price[layer]]
    order.sort(key=lambda layer: -saves[layer] / price[layer])
    room = sum(relaxed.room[kind] for kind in relaxed.class_of)
    work = m * int(relaxed.least.sum())

    def enough(step: int) -> bool:
        free = relaxed.num_devices * step - work
        need = int(stays.sum())
        for layer in order:
            bought = min(free, int(price[layer]))
            free -= bought
            need += -(-int(saves[layer]) * (int(price[layer]) - bought) // int(price[layer]))
        return need <= room * step

    low, high = 0, 1
    while not enough(high):
        high *= 2
        if high > 2**60:
            return 0
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return low
