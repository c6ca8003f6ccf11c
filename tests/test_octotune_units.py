"""Quantities as text, and YAML: what people write by hand."""

from __future__ import annotations

import json
import re
import time

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from octotune.contract import read_cluster, read_plan, read_workload
from octotune.contract.units import Dimension, dimension_of, parse_quantity
from octotune.errors import MalformedError
from tests import valid_files


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("80 GiB", Dimension.SIZE, 80 * 2**30),
        ("80 GB", Dimension.SIZE, 80 * 10**9),
        ("80GB", Dimension.SIZE, 80 * 10**9),
        (" 1.5 KiB ", Dimension.SIZE, 1536),
        ("1 kB", Dimension.SIZE, 1000),
        ("1 KB", Dimension.SIZE, 1000),
        ("7 B", Dimension.SIZE, 7),
        ("16 b", Dimension.SIZE, 2),
        ("1 Gib", Dimension.SIZE, 2**27),
        ("2 TiB", Dimension.SIZE, 2**41),
        ("1 PB", Dimension.SIZE, 10**15),
        ("25 GB/s", Dimension.BANDWIDTH, 25 * 10**9),
        ("400 Gb/s", Dimension.BANDWIDTH, 50 * 10**9),
        ("64 GiB/s", Dimension.BANDWIDTH, 64 * 2**30),
        ("2.4 Gb/s", Dimension.BANDWIDTH, 3 * 10**8),
        ("5 us", Dimension.TIME, 5000),
        ("5 µs", Dimension.TIME, 5000),
        ("5 \u03bcs", Dimension.TIME, 5000),
        ("1.25 ms", Dimension.TIME, 1_250_000),
        ("0 ns", Dimension.TIME, 0),
        ("2 s", Dimension.TIME, 2 * 10**9),
        ("1 min", Dimension.TIME, 60 * 10**9),
        # exact where floating point is not
        ("9007199254740993 B", Dimension.SIZE, 9007199254740993),
        ("4503599627370497.5 ns", Dimension.TIME, 4503599627370498),
        ("0.3 KiB", Dimension.SIZE, 307),
        ("0.5 ns", Dimension.TIME, 1),
        ("9223372036854775807 ns", Dimension.TIME, 2**63 - 1),
    ],
)
def test_quantities_are_exact(text, dimension, value):
    assert parse_quantity(text, dimension) == value


@pytest.mark.parametrize(
    ("text", "dimension", "message"),
    [
        (
            "80",
            Dimension.SIZE,
            "found '80'; write a size such as \"80 GiB\", or a whole number of",
        ),
        ("GiB", Dimension.SIZE, "found 'GiB'; write a size"),
        ("", Dimension.TIME, "found ''; write a time such as \"5 us\""),
        ("-5 us", Dimension.TIME, "found '-5 us'; write a time"),
        ("5 5 us", Dimension.TIME, "found '5 5 us'; write a time"),
        ("1e3 us", Dimension.TIME, "found '1e3 us'; write a time"),
        ("1,000 us", Dimension.TIME, "found '1,000 us'; write a time"),
        ("\u0665 us", Dimension.TIME, "found '\u0665 us'; write a time"),
        ("5 us", Dimension.SIZE, "found '5 us', which is a time; write a size"),
        ("5 GB/s", Dimension.SIZE, "found '5 GB/s', which is a bandwidth; write a size"),
        ("5 GB", Dimension.BANDWIDTH, "found '5 GB', which is a size; write a bandwidth such as"),
        (
            "5 Gbps",
            Dimension.BANDWIDTH,
            "'Gbps' is no unit; write a bandwidth such as \"25 GB/s\"",
        ),
        ("5 gb", Dimension.SIZE, "'gb' is no unit; write a size"),
        ("5 Mi", Dimension.SIZE, "'Mi' is no unit"),
        ("9223372036854775808 ns", Dimension.TIME, "at most 9223372036854775807 nanoseconds"),
        ("9" * 24 + " EiB", Dimension.SIZE, "at most 9223372036854775807 bytes"),
        ("9" * 10**6 + " B", Dimension.SIZE, "…'; write a size"),
    ],
)
def test_texts_that_are_no_such_quantity_are_refused(text, dimension, message):
    with pytest.raises(MalformedError, match=re.escape(message)) as caught:
        parse_quantity(text, dimension)
    assert len(str(caught.value)) < 200


