"""Agreement: every rank learns what every rank found, through the store, and none is left waiting.

Each rank writes its part under a key of its own and reads all the others'. That is for what is
rare: building, ending, timelines, metrics.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from executor.errors import MismatchError, PeerError
from octotune.errors import BrokenPlanError, MalformedError

if TYPE_CHECKING:  # transports agree on how to connect
    from executor.transport.base import Transport

_POLL_S = 0.002


def gather(transport: Transport, key: str, value: Any, timeout_s: float) -> list[Any]:
    """Return what every rank gives here, by rank; `value` is anything JSON holds.

    Every rank calls it, with the same key, once a key.

    Raises:
        PeerError: if a rank does not come within `timeout_s`.
    """
    transport.store.set(f"{key}/{transport.rank}", json.dumps(value))
    return _read_all(transport, key, timeout_s)


def collect(transport: Transport, key: str, value: Any, timeout_s: float) -> list[Any] | None:
    """Return on rank 0 what every rank gives here, by rank; the others give theirs and go on.

    Every rank calls it, with the same key, once a key; rank 0 wipes the key away.

    Raises:
        PeerError: on rank 0, if a rank does not come within `timeout_s`.
    """
    store = transport.store
    store.set(f"{key}/{transport.rank}", json.dumps(value))
    if transport.rank:
        return None
    found = _read_all(transport, key, timeout_s)
    for rank in range(transport.world_size):
        store.delete_key(f"{key}/{rank}")
    return found


def _read_all(transport: Transport, key: str, timeout_s: float) -> list[Any]:
    store = transport.store
    end, nap = time.monotonic() + timeout_s, _POLL_S
    found: list[Any] = []
    for rank in range(transport.world_size):
        name = f"{key}/{rank}"
        while not store.check([name]):
            if time.monotonic() > end:
                raise PeerError(
                    f"rank {transport.rank} waited {timeout_s:g} s for rank {rank} "
                    f"at {key.rpartition('/')[2]!r}",
                    transport.rank,
                )
            time.sleep(nap)
            nap = min(nap * 1.5, 0.05)
        found.append(json.loads(store.get(name)))
    return found


def agree(transport: Transport, key: str, error: Exception | None, timeout_s: float) -> None:
    """Raise on every rank if one failed; return if none did.

    A rank that failed raises its own error, the others one with the lowest failing rank's words:
    MismatchError where that means status 2, BrokenPlanError where it means status 1. Each error
    gets `rank`, the lowest failing rank: that one has the line to print.
    """
    status = 2 if isinstance(error, MalformedError) else 1
    mine = None if error is None else [str(error), status]
    for rank, found in enumerate(gather(transport, key, mine, timeout_s)):
        if found is None:
            continue
        raised: Exception
        if error is not None:
            raised = error
        elif found[1] == 2:
            raised = MismatchError(found[0], rank)
        else:
            raised = BrokenPlanError(found[0])
        raised.rank = rank  # type: ignore[attr-defined]
        raise raised
