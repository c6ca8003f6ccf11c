"""Measure what a plan is made from: a model's layers as ranks run them, and the way to the host.

    python -m executor.profile --model my_model.py:make --microbatches 8 -o workload.json

The model is the executor's: what FACTORY() gives, and its first minibatch. Layers are timed with
their backward split as the executor splits it, and the share of their saved bytes that may leave
is counted; the host link is measured in both directions, alone, both at once, and with the
neighbours copying too.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from octotune.errors import MalformedError


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", required=True, help="FILE.py:FACTORY or MODULE:FACTORY.")
@click.option(
    "--microbatches", required=True, type=click.IntRange(min=1), help="In each minibatch."
)
@click.option("--name", help="Of the workload; by default the model's.")
@click.option("--device", default="cpu", show_default=True, help="Such as cuda:0.")
@click.option(
    "--neighbours",
    default=1,
    show_default=True,
    type=click.IntRange(0, 64),
    help="Other processes that compute while layers are timed, and copy while the link is.",
)
@click.option("--repeats", default=10, show_default=True, type=click.IntRange(min=1))
@click.option("--seed", default=0, show_default=True, type=int)
@click.option(
    "--host-link/--no-host-link", default=True, show_default=True, help="Measure the way to it."
)
@click.option("--json", "as_json", is_flag=True, help="Print one object.")
@click.option("-o", "--output", required=True, metavar="WORKLOAD", help="Where to write it.")
def command(
    model: str,
    microbatches: int,
    name: str | None,
    device: str,
    neighbours: int,
    repeats: int,
    seed: int,
    host_link: bool,
    as_json: bool,
    output: str,
) -> None:
    """Profile a model and the host link; write the workload, and show both."""
    import torch

    from executor.__main__ import load_model
    from executor.measure import deferred_split
    from octotune import profile
    from octotune.contract.files import refuse_unwritable, write_json
    from octotune.model.host_link import link_facts, measure_host_link
    from octotune.report.workload import print_profile, shares

    refuse_unwritable(output)
    torch.manual_seed(seed)
    layers, loss_fn, batches, optimizer_fn = load_model(model)
    inputs, targets = first_microbatch(model, batches, microbatches)
    workload = profile(
        layers,
        inputs,
        loss_fn,
        example_target=targets,
        name=name or model.rpartition(":")[0],
        optimizer_fn=optimizer_fn,
        device=device,
        repeats=repeats,
        neighbours=neighbours,
        split=deferred_split,
        seed=seed,
    )
    write_json(workload, output)
    link = measure_host_link(device, neighbours=neighbours) if host_link else None
    facts = None if link is None else link_facts(link, workload)
    if as_json:
        print(json.dumps({"layers": shares(workload), "host_link": facts}))
    else:
        print_profile(workload, facts)


def first_microbatch(model: str, batches: Any, microbatches: int) -> tuple[Any, Any]:
    """Return the input and target of the first microbatch of the first minibatch.

    Raises MalformedError where there is none.
    """
    found = next(iter(batches), None)
    if found is None:
        raise MalformedError(f"--model {model} has no batches; it needs one to be profiled")
    if (
        not isinstance(found, tuple | list)
        or len(found) != 2
        or not all(hasattr(part, "shape") and part.ndim for part in found)
    ):
        raise MalformedError(
            f"--model {model}: batches are (input, target), two tensors [rows, ...]; the first "
            f"is a {type(found).__name__}"
        )
    inputs, targets = found
    rows = inputs.shape[0]
    if rows % microbatches:
        raise MalformedError(
            f"--model {model}: a minibatch has {rows} rows, which {microbatches} microbatches "
            "(--microbatches) do not divide"
        )
    size = rows // microbatches
    return inputs[:size], targets[:size]


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    try:
        command.main(args=arguments, standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        print(f"executor.profile: {error.format_message()}", file=sys.stderr)
        return 2
    except (ValueError, RuntimeError, OSError) as error:
        print(f"executor.profile: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
