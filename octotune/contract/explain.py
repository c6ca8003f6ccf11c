"""Why JSON bytes are no workload, cluster or plan, in one line: the place, what was found, what
is allowed.

msgspec's messages name the place and what is allowed. What was found is looked up here, by going
down the bytes along the path, one level at a time.
"""

from __future__ import annotations

import difflib
import json
import re
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from octotune.contract.quantities import short

# Files that people write by hand are smaller. Only up to here the whole tree of a file is made to
# say more of what is wrong: its fields that stand twice, its units in text, the value found.
HAND_WRITTEN_BYTES = 1 << 24


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


def explained(error: msgspec.ValidationError, raw: bytes, kind: type) -> str:
    """Return in one line why bytes are no value of a kind: place, found, allowed."""
    message, _, where = str(error).rpartition(" - at `$")
    if not message:
        message, where = str(error), "`"
    place, hint, value = _look_up(raw, kind, where.removesuffix("`"))
    if error.__cause__ is not None:  # one of our own rules: it says all, beginning with a field
        return _joined(place, str(error.__cause__))
    if missing := re.fullmatch(r"Object missing required field `(.*)`", message):
        place = _joined(place, missing[1])
        if value is None or len(value) > HAND_WRITTEN_BYTES:
            return f"{place}: missing"
        fields = msgspec.json.decode(value, type=dict[str, msgspec.Raw])
        return f"{place}: missing; found {listed(fields)}{_advice(raw, kind, place)}"
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
    if value is not None:
        found = f"found {snippet(value)}; "
    else:
        got = re.search("got `(.*?)`", message)
        found = f"found {_in_words(got)}; " if got else ""
    return f"{place}: {found}allowed: {allowed}".removeprefix(": ")


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


def _advice(raw: bytes, kind: type, place: str) -> str:
    """Return where in the file such a thing is, when the file holds it further inside."""
    if place != "format":
        return ""
    wanted = get_args(_hints(kind)["format"])[0]

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


def _look_up(raw: bytes, kind: Any, path: str) -> tuple[str, Any, bytes | None]:
    """Follow msgspec's path; return it with keys filled in, the type there, and the bytes there.

    msgspec writes `[...]` for an entry of an object with free keys: it is the first that fails.
    In large files the bytes are not looked for.
    """
    place, hint = "", _bare(kind)
    value = raw if len(raw) <= HAND_WRITTEN_BYTES or not path else None
    for name, index, _ in re.findall(r"\.(\w+)|\[(\d+)\]|(\[\.\.\.\])", path):
        if name:
            if value is not None:
                value = bytes(msgspec.json.decode(value, type=dict[str, msgspec.Raw])[name])
            hint = _bare(_hints(hint).get(name, Any))
            place = _joined(place, name)
        elif index:
            if value is not None:
                value = bytes(msgspec.json.decode(value, type=list[msgspec.Raw])[int(index)])
            items = get_args(hint)
            hint = _bare(items[0] if items[-1] is ... else items[int(index)]) if items else Any
            place = f"{place}[{index}]"
        else:
            hint = get_args(hint)[1] if get_origin(hint) is dict else Any
            if value is not None:
                fields = msgspec.json.decode(value, type=dict[str, msgspec.Raw])
                key = next(key for key, below in fields.items() if not _fits(bytes(below), hint))
                value = bytes(fields[key])
                place = f"{place}[{short(key, 40)}]"
            hint = _bare(hint)
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


def snippet(raw: bytes, length: int = 60) -> str:
    """Return the beginning of a JSON value, on one line."""
    text = " ".join(raw[: 8 * length].decode(errors="replace").split())
    if len(text) > length or len(raw) > 8 * length:
        text = text[: length - 1] + "…"
    return text if text.isprintable() else ascii(text)[1:-1]


def listed(fields: dict[str, Any], most: int = 12) -> str:
    """Return the names of fields, as many as fit a line."""
    if not fields:
        return "no fields"
    names = [short(name, 40)[1:-1] for name in list(fields)[:most]]
    return f"the fields {', '.join(names)}" + (", …" if len(fields) > most else "")
