"""Where costs come from: a model's layers, measured on this machine (`profile`)."""

from octotune.model.profile import profile

__all__ = ["profile"]
