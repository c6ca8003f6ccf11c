"""What `--fill fill.json` adds to a run of the command: fill jobs, their report and picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec

if TYPE_CHECKING:
    import torch

    from executor.fill.run import FillRun
    from executor.pipeline import Pipeline
    from executor.trace import RankTrace
    from octotune.fill.outcome import FillOutcome
    from simulator.fills import FillSpan
    from simulator.timeline import Timeline


class FillSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command that say how fill jobs run; `path` None: there are none."""

    path: str | None = None
    alternate: bool = False
    profile_steps: int = 4
    confirm: bool = False
    margin: float | None = None
    ahead: bool = False
    isolate: Literal["plan", "all", "none"] = "plan"
    folder: str | None = None
    picture: str | None = None


def fill_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a click command; they arrive as one argument `fill`."""
    options = (
        click.option("--fill", "path", metavar="FILL", help="Fill jobs in the bubbles, by this."),
        click.option(
            "--fill-alternate", "alternate", is_flag=True, help="Fill every second step only."
        ),
        click.option(
            "--fill-profile",
            "profile_steps",
            default=4,
            show_default=True,
            type=click.IntRange(min=0),
            help="Steps at the start that measure the bubbles.",
        ),
        click.option(
            "--fill-confirm",
            "confirm",
            is_flag=True,
            help="Then lengthen a wait on each device until the step gets longer.",
        ),
        click.option(
            "--fill-margin",
            "margin",
            type=click.FloatRange(0, 1, max_open=True),
            help="Share of a bubble that is kept, in place of the fill plan's.",
        ),
        click.option(
            "--fill-ahead",
            "ahead",
            is_flag=True,
            help="Give what time a bubble has left to the work of later ones.",
        ),
        click.option(
            "--fill-apart",
            "isolate",
            type=click.Choice(["plan", "all", "none"]),
            default="plan",
            show_default=True,
            help="Which jobs run in processes of their own: those not trusted, all, or none.",
        ),
        click.option(
            "--fill-folder",
            "folder",
            metavar="FOLDER",
            help="Where moving jobs leave their state; a file cancel-JOB in it cancels JOB.",
        ),
        click.option(
            "--fill-picture", "picture", metavar="FILE", help="Draw the last filled step here."
        ),
    )

    def gathered(**given: Any) -> Any:
        names = FillSettings.__struct_fields__
        mine = {name: given.pop(name) for name in names}
        return command(fill=FillSettings(**mine), **given)

    gathered.__doc__ = command.__doc__
    wrapped: Any = gathered
    for option in reversed(options):
        wrapped = option(wrapped)
    found: Callable[..., Any] = wrapped
    return found


class Beside:
    """Fill jobs beside one run of the command. Every rank makes one."""

    def __init__(self, pipe: Pipeline, settings: FillSettings, run: FillRun) -> None:
        self._pipe = pipe
        self._settings = settings
        self._run = run
        self._trace: RankTrace | None = None
        self._spans: list[list[Any]] = []

    @classmethod
    def start(
        cls, pipe: Pipeline, settings: FillSettings, optimizer: torch.optim.Optimizer | None
    ) -> Beside | None:
        """Read and check the fill plan, make its jobs ready; None where there is none.

        Raises what the ranks agreed on.
        """
        if settings.path is None:
            return None
        from executor.agree import agree
        from executor.fill.run import FillOptions, attach
        from octotune.fill.check import check_fill
        from octotune.fill.plan import read_fill

        refused: Exception | None = None
        try:
            fill = read_fill(settings.path)
            check_fill(fill)
        except (ValueError, RuntimeError) as error:
            refused = error
        agree(pipe.transport, "octotune/fill", refused, pipe.timeout_s)
        options = FillOptions(
            profile_steps=settings.profile_steps,
            alternate=settings.alternate,
            confirm=settings.confirm,
            margin=settings.margin,
            ahead=settings.ahead,
            isolate=settings.isolate,
            folder=settings.folder,
        )
        return cls(pipe, settings, attach(pipe, fill, options, optimizer))

    def note(self, trace: RankTrace) -> None:
        """Keep a step that was filled, for the picture."""
        from executor.fill.report import spans_of

        step = self._run.steps[-1]
        if step.filled:
            self._trace = trace
            self._spans = spans_of(step, self._run.device, self._pipe.clock_offset_ns)

    def finish(self) -> FillOutcome:
        """Let the jobs go and return what they did. Every rank calls it."""
        outcome = self._run.report()
        self._run.close()
        return outcome

    def last_filled(self) -> tuple[Timeline, list[FillSpan]] | None:
        """Return the last filled step with what filled it. Every rank calls it."""
        from executor.agree import gather
        from executor.fill.report import fill_spans
        from executor.trace import RankTrace, to_timeline

        mine = None if self._trace is None else [self._trace.to_json(), self._spans]
        found = gather(self._pipe.transport, "octotune/filled", mine, self._pipe.timeout_s)
        found = found[: len(self._pipe.plan.cluster.devices)]
        if any(each is None for each in found):
            return None
        traces = [RankTrace.from_json(each[0]) for each in found]
        began = min(trace.began_ns for trace in traces)
        rows = [row for each in found for row in each[1]]
        return to_timeline(traces, self._pipe.costs), fill_spans(rows, began)

    def show(self, outcome: FillOutcome, last: tuple[Timeline, list[FillSpan]] | None) -> None:
        """Print what the jobs did and draw the last filled step; rank 0 calls it."""
        from octotune.report.fill_run import fill_run_picture, print_outcome

        print_outcome(outcome)
        if self._settings.picture is not None and last is not None:
            timeline, spans = last
            fill_run_picture(timeline, spans, Path(self._settings.picture))
