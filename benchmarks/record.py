"""Records: what every benchmark leaves behind, so that its numbers can be read and repeated.

A benchmark answers one question. It makes a `Record` (the question, tables, what they show and
what they do not) and calls `write`, which adds where and with what it ran and leaves two files in
`benchmarks/results/`: `<benchmark>_<workload>_<hardware>_<yyyy-mm>.md` to read and the same with
`.json` to compare by program. A second run in the same month on the same hardware replaces both.

`alternate` times several functions in turns, so that a machine that slows down for a while slows
all of them and ratios stay fair.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"

Cell = str | int | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells under named columns; units belong in the columns' names."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        for index, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.title!r}, row {index} has {len(row)} cells; "
                    f"there are {len(self.columns)} columns"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The answer of one run of one benchmark.

    `shows` and `does_not_show` are sentences: what a reader may and may not conclude. `notes`
    holds what the run depends on beside the machine: links, warmup, rounds, limits.
    """

    benchmark: str
    workload: str
    question: str
    command: str
    seed: int | None
    tables: tuple[Table, ...]
    shows: tuple[str, ...]
    does_not_show: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where and with what a benchmark ran."""

    commit: str
    date: str
    python: str
    versions: dict[str, str]
    cpu: str
    num_cores: int
    memory_gib: float
    accelerators: tuple[str, ...]
    system: str

    @property
    def hardware(self) -> str:
        """The hardware in one short word for file names: `2x-xeon-8488c`, `1x-h200`."""
        if self.accelerators:
            return f"{len(self.accelerators)}x-{_slug(self.accelerators[0])}"
        return f"{self.num_cores}x-{_slug(self.cpu)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Measured seconds of one function, the warmup left out."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> str:
        """Least and most, relative to the median: `-2% +5%`."""
        low, high = min(self.seconds) / self.median - 1, max(self.seconds) / self.median - 1
        return f"{low:+.0%} {high:+.0%}"


def alternate(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time functions in turns, each once a round; return their timings by name.

    Args:
        functions: what to time; each call is one measurement.
        rounds: how many measured calls each gets, at least 1.
        warmup: how many calls each gets before, unmeasured.
        clock: seconds; `time.process_time` leaves out what other processes take, for work that
            keeps one core busy.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warmup + rounds):
        for name, function in functions.items():
            begin = clock()
            function()
            took = clock() - begin
            if turn >= warmup:
                seconds[name].append(took)
    return {name: Timing(seconds=tuple(values)) for name, values in seconds.items()}


def command(benchmark: str, arguments: Sequence[str]) -> str:
    """Return the command that repeats a run."""
    return " ".join(["python -m benchmarks", benchmark, *arguments])


def environment() -> Environment:
    """Look at the machine, the libraries and the commit."""
    return Environment(
        commit=_commit(),
        date=datetime.date.today().isoformat(),
        python=platform.python_version(),
        versions={name: version for name in _LIBRARIES if (version := _version(name)) is not None},
        cpu=_cpu(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        accelerators=_accelerators(),
        system=platform.system(),
    )


def write(
    record: Record, where: Environment | None = None, folder: Path = RESULTS
) -> tuple[Path, Path]:
    """Write a record as Markdown and JSON; return both paths.

    Args:
        record: what was asked and found.
        where: the environment of the run; this process's by default.
        folder: the folder of the two files.
    """
    where = environment() if where is None else where
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{record.benchmark}_{_slug(record.workload)}_{where.hardware}_{where.date[:7]}"
    markdown, data = folder / f"{name}.md", folder / f"{name}.json"
    markdown.write_text(to_markdown(record, where), encoding="utf-8")
    content = {"record": asdict(record), "environment": asdict(where)}
    data.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return markdown, data


def to_markdown(record: Record, where: Environment) -> str:
    """Return a record as a page."""
    libraries = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    hardware = f"{where.cpu}, {where.num_cores} cores, {where.memory_gib} GiB"
    if where.accelerators:
        hardware += "; " + ", ".join(where.accelerators)
    lines = [
        f"# {record.question}",
        "",
        f"- command: `{record.command}`",
        f"- commit: {where.commit}, date: {where.date}, "
        f"seed: {'none' if record.seed is None else record.seed}",
        f"- hardware: {hardware}; {where.system}",
        f"- versions: python {where.python}, {libraries}",
        f"- workload: {record.workload}",
        *(f"- {note}" for note in record.notes),
    ]
    for table in record.tables:
        lines += ["", f"## {table.title}", "", _line(table.columns)]
        lines.append(_line(tuple(_rule(table, index) for index in range(len(table.columns)))))
        lines += [_line(tuple(_text(cell) for cell in row)) for row in table.rows]
    lines += ["", "## What it shows", "", *(f"- {sentence}" for sentence in record.shows)]
    lines += ["", "## What it does not show", ""]
    lines += [f"- {sentence}" for sentence in record.does_not_show]
    return "\n".join(lines) + "\n"


_LIBRARIES = ("numpy", "numba", "ortools", "networkx", "optuna", "msgspec", "torch")


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _rule(table: Table, column: int) -> str:
    """Numbers stand to the right."""
    cells = [row[column] for row in table.rows if row[column] is not None]
    return "---:" if cells and all(isinstance(cell, int | float) for cell in cells) else "---"


def _text(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    if isinstance(cell, int) and abs(cell) >= 10_000:
        return f"{cell:,}"
    return str(cell)


def _slug(text: str) -> str:
    """Return text as a file name's part, without what every processor is called."""
    text = re.sub(r"\((r|tm)\)|\bcpu\b|\bprocessor\b|@.*|\d+-core", " ", text.lower())
    text = re.sub(r"\b(intel|amd|nvidia)\b", " ", text)
    return re.sub(r"[^a-z0-9.]+", "-", text).strip("-.") or "unknown"


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _commit() -> str:
    """Return the commit, and whether code differs from it."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    if commit is None:
        return "unknown: no git repository"
    packages = ("simulator", "octotune", "executor", "benchmarks/*.py")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *packages)
    return f"{commit} and changes not committed" if changed else commit


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = re.findall(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return names[0].strip() if names else platform.machine()


def _accelerators() -> tuple[str, ...]:
    """Name the accelerators, where torch is already loaded: a benchmark without it uses none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ()
    return tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
