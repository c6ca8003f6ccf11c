"""Say on stderr what a long phase of a benchmark is doing, as a terminal or a file can show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def busy(text: str) -> Iterator[Callable[[str], Any]]:
    """Say what is going on, with a spinner if stderr is a terminal; gives what adds a remark."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(text) as status:
            yield lambda remark: status.update(f"{text}: {remark}")
    else:
        console.print(f"{text} ...", highlight=False)
        yield lambda _: None


@contextmanager
def bar(text: str, total: int) -> Iterator[Callable[[int], Any]]:
    """A bar on stderr if that is a terminal, else one line that says what is going on."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"{text}: {total} steps ...", highlight=False)
        yield lambda _: None
        return
    shown = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    with shown:
        task = shown.add_task(text, total=total)
        yield lambda done: shown.update(task, completed=done)
