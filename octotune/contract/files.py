"""Reading and writing the contract's files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec

from octotune.contract.cluster import Cluster
from octotune.contract.plan import Plan
from octotune.contract.workload import Workload
from octotune.errors import MalformedError

T = TypeVar("T")


def read_workload(source: str | Path) -> Workload:
    """Read a workload file. Raises MalformedError."""
    return _read(source, Workload)


def read_cluster(source: str | Path) -> Cluster:
    """Read a cluster file. Raises MalformedError."""
    return _read(source, Cluster)


def read_plan(source: str | Path) -> Plan:
    """Read a plan file. Raises MalformedError."""
    return _read(source, Plan)


def write_json(value: msgspec.Struct, path: str | Path) -> None:
    """Write a value as JSON: to a file beside the target first, then in its place."""
    target = Path(path)
    text = msgspec.json.format(msgspec.json.encode(value), indent=1)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text + b"\n")
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _read(source: str | Path, kind: type[T]) -> T:
    file, _, fragment = str(source).partition("#")
    try:
        raw = Path(file).read_bytes()
    except OSError as error:
        raise MalformedError(f"{file}: {error.strerror}") from None
    try:
        if not fragment:
            return msgspec.json.decode(raw, type=kind)
        value = msgspec.json.decode(raw)
        for key in fragment.split("."):
            value = value[int(key)] if isinstance(value, list) else value[key]
        return msgspec.convert(value, type=kind)
    except (msgspec.MsgspecError, KeyError, IndexError, ValueError) as error:
        raise MalformedError(f"{source}: {error}") from None
