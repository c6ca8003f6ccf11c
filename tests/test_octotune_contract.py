"""Contract files: what is read, what is refused and how, what is written."""

from __future__ import annotations

import json
import os
import re
import resource
import stat
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from benchmarks.check_speed import no_plans, write_repeated
from octotune.contract import (
    Cluster,
    DataParallel,
    Device,
    Layer,
    Link,
    Links,
    Plan,
    Predicted,
    Stage,
    Workload,
    build_costs,
    files,
    read_cluster,
    read_plan,
    read_workload,
    write_json,
)
from octotune.contract.files import bundled
from octotune.contract.form import checked
from octotune.errors import BrokenPlanError, MalformedError
from tests import valid_files

DELETED = object()


def changed(tree, place, value):
    """Put a value at a place such as `cluster.devices.0.speed`; DELETED takes it away."""
    *above, last = (int(part) if part.isdigit() else part for part in place.split("."))
    inside = tree
    for part in above:
        inside = inside[part]
    if value is DELETED:
        del inside[last]
    else:
        inside[last] = value
    return tree


def message_of(error, path):
    """Return what an error says about a file, which it names first, and in one line."""
    text = str(error)
    assert text.startswith(f"{path}: "), text
    assert text.isprintable()
    return text.removeprefix(f"{path}: ")


