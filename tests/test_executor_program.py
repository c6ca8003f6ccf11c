"""Programs: both ends of a channel agree, nothing waits in a ring, windows bound what is open."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from executor_tools import make_plan, one_f_one_b_rows, random_rows

from executor.program import lower
from executor.torch_csv import check_explicit, parse, plan_from_torch_csv
from octotune.errors import MalformedError
from simulator.actions import Action, Kind
from simulator.channels import Do, Instruction, Message, prove
from simulator.errors import DeadlockError, ScheduleError

E01 = """\
0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1
1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3RECV_F1,3F1
"""


def random_programs(seed):
    rng = random.Random(seed)
    num_devices, num_stages = rng.randint(2, 4), rng.randint(2, 7)
    homes = [rng.randrange(num_devices) for _ in range(num_stages)]
    num_microbatches = rng.randint(1, 12)
    rows = random_rows(rng, homes, num_devices, num_microbatches)
    plan = make_plan(rows, [(1, home) for home in homes], num_microbatches)
    window = rng.randint(1, 4)
    programs = lower(plan.schedule(), homes, receive_window=window, send_window=2)
    return programs, programs[0].receive_window


@pytest.mark.parametrize("seed", range(60))
def test_both_ends_of_each_pair_use_one_order(seed):
    """Case E03: per directed pair, the order of sends is the order of receives."""
    programs, _ = random_programs(seed)
    sent, posted = defaultdict(list), defaultdict(list)
    for program in programs:
        rows = [program.first_posts] + [op.posts for op in program.ops]
        for message in (message for row in rows for message in row):
            posted[message.source, message.target].append(message)
        for op in program.ops:
            if op.sends is not None:
                sent[op.sends.source, op.sends.target].append(op.sends)
    assert sent == posted


@pytest.mark.parametrize("seed", range(60))
def test_windows_bound_what_is_posted_and_not_taken(seed):
    """Posted before its use, and ahead of it by the window or what an earlier use forces."""
    programs, window = random_programs(seed)
    for program in programs:
        rows = [program.first_posts] + [op.posts for op in program.ops]
        order, place = defaultdict(list), {}
        for message in (message for row in rows for message in row):
            place[message] = len(order[message.source])
            order[message.source].append(message)
        posted, taken, forced = (defaultdict(int) for _ in range(3))
        needs = [op.needs for op in program.ops if op.needs is not None]
        for at, row in enumerate(rows):
            for message in row:
                posted[message.source] += 1
            if needs:
                forced[needs[0].source] = max(forced[needs[0].source], place[needs[0]] + 1)
            for source, count in posted.items():
                assert count <= max(forced[source], taken[source] + window)
            if at < len(program.ops) and program.ops[at].needs is not None:
                need = needs.pop(0)
                assert posted[need.source] > place[need]
                taken[need.source] += 1
        assert not needs


@pytest.mark.parametrize("seed", range(60))
def test_windows_widen_where_they_would_close_a_ring(seed):
    """A valid order is never refused for its windows, and both proofs hold."""
    programs, _ = random_programs(seed)
    assert all(program.send_window >= 2 for program in programs)


def test_a_bounded_number_of_messages_is_on_its_way():
    """Case E05: 300 microbatches, never more sends open than the window."""
    plan = make_plan(one_f_one_b_rows(2, 300), [(1, 0), (1, 1)], 300)
    for window in (1, 5):
        for program in lower(plan.schedule(), [0, 1], send_window=window):
            open_ = set()
            for op in program.ops:
                open_ -= set(op.settle)
                if op.sends is not None:
                    open_.add(op.sends)
                assert len(open_) <= window


def test_blocking_sends_of_case_e01_deadlock_and_buffered_ones_do_not():
    rows = parse(E01.replace("2RECV_F0,2F0", "2RECV_F0,2F0"))
    crossed = parse(
        "0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2SEND_F0\n"
        "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,3RECV_F0,3F0\n"
    )
    with pytest.raises(DeadlockError, match="cannot run with rendezvous sends") as caught:
        check_explicit(crossed)
    assert any("until 0F1 has left" in part for part in caught.value.cycle)
    assert any("until 1F0 has left" in part for part in caught.value.cycle)
    check_explicit(crossed, rendezvous=False)
    with pytest.raises(DeadlockError, match="0F1 moves 0 -> 1"):
        check_explicit(rows)


def test_an_order_with_receives_in_time_passes():
    check_explicit(
        parse(
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
            "1RECV_F0,1F0,1B0,1RECV_F1,1SEND_B0,1F1,1B1,1SEND_B1\n"
        )
    )


def test_swapped_receives_are_refused():
    """torch matches messages by order alone: this runs there with wrong gradients, silently."""
    with pytest.raises(ScheduleError, match="device 0 sends 0F0, device 1 receives 0F1"):
        check_explicit(
            parse("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1RECV_F0,1F0,1F1\n"), rendezvous=False
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0SEND_F0\n1F0,1RECV_F0\n", "1F0 comes before 1RECV_F0"),
        ("0SEND_F0,0F0\n1RECV_F0,1F0\n", "0SEND_F0 comes before 0F0"),
        ("0F0,0SEND_F0\n1F0\n", "1F0 comes before 1RECV_F0"),
    ],
)
def test_misplaced_messages_are_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        check_explicit(parse(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,2R0\n", "row 0, cell 1 is '2R0'"),
        ("0F0\n0B0\n", "stage 0 is in rows 0 and 1"),
        ("1F0\n", "stage 0 is in no row"),
        (",,\n", "there is no action"),
        ("0F0,0SEND_B0\n1F0\n", "row 0 has 0SEND_B0"),
    ],
)
def test_malformed_csv_is_refused(text, message):
    with pytest.raises(MalformedError, match=message):
        check_explicit(parse(text))


def test_torch_csv_becomes_a_plan(tmp_path):
    path = tmp_path / "order.csv"
    path.write_text(
        "0UNSHARD,0F0,,0F1,(0B0;0F2)OVERLAP_F_B,0B1,0B2,0REDUCE_GRAD\n1F0,1I0,1F1,"
        "1W0,1B1,1F2,1B2\n"
    )
    plan = plan_from_torch_csv(path, 5)
    assert plan.actions == (
        ("0F0", "0F1", "0B0", "0F2", "0B1", "0B2"),
        ("1F0", "1I0", "1F1", "1W0", "1B1", "1F2", "1B2"),
    )
    assert [stage.layers for stage in plan.stages] == [(0, 3), (3, 5)]
    assert plan.num_microbatches == 3
    with pytest.raises(MalformedError, match="cuts is"):
        plan_from_torch_csv(path, 5, cuts=[0, 5])


def test_a_fifo_channel_can_close_a_ring_that_tags_would_not():
    """Device 1 takes the second message first: with one queue a channel it waits for ever."""
    first, second = (Message(0, 1, 0, Kind.F, m) for m in (0, 1))
    sender = [
        Instruction(Do.SEND, first),
        Instruction(Do.SENT, first),
        Instruction(Do.SEND, second),
    ]
    receiver = [
        Instruction(Do.POST, second),
        Instruction(Do.GOT, second),
        Instruction(Do.POST, first),
        Instruction(Do.COMPUTE, Action(1, Kind.F, 0)),
    ]
    prove([sender, receiver], rendezvous=False, fifo=False)
    with pytest.raises(DeadlockError, match=r"post receive of 0F0 .* <- .*wait for 0F1"):
        prove([sender, receiver], rendezvous=False, fifo=True)
