"""Which ranks share a host, and how they meet there: each pair of them gets a `Link`."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterable
from secrets import token_hex

from executor.agree import gather
from executor.transport.base import Transport
from executor.transport.link import Link, greet, hear
from executor.transport.shelf import Ledger


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
                dialled[high] = (connection, greet(connection, mine))
        reached = gather(transport, f"{key}/reached", sorted(dialled), timeout_s)
        met = {(low, high) for low, high in wanted if high in reached[low]}

        def progress() -> None:
            for link in links.values():
                link.read_all()

        for _ in range(sum(high == mine for _, high in met)):
            assert listener is not None
            connection, low, theirs = _accept(listener, timeout_s)
            links[low] = Link(connection, greet(connection, mine), theirs, progress)
        for high, (connection, posted) in dialled.items():
            _, theirs = hear(connection, timeout_s)
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
            return (connection, *hear(connection, timeout_s))
        connection.close()
