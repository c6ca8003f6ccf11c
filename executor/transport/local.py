"""Messages between ranks of one host: written once, into memory that both ranks have mapped.

Two ranks share a socket and, in each direction, `Shelf`s of slots, one shelf a message size. A
sender copies its tensor into a free slot and announces the slot on the socket; the receiver uses
the message where it lies, as its receive buffer, and frees the slot when W has run. So a message
is copied once, no thread works on it, and a rank that waits sleeps in one system call until the
very announcement. Over gloo it is copied twice by threads which ranks that compute wait for, and
a message wakes three threads; half of a step's overhead came from there
(benchmarks/executor_overhead.py).

Sends are buffered, and bounded: a receiver counts in its `Ledger` the receives it has posted, and
`wait` of a send returns once its receive is among them. Everything is anonymous: memory and
sockets have no names in any file system and go with the processes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from secrets import token_hex
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor.agree import gather
from executor.transport.base import Buffer, Handle, Transport, is_counted

# what a packet says: kind, shelf, slot, tag (or the size of a new shelf's messages)
_PACKET = struct.Struct("<IIIq")
_MESSAGE, _SHELF, _FORGET, _HELLO = range(4)
_PAGE = mmap.PAGESIZE
_MAX_SLOTS = 16 * _PAGE  # of a shelf: a byte each says whether it is in use
_FIRST_MAP_BYTES = 1 << 16
_FD_SPACE = socket.CMSG_SPACE(4) if hasattr(socket, "CMSG_SPACE") else 0
_NAP_S = 0.0002


class Slot:
    """Memory of one message at a time, and the tensors that look at it."""

    __slots__ = ("_bytes", "_control", "_lent", "number")

    def __init__(self, number: int, memory: Tensor, control: mmap.mmap) -> None:
        self.number = number
        self._bytes = memory
        self._control = control
        self._lent: dict[tuple[Any, torch.dtype], LentBuffer] = {}

    def lend(self, shape: Any, dtype: torch.dtype) -> LentBuffer:
        """Return the memory as a buffer of a message's shape and type."""
        lent = self._lent.get((shape, dtype))
        if lent is None:
            lent = self._lent[shape, dtype] = LentBuffer(self, self._bytes, tuple(shape), dtype)
        return lent

    def free(self) -> None:
        """Let the sender write the next message here."""
        self._control[self.number] = 0


