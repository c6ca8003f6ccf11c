"""The fleet against closed forms, an oracle that takes every step, and what policies promise."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octotune.__main__ import main
from octotune.contract import Cluster, Layer, Workload, build_costs
from octotune.errors import InfeasibleError, MalformedError
from octotune.fill.fleet import FleetConfig, Handover, play, read_fleet, run_fleet
from octotune.fill.models import find_hardware
from octotune.fill.policies import BUILT_IN, deadline_aware, find_policy, mix, users_score
from octotune.fill.traces import Part, Synthetic, draw
from octotune.schedules import find_family, plan_from
from simulator.engine import simulate
from simulator.fleet import NEVER, Fleet, Policy, Rules, Status, Trace, Waiting, simulate_fleet
from simulator.overruns import Filled, slowdown

STEP = 10
HOUR = 3600 * 10**9
SJF, MAKESPAN, DEADLINE, FIFO = (BUILT_IN[n] for n in ("sjf", "makespan", "deadline", "fifo"))


def fleet(devices=1, samples=((1,),), steps=None, classes=None, step_ns=STEP):
    samples = np.array(samples, dtype=np.int64)
    return Fleet(
        step_ns=step_ns,
        device_class=np.array([0] * devices if classes is None else classes, dtype=np.int64),
        cycle_samples=samples,
        cycle_steps=np.ones_like(samples) if steps is None else np.array(steps, dtype=np.int64),
    )


def trace(*jobs):
    """Jobs as (arrival step, samples), or with kind, deadline step and cancellation step."""
    rows = [(*job, *(0, None, None)[len(job) - 2 :]) for job in jobs]

    def times(column):
        return np.array([NEVER if t is None else t * STEP for t in column], dtype=np.int64)

    arrival, samples, kind, deadline, cancel = zip(*rows, strict=True)
    return Trace(
        arrival_ns=times(arrival),
        kind=np.array(kind, dtype=np.int64),
        samples=np.array(samples, dtype=np.int64),
        deadline_ns=times(deadline),
        cancel_ns=times(cancel),
    )


def ends(result):
    return [None if end == NEVER else end // STEP for end in result.end_ns.tolist()]


def test_one_device_works_through_its_jobs_in_turn():
    result = simulate_fleet(fleet(), trace((0, 5), (1, 3), (2, 4)), FIFO)
    assert ends(result) == [5, 8, 12]
    assert result.mean_completion_ns == STEP * (5 + 7 + 10) / 3
    assert result.makespan_ns == 12 * STEP
    assert result.occupied_share == 1.0


def test_shortest_job_first_takes_the_short_one_that_waits():
    result = simulate_fleet(fleet(), trace((0, 5), (1, 9), (2, 2)), SJF)
    assert ends(result) == [5, 16, 7]


def test_a_job_starts_at_the_step_after_its_arrival_and_ends_with_a_whole_cycle():
    jobs = trace((0, 7))
    jobs.arrival_ns[0] = 11  # in step 1
    result = simulate_fleet(fleet(samples=((3,),), steps=((2,),)), jobs, FIFO)
    assert ends(result) == [2 + 3 * 2]
    assert result.samples_done.tolist() == [7]


def test_of_free_devices_the_quickest_gets_the_job():
    result = simulate_fleet(
        fleet(samples=((1, 4),), classes=[0, 1, 0]), trace((0, 8), (0, 8)), SJF
    )
    assert ends(result) == [2, 8]
    assert result.run_device.tolist() == [1, 0]


def test_a_job_waits_for_a_device_that_it_fits():
    rates = fleet(samples=((1, 1), (0, 1)), steps=((1, 1), (0, 1)), classes=[0, 1])
    result = simulate_fleet(rates, trace((0, 4), (1, 2, 1), (2, 3, 0)), FIFO)
    assert [result.run_device[i] for i in np.argsort(result.run_job)] == [0, 1, 1]
    nowhere = fleet(samples=((1,), (0,)), steps=((1,), (0,)))
    stuck = simulate_fleet(nowhere, trace((0, 4), (1, 2, 1)), FIFO)
    assert ends(stuck) == [4, None]
    assert stuck.status[1] == Status.WAITING


def test_cancelled_jobs_leave_the_queue_or_the_device():
    result = simulate_fleet(
        fleet(), trace((0, 9, 0, None, 4), (1, 5), (2, 5, 0, None, 3), (2, 1)), FIFO
    )
    assert result.status.tolist() == [Status.CANCELLED, Status.DONE, Status.CANCELLED, Status.DONE]
    assert ends(result) == [None, 9, None, 10]
    assert result.samples_done.tolist() == [4, 5, 0, 1]


def test_failures_cost_the_work_since_the_last_checkpoint():
    rules = Rules(failures_per_hour=3600e9 / STEP / 40, most_failures=10**6, seed=3)
    plain = simulate_fleet(fleet(), trace((0, 100)), FIFO, rules)
    saved = simulate_fleet(
        fleet(),
        trace((0, 100)),
        FIFO,
        Rules(
            failures_per_hour=rules.failures_per_hour,
            most_failures=10**6,
            seed=3,
            checkpoint_steps=5,
        ),
    )
    assert plain.failures[0] > 0
    assert saved.failures[0] > 0
    assert plain.end_ns[0] > saved.end_ns[0] > 100 * STEP
    assert plain.samples_done[0] == saved.samples_done[0] == 100
    kept = saved.run_samples[:-1]
    assert (kept % 5 == 0).all()
    assert saved.run_samples.sum() == 100


def test_a_job_that_fails_too_often_is_given_up():
    rules = Rules(failures_per_hour=3600e9 / STEP / 5, most_failures=2, seed=0)
    result = simulate_fleet(fleet(), trace((0, 1000), (0, 1)), FIFO, rules)
    assert result.status.tolist() == [Status.FAILED, Status.DONE]
    assert result.failures[0] == 3


def test_a_job_moves_to_a_better_device_at_a_checkpoint():
    rates = fleet(samples=((1, 10),), classes=[0, 1])
    jobs = trace((0, 50), (0, 100))
    rules = Rules(checkpoint_steps=4, move_steps=1)
    result = simulate_fleet(rates, jobs, SJF, rules)
    # the short job takes the quick device for 5 steps; the other moves there at step 8
    assert ends(result) == [5, 8 + 1 + math.ceil((100 - 8) / 10)]
    assert result.moves.tolist() == [0, 1]
    assert ends(simulate_fleet(rates, jobs, SJF)) == [5, 100]


def test_a_long_job_makes_room_at_a_checkpoint_where_that_is_allowed():
    jobs = trace((0, 100), (1, 2))
    rules = Rules(checkpoint_steps=10, move_steps=1, preempt_above=2.0)
    result = simulate_fleet(fleet(), jobs, SJF, rules)
    assert ends(result) == [10 + 2 + 1 + 90, 12]
    assert ends(simulate_fleet(fleet(), jobs, SJF, Rules(checkpoint_steps=10))) == [100, 102]


def test_a_job_that_is_nearly_done_does_not_make_room():
    """At the checkpoint at 90 it has 10 steps left, no more than twice those of the other."""
    rules = Rules(checkpoint_steps=10, move_steps=1, preempt_above=2.0)
    result = simulate_fleet(fleet(), trace((0, 100), (85, 5)), SJF, rules)
    assert ends(result) == [100, 105]


def test_the_horizon_stops_the_clock_and_counts_what_was_made():
    result = simulate_fleet(fleet(), trace((0, 100), (5, 3)), FIFO, Rules(horizon_ns=60 * STEP))
    assert result.steps == 60
    assert result.status.tolist() == [Status.RUNNING, Status.WAITING]
    assert result.samples_done.tolist() == [60, 0]
    assert result.occupied_by_time(4).tolist() == [1.0] * 4


def test_occupancy_over_time_adds_up():
    result = simulate_fleet(fleet(devices=3), trace((0, 10), (5, 10), (20, 4)), FIFO)
    parts = result.occupied_by_time(6)
    assert parts.mean() == pytest.approx(result.occupied_share)
    assert parts[-1] == pytest.approx(1 / 3)


def step_by_step(rates, jobs, pick):
    """Run every main step of every device; return the step in which each job ended."""
    free, left = {}, jobs.samples.tolist()
    waiting, ended, step = [], {}, 0
    arrival = (-(-jobs.arrival_ns // STEP)).tolist()
    num_devices = rates.num_devices
    while len(ended) < len(left):
        for device, (job, began) in list(free.items()):
            kind, of = jobs.kind[job], rates.device_class[device]
            cycle = rates.cycle_steps[kind, of]
            if (step - began) % cycle == 0 and step > began:
                left[job] -= rates.cycle_samples[kind, of]
                if left[job] <= 0:
                    ended[job] = step
                    del free[device]
        waiting += [job for job, at in enumerate(arrival) if at == step]
        while waiting and len(free) < num_devices:
            job, device = pick(waiting, [d for d in range(num_devices) if d not in free])
            waiting.remove(job)
            free[device] = (job, step)
        step += 1
    return [ended[job] for job in range(len(left))]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_events_agree_with_a_walk_through_every_step(jobs, devices, samples, cycle):
    """Equal devices: which of them is free makes no difference."""
    rates = fleet(devices, ((samples,),), ((cycle,),))
    what = trace(*jobs)

    def first_come(waiting, free):
        return min(waiting, key=lambda job: (what.arrival_ns[job], what.samples[job], job)), free[
            0
        ]

    result = simulate_fleet(rates, what, FIFO)

    def by_need(waiting, free):
        def key(job):
            need = -(-what.samples[job] // samples)
            return (what.arrival_ns[job], need, job)

        return min(waiting, key=key), free[0]

    assert ends(result) == step_by_step(rates, what, by_need)
    assert first_come([0], [0]) == (0, 0)


# --- policies


def busy(load, seed, num_jobs=400, devices=16):
    """Jobs of log-normal length on devices of four classes; half have a deadline."""
    rng = np.random.default_rng(seed)
    step = 2 * 10**9
    base = rng.integers(50, 200, size=6)
    rates = fleet(
        samples=(base[:, None] * rng.uniform(0.6, 1.4, size=(6, 4))).astype(np.int64),
        classes=np.arange(devices) % 4,
        step_ns=step,
    )
    kind = rng.integers(0, 6, num_jobs)
    hours = rng.lognormal(0, 1.2, num_jobs)
    arrival = np.cumsum(rng.exponential(hours.mean() * HOUR / devices / load, num_jobs))
    deadline = arrival + rng.uniform(1.2, 6, num_jobs) * hours * HOUR
    return rates, Trace(
        arrival_ns=arrival.astype(np.int64),
        kind=kind,
        samples=np.maximum(1, hours * HOUR / step * base[kind]).astype(np.int64),
        deadline_ns=np.where(rng.random(num_jobs) < 0.5, deadline, NEVER).astype(np.int64),
        cancel_ns=np.full(num_jobs, NEVER),
    )


@pytest.mark.parametrize("seed", range(3))
def test_each_policy_is_best_at_what_it_is_for(seed):
    """SJF: mean completion at low load; makespan at high load; deadlines where they are short."""
    low, high = (
        {name: simulate_fleet(*busy(load, seed), BUILT_IN[name]) for name in BUILT_IN}
        for load in (0.8, 2.0)
    )
    assert min(low, key=lambda name: low[name].mean_completion_ns) == "sjf"
    assert min(high, key=lambda name: high[name].makespan_ns) == "makespan"
    met = {name: result.deadlines_met for name, result in high.items()}
    assert met["deadline"] > max(met[name] for name in met if name != "deadline")


def waiting(here, best, deadline=None):
    n = len(here)
    return Waiting(
        job=np.arange(n),
        here_ns=np.array(here),
        best_ns=np.array(best),
        arrival_ns=np.arange(n),
        deadline_ns=np.array([NEVER] * n if deadline is None else deadline),
        samples=np.ones(n, dtype=np.int64),
        table=np.array(here)[:, None],
        step_ns=1,
    )


class Clock:
    now_ns = 100
    rem_ns = np.array([0, 40])
    device_class = np.array([0, 0])


def test_scores_are_the_published_formulas():
    jobs = waiting([10, 50, 90], [5, 50, 60])
    assert SJF.score(jobs, Clock, 0).tolist() == [1 / 5, 1 / 50, 1 / 60]
    # what remains at least is 60: the longest that waits, on the device that suits it
    assert MAKESPAN.score(jobs, Clock, 0).tolist() == [1 / 60, 1 / 60, 1 / 90]
    assert MAKESPAN.longest_first


def test_deadlines_go_first_when_slack_runs_out():
    jobs = waiting([10, 10, 10, 10], [10, 10, 10, 10], [NEVER, 1000, 112, 105])
    scores = DEADLINE.score(jobs, Clock, 0)
    assert scores.argmax() == 2  # 2 ns of slack; the last cannot be in time any more
    assert scores[0] == scores[1] == scores[3] == 1 / 10
    patient = deadline_aware(FIFO.score, urgent=0.1)
    assert patient(jobs, Clock, 0).argmax() == 0


def test_mixes_are_weighted_sums():
    jobs = waiting([10, 50], [5, 50])
    expected = 0.7 * SJF.score(jobs, Clock, 0) + 0.3 * MAKESPAN.score(jobs, Clock, 0)
    assert find_policy("0.7*sjf + 0.3*makespan").score(jobs, Clock, 0) == pytest.approx(expected)
    assert mix([(2.0, SJF.score)])(jobs, Clock, 0) == pytest.approx(2 / jobs.best_ns)


def test_a_users_policy_sees_jobs_state_and_device():
    seen = []

    def mine(job, state, device):
        seen.append((job.number, job.proc_times.tolist(), job.deadline_ns, state.now_ns, device))
        return -job.number

    rates = fleet(samples=((1, 2), (1, 0)), steps=((1, 1), (1, 0)), classes=[0, 1])
    jobs = trace((0, 4, 0, 50), (0, 4, 1, None), (0, 6))
    result = simulate_fleet(rates, jobs, Policy(name="mine", score=users_score(mine, "mine")))
    assert (0, [40.0, 20.0], 500, 0, 0) in seen
    assert (1, [40.0, math.inf], None, 0, 0) in seen
    assert (result.status == Status.DONE).all()


def test_a_users_policy_may_take_arrays():
    def mine(jobs, state, device):
        return -jobs.arrival_ns

    mine.takes_arrays = True
    what = trace((0, 3), (1, 5), (2, 1))
    policy = Policy(name="mine", score=users_score(mine, "mine"))
    assert ends(simulate_fleet(fleet(), what, policy)) == ends(simulate_fleet(fleet(), what, FIFO))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda job, state, device: math.nan, "for job 0 on device 0 it returned nan; a score is"),
        (lambda job, state, device: math.inf, "it returned inf"),
        (lambda job, state, device: 1 / 0, "it raised ZeroDivisionError: division by zero"),
        (lambda job, state, device: None, "it raised TypeError"),
    ],
)
def test_a_users_policy_that_gives_no_number_is_refused_in_one_line(function, message):
    policy = Policy(name="mine", score=users_score(function, "mine"))
    with pytest.raises(MalformedError, match=f"policy 'mine': .*{message}") as error:
        simulate_fleet(fleet(), trace((0, 1)), policy)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["", "fast", "2*sjf + fast", "sjf - makespan", "-1*sjf"])
def test_an_unknown_policy_is_refused(name):
    with pytest.raises(MalformedError, match=r"policy: found .*; allowed: sjf, makespan"):
        find_policy(name)


# --- the fleet of a plan


def timeline_of(schedule="gpipe", m=8, optimizer_ns=0):
    layers = tuple(
        Layer(
            name=str(i),
            forward_ns=60 * 10**6,
            input_grad_ns=60 * 10**6,
            weight_grad_ns=60 * 10**6,
            optimizer_ns=optimizer_ns,
            param_bytes=0,
            state_bytes=12 * 2**30,
            saved_bytes=0,
            output_bytes=0,
        )
        for i in range(4)
    )
    cluster = Cluster.equal(4, memory_bytes=16 * 2**30)
    plan = plan_from(find_family(schedule), Workload(name="even", layers=layers), cluster, m)
    costs = build_costs(plan.workload, plan.cluster, plan.stages, plan.num_microbatches)
    return plan, simulate(plan.schedule(), costs)


BERT = (Part(model="bert-base", kind="inference"),)


def played(schedule="gpipe", *, margin=0.2, seed=0, **handover):
    timeline = timeline_of(schedule)[1]
    what = Synthetic(num_jobs=300, backlog=60, arrivals_per_hour=100, median_ns=HOUR // 2)
    config = FleetConfig(
        plan="here",
        replicas=3,
        hardware="v100",
        mix=BERT,
        synthetic=what,
        horizon_ns=4 * HOUR,
        handover=Handover(switch_ns=10**7, margin=margin, **handover),
    )
    jobs = draw(what, BERT, find_hardware("v100"), seed=seed)
    return play(timeline, jobs, config, FIFO)


def test_shares_of_a_fleet_follow_from_its_packing():
    """Jobs never run out: what is filled is what one step's packing fills."""
    report = played()
    assert report.result.occupied_share > 0.999
    step = report.timeline.step_ns
    packed = [row.busy_ns / len(row.steps) for row in report.packings[0]]
    idle = 4 * step - report.timeline.busy_ns.sum()
    assert report.filled_fraction == pytest.approx(sum(packed) / idle, rel=0.02)
    assert report.main_share + report.fill_share < 1
    alone = report.alone_ns[0] * report.result.samples_done.sum() / report.result.duration_ns
    assert report.gpus_saved == pytest.approx(alone)


