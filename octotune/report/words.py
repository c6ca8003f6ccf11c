"""Numbers as people read them."""

from __future__ import annotations

from octotune.contract.cluster import UNLIMITED_BYTES

NOTHING = "·"

_TIMES = ((10**9, "s"), (10**6, "ms"), (10**3, "us"))
_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def duration(time_ns: float) -> str:
    """Return a time with its unit: `12.34 ms`. Below 1 us it is exact."""
    for factor, unit in _TIMES:
        if abs(time_ns) >= factor:
            return f"{_digits(time_ns / factor)} {unit}"
    return f"{time_ns:.0f} ns"


def milliseconds(time_ns: float) -> str:
    """Return a time in ms, without the unit, for columns that are compared: `12.34`."""
    return NOTHING if time_ns == 0 else _digits(time_ns / 10**6)


def size(num_bytes: float) -> str:
    """Return bytes with their unit: `12.3 GiB`. Below 1 KiB they are exact."""
    for factor, unit in _SIZES:
        if abs(num_bytes) >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def limit(num_bytes: int) -> str:
    """Return a memory limit, or that there is none."""
    return "none" if num_bytes >= UNLIMITED_BYTES else size(num_bytes)


def share(part: float, whole: float) -> str:
    """Return a share in %, without the sign: `12.3`."""
    if whole == 0 or part == 0:
        return NOTHING
    percent = 100 * part / whole
    return f"{percent:.1f}" if abs(percent) >= 0.05 else "<0.1"


def percent(part: float, whole: float) -> str:
    """Return a share with its sign: `12.3 %`."""
    return f"{100 * part / whole:.1f} %" if whole else "0.0 %"


def above(step_ns: int, bound_ns: int) -> str:
    """Return how far a step is above a bound: `4.2 % above`."""
    if bound_ns <= 0:
        return "no use as a bound"
    if step_ns == bound_ns:
        return "reached: no plan is faster"
    gap = 100 * (step_ns / bound_ns - 1)
    if gap < 0:
        return f"wrong: {-gap:.3g} % above the step"
    return f"the step is {gap:.2f} % above" if gap >= 0.005 else "the step is <0.01 % above"


def count(number: int, thing: str) -> str:
    """Return a number of things: `1 stage`, `16 stages`."""
    ending = "" if number == 1 else "es" if thing.endswith("ch") else "s"
    return f"{number:,} {thing}{ending}"


def _digits(value: float) -> str:
    """Return four significant digits, without an exponent."""
    magnitude = abs(value)
    decimals = 0 if magnitude >= 1000 else 1 if magnitude >= 100 else 2 if magnitude >= 10 else 3
    return f"{value:,.{decimals}f}"
