"""Reading and writing the contract's files.

A source is a path, a path into a file (`case.json#caps.p.cluster`), the name of a workload or
cluster that comes with octotune, or, for clusters, a number of equal devices. Files are JSON, or
YAML where the name ends so.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
from errno import EISDIR
from pathlib import Path
from typing import Any

import msgspec

from octotune.contract.cluster import Cluster
from octotune.contract.form import T, decode, descend
from octotune.contract.plan import Plan
from octotune.contract.quantities import short
from octotune.contract.workload import Workload
from octotune.errors import MalformedError

MAX_FILE_BYTES = 1 << 28
MAX_EQUAL_DEVICES = 1 << 16

_DATA = Path(__file__).parent.parent / "data"
_BUNDLED: tuple[type, ...] = (Workload, Cluster)
_LINE = 99
_ENTRY = 600


def read_workload(source: str | Path) -> Workload:
    """Read a workload: a path, a path into a file, or the name of a bundled one.

    Raises MalformedError: one line that names file, field, what was found and what is allowed.
    """
    return _read(source, Workload)


def read_cluster(source: str | Path | int) -> Cluster:
    """Read a cluster: a path, a path into a file, the name of a bundled one, or a number.

    A number N is N equal devices, with free links and no memory limit.

    Raises MalformedError: one line that names file, field, what was found and what is allowed.
    """
    text = str(source)
    if re.fullmatch(r"-?[0-9]+", text):
        if len(text) > 9 or not 1 <= int(text) <= MAX_EQUAL_DEVICES:
            raise MalformedError(
                f"cluster: found {text[:40]} devices; allowed: 1 to {MAX_EQUAL_DEVICES}"
            )
        return Cluster.equal(int(text))
    return _read(text, Cluster)


def read_plan(source: str | Path) -> Plan:
    """Read a plan: a path, or a path into a file.

    Raises:
        MalformedError: if its form is wrong.
        BrokenPlanError: if its stages, devices or rows break a rule. Its orders are not looked
            at: `octotune.check` does that.
    """
    return _read(source, Plan)


def read_file(source: str | Path, kind: type[T]) -> T:
    """Read a file of a kind that `octotune.contract.form.add_header` made known.

    Raises MalformedError, and BrokenPlanError where the file holds a plan that breaks a rule.
    """
    return _read(source, kind)


def format_of(source: str | Path) -> str:
    """Return the `format` that a JSON file says it has, or "" where it cannot be told."""
    text = str(source)
    file, _, path = (text, "", "") if _exists(text) else text.partition("#")
    try:
        if not Path(file).is_file():  # what a pipe holds can be read once only
            return ""
        raw = _read_bytes(Path(file)).removeprefix(b"\xef\xbb\xbf")
        return msgspec.json.decode(descend(raw, path, text) if path else raw, type=_Format).format
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError, _TooLargeError):
        return ""


class _Format(msgspec.Struct):
    format: str = ""


def bundled(kind: type[Workload] | type[Cluster]) -> tuple[str, ...]:
    """Return the names of the workloads or clusters that come with octotune."""
    return tuple(sorted(path.stem for path in _folder(kind).iterdir()))


def write_json(value: msgspec.Struct, path: str | Path) -> None:
    """Write a value as JSON, whole or not at all.

    Rows of actions and single layers stand on a line each. Raises OSError.
    """
    write_whole(f"{_formatted(_plain(value))}\n".encode(), path)


def write_whole(text: bytes, path: str | Path) -> None:
    """Write a file whole or not at all: to one beside the target, then in its place.

    Raises OSError, which names the file.
    """
    try:
        _write_whole(text, *_target_and_beside(path))
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _write_whole(text: bytes, target: Path, beside: Path | None) -> None:
    if beside is None:
        target.write_bytes(text)
        return
    with beside.open("xb") as file:
        try:
            file.write(text)
            file.flush()
            beside.replace(target)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


def refuse_unwritable(path: str | Path) -> None:
    """Raise MalformedError where `write_json` could not write: best known before a long search."""
    try:
        target, beside = _target_and_beside(path)
        if target.is_dir():
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        if beside is not None:
            beside.touch(exist_ok=False)
            beside.unlink()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise MalformedError(f"{short(str(path), 200)[1:-1]}: cannot be written: {why}") from None


def _target_and_beside(path: str | Path) -> tuple[Path, Path | None]:
    """Return where to write in the end and at first; None for /dev/stdout and the like."""
    target = Path(path).resolve()
    special = target.exists() and not target.is_file()
    return target, None if special else target.with_name(f".{target.name}.{os.getpid()}")


def _folder(kind: type) -> Path:
    return _DATA / f"{kind.__name__.lower()}s"


def _read(source: str | Path, kind: type[T]) -> T:
    text = str(source)
    file, path = text, ""
    if "#" in text and not _exists(text):
        file, _, path = text.partition("#")
    named = None
    if kind in _BUNDLED and re.fullmatch(r"[\w.-]+", file):
        named = next((p for p in _folder(kind).iterdir() if p.stem == file), None)
    place = named or Path(file)
    shown = short(text, 200)[1:-1]
    try:
        raw = _read_bytes(place)
    except FileNotFoundError:
        raise MalformedError(f"{shown}: no such file{_suggestion(file, kind)}") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise MalformedError(f"{shown}: cannot be read: {why}") from None
    except _TooLargeError as error:
        raise MalformedError(f"{shown}: {error}") from None
    if place.suffix.lower() in (".yaml", ".yml"):
        from octotune.contract.yaml_tree import yaml_to_json

        raw = yaml_to_json(raw, shown)
    else:
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    if path:
        raw = descend(raw, path, shown)
    return decode(raw, kind, shown)


class _TooLargeError(Exception):
    pass


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def _read_bytes(path: Path) -> bytes:
    """Return a file's bytes. Pipes are read as well, but no more than a file may hold."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode) and size > MAX_FILE_BYTES:
            raise _TooLargeError(f"found {size} bytes; allowed: at most {MAX_FILE_BYTES}")
        raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise _TooLargeError(f"found more than {MAX_FILE_BYTES} bytes; that is the most allowed")
    return raw


