"""Fuzzed readers: whatever a file holds, it is read, or refused in one line as what it is.

What the fuzzing found stays as examples beside the properties.
"""

from __future__ import annotations

import copy
import json
import os
import random

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from octotune import check
from octotune.contract import explain, form, read_cluster, read_plan, read_workload
from octotune.contract.form import decode, descend
from octotune.contract.plan import Plan
from octotune.contract.units import Dimension, parse_quantity
from octotune.contract.yaml_tree import yaml_to_json
from octotune.errors import (
    BrokenPlanError,
    InfeasibleError,
    MalformedError,
    OutOfMemoryError,
    ScheduleError,
)
from tests import oracle, valid_files
from tests.random_plans import random_plan

RULES = (InfeasibleError, OutOfMemoryError, ScheduleError)
TEXT = json.dumps(valid_files.plan()).encode()
# OCTOTUNE_FUZZ=N tries N times as many, other ones each time
TIMES = int(os.environ.get("OCTOTUNE_FUZZ", "0"))


def fuzzed(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples * max(1, TIMES),
        derandomize=TIMES == 0,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


def one_line(error: Exception, start: str = "") -> None:
    text = str(error)
    assert text.isprintable(), text
    assert text.startswith(start), text
    assert 0 < len(text) < 2000


def read_and_check(raw: bytes) -> None:
    """Decode a plan and check it; only errors that a user may see come out."""
    try:
        plan = decode(raw, Plan, "plan.json")
    except (MalformedError, BrokenPlanError) as error:
        one_line(error, "plan.json: ")
        return
    try:
        checked = check(plan)
    except (MalformedError, *RULES) as error:
        one_line(error)
        return
    assert 0 <= checked.bubble_fraction < 1
    assert checked.step_ns > 0


@fuzzed(100)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\xef\xbb\xbf")
@example(b"[")  # no object, and no JSON either
@example(b'{"a": 1, "a": 1}]')  # a field twice, and no JSON either
@example(b'{"a": ' + b"[" * 500 + b'{"b": 1, "b": 1}' + b"]" * 500 + b"}")
@example(b'{"format": "\\ud800"}')
@example(b'{"format":"octotune-plan","version":1,"workload":[]}')
def test_any_bytes(raw):
    with pytest.raises(MalformedError, match=r"^plan\.json: ") as caught:
        decode(raw, Plan, "plan.json")
    one_line(caught.value)


@st.composite
def mutated_bytes(draw):
    """A valid plan with a few spans cut out, doubled, or replaced."""
    raw = TEXT
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(raw)))
        end = min(len(raw), begin + draw(st.integers(0, 12)))
        new = draw(
            st.sampled_from(
                [b"", raw[begin:end] * 2, b"null", b"-", b"0", b"9", b"e9", b'"', b"[", b"}", b","]
            )
            | st.binary(max_size=4)
        )
        raw = raw[:begin] + new + raw[end:]
    return raw


@fuzzed(600)
@given(mutated_bytes())
@example(TEXT.replace(b'"workload": {', b'"w', 1))  # fields twice, before the JSON ends too early
@example(TEXT.replace(b'"forward_ns": 1000', b'"forward_ns": {"\\u001f": "5 us"}', 1))
def test_valid_files_with_bytes_changed(raw):
    read_and_check(raw)


@pytest.mark.parametrize("length", range(0, len(TEXT), 41))
def test_files_that_break_off(length):
    with pytest.raises(MalformedError, match=r"is empty|breaks off|is no JSON"):
        decode(TEXT[:length], Plan, "plan.json")


NUMBERS = st.integers(-(2**70), 2**70) | st.sampled_from(
    [0, 1, 2, 3, 2**31, 2**62, 2**63 - 1, 2**63]
)
WORDS = st.from_regex(r"[0-9]{0,2}[FBIWOR@x][0-9]{0,2}(@[0-9][FBIW][0-9])?", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False) | st.text(max_size=5) | WORDS
    | st.sampled_from(["5 us", "80 GiB", "25 GB/s"]),
    lambda below: st.lists(below, max_size=3)
    | st.dictionaries(st.text(max_size=5) | st.sampled_from(["0-1", "kind", "layers"]), below,
                      max_size=3),
    max_leaves=5,
)  # fmt: skip


def places(tree, path=()):
    """Every place in a tree, itself last."""
    if isinstance(tree, dict | list):
        entries = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, below in entries:
            yield from places(below, (*path, key))
    yield path


PLACES = [path for path in places(valid_files.plan()) if path]