LINK = {"latency_ns": 1, "bandwidth": 1}


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        # numbers
        ("workload.layers.1.forward_ns", -1, "found -1; allowed: a whole number >= 0"),
        ("workload.layers.1.forward_ns", 1.0, "found 1.0; allowed: a whole number"),
        ("workload.layers.1.forward_ns", True, "found true; allowed: a whole number"),
        ("workload.layers.1.forward_ns", None, "found null; allowed: a whole number"),
        ("workload.layers.1.forward_ns", [1], "found [1]; allowed: a whole number"),
        ("workload.layers.1.forward_ns", 2**63, f"found {2**63}; allowed: a whole number <= "),
        ("workload.layers.1.forward_ns", 10**400, "allowed: a whole number <= "),
        ("cluster.devices.0.speed", 0, "is 0.0; it is finite and above 0"),
        ("cluster.devices.0.speed", "fast", 'found "fast"; allowed: a number'),
        ("cluster.devices.0.speed", 10**400, "at most 64 bits"),
        ("cluster.devices.0.host", -1, "found -1; allowed: a whole number >= 0"),
        ("cluster.devices.0.offload_bandwidth", -1, "found -1; allowed: a whole number >= 0"),
        ("cluster.links.intra_host.bandwidth", 0, "found 0; allowed: a whole number >= 1"),
        ("cluster.nic_bandwidth", 0, "found 0; allowed: a whole number >= 1"),
        ("cluster.data_parallel.size", 0, "found 0; allowed: a whole number >= 1"),
        ("cluster.data_parallel.bandwidth", 0, "found 0; allowed: a whole number >= 1"),
        ("num_microbatches", 0, "found 0; allowed: a whole number >= 1"),
        ("num_microbatches", 2**24 + 1, "allowed: a whole number <= 16777216"),
        ("num_microbatches", "2", 'found "2"; allowed: a whole number'),
        ("stages.0.device", -1, "found -1; allowed: a whole number >= 0"),
        ("stages.0.recompute", 1, "found 1; allowed: true or false"),
        # lists and objects
        ("workload.layers", [], "found []; allowed: a list of length >= 1"),
        ("workload.layers.0", 5, "found 5; allowed: an object"),
        ("workload.tied.0", [0, 1, 2], "found [0, 1, 2]; allowed: a list of length 2"),
        ("workload.layers.1.times_ns", {"a": [1, 2]}, "allowed: a list of length 3"),
        ("cluster.devices", [], "found []; allowed: a list of length >= 1"),
        ("actions.0", "0F0", 'found "0F0"; allowed: a list'),
        ("actions.0.0", 5, "found 5; allowed: a text"),
        ("offload", "none", 'found "none"; allowed: a list or null'),
        ("stages.0.layers", [0], "found [0]; allowed: a list of length 2"),
        ("search", [], "found []; allowed: an object"),
        # null stands for a default of none only
        ("workload.layers.1.kind", None, "found null; allowed: a text"),
        ("workload.layers.1.saved_w_bytes", None, "found null; allowed: a whole number"),
        ("workload.tied", None, "found null; allowed: a list"),
        ("cluster.devices.0.speed", None, "found null; allowed: a number"),
        ("cluster.links.pairs", None, "found null; allowed: an object"),
        ("search", None, "found null; allowed: an object"),
        # fields
        ("workload.layers.1.forward_ns", DELETED, "missing; found the fields name, kind, "),
        ("workload.name", DELETED, "missing; found the fields format, version, layers, tied"),
        ("workload.format", DELETED, "missing; found the fields version, name"),
        ("version", DELETED, "missing; found the fields format"),
        ("cluster.links.intra_host", DELETED, "missing; found the fields inter_host, pairs"),
        ("stages.0.device", DELETED, "missing; found the fields layers, recompute"),
        ("workload.layers.1.foward_ns", 5, "unknown field; did you mean forward_ns?"),
        ("cluster.qqq", 5, "unknown field; allowed: format, version, name, devices, links, "),
        ("predicted", {"qqq": 5}, "unknown field; allowed: step_ns, bubble_fraction, "),
        # choices
        ("workload.format", "octotune-cluster", 'found "octotune-cluster"; allowed: "octotune-w'),
        ("workload.version", 2, "found 2; allowed: 1"),
        ("version", True, "found true; allowed: a whole number"),
        # rules of workloads
        ("workload.layers.1.name", "embedding", "is 'embedding' a second time; names are unique"),
        ("workload.layers.1.offloadable_bytes", 3073, "is 3073; it is at most saved_bytes + "),
        ("workload.tied.0", [0, 0], "is [0, 0]; write two layers i < j below 3"),
        ("workload.tied.0", [2, 0], "is [2, 0]; write two layers i < j below 3"),
        ("workload.tied.0", [0, 3], "is [0, 3]; write two layers i < j below 3"),
        ("workload.tied", [[0, 1], [1, 2]], "is [1, 2]; a layer is in at most one pair"),
        # rules of clusters
        ("cluster.devices.0.host_link", "", 'found ""; allowed: a text of length >= 1'),
        ("cluster.links.inter_host", DELETED, "is missing; it is required as devices are on "),
        ("cluster.links.inter_host", None, "is missing; it is required as devices are on "),
        ("cluster.links.pairs", {"0-1": LINK, "1-0": LINK}, 'has "0-1" and "1-0"; one holds for'),
        ("cluster.links.pairs", {"0-0": LINK}, "has '0-0'; write two different devices below 2"),
        ("cluster.links.pairs", {"0-2": LINK}, "has '0-2'; write two different devices below 2"),
        ("cluster.links.pairs", {"00-1": LINK}, "has '00-1'; write two devices, such as \"0-3\""),
        (
            "cluster.links.pairs",
            {"0-1": {"latency_ns": 1}},
            "missing; found the fields latency_ns",
        ),
    ],
)
def test_malformed_files_are_refused_in_one_line(tmp_path, place, value, message):
    path = valid_files.write(tmp_path, changed(valid_files.plan(), place, value))
    with pytest.raises(MalformedError, match=re.escape(message)) as caught:
        read_plan(path)
    said = message_of(caught.value, path)
    container = re.sub(r"\.(\d+)", r"[\1]", place)
    assert said.startswith(container.rpartition(".")[0])
    assert len(said) < 400


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"ok": [1, 2, 3], "bad one": [1, -2, 3]}, "layers[0].times_ns['bad one'][1]: found -2;"),
        ({"ok": [1, 2, 3], "b": 5}, "layers[0].times_ns['b']: found 5;"),
    ],
)
def test_the_key_of_a_wrong_entry_is_named(tmp_path, value, place):
    path = valid_files.write(tmp_path, changed(valid_files.workload(), "layers.0.times_ns", value))
    with pytest.raises(MalformedError, match=re.escape(place)):
        read_workload(path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (
            "workload.layers.1.forward_ns",
            -1,
            "workload.layers[1].forward_ns: allowed: a whole num",
        ),
        ("workload.layers.1", [], "workload.layers[1]: found a list; allowed: an object"),
        ("num_microbatches", "2", "num_microbatches: found a text; allowed: a whole number"),
        ("stages.1.device", DELETED, "stages[1].device: missing"),
        ("workload.layers.0.times_ns", {"a": [1]}, "layers[0].times_ns: allowed: a list of lengt"),
        ("cluster.qqq", 5, "cluster.qqq: unknown field; allowed: format, version, name, devices"),
        ("workload.tied.0", [0, 0], "workload.tied[0] is [0, 0]; write two layers i < j below 3"),
    ],
)
def test_large_files_are_refused_without_looking_for_what_was_found(
    tmp_path, monkeypatch, place, value, message
):
    monkeypatch.setattr("octotune.contract.explain.HAND_WRITTEN_BYTES", 0)
    monkeypatch.setattr("octotune.contract.form.HAND_WRITTEN_BYTES", 0)
    path = valid_files.write(tmp_path, changed(valid_files.plan(), place, value))
    with pytest.raises(MalformedError, match=re.escape(message)):
        read_plan(path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("stages", [], "stages hold 0 of 3 layers; each layer is in exactly one stage"),
        ("stages.1.layers", [1, 2], "stages hold 2 of 3 layers"),
        ("stages.1.layers", [2, 3], "stages[1].layers is [2, 3]; stages are consecutive"),
        ("stages.0.layers", [0, 2], "stages[1].layers is [1, 3]; stages are consecutive"),
        ("stages.0.layers", [0, 0], "stages[0].layers is [0, 0]; stages are consecutive"),
        ("stages.0.layers", [1, 0], "stages[0].layers is [1, 0]; stages are consecutive"),
        ("stages.1.layers", [1, 4], "with end from 2 to 3"),
        ("stages.0.layers", [0, 3], "the stages before it hold all 3 layers"),
        ("stages.0.device", 2, "stages[0].device is 2; the cluster has the devices 0 to 1"),
        ("stages.0.device", 2**40, "the cluster has the devices 0 to 1"),
        ("actions", [], "actions has 0 rows; it has one a device, so 2"),
        ("actions", [[], [], []], "actions has 3 rows; it has one a device, so 2"),
        ("offload", [[]], "offload has 1 rows; it has one a device, so 2"),
    ],
)
def test_plans_that_break_a_rule_are_not_malformed(tmp_path, place, value, message):
    path = valid_files.write(tmp_path, changed(valid_files.plan(), place, value))
    with pytest.raises(BrokenPlanError, match=re.escape(message)) as caught:
        read_plan(path)
    message_of(caught.value, path)


