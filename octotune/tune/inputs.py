"""What `tune` accepts as a model and as a cluster, turned into the contract's values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octotune.contract import Cluster, Workload, checked, read_cluster, read_workload
from octotune.errors import MalformedError


def workload_of(
    model: Any, example_input: Any = None, loss_fn: Any = None, example_target: Any = None
) -> Workload:
    """Return the workload of a model: itself, a file or bundled name, or modules to profile.

    Raises:
        MalformedError: if it is none of these, a value made in Python is not what a file could
            hold, or modules come without an example input or loss.
    """
    if isinstance(model, Workload):
        return checked(model)
    if isinstance(model, str | Path):
        return read_workload(model)
    if not isinstance(model, Sequence) and not hasattr(model, "__iter__"):
        raise MalformedError(
            f"model is a {type(model).__name__}; give a Workload, the path of a workload file, "
            "or a sequence of torch modules with an example input"
        )
    if example_input is None:
        raise MalformedError("model is a sequence of modules; give example_input to profile it")
    if loss_fn is None:
        raise MalformedError("model is a sequence of modules; give loss_fn to profile it")
    from octotune.model.profile import profile

    return profile(list(model), example_input, loss_fn, example_target=example_target)


def cluster_of(cluster: Any) -> Cluster:
    """Return the cluster: itself, a file or bundled name, or a number of equal devices.

    Raises:
        MalformedError: if it is none of these, or is not what a file could hold.
    """
    if isinstance(cluster, Cluster):
        return checked(cluster)
    if isinstance(cluster, bool) or not isinstance(cluster, int | str | Path):
        raise MalformedError(
            f"cluster is a {type(cluster).__name__}; give a Cluster, the path of a cluster file, "
            "or a number of equal devices"
        )
    return read_cluster(cluster)
