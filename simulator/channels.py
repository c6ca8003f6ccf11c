"""Channels: the proof that a schedule's messages can never wait for each other in a ring.

A device's program is a list of instructions: compute an action, post a receive, wait for it, send,
wait until a send has left. Posting never blocks, waiting does. A message moves once its send and
its receive are posted and, where a channel is a FIFO as NCCL's are, once the message before it
has moved. With *rendezvous* sends a send has left when the message has moved; with *buffered*
ones as soon as it is posted. Instructions and messages form one graph; if it has no cycle, every
run of the programs ends, whatever the timing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from simulator.actions import Action, Kind
from simulator.errors import DeadlockError, ScheduleError


class Message(NamedTuple):
    """The activation (kind F) or gradient (kind I) that stage `stage` produced; prints as `2F0`.

    `source` and `target` are devices.
    """

    source: int
    target: int
    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.name}{self.microbatch}"


class Do(IntEnum):
    """What an instruction does. SENT waits until the send has left, GOT until it has arrived."""

    COMPUTE = 0
    POST = 1
    GOT = 2
    SEND = 3
    SENT = 4


class Instruction(NamedTuple):
    """One entry of a device's program."""

    do: Do
    what: Action | Message

    def __str__(self) -> str:
        if isinstance(self.what, Action):
            return str(self.what)
        message = self.what
        return {
            Do.POST: f"post receive of {message} from device {message.source}",
            Do.GOT: f"wait for {message} from device {message.source}",
            Do.SEND: f"send {message} to device {message.target}",
            Do.SENT: f"wait until {message} has left for device {message.target}",
            Do.COMPUTE: str(message),
        }[self.do]


Program = Sequence[Instruction]


def check_channels(programs: Sequence[Program]) -> None:
    """Refuse programs whose directed device pairs post in different orders on their two ends.

    Also refuses a message that is sent and never received, received and never sent, or handled
    twice. Raises ScheduleError.
    """
    sent: dict[tuple[int, int], list[Message]] = {}
    posted: dict[tuple[int, int], list[Message]] = {}
    for program in programs:
        for do, message in program:
            if do is Do.SEND or do is Do.POST:
                assert isinstance(message, Message)
                table = sent if do is Do.SEND else posted
                table.setdefault((message.source, message.target), []).append(message)
    for pair in sorted(sent.keys() | posted.keys()):
        source, target = pair
        out, back = sent.get(pair, []), posted.get(pair, [])
        for position in range(max(len(out), len(back))):
            there = str(out[position]) if position < len(out) else "nothing"
            here = str(back[position]) if position < len(back) else "nothing"
            if there != here:
                raise ScheduleError(
                    f"channel {source} -> {target}, message {position}: device {source} sends "
                    f"{there}, device {target} receives {here}; both ends need the same order"
                )


def prove(programs: Sequence[Program], *, rendezvous: bool, fifo: bool) -> None:
    """Show that the programs always end, or raise DeadlockError with the cycle.

    Args:
        programs: one a device.
        rendezvous: a send has left only when its receive is posted (NCCL); otherwise at once.
        fifo: the messages of one directed pair move in the order they were sent.

    O(instructions + messages).
    """
    numbers: dict[tuple[Do, Message], int] = {}
    labels: list[str] = []
    needs: list[list[int]] = []

    def node(label: str, before: Iterable[int]) -> int:
        labels.append(label)
        needs.append(list(before))
        return len(labels) - 1

    order: dict[tuple[int, int], list[Message]] = {}
    for device, program in enumerate(programs):
        previous: int | None = None
        for instruction in program:
            do, what = instruction
            previous = node(
                f"device {device}: {instruction}", () if previous is None else (previous,)
            )
            if isinstance(what, Message):
                numbers[do, what] = previous
                if do is Do.SEND:
                    order.setdefault((what.source, what.target), []).append(what)
    for messages in order.values():
        before: int | None = None
        for message in messages:
            sent = numbers[Do.SEND, message]
            wanted = [sent]
            if (post := numbers.get((Do.POST, message))) is not None:
                wanted.append(post)
            if fifo and before is not None:
                wanted.append(before)
            moved = node(f"{message} moves {message.source} -> {message.target}", wanted)
            before = moved
            if (got := numbers.get((Do.GOT, message))) is not None:
                needs[got].append(moved)
            if (left := numbers.get((Do.SENT, message))) is not None:
                needs[left].append(moved if rendezvous else sent)
    cycle = _find_cycle(needs)
    if cycle is not None:
        names = tuple(labels[index] for index in cycle)
        kind = "rendezvous" if rendezvous else "buffered"
        raise DeadlockError(
            f"the order cannot run with {kind} sends: "
            + " <- ".join(f"[{name}]" for name in (*names, names[0])),
            names,
        )


def _find_cycle(needs: Sequence[Sequence[int]]) -> list[int] | None:
    """Return nodes each of which needs the next, the last the first; None where there is none."""
    missing = [len(before) for before in needs]
    then: list[list[int]] = [[] for _ in needs]
    for index, before in enumerate(needs):
        for other in before:
            then[other].append(index)
    ready = [index for index, count in enumerate(missing) if not count]
    done = 0
    while ready:
        done += 1
        for index in then[ready.pop()]:
            missing[index] -= 1
            if not missing[index]:
                ready.append(index)
    if done == len(needs):
        return None
    # every node that is left needs another that is left: walk until one comes again
    at = next(index for index, count in enumerate(missing) if count)
    seen: dict[int, int] = {}
    path: list[int] = []
    while at not in seen:
        seen[at] = len(path)
        path.append(at)
        at = next(other for other in needs[at] if missing[other])
    return path[seen[at] :]
