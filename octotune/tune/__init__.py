"""The tuner: `tune` searches partition, placement and schedule together."""

from octotune.tune.loop import tune

__all__ = ["tune"]
