"""Fill jobs in processes of their own: paused, continued, killed when they do not obey."""

from __future__ import annotations

import os
import time
from pathlib import Path

import fill_ranks
import pytest

from executor.bubble import Filler
from executor.fill.child import ChildWork
from executor.fill.processes import state_of

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
    for handover in bubbles(filler, 6):
        assert state_of(pid) == "T"
        assert handover.busy_ns >= 0
    assert work.counts.micro_steps == 3
    work.allow(10**6)
    for _ in bubbles(filler, 2):
        before = work._board[3]
        time.sleep(0.02)
        assert work._board[3] == before, "it works outside of bubbles"
    made = work.counts.samples
    assert made > 3
    # one more may have been under way
    assert made <= work.state()["steps"] < made + 100
    work.load({"steps": 5000})
    assert 5000 <= work.state()["steps"] < 5100
    work.samples = made + 4
    # on a busy machine stopping it takes long, and shorter bubbles would not be used at all
    for _ in bubbles(filler, 40, ms=500):
        if work.ended:
            break
    assert work.done
    assert work.failure is None
    filler.close()
    assert state_of(pid) in "XZ"


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
    for _ in bubbles(filler, 20, ms=100):
        if work.ended:
            break
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
        for _ in bubbles(filler, 20, ms=100):
            if note.exists() and note.read_text():
                break
        other = int(note.read_text())
        assert os.getpgid(other) != work._process.pid
        for _ in bubbles(filler, 1):
            pass
        assert state_of(other) == "T"
        filler.close()
        for _ in range(100):
            if state_of(other) in "XZ":
                break
            time.sleep(0.02)
        assert state_of(other) in "XZ"
    finally:
        note.unlink(missing_ok=True)


def test_a_process_that_takes_too_much_memory_is_killed():
    work = child("eat", cap_bytes=32 << 20)
    filler = Filler([work])
    for _ in bubbles(filler, 30, ms=100):
        if work.ended:
            break
    assert work.failure is not None
    assert "it may hold 32 MiB: killed" in work.failure
