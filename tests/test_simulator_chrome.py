"""Traces: written and read back without losing a nanosecond, and refused when broken."""

import json
import random
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import chrome
from simulator.errors import TraceError
from simulator.memory import usage
from tests.random_plans import random_plan
from tests.small_plans import run


def timeline_of(seed):
    return run(random_plan(random.Random(seed)))


def timeline_with_everything():
    """Return a random plan's timeline in which there is one of each thing."""
    for seed in range(1000):
        timeline = timeline_of(seed)
        pairs = (
            timeline.copy_end_ns,
            timeline.exchange_end_ns,
            timeline.reduce_end_ns,
            timeline.forward_sent_ns,
            timeline.backward_sent_ns,
        )
        if all((times >= 0).any() for times in pairs):
            return timeline
    raise AssertionError("random plans no longer mix every feature")


def with_gaps(timeline, rng):
    """Return the timeline as a run might record it: a fifth of all times missing."""
    names = [name for name in timeline.__slots__ if name.endswith("_ns")]
    arrays = {}
    for name in names:
        times = getattr(timeline, name).copy()
        times[rng.random(times.shape) < 0.2] = -1
        arrays[name] = times
    return replace(timeline, **arrays)


@pytest.mark.parametrize("block", range(4))
def test_reading_back_gives_an_equal_timeline(block):
    for seed in range(40 * block, 40 * block + 40):
        timeline = timeline_of(seed)
        assert chrome.loads(chrome.dumps(timeline)) == timeline
        assert chrome.loads(chrome.dumps(timeline, derived=False).decode()) == timeline


def test_reading_back_gives_what_a_run_recorded_and_no_more():
    for seed in range(60):
        timeline = with_gaps(timeline_of(seed), np.random.default_rng(seed))
        assert chrome.loads(chrome.dumps(timeline)) == timeline


def test_timelines_differ_when_one_time_does():
    timeline = timeline_of(1)
    ends = timeline.end_ns.copy()
    ends[-1] += 1
    other = replace(timeline, end_ns=ends)
    assert timeline != other
    assert chrome.loads(chrome.dumps(other)) == other


def events_of(timeline):
    return json.loads(chrome.dumps(timeline), parse_float=Decimal)["traceEvents"]


