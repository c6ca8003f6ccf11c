"""How the search's kernels are compiled: see `simulator.compiled`."""

from simulator.compiled import kernel

__all__ = ["kernel"]
