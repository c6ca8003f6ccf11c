"""Costs in the units that papers on schedules use, with any limit of memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.unit_costs import UNIFORM, UNIT_NS, in_flight, uneven_shares, unit_costs

__all__ = ["UNIFORM", "UNIT_NS", "in_flight", "uneven_shares", "unit_costs", "with_memory"]


def with_memory(costs, limits):
    """Return the costs with another limit a device."""
    return replace(costs, memory_bytes=np.array(limits, dtype=np.int64))
