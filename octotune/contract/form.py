"""JSON bytes -> a workload, cluster or plan; or one line that says where the form breaks.

msgspec does the checking, and stops at the first thing that is wrong, so that what is no plan is
refused without being read to its end. Its messages name the place and what is allowed; what was
found is looked up here, by going down the bytes along the path, one level at a time.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from octotune.contract.cluster import Cluster
from octotune.contract.plan import Plan
from octotune.contract.quantities import short
from octotune.contract.units import numbers_for_texts
from octotune.contract.workload import Workload
from octotune.errors import BrokenPlanError, MalformedError

T = TypeVar("T", Workload, Cluster, Plan)

# Files that people write by hand are smaller; only up to here are units in text and duplicate
# fields of a file that is wrong anyway looked for, since that needs the whole tree in memory.
HAND_WRITTEN_BYTES = 1 << 24


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
            raise MalformedError(f"{source}: {_explained(error, raw, kind)}") from None
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
            f"{source}: found no {short('.'.join(path))}; there are {_listed(fields)}"
        )
    msgspec.json.decode(raw)
    raise MalformedError(
        f"{source}: found no {short('.'.join(path))}; there is only {_snippet(raw)}"
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


def syntax_error(error: Exception, raw: bytes) -> str:
    """Return in one line why bytes are no JSON, with line and column."""
    if not raw.strip():
        return "is empty"
    try:
        raw.decode()
    except UnicodeDecodeError as wrong:
        return f"is no UTF-8 text: byte 0x{raw[wrong.start]:02x} at {_spot(raw, wrong.start)}"
    message = str(error)
    if message == "Input data was truncated":
        return f"is no JSON: it breaks off before its end, at {_spot(raw, len(raw))}"
    at_byte = re.search(r"^(?:JSON is malformed: )?(.*) \(byte (\d+)\)$", message)
    if at_byte is None:
        return f"is no JSON: {message}"
    byte = int(at_byte[2]) - at_byte[1].startswith("trailing")  # msgspec counts these from 1
    constant = re.match(rb"[\s:,\[-]?(NaN|Infinity)", raw[max(0, byte - 1) : byte + 10])
    why = "NaN and Infinity are no numbers of JSON" if constant else at_byte[1]
    return f"is no JSON: {why} at {_spot(raw, byte)}"


def _spot(raw: bytes, byte: int) -> str:
    line, before = raw.count(b"\n", 0, byte) + 1, raw.rfind(b"\n", 0, byte)
    return f"line {line}, column {byte - before}"


def _explained(error: msgspec.ValidationError, raw: bytes, kind: type) -> str:
    """Return a ValidationError in our words: place, found, allowed."""
    message, _, where = str(error).rpartition(" - at `$")
    if not message:
        message, where = str(error), "`"
    place, hint, value = _look_up(raw, kind, where.removesuffix("`"))
    if error.__cause__ is not None:  # one of our own rules: it says all, beginning with a field
        return _joined(place, str(error.__cause__))
    if missing := re.fullmatch(r"Object missing required field `(.*)`", message):
        fields = msgspec.json.decode(value, type=dict[str, msgspec.Raw])
        return f"{_joined(place, missing[1])}: missing; found {_listed(fields)}" + _advice(
            raw, kind, place, missing[1]
        )
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", message, re.DOTALL):
        name, known = unknown[1], list(_hints(hint))
        near = difflib.get_close_matches(name[:60], known, n=1)
        allowed = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(known)}"
        return f"{_joined(place, short(name)[1:-1])}: unknown field; {allowed}"
    if message.startswith("Invalid enum value"):
        allowed = " or ".join(json.dumps(choice) for choice in get_args(hint))
    elif message in ("Integer value out of range", "Number out of range"):
        allowed = "a number of at most 64 bits"
    elif expected := re.fullmatch(r"Expected (.*?)(?:, got `[^`]*`)?", message):
        allowed = re.sub("`(.*?)`", _in_words, expected[1])
    else:
        allowed = message
    return f"{place}: found {_snippet(value)}; allowed: {allowed}".removeprefix(": ")


def _in_words(types: re.Match[str]) -> str:
    """Return msgspec's names of types as people call them."""
    names = {
        "int": "a whole number",
        "float": "a number",
        "str": "a text",
        "bool": "true or false",
        "array": "a list",
        "object": "an object",
    }
    return " or ".join(names.get(name, name) for name in types[1].split(" | "))


