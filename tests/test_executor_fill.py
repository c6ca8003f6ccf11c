"""The fill runtime beside a pipeline: the main job's bits stay, jobs come, move, fail and go."""

from __future__ import annotations

import dataclasses
from collections import deque
from types import SimpleNamespace

import executor_ranks
import fill_ranks
import msgspec
import pytest

from executor.bubble import Handover
from executor.errors import MismatchError
from executor.fill.confirm import SHARES, num_steps
from executor.fill.instructions import (
    BEFORE_OPTIMIZER,
    TAIL,
    bubble_instructions,
    following,
    refuse_other_plan,
)
from executor.fill.lengths import Lengths
from executor.fill.queue import rests_anywhere
from executor.fill.run import FillOptions, FillRun
from executor.fill.work import Work
from executor.program import lower
from octotune.fill.plan import PackingEntry, RunEntry

MS = 10**6


def moving_plan():
    """Job a works on device 0, then on device 1; job b is there before it."""
    fill = fill_ranks.fill_plan(
        [fill_ranks.job("a", "counting", 1.5, 10), fill_ranks.job("b", "counting", 1.5, 3)]
    )
    packing = {p.device: p for p in fill.packings}

    def pack(job, device):
        return PackingEntry(
            job=job,
            device=device,
            configuration=0,
            samples=packing[device].samples,
            steps=packing[device].steps,
        )

    packings = (pack(0, 0), pack(1, 1), pack(0, 1))
    runs = (
        RunEntry(packing=0, begin=0, end=1, samples=6),
        RunEntry(packing=1, begin=0, end=1, samples=3),
        RunEntry(packing=2, begin=1, end=2, samples=4),
    )
    return msgspec.structs.replace(fill, packings=packings, runs=runs)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What became of some fill plans on two ranks, in one process group."""
    kept = fill_ranks.fill_plan(
        [
            fill_ranks.job("trains", "training", 2, 10_000, kind="training", batch_size=4),
            fill_ranks.job("raises", "counting", 1.5, 10_000, arguments={"raises_at": 3}),
        ]
    )
    cancelled = fill_ranks.fill_plan([fill_ranks.job("a", "counting", 1.5, 10_000)])
    options = FillOptions(profile_steps=2, steps_end_together=True)
    folder = str(tmp_path_factory.mktemp("fill"))
    in_folder = dataclasses.replace(options, folder=folder)
    confirming = dataclasses.replace(options, confirm=True)
    cases = [
        ("beside", kept, 8, options),
        ("moving", moving_plan(), 8, options),
        ("cancelling", cancelled, 8, options),
        ("cancelling_by_file", cancelled, 8, in_folder),
        ("leaving", fill_ranks.leaving_plan(), 6, options),
        ("confirming", cancelled, 2 + num_steps(2) + 2, confirming),
        ("ahead", fill_ranks.loose_plan(), 6, options),
    ]
    results = executor_ranks.spawn(2, fill_ranks.several, cases)
    return {case[0]: [result[at] for result in results] for at, case in enumerate(cases)}


def test_the_main_job_keeps_its_bits_beside_training_raising_and_plain_jobs(ran):
    rows = {}
    for plain, filled, summary in ran["beside"]:
        assert filled == plain
        rows |= {row[0]: row for row in summary}
    assert rows["trains"][1] > 0
    # on a machine that is busy with other things a job may come back late and is stopped for it
    assert rows["trains"][2] is None or rows["trains"][2].startswith("overran")
    assert rows["raises"][2] == "micro-step 0 raised RuntimeError: the data ran out"
    assert rows["raises"][1] == 2


def test_a_job_moves_between_devices_with_its_state(ran):
    (here, _), (there, states) = ran["moving"]
    assert [row[:4] for row in here] == [("a", 6, None, False)]
    assert [row[:4] for row in there] == [("b", 3, None, False), ("a", 4, None, False)]
    assert states[2] == 10  # six steps there, four here
    assert there[1][4] >= here[0][5]


def test_a_job_is_cancelled_from_any_rank(ran):
    (row,) = ran["cancelling"][0] + ran["cancelling"][1]
    is_cancelled_in_time(row)


def is_cancelled_in_time(row):
    name, samples, failure, cancelled, _, ended = row
    assert (name, failure, cancelled) == ("a", None, True)
    assert 0 < samples < 10_000
    assert ended <= 5


def test_a_job_is_cancelled_by_a_file_in_the_folder(ran):
    (row,) = ran["cancelling_by_file"][0] + ran["cancelling_by_file"][1]
    is_cancelled_in_time(row)


def test_optimizer_state_leaves_in_the_step_and_a_job_works_in_its_room(ran):
    for plain, filled, *_ in ran["leaving"]:
        assert filled == plain
    # the second device's waits lie before its state is out and after its optimizer
    (_, _, away, rows, refused), (_, _, nothing, none, _) = ran["leaving"]
    assert (nothing, none) == ([], [])
    assert all(missing == 0 for _, missing in away)
    assert max(now for now, _ in away) == fill_ranks.STATE_BYTES
    (_, samples, failure, *_), *rest = rows
    assert (failure, refused, rest) == (None, [0], [])
    assert samples > 0


def test_a_wait_is_lengthened_on_each_device_before_jobs_begin(ran):
    for shares, filled_steps, samples in ran["confirming"]:
        assert len(shares) == 2
        assert all(0.5 <= share <= SHARES[-1] for share in shares)
        assert filled_steps == 2
        assert samples[0] > 0
    assert ran["confirming"][0] == ran["confirming"][1]


def test_time_that_is_left_goes_to_later_bubbles_work(ran):
    ((paced, _, failed),), ((hurried, predicted, failed_ahead),) = ran["ahead"][0]
    assert (failed, failed_ahead) == (None, None)
    assert paced <= predicted < hurried


# --- without ranks -------------------------------------------------------------------------------


def test_bubbles_are_found_by_the_action_after_them():
    fill = fill_ranks.fill_plan([fill_ranks.job("a", "counting", 1, 10)])
    plan = fill.plan
    for device, row in enumerate(plan.actions):
        found = bubble_instructions(fill, device, row)
        assert len(found) == len(fill.bubbles[device])
        for instruction, bubble in zip(found, fill.bubbles[device], strict=True):
            assert instruction.length_ns == bubble.end_ns - bubble.start_ns
            if instruction.position >= 0:
                assert row[instruction.position] == bubble.before
            else:
                assert (
                    bubble.before
                    == {BEFORE_OPTIMIZER: "optimizer", TAIL: "end"}[instruction.position]
                )
    assert any(i.position == TAIL for i in bubble_instructions(fill, 1, plan.actions[1]))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (fill_ranks.main_plan(2, 5), "num_microbatches is 4, the plan's 5"),
        (fill_ranks.main_plan(3, 4), "its stages differ"),
    ],
)
def test_a_fill_plan_for_another_plan_is_refused(plan, words):
    fill = fill_ranks.fill_plan([fill_ranks.job("a", "counting", 1, 10)])
    refuse_other_plan(fill.plan, fill)
    with pytest.raises(MismatchError, match=words):
        refuse_other_plan(plan, fill)


def test_runs_of_a_job_follow_each_other():
    assert following(moving_plan()) == [(0, 2)]


def test_ahead_of_the_plan_a_pass_waits_only_where_it_has_room():
    fill = fill_ranks.leaving_plan()
    packing = fill.packings[0]
    assert rests_anywhere(fill, packing)
    configuration = msgspec.structs.replace(fill.configuration(packing), carried_bytes=10**6)
    job = msgspec.structs.replace(fill.jobs[packing.job], configurations=(configuration,))
    jobs = tuple(job if at == packing.job else each for at, each in enumerate(fill.jobs))
    assert not rests_anywhere(msgspec.structs.replace(fill, jobs=jobs), packing)


def lengths_of(plan, device, planned):
    programs = lower(plan.schedule(), [stage.device for stage in plan.stages])
    return Lengths(programs[device], planned), programs[device]


def test_waits_are_profiled_and_profiled_again_when_they_drift():
    lengths, program = lengths_of(fill_ranks.main_plan(), 1, {0: 6 * MS})
    assert lengths.length_ns(0) == 6 * MS
    num = len(program.ops)

    def step(wait_ns, full=True):
        began, arrived = [-1] * num, [-1] * num
        for position in lengths.positions:
            began[position] = 1000 + position * 20 * MS
            arrived[position] = began[position] + wait_ns
        lengths.note(began, arrived, 1000, full)

    for wait in (50, 8, 9, 8):
        step(wait * MS)
    lengths.settle(skip=1)
    assert lengths.length_ns(0) == 8 * MS
    second = lengths.positions[1]
    assert lengths.before(second) == 0
    assert lengths.gap_ns(second) == second * 20 * MS
    for _ in range(20):
        step(8 * MS + MS // 2)
    assert (lengths.reprofiled, lengths.length_ns(0)) == (0, 8 * MS)
    for _ in range(20):
        step(15 * MS)
    assert lengths.reprofiled >= 1
    assert lengths.length_ns(0) == 15 * MS


def test_a_run_that_begins_within_a_step_waits_for_the_next_and_misses_nothing():
    from executor.fill.queue import DeviceRun

    def run():
        return DeviceRun(
            number=0,
            entry=RunEntry(packing=0, begin=0, end=2, samples=1),
            job=0,
            work=None,
            steps=(((0, 1), (2,), ()), ((0,), (1, 2), ())),
            waits_for=None,
            moves_on=False,
        )

    late = run()
    assert late.planned_to(4, 1) == []
    assert late.planned_to(5, 0) == [0, 1]
    assert late.planned_to(5, 1) == [2]
    assert late.planned_to(6, 1) == [0, 1, 2]  # two bubbles were not met
    assert late.planned_to(6, 1) == []
    assert run().planned_to(3, 0) == [0, 1]
    hurried = run()
    assert hurried.planned_to(0, 0) == [0, 1]
    assert hurried.planned_next() == [2]
    assert hurried.planned_next() == [0]  # the third bubble has nothing
    assert hurried.planned_to(0, 2) == []
    assert hurried.planned_to(1, 1) == [1, 2]


# --- jobs that nothing is long enough for --------------------------------------------------------


class Step:
    def setup(self, device):
        pass

    def step(self):
        return 1

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def teardown(self):
        pass


def hungry(time_ms):
    """A job that was too long for bubble after bubble, where late work had made them short."""
    ended = []
    fill = SimpleNamespace(
        instructions=[None],
        lengths=SimpleNamespace(length_ns={0: 7 * MS, 1: 2 * MS}.get),
        _table={0: None, 1: None},
        _factor={0: 0.3, 1: 0.3},
        _switch_ns=0,
        _margin=0.1,
        _end=ended.append,
    )
    order = SimpleNamespace(pending=deque([0]))
    run = SimpleNamespace(hungry=10**6, order=order, work=Work("a", Step(), [time_ms * MS]))
    FillRun._refuse_hungry(fill, run, Handover(began_ns=0, deadline_ns=0))
    return fill, run, ended


def test_a_job_that_fits_in_a_bubble_as_long_as_measured_gets_another_try():
    fill, run, ended = hungry(5)
    assert (run.hungry, ended, run.work.failure) == (0, [], None)
    assert fill._factor == {0: 1.0, 1: 1.0}


def test_a_job_that_fits_in_no_bubble_ends_and_says_so():
    _, run, ended = hungry(6.5)
    assert ended == [run]
    assert run.work.failure == (
        "its micro-step 0 takes 6.9 ms with its spread and fits in no bubble; the longest one is "
        "7.0 ms"
    )
