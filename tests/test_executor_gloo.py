"""The gloo transport: contexts, large messages."""

from __future__ import annotations

import executor_ranks
import pytest


def test_tags_stay_apart_and_kinds_and_neighbours_get_contexts_of_their_own():
    from executor.transport.gloo import _LANES, _lane

    tags = range(4000)
    assert len({_lane(tag) for tag in tags}) == len(tags)
    for number in range(1000):
        forward, backward = (_lane(number << 2 | kind) % _LANES for kind in (0, 1))
        after, answer = (_lane((number + 1) << 2 | kind) % _LANES for kind in (0, 1))
        assert len({forward, backward, after, answer}) == 4


@pytest.mark.parametrize("shared_memory", [True, False])
def test_large_messages_arrive_and_every_wait_has_an_end(shared_memory):
    arguments = (6 << 20, shared_memory)
    for right, lost in executor_ranks.spawn(2, executor_ranks.exchange_large, *arguments):
        assert right == [True] * 4
        assert lost in ("TimeoutError", "ConnectionError")