def test_slower_work_in_bubbles_fills_as_much_time_with_fewer_samples():
    quick, slow = played(), played(slower=2.0)
    assert slow.filled_fraction == pytest.approx(quick.filled_fraction, rel=0.05)
    ratio = slow.result.samples_done.sum() / quick.result.samples_done.sum()
    assert ratio == pytest.approx(0.5, rel=0.05)


def test_less_memory_never_helps():
    saved = [played(free_bytes=gib * 2**28).gpus_saved for gib in (2, 4, 8, 16)]
    assert saved == sorted(saved)
    assert saved[0] < saved[-1]


def test_gpipe_leaves_more_to_fill_than_1f1b_where_short_bubbles_do_not_count():
    gpipe, other = (played(s, threshold_ns=10**8).gpus_saved for s in ("gpipe", "1f1b"))
    assert gpipe > 1.05 * other


def test_a_margin_keeps_the_main_job_from_slowing_down():
    slow = [played(margin=margin).slowdown.mean for margin in (0.0, 0.02, 0.2)]
    assert slow[0] > slow[1] > slow[2] == 0.0


def test_an_overrun_delays_the_step_by_what_is_over():
    """One device, one gap: a bubble of 3 (F + B) before stage 0's first backward, p = 4."""
    plan, timeline = timeline_of(m=8)
    at = [str(word) for word in plan.actions[0]].index("0B0")
    length = int(timeline.start_ns[at] - timeline.end_ns[at - 1])

    def one(over):
        filled = Filled(
            before=np.array([at]), length_ns=np.array([length]), busy_ns=np.array([length + over])
        )
        return slowdown(timeline, filled, main_spread=0.0, fill_spread=0.0, rounds=2)

    assert one(0).mean == 0.0
    late = one(5 * 10**7)
    assert late.mean == pytest.approx(5 * 10**7 / timeline.step_ns)
    assert late.late_share == 1.0
    end = Filled(before=np.array([-1]), length_ns=np.array([10**7]), busy_ns=np.array([2 * 10**7]))
    found = slowdown(timeline, end, main_spread=0.0, fill_spread=0.0, rounds=1)
    assert found.mean == pytest.approx(10**7 / timeline.step_ns)