def test_a_broken_plan_cannot_be_made_in_python_either():
    with pytest.raises(BrokenPlanError, match="stages hold 1 of 2 layers"):
        Plan(
            workload=two_layers(),
            cluster=Cluster.equal(1),
            num_microbatches=1,
            stages=(Stage(layers=(0, 1), device=0),),
            actions=((),),
        )


TEXT = json.dumps(valid_files.plan())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (TEXT[:700], "is no JSON: it breaks off before its end, at line 1, column 701"),
        (TEXT + "x", f"is no JSON: trailing characters at line 1, column {len(TEXT) + 1}"),
        (TEXT + "\n\n}", "is no JSON: trailing characters at line 3, column 1"),
        ("[1, 2]", "found [1, 2]; allowed: an object"),
        ("null", "found null; allowed: an object"),
        ("layers: []", "is no JSON: invalid character at line 1, column 1"),
        (TEXT.encode("utf-16"), "is no UTF-8 text: byte 0xff at line 1, column 1"),
        (TEXT.encode()[:99] + b"\xff", "is no UTF-8 text: byte 0xff at line 1, column 100"),
        (b"\x1f\x8b\x08\x00", "is no UTF-8 text: byte 0x8b at line 1, column 2"),
        (TEXT.replace("1000", "NaN", 1), "NaN and Infinity are no numbers of JSON at line 1"),
        (TEXT.replace("1000", "-Infinity", 1), "NaN and Infinity are no numbers of JSON"),
        (TEXT.replace("1000", "01000", 1), "is no JSON: invalid number at line 1"),
        (TEXT.replace("1000", "1e400", 1), "forward_ns: found 1e400; allowed: a number of at"),
        (TEXT.replace("1000", "1" * 5000, 1), "…; allowed: a number of at most 64 bits"),
        (TEXT.replace('"embedding"', '"\\ud800"', 1), "is no JSON: unexpected end of hex escape"),
        ("[" * 10**6, "nested too deeply"),
        ('{"a":' * 10**6, "nested too deeply"),
        (TEXT.replace('"seed": 0', '"a": ' + "[" * 10**5), "nested too deeply"),
        (TEXT.replace('"seed": 0', '"a": ' + "[" * 5000 + "]" * 5000), "nested too deeply"),
        (TEXT.replace('"two devices"', '"' + "n" * 10**6 + '", "x": 1'), "x: unknown field"),
        (TEXT.replace('"kind": "slow"', '"' + "n" * 10**6 + '": 1'), "unknown field; allowed"),
    ],
)
def test_what_is_no_json_of_ours_is_refused_in_one_line(tmp_path, content, message):
    path = valid_files.write(tmp_path, content)
    with pytest.raises(MalformedError, match=re.escape(message)) as caught:
        read_plan(path)
    assert len(message_of(caught.value, path)) < 400


