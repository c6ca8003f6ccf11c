"""JSON bytes -> a workload, cluster or plan, or one line that says where the form breaks.

msgspec does the checking, and stops at the first thing that is wrong, so that what is no plan is
refused without being read to its end. `octotune.contract.explain` puts it in words.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any, Literal, TypeVar

import msgspec

from octotune.contract.cluster import Cluster
from octotune.contract.explain import (
    HAND_WRITTEN_BYTES,
    explained,
    listed,
    snippet,
    syntax_error,
)
from octotune.contract.plan import Plan
from octotune.contract.quantities import short
from octotune.contract.units import numbers_for_texts
from octotune.contract.workload import Workload
from octotune.errors import BrokenPlanError, MalformedError

T = TypeVar("T", bound=msgspec.Struct)


class _WorkloadHeader(msgspec.Struct):
    format: Literal["octotune-workload"]
    version: Literal[1]


class _ClusterHeader(msgspec.Struct):
    format: Literal["octotune-cluster"]
    version: Literal[1]


class _PlanHeader(msgspec.Struct):
    format: Literal["octotune-plan"]
    version: Literal[1]
    workload: _WorkloadHeader
    cluster: _ClusterHeader


# In Python `format` and `version` have defaults, in a file they are required: a header is read
# first, which also tells early and cheaply what is no file of the kind at all.
_HEADERS: dict[type, type[msgspec.Struct]] = {
    Workload: _WorkloadHeader,
    Cluster: _ClusterHeader,
    Plan: _PlanHeader,
}


def add_header(kind: type[msgspec.Struct], header: type[msgspec.Struct]) -> None:
    """Let `decode` read one more kind of file: `header` holds what must stand in it first."""
    _HEADERS[kind] = header


def decode(raw: bytes, kind: type[T], source: str) -> T:
    """Return the value that a file's JSON says.

    Raises:
        MalformedError: if its form is wrong. One line: source, field, what was found, what is
            allowed.
        BrokenPlanError: if it is a plan whose stages, devices or rows break a rule.
    """
    try:
        try:
            msgspec.json.decode(raw, type=_HEADERS[kind])
            try:
                value = msgspec.json.decode(raw, type=kind)
            except msgspec.ValidationError as error:
                if "got `str`" not in str(error) or len(raw) > HAND_WRITTEN_BYTES:
                    raise
                raw = _with_numbers(raw, source)
                value = msgspec.json.decode(raw, type=kind)
        except msgspec.ValidationError as error:
            if len(raw) <= HAND_WRITTEN_BYTES:
                refuse_duplicates(raw, source)
            if isinstance(error.__cause__, BrokenPlanError):
                raise BrokenPlanError(f"{source}: {error.__cause__}") from None
            raise MalformedError(f"{source}: {explained(error, raw, kind)}") from None
        refuse_duplicates(raw, source)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedError(f"{source}: {syntax_error(error, raw)}") from None
    except RecursionError:
        raise MalformedError(
            f"{source}: nested too deeply; a {kind.__name__.lower()} is not"
        ) from None
    return value


def checked(value: T) -> T:
    """Return a value made in Python if it is what a file could hold.

    Raises MalformedError, as reading the file would.
    """
    kind = type(value)
    try:
        raw = msgspec.json.encode(value)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise MalformedError(f"{kind.__name__.lower()}: {error}") from None
    return decode(raw, kind, kind.__name__.lower())


def descend(raw: bytes, path: str, source: str) -> bytes:
    """Return the part of a JSON document that a path such as `caps.p.cluster` points to.

    Numbers are indices of lists. A key that holds a dot itself is found as well.

    Raises MalformedError where there is none.
    """
    try:
        return _descend(raw, path.split("."), source)
    except msgspec.DecodeError as error:
        raise MalformedError(f"{source}: {syntax_error(error, raw)}") from None
    except RecursionError:
        raise MalformedError(f"{source}: nested too deeply") from None


def _descend(raw: bytes, path: list[str], source: str) -> bytes:
    if not path:
        return raw
    start = raw.lstrip()[:1]
    if start == b"[":
        items = msgspec.json.decode(raw, type=list[msgspec.Raw])
        first, *rest = path
        if first.isascii() and first.isdigit() and len(first) < 10 and int(first) < len(items):
            return _descend(bytes(items[int(first)]), rest, source)
        raise MalformedError(
            f"{source}: found no {short('.'.join(path))}; the list there has {len(items)} "
            f"entries, from 0"
        )
    if start == b"{":
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        missing: MalformedError | None = None
        for length in range(1, len(path) + 1):
            key = ".".join(path[:length])
            if key in fields:
                try:
                    return _descend(bytes(fields[key]), path[length:], source)
                except MalformedError as error:
                    missing = missing or error
        raise missing or MalformedError(
            f"{source}: found no {short('.'.join(path))}; there are {listed(fields)}"
        )
    msgspec.json.decode(raw)
    raise MalformedError(
        f"{source}: found no {short('.'.join(path))}; there is only {snippet(raw)}"
    )


def refuse_duplicates(raw: bytes, source: str) -> None:
    """Raise MalformedError where an object has a field twice: which one holds is anyone's guess.

    msgspec takes the last one; the standard library's reader shows all of them.
    """
    try:
        json.loads(raw, object_pairs_hook=_unique, parse_int=len)
    except _DuplicateError as error:
        raise MalformedError(f"{source}: {_place_of_duplicate(raw, error.key)}") from None
    except json.JSONDecodeError as error:
        spot = f"at line {error.lineno}, column {error.colno}"
        raise MalformedError(f"{source}: is no JSON: {error.msg} {spot}") from None
    except UnicodeDecodeError as error:
        raise MalformedError(f"{source}: {syntax_error(error, raw)}") from None
    except RecursionError:
        raise MalformedError(f"{source}: nested too deeply") from None


class _DuplicateError(Exception):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _unique(pairs: list[tuple[str, Any]]) -> None:
    """Take an object's fields. Nothing is kept of it, so that memory stays small."""
    if len(pairs) > 1 and len({key for key, _ in pairs}) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateError(key)
            seen.add(key)


def _place_of_duplicate(raw: bytes, key: str) -> str:
    """Return the message for a field that stands twice, with its place in small files."""

    def found(tree: Any, path: str) -> str | None:
        if isinstance(tree, _Pairs):
            keys = [name for name, _ in tree.pairs]
            if keys.count(key) > 1:
                return path
        below = (
            ((f"{path}.{name}" if path else name, value) for name, value in tree.pairs)
            if isinstance(tree, _Pairs)
            else ((f"{path}[{index}]", value) for index, value in enumerate(tree))
            if isinstance(tree, list)
            else ()
        )
        return next(
            (place for at, value in below if (place := found(value, at)) is not None), None
        )

    place = ""
    if len(raw) <= HAND_WRITTEN_BYTES:
        # what comes after it may be no JSON, or deep
        with contextlib.suppress(ValueError, RecursionError):
            place = found(json.loads(raw, object_pairs_hook=_Pairs, parse_int=len), "") or ""
    return f"{place or 'an object'} has the field {short(key)} twice; each stands once"


class _Pairs:
    """An object's fields as they stand, duplicates too."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        self.pairs = pairs


def _with_numbers(raw: bytes, source: str) -> bytes:
    """Return the JSON with texts such as "80 GiB" replaced by numbers."""
    refuse_duplicates(raw, source)
    try:
        return msgspec.json.encode(numbers_for_texts(msgspec.json.decode(raw)))
    except MalformedError as error:
        raise MalformedError(f"{source}: {error}") from None
