"""The commands `fill` and `fleet`; `octotune.__main__` runs them and turns errors into a line.

Thin: they read, call, write and print. What a command needs is imported inside it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click


@click.command()
@click.option("--plan", "plan_source", required=True, metavar="PLAN", help="of the main job")
@click.option("--jobs", "jobs_source", required=True, metavar="JOBS", help="a jobs file")
@click.option(
    "--policy",
    default="sjf",
    metavar="NAME",
    help="sjf, makespan, deadline, fifo, a weighted sum, or module:function",
)
@click.option("--threshold", default="5 ms", metavar="TIME", help="shorter bubbles are left alone")
@click.option("--switch", default="0 ms", metavar="TIME", help="of a bubble goes to handing over")
@click.option(
    "--margin",
    default=0.2,
    type=click.FloatRange(0, 1, max_open=True),
    help="share of a bubble that is kept, in case work takes longer",
)
@click.option(
    "--offload-state",
    "state_share",
    default=0.0,
    type=click.FloatRange(0, 1),
    help="share of the main job's state that goes to the host between its updates",
)
@click.option("--optimal", is_flag=True, help="pack by CP-SAT where greedy can be improved on")
@click.option("--time-limit", default=5.0, type=click.FloatRange(0, 1e6, min_open=True))
@click.option("--seed", default=0, type=click.IntRange(0, 2**31 - 1))
@click.option("--picture", metavar="FILE", help="draw a main step with its fill work")
@click.option("-o", "--output", required=True, metavar="FILL", help="where to write the plan")
def fill(
    plan_source: str,
    jobs_source: str,
    policy: str,
    threshold: str,
    switch: str,
    margin: float,
    state_share: float,
    optimal: bool,
    time_limit: float,
    seed: int,
    picture: str | None,
    output: str,
) -> int:
    """Plan which fill jobs run in a plan's bubbles, and write it; `check` recomputes it."""
    from octotune.contract import read_plan
    from octotune.contract.files import refuse_unwritable
    from octotune.fill.jobs_file import read_jobs
    from octotune.fill.make import make_fill_plan
    from octotune.fill.packing import Margins
    from octotune.fill.policies import find_policy

    for target in (output, picture):
        if target is not None:
            refuse_unwritable(target)
    margins = Margins(
        threshold_ns=max(1, _time(threshold, "--threshold")),
        switch_ns=_time(switch, "--switch"),
        margin=margin,
    )
    chosen, jobs, plan = find_policy(policy), read_jobs(jobs_source), read_plan(plan_source)
    with _progress() as progress:
        filled = make_fill_plan(
            plan,
            jobs,
            chosen,
            margins=margins,
            state_share=state_share,
            optimal=optimal,
            time_limit_s=time_limit,
            seed=seed,
            progress=lambda share: progress("packing", share),
        )
    filled.save(output)
    from octotune.report.fill import fill_picture, print_fill

    print_fill(filled)
    if picture is not None:
        fill_picture(filled, picture)
    return 0


@click.command()
@click.option("--config", required=True, metavar="FLEET", help="a fleet file, YAML or JSON")
@click.option("--policy", metavar="NAME", help="in place of the file's")
@click.option("--json", "as_json", is_flag=True, help="print one object")
@click.option("--picture", metavar="FILE", help="draw utilisation and completion times")
def fleet(config: str, policy: str | None, as_json: bool, picture: str | None) -> int:
    """Simulate days of a fleet whose bubbles work through a trace of fill jobs."""
    from octotune.contract.files import refuse_unwritable
    from octotune.fill.fleet import read_fleet, run_fleet
    from octotune.fill.policies import find_policy

    if picture is not None:
        refuse_unwritable(picture)
    chosen = None if policy is None else find_policy(policy)
    settings = read_fleet(config)
    folder = Path(config.partition("#")[0]).parent
    with _progress() as progress:
        report = run_fleet(settings, folder=folder, policy=chosen, progress=progress)
    from octotune.report.fleet import fleet_picture, numbers, print_fleet

    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(numbers(report)).decode())
    else:
        print_fleet(report)
    if picture is not None:
        fleet_picture(report, picture)
    return 0


def _time(text: str, option: str) -> int:
    from octotune.contract.units import Dimension, parse_quantity
    from octotune.errors import MalformedError

    try:
        return int(text) if text.isdecimal() else parse_quantity(text, Dimension.TIME)
    except MalformedError as error:
        raise MalformedError(f"{option}: {error}") from None


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """Show on a terminal's standard error how far each part is; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield lambda what, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as live:
        task = live.add_task("", total=1.0)

        def show(what: str, share: float) -> None:
            live.update(task, description=what, completed=share)

        yield show
