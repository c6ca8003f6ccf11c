"""Program: what each rank does in one step, laid out before the first.

The plan's row becomes a list of `Op`s: one an action, with the message it needs from another rank,
the message it sends, and the receives to post once it is done. A receive is posted as soon as its
channel has fewer than `receive_window` messages posted and not yet taken, and in any case before
it is needed. An activation's send is known to have left when its gradient comes back; beyond that
no channel has more than `send_window` messages on their way. `lower` builds this for all devices,
and proves on the graph of `simulator.channels` that no timing can make them wait in a ring, both
with rendezvous and with buffered sends. W takes no part in messages, so it may run at any moment
after its I (see `floating`) without touching the proof.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.actions import Action, Kind, Schedule
from simulator.channels import Do, Instruction, Message, check_channels, prove
from simulator.errors import DeadlockError

SEND_WINDOW = 16
# Receives of a channel posted ahead of their use: at least this many, and of small messages as
# many as fit into so many bytes. Posting costs 0.1 ms, and at the start of the step the rank waits
# anyway; 2 % of a step (benchmarks/executor_overhead.py).
_FEWEST, _MOST, _AHEAD_BYTES = 4, 64, 1 << 20


def receive_window_for(message_bytes: int) -> int:
    """Return how many receives to post ahead for messages of up to this size."""
    return max(_FEWEST, min(_MOST, _AHEAD_BYTES // max(1, message_bytes)))


@dataclass(slots=True, eq=False)
class Op:
    """One action of a rank's row with its messages resolved.

    `position` counts in the plan's row. `settle` names sends that must have left before this
    action's own send is posted.
    """

    action: Action
    position: int
    stage: int
    kind: Kind
    microbatch: int
    needs: Message | None = None
    sends: Message | None = None
    posts: tuple[Message, ...] = ()
    settle: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """One rank's step: receives to post at its start, then the ops in the plan's order."""

    device: int
    first_posts: tuple[Message, ...]
    ops: tuple[Op, ...]
    pairs: frozenset[tuple[int, int]]
    receive_window: int
    send_window: int


def lower(
    schedule: Schedule,
    stage_device: Sequence[int],
    *,
    receive_window: int = _FEWEST,
    send_window: int = SEND_WINDOW,
) -> tuple[RankProgram, ...]:
    """Lay out every device's step and prove it free of deadlock.

    Args:
        schedule: obeys `simulator.validate`.
        stage_device: [S] the device of each stage.
        receive_window: how many receives of a channel are posted ahead of their use, at least 1.
        send_window: how many messages of a channel may be on their way, at least 1.

    Where narrow windows would make ranks wait in a ring, both are doubled until they do not: a
    valid order always runs, at worst with all receives posted first and no send waited for.

    Raises:
        DeadlockError: if the order of F, I and B closes a ring.
    """
    most = 2 * max(1, schedule.num_actions)
    while True:
        try:
            return _lower(schedule, stage_device, receive_window, send_window)
        except DeadlockError:
            if receive_window >= most and send_window >= most:
                raise
        receive_window, send_window = 2 * receive_window, 2 * send_window


def _lower(
    schedule: Schedule, stage_device: Sequence[int], receive_window: int, send_window: int
) -> tuple[RankProgram, ...]:
    num_stages = len(stage_device)
    rows: list[list[Op]] = []
    channel: dict[tuple[int, int], list[Message]] = defaultdict(list)
    needed: dict[Message, Op] = {}
    for device in range(schedule.num_devices):
        row: list[Op] = []
        for position, action in enumerate(schedule.rows[device]):
            op = Op(action, position, action.stage, action.kind, action.microbatch)
            _resolve(op, stage_device, num_stages)
            if op.sends is not None:
                channel[op.sends.source, op.sends.target].append(op.sends)
            if op.needs is not None:
                needed[op.needs] = op
            row.append(op)
        rows.append(row)
    programs = tuple(
        _lay_out(device, row, channel, receive_window, send_window)
        for device, row in enumerate(rows)
    )
    instructions = [_instructions(program) for program in programs]
    check_channels(instructions)
    for rendezvous in (False, True):
        prove(instructions, rendezvous=rendezvous, fifo=True)
    return programs


def _resolve(op: Op, stage_device: Sequence[int], num_stages: int) -> None:
    stage, kind, microbatch = op.action
    here = stage_device[stage]
    if kind is Kind.W:
        return
    before, after = stage - 1, stage + 1
    if kind is not Kind.F:  # gradients run from the last stage to the first
        before, after = after, before
    letter = Kind.F if kind is Kind.F else Kind.I
    if 0 <= before < num_stages and stage_device[before] != here:
        op.needs = Message(stage_device[before], here, before, letter, microbatch)
    if 0 <= after < num_stages and stage_device[after] != here:
        op.sends = Message(here, stage_device[after], stage, letter, microbatch)


def _lay_out(
    device: int,
    row: list[Op],
    channel: dict[tuple[int, int], list[Message]],
    receive_window: int,
    send_window: int,
) -> RankProgram:
    """Say when this device posts each receive and waits for each send."""
    incoming = {pair: messages for pair, messages in channel.items() if pair[1] == device}
    posted = dict.fromkeys(incoming, 0)
    taken = dict.fromkeys(incoming, 0)
    place = {
        message: index for messages in incoming.values() for index, message in enumerate(messages)
    }

    def fill(pair: tuple[int, int], at_least: int) -> list[Message]:
        """Post in the channel's order until the window is full, or `at_least` many are."""
        messages = incoming[pair]
        until = min(len(messages), max(at_least, taken[pair] + receive_window, posted[pair]))
        new = messages[posted[pair] : until]
        posted[pair] = until
        return new

    next_need: list[Message | None] = []
    upcoming: Message | None = None
    for op in reversed(row):
        next_need.append(upcoming)
        if op.needs is not None:
            upcoming = op.needs
    next_need.reverse()  # what the first op after this one that needs a message needs

    def posts(need: Message | None) -> tuple[Message, ...]:
        new: list[Message] = []
        for pair in incoming:
            wanted = need is not None and (need.source, need.target) == pair
            new += fill(pair, place[need] + 1 if wanted and need is not None else 0)
        return tuple(new)

    # a rank that begins with work of its own posts when that has left
    first_posts = posts(upcoming) if row and row[0].needs is not None else ()
    flying: dict[int, deque[Message]] = defaultdict(deque)
    forward: dict[tuple[int, int], Message] = {}
    for op, need in zip(row, next_need, strict=True):
        settle: list[Message] = []
        if op.needs is not None:
            taken[op.needs.source, device] += 1
        if op.kind is Kind.F and op.sends is not None:
            forward[op.stage, op.microbatch] = op.sends
        elif op.kind in (Kind.I, Kind.B):
            sent = forward.get((op.stage, op.microbatch))
            if sent is not None and sent in flying[sent.target]:
                flying[sent.target].remove(sent)
                settle.append(sent)
        if op.sends is not None:
            lane = flying[op.sends.target]
            while len(lane) >= send_window:
                settle.append(lane.popleft())
            lane.append(op.sends)
        op.settle = tuple(settle)
        op.posts = posts(need)
    return RankProgram(
        device=device,
        first_posts=first_posts,
        ops=tuple(row),
        pairs=frozenset(pair for pair in channel if device in pair),
        receive_window=receive_window,
        send_window=send_window,
    )


def _instructions(program: RankProgram) -> list[Instruction]:
    """Return the program as the proof sees it, W left out: it waits for nothing."""
    found = [Instruction(Do.POST, message) for message in program.first_posts]
    for op in program.ops:
        if op.kind is Kind.W:
            continue
        if op.needs is not None:
            found.append(Instruction(Do.GOT, op.needs))
        found.append(Instruction(Do.COMPUTE, op.action))
        found += [Instruction(Do.SENT, message) for message in op.settle]
        if op.sends is not None:
            found.append(Instruction(Do.SEND, op.sends))
        found += [Instruction(Do.POST, message) for message in op.posts]
    return found
