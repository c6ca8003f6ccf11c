"""Work and Filler: deadlines, learned times, a world of its own, failures that stay inside."""

from __future__ import annotations

import os
import random
import time

import numpy as np
import pytest
import torch

from executor.bubble import Filler
from executor.fill.giving_way import (
    FILL_SLICE_NS,
    MAIN_SLICE_NS,
    giving_way,
    kept_off_ns,
    relax,
    slice_ns,
)
from executor.fill.task import find_factory, make_task
from executor.fill.work import Estimate, Work, World, own_world
from octotune.errors import MalformedError
from octotune.fill.jobs import Configuration, FillJob, MicroStep

MS = 10**6


class Task:
    """Counts; each step takes so long and does what it is told."""

    def __init__(self, ms=1.0, act=None):
        self.ms, self.act, self.steps, self.gone = ms, act, 0, False

    def setup(self, device):
        self.device = device

    def step(self):
        self.steps += 1
        time.sleep(self.ms / 1e3)
        if self.act is not None:
            self.act(self.steps)
        return 2

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]

    def teardown(self):
        self.gone = True


class Rows(Task):
    """Passes of three micro-steps; each carries what the ones before left."""

    num_micro_steps = 3

    def __init__(self):
        super().__init__()
        self.seen = []

    def run(self, k, carry):
        self.seen.append((k, carry))
        return 5 if k == 2 else (carry or 0) + 10


def in_ms(ms):
    return time.perf_counter_ns() + int(ms * MS)


def test_a_bubble_ends_by_its_deadline_and_is_used():
    task = Task(1.0)
    filler = Filler([Work("a", task, [int(1.2 * MS)])])
    deadline = in_ms(20)
    with filler.bubble(deadline) as handover:
        ended = time.perf_counter_ns()
    assert ended < deadline + 15 * MS
    assert handover.busy_ns >= 5 * MS
    assert [(name, k) for name, k, _, _ in handover.ran] == [("a", 0)] * task.steps
    assert filler.works[0].counts.samples == 2 * task.steps


def test_what_does_not_end_in_time_is_not_begun():
    task = Task(1.0)
    filler = Filler([Work("a", task, [30 * MS])])
    with filler.bubble(in_ms(20)) as handover:
        assert handover.ran == []
    assert task.steps == 0


def test_a_bubble_is_left_when_the_loop_can_go_on():
    task = Task(1.0)
    filler = Filler([Work("a", task, [MS])])
    began = time.perf_counter_ns()
    with filler.bubble(in_ms(400), arrived=lambda: time.perf_counter_ns() > began + 5 * MS) as h:
        assert h.stopped_early
    assert time.perf_counter_ns() - began < 200 * MS


def test_too_little_memory_runs_nothing():
    work = Work("a", Task(), [MS], memory_bytes=[100])
    with Filler([work]).bubble(in_ms(10), free_bytes=99):
        pass
    assert work.counts.micro_steps == 0
    assert work.counts.refused_memory == 1