def _advice(raw: bytes, kind: type, place: str, field: str) -> str:
    """Return where in the file such a thing is, when the file holds it further inside."""
    if place or field != "format" or len(raw) > HAND_WRITTEN_BYTES:
        return ""
    wanted = get_args(get_type_hints(_HEADERS[kind])["format"])[0]

    def search(tree: Any, path: str, depth: int) -> str | None:
        if not isinstance(tree, dict):
            return None
        if tree.get("format") == wanted:
            return path
        if depth == 0:
            return None
        return next(
            (
                found
                for key, below in tree.items()
                if (found := search(below, f"{path}.{key}" if path else key, depth - 1))
            ),
            None,
        )

    inside = search(msgspec.json.decode(raw), "", 3)
    return "" if inside is None else f"; it holds one inside: add #{inside} to the path"


def _look_up(raw: bytes, kind: Any, path: str) -> tuple[str, Any, bytes]:
    """Follow msgspec's path; return it with keys filled in, the type there, and the bytes there.

    msgspec writes `[...]` for an entry of an object with free keys: it is the first that fails.
    """
    place, hint, value = "", _bare(kind), raw
    for name, index, _ in re.findall(r"\.(\w+)|\[(\d+)\]|(\[\.\.\.\])", path):
        if name:
            value = bytes(msgspec.json.decode(value, type=dict[str, msgspec.Raw])[name])
            hint = _bare(_hints(hint).get(name, Any))
            place = _joined(place, name)
        elif index:
            value = bytes(msgspec.json.decode(value, type=list[msgspec.Raw])[int(index)])
            items = get_args(hint)
            hint = _bare(items[0] if items[-1] is ... else items[int(index)]) if items else Any
            place = f"{place}[{index}]"
        else:
            hint = get_args(hint)[1] if get_origin(hint) is dict else Any
            fields = msgspec.json.decode(value, type=dict[str, msgspec.Raw])
            key = next(key for key, below in fields.items() if not _fits(bytes(below), hint))
            value, hint = bytes(fields[key]), _bare(hint)
            place = f"{place}[{short(key, 40)}]"
    return place, hint, value


def _fits(raw: bytes, hint: Any) -> bool:
    try:
        msgspec.json.decode(raw, type=hint)
    except msgspec.MsgspecError:
        return False
    return True


def _bare(hint: Any) -> Any:
    """Return a type without its limits, and without `None`."""
    while True:
        if get_origin(hint) is Annotated:
            hint = get_args(hint)[0]
        elif get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint):
            hint = next(choice for choice in get_args(hint) if choice is not NoneType)
        else:
            return hint


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the fields of a struct with their types."""
    return get_type_hints(kind, include_extras=True) if isinstance(kind, type) else {}


def _joined(place: str, field: str) -> str:
    return f"{place}.{field}" if place else field


def _snippet(raw: bytes, length: int = 60) -> str:
    """Return the beginning of a JSON value, on one line."""
    text = " ".join(raw[: 8 * length].decode(errors="replace").split())
    if len(text) > length or len(raw) > 8 * length:
        text = text[: length - 1] + "…"
    return text if text.isprintable() else ascii(text)[1:-1]


def _listed(fields: dict[str, Any], most: int = 12) -> str:
    """Return the names of fields, as many as fit a line."""
    if not fields:
        return "no fields"
    names = [short(name, 40)[1:-1] for name in list(fields)[:most]]
    return f"the fields {', '.join(names)}" + (", …" if len(fields) > most else "")
