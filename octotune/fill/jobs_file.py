"""Fill jobs as a file has them, ready to plan with: ready models get their configurations."""

from __future__ import annotations

from pathlib import Path

import msgspec

from octotune.contract.files import read_file
from octotune.contract.form import checked
from octotune.errors import MalformedError
from octotune.fill.jobs import FillJob, FillJobs
from octotune.fill.models import configurations_of, find_hardware, find_model


def read_jobs(source: str | Path) -> tuple[FillJob, ...]:
    """Read a jobs file; what names a ready model gets that model's configurations.

    Raises MalformedError: one line that names file, field, what was found and what is allowed.
    """
    jobs = read_file(source, FillJobs).jobs
    return tuple(with_configurations(job, f"{source}: jobs[{i}]") for i, job in enumerate(jobs))


def checked_jobs(jobs: tuple[FillJob, ...]) -> tuple[FillJob, ...]:
    """Return jobs made in Python if a file could hold them, with their configurations.

    Raises MalformedError, as reading the file would.
    """
    try:
        together = FillJobs(jobs=tuple(jobs))
    except ValueError as error:
        raise MalformedError(str(error)) from None
    found = checked(together).jobs
    return tuple(with_configurations(job, f"jobs[{i}]") for i, job in enumerate(found))


def with_configurations(job: FillJob, place: str = "job") -> FillJob:
    """Return the job with the configurations of the ready model it names, if it names one.

    Raises MalformedError where there is no such model or hardware.
    """
    if job.model is None or job.hardware is None:
        return job
    model = find_model(job.model, f"{place}.model")
    hardware = find_hardware(job.hardware, f"{place}.hardware")
    return msgspec.structs.replace(
        job,
        model=None,
        hardware=None,
        configurations=configurations_of(model, hardware, job.kind),
    )
