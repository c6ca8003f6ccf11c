"""Small valid workload, cluster and plan files as plain data, for tests that break them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def workload() -> dict[str, Any]:
    """Three layers that use every field."""
    layer = {
        "kind": "block",
        "forward_ns": 1000,
        "input_grad_ns": 1200,
        "weight_grad_ns": 800,
        "optimizer_ns": 50,
        "param_bytes": 4096,
        "state_bytes": 16384,
        "saved_bytes": 2048,
        "saved_w_bytes": 1024,
        "held_w_bytes": 512,
        "workspace_bytes": 256,
        "output_bytes": 1024,
        "offloadable_bytes": 2048,
        "times_ns": {"fast": [500, 600, 400]},
    }
    return {
        "format": "octotune-workload",
        "version": 1,
        "name": "three layers",
        "layers": [{"name": name, **layer} for name in ("embedding", "block", "head")],
        "tied": [[0, 2]],
    }


def cluster() -> dict[str, Any]:
    """Two unlike devices on two hosts that use every field."""
    return {
        "format": "octotune-cluster",
        "version": 1,
        "name": "two devices",
        "devices": [
            {
                "kind": "slow",
                "memory_bytes": 10**6,
                "reserved_bytes": 1000,
                "speed": 1.5,
                "host": 0,
                "overhead_ns": 10,
                "offload_bandwidth": 10**9,
                "host_link": "pcie",
            },
            {"kind": "fast", "memory_bytes": 10**6, "host": 1},
        ],
        "links": {
            "intra_host": {"latency_ns": 5, "bandwidth": 10**10},
            "inter_host": {"latency_ns": 50, "bandwidth": 10**9},
            "pairs": {"0-1": {"latency_ns": 20, "bandwidth": 2 * 10**9}},
        },
        "nic_bandwidth": 10**9,
        "host_memory_bytes": 10**6,
        "data_parallel": {"size": 2, "bandwidth": 10**9},
    }


def plan() -> dict[str, Any]:
    """Two stages, two microbatches, one of them offloaded, one stage with a split backward."""
    return {
        "format": "octotune-plan",
        "version": 1,
        "workload": workload(),
        "cluster": cluster(),
        "num_microbatches": 2,
        "stages": [
            {"layers": [0, 1], "device": 0, "recompute": False},
            {"layers": [1, 3], "device": 1},
        ],
        "actions": [
            ["0F0", "0F1", "0B0", "0B1"],
            ["1F0", "1I0", "1F1", "1W0", "1I1", "1W1"],
        ],
        "offload": [["0O1", "0R1@0B0"], []],
        "search": {"seed": 0},
    }


def write(directory: Path, content: Any, name: str = "file.json") -> Path:
    """Write plain data as JSON, or text and bytes as they are; return the path."""
    path = directory / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path
