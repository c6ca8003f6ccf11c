"""Compiled functions whose cache knows all the sources they were compiled from.

numba keeps compiled code beside the source and compiles again when that file changes, but not when
a kernel changes that was inlined from another file: the search would go on with the old one. So
the stamp of every kernel here is made of all the modules of this package.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., object])


def _stamp() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        text = path.read_bytes()
        if b"@kernel" in text or path.name in ("genome.py", "problem.py"):
            digest.update(text)
    return digest.hexdigest()


STAMP = _stamp()


def kernel(function: Function) -> Function:
    """Compile on first use, without the interpreter lock, cached on disk."""
    compiled: Any = njit(cache=True, nogil=True)(function)
    # numba has no public way to widen the stamp; without this attribute there is nothing to widen
    file = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if file is not None:
        file._source_stamp = STAMP
    return compiled  # type: ignore[no-any-return]
