"""Costs: all the simulator knows of the world, as arrays over stages, boundaries and devices.

`octotune.contract.build_costs` makes them from a workload, a cluster and a list of stages, with
the contract's exact integer arithmetic; nothing in here is rounded again. Boundary s lies between
stage s and stage s + 1: the activation crosses it forwards, its gradient backwards, and both are
equally large.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Costs:
    """Durations, sizes, links and limits of one plan's stages on one cluster.

    Times are nanoseconds, sizes bytes. Durations of actions are final: speed, recompute, overhead
    and the minimum of 1 ns are in them. S stages, D devices, T tied pairs that lie on two devices.
    """

    num_microbatches: int

    stage_device: Int64  # [S]
    forward_ns: Int64  # [S] duration of F
    backward_ns: Int64  # [S] duration of B
    input_grad_ns: Int64  # [S] duration of I
    weight_grad_ns: Int64  # [S] duration of W

    # transfers over boundary s, in either direction; 0 where both stages share a device
    transfer_bytes: Int64  # [S - 1]
    transfer_hold_ns: Int64  # [S - 1] how long it holds channel (and NIC sides)
    transfer_latency_ns: Int64  # [S - 1] from the end of the hold to the arrival
    transfer_uses_nic: Bool  # [S - 1] crosses hosts on a cluster that limits the NIC

    # after a stage's last W or B
    reduce_ns: Int64  # [S] on its device's reduction channel; -1: nothing to reduce
    exchange_stages: Int64  # [T, 2] the two stages of each tied pair
    exchange_ns: Int64  # [T] bandwidth and latency together
    optimizer_ns: Int64  # [D]

    # memory, per microbatch where it is an activation
    saved_bytes: Int64  # [S] from the start of F to the end of I or B
    saved_w_bytes: Int64  # [S] from the start of F to the end of W or B
    held_w_bytes: Int64  # [S] from the start of I or B to the end of W or B
    workspace_bytes: Int64  # [S] while an action of the stage runs
    input_bytes: Int64  # [S] held in place of saved bytes under recompute, until I or B
    recompute: Bool  # [S]
    static_bytes: Int64  # [D] reserved, and the state of the device's layers
    memory_bytes: Int64  # [D] the limit

    # offload
    offload_bytes: Int64  # [S] what O takes out and R brings back
    copy_ns: Int64  # [S] one way; -1: the stage's device cannot offload
    host_link: Int64  # [D] devices of one host link have one number
    device_host: Int64  # [D]
    host_memory_bytes: int | None  # the limit of each host

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.stage_device)

    @property
    def num_devices(self) -> int:
        """D."""
        return len(self.static_bytes)
