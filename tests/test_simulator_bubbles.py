"""Bubbles: every idle nanosecond has the one cause that its definition gives it."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from msgspec import structs

from simulator.actions import Action, CopyKind, pack, unpack
from simulator.bubbles import Cause
from tests import oracle
from tests.random_plans import random_plan
from tests.small_plans import plan_of, run


def pieces(timeline, device):
    return [
        (bubble.start_ns, bubble.end_ns, bubble.cause.name)
        for bubble in timeline.bubbles()
        if bubble.device == device
    ]


def test_1f1b_bubbles_by_hand():
    """Two stages, F 1, B 2: stage 1 warms up for one F; stage 0 waits for each B of stage 1."""
    rows = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    timeline = run(plan_of(rows, times=[(1, 1, 1), (1, 1, 1)]))
    assert timeline.step_ns == 9
    # 1B0 ends at 4, 0B0 at 6, 1B1 at 7, 0B1 at 9
    assert pieces(timeline, 0) == [(2, 4, "INPUT"), (6, 7, "INPUT")]
    assert pieces(timeline, 1) == [(0, 1, "WARMUP"), (7, 9, "COOLDOWN")]


def test_a_wait_is_cut_where_the_producer_ends_and_where_its_transfer_leaves_and_arrives():
    """Transfers hold the channel for 10 ns and arrive 3 ns later."""
    rows = ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    timeline = run(
        plan_of(
            rows,
            times=[(4, 1, 1), (2, 1, 1)],
            bandwidth=10**9,
            output_bytes=10,
            latency=3,
        )
    )
    assert timeline.forward_sent_ns[0].tolist() == [4, 14]  # 0F1 ends at 8
    assert timeline.forward_arrived_ns[0].tolist() == [17, 27]
    assert pieces(timeline, 1)[:3] == [
        (0, 17, "WARMUP"),
        (19, 27, "IN_FLIGHT"),
        (33, 56, "COOLDOWN"),
    ]
    # 1B0 runs 29 to 31, its gradient leaves at 31 and arrives at 44; that of 1B1 leaves at 41
    assert pieces(timeline, 0) == [
        (8, 31, "INPUT"),
        (31, 44, "IN_FLIGHT"),
        (46, 54, "IN_FLIGHT"),
    ]


def test_the_wait_behind_other_transfers_is_named_queued():
    """Three transfers of 10 ns each queue on one channel; the device waits for the last."""
    rows = ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F2 1F1 1B0 1B1 1B2"]
    timeline = run(plan_of(rows, times=[(1, 1, 1), (1, 1, 1)], bandwidth=10**9, output_bytes=10))
    assert timeline.forward_sent_ns[0].tolist() == [1, 11, 21]
    assert pieces(timeline, 1)[:3] == [
        (0, 11, "WARMUP"),
        (12, 21, "QUEUED"),
        (21, 31, "IN_FLIGHT"),
    ]


def test_a_device_without_actions_is_unused_for_the_whole_step():
    timeline = run(plan_of(["0F0 0B0", ""], times=[(1, 1, 1)], devices=[0]))
    assert pieces(timeline, 1) == [(0, 3, "UNUSED")]
    assert pieces(timeline, 0) == []


def test_waiting_for_a_reload_starts_when_the_tensor_is_there():
    """Stage 1's gradient of microbatch 0 is there at 14; the copies end at 25."""
    plan = plan_of(["0F0 0B0", "1F0 1B0"], times=[(5, 2, 2), (5, 2, 2)], offloadable_bytes=10)
    devices = tuple(
        structs.replace(device, offload_bandwidth=10**9) for device in plan.cluster.devices
    )
    plan = structs.replace(
        plan,
        cluster=structs.replace(plan.cluster, devices=devices),
        offload=(("0O0", "0R0"), ()),
    )
    bubbles = [bubble for bubble in run(plan).bubbles() if bubble.device == 0]
    assert [(bubble.start_ns, bubble.end_ns, bubble.cause) for bubble in bubbles] == [
        (5, 14, Cause.INPUT),
        (14, 25, Cause.RELOAD),
    ]
    assert [bubble.waits_for for bubble in bubbles] == [
        Action.parse("1B0").code,
        pack(0, CopyKind.R, 0),
    ]
    assert {bubble.before for bubble in bubbles} == {Action.parse("0B0").code}


