"""The search's own parameters. `python -m benchmarks tune_settings` looks for better ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Temperatures are parts of the step; shares are parts of the budget or of the trials."""

    num_walks: int = 16
    num_patterns: int = 4  # of the walks, where memory binds
    num_polishes: int = 4
    polish_share: float = 0.15  # of a cycle at most, where memory does not bind
    polish_share_binding: float = 0.25
    polish_share_large: float = 0.7  # where an evaluation takes long
    num_tightened: int = 2  # plans justified beside the polishes; where evaluations are long, all
    walk_hot: float = 0.006
    walk_cold: float = 0.0005
    polish_hot: float = 0.0004
    polish_hot_binding: float = 0.002
    polish_cold: float = 0.00002
    structure_share: float = 0.032  # of a polish's evaluations
    structure_share_binding: float = 0.032
    # a plan with fewer stages is preferred where its step is this close to the best
    stage_tolerance: float = 0.005


SETTINGS = Settings()