def test_the_next_job_gets_what_the_first_leaves():
    first, second = Task(0.2), Task(0.2)
    filler = Filler([Work("a", first, [MS // 4], samples=4), Work("b", second, [MS // 4])])
    with filler.bubble(in_ms(30)):
        pass
    assert first.steps == 2
    assert second.steps > 0
    filler.close()
    assert first.gone
    assert second.gone


def test_passes_carry_what_their_micro_steps_leave():
    task = Rows()
    work = Work("a", task, [1000, 1000, 1000], samples=10)
    with Filler([work]).bubble(in_ms(50)):
        pass
    assert task.seen == [(0, None), (1, 10), (2, 20)] * 2
    assert work.done
    assert work.counts.passes == 2


def test_open_passes_are_taken_oldest_first():
    task = Rows()
    work = Work("a", task, [1000] * 3, memory_bytes=[7] * 3, carried_bytes=5)
    assert work.needs_bytes(0) == 7
    for k in (0, 0, 1, 0, 1, 2):
        assert work.can_run(k)
        work.run(k)
    assert work.num_open == 2
    assert work.needs_bytes(0) == 7 + 2 * 5
    assert work.needs_bytes(1) == 7 + 5
    assert not work.can_run(0) or work.next_of_one_pass() == 2


@pytest.mark.parametrize("when", [1, 3])
def test_a_job_that_raises_is_stopped_and_nothing_comes_out(when):
    def act(step):
        if step == when:
            raise KeyError("lost\nmore")

    task = Task(0.1, act)
    work = Work("a", task, [MS // 5])
    with Filler([work]).bubble(in_ms(20)):
        pass
    assert task.steps == when
    assert work.failure == "micro-step 0 raised KeyError: 'lost\\nmore'"
    assert task.gone
    assert work.ended


def test_a_job_whose_setup_raises_never_runs():
    class Bad(Task):
        def setup(self, device):
            raise OSError("no data")

    work = Work("a", Bad(), [MS])
    with Filler([work]).bubble(in_ms(5)) as handover:
        assert handover.ran == []
    assert work.failure == "setup raised OSError: no data"


def test_a_job_that_comes_back_late_again_and_again_is_stopped():
    work = Work("a", Task(12.0), [MS])
    filler = Filler([work])
    for _ in range(12):
        work.estimates[0] = Estimate(MS)  # a job whose times cannot be learned
        with filler.bubble(in_ms(4)):
            pass
        if work.ended:
            break
    assert work.counts.late == 3
    assert work.failure is not None
    assert work.failure.startswith("overran: 3 micro-steps came back late")


def test_a_job_that_others_kept_off_its_core_is_not_stopped_for_it(monkeypatch):
    waited = iter(range(0, 10**15, 10**12))
    monkeypatch.setattr("executor.bubble.kept_off_ns", lambda: next(waited))
    work = Work("a", Task(12.0), [MS])
    filler = Filler([work])
    while work.counts.late < 6:
        work.estimates[0] = Estimate(MS)
        with filler.bubble(in_ms(4)):
            pass
    assert work.failure is None


def test_time_ready_to_run_on_cores_that_others_had_only_grows():
    before = kept_off_ns()
    assert 0 <= before <= kept_off_ns()


def test_a_job_that_leaks_is_stopped():
    kept = []
    work = Work(
        "a",
        Task(0.0, lambda _: kept.append(torch.ones(20 << 20))),  # 80 MiB each
        [MS],
        memory_bytes=[1 << 20],
    )
    filler = Filler([work])
    for _ in range(4):
        with filler.bubble(in_ms(100)):
            pass
    assert work.failure is not None
    assert "it leaks" in work.failure
    assert len(kept) < 8


def test_random_numbers_modes_and_dtypes_stay_apart():
    def draw():
        return torch.rand(1).item(), random.random(), np.random.normal(), np.random.rand()

    def act(_):
        drawn.append(draw())
        torch.manual_seed(1)
        np.random.seed(1)
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)

    def seed():
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)

    seed()
    expected = [draw() for _ in range(4)]
    drawn = []
    filler = Filler([Work("a", Task(0.0, act), [MS], seed=5)])
    seed()
    found = []
    for _ in range(4):
        found.append(draw())
        with torch.no_grad() if len(found) % 2 else torch.enable_grad():
            before = torch.is_grad_enabled()
            with filler.bubble(in_ms(4)):
                assert torch.is_grad_enabled() == before
                assert torch.get_default_dtype() == torch.float32
    assert found == expected
    assert drawn


def test_a_job_draws_the_same_whatever_is_drawn_outside():
    def run(noise):
        world, drawn = World(7, torch.device("cpu")), []
        for _ in range(3):
            torch.rand(noise)
            np.random.rand(noise)
            with own_world(world):
                drawn.append((torch.rand(2).tolist(), np.random.rand(), random.random()))
        return drawn

    assert run(1) == run(5)


def test_a_world_is_left_when_what_is_inside_raises():
    before = torch.get_rng_state()

    def inside():
        with own_world(World(0, torch.device("cpu"))):
            torch.rand(3)
            raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        inside()
    assert torch.equal(torch.get_rng_state(), before)


def test_an_estimate_learns_and_an_outlier_counts_little():
    estimate = Estimate(1000)
    for took in [2000, 2100, 1900] * 20:
        estimate.note(took)
    assert 1900 < estimate.mean_ns < 2100
    assert 2000 < estimate.safe_ns < 2500
    estimate.note(10**9)
    assert estimate.mean_ns < 2600
    assert estimate.worst_ns == 10**9


def test_an_estimate_that_refuses_bubble_after_bubble_fades_to_what_it_was():
    estimate = Estimate(1000)
    for _ in range(20):
        estimate.note(10**6)
    long = estimate.safe_ns
    for _ in range(20):
        estimate.refuse()
    assert estimate.safe_ns == long
    for _ in range(200):
        estimate.refuse()
    assert 1000 < estimate.safe_ns < 1100


def test_an_estimate_below_what_it_was_stays_whatever_it_refuses():
    estimate = Estimate(1000)
    for _ in range(50):
        estimate.note(500)
    before = estimate.mean_ns
    for _ in range(200):
        estimate.refuse()
    assert estimate.mean_ns == before


def test_a_job_that_was_slow_for_a_while_gets_another_try():
    work = Work("a", Task(), [MS])
    filler = Filler([work])
    for _ in range(20):
        work.estimates[0].note(400 * MS)  # the machine was busy
    for _ in range(200):
        with filler.bubble(in_ms(60)):
            pass
        if work.counts.micro_steps:
            break
    assert work.counts.micro_steps > 0


# --- giving way ----------------------------------------------------------------------------------


def test_fill_work_gives_way_to_threads_that_hurry():
    """Where the system has slices; where it has none nothing happens, and nothing is raised."""
    seen = []
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    relax()
    before = slice_ns()
    filler = Filler([Work("a", Task(act=lambda _: seen.append(slice_ns())), [MS])])
    hurries = slice_ns()
    while not seen:
        with filler.bubble(in_ms(60)):
            after = slice_ns()
    filler.close()
    assert os.getpriority(os.PRIO_PROCESS, 0) == nice
    assert slice_ns() == before
    if before is not None:
        assert (hurries, seen[0], after) == (MAIN_SLICE_NS, FILL_SLICE_NS, MAIN_SLICE_NS)


def test_a_thread_of_another_policy_is_left_alone():
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        with giving_way():
            assert os.sched_getscheduler(0) == os.SCHED_BATCH
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


# --- factories -----------------------------------------------------------------------------------


def job(factory, **fields):
    micro = (MicroStep(time_ns=1),)
    return FillJob(
        name="mine",
        kind="inference",
        samples=1,
        factory=factory,
        configurations=(
            Configuration(batch_size=3, technique="checkpointing", micro_steps=micro),
        ),
        **fields,
    )


def test_a_factory_gets_its_arguments_and_the_configuration_it_asks_for(tmp_path):
    file = tmp_path / "my_fill_factory.py"
    file.write_text("def make(size, batch_size):\n    return (size, batch_size)\n")
    found = job(f"{file}:make", arguments={"size": 4})
    assert make_task(found, found.configurations[0]) == (4, 3)
    found = job(f"{file}:make", arguments={"size": 4, "batch_size": 9})
    assert make_task(found, found.configurations[0]) == (4, 9)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (None, "job 'mine' has no factory"),
        ("nowhere", "write module:function or file.py:name"),
        ("no_such_module_here:make", "ModuleNotFoundError"),
        ("/no/such/file.py:make", "there is no file /no/such/file.py"),
        ("json:nothing", "json has no callable 'nothing'"),
        ("json:loads", "factory json:loads raised TypeError"),
    ],
)
def test_a_factory_that_cannot_be_used_is_one_line(factory, words):
    found = job(factory)
    with pytest.raises(MalformedError) as raised:
        make_task(found, found.configurations[0])
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert find_factory("json:dumps", "x").__name__ == "dumps"


@pytest.mark.parametrize(
    ("task", "num", "words"),
    [
        (object(), 1, "has no setup"),
        (Rows(), 2, "num_micro_steps = 3"),
        (type("Bare", (Task,), {"step": None})(), 1, "neither step"),
    ],
)
def test_what_is_no_task_is_refused(task, num, words):
    with pytest.raises(MalformedError, match=words):
        Work("mine", task, [1] * num)
