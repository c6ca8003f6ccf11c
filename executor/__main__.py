"""The command `torchrun --nproc-per-node N -m executor`: run a plan on a model for some steps.

The only reader of torchrun's environment. Whatever goes wrong, every rank leaves with the
contract's exit status and one rank prints one line.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from executor.errors import MismatchError, StepError
from executor.fill.command import Beside, FillSettings, fill_options
from octotune.contract import Plan, read_plan
from octotune.errors import MalformedError
from octotune.fill.outcome import FillOutcome
from octotune.offload.measured import MeasuredOffload

if TYPE_CHECKING:
    from executor.pipeline import Pipeline
    from executor.transport import Transport

# how long a rank that is done or failed waits for the others, so that torchrun sees each one's
# own exit status and does not stop them itself
_LEAVE_S = 5.0


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One step as measured, from the first rank's begin to the last one's end of the optimizer."""

    step_ns: int
    loss: float


class DeviceReport(msgspec.Struct, frozen=True, kw_only=True):
    """One device: its median busy time a step, and the most memory it held."""

    busy_ns: int
    peak_bytes: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`report.json` of the contract."""

    steps: list[StepReport]
    predicted_step_ns: int
    devices: list[DeviceReport]
    offload: list[MeasuredOffload] | msgspec.UnsetType = msgspec.UNSET  # of plans that offload
    fill: FillOutcome | msgspec.UnsetType = msgspec.UNSET  # of runs with fill jobs, docs/fill.md


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--plan", "plan_path", required=True, help="The plan's file.")
@click.option("--model", required=True, help="FILE.py:FACTORY or MODULE:FACTORY.")
@click.option("--steps", required=True, type=click.IntRange(min=0), help="Steps to run.")
@click.option("--seed", default=0, show_default=True, type=int)
@click.option("--report", type=click.Path(dir_okay=False), help="Write report.json here.")
@click.option("--trace", type=click.Path(dir_okay=False), help="Write a Chrome trace here.")
@click.option(
    "--float",
    "float_limit",
    type=click.Choice(["auto", "memory", "plan", "off"]),
    default="auto",
    show_default=True,
    help="How far weight gradients may leave the plan's order: to the device's memory, to the "
    "plan's own peak, or not at all; auto is plan where the plan offloads, else memory.",
)
@click.option(
    "--pin",
    type=click.Choice(["auto", "off"]),
    default="auto",
    show_default=True,
    help="Keep each CPU rank to cores of its own, where there is at least one for each.",
)
@click.option("--timeout", "timeout_s", default=300.0, show_default=True, help="Seconds a wait.")
@fill_options
def command(
    plan_path: str,
    model: str,
    steps: int,
    seed: int,
    report: str | None,
    trace: str | None,
    float_limit: Any,
    pin: Any,
    timeout_s: float,
    fill: FillSettings,
) -> None:
    """Run a plan: torchrun --nproc-per-node N -m executor --plan plan.json --model m.py:make."""
    run(
        plan_path=plan_path,
        model=model,
        steps=steps,
        seed=seed,
        report=report,
        trace=trace,
        float_limit=float_limit,
        pin=pin,
        timeout_s=timeout_s,
        fill=fill,
    )


def run(
    *,
    plan_path: str,
    model: str,
    steps: int,
    seed: int,
    report: str | None,
    trace: str | None,
    float_limit: Any,
    pin: Any,
    timeout_s: float,
    fill: FillSettings,
) -> None:
    """Build the pipeline, run it, write what was asked for. Raises what the ranks agreed on."""
    import torch

    from executor.agree import agree, gather
    from executor.pipeline import Pipeline

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    global _store
    transport, device = _connect(timeout_s, pin)
    _store = transport.store
    refused: Exception | None = None
    try:
        plan = read_plan(plan_path)
        _refuse_unwritable(report, trace, fill.picture)
        _seed_all(seed)
        layers, loss_fn, batches, optimizer_fn = load_model(model)
        rows = iter(batches)
    except ValueError as error:
        refused = error
    agree(transport, "octotune/load", refused, timeout_s)
    pipe = Pipeline(
        plan,
        layers,
        loss_fn,
        transport=transport,
        device=device,
        float_limit=float_limit,
        seed=seed,
        watch_saved=plan.offload is not None and any(plan.offload),
        timeout_s=timeout_s,
    )
    with pipe:
        optimizer = None
        parameters = list(pipe.parameters())
        try:
            if parameters:
                optimizer = (optimizer_fn or torch.optim.AdamW)(parameters)
        except Exception as error:
            words = f"{model}: optimizer_fn raised {_words(error)}"
            refused = MismatchError(words, transport.rank)
        agree(transport, "octotune/optimizer", refused, timeout_s)
        beside = Beside.start(pipe, fill, optimizer)
        measured, busy = _train(pipe, rows, optimizer, steps, model, beside)
        everyone = gather(
            transport,
            "octotune/report",
            {
                "busy": busy,
                "peak": peak_bytes(device),
                "offload": msgspec.to_builtins(pipe.offloaded()) if busy else None,
            },
            timeout_s,
        )
        timeline = pipe.timeline() if trace and busy else None
        outcome = None if beside is None else beside.finish()
        last = None if beside is None else beside.last_filled()
    if transport.rank != 0:
        return
    copies = [
        msgspec.convert(found["offload"], MeasuredOffload)
        for found in everyone[: len(plan.cluster.devices)]
        if found["offload"] is not None
    ]
    if plan.offload is not None and any(plan.offload):
        from octotune.report.offload import print_measured_offload

        print_measured_offload(copies)
    else:
        copies = []
    if beside is not None and outcome is not None:
        beside.show(outcome, last)
    if report:
        _write_report(Path(report), plan, pipe, measured, everyone, copies, outcome)
    if trace and timeline is not None:
        from simulator.chrome import dumps

        Path(trace).write_bytes(dumps(timeline) if last is None else dumps(last[0], fills=last[1]))


def _connect(timeout_s: float, pin: Any) -> tuple[Transport, Any]:
    """Return this rank's transport and device."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from executor.host import settle
    from executor.transport import GlooTransport, NcclTransport, ThreadWorld

    if "RANK" not in os.environ:
        return ThreadWorld(1).transports()[0], torch.device("cpu")
    local, here = int(os.environ.get("LOCAL_RANK", "0")), os.environ.get("LOCAL_WORLD_SIZE", "1")
    if torch.cuda.is_available() and torch.cuda.device_count() >= int(here):
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", timeout=timedelta(seconds=timeout_s))
        return NcclTransport(timeout_s=timeout_s), torch.device("cuda", local)
    settle(local, int(here), pin=pin)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    return GlooTransport(), torch.device("cpu")