def one_f_one_b(num_stages, num_microbatches):
    rows = []
    for stage in range(num_stages):
        warmup = min(num_microbatches, num_stages - 1 - stage)
        words = [f"{stage}F{m}" for m in range(warmup)]
        for m in range(num_microbatches - warmup):
            words += [f"{stage}F{m + warmup}", f"{stage}B{m}"]
        words += [f"{stage}B{m}" for m in range(num_microbatches - warmup, num_microbatches)]
        rows.append(" ".join(words))
    return rows


def test_the_slow_stage_is_to_blame_on_every_device_that_waits_because_of_it():
    """1F1B on four equal stages but for stage 2, which takes three times as long."""
    times = [(100, 100, 100)] * 4
    times[2] = (300, 300, 300)
    bubbles = run(plan_of(one_f_one_b(4, 8), times=times)).bubbles()
    waited = bubbles.ns_by_cause()[Cause.INPUT]
    blamed = bubbles.input_ns_by_stage(4)
    assert blamed[2].sum() == waited[2] == 0
    assert (blamed[[0, 1, 3], 2] > 0.75 * waited[[0, 1, 3]]).all()
    # what device 0 waits for directly is always its neighbour
    assert {bubble.waits_for >> 32 for bubble in bubbles if bubble.device == 0} == {1}


def test_no_stage_is_to_blame_for_the_depth_of_the_pipeline():
    """With one microbatch, whatever waits only waits for its way down and up again."""
    bubbles = run(plan_of(one_f_one_b(4, 1), times=[(1, 2, 3)] * 4)).bubbles()
    assert bubbles.ns_by_cause()[Cause.INPUT].tolist() == [18, 12, 6, 0]
    assert not bubbles.input_ns_by_stage(4).any()


def test_of_a_busy_device_the_stage_that_kept_it_busy_is_to_blame():
    """Device 1 holds stages 1 and 2; 1F1 lies there while 2F0 runs for 50 ns."""
    rows = ["0F0 0F1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1", "3F0 3F1 3B0 3B1"]
    plan = plan_of(
        rows,
        times=[(1, 1, 1), (1, 1, 1), (50, 1, 1), (1, 1, 1)],
        devices=[0, 1, 1, 2],
    )
    bubbles = run(plan).bubbles()
    (late,) = (bubble for bubble in bubbles if bubble.before == Action.parse("3F1").code)
    assert (late.cause, late.end_ns - late.start_ns) == (Cause.INPUT, 50)
    assert late.waits_for == Action.parse("2F1").code
    assert late.root_stage == 2


def test_a_reload_is_to_blame_and_no_stage():
    """Device 0 waits for 1B0, and that for its activations to come back from the host."""
    plan = plan_of(
        ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"],
        times=[(1, 1, 1)] * 2,
        saved_bytes=100,
        offloadable_bytes=100,
    )
    devices = tuple(
        structs.replace(device, offload_bandwidth=10**9) for device in plan.cluster.devices
    )
    plan = structs.replace(
        plan,
        cluster=structs.replace(plan.cluster, devices=devices),
        offload=((), ("1O0", "1R0")),
    )
    bubbles = [bubble for bubble in run(plan).bubbles() if bubble.device == 0]
    assert [bubble.cause for bubble in bubbles] == [Cause.INPUT]
    assert bubbles[0].waits_for == Action.parse("1B0").code
    assert bubbles[0].root_stage == -1