@given(st.integers(0, 10**12), st.integers(0, 999), st.sampled_from(["ms", "us"]))
def test_three_decimals_of_a_time_are_the_next_unit_s_whole(whole, thousandths, unit):
    factor = {"ms": 10**6, "us": 10**3}[unit]
    value = parse_quantity(f"{whole}.{thousandths:03} {unit}", Dimension.TIME)
    assert value == whole * factor + thousandths * factor // 1000


@pytest.mark.parametrize(
    ("field", "dimension"),
    [
        ("forward_ns", Dimension.TIME),
        ("times_ns", Dimension.TIME),
        ("memory_bytes", Dimension.SIZE),
        ("bandwidth", Dimension.BANDWIDTH),
        ("nic_bandwidth", Dimension.BANDWIDTH),
        ("name", None),
        ("num_microbatches", None),
    ],
)
def test_a_field_s_name_says_what_it_measures(field, dimension):
    assert dimension_of(field) == dimension


def test_units_are_read_in_json_and_yaml_alike(tmp_path):
    numbers = valid_files.workload()
    numbers["layers"][0]["forward_ns"] = 1_500_000
    numbers["layers"][0]["times_ns"] = {"fast": [1_000, 2_000_000, 3]}
    numbers["layers"][1]["state_bytes"] = 3 * 2**29
    texts = valid_files.workload()
    texts["layers"][0]["forward_ns"] = "1.5 ms"
    texts["layers"][0]["times_ns"] = {"fast": ["1 us", "2 ms", 3]}
    texts["layers"][1]["state_bytes"] = "1.5 GiB"
    workload = read_workload(valid_files.write(tmp_path, numbers))
    assert read_workload(valid_files.write(tmp_path, texts)) == workload
    in_yaml = valid_files.write(tmp_path, yaml.safe_dump(texts), "file.yaml")
    assert read_workload(in_yaml) == workload
    inside = valid_files.write(tmp_path, {"a": [texts]}, "case.json")
    assert read_workload(f"{inside}#a.0") == workload
    inside = valid_files.write(tmp_path, yaml.safe_dump({"a": [texts]}), "case.yml")
    assert read_workload(f"{inside}#a.0") == workload


@pytest.mark.parametrize("name", ["file.json", "file.yaml"])
def test_a_unit_that_does_not_fit_names_the_field(tmp_path, name):
    tree = valid_files.cluster()
    tree["links"]["pairs"]["0-1"]["bandwidth"] = "5 us"
    path = valid_files.write(tmp_path, json.dumps(tree), name)
    with pytest.raises(MalformedError, match=r"links\.pairs\.0-1\.bandwidth: found '5 us', which"):
        read_cluster(path)


def test_what_a_plan_keeps_for_itself_is_not_read_as_quantities(tmp_path):
    tree = valid_files.plan()
    tree["search"] = {"time_limit_ns": "none", "bandwidth": "wide"}
    tree["predicted"] = {"baselines": {"gpipe_ns": "does not fit"}}
    tree["cluster"]["devices"][0]["memory_bytes"] = "1 MB"
    plan = read_plan(valid_files.write(tmp_path, tree))
    assert plan.search == {"time_limit_ns": "none", "bandwidth": "wide"}
    assert plan.cluster.devices[0].memory_bytes == 10**6
    assert read_plan(valid_files.write(tmp_path, json.dumps(tree), "plan.yaml")) == plan


CLUSTER = """\
# four devices, of which one is another's copy but for its memory
format: octotune-cluster
version: 1
name: by hand
devices:
  - &one {kind: A, memory_bytes: 80 GiB, reserved_bytes: 2.5 GB, speed: 1}
  - *one
  - {<<: *one, memory_bytes: 40 GiB}
  - kind: B
    memory_bytes: 85899345920
    speed: 1.5e-1
links:
  intra_host: {latency_ns: 5 us, bandwidth: 400 Gb/s}
  pairs:
    0-3: {latency_ns: 1 ms, bandwidth: 1 GB/s}
"""