class LentBuffer(Buffer):
    """A slot in the place of a receive buffer."""

    __slots__ = ("_slot",)

    def __init__(
        self, slot: Slot, memory: Tensor, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self._slot = slot
        self.released = self.tail = None
        self.key = (shape, dtype)
        self.tensor = memory.view(dtype).view(shape)

    def give_back(self) -> bool:
        """Free the slot."""
        self._slot.free()
        return True


class Shelf:
    """Slots for messages of one size and direction, in one piece of anonymous memory.

    It begins with a byte a slot: 1 while the slot is in use. The sender sets it, the receiver
    clears it. Maps double in size, so that few are needed; untouched pages cost nothing.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.descriptor = descriptor
        self._num_bytes = num_bytes
        self._stride = -(-max(1, num_bytes) // _PAGE) * _PAGE
        self._slots: list[Slot] = []
        self._map_slots = max(1, _FIRST_MAP_BYTES // self._stride)
        self._used = 0
        self._control = mmap.mmap(descriptor, _MAX_SLOTS)

    @classmethod
    def new(cls, num_bytes: int) -> Shelf:
        """Return an empty one, the sender's."""
        descriptor = os.memfd_create("octotune-messages")
        os.ftruncate(descriptor, _MAX_SLOTS)
        return cls(descriptor, num_bytes)

    @property
    def used_bytes(self) -> int:
        """The memory of slots that held a message at any time."""
        return self._used * self._stride

    def slot(self, number: int) -> Slot:
        """Return a slot by its number."""
        while number >= len(self._slots):
            self._map_more()
        self._used = max(self._used, number + 1)
        return self._slots[number]

    def take(self) -> Slot:
        """Return a free slot, the sender's from now on."""
        number = self._control.find(b"\0", 0, self._used + 1)
        assert 0 <= number < _MAX_SLOTS, "more messages on their way than a step can have"
        self._control[number] = 1
        return self.slot(number)

    def _map_more(self) -> None:
        begin, size = len(self._slots), self._map_slots * self._stride
        offset = _MAX_SLOTS + begin * self._stride
        if os.fstat(self.descriptor).st_size < offset + size:
            os.ftruncate(self.descriptor, offset + size)
        memory = torch.frombuffer(
            mmap.mmap(self.descriptor, size, offset=offset), dtype=torch.uint8
        )
        for at in range(self._map_slots):
            part = memory[at * self._stride : at * self._stride + self._num_bytes]
            self._slots.append(Slot(begin + at, part, self._control))
        self._map_slots *= 2

    def close(self) -> None:
        """Map no more; what is mapped lives as long as somebody looks at it."""
        os.close(self.descriptor)


class Ledger:
    """How many receives a rank has posted from one peer: it writes, the peer reads."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._count = np.frombuffer(mmap.mmap(descriptor, _PAGE), dtype=np.uint64)
        self._own = 0

    @classmethod
    def new(cls) -> Ledger:
        """Return one at zero."""
        descriptor = os.memfd_create("octotune-ledger")
        os.ftruncate(descriptor, _PAGE)
        return cls(descriptor)

    def add(self) -> None:
        """Count one more."""
        self._own += 1
        self._count[0] = self._own

    def read(self) -> int:
        """Return the count."""
        return int(self._count[0])

    def close(self) -> None:
        """Let the descriptor go; the memory stays mapped."""
        os.close(self.descriptor)


class _Put:
    """A message that lies in its slot; over when its receive has been posted."""

    __slots__ = ("_link", "_number")

    def __init__(self, link: Link, number: int) -> None:
        self._link = link
        self._number = number

    def done(self) -> bool:
        return self._link.num_expected() > self._number

    def wait(self, timeout_s: float) -> None:
        if not self.done():
            self._link.watch(self.done, timeout_s)


class _Gone:
    """A message that nobody counts: it lies in its slot."""

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        return


_GONE = _Gone()


class Expected:
    """A receive; `buffer` is the slot, once it is here."""

    __slots__ = ("_dtype", "_link", "_shape", "_tag", "buffer")

    def __init__(self, link: Link, shape: tuple[int, ...], dtype: torch.dtype, tag: int) -> None:
        self._link = link
        self._shape = shape
        self._dtype = dtype
        self._tag = tag
        self.buffer: Buffer | None = None

    def done(self) -> bool:
        """Whether the message has come."""
        return self.buffer is not None or self._link.has(self._tag)

    def wait(self, timeout_s: float) -> None:
        """Return once it has."""
        if self.buffer is None:
            self.buffer = self._link.next(self._tag, timeout_s).lend(self._shape, self._dtype)


class _Copied:
    """A receive into memory of the receiver's own."""

    __slots__ = ("_buffer", "_expected")

    def __init__(self, link: Link, buffer: Buffer, tag: int) -> None:
        self._buffer: Buffer | None = buffer
        self._expected = Expected(link, *buffer.key, tag)

    def done(self) -> bool:
        return self._buffer is None or self._expected.done()

    def wait(self, timeout_s: float) -> None:
        if self._buffer is not None:
            self._expected.wait(timeout_s)
            lent = self._expected.buffer
            assert lent is not None
            self._buffer.tensor.detach().copy_(lent.tensor)
            lent.give_back()
            self._buffer = None


class Link:
    """This rank's end of what two ranks of a host share.

    Args:
        connection: a connected socket that keeps packets apart.
        posted: the receives that this rank has posted.
        theirs: those that the peer has.
        progress: reads what has come on all of a rank's links; called where a send has to wait.
    """

    def __init__(
        self,
        connection: socket.socket,
        posted: Ledger,
        theirs: Ledger,
        progress: Callable[[], None],
    ) -> None:
        self._socket = connection
        self._posted = posted
        self._theirs = theirs
        self._progress = progress
        self._sent = 0
        self._out: dict[int, tuple[int, Shelf]] = {}  # by size: number, shelf
        self._in: dict[int, Shelf] = {}  # by number
        self._num_shelves = 0
        self._arrived: dict[int, deque[Slot]] = {}
        self._timeout_s = -1.0
        self._ended = False  # the peer closed

    # --- sending -------------------------------------------------------------------------

    def send(self, tensor: Tensor, tag: int) -> Handle:
        """Copy a message into a slot and announce it."""
        number, slot, handle = self.reserve(tensor, tag)
        self.put(tensor, tag, number, slot)
        return handle

    def reserve(self, tensor: Tensor, tag: int) -> tuple[int, Slot, Handle]:
        """Take a slot for a message: its shelf's number, the slot, and the handle of the send."""
        found = self._out.get(tensor.nbytes)
        if found is None:
            found = self._out[tensor.nbytes] = self._new_shelf(tensor.nbytes)
        number, shelf = found
        handle: Handle = _GONE
        if is_counted(tag):
            handle = _Put(self, self._sent)
            self._sent += 1
        return number, shelf.take(), handle

    def put(self, tensor: Tensor, tag: int, number: int, slot: Slot) -> None:
        """Copy a message into its slot and announce it; any thread may."""
        slot.lend(tensor.shape, tensor.dtype).tensor.copy_(tensor)
        self._push(_PACKET.pack(_MESSAGE, number, slot.number, tag))

    def num_expected(self) -> int:
        """Return how many receives the peer has posted."""
        return self._theirs.read()

    def _new_shelf(self, num_bytes: int) -> tuple[int, Shelf]:
        shelf, number = Shelf.new(num_bytes), self._num_shelves
        self._num_shelves += 1
        self._push(_PACKET.pack(_SHELF, number, 0, num_bytes), shelf.descriptor)
        return number, shelf

    def _push(self, packet: bytes, descriptor: int | None = None) -> None:
        """Send a packet; where the peer leaves too many unread, read meanwhile what it sent."""
        while True:
            try:
                if descriptor is None:
                    self._socket.send(packet, socket.MSG_DONTWAIT)
                else:
                    rights = [_rights(descriptor)]
                    self._socket.sendmsg([packet], rights, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                self._progress()
                time.sleep(_NAP_S)

    # --- receiving -----------------------------------------------------------------------

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype, tag: int) -> Expected:
        """Post a receive that uses the message where it lies."""
        self._posted.add()
        return Expected(self, shape, dtype, tag)

    def receive(self, buffer: Buffer, tag: int) -> Handle:
        """Post a receive into a buffer."""
        if is_counted(tag):
            self._posted.add()
        return _Copied(self, buffer, tag)

    def has(self, tag: int) -> bool:
        """Whether a message has come."""
        if not self._arrived.get(tag):
            self.read_all()
        return bool(self._arrived.get(tag))

    def next(self, tag: int, timeout_s: float) -> Slot:
        """Return the next message of a tag, once it is here."""
        while not (queue := self._arrived.get(tag)):
            if self._timeout_s != timeout_s:
                self._set_timeout(timeout_s)
            if not self._read(0):
                self._refuse_ended()
                raise TimeoutError(f"nothing came within {timeout_s} s")
        return queue.popleft()

    def read_all(self) -> None:
        """Read what has come, without waiting."""
        while self._read(socket.MSG_DONTWAIT):
            pass

    def watch(self, over: Callable[[], bool], timeout_s: float) -> None:
        """Return once something is over that the peer does without saying so."""
        end = time.monotonic() + timeout_s
        while not over():
            if time.monotonic() > end:
                raise TimeoutError(f"the peer posted no receive within {timeout_s} s")
            time.sleep(_NAP_S)
            self.read_all()
            if self._ended and not over():
                self._refuse_ended()

    def _refuse_ended(self) -> None:
        if self._ended:
            raise ConnectionError("the connection closed")

    def _set_timeout(self, timeout_s: float) -> None:
        seconds = int(timeout_s)
        limit = struct.pack("@ll", seconds, max(1, int((timeout_s - seconds) * 1e6)))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._timeout_s = timeout_s

    def _read(self, flags: int) -> bool:
        """Read one packet; return False if none came in time, or none will."""
        if self._ended:
            return False
        try:
            packet, extra, _, _ = self._socket.recvmsg(
                _PACKET.size, _FD_SPACE, flags | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return self._read(flags)  # said once; what the peer sent before it closed comes next
        if not packet:
            # no failure yet: a peer that has done its part may leave, and what it sent is here
            self._ended = True
            return False
        kind, shelf, slot, tag = _PACKET.unpack(packet)
        if kind == _MESSAGE:
            queue = self._arrived.get(tag)
            if queue is None:
                queue = self._arrived[tag] = deque()
            queue.append(self._in[shelf].slot(slot))
        elif kind == _SHELF:
            self._in[shelf] = Shelf(_descriptor_in(extra), tag)
        elif kind == _FORGET:
            self._in.pop(shelf).close()
        return True

    # --- memory and end ------------------------------------------------------------------

    @property
    def lent_bytes(self) -> int:
        """The memory of messages that this rank has received and the next will be put into."""
        return sum(shelf.used_bytes for shelf in self._in.values())

    def forget(self) -> None:
        """Give up the memory of messages sent so far: their shapes will not come again."""
        for number, shelf in self._out.values():
            self._push(_PACKET.pack(_FORGET, number, 0, 0))
            shelf.close()
        self._out.clear()

    def close(self) -> None:
        """Close the connection: a peer that waits gets an error at once."""
        if self._socket.fileno() < 0:
            return
        self._ended = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for shelf in (*(shelf for _, shelf in self._out.values()), *self._in.values()):
            shelf.close()
        self._out.clear()
        self._in.clear()
        self._arrived.clear()
        self._posted.close()
        self._theirs.close()


def _rights(descriptor: int) -> tuple[int, int, Any]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor])


