"""Offload in the tuner: plans made without regard to memory, brought within it.

Where memory binds, the search within it alone is stuck with few microbatches in flight. So the
same search also runs on clusters with more memory than there is, and what it finds there, whole
and in finer stages, is brought within the real memory by copies, delayed forwards and recompute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast

from msgspec.structs import replace as changed

from octotune.contract import Cluster, Workload
from octotune.errors import MalformedError
from octotune.offload.bench import Found, Start
from octotune.offload.search import fewer_copies, search_within
from octotune.offload.starts import finer
from octotune.offload.uniform import uniform_start

if TYPE_CHECKING:
    from octotune.tune.plans import Candidate

Wish = Literal["auto", "never", "always"]
WISHES = ("auto", "never", "always")
MORE_MEMORY = (None, 2)  # times the memory; None: without a limit
PASSES = (2, 3, 4)  # stages a device of uniform repeating
PIECES = (2, 3)  # a stage is cut into
OFFLOAD = "offload"


def wish_of(offload: str) -> Wish:
    """Return the wish. Raises MalformedError where it is none."""
    if offload not in WISHES:
        raise MalformedError(f"offload is {offload!r}; it is one of {', '.join(WISHES)}")
    return cast(Wish, offload)


def why_not(workload: Workload, cluster: Cluster) -> str | None:
    """Return why nothing can be offloaded, or None where something can."""
    if not any(layer.offloadable_bytes for layer in workload.layers):
        return "no layer has offloadable_bytes"
    if not any(device.offload_bandwidth for device in cluster.devices):
        return "no device has an offload_bandwidth"
    if cluster.host_memory_bytes == 0:
        return "host_memory_bytes is 0"
    return None


def memory_may_bind(workload: Workload, cluster: Cluster, num_microbatches: int) -> bool:
    """Say whether not every device could hold all layers and activations of a step at once."""
    layers = workload.layers
    most = sum(layer.state_bytes for layer in layers)
    most += max(layer.workspace_bytes for layer in layers)
    most += num_microbatches * sum(
        layer.saved_bytes + layer.saved_w_bytes + layer.held_w_bytes for layer in layers
    )
    return any(device.memory_bytes - device.reserved_bytes < most for device in cluster.devices)


def with_more_memory(cluster: Cluster, times: int | None) -> Cluster:
    """Return the cluster with so many times the memory beside what is reserved."""
    return changed(
        cluster,
        devices=tuple(
            changed(
                device,
                memory_bytes=(1 << 60)
                if times is None
                else min(1 << 60, device.memory_bytes * times),
            )
            for device in cluster.devices
        ),
    )


def improve_with_offload(
    candidates: Sequence[Candidate],
    workload: Workload,
    cluster: Cluster,
    num_microbatches: int,
    *,
    time_limit_s: float | None = None,
    max_evaluations: int | None = None,
    seed: int = 0,
    target_ns: int = 0,
    keep_stages: bool = False,
) -> Candidate | None:
    """Bring plans within memory by offload, order and recompute; return the shortest, or None.

    Args:
        candidates: plans to begin from; they need not fit, and are best of different kinds.
        workload: the layers.
        cluster: devices, host links and limits.
        num_microbatches: m.
        time_limit_s: seconds to search; half go to offload alone, half to recompute beside it.
        max_evaluations: plays to try.
        seed: of all random choices.
        target_ns: stop at a step this short, such as a lower bound.
        keep_stages: change neither the partition nor recompute.
    """
    starts = [
        Start(name=one.source, stages=one.stages, schedule=one.schedule) for one in candidates
    ]
    if not keep_stages:
        free = with_more_memory(cluster, None)
        uniform = [uniform_start(workload, free, num_microbatches, passes) for passes in PASSES]
        starts += [one for one in uniform if one is not None]
        cut = [finer(start, workload, pieces) for start in starts for pieces in PIECES]
        starts += [one for one in cut if one is not None]
    best: Found | None = None
    for recompute in (False,) if keep_stages else (False, True):
        share = 1.0 if keep_stages else 0.5
        best = search_within(
            workload,
            cluster,
            num_microbatches,
            starts,
            recompute=recompute,
            time_limit_s=None if time_limit_s is None else time_limit_s * share,
            max_evaluations=None
            if max_evaluations is None
            else max(1, int(max_evaluations * share)),
            seed=seed,
            target_ns=target_ns,
            found=() if best is None else (best,),
        )
    if best is None:
        return None
    from octotune.tune.plans import Candidate  # the tuner imports this module

    best = fewer_copies(workload, cluster, num_microbatches, best)
    return Candidate(
        source=f"{OFFLOAD}, from {best.source}",
        stages=best.stages,
        schedule=best.schedule,
        copies=best.copies,
        step_ns=best.step_ns,
        bubble_fraction=best.bubble_fraction,
        peak_bytes=best.peak_bytes,
    )
