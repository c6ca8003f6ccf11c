"""Mailbox: one rank's messages of one step, sent and received as its program says.

Each action that needs a message from another rank has a `Slot`; a receive is posted into a pooled
buffer when the program says so, in its channel's order. The first step learns the shapes: the
producer of an activation writes its shape into the store, its receiver reads it there when it
would post the receive, and a gradient has the shape of the activation it answers. From then on
all is known and posting is a call.

This is the path of every action between two waits, often run with cold caches: what can be looked
up by position is a list, made once (benchmarks/executor_overhead.py).
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from executor.errors import MismatchError
from executor.program import Op, RankProgram
from executor.transport.base import Buffer, BufferPool, Handle, Landing, Transport
from simulator.actions import Kind
from simulator.channels import Message

Meta = tuple[tuple[int, ...], torch.dtype]

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Slot:
    """A message that this rank receives."""

    __slots__ = (
        *("arrived_ns", "boundary", "buffer", "handle", "landing", "message"),
        *("posted", "rank", "tag"),
    )

    def __init__(self, message: Message, rank: int, tag: int) -> None:
        self.message = message
        self.rank = rank
        self.tag = tag
        # boundary s lies after stage s; its activation and gradient have one shape
        self.boundary = message.stage if message.kind == Kind.F else message.stage - 1
        self.arrived_ns = -1
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        self.posted = False
        self.handle: Handle | None = None
        self.buffer: Buffer | None = None  # that the handle fills
        self.landing: Landing | None = None  # or the handle that brings one


class Mailbox:
    """Sends and receives one rank's messages.

    Args:
        program: this rank's.
        transport: connects the ranks of all replicas.
        ranks: the rank of each device of this replica [D].
        num_microbatches: m, for tags.
        pool: where receive buffers come from; whoever takes a buffer out of here gives it back.
        timeout_s: how long any one wait may take.
        name: a prefix for the store's keys, one a replica.
        fault_key: the key under which a failing rank says why.
    """

    def __init__(
        self,
        program: RankProgram,
        transport: Transport,
        ranks: Sequence[int],
        num_microbatches: int,
        pool: BufferPool,
        timeout_s: float,
        name: str,
        fault_key: str,
    ) -> None:
        self._transport = transport
        self._pool = pool
        self._timeout_s = timeout_s
        self._name = name
        self._fault_key = fault_key
        self._rank = transport.rank
        slots: dict[Message, Slot] = {}
        sender: dict[Message, int] = {}

        def tag(message: Message) -> int:
            number = message.stage * num_microbatches + message.microbatch
            return number << 2 | (message.kind == Kind.I)

        for op in program.ops:
            if op.needs is not None:
                slots[op.needs] = Slot(op.needs, ranks[op.needs.source], tag(op.needs))
            if op.sends is not None:
                sender[op.sends] = op.position
        ops = program.ops
        self._needs = [None if op.needs is None else slots[op.needs] for op in ops]
        self._posts = [tuple(slots[message] for message in op.posts) for op in ops]
        self._settle = [tuple(sender[message] for message in op.settle) for op in ops]
        self._targets = [
            (0, 0) if op.sends is None else (ranks[op.sends.target], tag(op.sends)) for op in ops
        ]
        self._first_posts = tuple(slots[message] for message in program.first_posts)
        self._messages = [op.sends for op in ops]
        self._slots = tuple(slots.values())
        self._sent: list[Handle | None] = [None] * len(ops)
        self._sent_ns = [-1] * len(ops)
        self._meta: dict[int, Meta] = {}
        self._epoch = 0
        self._all_known = not self._slots
        self._waiting: dict[int, deque[Slot]] = {slot.rank: deque() for slot in self._slots}

    def begin(self) -> None:
        """Begin a step: post what may be posted before any action."""
        for slot in self._slots:
            slot.clear()
        self._post(self._first_posts)

    def is_here(self, position: int) -> bool:
        """Whether the message that the action at `position` needs is known to have come."""
        slot = self._needs[position]
        assert slot is not None
        if not slot.posted:
            self._post_known(None)
            if not slot.posted:
                return False
        return slot.handle is None or slot.handle.done()

    def arrived_ns(self, position: int) -> int:
        """Return when the action at `position` took its message last; -1: it has not yet."""
        slot = self._needs[position]
        assert slot is not None
        return slot.arrived_ns

    def wait(self, position: int) -> None:
        """Return once the message that the action at `position` needs is here."""
        slot = self._needs[position]
        assert slot is not None
        if not slot.posted:
            self._post_known(slot)
        if slot.handle is not None:
            slot.handle.wait(self._timeout_s)
        slot.arrived_ns = time.perf_counter_ns()

    def take(self, position: int) -> Buffer | None:
        """Return the buffer that holds the message; None for a gradient that does not exist."""
        slot = self._needs[position]
        assert slot is not None
        buffer = slot.buffer if slot.landing is None else slot.landing.buffer
        slot.buffer = slot.handle = slot.landing = None
        return buffer

    def after(self, op: Op, out: Tensor | None, ended_ns: int) -> None:
        """Send what an action made and post the receives that come next."""
        position = op.position
        for earlier in self._settle[position]:
            handle = self._sent[earlier]
            if handle is not None:
                handle.wait(self._timeout_s)
                self._sent[earlier] = None
        if out is not None and op.sends is not None:
            target, tag = self._targets[position]
            self._sent[position] = self._transport.send(out, target, tag)
            self._sent_ns[position] = ended_ns
        posts = self._posts[position]
        if posts:
            self._post(posts)

    def finish(self) -> None:
        """Wait until every send has left."""
        for position, handle in enumerate(self._sent):
            if handle is not None:
                handle.wait(self._timeout_s)
                self._sent[position] = None

    def times_ns(self) -> tuple[dict[Message, int], dict[Message, int]]:
        """Return when each message of the last step was sent, and when it was taken."""
        sent = {
            message: at
            for message, at in zip(self._messages, self._sent_ns, strict=True)
            if message is not None and at >= 0
        }
        return sent, {slot.message: slot.arrived_ns for slot in self._slots}

    # --- posting -------------------------------------------------------------------------

    def _post(self, slots: Sequence[Slot]) -> None:
        if self._all_known:
            for slot in slots:
                self._post_one(slot)
            return
        for slot in slots:
            self._waiting[slot.rank].append(slot)
        self._post_known(None)

    def _post_one(self, slot: Slot) -> None:
        shape, dtype = self._meta[slot.boundary]
        slot.posted = True
        if slot.message.kind == Kind.I and not (dtype.is_floating_point or dtype.is_complex):
            return  # such values have no gradient, and nobody sends one
        slot.handle = slot.landing = self._transport.expect(shape, dtype, slot.rank, slot.tag)
        if slot.landing is None:
            slot.buffer = buffer = self._pool.take(shape, dtype)
            slot.handle = self._transport.receive(buffer, slot.rank, slot.tag)

    def _post_known(self, needed: Slot | None) -> None:
        """Post what waits for its shape, each channel in its order, as far as shapes are known.

        For `needed` the shape is waited for; its message would take as long anyway.
        """
        for rank, queue in self._waiting.items():
            while queue:
                slot = queue[0]
                if slot.boundary not in self._meta and (
                    slot.message.kind == Kind.I  # its activation has not run forward here yet
                    or not self._ask(slot.boundary, needed is not None and needed.rank == rank)
                ):
                    break
                queue.popleft()
                self._post_one(slot)
                if slot is needed:
                    needed = None
        self._all_known = not any(self._waiting.values()) and all(
            slot.boundary in self._meta for slot in self._slots
        )

    # --- shapes --------------------------------------------------------------------------

    def _meta_key(self, boundary: int) -> str:
        return f"{self._name}/shape/{self._epoch}/{boundary}"

    def _ask(self, boundary: int, must: bool) -> bool:
        """Read the shape that another rank wrote down; return False if it has not yet."""
        store, key = self._transport.store, self._meta_key(boundary)
        if not store.check([key]):
            if not must:
                return False
            self._wait_for_key(key)
        shape, dtype = json.loads(store.get(key))
        self._meta[boundary] = (tuple(shape), _DTYPES[dtype])
        return True

    def _wait_for_key(self, key: str) -> None:
        """Wait for a key of the store, with an eye on other ranks' faults."""
        store, end, nap = self._transport.store, time.monotonic() + self._timeout_s, 0.0002
        while not store.check([key]):
            if store.check([self._fault_key]):
                raise ConnectionError("another rank failed")
            if time.monotonic() > end:
                raise TimeoutError(f"nothing came within {self._timeout_s} s")
            time.sleep(nap)
            nap = min(nap * 1.5, 0.05)

    def know(self, stage: int, out: Tensor) -> None:
        """Write down an activation's shape the first time, refuse another one later."""
        known = self._meta.get(stage)
        if known is None:
            self._meta[stage] = (tuple(out.shape), out.dtype)
            self._transport.store.set(
                self._meta_key(stage), json.dumps([list(out.shape), str(out.dtype)])
            )
        elif known[0] != out.shape or known[1] != out.dtype:
            raise MismatchError(
                f"rank {self._rank}: stage {stage} gives {list(out.shape)} {out.dtype}, and gave "
                f"{list(known[0])} {known[1]} for another microbatch; all are of one shape",
                self._rank,
            )

    def forget_shapes(self) -> None:
        """Learn the shapes anew in the next step; every rank does this before the same step."""
        self._epoch += 1
        self._meta.clear()
        self._pool.clear()
        self._transport.forget_shapes()
        self._all_known = not self._slots
