"""The command line: `python -m octotune tune | check | compare | warm-up | fill | fleet`.

The first three are as docs/contract.md has them, the last two as docs/fill.md has.

Thin: it reads, calls, prints, and turns errors into one line and an exit status. 0 is done; 1 the
input is fine, but no feasible plan exists or a plan breaks a rule; 2 the input is malformed, which
includes the command line itself; 130 it was stopped before there was a plan. What a command needs
is imported inside it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import click

from octotune.errors import (
    InfeasibleError,
    MalformedError,
    OutOfMemoryError,
    OutOfTimeError,
    ScheduleError,
)
from octotune.fill.commands import fill, fleet
from octotune.stopping import stop_by, stopping

if TYPE_CHECKING:
    from octotune.check import Checked
    from octotune.contract import Plan
    from octotune.fill.plan import FillPlan

DONE, BROKEN, MALFORMED, INTERRUPTED = 0, 1, 2, 130
STOPS = (signal.SIGINT, signal.SIGTERM)
_RULES = (InfeasibleError, OutOfTimeError, OutOfMemoryError, ScheduleError)


@click.group(
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
def cli() -> None:
    """Tune partition, placement and schedule of pipeline-parallel training together.

    A workload or cluster is a path (JSON or YAML), a path into a file (case.json#caps.p.cluster)
    or the name of a bundled one; a plain number as cluster is so many equal devices.
    """


cli.add_command(fill)
cli.add_command(fleet)


class _Seconds(click.FloatRange):
    """Seconds to search; neither nan nor endless."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if seconds != seconds:
            self.fail("nan is no number of seconds", param, ctx)
        return seconds


def _problem(command: Any) -> Any:
    """Add the options that say what to plan, and how long to search."""
    for option in reversed(
        (
            click.option("--workload", required=True, metavar="W", help="path or bundled name"),
            click.option("--cluster", required=True, metavar="C", help="path, name or number"),
            click.option(
                "--microbatches",
                required=True,
                type=click.IntRange(1, 1 << 24),
                metavar="M",
                help="microbatches per step",
            ),
            click.option("--seed", default=0, type=click.IntRange(0, (1 << 63) - 1)),
            click.option(
                "--time-limit",
                type=_Seconds(0, 1e9, min_open=True),
                metavar="S",
                help="seconds to search",
            ),
            click.option(
                "--max-evaluations",
                type=click.IntRange(1, (1 << 63) - 1),
                metavar="N",
                help="plans to try; with it, the same seed gives the same plan",
            ),
            click.option(
                "--offload",
                default="auto",
                show_default=True,
                type=click.Choice(["auto", "never", "always"]),
                help="whether activations go to the host",
            ),
        )
    ):
        command = option(command)
    return command


@cli.command()
@_problem
@click.option("-o", "--output", required=True, metavar="PLAN", help="where to write the plan")
def tune(output: str, **problem: Any) -> int:
    """Search the best plan and write it; Ctrl-C stops early and keeps the best so far."""
    from octotune.contract.files import refuse_unwritable

    refuse_unwritable(output)
    with stopping(*STOPS):
        plan = _tuned(**problem)
        plan.save(output)
        from octotune import report

        report.print_plan(plan)
    return DONE


@cli.command()
@click.argument("plans", nargs=-1, required=True, metavar="PLAN...")
@click.option("--json", "as_json", is_flag=True, help="one object a line for each plan, in order")
@click.option("--bound", is_flag=True, help="recompute the lower bound over all plans")
def check(plans: Sequence[str], as_json: bool, bound: bool) -> int:
    """Recompute plans: their numbers, or the first rule that each breaks."""
    return max(_check_one(name, as_json=as_json, bound=bound) for name in plans)


@cli.command()
@_problem
@click.option("--json", "as_json", is_flag=True, help="print one object")
def compare(as_json: bool, **problem: Any) -> int:
    """Show every baseline and the tuned plan in one table."""
    with stopping(*STOPS):
        plan = _tuned(**problem)
        if as_json:
            _print_json(_comparison(plan))
        else:
            from octotune import report

            report.print_comparison(plan)
    return DONE


@cli.command("host-link")
@click.option("--device", default="cpu", show_default=True, help="such as cuda:0")
@click.option(
    "--neighbours",
    default=1,
    show_default=True,
    type=click.IntRange(0, 64),
    help="other processes that copy meanwhile",
)
@click.option("--workload", metavar="W", help="say also what share of its saved bytes may leave")
@click.option("--json", "as_json", is_flag=True, help="print one object")
def host_link(device: str, neighbours: int, workload: str | None, as_json: bool) -> int:
    """Measure what a device's way to its host carries: a cluster's offload_bandwidth."""
    from octotune.contract import read_workload
    from octotune.model.host_link import link_facts, measure_host_link

    model = None if workload is None else read_workload(workload)
    facts = link_facts(measure_host_link(device, neighbours=neighbours), model)
    if as_json:
        _print_json(facts)
    else:
        from octotune import report

        report.print_host_link(facts)
    return DONE


@cli.command("warm-up")
def warm_up() -> int:
    """Compile what tuning needs for this machine, so that no later command has to."""
    from octotune.compiling import announced_compilation
    from octotune.offload.planning import warm_up_paging
    from octotune.tune.warm import warm_up as warm_up_search

    with announced_compilation(_say):
        warm_up_search()
        warm_up_paging()
    return DONE


def _tuned(
    workload: str,
    cluster: str,
    microbatches: int,
    seed: int,
    time_limit: float | None,
    max_evaluations: int | None,
    offload: Literal["auto", "never", "always"],
) -> Plan:
    from octotune.contract import read_cluster, read_workload

    model, target = read_workload(workload), read_cluster(cluster)
    from octotune.compiling import announced_compilation
    from octotune.tune import tune

    limits: dict[str, Any] = {"max_evaluations": max_evaluations}
    if time_limit is not None:
        limits["time_limit_s"] = time_limit
    with (
        _progress(time_limit) as progress,
        announced_compilation(_say),
    ):
        try:
            return tune(
                model,
                target,
                num_microbatches=microbatches,
                seed=seed,
                progress=progress,
                offload=offload,
                **limits,
            )
        except MalformedError as error:  # each file is well formed; the two together are not
            raise MalformedError(f"{workload} on {cluster}: {error}") from None


def _check_one(name: str, *, as_json: bool, bound: bool) -> int:
    """Print what a plan comes to, or what is wrong with it; return the exit status."""
    from octotune.contract import read_plan
    from octotune.contract.files import format_of

    place = ""  # errors in reading name the file themselves
    try:
        if format_of(name) == "octotune-fill":
            from octotune.fill.plan import read_fill

            filled = read_fill(name)
            place = f"{name}: "
            _check_fill(filled, as_json=as_json)
            return DONE
        plan = read_plan(name)
        place = f"{name}: "
        from octotune.check import check
        from octotune.compiling import announced_compilation

        with announced_compilation(_say):
            checked = check(plan)
            joint = _joint_bound(plan) if bound else None
            if as_json:
                numbers = {
                    "ok": True,
                    "step_ns": checked.step_ns,
                    "bubble_fraction": checked.bubble_fraction,
                    "peak_bytes": checked.peak_bytes,
                }
                _print_json(numbers if joint is None else numbers | {"lower_bound_ns": joint})
            else:
                _print_check(name, checked, joint)
    except (MalformedError, *_RULES) as error:
        line = _one_line(f"{place}{error}")
        if as_json:
            _print_json({"ok": False, "error": line})
        else:
            _say(line)
        return MALFORMED if isinstance(error, MalformedError) else BROKEN
    return DONE


def _check_fill(filled: FillPlan, *, as_json: bool) -> None:
    """Print what a fill plan comes to."""
    from octotune.compiling import announced_compilation
    from octotune.fill.check import check_fill

    with announced_compilation(_say):
        found = check_fill(filled).predicted
    if as_json:
        numbers = {name: getattr(found, name) for name in found.__struct_fields__}
        _print_json({"ok": True} | numbers)
    else:
        from octotune.report.fill import print_fill

        print_fill(filled)


def _print_check(name: str, checked: Checked, joint_bound_ns: int | None) -> None:
    from octotune import report
    from octotune.bounds.fixed import fixed_bound
    from simulator.graph import critical_path

    claims = checked.plan.predicted
    claimed = None if claims is None else claims.lower_bound_ns
    report.print_check(
        report.check_report(
            checked.plan,
            checked.timeline,
            fixed_bound_ns=fixed_bound(checked.timeline.costs).ns,
            claimed_bound_ns=claimed,
            joint_bound_ns=joint_bound_ns,
            critical_path=critical_path(checked.timeline),
        )
    )
    if joint_bound_ns is not None and claimed is not None and claimed > joint_bound_ns:
        click.echo(
            f"{name}: predicted.lower_bound_ns is {claimed}; recomputed here, only "
            f"{joint_bound_ns} is proven"
        )


def _joint_bound(plan: Plan) -> int:
    from octotune.bounds.joint import lower_bound

    return lower_bound(plan.workload, plan.cluster, plan.num_microbatches).ns


def _comparison(plan: Plan) -> dict[str, Any]:
    """Return what `compare --json` prints: steps in ns, or why a baseline cannot run."""
    claims = plan.predicted
    assert claims is not None  # what `tune` returns has its predictions
    return {
        "tuned": {
            "step_ns": claims.step_ns,
            "bubble_fraction": claims.bubble_fraction,
            "peak_bytes": claims.peak_bytes,
            "num_stages": len(plan.stages),
            "num_offloaded": plan.num_offloaded,
        },
        "lower_bound_ns": claims.lower_bound_ns,
        "baselines": claims.baselines,
    }


@contextlib.contextmanager
def _progress(time_limit_s: float | None) -> Iterator[Callable[[str, int, float], None]]:
    """Show on standard error what the search does: a live line, or one line for each gain."""
    from octotune.report.words import duration

    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (
            SpinnerColumn(),
            TimeElapsedColumn(),
            BarColumn(),
            TextColumn("{task.fields[now]}"),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as live:
            task = live.add_task("", total=time_limit_s, now="starting")

            def show(phase: str, step_ns: int, elapsed_s: float) -> None:
                now = f"best step {duration(step_ns)}, {phase}"
                live.update(task, completed=elapsed_s, now=now)

            yield show
        return
    best: int | None = None

    def say(phase: str, step_ns: int, elapsed_s: float) -> None:
        nonlocal best
        if best is None or step_ns < best:
            best = step_ns
            _say(f"{elapsed_s:.1f} s: step {duration(step_ns)} ({phase})")

    yield say


def _say(line: str) -> None:
    click.echo(line, err=True)


def _one_line(text: object) -> str:
    line = " ".join(str(text).split())
    return (
        line
        if line.isprintable()
        else "".join(
            character if character.isprintable() else ascii(character)[1:-1] for character in line
        )
    )


def _print_json(value: Any) -> None:
    import msgspec

    click.echo(msgspec.json.encode(value).decode())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status; what a user can cause is told in one line."""
    with contextlib.suppress(AttributeError):  # a stream that tests put in the place
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        status = cli.main(
            None if arguments is None else list(arguments),
            prog_name="python -m octotune",
            standalone_mode=False,
        )
        sys.stdout.flush()
    except (MalformedError, *_RULES) as error:
        _say(_one_line(error))
        return MALFORMED if isinstance(error, MalformedError) else BROKEN
    except click.ClickException as error:
        _say(f"{_one_line(error.format_message())} (--help shows what is)")
        return MALFORMED
    except (BrokenPipeError, SystemExit):  # whoever reads has seen enough; rich exits then
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (OSError, MemoryError) as error:
        _say(_one_line(error) or "out of memory")
        return MALFORMED
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted")
        return INTERRUPTED
    return status if isinstance(status, int) else DONE


if __name__ == "__main__":
    stop_by(*STOPS)
    done = main()
    for one in STOPS:  # while Python shuts down, a signal would end it with another status
        signal.signal(one, signal.SIG_IGN)
    sys.exit(done)
