"""Lower bounds of a step: how far from the best a plan can still be.

`fixed` bounds all orders for one partition and placement, `joint` all plans of a workload on a
cluster. Both hold for every plan that the contract admits; whatever is relaxed is relaxed towards
less time, and integers are rounded so that a bound is never above what it bounds.
"""

from octotune.bounds.value import Bound

__all__ = ["Bound"]
