"""How tables look."""

from __future__ import annotations

from rich import box
from rich.table import Table


def plain_table(title: str) -> Table:
    """Return a table without frames."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0),
        header_style="dim",
    )
