"""How short is a step when activations may leave, and how little memory does it take?

Parts, each a record of its own:
  uniform   equal stages against the published scheduler's table, at its peaks as memory limits
  linear    how the peak falls with the number of stages that leave
  uneven    two hybrids within 60, 45 and 35 % of 1F1B's activations: recompute, offload, both
  models    memory and throughput of the published models, from their shapes
  trips     what full offload costs as a round trip takes longer than the compute
"""

from __future__ import annotations

import argparse

from benchmarks.offload_equal import linear, trips, uniform
from benchmarks.offload_models import models
from benchmarks.offload_uneven import uneven
from octotune.offload.planning import warm_up_paging

PARTS = {
    "uniform": uniform,
    "linear": linear,
    "uneven": uneven,
    "models": models,
    "trips": trips,
}


def main(arguments: list[str]) -> None:
    """Run one part, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks offload_planning")
    parser.add_argument("part", choices=(*PARTS, "all"))
    parser.add_argument("cases", nargs="*", help="of uniform or uneven; all by default")
    parser.add_argument("--seconds", type=float, default=20.0, help="of search a point")
    parser.add_argument("--tune-seconds", type=float, default=60.0, help="of each tuner run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    options.arguments = arguments
    warm_up_paging()
    for name, part in PARTS.items():
        if options.part in (name, "all"):
            part(options)
