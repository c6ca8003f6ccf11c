"""Fill tasks: a fill job where it really runs, and how a jobs file's `factory` makes one.

A task is a class of the user's:

    class Mine:
        def setup(self, device): ...            # once, before the first micro-step
        def step(self) -> int: ...              # one micro-step; returns the samples it completed
        def state_dict(self) -> dict: ...       # all that another device needs to go on
        def load_state_dict(self, state): ...
        def teardown(self): ...                 # once, however it ended

A task whose passes are a row of micro-steps says so by `num_micro_steps` and, instead of `step`,

        def run(self, k, carry):                # micro-step k of one pass

where `carry` is None for k = 0 and then what the pass's last micro-step returned; the last one
returns the samples that the pass makes. Several passes may be open at once if the fill plan has
it so (inference only). `pass_state(carry)` is not needed: a task moves only between passes.

`executor.fill.module.ModuleTask` makes one of any nn.Module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from octotune.errors import MalformedError
from octotune.fill.jobs import Configuration, FillJob

_NEEDED = ("setup", "state_dict", "load_state_dict", "teardown")


@runtime_checkable
class Task(Protocol):
    """What every task has; beside it either `step` or `num_micro_steps` and `run`."""

    def setup(self, device: torch.device) -> None:
        """Make ready on a device."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return all that another device needs to go on, between two passes."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""

    def teardown(self) -> None:
        """Let go of everything."""


class Stepped:
    """A task with `step` alone as a row of `num` micro-steps that make one pass."""

    def __init__(self, task: Any, num: int) -> None:
        self.num_micro_steps = num
        self._step: Callable[[], int] = task.step

    def run(self, k: int, carry: Any) -> int:
        """Run one `step`; what a pass made so far is its carry."""
        made = self._step()
        return (carry or 0) + (0 if made is None else int(made))


def graph_of(task: Any, num: int, name: str) -> Any:
    """Return what runs a task's micro-steps: itself, or `Stepped`.

    Args:
        task: a task.
        num: how many micro-steps its configuration has.
        name: of the job, for what is wrong.

    Raises:
        MalformedError: if it has neither `run` nor `step`, or another number of micro-steps.
    """
    missing = [word for word in _NEEDED if not callable(getattr(task, word, None))]
    if missing:
        raise MalformedError(
            f"job {name!r}: its task, a {type(task).__name__}, has no {missing[0]}(); a task has "
            f"{', '.join(_NEEDED)}, and step or run"
        )
    if callable(getattr(task, "run", None)):
        found = getattr(task, "num_micro_steps", None)
        if found != num:
            raise MalformedError(
                f"job {name!r}: its task has num_micro_steps = {found}, the configuration in the "
                f"fill plan {num}; measure it again with executor.fill.profile"
            )
        return task
    if not callable(getattr(task, "step", None)):
        raise MalformedError(
            f"job {name!r}: its task, a {type(task).__name__}, has neither step() nor run()"
        )
    return Stepped(task, num)


def make_task(job: FillJob, configuration: Configuration) -> Any:
    """Call a job's factory with its arguments.

    `batch_size` and `technique` of the configuration are handed over, too, where the factory
    takes them and the arguments do not name them.

    Raises:
        MalformedError: if there is no factory, it cannot be found, or it raises; one line.
    """
    if job.factory is None:
        raise MalformedError(
            f"job {job.name!r} has no factory, so there is nothing to run; give it "
            "module:function or file.py:function in the jobs file"
        )
    factory = find_factory(job.factory, f"job {job.name!r}")
    given = dict(job.arguments)
    offered = {"batch_size": configuration.batch_size, "technique": configuration.technique}
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    given = {n: v for n, v in offered.items() if takes_any or n in parameters} | given
    try:
        return factory(**given)
    except Exception as error:
        text = str(error).strip().splitlines()
        raise MalformedError(
            f"job {job.name!r}: factory {job.factory} raised {type(error).__name__}: "
            f"{text[0] if text else 'no message'}"
        ) from error


def find_factory(spec: str, what: str) -> Callable[..., Any]:
    """Return what `module:function` or `file.py:function` names.

    Raises MalformedError, in one line that begins with `what`, if it cannot be found.
    """
    import importlib
    import importlib.util
    import sys
    from pathlib import Path

    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise MalformedError(f"{what}: factory is {spec!r}; write module:function or file.py:name")
    try:
        if where.endswith(".py"):
            path = Path(where).resolve()
            if not path.is_file():
                raise MalformedError(f"{what}: factory {spec}: there is no file {where}")
            known = sys.modules.get(path.stem)
            if known is not None and getattr(known, "__file__", None) == str(path):
                module = known
            else:
                sys.path.insert(0, str(path.parent))
                found = importlib.util.spec_from_file_location(path.stem, path)
                assert found is not None  # its name ends in .py
                assert found.loader is not None
                module = importlib.util.module_from_spec(found)
                sys.modules.setdefault(path.stem, module)
                found.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except MalformedError:
        raise
    except Exception as error:
        text = str(error).strip().splitlines()
        raise MalformedError(
            f"{what}: factory {spec}: {type(error).__name__}: {text[0] if text else ''}"
        ) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise MalformedError(f"{what}: factory {spec}: {where} has no callable {name!r}")
    made: Callable[..., Any] = factory
    return made
