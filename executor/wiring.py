"""Which ranks talk with which, and over what: what a Pipeline has to know before it connects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from executor.errors import MismatchError
from executor.program import RankProgram
from executor.torch_csv import plan_from_torch_csv
from executor.transport import GlooTransport, NcclTransport, ThreadWorld, Transport
from executor.tying import tied_devices
from octotune.contract import Plan, read_plan


def plan_of(plan: Plan | str | Path, num_layers: int) -> Plan:
    """Return a plan, read from its file or from torch's CSV where it is a path."""
    if isinstance(plan, Plan):
        return plan
    if str(plan).endswith(".csv"):
        return plan_from_torch_csv(plan, num_layers)
    return read_plan(plan)


def default_transport(plan: Plan) -> Transport:
    """Return the initialised torch.distributed's transport, or none's where one device is enough.

    Raises MismatchError where the plan needs more ranks than that.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        if torch.distributed.get_backend() == "nccl":
            return NcclTransport()
        return GlooTransport()
    if len(plan.cluster.devices) == 1 and (
        plan.cluster.data_parallel is None or plan.cluster.data_parallel.size == 1
    ):
        return ThreadWorld(1).transports()[0]
    raise MismatchError(
        f"torch.distributed is not initialised; the plan's {len(plan.cluster.devices)} devices "
        "need a process each: start with torchrun and call init_process_group, or give a transport"
    )


def connect(
    transport: Transport,
    plan: Plan,
    programs: Sequence[RankProgram],
    replicas: int,
    hosts: Sequence[str],
) -> None:
    """Make every connection that steps, losses, tied layers and clocks use. Every rank calls it.

    Args:
        transport: connects the ranks of all replicas.
        plan: what they run.
        programs: each device's [D].
        replicas: the data-parallel size; rank is replica * D + device.
        hosts: the host of each rank.
    """
    num_devices, last = len(programs), plan.stages[-1].device
    pairs = {pair for program in programs for pair in program.pairs}
    pairs |= {(last, device) for device in range(num_devices) if device != last}
    for i, j in tied_devices(plan).values():
        pairs |= {(i, j), (j, i)}
    bases = range(0, num_devices * replicas, num_devices)
    connected = {(base + source, base + target) for base in bases for source, target in pairs}
    if len(set(hosts)) > 1:
        others = range(1, transport.world_size)
        connected |= {(0, rank) for rank in others} | {(rank, 0) for rank in others}
    groups = [[base + device for base in bases] for device in range(num_devices)]
    transport.prepare(sorted(connected), groups if replicas > 1 else [])