def _suggestion(file: str, kind: type[T]) -> str:
    if kind not in _BUNDLED or not re.fullmatch(r"[\w.-]+", file):
        return ""
    names = [path.stem for path in _folder(kind).iterdir()]
    near = difflib.get_close_matches(file[:60].lower(), names, n=1)
    what = kind.__name__.lower()
    if near:
        return f", and no bundled {what}; did you mean {near[0]}?"
    return f", and no bundled {what}; there are {', '.join(sorted(names))}"


def _plain(value: Any) -> Any:
    """Return structs as plain data. What is None or unset is left out: absent means the same."""
    if isinstance(value, msgspec.Struct):
        fields = ((name, getattr(value, name)) for name in value.__struct_fields__)
        return {
            name: _plain(below)
            for name, below in fields
            if below is not None and below is not msgspec.UNSET
        }
    if isinstance(value, (tuple, list)):
        return [_plain(below) for below in value]
    if isinstance(value, dict):
        return {key: below if below is None else _plain(below) for key, below in value.items()}
    return value


def _formatted(value: Any, indent: str = "") -> str:
    """Return JSON for people: what is flat or short, and each entry of a list, on a line."""
    if _is_flat(value):
        return _dumps(value)
    deeper = f"{indent} "
    if isinstance(value, dict):
        opening, closing = "{}"
        parts = [f"{_dumps(key)}: {_formatted(child, deeper)}" for key, child in value.items()]
        line = f"{{{', '.join(parts)}}}"
        if len(line) + len(indent) <= _LINE and "\n" not in line:
            return line
    else:
        opening, closing = "[]"
        parts = [
            line if len(line := _dumps(child)) < _ENTRY or _is_flat(child) else
            _formatted(child, deeper)
            for child in value
        ]  # fmt: skip
        if len(parts) == 1 and len(parts[0]) + len(indent) <= _LINE:
            return f"[{parts[0]}]"
    inner = f",\n{deeper}".join(parts)
    return f"{opening}\n{deeper}{inner}\n{indent}{closing}"


def _is_flat(value: Any) -> bool:
    if not isinstance(value, (dict, list)):
        return True
    children = value.values() if isinstance(value, dict) else value
    return not any(child and isinstance(child, (dict, list)) for child in children)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