@pytest.mark.parametrize(
    ("found", "twice", "message"),
    [
        ('"version": 1', '"version": 1, "version": 1', "an object has the field 'version' twice"),
        ('"kind": "slow"', '"kind": "slow", "kind": "slow"', "cluster.devices[0] has the field "),
        ('"seed": 0', '"a": [{"b": 1, "b": 2}]', "search.a[0] has the field 'b' twice"),
        ('"fast": [', '"fast": [1, 2, 3], "fast": [', "workload.layers[0].times_ns has the field"),
        # a duplicate is said first even where something else is wrong too
        (
            '"kind": "slow"',
            '"kind": 5, "kind": 5',
            "cluster.devices[0] has the field 'kind' twice",
        ),
    ],
)
def test_fields_that_stand_twice_are_refused(tmp_path, found, twice, message):
    path = valid_files.write(tmp_path, TEXT.replace(found, twice, 1))
    with pytest.raises(MalformedError, match=re.escape(message)):
        read_plan(path)


def test_defaults_hold_where_fields_are_absent(tmp_path):
    bare = {"name": "a", "forward_ns": 1, "input_grad_ns": 1, "weight_grad_ns": 1}
    bare |= {"param_bytes": 1, "state_bytes": 1, "saved_bytes": 1, "output_bytes": 1}
    workload = read_workload(
        valid_files.write(
            tmp_path,
            {"format": "octotune-workload", "version": 1, "name": "w", "layers": [bare]},
        )
    )
    assert workload.tied == ()
    layer = workload.layers[0]
    assert (layer.kind, layer.times_ns) == ("", {})
    assert layer.optimizer_ns == layer.saved_w_bytes == layer.held_w_bytes == 0
    assert layer.workspace_bytes == layer.offloadable_bytes == 0
    cluster = read_cluster(
        valid_files.write(
            tmp_path,
            {
                "format": "octotune-cluster",
                "version": 1,
                "name": "c",
                "devices": [{"kind": "any", "memory_bytes": 0}],
                "links": {"intra_host": LINK},
            },
        )
    )
    device = cluster.devices[0]
    assert (device.speed, device.host, device.host_link) == (1.0, 0, None)
    assert device.reserved_bytes == device.overhead_ns == device.offload_bandwidth == 0
    assert (cluster.links.inter_host, cluster.links.pairs) == (None, {})
    assert cluster.nic_bandwidth is cluster.host_memory_bytes is cluster.data_parallel is None