CONFIG = """\
format: octotune-fleet
version: 1
name: small
plan: plan.json
replicas: 2
hardware: v100
mix: [{model: bert-base, kind: inference}, {model: bert-large, kind: training}]
synthetic: {num_jobs: 40, arrivals_per_hour: 30, median_ns: 10 min, deadline_share: 0.5}
handover: {threshold_ns: 50 ms, switch_ns: 5 ms}
checkpoint_ns: 5 min
failures_per_hour: 0.05
"""


@pytest.fixture
def folder(tmp_path):
    timeline_of()[0].save(tmp_path / "plan.json")
    (tmp_path / "fleet.yaml").write_text(CONFIG)
    return tmp_path


def test_the_command_simulates_and_draws(folder, capsys):
    arguments = ["fleet", "--config", str(folder / "fleet.yaml")]
    assert main([*arguments, "--picture", str(folder / "fleet.png")]) == 0
    assert "GPUs saved" in capsys.readouterr().out
    assert (folder / "fleet.png").stat().st_size > 10_000
    assert main([*arguments, "--json", "--policy", "makespan"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpus"] == 8
    assert found["policy"] == "makespan"
    assert found["done"] + found["failed"] == 40
    assert 0 < found["fill_share"] < 1 - found["main_share"]


def test_a_csv_beside_the_configuration_is_played(folder, capsys):
    (folder / "jobs.csv").write_text("at,takes\n0,600\n60,1200\n")
    text = CONFIG.replace(
        CONFIG[CONFIG.index("synthetic") : CONFIG.index("handover")],
        "trace: {path: jobs.csv, columns: {arrival: at, duration: takes}}\n",
    )
    (folder / "fleet.yaml").write_text(text)
    assert main(["fleet", "--config", str(folder / "fleet.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["done"] == 2
    (folder / "fleet.yaml").write_text(text.replace("takes", "lasts"))
    assert main(["fleet", "--config", str(folder / "fleet.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("missing columns: 'lasts'; found at, takes; name them under columns")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("replicas: 2", "replicas: 0", "replicas: found 0; allowed: "),
        ("plan: plan.json\n", "", "plan or main is needed, and not both"),
        ("bert-base", "bert", r"mix\[0\].model: found 'bert'; did you mean bert-base"),
        ("v100", "v10", "hardware: found 'v10'; did you mean v100"),
        ("median_ns: 10 min", "median_ns: -1", "synthetic.median_ns: found -1; allowed: "),
        ("plan.json", "none.json", "none.json: no such file"),
        ("version: 1\n", "version: 1\npolicy: best\n", "policy: found 'best'; allowed: sjf"),
        ("{threshold", "{margin: 1.5, threshold", "handover.margin: found 1.5; allowed: "),
    ],
)
def test_a_bad_configuration_is_refused_in_one_line(folder, old, new, message):
    (folder / "fleet.yaml").write_text(CONFIG.replace(old, new))
    with pytest.raises(MalformedError, match=message) as error:
        run_fleet(read_fleet(folder / "fleet.yaml"), folder=folder)
    assert "\n" not in str(error.value)


def test_jobs_that_fit_no_bubble_of_the_fleet_are_said_at_once(folder):
    (folder / "fleet.yaml").write_text(
        CONFIG.replace("{threshold", "{free_bytes: 4096, threshold")
    )
    with pytest.raises(InfeasibleError, match="job 'bert-base inference' fits in no bubble"):
        run_fleet(read_fleet(folder / "fleet.yaml"), folder=folder)


def test_a_published_schedule_stands_in_for_a_plan(folder):
    plan = timeline_of()[0]
    from octotune.contract import write_json

    write_json(plan.workload, folder / "workload.json")
    main_job = "main: {workload: workload.json, cluster: '4', schedule: 1f1b, microbatches: 8}\n"
    (folder / "fleet.yaml").write_text(CONFIG.replace("plan: plan.json\n", main_job))
    config = read_fleet(folder / "fleet.yaml")
    report = run_fleet(config, folder=folder, policy=SJF)
    assert report.timeline.schedule == find_family("1f1b").generate(report.timeline.costs)