def test_yaml_reads_as_a_person_means_it(tmp_path):
    cluster = read_cluster(valid_files.write(tmp_path, CLUSTER, "cluster.yaml"))
    assert [device.memory_bytes for device in cluster.devices] == [
        80 * 2**30,
        80 * 2**30,
        40 * 2**30,
        85899345920,
    ]
    assert [device.speed for device in cluster.devices] == [1.0, 1.0, 1.0, 0.15]
    assert cluster.links.intra_host.bandwidth == 50 * 10**9
    assert cluster.link(3, 0).latency_ns == 10**6


@pytest.mark.parametrize(
    "text", ["yes", "off", "2024-01-01", "1_000", "0x10", "010", "1:30", "~x"]
)
def test_scalars_of_yaml_that_json_does_not_know_stay_text(tmp_path, text):
    path = valid_files.write(tmp_path, CLUSTER.replace("by hand", text), "cluster.yaml")
    assert read_cluster(path).name == text


@pytest.mark.parametrize(
    ("found", "replaced", "message"),
    [
        ("name: by hand", "name: a\nname: b", "the field 'name' stands twice at line 5, column 1"),
        ("name: by hand", "name: [", "is no such YAML: "),
        ("name: by hand", "name: *nobody", "found undefined alias"),
        ("name: by hand", "name: 5", "name: found 5; allowed: a text"),
        ("name: by hand", "nane: by hand", "nane: unknown field; did you mean name?"),
        ("name: by hand", "name: !!python/object:os.system {}", "could not determine a construct"),
        ("name: by hand", "name: !!binary aGk=", "could not determine a constructor|allowed: "),
        ("name: by hand", "? [1, 2]\n: 3", "a field's name is text at line 4, column 3"),
        ("name: by hand", "name: \x07", "is no YAML: "),
        ("name: by hand", "--- {}", "found another document at line 4, column 1"),
        ("name: by hand", "name: &a [*a]", "nested more than 64 deep"),
        ("name: by hand", "name: " + "[" * 100 + "]" * 100, "nested more than 64 deep"),
        (
            "name: by hand",
            "name: " + "[" * 10**5,
            "exceeded maximum nesting depth|nested too deep",
        ),
        ("speed: 1.5e-1", "speed: .inf", 'speed: found ".inf"; allowed: a number'),
        ("speed: 1.5e-1", "speed: .nan", 'speed: found ".nan"; allowed: a number'),
        ("speed: 1.5e-1", "speed: 1e999", "the number '1e999' is too large at line 11, column 12"),
        ("85899345920", "1e3", r"memory_bytes: found 1000\.0; allowed: a whole number"),
        ("85899345920", "9" * 100, "the number '9+…' is too large at line 10, column 19"),
        ("85899345920", "80 Gb/s", "memory_bytes: found '80 Gb/s', which is a bandwidth"),
        ("speed: 1.5e-1", "host: 1", "links.inter_host is missing"),
    ],
)
def test_yaml_that_is_wrong_is_refused_in_one_line(tmp_path, found, replaced, message):
    path = valid_files.write(tmp_path, CLUSTER.replace(found, replaced, 1), "cluster.yaml")
    with pytest.raises(MalformedError, match=message) as caught:
        read_cluster(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert text.isprintable()
    assert len(text) < 400


def test_aliases_that_expand_without_end_are_refused_at_once(tmp_path):
    levels = "\n".join(
        f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 12)
    )
    path = valid_files.write(tmp_path, f"a0: &a0 [x, x]\n{levels}\n", "bomb.yaml")
    begin = time.process_time()
    with pytest.raises(MalformedError, match="its aliases expand to more than 1048576 values"):
        read_cluster(path)
    assert time.process_time() - begin < 20


def test_long_yaml_is_sent_to_json(tmp_path):
    path = valid_files.write(tmp_path, "# " + "x" * 2**22, "long.yaml")
    with pytest.raises(MalformedError, match="bytes of YAML; at most 4194304, write JSON"):
        read_workload(path)


def test_a_plan_may_be_yaml(tmp_path):
    path = valid_files.write(tmp_path, yaml.safe_dump(valid_files.plan()), "plan.yaml")
    assert read_plan(path) == read_plan(valid_files.write(tmp_path, valid_files.plan()))
