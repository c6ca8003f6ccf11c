"""Messages between two ranks of a host: written once, into memory that both have mapped.

The two share a socket and, in each direction, `Shelf`s of slots, one shelf a message size. A
sender copies its tensor into a free slot and announces the slot on the socket; the receiver uses
the message where it lies, as its receive buffer, and frees the slot when W has run. So a message
is copied once, and a rank that waits sleeps in one system call until the very announcement. Over
gloo a message is copied twice, by threads which ranks that compute wait for, and wakes three of
them; half of a step's overhead came from there (benchmarks/executor_overhead.py).

Sends are buffered, and bounded: a receiver counts in its `Ledger` the receives it has posted, and
`wait` of a send returns once its receive is among them.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from executor.transport.base import Buffer, Handle, is_counted
from executor.transport.shelf import Ledger, Shelf, Slot

# what a packet says: kind, shelf, slot, tag (or the size of a new shelf's messages)
_PACKET = struct.Struct("<IIIq")
_MESSAGE, _SHELF, _FORGET, _HELLO = range(4)
_FD_SPACE = socket.CMSG_SPACE(4) if hasattr(socket, "CMSG_SPACE") else 0
_NAP_S = 0.0002


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


# --- the first words of a connection ---------------------------------------------------------


def greet(connection: socket.socket, rank: int) -> Ledger:
    """Tell the other end which rank this is, and where it counts; return that."""
    posted = Ledger.new()
    connection.sendmsg([_PACKET.pack(_HELLO, rank, 0, 0)], [_rights(posted.descriptor)])
    return posted


def hear(connection: socket.socket, timeout_s: float) -> tuple[int, Ledger]:
    """Return the other end's rank and ledger."""
    connection.settimeout(timeout_s)
    packet, extra, _, _ = connection.recvmsg(_PACKET.size, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
    connection.settimeout(None)
    if not packet:
        raise ConnectionError("the connection closed")
    return _PACKET.unpack(packet)[1], Ledger(_descriptor_in(extra))


def _rights(descriptor: int) -> tuple[int, int, Any]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor])


def _descriptor_in(extra: Any) -> int:
    for _, kind, data in extra:
        if kind == socket.SCM_RIGHTS:
            return int(array("i", data)[0])
    raise ConnectionError("a packet came without the memory it speaks of")
