"""YAML text -> JSON bytes, for what people write by hand.

The words of YAML 1.2's core schema, which are those of JSON: `yes`, `010` and `12:30` stay text,
and so does a date. Fields are unique; anchors and aliases are welcome, but what they expand to
is bounded.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import yaml

from octotune.contract.quantities import short
from octotune.contract.units import numbers_for_texts
from octotune.errors import MalformedError

MAX_YAML_BYTES = 1 << 22
MAX_NODES = 1 << 20
MAX_DEPTH = 64

_BASE: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_BASE):  # type: ignore[misc]
    """A safe loader that reads scalars as JSON does and refuses fields that stand twice."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012
    yaml_constructors = {  # noqa: RUF012
        tag: construct
        for tag, construct in _BASE.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in ("null", "bool", "str", "seq", "map")
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        seen: set[str] = set()
        for key in own:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a field's name is text", key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the field {short(key.value)} stands twice", key.start_mark
                )
            seen.add(key.value)
            key.tag = "tag:yaml.org,2002:str"  # 0: and true: are names too
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


for _tag, _pattern, _first in (
    ("null", r"(?:null|~|)", ["n", "~", ""]),
    ("bool", r"(?:true|false)", ["t", "f"]),
    ("int", r"-?(?:0|[1-9][0-9]*)", list("-0123456789")),
    ("float", r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?", list("-0123456789")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^{_pattern}$"), _first)


def _number(_: Any, node: Any) -> int | float:
    """Return the number of a scalar, of a length and size that JSON may hold."""
    kind = int if node.tag.endswith("int") else float
    value = kind(node.value) if len(node.value) <= 40 else math.inf
    if value in (math.inf, -math.inf):
        raise yaml.constructor.ConstructorError(
            None, None, f"the number {short(node.value)} is too large", node.start_mark
        )
    return value


_Loader.add_constructor("tag:yaml.org,2002:int", _number)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)


def yaml_to_json(raw: bytes, source: str) -> bytes:
    """Return a YAML document as JSON, with quantities written as text turned into numbers.

    Raises MalformedError: one line with the spot.
    """
    if len(raw) > MAX_YAML_BYTES:
        raise MalformedError(
            f"{source}: found {len(raw)} bytes of YAML; at most {MAX_YAML_BYTES}, write JSON"
        )
    try:
        tree = _unfolded(yaml.load(raw.decode("utf-8-sig"), Loader=_Loader))
        return msgspec.json.encode(numbers_for_texts(tree))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        spot = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        why = " ".join((error.problem or error.context or "no YAML").split())
        raise MalformedError(f"{source}: is no such YAML: {why}{spot}") from None
    except yaml.YAMLError as error:
        raise MalformedError(f"{source}: is no YAML: {' '.join(str(error).split())}") from None
    except UnicodeDecodeError as error:
        raise MalformedError(
            f"{source}: is no UTF-8 text: byte 0x{raw[error.start]:02x} at byte {error.start}"
        ) from None
    except RecursionError:
        raise MalformedError(f"{source}: nested too deeply") from None
    except MalformedError as error:
        raise MalformedError(f"{source}: {error}") from None
    except (ValueError, KeyError) as error:  # a tag that does not fit: !!int x, !!bool x
        raise MalformedError(f"{source}: is no such YAML: {error}") from None


def _unfolded(tree: Any) -> Any:
    """Return the tree without sharing, if it stays small."""
    left = MAX_NODES

    def unfold(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0 or depth > MAX_DEPTH:
            raise MalformedError(
                f"its aliases expand to more than {MAX_NODES} values"
                if left < 0
                else f"nested more than {MAX_DEPTH} deep"
            )
        if isinstance(value, dict):
            return {str(key): unfold(below, depth + 1) for key, below in value.items()}
        if isinstance(value, list):
            return [unfold(below, depth + 1) for below in value]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise MalformedError(f"found {short(str(value))}; allowed: text, numbers, lists, fields")

    return unfold(tree, 0)
