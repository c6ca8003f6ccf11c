"""Faults: what to raise for what went wrong in a step, the same on every rank.

The first rank that finds a reason writes it into the store and breaks its connections; the others
then lose theirs, look for the reason there and raise it in their turn.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence

from executor.errors import MismatchError, PeerError, StepError
from executor.program import Op
from executor.transport.base import Transport

# how long a rank that lost its peer looks for the reason that another rank gave
_GRACE_S = 1.0
_NAP_S = 0.02


class Faults:
    """The reason for which the ranks of one run stop.

    Args:
        transport: connects the ranks of all replicas.
        key: where the reason stands in the store.
        ranks: the rank of each device of this replica [D].
        timeout_s: how long any one wait may take.
    """

    def __init__(
        self, transport: Transport, key: str, ranks: Sequence[int], timeout_s: float
    ) -> None:
        self._transport = transport
        self._key = key
        self._ranks = tuple(ranks)
        self._timeout_s = timeout_s

    def in_words(
        self, error: Exception, doing: Op | str, waiting: bool
    ) -> StepError | MismatchError:
        """Return what to raise for what went wrong: the rank, the action, the reason.

        Args:
            error: as it was raised.
            doing: the action at which it was.
            waiting: whether the rank waited for the action's message.
        """
        if isinstance(error, (StepError, MismatchError)):
            return error
        rank = self._transport.rank
        where = f"at {doing.action}" if isinstance(doing, Op) else f"at {doing}"
        if not isinstance(error, (ConnectionError, TimeoutError)):
            text = str(error).strip().splitlines()
            return MismatchError(
                f"rank {rank}, {where}: {type(error).__name__}: {text[0] if text else ''}", rank
            )
        known = self.known()
        if known is not None:
            return known
        if isinstance(doing, Op) and waiting and doing.needs is not None:
            source = self._ranks[doing.needs.source]
            where = f"waiting for {doing.needs} from rank {source} to run {doing.action}"
        lost = (
            f"nothing came within {self._timeout_s:g} s"
            if isinstance(error, TimeoutError)
            else "the connection closed"
        )
        return PeerError(f"rank {rank}, {where}: {lost}", rank)

    def publish(self, error: StepError | MismatchError) -> None:
        """Tell the other ranks why this one stops; the first reason stands, for this one too."""
        kind = "mismatch" if isinstance(error, MismatchError) else "step"
        # where the store went with the rank that held it, every rank speaks for itself
        with contextlib.suppress(RuntimeError):
            stands = self._transport.store.compare_set(
                self._key, "", json.dumps([error.rank, kind, str(error)])
            )
            error.rank, _, text = json.loads(stands)
            error.args = (text,)

    def known(self) -> StepError | MismatchError | None:
        """Return the reason another rank gave for stopping, if one gives it within a second."""
        store, end = self._transport.store, time.monotonic() + _GRACE_S
        try:
            while not store.check([self._key]):
                if time.monotonic() > end:
                    return None
                time.sleep(_NAP_S)
            rank, kind, text = json.loads(store.get(self._key))
        except RuntimeError:
            return None
        return MismatchError(text, rank) if kind == "mismatch" else PeerError(text, rank)