@pytest.mark.parametrize(
    "place",
    [
        "offload",
        "predicted",
        "cluster.nic_bandwidth",
        "cluster.host_memory_bytes",
        "cluster.data_parallel",
    ],
)
def test_null_is_absent_where_the_default_is_none(tmp_path, place):
    absent = read_plan(
        valid_files.write(
            tmp_path, changed(changed(valid_files.plan(), place, None), place, DELETED)
        )
    )
    assert absent == read_plan(
        valid_files.write(tmp_path, changed(valid_files.plan(), place, None))
    )


def test_a_byte_order_mark_is_no_harm(tmp_path):
    path = valid_files.write(tmp_path, b"\xef\xbb\xbf" + TEXT.encode())
    assert read_plan(path).num_microbatches == 2


# sources


def test_a_path_may_point_into_a_file(tmp_path):
    case = {
        "workload": valid_files.workload(),
        "caps": {"p": {"cluster": valid_files.cluster()}, "0.5": [valid_files.cluster()]},
    }
    path = valid_files.write(tmp_path, case, "case.json")
    assert read_workload(f"{path}#workload").name == "three layers"
    assert read_cluster(f"{path}#caps.p.cluster").name == "two devices"
    assert read_cluster(f"{path}#caps.0.5.0").name == "two devices"


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("", "format: missing; found the fields workload, caps; it holds one inside: add #workl"),
        ("#capz.p", "found no 'capz.p'; there are the fields workload, caps"),
        ("#caps.q", "found no 'q'; there are the fields p, l"),
        ("#caps.l.2", "found no '2'; the list there has 1 entries, from 0"),
        ("#caps.l.x", "found no 'x'; the list there has 1 entries, from 0"),
        ("#caps.l.0.x", "found no 'x'; there is only 5"),
        ("#caps.l", "found [5]; allowed: an object"),
        ("#", "format: missing"),
        ("#.", "found no '.'; there are the fields workload, caps"),
    ],
)
def test_a_path_that_points_nowhere_says_what_is_there(tmp_path, place, message):
    case = {"workload": valid_files.workload(), "caps": {"p": 1, "l": [5]}}
    path = valid_files.write(tmp_path, case, "case.json")
    with pytest.raises(MalformedError, match=re.escape(message)):
        read_workload(f"{path}{place}")


def test_a_path_into_a_file_that_is_no_json_is_refused(tmp_path):
    path = valid_files.write(tmp_path, '{"a": {"b": tru')
    with pytest.raises(MalformedError, match="is no JSON: "):
        read_workload(f"{path}#a.b")
    path = valid_files.write(tmp_path, "[" * 10**6)
    with pytest.raises(MalformedError, match="nested too deeply"):
        read_workload(f"{path}#0")


def test_a_file_whose_name_holds_a_hash_is_read_whole(tmp_path):
    path = valid_files.write(tmp_path, valid_files.workload(), "a#b.json")
    assert read_workload(path).name == "three layers"


@pytest.mark.parametrize("name", bundled(Workload))
def test_bundled_workloads_are_read_by_name(name):
    workload = read_workload(name)
    assert workload.name == name
    assert len(workload.layers) >= 34


@pytest.mark.parametrize("name", bundled(Cluster))
def test_bundled_clusters_are_read_by_name(name):
    cluster = read_cluster(name)
    assert cluster.name == name
    assert len(cluster.devices) == sum(int(number) for number in re.findall(r"x(\d+)", name))


def test_names_that_are_not_bundled_say_what_is():
    with pytest.raises(MalformedError, match="no such file, and no bundled workload; did you me"):
        read_workload("llama3-8bb")
    with pytest.raises(MalformedError, match="no such file, and no bundled cluster; there are a1"):
        read_cluster("qqqq")
    with pytest.raises(MalformedError, match=r"^no/such.json: no such file$"):
        read_cluster("no/such.json")
    with pytest.raises(MalformedError, match=r"^llama3-8b: no such file$"):
        read_plan("llama3-8b")


def test_a_number_of_devices_is_a_cluster():
    assert read_cluster("3") == read_cluster(3) == Cluster.equal(3)
    cluster = read_cluster(3)
    assert len({device.host for device in cluster.devices}) == 1
    costs = build_costs(
        two_layers(), cluster, (Stage(layers=(0, 1), device=0), Stage(layers=(1, 2), device=2)), 1
    )
    assert costs.transfer_hold_ns[0] <= 1
    assert costs.transfer_latency_ns[0] == 0


