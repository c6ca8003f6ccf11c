"""Fill jobs in processes of their own: paused, continued, killed when they do not obey."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import fill_ranks
import pytest

from executor.bubble import Filler
from executor.fill import processes
from executor.fill.child import ChildWork
from executor.fill.processes import Family, state_of

MS = 10**6
FACTORY = Path(__file__).with_name("fill_children.py")


def child(what, samples=None, **fields):
    job = fill_ranks.job("apart", "none", 2, 10**6, arguments={"what": what})
    work = ChildWork(
        type(job)(
            name=job.name,
            kind=job.kind,
            samples=job.samples,
            factory=f"{FACTORY}:make",
            arguments=job.arguments,
            configurations=job.configurations,
        ),
        timeout_s=60,
        **fields,
    )
    work.samples = samples
    return work


def wait_until(happened, what, seconds=60):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.005)


def is_stopped(pid):
    """Whether it comes to stand still; a stop is pending until a busy machine gets to it."""
    wait_until(lambda: state_of(pid) == "T", f"process {pid} in state T")
    return True


def bubbles(filler, number, ms=60):
    for _ in range(number):
        with filler.bubble(time.perf_counter_ns() + ms * MS) as handover:
            yield handover


def test_a_process_works_in_bubbles_only_and_no_further_than_it_is_allowed(request):
    work = child("spin", samples=1000)
    work.allow(3)
    filler = Filler([work])
    request.addfinalizer(filler.close)
    pid = work._process.pid
    for handover in used_bubbles(filler, lambda: work.counts.micro_steps >= 3):
        assert is_stopped(pid), work.failure
        assert handover.busy_ns >= 0
    for _ in bubbles(filler, 2):
        assert is_stopped(pid), work.failure
    assert work.counts.micro_steps == 3
    work.allow(10**6)
    for _ in used_bubbles(filler, lambda: work.counts.samples > 3):
        assert is_stopped(pid), work.failure
        before = work._board[3]
        time.sleep(0.02)
        assert work._board[3] == before, "it works outside of bubbles"
    made = work.counts.samples
    # one more may have been under way
    assert made <= work.state()["steps"] < made + 100
    work.load({"steps": 5000})
    assert 5000 <= work.state()["steps"] < 5100
    work.samples = made + 4
    for _ in used_bubbles(filler, lambda: work.ended):
        pass
    assert work.done, work.failure
    assert work.failure is None
    filler.close()
    assert state_of(pid) in "XZ"


def used_bubbles(filler, enough, seconds=120):
    """Give bubbles until they were enough; how many that takes a busy machine decides."""
    end = time.monotonic() + seconds
    while not enough():
        assert time.monotonic() < end, f"not within {seconds} s: {filler.works[0].failure}"
        yield from bubbles(filler, 1)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("raise", "micro-step 0 raised ValueError: nothing left"),
        ("die", "its process ended with signal 9"),
    ],
)
def test_what_goes_wrong_in_a_process_stays_there(what, words):
    work = child(what)
    filler = Filler([work])
    for _ in used_bubbles(filler, lambda: work.ended):
        pass
    assert work.failure == words


def test_a_process_that_cannot_be_made_is_a_failure_in_one_line():
    work = child("unknown")
    work.setup()
    assert work.failure is not None
    assert "factory" in work.failure
    assert "raised KeyError" in work.failure
    assert "\n" not in work.failure


def test_what_a_process_has_started_is_paused_and_killed_with_it():
    work = child("family")
    filler = Filler([work])
    assert work.failure is None
    note = Path("/tmp") / f"octotune-test-family-{work._process.pid}"
    try:
        for _ in used_bubbles(filler, lambda: note.exists() and note.read_text()):
            pass
        other = int(note.read_text())
        assert os.getpgid(other) != work._process.pid
        for _ in bubbles(filler, 1):
            pass
        assert is_stopped(other), work.failure
        filler.close()
        wait_until(lambda: state_of(other) in "XZ", f"the end of process {other}")
    finally:
        note.unlink(missing_ok=True)


def test_a_process_that_takes_too_much_memory_is_killed():
    work = child("eat", cap_bytes=32 << 20)
    filler = Filler([work])
    for _ in used_bubbles(filler, lambda: work.ended):
        pass
    assert work.failure is not None
    assert "it may hold 32 MiB: killed" in work.failure


# --- a machine that is busy, and one with a process that does not obey -------------------------


class Machine:
    """One process, in a state that is given, that uses so much time whenever it is looked at."""

    def __init__(self, state, uses_ns=0):
        self.state = state
        self.uses_ns = uses_ns
        self.time_ns = 10**9
        self.sent = []

    def descendants(self, pid):
        return []

    def began_of(self, pid):
        return "1"

    def state_of(self, pid):
        return self.state

    def used_ns(self, pid):
        self.time_ns += self.uses_ns
        return self.time_ns

    def send(self, pid, number):
        self.sent.append(number)

    send_group = send


class Real(Machine):
    """The same, and signals arrive."""

    def send(self, pid, number):
        processes.send(pid, number)

    send_group = send


@pytest.mark.parametrize("state", ["R", "D", "S"])
def test_a_process_that_gets_no_processor_has_not_disobeyed_a_stop(state):
    machine = Machine(state)
    family = Family(7, machine)
    assert not family.stop()
    assert family.disobeyed_ns() == 0
    family.go_on()
    assert machine.sent[0] == signal.SIGSTOP
    assert machine.sent[-1] == signal.SIGCONT


def test_a_process_that_stops_has_obeyed():
    family = Family(7, Machine("T", uses_ns=100 * MS))
    assert family.stop()
    assert family.disobeyed_ns() == 0


@pytest.mark.parametrize(("uses_ms", "disobeys"), [(10, False), (20, False), (50, True)])
def test_a_process_that_goes_on_using_the_processor_has_disobeyed(uses_ms, disobeys):
    """Time is counted in ticks: one or two may belong to what ran before the signal."""
    family = Family(7, Machine("R", uses_ns=uses_ms * MS))
    family.stop()
    assert bool(family.disobeyed_ns()) == disobeys


def test_a_process_is_killed_only_if_it_disobeys(request):
    work = child("spin")
    filler = Filler([work])
    request.addfinalizer(filler.close)
    work._family = Family(work._process.pid, Real("R"))
    work._pause()
    for _ in bubbles(filler, 3):
        assert work.failure is None
    work._family = Family(work._process.pid, Real("R", uses_ns=50 * MS))
    work._pause()
    for _ in used_bubbles(filler, lambda: work.ended):
        pass
    assert work.failure == "used 50 ms of the processor after it was stopped: killed"


def test_what_a_process_ends_after_its_bubble_counts(request):
    """A stop may be pending for a while."""
    work = child("spin", samples=5)
    filler = Filler([work])
    request.addfinalizer(filler.close)
    for slot in (1, 3, 6):  # samples, micro-steps, passes
        work._board[slot] = 5
    for _ in used_bubbles(filler, lambda: work.ended):
        pass
    assert work.done
    assert work.counts.micro_steps == 5


def test_one_stop_that_took_long_does_not_end_the_use_of_bubbles(request):
    work = child("spin")
    filler = Filler([work])
    request.addfinalizer(filler.close)
    for _ in range(60):
        work._stopping.note(10**9)  # far more than any bubble
    tried = 0
    for _ in used_bubbles(filler, lambda: work.counts.bubbles > 0):
        tried += 1
    assert tried > 1
    assert work.failure is None
