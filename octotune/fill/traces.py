"""Where a fleet's jobs come from: drawn from stated distributions, or read from a CSV file.

Drawn: arrivals are a Poisson process; the time a job would take alone on a device is log-normal;
its model and kind are drawn by share; a share of the jobs has a deadline, evenly between two
multiples of that time after arrival; a share is cancelled, after an exponential time of the same
mean.

Read: public traces name their columns differently, so the file's names are given for ours:
`arrival`, and `duration` or `end`, in seconds or as ISO 8601 times; optionally `gpus`, which
multiplies the duration, `deadline`, `model` and `kind`. Rows without an end are left out. Where
there is no model column, models are drawn as above.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from octotune.contract.explain import listed
from octotune.contract.quantities import Amount, Count, Name, short
from octotune.errors import MalformedError
from octotune.fill.jobs import JobKind
from octotune.fill.models import FillModel, Hardware, alone_ns, configurations_of, find_model
from simulator.fleet import NEVER, Trace

_NS_PER_S = 10**9
_NS_PER_HOUR = 3600 * _NS_PER_S
_MOST_S = 1e8  # three years
_MOST_GPUS = 1e5
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Share = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[float, Meta(gt=0)]


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of job in the mix; shares are relative to each other."""

    model: Name
    kind: JobKind
    share: Positive = 1.0


class Synthetic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Jobs to draw. `median_ns` and `sigma` are of the log-normal time alone on a device.

    The first `backlog` jobs are there at the start, the others arrive after it.
    """

    num_jobs: Count
    backlog: Amount = 0
    arrivals_per_hour: Positive
    median_ns: Annotated[int, Meta(ge=1, le=10**16)]
    sigma: Annotated[float, Meta(ge=0, le=2)] = 1.0
    deadline_share: Share = 0.0
    slack: tuple[Positive, Positive] = (2.0, 8.0)
    cancel_share: Share = 0.0

    def __post_init__(self) -> None:
        if self.slack[0] > self.slack[1]:
            raise ValueError(
                f"slack is [{self.slack[0]}, {self.slack[1]}]; the first is at most the second"
            )


class Columns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The names that a CSV file has for our columns."""

    arrival: Name
    duration: Name | None = None
    end: Name | None = None
    gpus: Name | None = None
    deadline: Name | None = None
    model: Name | None = None
    kind: Name | None = None

    def __post_init__(self) -> None:
        if (self.duration is None) == (self.end is None):
            raise ValueError("duration or end is needed, and not both")
        if (self.model is None) != (self.kind is None):
            raise ValueError("model and kind go together; write both or neither")