def _refuse_unwritable(*paths: str | None) -> None:
    for path in paths:
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise MalformedError(f"{path}: its folder does not exist; make it first")


def _seed_all(seed: int) -> None:
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def load_model(
    spec: str,
) -> tuple[Sequence[Any], Callable[..., Any], Iterable[Any], Callable[..., Any] | None]:
    """Return what FACTORY() of `FILE_OR_MODULE:FACTORY` makes: layers, loss, batches, optimizer.

    Raises MalformedError, in one line, if it cannot be found, raises, or gives something else.
    """
    import importlib
    import importlib.util

    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise MalformedError(f"--model is {spec!r}; write FILE_OR_MODULE:FACTORY")
    try:
        if where.endswith(".py") or Path(where).is_file():
            path = Path(where).resolve()
            if not path.is_file():
                raise MalformedError(f"--model {spec}: there is no file {where}")
            sys.path.insert(0, str(path.parent))
            found = importlib.util.spec_from_file_location(path.stem, path)
            if found is None or found.loader is None:
                raise MalformedError(f"--model {spec}: {where} is no Python file")
            module = importlib.util.module_from_spec(found)
            sys.modules.setdefault(path.stem, module)
            found.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        factory = getattr(module, name, None)
        if not callable(factory):
            raise MalformedError(f"--model {spec}: {where} has no callable {name!r}")
        made = factory()
    except MalformedError:
        raise
    except Exception as error:
        raise MalformedError(f"--model {spec} raised {_words(error)}") from error
    if not isinstance(made, tuple) or len(made) not in (3, 4):
        size = f" of {len(made)}" if isinstance(made, tuple) else ""
        raise MalformedError(
            f"--model {spec} gave a {type(made).__name__}{size}; it gives (layers, loss_fn, "
            "batches) or (layers, loss_fn, batches, optimizer_fn)"
        )
    layers, loss_fn, batches, *rest = made
    if not hasattr(layers, "__len__") or not hasattr(layers, "__getitem__"):
        raise MalformedError(
            f"--model {spec}: layers is a {type(layers).__name__}; it is a sequence"
        )
    for index in range(len(layers)):
        if not callable(layers[index]):
            raise MalformedError(
                f"--model {spec}: layers[{index}] is a {type(layers[index]).__name__}; it is an "
                "nn.Module or a callable that makes one"
            )
    if not callable(loss_fn) or (rest and not callable(rest[0])):
        raise MalformedError(f"--model {spec}: loss_fn and optimizer_fn are callables")
    try:
        iter(batches)
    except TypeError:
        raise MalformedError(
            f"--model {spec}: batches is a {type(batches).__name__}; it is an iterable of "
            "(input, target)"
        ) from None
    return layers, loss_fn, batches, rest[0] if rest else None


