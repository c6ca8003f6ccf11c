"""Compiled functions whose cache knows all the sources they were compiled from.

numba keeps compiled code beside the source and compiles again when that file changes, but not when
something changes that was taken from another file: a kernel that was inlined, a constant, the
fields of a tuple. The old code would go on running. So the stamp of a kernel here is made of its
own file and of every file from which, at first or second hand, a kernel in it takes a name.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., object])

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("simulator", "octotune")

KERNELS: list[Any] = []
"""Every kernel that has been imported, as numba's dispatcher."""


def kernel(function: Function) -> Function:
    """Compile on first use, without the interpreter lock, cached on disk."""
    compiled: Any = njit(cache=True, nogil=True)(function)
    KERNELS.append(compiled)
    # numba has no public way to widen the stamp; without this attribute there is nothing to widen
    file = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if file is not None:
        module = sys.modules[function.__module__]
        assert module.__file__ is not None
        file._source_stamp = stamp(Path(module.__file__).resolve())
    return compiled  # type: ignore[no-any-return]


def num_cold() -> int:
    """Return how many of the imported kernels the cache on disk does not hold."""
    return sum(not _is_cached(compiled) for compiled in KERNELS)


def _is_cached(compiled: Any) -> bool:
    if compiled.signatures:
        return True
    file = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    return file is not None and bool(file._load_index())


@cache
def stamp(path: Path) -> str:
    """Return a digest of all the sources that the kernels of one file are made of."""
    digest = hashlib.sha256()
    for source in sorted(sources(path)):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def sources(path: Path) -> set[Path]:
    """Return the file, and every file from which its kernels take names, at any remove."""
    found, waiting = {path}, [path]
    while waiting:
        for other in _taken_from(waiting.pop()):
            if other not in found:
                found.add(other)
                waiting.append(other)
    return found


@cache
def _taken_from(path: Path) -> frozenset[Path]:
    tree = ast.parse(path.read_bytes())
    kernels = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(mark, ast.Name) and mark.id == "kernel" for mark in node.decorator_list)
    ]
    used = {
        name.id for node in kernels for name in ast.walk(node) if isinstance(name, ast.Name)
    } - {"kernel"}
    # a tuple's fields or a constant may be made of other names of the file: all those count
    others = [
        node
        for node in tree.body
        if isinstance(node, ast.Assign)
        or (
            isinstance(node, ast.ClassDef)
            and any(isinstance(base, ast.Name) and base.id == "NamedTuple" for base in node.bases)
        )
    ]
    used |= {name.id for node in others for name in ast.walk(node) if isinstance(name, ast.Name)}
    files = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module.partition(".")[0] not in _PACKAGES:
                continue
            if any((alias.asname or alias.name) in used for alias in node.names):
                file = _ROOT / Path(*node.module.split("."))
                package = file / "__init__.py"
                files.add(package if package.is_file() else file.with_suffix(".py"))
    return frozenset(files)