class Csv(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trace to read; `models` says which ready model stands for a value of its model column."""

    path: Name
    columns: Columns
    models: dict[str, Name] = {}
    most_jobs: Count | None = None
    shift_ns: Amount = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """A trace, and the kinds its jobs are of: model and kind of work."""

    trace: Trace
    kinds: tuple[tuple[FillModel, JobKind], ...]
    alone_ns: tuple[float, ...]  # of one sample of each kind, on a device of its own
    left_out: int = 0  # rows of the file without an end


def draw(
    what: Synthetic,
    mix: Sequence[Part],
    hardware: Hardware,
    *,
    time_scale: float = 1.0,
    seed: int = 0,
) -> Drawn:
    """Return jobs drawn from the distributions that `what` states.

    Raises MalformedError where the mix names a model that is not there.
    """
    kinds, alone, shares = _kinds(mix, hardware, time_scale)
    rng = np.random.default_rng(seed)
    n = what.num_jobs
    gaps = rng.exponential(_NS_PER_HOUR / what.arrivals_per_hour, n)
    gaps[: what.backlog] = 0
    arrival = np.floor(np.cumsum(gaps)).astype(np.int64)
    kind = rng.choice(len(kinds), size=n, p=shares)
    work = what.median_ns * np.exp(what.sigma * rng.standard_normal(n))
    slack = rng.uniform(*what.slack, n)
    has_deadline = rng.random(n) < what.deadline_share
    deadline = np.where(has_deadline, arrival + slack * work, NEVER).astype(np.int64)
    cancelled = rng.random(n) < what.cancel_share
    wait = rng.exponential(what.median_ns * math.exp(what.sigma**2 / 2), n)
    return Drawn(
        trace=Trace(
            arrival_ns=arrival,
            kind=kind.astype(np.int64),
            samples=_samples(work, kind, alone),
            deadline_ns=deadline,
            cancel_ns=np.where(cancelled, arrival + wait, NEVER).astype(np.int64),
        ),
        kinds=kinds,
        alone_ns=alone,
    )


def _samples(work_ns: Float64, kind: Int64, alone: Sequence[float]) -> Int64:
    samples: Int64 = np.floor(work_ns / np.array(alone)[kind] + 0.5).astype(np.int64)
    return np.maximum(1, samples)


def _kinds(
    mix: Sequence[Part], hardware: Hardware, time_scale: float
) -> tuple[tuple[tuple[FillModel, JobKind], ...], tuple[float, ...], Float64]:
    kinds = tuple(
        (find_model(part.model, f"mix[{i}].model"), part.kind) for i, part in enumerate(mix)
    )
    alone = tuple(
        alone_ns(configurations_of(model, hardware, kind, time_scale)) for model, kind in kinds
    )
    shares = np.array([part.share for part in mix])
    return kinds, alone, shares / shares.sum()


def read_csv(
    what: Csv,
    mix: Sequence[Part],
    hardware: Hardware,
    *,
    folder: Path = Path(),
    time_scale: float = 1.0,
    seed: int = 0,
) -> Drawn:
    """Return the jobs of a CSV file, its first arrival at `shift_ns`.

    Raises:
        MalformedError: if the file cannot be read, a column is missing or a value is no time;
            one line with the place.
    """
    path = folder / what.path
    place = short(str(path), 200)[1:-1]
    names = {
        field: name
        for field in Columns.__struct_fields__
        if (name := getattr(what.columns, field)) is not None
    }
    kinds, alone, shares = _kinds(mix, hardware, time_scale)
    number_of: dict[tuple[str, str], int] = {
        (model.name, kind): i for i, (model, kind) in enumerate(kinds)
    }
    rng = np.random.default_rng(seed)
    rows: list[tuple[float, float, float, int]] = []  # arrival, work, deadline in s; kind
    left_out = 0
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            header = reader.fieldnames or []
            missing = [name for name in names.values() if name not in header]
            if missing:
                raise MalformedError(
                    f"{place}: missing columns: {', '.join(map(short, missing))}; found "
                    f"{listed(dict.fromkeys(header)).replace('the fields ', '')}; name them under "
                    "columns"
                )
            for line, row in enumerate(reader, start=2):
                if what.most_jobs is not None and len(rows) >= what.most_jobs:
                    break
                cells = {field: (row[name] or "").strip() for field, name in names.items()}
                if not cells["arrival"] or not cells.get("duration", cells.get("end")):
                    left_out += 1
                    continue
                at = f"{place}: line {line}"
                arrival = _seconds(cells["arrival"], f"{at}, {names['arrival']}")
                if "duration" in cells:
                    work = _seconds(cells["duration"], f"{at}, {names['duration']}")
                else:
                    work = _seconds(cells["end"], f"{at}, {names['end']}") - arrival
                if not 0 <= work <= _MOST_S:
                    raise MalformedError(
                        f"{at}: found a time of {work} s; allowed: 0 to {_MOST_S:.0e}"
                    )
                if cells.get("gpus"):
                    gpus = _seconds(cells["gpus"], f"{at}, {names['gpus']}")
                    if not 0 <= gpus <= _MOST_GPUS:
                        raise MalformedError(
                            f"{at}: found {gpus:g} GPUs; allowed: 0 to {_MOST_GPUS:.0e}"
                        )
                    work *= gpus
                deadline = math.inf
                if cells.get("deadline"):
                    deadline = _seconds(cells["deadline"], f"{at}, {names['deadline']}")
                if "model" in cells:
                    model = what.models.get(cells["model"], cells["model"])
                    kind = number_of.get((model, cells["kind"]), -1)
                    if kind < 0:
                        raise MalformedError(
                            f"{at}: found {short(model)}, {short(cells['kind'])}; allowed: what "
                            f"the mix names: {', '.join(f'{m} {k}' for m, k in number_of)}"
                        )
                else:
                    kind = int(rng.choice(len(kinds), p=shares))
                if work > 0:
                    rows.append((arrival, work, deadline, kind))
    except OSError as error:
        raise MalformedError(f"{place}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise MalformedError(f"{place}: is no CSV: {error}") from None
    if not rows:
        raise MalformedError(f"{place}: holds no job with an arrival and an end")
    rows.sort(key=lambda row: row[0])
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    if columns[0][-1] - columns[0][0] > _MOST_S:
        raise MalformedError(
            f"{place}: arrivals lie {columns[0][-1] - columns[0][0]:.0f} s apart; allowed: up to "
            f"{_MOST_S:.0e}"
        )
    shift = what.shift_ns - columns[0][0] * _NS_PER_S
    arrival_ns = np.maximum(0, np.floor(columns[0] * _NS_PER_S + shift + 0.5)).astype(np.int64)
    late = np.where(np.isfinite(columns[2]), columns[2] * _NS_PER_S + shift, NEVER)
    return Drawn(
        trace=Trace(
            arrival_ns=arrival_ns,
            kind=columns[3].astype(np.int64),
            samples=_samples(columns[1] * _NS_PER_S, columns[3].astype(np.int64), alone),
            deadline_ns=np.minimum(late, NEVER).astype(np.int64),
            cancel_ns=np.full(len(rows), NEVER, dtype=np.int64),
        ),
        kinds=kinds,
        alone_ns=alone,
        left_out=left_out,
    )


def _seconds(text: str, place: str) -> float:
    """Return a number, of seconds mostly, or an ISO 8601 time in seconds since 1970."""
    try:
        value = float(text)
    except ValueError:
        try:
            when = datetime.fromisoformat(text)
        except ValueError:
            raise MalformedError(
                f"{place}: found {short(text)}; allowed: seconds, or a time as 2020-07-01T12:00:00"
            ) from None
        value = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(value) or abs(value) > 1e10:
        raise MalformedError(f"{place}: found {short(text)}; allowed: seconds up to 10^10")
    return value