def _train(
    pipe: Pipeline, rows: Any, optimizer: Any, steps: int, model: str, beside: Beside | None
) -> tuple[list[StepReport], list[int]]:
    """Run the steps; return them as measured, on rank 0 alone, and this rank's busy times."""
    from executor.agree import collect

    measured: list[StepReport] = []
    busy: list[int] = []
    for number in _progress(steps, pipe.transport.rank == 0):
        try:
            row = next(rows, None)
            if row is None:
                break
            inputs, targets = row
            inputs, targets = pipe.share(inputs), pipe.share(targets)
        except Exception as error:
            raise pipe.fail(
                error
                if isinstance(error, MismatchError)
                else MismatchError(
                    f"--model {model}: batch {number} raised {_words(error)}",
                    pipe.transport.rank,
                )
            ) from error
        try:
            loss = pipe.step(inputs, targets)
        except KeyboardInterrupt as stop:
            rank = pipe.transport.rank
            raise pipe.fail(StepError(f"rank {rank}: interrupted", rank)) from stop
        with pipe.optimizer_step():
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        trace = pipe.trace()
        if beside is not None:
            beside.note(trace)
        end = trace.optimizer_ns[1]
        times = collect(
            pipe.transport, f"octotune/step/{number}", [trace.began_ns, end], pipe.timeout_s
        )
        if times is not None:
            step_ns = max(last for _, last in times) - min(first for first, _ in times)
            measured.append(StepReport(step_ns=step_ns, loss=loss))
            _say(f"step {number + 1}/{steps}  loss {loss:.6f}  {step_ns / 1e6:.1f} ms")
        busy.append(sum(trace.end_ns) - sum(trace.start_ns) + end - trace.optimizer_ns[0])
    return measured, busy


def _progress(steps: int, shown: bool) -> Iterable[int]:
    """Yield step numbers under a progress bar where there is a terminal to show it."""
    if not shown or not sys.stderr.isatty():
        yield from range(steps)
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(
        range(steps), description="training", console=Console(stderr=True), transient=True
    )


def _say(line: str) -> None:
    from rich.console import Console

    Console(soft_wrap=True, highlight=False).print(line)


def peak_bytes(device: Any) -> int:
    """Return the most memory this rank held: of the allocator on CUDA, of the process on a CPU."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _write_report(
    path: Path,
    plan: Plan,
    pipe: Pipeline,
    steps: list[StepReport],
    everyone: list[dict[str, Any]],
    copies: list[MeasuredOffload],
    fill: FillOutcome | None,
) -> None:
    import statistics

    from octotune.contract import write_json

    devices = [
        DeviceReport(
            busy_ns=int(statistics.median(found["busy"])) if found["busy"] else 0,
            peak_bytes=found["peak"],
        )
        for found in everyone[: len(plan.cluster.devices)]
    ]
    write_json(
        Report(
            steps=steps,
            predicted_step_ns=pipe.predicted.step_ns,
            devices=devices,
            offload=copies or msgspec.UNSET,
            fill=msgspec.UNSET if fill is None else fill,
        ),
        path,
    )


def _words(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"


def _exit_status(error: Exception) -> int:
    return 2 if isinstance(error, (MalformedError, click.UsageError)) else 1


def _leave(status: int) -> None:
    """Exit together: a rank that left first would have torchrun stop the others."""
    import torch.distributed as dist

    sys.stdout.flush()
    sys.stderr.flush()
    try:
        if "RANK" in os.environ and _store is not None:
            # where rank 0 holds the store it goes last, or the others would read from a closed one
            world, first = int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0"
            _store.add("octotune/left", 1)
            _wait_until("octotune/left", world)
            if first:
                _wait_until("octotune/gone", world - 1)
            else:
                _store.add("octotune/gone", 1)
    except Exception:
        pass  # the store went with the rank that held it
    # gloo's threads end with the group; one that outlives Python aborts the process
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(status)


def _leave_within(seconds: float) -> None:
    """End this process in any case, without a word."""
    last = threading.Timer(seconds, os._exit, (1,))
    last.daemon = True
    last.start()


def _wait_until(key: str, count: int) -> None:
    end = time.monotonic() + _LEAVE_S
    while _store.add(key, 0) < count and time.monotonic() < end:
        time.sleep(0.02)


_store: Any = None


def main() -> None:
    """Run the command and exit with the contract's status."""
    first = os.environ.get("RANK", "0") == "0"
    # torchrun stops the other ranks when one dies; they first say in which action they lost it
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGTERM, lambda *_: _leave_within(10.0))
    try:
        command.main(standalone_mode=False)
        status = 0
    except click.exceptions.Exit as stop:
        status = stop.exit_code
    except click.ClickException as error:
        if first:
            print(f"executor: {error.format_message()}", file=sys.stderr)
        status = 2
    except click.Abort:  # Ctrl-C outside a step
        if first:
            print("executor: interrupted", file=sys.stderr)
        status = 1
    except (ValueError, RuntimeError) as error:
        rank = int(os.environ.get("RANK", "0"))
        if getattr(error, "rank", 0) == rank:
            print(f"executor: {_first(error)}", file=sys.stderr)
        status = _exit_status(error)
    _leave(status)


def _first(error: Exception) -> str:
    return " ".join(str(error).split("\n")) or type(error).__name__


if __name__ == "__main__":
    main()