def test_each_device_is_a_process_with_its_rows_named():
    timeline = timeline_with_everything()
    events = events_of(timeline)
    names = [
        event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "process_name"
    ]
    assert names == [f"device {device}" for device in range(timeline.schedule.num_devices)]
    rows = {
        event["tid"]: (event["pid"], event["args"]["name"])
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    # a thread's number is its own in all processes, and none is 0
    assert len(set(rows.values())) == len(rows)
    assert 0 not in rows
    for event in events:
        if event["ph"] == "X":
            assert rows[event["tid"]][0] == event["pid"]
    named = {name for _, name in rows.values()}
    assert {"compute", "idle", "copy lane", "reductions", "tied exchanges"} < named
    assert any(name.startswith("to device ") for name in named)


def test_bars_of_a_row_do_not_overlap():
    """Or a viewer would nest them; transfers whose flights overlap are cut at the next."""
    for seed in range(40):
        rows = {}
        for event in events_of(timeline_of(seed)):
            if event["ph"] == "X" and event["dur"] > 0:
                begin = event["ts"]
                rows.setdefault((event["pid"], event["tid"]), []).append(
                    (begin, begin + event["dur"])
                )
        for key, spans in rows.items():
            if key[1] % 10_000 == 4:
                continue  # exchanges queue for nothing, so two of them may overlap
            spans.sort()
            assert all(a[1] <= b[0] for a, b in pairwise(spans)), key


def test_each_transfer_has_one_arrow_from_its_producer_to_its_consumer():
    timeline = timeline_of(5)
    events = events_of(timeline)
    arrows = {}
    for event in events:
        if event.get("cat") == "flow":
            arrows.setdefault(event["id"], []).append(event)
    transfers = (timeline.forward_sent_ns >= 0).sum() + (timeline.backward_sent_ns >= 0).sum()
    assert len(arrows) == transfers > 0
    bars = [event for event in events if event["ph"] == "X" and event["cat"] != "idle"]
    for start, step, finish in arrows.values():
        assert [start["ph"], step["ph"], finish["ph"]] == ["s", "t", "f"]
        held = [
            [
                bar
                for bar in bars
                if (bar["pid"], bar["tid"]) == (event["pid"], event["tid"])
                and bar["ts"] <= event["ts"] <= bar["ts"] + bar["dur"]
            ]
            for event in (start, step, finish)
        ]
        assert all(held)
        producer, consumer = held[0][0]["name"], held[2][-1]["name"]
        assert held[1][-1]["name"] in {bar["name"] for bar in held[0]}, (producer, consumer)


def test_memory_counters_are_the_bytes_held():
    timeline = timeline_with_everything()
    counted = {}
    for event in events_of(timeline):
        if event["ph"] == "C":
            counted.setdefault(event["pid"] - 1, []).append(
                (int(event["ts"] * 1000), event["args"]["bytes"])
            )
    for device in range(timeline.schedule.num_devices):
        times, sizes = usage(timeline, device)
        assert counted[device] == list(zip(times.tolist(), sizes.tolist(), strict=True))


def test_idle_bars_add_up_to_the_idle_time():
    timeline = timeline_of(11)
    idle = np.zeros(timeline.schedule.num_devices, np.int64)
    for event in events_of(timeline):
        if event.get("cat") == "idle":
            idle[event["pid"] - 1] += int(event["dur"] * 1000)
    assert idle.tolist() == (timeline.step_ns - timeline.busy_ns).tolist()


class TestBroken:
    @pytest.fixture
    def tree(self):
        return json.loads(chrome.dumps(timeline_with_everything()), parse_float=str)

    def refusal(self, tree):
        text = json.dumps(tree)
        # parse_float=str made texts of the times; make numbers of them again
        for key in ('"ts": "', '"dur": "'):
            parts = text.split(key)
            text = parts[0] + "".join(key[:-1] + part.replace('"', "", 1) for part in parts[1:])
        with pytest.raises(TraceError) as caught:
            chrome.loads(text)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def first(self, tree, category):
        return next(
            (number, event)
            for number, event in enumerate(tree["traceEvents"])
            if event.get("cat") == category
        )

    def test_what_is_no_json(self):
        with pytest.raises(TraceError, match=r"no trace of a timeline: JSON is malformed"):
            chrome.loads(b"{]")

    def test_what_is_cut_off(self):
        text = chrome.dumps(timeline_of(2))
        with pytest.raises(TraceError, match=r"no trace of a timeline: Input data was truncated"):
            chrome.loads(text[: len(text) // 2])

    def test_another_programs_trace(self):
        with pytest.raises(TraceError, match=r"missing required field `otherData`"):
            chrome.loads('{"traceEvents": [{"ph": "X", "name": "matmul", "ts": 1, "dur": 2}]}')

    def test_missing_event(self, tree):
        number, _ = self.first(tree, "action")
        del tree["traceEvents"][number]
        assert "some are missing" in self.refusal(tree)

    def test_event_twice(self, tree):
        number, event = self.first(tree, "action")
        tree["traceEvents"].append(event)
        assert f"action {event['name']!r} is there a second time" in self.refusal(tree)
        assert number >= 0

    def test_event_of_another_plan(self, tree):
        number, event = self.first(tree, "copy")
        event["name"] = "9999O1"
        expected = f"traceEvents[{number}]: '9999O1' is no copy of this plan"
        assert self.refusal(tree) == expected

    @pytest.mark.parametrize("time", ["-1.0", "0.0001", "1e30", "1e999999999"])
    def test_time_that_is_no_whole_nanosecond(self, tree, time):
        number, event = self.first(tree, "action")
        event["ts"] = time
        assert f"traceEvents[{number}].ts is" in self.refusal(tree)

    def test_arrival_out_of_range(self, tree):
        number, event = self.first(tree, "activation")
        event["args"]["arrived_ns"] = -5
        assert self.refusal(tree) == (
            f"traceEvents[{number}]: args.arrived_ns is -5; it is 0 to 2^62"
        )

    def test_order_that_breaks_a_rule(self, tree):
        tree["otherData"]["octotune"]["actions"][0] = []
        assert self.refusal(tree).startswith("otherData.octotune.actions[")

    def test_costs_of_another_length(self, tree):
        tree["otherData"]["octotune"]["costs"]["forward_ns"].append(1)
        assert "costs.forward_ns has" in self.refusal(tree)

    def test_stage_on_a_device_that_is_not_there(self, tree):
        tree["otherData"]["octotune"]["costs"]["stage_device"][0] = 77
        assert "costs.stage_device has a number outside 0 to" in self.refusal(tree)

    def test_huge_microbatch_count_takes_no_memory(self, tree):
        tree["otherData"]["octotune"]["costs"]["num_microbatches"] = 2**24
        assert "is missing" in self.refusal(tree)

    def test_half_a_time_of_nothing(self, tree):
        tree["otherData"]["octotune"]["partial"] = {"start_ns": [[10**9, 5]]}
        assert "partial.start_ns has [1000000000, 5]" in self.refusal(tree)
        tree["otherData"]["octotune"]["partial"] = {"lunch_ns": []}
        assert "partial has 'lunch_ns', which is no time" in self.refusal(tree)


SMALL = chrome.dumps(run(random_plan(random.Random(4))), derived=False)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_changed_text_is_read_or_refused_in_one_line(data):
    """Whatever bytes are changed: a timeline or a TraceError, nothing else."""
    text = bytearray(SMALL)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.sampled_from([b"", b"9", b"-", b"null", b"1e9", b"[]", b"{}", b'"', b"\xff", b"0"])
        )
    said = ""
    try:
        chrome.loads(bytes(text))
    except TraceError as error:
        said = str(error)
    assert "\n" not in said
