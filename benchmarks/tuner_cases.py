"""The problems that the tuner's benchmarks measure, with what others reach on each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from octotune.contract import Cluster, Workload, read_cluster, read_workload

DATA = Path(__file__).resolve().parent / "data"
GB = 10**9

OCTOPIPE_FREE, OCTOPIPE_1F1B = "octopipe, free memory", "octopipe, 1F1B memory"
PUBLISHED = {cap: f"published schedules, {cap}" for cap in ("2p", "p", "half")}
MIXED = "mixed clusters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem; `reference_ns` is the step to beat, `fair_ns` another one to compare with."""

    name: str
    group: str
    workload: str
    cluster: str | None
    num_devices: int
    memory_bytes: int | None
    num_microbatches: int
    reference_ns: int | None
    time_limit_s: float
    headroom: bool = True  # the reference is more than 1 % above its simple bound
    free_reference_ns: int | None = None  # the reference with free memory

    def problem(self) -> tuple[Workload, Cluster]:
        """Read the workload and cluster."""
        workload = read_workload(self.workload)
        if self.cluster is not None:
            return workload, read_cluster(self.cluster)
        if self.memory_bytes is None:
            return workload, Cluster.equal(self.num_devices)
        return workload, Cluster.equal(self.num_devices, memory_bytes=self.memory_bytes)


@cache
def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def all_cases() -> Iterator[Case]:
    """Yield every case of every group."""
    for path in sorted((DATA / "octopipe").glob("*.json")):
        data = _json(path)
        for point in data["points"]:
            devices, m = point["devices"], point["num_microbatches"]
            published = point["published"]
            name = f"{path.stem}:{devices}x{m}"
            shared: dict[str, Any] = {
                "workload": f"{path}#workload",
                "cluster": None,
                "num_devices": devices,
                "num_microbatches": m,
                "time_limit_s": 60.0,
            }
            yield Case(
                name=f"{name}:free",
                group=OCTOPIPE_FREE,
                memory_bytes=None,
                reference_ns=published["octopipe"],
                headroom=published["octopipe"] > 1.01 * point["bound_ns"],
                **shared,
            )
            if "octopipe_at_1f1b_memory" in published:
                yield Case(
                    name=f"{name}:1f1b",
                    group=OCTOPIPE_1F1B,
                    memory_bytes=data["memory_1f1b_units"] * GB,
                    reference_ns=published["octopipe_at_1f1b_memory"],
                    free_reference_ns=published["octopipe"],
                    **shared,
                )
    for path in sorted((DATA / "cases").glob("*.json")):
        data = _json(path)
        for cap, of_cap in data["caps"].items():
            yield Case(
                name=f"{path.stem}:{cap}",
                group=PUBLISHED[cap],
                workload=f"{path}#workload",
                cluster=f"{path}#caps.{cap}.cluster",
                num_devices=len(of_cap["cluster"]["devices"]),
                memory_bytes=None,
                num_microbatches=data["num_microbatches"],
                reference_ns=of_cap["best_published"]["step_ns"],
                time_limit_s=30.0,
            )
    for path in sorted((DATA / "mixed").glob("*.json")):
        data = _json(path)
        yield Case(
            name=path.stem,
            group=MIXED,
            workload=f"{path}#workload",
            cluster=f"{path}#cluster",
            num_devices=len(data["cluster"]["devices"]),
            memory_bytes=None,
            num_microbatches=data["num_microbatches"],
            reference_ns=_fitting_reference(data),
            time_limit_s=30.0,
        )


def _fitting_reference(data: Any) -> int | None:
    """Return the step of 1F1B with the best partition, or None where it exceeds the memory."""
    reference = data["one_f_one_b_best_partition_in_order"]
    limits = [device["memory_bytes"] for device in data["cluster"]["devices"]]
    fits = all(
        units * GB <= limit for units, limit in zip(reference["peak_units"], limits, strict=True)
    )
    return int(reference["step_ns"]) if fits else None


# One of each kind, small and large, free and tight: the daily measure.
PANEL = (
    "nemotron-nano-v2-9B:4x8:free",
    "nemotron-nano-v2-9B:8x16:free",
    "nemotron-h-4B:4x8:free",
    "jamba-52B:8x16:free",
    "llama3-70B:8x8:free",
    "llama3-70B:16x32:free",
    "nemotron-nano-v2-9B:8x16:1f1b",
    "llama3-70B:8x8:1f1b",
    "het-alt-p8-m32:p",
    "het-alt-p8-m32:half",
    "uni-a-p8-m32:half",
    "mixed-00-nemotron-nano-v2-9B",
)