def _descriptor_in(extra: Any) -> int:
    for _, kind, data in extra:
        if kind == socket.SCM_RIGHTS:
            return int(array("i", data)[0])
    raise ConnectionError("a packet came without the memory it speaks of")


# --- connecting ----------------------------------------------------------------------------


def link_ranks(
    transport: Transport, key: str, pairs: Iterable[tuple[int, int]], timeout_s: float
) -> tuple[dict[int, Link], set[tuple[int, int]]]:
    """Link the pairs of ranks that share a host. Every rank calls it, with the same pairs.

    Returns this rank's links by peer, and the pairs (low, high) of all ranks that have one.
    Pairs that cannot have one (other hosts, containers with networks of their own, systems other
    than Linux) are left out.
    """
    links: dict[int, Link] = {}
    able = sys.platform == "linux"
    mine = transport.rank
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) if able else None
    address = ""
    if listener is not None:
        address = f"\0octotune-{token_hex(16)}"
        listener.bind(address)
        listener.listen(transport.world_size)
    try:
        ranks = gather(transport, f"{key}/addresses", [transport.host, address], timeout_s)
        wanted = sorted(
            {
                (min(pair), max(pair))
                for pair in pairs
                if ranks[pair[0]][0] == ranks[pair[1]][0] and all(ranks[end][1] for end in pair)
            }
        )
        dialled: dict[int, tuple[socket.socket, Ledger]] = {}
        for low, high in wanted:
            if low == mine and (connection := _dial(ranks[high][1])) is not None:
                dialled[high] = (connection, _greet(connection, mine))
        reached = gather(transport, f"{key}/reached", sorted(dialled), timeout_s)
        met = {(low, high) for low, high in wanted if high in reached[low]}

        def progress() -> None:
            for link in links.values():
                link.read_all()

        for _ in range(sum(high == mine for _, high in met)):
            assert listener is not None
            connection, low, theirs = _accept(listener, timeout_s)
            links[low] = Link(connection, _greet(connection, mine), theirs, progress)
        for high, (connection, posted) in dialled.items():
            _, theirs = _hear(connection, timeout_s)
            links[high] = Link(connection, posted, theirs, progress)
    finally:
        if listener is not None:
            listener.close()
    return links, met


def _dial(address: str) -> socket.socket | None:
    """Connect to a rank; None where its socket is not to be seen from here."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        return None
    return connection


def _accept(listener: socket.socket, timeout_s: float) -> tuple[socket.socket, int, Ledger]:
    """Return the next of this user's ranks that dialled: connection, rank, its ledger."""
    listener.settimeout(timeout_s)
    while True:
        connection, _ = listener.accept()
        who = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", who)[1] == os.getuid():
            return (connection, *_hear(connection, timeout_s))
        connection.close()


def _greet(connection: socket.socket, mine: int) -> Ledger:
    """Tell the other end which rank this is, and where it counts; return that."""
    posted = Ledger.new()
    packet = _PACKET.pack(_HELLO, mine, 0, 0)
    connection.sendmsg([packet], [_rights(posted.descriptor)])
    return posted


def _hear(connection: socket.socket, timeout_s: float) -> tuple[int, Ledger]:
    """Return the other end's rank and ledger."""
    connection.settimeout(timeout_s)
    packet, extra, _, _ = connection.recvmsg(_PACKET.size, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
    connection.settimeout(None)
    if not packet:
        raise ConnectionError("the connection closed")
    return _PACKET.unpack(packet)[1], Ledger(_descriptor_in(extra))