def expected_causes(plan):
    """Yield (device, start, end, cause) over all elementary intervals, from the oracle's words.

    Written from the definition: at the middle of each interval between two moments at which
    anything begins or ends, ask of each device what holds then.
    """
    out = oracle.run(plan)
    step = out.step_ns
    moments = {0, step}
    for times in (
        out.start,
        out.end,
        out.sent,
        out.arrived,
        out.copy_end,
        out.reduce_end,
        out.exchange_end,
    ):
        moments |= set(times.values())
    moments |= {*out.optimizer_start, *out.optimizer_end}
    moments = sorted(moment for moment in moments if moment <= step)
    stage_of_layer = {
        layer: index for index, stage in enumerate(plan.stages) for layer in range(*stage.layers)
    }
    home = [stage.device for stage in plan.stages]
    for device, row in enumerate(plan.actions):
        reduced = max(
            (end for stage, end in out.reduce_end.items() if home[stage] == device), default=0
        )
        exchanged = max(
            (
                end
                for pair, end in out.exchange_end.items()
                if device in [home[stage_of_layer[layer]] for layer in pair]
            ),
            default=0,
        )
        for begin, end in pairwise(moments):
            busy = any(out.start[word] <= begin < out.end[word] for word in row)
            if busy or out.optimizer_start[device] <= begin < out.optimizer_end[device]:
                continue
            following = next((word for word in row if out.start[word] > begin), None)
            if not row:
                cause = Cause.UNUSED
            elif following is None:
                if begin < min(reduced, out.optimizer_start[device]):
                    cause = Cause.REDUCTION
                elif begin < min(exchanged, out.optimizer_start[device]):
                    cause = Cause.EXCHANGE
                else:
                    cause = Cause.COOLDOWN
            elif following == row[0]:
                cause = Cause.WARMUP
            else:
                cause = cause_before(following, begin, out, home)
            yield device, begin, end, cause


def cause_before(word, moment, out, home):
    _, stage, kind, microbatch, _ = oracle.split(word)
    producers = []
    if kind == "F" and stage > 0:
        producers = [f"{stage - 1}F{microbatch}"]
    elif kind in "BI" and stage < len(home) - 1:
        producers = [f"{stage + 1}{letter}{microbatch}" for letter in "BI"]
    for producer in producers:
        if producer in out.end and producer in out.sent:
            if moment < out.end[producer]:
                return Cause.INPUT
            if moment < out.sent[producer]:
                return Cause.QUEUED
            if moment < out.arrived[producer]:
                return Cause.IN_FLIGHT
    assert kind in "BI"
    assert moment < out.copy_end[f"{stage}R{microbatch}"]
    return Cause.RELOAD


@pytest.mark.parametrize("block", range(4))
def test_random_plans_have_the_causes_that_the_definition_gives(block):
    """Every feature mixed; and the pieces of a device add up to its idle time exactly."""
    seen = set()
    for seed in range(60 * block, 60 * block + 60):
        plan = random_plan(random.Random(seed))
        timeline = run(plan)
        bubbles = timeline.bubbles()
        assert (bubbles.duration_ns > 0).all()
        found = [[*bubble[:3], bubble.cause] for bubble in bubbles]
        assert joined(found) == joined(map(list, expected_causes(plan)))
        idle = sum(timeline.idle_by_cause().values())
        assert idle.tolist() == (timeline.step_ns - timeline.busy_ns).tolist()
        seen |= {bubble.cause for bubble in bubbles}
    assert seen >= {Cause.WARMUP, Cause.INPUT, Cause.QUEUED, Cause.IN_FLIGHT, Cause.COOLDOWN}


def joined(pieces):
    """Join what has one cause and lies side by side."""
    whole = []
    for device, begin, end, cause in pieces:
        if whole and whole[-1][0] == device and whole[-1][2:] == [begin, cause]:
            whole[-1][2] = end
        else:
            whole.append([device, begin, end, cause])
    return whole


def measured(timeline, **changes):
    """Return a timeline in which some times are as a run might have recorded them."""
    arrays = {name: getattr(timeline, name).copy() for name in changes}
    for name, at in changes.items():
        for place, value in at.items():
            arrays[name][place] = value
    return replace(timeline, **arrays)


