"""Measure a fill job alone: time and memory of each micro-step, for each configuration.

    configurations = profile_job(make, kind="training", batch_sizes=(4, 8))
    python -m executor.fill.profile my_jobs.py:make --kind training --samples 4096 -o jobs.yaml

Each configuration's job is made, set up and run alone for some passes, on one thread as a rank
has. A micro-step's time is the median of its passes; its memory the most bytes of tensors that are
alive while it runs, and what stays between passes is resident. On CUDA the allocator tells; on a
CPU storages are counted as operators touch them, so bytes outside of torch are not seen.
"""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor.fill.task import find_factory, make_task
from executor.fill.work import Work
from octotune.errors import MalformedError
from octotune.fill.jobs import Configuration, FillJob, JobKind, MicroStep, Technique

_WARMUP = 2
_BURST_NS = 15_000_000
TECHNIQUES: tuple[Technique, ...] = ("none", "checkpointing", "offload")


class _Counter(TorchDispatchMode):
    """Counts the bytes of all storages that operators have touched and that are still alive."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._device.type:
                storage = leaf.untyped_storage()
                self._known[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.alive())
        return out

    def alive(self) -> int:
        """Return the bytes that are alive now."""
        gone = [key for key, (ref, _) in self._known.items() if ref.expired()]
        for key in gone:
            del self._known[key]
        return sum(num_bytes for _, num_bytes in self._known.values())


class _Memory:
    """Peaks of tensors' bytes on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._counter = _Counter(device)
        self._base = torch.cuda.memory_allocated(device) if self._cuda else 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        with contextlib.nullcontext() if self._cuda else self._counter:
            yield

    def begin(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._counter.peak = self.alive()

    def peak(self) -> int:
        if self._cuda:
            return int(torch.cuda.max_memory_allocated(self._device)) - self._base
        return self._counter.peak

    def alive(self) -> int:
        if self._cuda:
            return int(torch.cuda.memory_allocated(self._device)) - self._base
        return self._counter.alive()


def profile_configuration(
    make: Callable[[Configuration], Any],
    configuration: Configuration,
    *,
    name: str = "job",
    device: torch.device | None = None,
    passes: int = 8,
    threads: int = 1,
    seed: int = 0,
    rest_s: float = 0.0,
) -> Configuration:
    """Return a configuration with its micro-steps measured.

    Args:
        make: gives a new task for a configuration.
        configuration: its batch size and technique; its micro-steps are not looked at.
        name: of the job, for what is wrong.
        device: where to run; by default the CPU.
        passes: that are timed, after two that are not and one that counts memory.
        threads: of torch, as ranks will have.
        seed: of the job's random numbers.
        rest_s: sleep so long after every 15 ms of work: in a bubble, too, caches are cold.

    Raises:
        MalformedError: if the job raises; one line.
    """
    device = torch.device("cpu") if device is None else device
    task = make(configuration)
    num = getattr(task, "num_micro_steps", 1)
    names = getattr(task, "micro_step_names", None) or [""] * num
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    work = Work(name, task, [1] * num, device=device, seed=seed)
    try:
        memory = _Memory(device)
        with memory.counting():
            work.setup()
            _refuse(work)
            for _ in range(_WARMUP):
                _one_pass(work, num)
            gc.collect()
            resident = memory.alive()
            peaks, carried = _count(work, num, memory, resident)
        times: list[list[int]] = [[] for _ in range(num)]
        for _ in range(passes):
            for k, took in enumerate(_one_pass(work, num, rest_s)):
                times[k].append(took)
        made = work.counts.samples / max(1, work.counts.passes)
    finally:
        work.close()
        torch.set_num_threads(before)
    return Configuration(
        name=configuration.name,
        batch_size=max(1, round(made)),
        technique=configuration.technique,
        resident_bytes=resident,
        carried_bytes=carried,
        micro_steps=tuple(
            MicroStep(
                name=names[k],
                time_ns=max(1, round(statistics.median(times[k]))),
                memory_bytes=max(peaks[k], resident),
            )
            for k in range(num)
        ),
    )


def _one_pass(work: Work, num: int, rest_s: float = 0.0) -> list[int]:
    """Run a pass as in one long bubble; what lies between two micro-steps counts, too."""
    took = []
    if rest_s:
        time.sleep(rest_s)
    with work.world():
        before = burst = time.perf_counter_ns()
        for _ in range(num):
            if rest_s and before - burst > _BURST_NS:
                time.sleep(rest_s)
                before = burst = time.perf_counter_ns()
            k = work.next_of_one_pass()
            _, ended = work.run(k)
            _refuse(work)
            work.note_in_time()
            took.append(ended - before)
            before = ended
    return took


def _count(work: Work, num: int, memory: _Memory, resident: int) -> tuple[list[int], int]:
    """Return the peak of each micro-step, and the most that an open pass adds between two."""
    peaks, carried = [], 0
    for k in range(num):
        memory.begin()
        with work.world():
            work.run(k)
        _refuse(work)
        peaks.append(memory.peak())
        if k + 1 < num:
            carried = max(carried, memory.alive() - resident)
    return peaks, carried


def _refuse(work: Work) -> None:
    if work.failure is not None:
        raise MalformedError(f"job {work.name!r}: {work.failure}")


def profile_job(
    make: Callable[..., Any],
    *,
    name: str = "job",
    batch_sizes: Sequence[int] = (1,),
    techniques: Sequence[Technique] = ("none",),
    device: torch.device | None = None,
    passes: int = 8,
    threads: int = 1,
) -> tuple[Configuration, ...]:
    """Return a job's configurations, measured: each batch size with each technique.

    Args:
        make: `(batch_size, technique) -> task`.
        name: of the job, for what is wrong.
        batch_sizes: to try.
        techniques: to try.
        device: as in `profile_configuration`.
        passes: as in `profile_configuration`.
        threads: as in `profile_configuration`.
    """
    return tuple(
        profile_configuration(
            lambda c: make(batch_size=c.batch_size, technique=c.technique),
            Configuration(batch_size=size, technique=technique, micro_steps=(_ONE,)),
            name=name,
            device=device,
            passes=passes,
            threads=threads,
        )
        for size in batch_sizes
        for technique in techniques
    )


_ONE = MicroStep(time_ns=1)


def profiled(
    job: FillJob,
    *,
    device: torch.device | None = None,
    passes: int = 8,
    threads: int = 1,
    rest_s: float = 0.0,
) -> FillJob:
    """Return a job of a jobs file with its configurations measured where it will run.

    Its factory is called for each configuration's batch size and technique.
    """
    import msgspec

    return msgspec.structs.replace(
        job,
        configurations=tuple(
            profile_configuration(
                lambda c: make_task(job, c),
                configuration,
                name=job.name,
                device=device,
                passes=passes,
                threads=threads,
                rest_s=rest_s,
            )
            for configuration in job.configurations
        ),
    )


# --- the command ---------------------------------------------------------------------------------


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("factory")
@click.option("--name", default="mine", show_default=True)
@click.option("--kind", type=click.Choice(["inference", "training"]), default="inference")
@click.option("--samples", required=True, type=click.IntRange(min=1), help="How many to make.")
@click.option("--arguments", default="{}", help="For the factory, a JSON object.")
@click.option("--batch-sizes", default="1", help="To try: 1,2,4.")
@click.option("--techniques", default="none", help="To try: none,checkpointing,offload.")
@click.option("--device", "device_name", default="cpu", show_default=True)
@click.option("--passes", default=8, show_default=True, type=click.IntRange(min=1))
@click.option("--untrusted", is_flag=True, help="It shall run in a process of its own.")
@click.option("-o", "--output", required=True, help="A jobs file, YAML or JSON; added to.")
def command(
    factory: str,
    name: str,
    kind: JobKind,
    samples: int,
    arguments: str,
    batch_sizes: str,
    techniques: str,
    device_name: str,
    passes: int,
    untrusted: bool,
    output: str,
) -> None:
    """Measure the job that FACTORY (module:function or file.py:function) makes, and write it."""
    find_factory(factory, "FACTORY")
    try:
        given = json.loads(arguments)
        sizes = [int(size) for size in batch_sizes.split(",")]
    except ValueError as error:
        raise MalformedError(f"--arguments or --batch-sizes: {error}") from None
    if not isinstance(given, dict):
        raise MalformedError(f"--arguments is {arguments}; write a JSON object")
    tried: list[Any] = techniques.split(",")
    try:
        job = FillJob(
            name=name,
            kind=kind,
            samples=samples,
            factory=factory,
            arguments=given,
            trusted=not untrusted,
            configurations=tuple(
                _checked(Configuration(batch_size=size, technique=technique, micro_steps=(_ONE,)))
                for size in sizes
                for technique in tried
            ),
        )
    except ValueError as error:
        raise MalformedError(f"--batch-sizes or --techniques: {error}") from None
    measured = profiled(job, device=torch.device(device_name), passes=passes)
    add_to_file(measured, Path(output))
    for configuration in measured.configurations:
        click.echo(
            f"{name}, batch {configuration.batch_size}, {configuration.technique}: "
            f"{len(configuration.micro_steps)} micro-steps, {configuration.pass_ns / 1e6:.2f} ms "
            f"a pass, the longest {max(s.time_ns for s in configuration.micro_steps) / 1e6:.2f} "
            f"ms, {configuration.peak_bytes / 2**20:.1f} MiB"
        )


def _checked(configuration: Configuration) -> Configuration:
    """Return a configuration if a file could hold it; a ValueError says why not."""
    import msgspec

    return msgspec.convert(msgspec.to_builtins(configuration), Configuration)


def add_to_file(job: FillJob, path: Path) -> None:
    """Write a job into a jobs file, in place of the one of its name if there is one."""
    import msgspec
    import yaml

    from octotune.contract.files import read_file
    from octotune.fill.jobs import FillJobs

    jobs = list(read_file(path, FillJobs).jobs) if path.exists() else []
    jobs = [each for each in jobs if each.name != job.name] + [job]
    content = msgspec.to_builtins(FillJobs(jobs=tuple(jobs)))
    content["jobs"] = [{k: v for k, v in row.items() if v is not None} for row in content["jobs"]]
    if path.suffix == ".json":
        path.write_text(json.dumps(content, indent=1) + "\n")
    else:
        path.write_text(yaml.safe_dump(content, sort_keys=False))


def main() -> int:
    """Run the command; return the exit status."""
    import sys

    try:
        command.main(standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        print(f"executor.fill.profile: {error.format_message()}", file=sys.stderr)
        return 2
    except (ValueError, RuntimeError) as error:
        print(f"executor.fill.profile: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