@pytest.mark.parametrize("number", ["0", "-1", "65537", "9" * 5000])
def test_absurd_numbers_of_devices_are_refused(number):
    with pytest.raises(MalformedError, match=r"cluster: found .* devices; allowed: 1 to 65536"):
        read_cluster(number)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", "cannot be read: Is a directory"),
        ("a\0b", "cannot be read: embedded null byte"),
        ("a" * 5000, "cannot be read: File name too long"),
        ("new\nline.json", "no such file"),
    ],
)
def test_what_cannot_be_opened_is_refused_in_one_line(name, message):
    with pytest.raises(MalformedError, match=message) as caught:
        read_plan(name)
    assert str(caught.value).isprintable()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_is_refused(tmp_path):
    path = valid_files.write(tmp_path, valid_files.plan())
    path.chmod(0)
    with pytest.raises(MalformedError, match="cannot be read: Permission denied"):
        read_plan(path)


def test_files_above_the_limit_are_refused(tmp_path, monkeypatch):
    path = valid_files.write(tmp_path, valid_files.plan())
    size = path.stat().st_size
    monkeypatch.setattr(files, "MAX_FILE_BYTES", size)
    assert read_plan(path).num_microbatches == 2
    monkeypatch.setattr(files, "MAX_FILE_BYTES", size - 1)
    with pytest.raises(MalformedError, match=f"found {size} bytes; allowed: at most {size - 1}"):
        read_plan(path)


def test_an_endless_device_is_read_no_further_than_the_limit(monkeypatch):
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 1000)
    with pytest.raises(MalformedError, match="found more than 1000 bytes"):
        read_plan("/dev/zero")


# values


def two_layers(**fields) -> Workload:
    layer = {
        "forward_ns": 100,
        "input_grad_ns": 70,
        "weight_grad_ns": 50,
        "param_bytes": 7,
        "state_bytes": 1000,
        "saved_bytes": 20,
        "output_bytes": 8,
    }
    return Workload(
        name="two", layers=tuple(Layer(name=name, **{**layer, **fields}) for name in "ab")
    )


def test_values_made_in_python_are_checked_as_files_are():
    assert checked(two_layers()) == two_layers()
    with pytest.raises(MalformedError, match=r"workload: layers\[0\].forward_ns: found -5; allow"):
        checked(two_layers(forward_ns=-5))
    with pytest.raises(MalformedError, match=r"workload: layers\[0\].forward_ns: found 0.5; allo"):
        checked(two_layers(forward_ns=0.5))
    with pytest.raises(MalformedError, match=r"workload: Encoding objects of type numpy.int64"):
        checked(two_layers(forward_ns=np.int64(5)))


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_is_finite_and_above_0(speed):
    with pytest.raises(ValueError, match=r"speed is .*; it is finite and above 0"):
        Device(kind="any", memory_bytes=0, speed=speed)


# writing


def test_what_is_written_is_read_back(tmp_path):
    plan = read_plan(valid_files.write(tmp_path, valid_files.plan()))
    path = tmp_path / "again.json"
    plan.save(path)
    assert read_plan(path) == plan
    again = path.read_bytes()
    read_plan(path).save(path)
    assert path.read_bytes() == again


def test_plan_files_hold_no_null_and_only_fields_of_the_contract(tmp_path):
    """So that a reader that knows docs/contract.md alone, and takes it at its word, reads them."""
    path = tmp_path / "plan.json"
    Plan(
        workload=two_layers(),
        cluster=Cluster.equal(1),
        num_microbatches=1,
        stages=(Stage(layers=(0, 2), device=0),),
        actions=(("0F0", "0B0"),),
        predicted=Predicted(step_ns=1),
        search={"seed": 0, "limit": None},
    ).save(path)
    plan = json.loads(path.read_text())
    assert plan["search"] == {"seed": 0, "limit": None}
    assert plan["predicted"] == {"step_ns": 1, "baselines": {}}
    assert "null" not in path.read_text().replace('"limit": null', "")
    assert set(plan) == {
        "format", "version", "workload", "cluster", "num_microbatches", "stages", "actions",
        "predicted", "search",
    }  # fmt: skip
    assert set(plan["cluster"]) == {"format", "version", "name", "devices", "links"}
    assert "host_link" not in plan["cluster"]["devices"][0]
    assert "inter_host" not in plan["cluster"]["links"]


