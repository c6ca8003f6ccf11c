"""Messages over gloo: processes on CPUs.

Ranks of one host exchange messages by shared memory (`executor.transport.link`). Between hosts
one process group of our own carries everything; its messages have tags, and its connections exist
from the start. A gloo transfer cannot be polled, and a wait that times out breaks the connection,
so arrival is seen by looking at the buffer's last bytes (`Buffer.looks_filled`) and confirmed by
the wait. The process group is called directly: torch.distributed's wrappers cost 10 us a call.

Two ranks share one connection in a gloo context, and one lock guards it: while the main thread
holds it to post something, gloo's own thread, woken by what arrives, asks for it over and over and
burns its core (100 calls of epoll_wait an action, 0.1 to 0.2 ms of CPU time; with more ranks than
cores it takes the core of the very thread that holds the lock). So our group has several contexts,
and forward and backward messages, even and odd ones, each have their own: `_lane`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import lru_cache
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from executor.transport.base import Buffer, Handle, Landing, Transport
from executor.transport.link import Link
from executor.transport.local import link_ranks

# Contexts of the group that carries messages, each with a thread and a connection a peer. With 2,
# forward and backward messages still meet the posting of their own kind.
_LANES = 4
# From here on a thread of our own posts sends: 4 MB fit into a socket's buffer at once, and the
# thread that posts copies them there (1 ms; 3 to 6 ms at 16 MB, which compute would wait for).
_LARGE_BYTES = 4 << 20
# From here on a thread copies into shared memory: 0.3 ms for 2 MB, and 0.1 to hand them over.
_LARGE_COPY_BYTES = 1 << 19


def _lane(tag: int) -> int:
    """Return a tag that gloo's choice, tag modulo contexts, sends by the context we want.

    Bit 0 of the runtime's tags says forward or backward, bit 2 whether the number is odd.
    """
    return tag * _LANES + (tag & 1 | tag >> 1 & 2)


class _Sent:
    __slots__ = ("_tensor", "_work")

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work = work
        self._tensor: Tensor | None = tensor  # alive as long as gloo may read it

    def done(self) -> bool:
        return self._work is None

    def wait(self, timeout_s: float) -> None:
        if self._work is not None:
            try:
                self._work.wait(_limit(timeout_s))
            except RuntimeError as error:
                raise _reason(error) from error
            self._work = self._tensor = None


class _Later:
    """A large message, posted by a thread: copying it would keep the caller from computing."""

    __slots__ = ("_handle", "_ready")

    def __init__(self) -> None:
        self._ready = Event()
        self._handle: Handle | Exception | None = None

    def post(self, post: Callable[[], Handle]) -> None:
        try:
            self._handle = post()
        except (RuntimeError, OSError) as error:
            self._handle = error
        self._ready.set()

    def done(self) -> bool:
        handle = self._handle
        return handle is not None and not isinstance(handle, Exception) and handle.done()

    def wait(self, timeout_s: float) -> None:
        if not self._ready.wait(timeout_s):
            raise TimeoutError(f"a message was not taken within {timeout_s} s")
        if isinstance(self._handle, RuntimeError):
            raise _reason(self._handle) from self._handle
        if isinstance(self._handle, Exception):
            raise self._handle
        assert self._handle is not None
        self._handle.wait(timeout_s)


class _Poster:
    """A thread that posts large messages in their order."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def post(self, post: Callable[[], Handle]) -> _Later:
        later = _Later()
        self._queue.put((later, post))
        return later

    def close(self) -> None:
        """End it once it has posted what it was given."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            later, post = item
            later.post(post)
            del item, later, post


class _Received:
    __slots__ = ("_buffer", "_work")

    def __init__(self, work: Any, buffer: Buffer) -> None:
        self._work = work
        self._buffer = buffer

    def done(self) -> bool:
        return self._work is None or self._buffer.looks_filled()

    def wait(self, timeout_s: float) -> None:
        if self._work is not None:
            try:
                self._work.wait(_limit(timeout_s))
            except RuntimeError as error:
                raise _reason(error) from error
            self._work = None


def _limit_of(group: Any) -> timedelta:
    limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return limit


@lru_cache(maxsize=16)
def _limit(timeout_s: float) -> timedelta:
    return timedelta(seconds=timeout_s)


def _reason(error: RuntimeError) -> TimeoutError | ConnectionError:
    text = str(error)
    if "imed out" in text or "timeout" in text.lower():
        return TimeoutError(text)
    return ConnectionError(text)


# a weak reference to the default process group, and the one beside it that carries messages
_carriers: list[tuple[Any, Any]] = []
_open: weakref.WeakSet[GlooTransport] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End gloo's threads while Python still runs.

    One that lets go of a tensor needs Python for it; where Python is ending the process aborts
    with "terminate called without an active exception". A group's threads end with its last
    reference.
    """
    for transport in list(_open):
        transport.close()
    _carriers.clear()


