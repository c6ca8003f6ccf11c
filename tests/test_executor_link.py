"""Messages through shared memory: links between two ranks, here both in this process."""

from __future__ import annotations

import os
import socket
import sys
import threading

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from executor.transport.base import ASIDE, Buffer
from executor.transport.link import Link
from executor.transport.local import link_ranks
from executor.transport.shelf import Ledger

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="links are Linux's")


@pytest.fixture
def ends():
    """The two ends of a link."""
    sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ledgers = Ledger.new(), Ledger.new()
    made: list[Link] = []
    for me in (0, 1):
        theirs = Ledger(os.dup(ledgers[1 - me].descriptor))
        made.append(Link(sockets[me], ledgers[me], theirs, lambda me=me: made[me].read_all()))
    yield tuple(made)
    for end in made:
        end.close()


def expect(end, like, tag):
    return end.expect(tuple(like.shape), like.dtype, tag)


def test_messages_meet_their_receives_by_tag_in_any_order(ends):
    here, there = ends
    messages = {
        0: torch.randn(3, 5),
        4: torch.arange(7),
        8: torch.tensor(2.5, dtype=torch.float64),
        12: torch.zeros(0, 4),
        16: torch.tensor([True, False]),
        20: torch.randn(100, 100).bfloat16(),
    }
    expected = {tag: expect(there, message, tag) for tag, message in messages.items()}
    for tag, message in messages.items():
        here.send(message, tag)
    for tag in reversed(messages):
        assert expected[tag].done()
        expected[tag].wait(5)
        assert torch.equal(expected[tag].buffer.tensor, messages[tag])
        assert expected[tag].buffer.tensor.dtype == messages[tag].dtype


def test_a_message_lies_untouched_until_it_is_given_back_and_its_memory_is_used_again(ends):
    here, there = ends
    held = []
    for number in range(40):
        message = torch.full((300,), float(number))
        landing = expect(there, message, number << 2)
        here.send(message, number << 2)
        landing.wait(5)
        held.append((number, landing.buffer))
        if len(held) == 3:
            for kept, buffer in held:
                assert (buffer.tensor == kept).all()
            held.pop(1)[1].give_back()
    assert there.lent_bytes <= 3 * 4096


def test_a_buffer_of_the_receivers_own_is_filled_and_the_slot_freed_at_once(ends):
    here, there = ends
    buffer = Buffer((4,), torch.float32, torch.device("cpu"))
    for number in range(10):
        handle = there.receive(buffer, ASIDE)
        assert not handle.done()
        here.send(torch.full((4,), float(number)), ASIDE).wait(0)
        handle.wait(5)
        assert handle.done()
        assert (buffer.tensor == number).all()
    assert there.lent_bytes == 4096


def test_a_send_is_over_when_its_receive_is_posted(ends):
    here, there = ends
    message = torch.zeros(2)
    first, second = here.send(message, 0), here.send(message, 4)
    expect(there, message, 0)
    first.wait(0)
    assert not second.done()
    with pytest.raises(TimeoutError, match="posted no receive"):
        second.wait(0.01)
    expect(there, message, 4)
    second.wait(0)


def test_every_wait_has_an_end(ends):
    here, there = ends
    message, failed = torch.zeros(2), []
    with pytest.raises(TimeoutError, match="nothing came"):
        expect(here, message, 0).wait(0.05)

    def wait_for(handle):
        try:
            handle.wait(30)
        except ConnectionError as error:
            failed.append(error)

    waits = [
        threading.Thread(target=wait_for, args=(handle,))
        for handle in (expect(here, message, 8), here.send(message, 8))
    ]
    for wait in waits:
        wait.start()
    there.close()
    for wait in waits:
        wait.join(30)
    assert len(failed) == 2
    with pytest.raises(ConnectionError):
        here.send(message, 12)


def test_what_a_peer_sent_before_it_closed_is_here(ends):
    here, there = ends
    first, second = (expect(there, torch.zeros(2), tag) for tag in (0, 4))
    there.send(torch.zeros(2), 0)  # never read: the kernel says so to the other end
    here.send(torch.ones(2), 0)
    here.close()
    assert first.done()
    assert not second.done()
    first.wait(5)
    assert torch.equal(first.buffer.tensor, torch.ones(2))
    with pytest.raises(ConnectionError, match="closed"):
        second.wait(5)


def test_more_messages_than_a_socket_holds_both_ways_do_not_block(ends):
    count, done = 2000, []

    def side(end):
        landings = [end.expect((1,), torch.float32, at << 2) for at in range(count)]
        for at in range(count):
            end.send(torch.tensor([float(at)]), at << 2)
        for at, landing in enumerate(landings):
            landing.wait(30)
            assert landing.buffer.tensor == at
            landing.buffer.give_back()
        done.append(end)

    sides = [threading.Thread(target=side, args=(end,)) for end in ends]
    for one in sides:
        one.start()
    for one in sides:
        one.join(60)
    assert len(done) == 2


def test_forgotten_memory_goes_and_what_is_in_use_stays(ends):
    here, there = ends
    landing = expect(there, torch.zeros(9), 0)
    here.send(torch.arange(9.0), 0)
    landing.wait(5)
    here.forget()
    after = expect(there, torch.zeros(5), 4)
    here.send(torch.ones(5), 4)
    after.wait(5)
    assert there.lent_bytes == 4096
    assert torch.equal(landing.buffer.tensor, torch.arange(9.0))
    assert landing.buffer.give_back()


class Rank:
    """What `link_ranks` needs of a transport."""

    def __init__(self, rank, store, host="one host"):
        self.rank, self.world_size, self.store, self.host = rank, 3, store, host


def link_all(hosts, pairs, key="links"):
    store, results = HashStore(), [None] * 3

    def main(rank):
        results[rank] = link_ranks(Rank(rank, store, hosts[rank]), key, pairs, 20)

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_ranks_of_one_host_are_linked_and_others_left_to_gloo():
    results = link_all(["a", "b", "a"], [(0, 1), (1, 2), (2, 0), (0, 2)])
    assert [sorted(links) for links, _ in results] == [[2], [], [0]]
    assert all(linked == {(0, 2)} for _, linked in results)
    landing = results[2][0][0].expect((2,), torch.float32, 0)
    results[0][0][2].send(torch.ones(2), 0)
    landing.wait(5)
    assert torch.equal(landing.buffer.tensor, torch.ones(2))
    for links, _ in results:
        for link in links.values():
            link.close()


def test_a_rank_whose_socket_cannot_be_seen_is_left_to_gloo(monkeypatch):
    """Containers can share a host's name and not its sockets."""
    monkeypatch.setattr("executor.transport.local._dial", lambda address: None)
    for links, linked in link_all(["a"] * 3, [(0, 1), (1, 2)]):
        assert (links, linked) == ({}, set())