class TestMeasured:
    """Two stages; 1F1 waits for 0F1, computed until 60, sent at 70, there at 100."""

    @pytest.fixture
    def timeline(self):
        rows = ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
        timeline = run(plan_of(rows, times=[(30, 10, 10), (10, 10, 10)], latency=5))
        words = [word for row in timeline.schedule.words() for word in row]
        at = {word: index for index, word in enumerate(words)}
        starts = dict(zip(words, timeline.start_ns.tolist(), strict=True))
        shift = {at[word]: starts[word] + 100 for word in ("1F1", "1B0", "1B1", "0B0", "0B1")}
        ends = {place: timeline.end_ns[place] + 100 for place in shift}
        return measured(
            timeline,
            start_ns=shift,
            end_ns=ends,
            forward_sent_ns={(0, 1): 70},
            forward_arrived_ns={(0, 1): 100},
            optimizer_start_ns={0: 1000, 1: 1000},
            optimizer_end_ns={0: 1000, 1: 1000},
        )

    def before_1f1(self, timeline):
        code = Action.parse("1F1").code
        return [
            (bubble.start_ns, bubble.end_ns, bubble.cause.name)
            for bubble in timeline.bubbles()
            if bubble.before == code
        ]

    def test_what_is_left_when_all_is_there_is_a_late_start(self, timeline):
        assert self.before_1f1(timeline) == [
            (45, 60, "INPUT"),
            (60, 70, "QUEUED"),
            (70, 100, "IN_FLIGHT"),
            (100, 165, "LATE"),
        ]

    def test_a_missing_departure_counts_as_sent_at_once(self, timeline):
        timeline = measured(timeline, forward_sent_ns={(0, 1): -1})
        assert self.before_1f1(timeline)[1] == (60, 100, "IN_FLIGHT")

    def test_a_missing_arrival_leaves_the_rest_unknown(self, timeline):
        timeline = measured(timeline, forward_arrived_ns={(0, 1): -1})
        assert self.before_1f1(timeline) == [(45, 60, "INPUT"), (60, 165, "UNKNOWN")]

    def test_a_missing_producer_is_unknown_up_to_the_departure(self, timeline):
        place = timeline.schedule.codes.tolist().index(Action.parse("0F1").code)
        timeline = measured(timeline, start_ns={place: -1}, end_ns={place: -1})
        assert self.before_1f1(timeline) == [
            (45, 70, "UNKNOWN"),
            (70, 100, "IN_FLIGHT"),
            (100, 165, "LATE"),
        ]

    def test_an_action_that_was_not_recorded_makes_the_interval_around_it_unknown(self, timeline):
        place = timeline.schedule.codes.tolist().index(Action.parse("1F1").code)
        timeline = measured(timeline, start_ns={place: -1}, end_ns={place: -1})
        unknown = [bubble for bubble in timeline.bubbles() if bubble.cause == Cause.UNKNOWN]
        assert [(bubble.start_ns, str(unpack(bubble.before))) for bubble in unknown] == [
            (45, "1B0")
        ]

    def test_overlapping_actions_leave_no_gap_and_nothing_below_0(self, timeline):
        place = timeline.schedule.codes.tolist().index(Action.parse("1F1").code)
        timeline = measured(timeline, start_ns={place: 40})
        assert self.before_1f1(timeline) == []
        assert (timeline.bubbles().duration_ns > 0).all()

    def test_the_step_ends_with_the_last_thing_recorded(self, timeline):
        none = {0: -1, 1: -1}
        timeline = measured(timeline, optimizer_start_ns=none, optimizer_end_ns=none)
        assert timeline.step_ns == timeline.end_ns.max()
        assert (
            sum(timeline.idle_by_cause().values()).tolist()
            == (timeline.step_ns - timeline.busy_ns).tolist()
        )


def test_where_no_action_was_recorded_all_is_unknown_until_the_optimizer_runs():
    timeline = run(plan_of(["0F0 0B0", "1F0 1B0"], times=[(1, 1, 1), (1, 1, 1)]))
    nothing = np.full(4, -1)
    timeline = replace(timeline, start_ns=nothing, end_ns=nothing)
    idle = timeline.idle_by_cause()
    assert timeline.optimizer_start_ns.tolist() == [6, 4]
    assert idle[Cause.UNKNOWN].tolist() == [6, 4]
    assert idle[Cause.COOLDOWN].tolist() == [0, 2]
