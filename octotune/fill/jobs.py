"""Fill jobs: what may run in a bubble, cut into micro-steps that are never interrupted.

A job works through `samples`. One pass over its micro-steps, in order, makes `batch_size` of them:
the layers' forwards for inference; forwards, backwards and the update for training. A job has one
or more configurations, that is a batch size and a memory technique with the micro-steps measured
under them; which one runs on a device is the packing's choice, as bubbles differ in time and
memory. A ready model is named instead, and its configurations come from its shapes.

The file, JSON or YAML:

    format: octotune-fill-jobs
    version: 1
    jobs:
      - {name: nightly, kind: inference, samples: 200000, model: bert-base, hardware: v100}
      - name: mine
        kind: training
        samples: 4096
        deadline_ns: 2 h
        factory: my_jobs.py:make
        configurations:
          - batch_size: 8
            resident_bytes: 1 GiB
            micro_steps:
              - {name: layers.0 forward, time_ns: 2 ms, memory_bytes: 1.5 GiB}
              - {name: layers.0 backward, time_ns: 4 ms, memory_bytes: 1.5 GiB}
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octotune.contract.form import add_header
from octotune.contract.quantities import Amount, Count, Name, short

Technique = Literal["none", "checkpointing", "offload", "checkpointing and offload"]
JobKind = Literal["training", "inference"]


class MicroStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What runs without interruption: its time alone on the device, and the bytes it needs.

    `memory_bytes` is all that the job holds while it runs, resident bytes included. `copy_ns` is
    how long it keeps the device's copy lane busy, beside compute.
    """

    name: str = ""
    time_ns: Count
    memory_bytes: Amount = 0
    copy_ns: Amount = 0


class Configuration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to run a job: micro-steps of one pass, which makes `batch_size` samples.

    `resident_bytes` stay on the device between bubbles, while the main job runs; `carried_bytes`
    is the most that a pass which has begun and not ended adds to them between two micro-steps.
    """

    name: str = ""
    batch_size: Count
    technique: Technique = "none"
    resident_bytes: Amount = 0
    carried_bytes: Amount = 0
    micro_steps: Annotated[tuple[MicroStep, ...], Meta(min_length=1)]

    def __post_init__(self) -> None:
        for index, step in enumerate(self.micro_steps):
            if step.memory_bytes < self.resident_bytes:
                raise ValueError(
                    f"micro_steps[{index}].memory_bytes is {step.memory_bytes}; it holds the "
                    f"resident bytes too, so it is at least {self.resident_bytes}"
                )

    @property
    def pass_ns(self) -> int:
        """How long one pass takes alone on the device."""
        return sum(step.time_ns for step in self.micro_steps)

    @property
    def peak_bytes(self) -> int:
        """The most bytes any micro-step needs."""
        return max(step.memory_bytes for step in self.micro_steps)

    @property
    def label(self) -> str:
        """How people call it: its name, or batch size and technique."""
        return self.name or f"batch {self.batch_size}, {self.technique}"


class FillJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One job. Times are from the start of the main job.

    `factory` is `module:function` or `file.py:function`, called with `arguments` where the job
    really runs; planning does not look at either. One that is not `trusted` to return runs in a
    process of its own. `model` and `hardware` name a ready profile in
    place of `configurations`.
    """

    name: Name
    kind: JobKind
    samples: Count
    arrival_ns: Amount = 0
    deadline_ns: Amount | None = None
    model: Name | None = None
    hardware: Name | None = None
    factory: Name | None = None
    trusted: bool = True
    arguments: dict[str, Any] = {}
    configurations: tuple[Configuration, ...] = ()

    def __post_init__(self) -> None:
        if self.deadline_ns is not None and self.deadline_ns <= self.arrival_ns:
            raise ValueError(
                f"deadline_ns is {self.deadline_ns}; it comes after arrival_ns, {self.arrival_ns}"
            )
        if (self.model is None) == (not self.configurations):
            raise ValueError(
                "configurations and model are both given; write one"
                if self.configurations
                else "configurations is missing, and so is model; write one of them"
            )
        if (self.model is None) != (self.hardware is None):
            raise ValueError("model and hardware go together; write both or neither")


class FillJobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The jobs of one file, with different names."""

    format: Literal["octotune-fill-jobs"] = "octotune-fill-jobs"
    version: Literal[1] = 1
    jobs: Annotated[tuple[FillJob, ...], Meta(min_length=1)]

    def __post_init__(self) -> None:
        names: set[str] = set()
        for index, job in enumerate(self.jobs):
            if job.name in names:
                raise ValueError(
                    f"jobs[{index}].name is {short(job.name)} a second time; names are unique"
                )
            names.add(job.name)


class _Header(msgspec.Struct):
    format: Literal["octotune-fill-jobs"]
    version: Literal[1]


add_header(FillJobs, _Header)
