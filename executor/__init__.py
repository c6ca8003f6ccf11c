"""Makes a plan happen: the library call is `Pipeline`, the command `python -m executor`.

`weight_queue` is for user autograd.Functions that want their weight gradients put off to W;
`settle` gives a rank on CPUs its cores, as the command does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executor.backward import weight_queue
    from executor.errors import MismatchError, PeerError, StepError
    from executor.host import settle
    from executor.pipeline import Pipeline

__all__ = ["MismatchError", "PeerError", "Pipeline", "StepError", "settle", "weight_queue"]

_HOMES = {
    "MismatchError": "executor.errors",
    "PeerError": "executor.errors",
    "Pipeline": "executor.pipeline",
    "StepError": "executor.errors",
    "settle": "executor.host",
    "weight_queue": "executor.backward",
}


def __getattr__(name: str) -> Any:
    """Load what is asked for when it is asked for: torch takes a second to import."""
    if name not in _HOMES:
        raise AttributeError(f"module 'executor' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