@st.composite
def mutated_trees(draw):
    """A valid plan with a few values replaced, taken away, doubled or added."""
    tree = valid_files.plan()
    for _ in range(draw(st.integers(1, 3))):
        *above, last = draw(st.sampled_from(PLACES))
        inside = tree
        try:
            for key in above:
                inside = inside[key]
            value = inside[last]
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took it away
        how = draw(st.sampled_from(["replace", "replace", "small", "remove", "double", "add"]))
        if how == "replace":
            inside[last] = draw(VALUES)
        elif how == "small" and isinstance(value, int) and not isinstance(value, bool):
            inside[last] = draw(st.integers(0, 5))
        elif how == "remove":
            del inside[last]
        elif how == "double" and isinstance(inside, list):
            inside.insert(last, copy.deepcopy(value))
        elif how == "add" and isinstance(value, dict):
            value[draw(st.text(max_size=8))] = draw(VALUES)
    return tree


@fuzzed(1000)
@given(mutated_trees())
def test_valid_files_with_values_changed(tree):
    read_and_check(json.dumps(tree).encode())


@fuzzed(300)
@given(mutated_trees())
def test_large_files_with_values_changed(tree):
    """Files beyond what people write by hand are refused without a tree made of them."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (explain, form):
            patch.setattr(module, "HAND_WRITTEN_BYTES", 0)
        read_and_check(json.dumps(tree).encode())


@fuzzed(100)
@given(mutated_trees())
def test_valid_yaml_with_values_changed(tree):
    try:
        raw = yaml_to_json(yaml.safe_dump(tree, allow_unicode=True).encode(), "plan.json")
    except MalformedError as error:
        one_line(error)
        return
    read_and_check(raw)


@fuzzed(100)
@given(st.text(max_size=60) | st.text(alphabet="{}[]:,-&*!?#|>'\"%@` \nab0.<~", max_size=40))
@example("&a [*a]")
@example("!!set {a}")
@example("? {a: b}\n: c")
@example("<<: 5")
@example("<<: [5]")
@example("- !!int x")
@example("!!float x")
@example("!!timestamp 5")
@example("!!omap [a]")
@example("=: 5")
@example("=")
@example("\ud800".encode("utf-8", "surrogatepass").decode("latin-1"))
def test_any_yaml(text):
    try:
        raw = yaml_to_json(text.encode("utf-8", "replace"), "plan.json")
        decode(raw, Plan, "plan.json")
    except MalformedError as error:
        one_line(error, "plan.json: ")


@fuzzed(100)
@given(st.text(max_size=30))
@example("caps.")
@example(".")
@example("0")
@example("9" * 5000)
def test_any_path_into_a_file(path):
    raw = json.dumps({"": {"": [1, {"a.b": 2}]}, "0": [3]}).encode()
    try:
        found = descend(raw, path, "case.json")
    except MalformedError as error:
        one_line(error)
    else:
        assert json.loads(found) in (
            {"": [1, {"a.b": 2}]},
            [1, {"a.b": 2}],
            1,
            {"a.b": 2},
            2,
            [3],
            3,
        )


@fuzzed(100)
@given(st.text(max_size=30).filter(lambda name: "/" not in name))
@example("a\0b")
@example("#")
@example("#a")
@example("\ud800")
@example("\u00b2")
@example("\u0663")
@example("..")
def test_any_name(name):
    for read in (read_workload, read_cluster, read_plan):
        try:
            read(name)
        except MalformedError as error:
            one_line(error)
        except BrokenPlanError:
            pytest.fail("nothing in the working directory is a plan")


@fuzzed(100)
@given(st.text(max_size=20), st.sampled_from(Dimension))
@example("1.", Dimension.SIZE)
@example(".5 GB", Dimension.SIZE)
@example("5\u00a0GB", Dimension.SIZE)
def test_any_quantity(text, dimension):
    try:
        assert parse_quantity(text, dimension) >= 0
    except MalformedError as error:
        one_line(error)


@fuzzed(200)
@given(st.integers(0, 10**6), st.data())
def test_orders_with_words_moved_are_refused_or_run_as_the_oracle_says(seed, data):
    """Swaps, moves, losses and doubles of words of a valid plan, its copies included."""
    plan = random_plan(random.Random(seed), most_stages=4, most_microbatches=3, most_devices=3)
    actions = [list(row) for row in plan.actions]
    lanes = None if plan.offload is None else [list(row) for row in plan.offload]
    full = [row for row in actions + (lanes or []) if row]
    for _ in range(data.draw(st.integers(1, 2))):
        row = data.draw(st.sampled_from(full))
        other = data.draw(st.sampled_from(full))
        if not row:
            continue
        word = row.pop(data.draw(st.integers(0, len(row) - 1)))
        times = data.draw(st.sampled_from([1, 1, 1, 1, 0, 2]))
        for _ in range(times):
            other.insert(data.draw(st.integers(0, len(other))), word)
    moved = replace(
        plan,
        actions=tuple(map(tuple, actions)),
        offload=None if lanes is None else tuple(map(tuple, lanes)),
    )
    try:
        checked = check(moved)
    except OutOfMemoryError as error:
        one_line(error, "device " if error.needed_bytes > error.limit_bytes else "host ")
    except ScheduleError as error:
        one_line(error)
    else:
        assert checked.step_ns == oracle.run(moved).step_ns
