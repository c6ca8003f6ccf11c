"""Tune partition, placement and schedule of pipeline-parallel training together.

The main path is a few calls: read the costs (`read_workload`, `profile`), `tune(...)`,
`plan.save(...)`, then `torchrun -m executor`. Names are imported on first use, so that
`import octotune` is quick and loads no solver, compiler or torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octotune.check import check as check
    from octotune.contract import Cluster as Cluster
    from octotune.contract import DataParallel as DataParallel
    from octotune.contract import Device as Device
    from octotune.contract import Layer as Layer
    from octotune.contract import Link as Link
    from octotune.contract import Links as Links
    from octotune.contract import Plan as Plan
    from octotune.contract import Predicted as Predicted
    from octotune.contract import Stage as Stage
    from octotune.contract import Workload as Workload
    from octotune.contract import read_cluster as read_cluster
    from octotune.contract import read_plan as read_plan
    from octotune.contract import read_workload as read_workload
    from octotune.errors import DeadlockError as DeadlockError
    from octotune.errors import InfeasibleError as InfeasibleError
    from octotune.errors import MalformedError as MalformedError
    from octotune.errors import OutOfMemoryError as OutOfMemoryError
    from octotune.errors import OutOfTimeError as OutOfTimeError
    from octotune.errors import ScheduleError as ScheduleError
    from octotune.model.profile import profile as profile
    from octotune.tune import tune as tune

_HOME = {
    "tune": "octotune.tune",
    "profile": "octotune.model.profile",
    "check": "octotune.check",
    **dict.fromkeys(
        (
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
            "read_cluster",
            "read_plan",
            "read_workload",
        ),
        "octotune.contract",
    ),
    **dict.fromkeys(
        (
            "DeadlockError",
            "InfeasibleError",
            "MalformedError",
            "OutOfMemoryError",
            "OutOfTimeError",
            "ScheduleError",
        ),
        "octotune.errors",
    ),
}

__all__ = sorted(_HOME)


class _Package(ModuleType):
    """`octotune.tune` and `octotune.check` are modules, and functions in them of the same name.

    Importing a submodule binds it in its package; here the public function keeps the name.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOME and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'octotune' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
