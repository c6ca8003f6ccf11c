"""torch.distributed.pipelining's CSV: one row a rank, one cell an action.

A `compute_only` file holds F, B, I and W, blank cells meaning idle; a `compute_comms` file also
says where each rank sends and receives. Ours runs the compute actions with messages of its own,
tagged and proven; an explicit order of SEND and RECV is checked as it would run on torch: both
ends of a pair in one order, each send after its compute, each receive before its use, and no ring
of ranks that wait for each other. UNSHARD, RESHARD and REDUCE_GRAD concern sharded and replicated
parameters and are no actions of a plan; a pair run by OVERLAP_F_B is run one after the other, as
torch does.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from octotune.contract import Cluster, Layer, Plan, Stage, Workload
from octotune.errors import MalformedError, ScheduleError
from octotune.partition import equal_cuts
from simulator.actions import Action, Kind
from simulator.channels import Do, Instruction, Message, check_channels, prove

_COMPUTE = re.compile(r"(\d+)(F|B|I|W)(\d+)", re.ASCII)
_COMM = re.compile(r"(\d+)(SEND|RECV)_(F|B)(\d+)", re.ASCII)
_OTHER = re.compile(r"(\d+)(UNSHARD|RESHARD|REDUCE_GRAD)\d*", re.ASCII)
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B", re.ASCII)


@dataclass(frozen=True, slots=True)
class Comm:
    """A SEND or RECV of stage `stage`: F is an activation, B a gradient."""

    stage: int
    send: bool
    forward: bool
    microbatch: int


Row = tuple[Action | Comm, ...]


def parse(text: str, name: str = "schedule.csv") -> tuple[Row, ...]:
    """Read the text of a CSV file. Raises MalformedError at the first cell that is no action."""
    rows: list[Row] = []
    for rank, cells in enumerate(csv.reader(text.splitlines())):
        row: list[Action | Comm] = []
        for column, cell in enumerate(cells):
            word = cell.strip()
            pair = _PAIR.fullmatch(word)
            for part in pair.groups() if pair else (word,):
                if not part or _OTHER.fullmatch(part):
                    continue
                if (found := _COMPUTE.fullmatch(part)) is not None:
                    row.append(Action(int(found[1]), Kind[found[2]], int(found[3])))
                elif (found := _COMM.fullmatch(part)) is not None:
                    row.append(
                        Comm(int(found[1]), found[2] == "SEND", found[3] == "F", int(found[4]))
                    )
                else:
                    raise MalformedError(
                        f"{name}: row {rank}, cell {column} is {part[:40]!r}; write an action of "
                        "torch.distributed.pipelining, such as 2F0 or 2SEND_F0"
                    )
        rows.append(tuple(row))
    return tuple(rows)


def stage_devices(rows: Sequence[Row], name: str = "schedule.csv") -> tuple[int, ...]:
    """Return the rank of each stage. Raises MalformedError if one is on two, or on none."""
    where: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for item in row:
            if isinstance(item, Action) and where.setdefault(item.stage, rank) != rank:
                raise MalformedError(
                    f"{name}: stage {item.stage} is in rows {where[item.stage]} and {rank}; "
                    "a stage is on one rank"
                )
    for stage in range(max(where, default=-1) + 1):
        if stage not in where:
            raise MalformedError(f"{name}: stage {stage} is in no row; stages count from 0")
    if not where:
        raise MalformedError(f"{name}: there is no action in it")
    return tuple(where[stage] for stage in range(len(where)))


def check_explicit(
    rows: Sequence[Row], *, rendezvous: bool = True, name: str = "schedule.csv"
) -> None:
    """Check an order that says where it sends and receives, each blocking until it is done.

    Args:
        rows: with SENDs and RECVs.
        rendezvous: a send blocks until its receive is there; otherwise only receives block.

    Raises:
        ScheduleError: if the ends of a pair differ, or a send or receive is out of place.
        DeadlockError: if ranks wait for each other in a ring; it holds the cycle.
    """
    device = stage_devices(rows, name)
    programs: list[list[Instruction]] = []
    for rank, row in enumerate(rows):
        program: list[Instruction] = []
        computed: set[Action] = set()
        received: set[Message] = set()
        for item in row:
            if isinstance(item, Action):
                _refuse_unreceived(item, rank, device, received)
                computed.add(item)
                program.append(Instruction(Do.COMPUTE, item))
                continue
            message = _message(item, rank, device, name)
            if not item.send:
                received.add(message)
                program += [Instruction(Do.POST, message), Instruction(Do.GOT, message)]
                continue
            kinds = (Kind.F,) if item.forward else (Kind.I, Kind.B)
            if not {Action(item.stage, kind, item.microbatch) for kind in kinds} & computed:
                raise ScheduleError(
                    f"rank {rank}: {_word(item)} comes before {item.stage}"
                    f"{kinds[0].name}{item.microbatch}; a send comes after its action"
                )
            program += [Instruction(Do.SEND, message), Instruction(Do.SENT, message)]
        programs.append(program)
    prove(programs, rendezvous=rendezvous, fifo=False)
    check_channels(programs)


def _word(comm: Comm) -> str:
    return (
        f"{comm.stage}{'SEND' if comm.send else 'RECV'}_{'F' if comm.forward else 'B'}"
        f"{comm.microbatch}"
    )


def _message(comm: Comm, rank: int, device: Sequence[int], name: str) -> Message:
    """Return what a SEND or RECV moves."""
    here = comm.stage
    ahead = comm.forward == comm.send
    other = here + 1 if ahead else here - 1
    if here >= len(device) or device[here] != rank or not 0 <= other < len(device):
        raise MalformedError(
            f"{name}: row {rank} has {_word(comm)}; the stage is on another rank or has no "
            "neighbour there"
        )
    source, target = (here, other) if comm.send else (other, here)
    kind = Kind.F if comm.forward else Kind.I
    return Message(device[source], device[target], source, kind, comm.microbatch)


def _refuse_unreceived(
    action: Action, rank: int, device: Sequence[int], received: set[Message]
) -> None:
    stage, kind, microbatch = action
    if kind == Kind.W:
        return
    other = stage - 1 if kind == Kind.F else stage + 1
    if not 0 <= other < len(device) or device[other] == rank:
        return
    letter = Kind.F if kind == Kind.F else Kind.I
    if Message(device[other], rank, other, letter, microbatch) not in received:
        letters = "F" if kind == Kind.F else "B"
        raise ScheduleError(
            f"rank {rank}: {action} comes before {stage}RECV_{letters}{microbatch}; "
            "a receive comes before its use"
        )


def plan_from_torch_csv(
    path: str | Path, num_layers: int, cuts: Sequence[int] | None = None
) -> Plan:
    """Return a plan that runs a CSV file's order on layers of nominal cost.

    Args:
        path: compute_only or compute_comms; the latter's sends and receives are checked too.
        num_layers: of the model.
        cuts: S + 1 layer indices, stage s being `[cuts[s], cuts[s + 1])`; by default equal counts.

    Raises:
        MalformedError, ScheduleError, DeadlockError.
    """
    name = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise MalformedError(f"{name}: {error.strerror}") from None
    rows = parse(text, name)
    device = stage_devices(rows, name)
    if any(isinstance(item, Comm) for row in rows for item in row):
        check_explicit(rows, name=name)
    if cuts is None:
        cuts = equal_cuts(num_layers, len(device))
    if len(cuts) != len(device) + 1 or cuts[0] != 0 or cuts[-1] != num_layers:
        raise MalformedError(
            f"{name} has {len(device)} stages; cuts is {list(cuts)}, and runs from 0 to "
            f"{num_layers} in {len(device) + 1} numbers"
        )
    layers = tuple(
        Layer(
            name=f"layer{index}",
            forward_ns=1,
            input_grad_ns=1,
            weight_grad_ns=1,
            param_bytes=0,
            state_bytes=0,
            saved_bytes=1,
            held_w_bytes=1,
            output_bytes=0,
        )
        for index in range(num_layers)
    )
    computed = [[item for item in row if isinstance(item, Action)] for row in rows]
    return Plan(
        workload=Workload(name=Path(path).stem, layers=layers),
        cluster=Cluster.equal(len(rows)),
        num_microbatches=1 + max(item.microbatch for row in computed for item in row),
        stages=tuple(
            Stage(layers=(cuts[stage], cuts[stage + 1]), device=where)
            for stage, where in enumerate(device)
        ),
        actions=tuple(tuple(str(item) for item in row) for row in computed),
    )
