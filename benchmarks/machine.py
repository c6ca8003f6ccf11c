"""What this machine is as a cluster: how long messages between its ranks and bare actions take.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.machine answer.json BYTES

A plan for free links would cut a model finer than pays. So two ranks send messages there and back
over gloo, small ones for the latency and ones of the model's size for the bandwidth, and a
pipeline of layers that do nothing tells what an action costs beside its layers.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.launch import run_ranks
from executor import Pipeline
from octotune import Cluster, Device, Layer, Link, Links, Workload
from octotune.schedules import FAMILIES, plan_from

ROUNDS = 60
SMALL_BYTES = 1024
NS_PER_S = 10**9
TIMEOUT_S = 60.0


class LinkTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Half a round trip, as a median."""

    small_ns: int
    large_ns: int
    large_bytes: int

    def link(self) -> Link:
        """Return the latency of a small message, and the bandwidth that is left of a large one."""
        carried = max(1, self.large_ns - self.small_ns)
        return Link(
            latency_ns=self.small_ns,
            bandwidth=max(1, self.large_bytes * NS_PER_S // carried),
        )


def machine_cluster(num_ranks: int, message_bytes: int, out: Path) -> Cluster:
    """Return this machine as a cluster of `num_ranks` equal devices.

    Each has its share of the memory. Raises RanksFailedError if the two ranks fail.
    """
    answer = out / "links.json"
    run_ranks(2, "benchmarks.machine", [str(answer), str(message_bytes)])
    times = msgspec.json.decode(answer.read_bytes(), type=LinkTimes)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device = Device(
        kind="core", memory_bytes=memory // num_ranks, overhead_ns=action_overhead_ns()
    )
    return Cluster(
        name=f"{num_ranks} ranks of this machine",
        devices=(device,) * num_ranks,
        links=Links(intra_host=times.link()),
    )


class _Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.weight


def action_overhead_ns(num_microbatches: int = 64, steps: int = 9) -> int:
    """Return what an action takes whose layer does nothing, in this process."""
    layer = Layer(
        name="nothing", forward_ns=1, input_grad_ns=1, weight_grad_ns=1,
        param_bytes=4, state_bytes=8, saved_bytes=4, output_bytes=4,
    )  # fmt: skip
    workload = Workload(name="nothing", layers=(layer,))
    plan = plan_from(FAMILIES["1f1b"], workload, Cluster.equal(1), num_microbatches)
    pipe = Pipeline(plan, [_Nothing()], lambda output, _: output.mean())
    batch = torch.ones(num_microbatches, 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        taken = []
        for _ in range(steps):
            pipe.step(batch, batch)
            taken.append(pipe.timeline().step_ns)
    finally:
        torch.set_num_threads(threads)
    return round(statistics.median(taken) / (2 * num_microbatches))


def measure_links(large_bytes: int) -> LinkTimes:
    """Be one of two ranks; return half a round trip of small and of large messages."""
    from executor.transport import Buffer, GlooTransport

    transport = GlooTransport()
    transport.prepare([(0, 1), (1, 0)], [])
    peer = 1 - transport.rank

    def half_round_trip_ns(num_bytes: int, tag: int) -> int:
        message = torch.zeros(max(1, num_bytes // 4))
        taken = []
        for _ in range(ROUNDS):
            buffer = Buffer(message.shape, message.dtype, torch.device("cpu"))
            received = transport.receive(buffer, peer, tag)
            dist.barrier()
            began = time.perf_counter_ns()
            if transport.rank == 0:
                transport.send(message, peer, tag).wait(TIMEOUT_S)
                received.wait(TIMEOUT_S)
            else:
                received.wait(TIMEOUT_S)
                transport.send(message, peer, tag).wait(TIMEOUT_S)
            taken.append((time.perf_counter_ns() - began) // 2)
        return round(statistics.median(taken))

    return LinkTimes(
        small_ns=half_round_trip_ns(SMALL_BYTES, 1),
        large_ns=half_round_trip_ns(large_bytes, 2),
        large_bytes=large_bytes,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = measure_links(int(sys.argv[2]))
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_bytes(msgspec.json.encode(found))
    dist.barrier()
    dist.destroy_process_group()