def _carrier(base: Any, store: Store) -> Any:
    """Return the group that carries messages, made at the first call; every rank calls it."""
    for known, group in _carriers:
        if known() is base:
            return group
    gloo: Any = dist.ProcessGroupGloo  # its options are not in torch's type stubs
    options = gloo._Options()
    options._timeout = _limit_of(base)
    options._threads = 2 * _LANES
    # as torch.distributed picks them: the interfaces asked for, or the host name's
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [
        gloo.create_device(interface=names[lane % len(names)])
        if names
        else gloo.create_default_device()
        for lane in range(_LANES)
    ]
    group = gloo(PrefixStore("octotune/gloo", store), base.rank(), base.size(), options)
    _carriers[:] = [(weakref.ref(base), group)]
    return group


class GlooTransport(Transport):
    """The ranks of a gloo process group, the default one unless given, and its store.

    `shared_memory`: ranks of one host exchange messages by `Link`s, which is quicker.
    """

    tagged = True
    _num_prepared = 0

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        store: Store | None = None,
        *,
        shared_memory: bool = True,
    ) -> None:
        if group is None:
            group = dist.distributed_c10d._get_default_group()
        if store is None:
            store = dist.distributed_c10d._get_default_store()
        self._base: Any = group
        self._group: Any = None
        self._shared_memory = shared_memory
        self._links: dict[int, Link] = {}
        self._linked: set[tuple[int, int]] = set()
        self._poster: _Poster | None = None
        self._reduce_groups: dict[tuple[int, ...], Any] = {}
        self.rank = group.rank()
        self.world_size = group.size()
        self.store = store
        _open.add(self)

    def next_name(self) -> str:
        """Return a prefix no other transport of this process on this store gets."""
        GlooTransport._num_names += 1
        return f"octotune/{GlooTransport._num_names}"

    def prepare(self, pairs: Iterable[tuple[int, int]], groups: Iterable[Sequence[int]]) -> None:
        """Link what shares a host; gloo connects every other pair when its group is made."""
        GlooTransport._num_prepared += 1
        left = {(min(pair), max(pair)) for pair in pairs} - self._linked
        if left and self._shared_memory:
            made, linked = link_ranks(
                self,
                f"octotune/links/{GlooTransport._num_prepared}",
                left,
                _limit_of(self._base).total_seconds(),
            )
            self._links.update(made)
            self._linked |= linked
            left -= linked
        if left and self._group is None:
            self._group = _carrier(self._base, self.store)
        for ranks in groups:
            key = tuple(ranks)
            if key not in self._reduce_groups:
                self._reduce_groups[key] = dist.new_group(list(key), backend="gloo")

    def send(self, tensor: Tensor, target: int, tag: int) -> Handle:
        """Post a send of the tensor's own memory."""
        link = self._links.get(target)
        if link is not None:
            if tensor.nbytes < _LARGE_COPY_BYTES:
                return link.send(tensor, tag)
            number, slot, handle = link.reserve(tensor, tag)

            def put() -> Handle:
                link.put(tensor, tag, number, slot)
                return handle

            return self._by_thread(put)
        group = self._group
        if tensor.nbytes < _LARGE_BYTES:
            return _Sent(group.send([tensor], target, _lane(tag)), tensor)
        return self._by_thread(lambda: _Sent(group.send([tensor], target, _lane(tag)), tensor))

    def _by_thread(self, post: Callable[[], Handle]) -> Handle:
        if self._poster is None:
            self._poster = _Poster()
        return self._poster.post(post)

    def receive(self, buffer: Buffer, source: int, tag: int) -> Handle:
        """Post a receive."""
        link = self._links.get(source)
        if link is not None:
            return link.receive(buffer, tag)
        buffer.mark_empty()
        return _Received(self._group.recv([buffer.tensor], source, _lane(tag)), buffer)

    def expect(
        self, shape: tuple[int, ...], dtype: torch.dtype, source: int, tag: int
    ) -> Landing | None:
        """Post a receive that needs no buffer, from a rank of this host."""
        link = self._links.get(source)
        return None if link is None else link.expect(shape, dtype, tag)

    @property
    def lent_bytes(self) -> int:
        """The shared memory that received messages lie in."""
        return sum(link.lent_bytes for link in self._links.values())

    def forget_shapes(self) -> None:
        """Give up the shared memory of messages sent so far."""
        for link in self._links.values():
            link.forget()

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int]) -> Handle:
        """Post a sum; gloo's own threads run it beside compute."""
        work = self._reduce_groups[tuple(ranks)].allreduce([tensor])
        return _Sent(work, tensor)

    def abort(self) -> None:
        """Close the sockets: peers that wait get an error at once."""
        self._let_go()  # links first: a group's end may wait for a peer that waits for a link
        _carriers.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    def close(self) -> None:
        """Close the links and end the reducing groups; the default group is the caller's."""
        groups = list(self._reduce_groups.values())
        self._let_go()
        while groups:
            with contextlib.suppress(ValueError):  # gone with the default group
                dist.destroy_process_group(groups.pop())

    def _let_go(self) -> None:
        if self._poster is not None:
            self._poster.close()
            self._poster = None
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._group = self._base = None
        self._reduce_groups.clear()
        _open.discard(self)