def test_a_device_s_row_is_written_on_one_line(tmp_path):
    path = tmp_path / "plan.json"
    read_plan(valid_files.write(tmp_path, valid_files.plan())).save(path)
    lines = path.read_text().splitlines()
    assert '  ["0F0", "0F1", "0B0", "0B1"],' in lines
    assert max(map(len, lines)) < 500
    assert len(lines) < 60


def test_writing_replaces_a_file_whole_and_leaves_nothing_beside(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("old")
    write_json(two_layers(), path)
    assert read_workload(path) == two_layers()
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_json(two_layers(forward_ns={1}), path)
    assert read_workload(path) == two_layers()
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_written_file_has_the_usual_permissions(tmp_path):
    path = tmp_path / "plan.json"
    write_json(two_layers(), path)
    (tmp_path / "usual").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "usual").stat().st_mode)


def test_links_and_devices_are_written_to_not_replaced(tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    write_json(two_layers(), link)
    assert link.is_symlink()
    assert read_workload(target) == two_layers()
    write_json(two_layers(), "/dev/null")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


# costs


def test_costs_follow_the_contract_s_formulas():
    """Each number by hand, with sizes at which floating point would be off."""
    workload = Workload(
        name="w",
        layers=(
            Layer(
                name="a", forward_ns=101, input_grad_ns=75, weight_grad_ns=51, optimizer_ns=11,
                param_bytes=10**15 + 1, state_bytes=1000, saved_bytes=20, saved_w_bytes=30,
                held_w_bytes=40, workspace_bytes=7, output_bytes=10**15 + 3, offloadable_bytes=50,
            ),
            Layer(
                name="b", forward_ns=9, input_grad_ns=8, weight_grad_ns=7, optimizer_ns=13,
                param_bytes=5, state_bytes=600, saved_bytes=1, saved_w_bytes=2, held_w_bytes=3,
                workspace_bytes=9, output_bytes=6, times_ns={"k1": (400, 300, 200)},
            ),
            Layer(
                name="c", forward_ns=0, input_grad_ns=0, weight_grad_ns=0, param_bytes=5,
                state_bytes=900, saved_bytes=1, output_bytes=0,
            ),
        ),
        tied=((0, 2),),
    )  # fmt: skip
    cluster = Cluster(
        name="c",
        devices=(
            Device(kind="k0", memory_bytes=10, speed=2.0, overhead_ns=3, reserved_bytes=4,
                   offload_bandwidth=10**9 + 7),
            Device(kind="k1", memory_bytes=20, speed=3.0, host=1),
        ),
        links=Links(
            intra_host=Link(latency_ns=1, bandwidth=2),
            inter_host=Link(latency_ns=5, bandwidth=10**9 - 1),
        ),
        nic_bandwidth=10**8 - 1,
        data_parallel=DataParallel(size=3, bandwidth=10**7 + 3),
    )  # fmt: skip
    stages = (
        Stage(layers=(0, 1), device=0, recompute=True),
        Stage(layers=(1, 2), device=1),
        Stage(layers=(2, 3), device=1),
    )
    costs = build_costs(workload, cluster, stages, 4)
    # 101/2, 75/2 and 51/2 round up at the half; a measured time is used as it is
    assert costs.forward_ns.tolist() == [51 + 3, 400, 1]
    assert costs.input_grad_ns.tolist() == [38 + 51 + 3, 300, 1]
    assert costs.weight_grad_ns.tolist() == [26 + 3, 200, 1]
    assert costs.backward_ns.tolist() == [38 + 26 + 51 + 3, 500, 1]

    def ceil(numerator: int, denominator: int) -> int:
        return -int(Fraction(-numerator, denominator) // 1)

    assert costs.transfer_hold_ns.tolist() == [ceil((10**15 + 3) * 10**9, 10**8 - 1), 0]
    assert costs.transfer_latency_ns.tolist() == [5, 0]
    assert costs.transfer_uses_nic.tolist() == [True, False]
    assert costs.reduce_ns.tolist() == [
        ceil(2 * 2 * size * 10**9, 3 * (10**7 + 3)) for size in (10**15 + 1, 5, 5)
    ]
    assert costs.exchange_stages.tolist() == [[0, 2]]
    assert costs.exchange_ns.tolist() == [ceil((10**15 + 1) * 10**9, 10**8 - 1) + 5]
    assert costs.optimizer_ns.tolist() == [6, 4]  # 11/2, 13/3
    assert costs.static_bytes.tolist() == [4 + 1000, 600 + 900]
    assert costs.copy_ns.tolist() == [ceil(50 * 10**9, 10**9 + 7), -1, -1]
    assert costs.input_bytes.tolist() == [0, 10**15 + 3, 6]
    assert costs.workspace_bytes.tolist() == [7, 9, 0]

    together = (Stage(layers=(0, 3), device=0),)
    costs = build_costs(workload, cluster, together, 4)
    assert costs.static_bytes.tolist() == [4 + 1000 + 600, 0]  # tied once, the larger
    assert len(costs.exchange_ns) == 0
    assert costs.workspace_bytes.tolist() == [9]


@pytest.mark.parametrize("speed", [1e-300, 5e-324])
def test_times_beyond_any_number_are_refused(speed):
    cluster = Cluster(
        name="slow",
        devices=(Device(kind="any", memory_bytes=1, speed=speed),),
        links=Links(intra_host=Link(latency_ns=0, bandwidth=1)),
    )
    with pytest.raises(MalformedError, match=r"times: .* ns at speed .* are too long; at most 2"):
        build_costs(two_layers(), cluster, (Stage(layers=(0, 2), device=0),), 1)


def test_sums_beyond_62_bits_are_refused():
    stages = (Stage(layers=(0, 2), device=0),)
    with pytest.raises(MalformedError, match="times of all microbatches add up to"):
        build_costs(two_layers(forward_ns=2**61), Cluster.equal(1), stages, 2)
    with pytest.raises(MalformedError, match="bytes of all microbatches add up to"):
        build_costs(two_layers(saved_bytes=2**61), Cluster.equal(1), stages, 2)


def test_tune_refuses_values_that_no_file_could_hold():
    from octotune import tune

    with pytest.raises(MalformedError, match=r"layers\[0\].forward_ns: found -5; allowed"):
        tune(two_layers(forward_ns=-5), 2, num_microbatches=2)
    with pytest.raises(MalformedError, match=r"cluster: devices\[0\].memory_bytes: found -1; all"):
        tune(two_layers(), Cluster.equal(2, memory_bytes=-1), num_microbatches=2)
    with pytest.raises(MalformedError, match="cluster: found 0 devices; allowed: 1 to 65536"):
        tune(two_layers(), 0, num_microbatches=2)


NO_PLANS = sorted(no_plans(valid_files.plan()))


@pytest.mark.parametrize("kind", NO_PLANS)
def test_megabytes_of_what_is_no_plan_are_refused(tmp_path, kind):
    path = tmp_path / "no plan.json"
    write_repeated(path, *no_plans(valid_files.plan())[kind], size=4 * 10**6)
    with pytest.raises(MalformedError, match=r"no plan\.json: ") as caught:
        read_plan(path)
    assert len(message_of(caught.value, path)) < 400


@pytest.mark.slow
@pytest.mark.parametrize("kind", NO_PLANS)
def test_100_megabytes_of_what_is_no_plan_take_bounded_memory(tmp_path, kind):
    path = tmp_path / "no plan.json"
    write_repeated(path, *no_plans(valid_files.plan())[kind], size=10**8)
    done = subprocess.run(
        [sys.executable, "-m", "octotune", "check", path],
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30)),
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"{path}: ")
    assert done.stderr.count("\n") == 1
