"""A profiled workload as a table: times, saved bytes, and how much of them may leave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table

from octotune.report.fill import console
from octotune.report.offload import print_host_link
from octotune.report.style import plain_table
from octotune.report.words import milliseconds, share, size

if TYPE_CHECKING:
    from octotune.contract import Workload


def shares(workload: Workload) -> list[dict[str, Any]]:
    """Return the bytes each layer saves, and what part of them may leave; null where none are."""
    rows = []
    for layer in workload.layers:
        saved = layer.saved_bytes + layer.saved_w_bytes
        rows.append(
            {
                "name": layer.name,
                "saved_bytes": saved,
                "offloadable_bytes": layer.offloadable_bytes,
                "offloadable_share": layer.offloadable_bytes / saved if saved else None,
            }
        )
    return rows


def profile_table(workload: Workload) -> Table:
    """Return one row a layer."""
    table = plain_table(f"Profile of {workload.name}")
    table.add_column("layer", no_wrap=True)
    for name in ("F ms", "I ms", "W ms", "state", "saved", "may leave", "share %"):
        table.add_column(name, justify="right", no_wrap=True)
    for layer, row in zip(workload.layers, shares(workload), strict=True):
        table.add_row(
            layer.name,
            milliseconds(layer.forward_ns),
            milliseconds(layer.input_grad_ns),
            milliseconds(layer.weight_grad_ns),
            size(layer.state_bytes),
            size(row["saved_bytes"]),
            size(row["offloadable_bytes"]),
            share(row["offloadable_bytes"], row["saved_bytes"]),
        )
    return table


def print_profile(workload: Workload, link: Mapping[str, float] | None = None) -> None:
    """Print a profiled workload, and the host link where it was measured."""
    console().print(profile_table(workload))
    if link is not None:
        print_host_link(link)
