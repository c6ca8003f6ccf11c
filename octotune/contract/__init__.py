"""Workload, cluster and plan: the files of the contract as frozen values.

`docs/contract.md` says what they mean. `workload`, `cluster` and `plan` hold the values, `files`
reads and writes them, `costs` turns them into what the simulator knows.
"""

from octotune.contract.cluster import Cluster, DataParallel, Device, Link, Links
from octotune.contract.costs import build_costs
from octotune.contract.files import read_cluster, read_plan, read_workload, write_json
from octotune.contract.form import checked
from octotune.contract.plan import Plan, Predicted, Stage
from octotune.contract.workload import Layer, Workload

__all__ = [
    "Cluster",
    "DataParallel",
    "Device",
    "Layer",
    "Link",
    "Links",
    "Plan",
    "Predicted",
    "Stage",
    "Workload",
    "build_costs",
    "checked",
    "read_cluster",
    "read_plan",
    "read_workload",
    "write_json",
]
