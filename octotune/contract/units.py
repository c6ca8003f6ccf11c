"""Quantities as people write them: "80 GiB", "25 GB/s", "400 Gb/s", "5 us" -> integers.

A field's name says what it holds: `…_ns` a time, `…_bytes` a size, `bandwidth` and `…_bandwidth`
bytes per second. In those fields a text is read as a number and a unit of that dimension: b is
bits and B bytes, G is 10^9 and Gi 2^30. The arithmetic is exact; what is no whole number of
nanoseconds, bytes or bytes per second goes to the nearest one.
"""

from __future__ import annotations

import math
import re
from enum import Enum
from fractions import Fraction
from typing import Any

from octotune.contract.quantities import MAX_QUANTITY, short
from octotune.errors import MalformedError

_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]{1,24}(?:\.[0-9]{1,24})?)\s*([^\s0-9.]\S{0,15})\s*")

_TIMES = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "μs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "min": 60 * 10**9,
    "h": 3600 * 10**9,
    "days": 86400 * 10**9,
}
_PREFIXES = {"": 1, "k": 10**3, "K": 10**3, "Ki": 2**10} | {
    prefix: value
    for power, letter in enumerate("MGTPE", start=2)
    for prefix, value in ((letter, 10 ** (3 * power)), (f"{letter}i", 2 ** (10 * power)))
}
_SIZES = {
    f"{prefix}{unit}": factor * size
    for prefix, factor in _PREFIXES.items()
    for unit, size in (("B", Fraction(1)), ("b", Fraction(1, 8)))
}


class Dimension(Enum):
    """What a field measures. The value is how it is called, and an example of it."""

    TIME = ("a time", "5 us", "nanoseconds")
    SIZE = ("a size", "80 GiB", "bytes")
    BANDWIDTH = ("a bandwidth", "25 GB/s", "bytes per second")


_FACTORS: dict[Dimension, dict[str, Fraction]] = {
    Dimension.TIME: {unit: Fraction(factor) for unit, factor in _TIMES.items()},
    Dimension.SIZE: _SIZES,
    Dimension.BANDWIDTH: {f"{unit}/s": factor for unit, factor in _SIZES.items()},
}


def dimension_of(field: str) -> Dimension | None:
    """Return what a field of this name measures, or None where it is no quantity."""
    if field.endswith("_ns"):
        return Dimension.TIME
    if field.endswith("_bytes"):
        return Dimension.SIZE
    if field == "bandwidth" or field.endswith("_bandwidth"):
        return Dimension.BANDWIDTH
    return None


def parse_quantity(text: str, dimension: Dimension) -> int:
    """Return the nanoseconds, bytes or bytes per second that a text says.

    Raises MalformedError, saying what was found and what is allowed.
    """
    name, example, counted = dimension.value
    allowed = f'write {name} such as "{example}", or a whole number of {counted}'
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None:
        raise MalformedError(f"found {short(text)}; {allowed}")
    number, unit = match.groups()
    factor = _FACTORS[dimension].get(unit)
    if factor is None:
        fits = next((other.value[0] for other in Dimension if unit in _FACTORS[other]), None)
        why = f"{short(unit)} is no unit" if fits is None else f"which is {fits}"
        raise MalformedError(f"found {short(text)}, {why}; {allowed}")
    value = math.floor(Fraction(number) * factor + Fraction(1, 2))
    if value > MAX_QUANTITY:
        raise MalformedError(f"found {short(text)}; at most {MAX_QUANTITY} {counted}")
    return value


def numbers_for_texts(tree: Any) -> Any:
    """Return plain data with every text in a quantity's field replaced by its number.

    Lists and objects below such a field (`times_ns`) are of its dimension too. What a plan keeps
    for itself (`search`, `baselines`) and its words are left as they are.

    Raises MalformedError, naming the field.
    """
    return _numbers(tree, "", None)


def _numbers(value: Any, path: str, dimension: Dimension | None) -> Any:
    if isinstance(value, dict):
        return {
            key: below
            if key in ("search", "baselines", "actions", "offload") and dimension is None
            else _numbers(
                below,
                f"{path}.{short(key, 40)[1:-1]}".removeprefix("."),
                dimension or dimension_of(key),
            )
            for key, below in value.items()
        }
    if isinstance(value, list):
        return [
            _numbers(below, f"{path}[{index}]", dimension) for index, below in enumerate(value)
        ]
    if isinstance(value, str) and dimension is not None:
        try:
            return parse_quantity(value, dimension)
        except MalformedError as error:
            raise MalformedError(f"{path}: {error}") from None
    return value
