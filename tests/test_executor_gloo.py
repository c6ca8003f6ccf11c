"""The gloo transport: which of its group's contexts a message goes through."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")


def test_tags_stay_apart_and_kinds_and_neighbours_get_contexts_of_their_own():
    from executor.transport.gloo import _LANES, _lane

    tags = range(4000)
    assert len({_lane(tag) for tag in tags}) == len(tags)
    for number in range(1000):
        forward, backward = (_lane(number << 2 | kind) % _LANES for kind in (0, 1))
        after, answer = (_lane((number + 1) << 2 | kind) % _LANES for kind in (0, 1))
        assert len({forward, backward, after, answer}) == 4
