"""Jobs files are read or refused in one line; ready models have the sizes that were published."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from octotune.errors import MalformedError
from octotune.fill.jobs import (
    Configuration,
    FillJob,
    MicroStep,
)
from octotune.fill.jobs_file import checked_jobs, read_jobs, with_configurations
from octotune.fill.models import HARDWARE, alone_ns, configurations_of, models
from octotune.fill.traces import Columns, Csv, Part, Synthetic, draw, read_csv
from simulator.fleet import NEVER

HEAD = "format: octotune-fill-jobs\nversion: 1\njobs:\n"
MIX = (Part(model="bert-base", kind="inference"), Part(model="bert-large", kind="training"))


def write(tmp_path, text, name="jobs.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_jobs_file_is_read_with_units_and_ready_models(tmp_path):
    path = write(
        tmp_path,
        HEAD + "  - {name: a, kind: inference, samples: 9, model: bert-base, hardware: v100}\n"
        "  - name: b\n    kind: training\n    samples: 4\n    deadline_ns: 2 h\n"
        "    configurations:\n      - batch_size: 2\n        resident_bytes: 1 MiB\n"
        "        micro_steps: [{time_ns: 2 ms, memory_bytes: 2 MiB}]\n",
    )
    first, second = read_jobs(path)
    assert {c.technique for c in first.configurations} == {"none", "offload"}
    assert second.deadline_ns == 7200 * 10**9
    assert second.configurations == (
        Configuration(
            batch_size=2,
            resident_bytes=2**20,
            micro_steps=(MicroStep(time_ns=2 * 10**6, memory_bytes=2**21),),
        ),
    )


MICRO = "configurations: [{batch_size: 1, micro_steps: [{time_ns: 5}]}]"


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (
            "{name: a, kind: inference, samples: 1, "
            "configurations: [{batch_size: 1, micro_steps: [{time_ns: -5}]}]}",
            r"jobs\[0\].configurations\[0\].micro_steps\[0\].time_ns: found -5; allowed: ",
        ),
        (
            f"{{name: a, kind: inference, samples: 1, arrival_ns: -3, {MICRO}}}",
            "arrival_ns: found -3",
        ),
        (
            f"{{name: a, kind: inference, samples: 0, {MICRO}}}",
            "samples: found 0; allowed: .*>= 1",
        ),
        (f"{{name: a, kind: idle, samples: 1, {MICRO}}}", 'kind: found "idle"; allowed: '),
        ("{name: a, kind: inference, samples: 1}", "configurations is missing, and so is model"),
        (
            "{name: a, kind: inference, samples: 1, model: bert-bse, hardware: v100}",
            r"jobs\[0\].model: found 'bert-bse'; did you mean bert-base\?",
        ),
        (
            "{name: a, kind: inference, samples: 1, model: bert-base, hardware: tpu}",
            r"jobs\[0\].hardware: found 'tpu'; allowed: v100, h100",
        ),
        (
            "{name: a, kind: inference, samples: 1, model: bert-base}",
            "model and hardware go together",
        ),
        (
            f"{{name: a, kind: inference, samples: 1, arrival_ns: 9, deadline_ns: 9, {MICRO}}}",
            "deadline_ns is 9; it comes after arrival_ns, 9",
        ),
        (
            "{name: a, kind: inference, samples: 1, configurations: "
            "[{batch_size: 1, resident_bytes: 9, micro_steps: [{time_ns: 5, memory_bytes: 8}]}]}",
            r"micro_steps\[0\].memory_bytes is 8; .* at least 9",
        ),
    ],
)
def test_bad_jobs_are_refused_in_one_line(tmp_path, job, message):
    with pytest.raises(MalformedError, match=message) as error:
        read_jobs(write(tmp_path, f"{HEAD}  - {job}\n"))
    assert "\n" not in str(error.value)


def test_jobs_of_one_name_are_refused():
    job = FillJob(
        name="a",
        kind="inference",
        samples=1,
        configurations=(Configuration(batch_size=1, micro_steps=(MicroStep(time_ns=1),)),),
    )
    with pytest.raises(MalformedError, match=r"jobs\[1\].name is 'a' a second time"):
        checked_jobs((job, job))


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("efficientnet", 117),
        ("bert-base", 109),
        ("bert-large", 334),
        ("swin-large", 779),
        ("xlm-r-xl", 2800),
    ],
)
def test_ready_models_have_the_published_number_of_parameters(name, millions):
    assert models()[name].params / 1e6 == pytest.approx(millions, rel=0.012)


@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=list(HARDWARE))
@pytest.mark.parametrize("kind", ["training", "inference"])
@pytest.mark.parametrize("name", list(models()))
def test_profiles_stay_below_the_hardware_and_grow_with_the_batch(name, kind, hardware):
    model = models()[name]
    found = configurations_of(model, hardware, kind)
    rate = model.flops(kind) / alone_ns(found) * 1e9
    assert 0.05 * hardware.peak_flops < rate < hardware.attainable * hardware.peak_flops
    for technique in {c.technique for c in found}:
        of = [c for c in found if c.technique == technique]
        for smaller, larger in pairwise(of):
            assert larger.batch_size == 2 * smaller.batch_size
            assert smaller.pass_ns <= larger.pass_ns
            assert smaller.peak_bytes < larger.peak_bytes <= hardware.memory_bytes
            per_sample = larger.pass_ns / larger.batch_size, smaller.pass_ns / smaller.batch_size
            assert per_sample[0] <= per_sample[1] * 1.001


def test_techniques_trade_time_for_memory():
    found = configurations_of(models()["bert-large"], HARDWARE["h100"], "training")
    plain, again, away, both = (
        next(c for c in found if c.batch_size == 8 and c.technique == technique)
        for technique in ("none", "checkpointing", "offload", "checkpointing and offload")
    )
    assert both.peak_bytes < again.peak_bytes < plain.peak_bytes
    assert away.peak_bytes < plain.peak_bytes
    assert plain.pass_ns < again.pass_ns
    assert plain.pass_ns < away.pass_ns
    assert away.resident_bytes == both.resident_bytes == 0


def test_jobs_with_their_own_configurations_keep_them():
    configurations = (Configuration(batch_size=1, micro_steps=(MicroStep(time_ns=1),)),)
    job = FillJob(name="a", kind="training", samples=1, configurations=configurations)
    assert with_configurations(job) is job


# --- traces


def test_drawn_jobs_follow_the_stated_distributions():
    what = Synthetic(
        num_jobs=4000,
        backlog=10,
        arrivals_per_hour=100,
        median_ns=3600 * 10**9,
        sigma=0.5,
        deadline_share=0.25,
        cancel_share=0.1,
    )
    drawn = draw(what, MIX, HARDWARE["v100"], seed=1)
    trace = drawn.trace
    assert (trace.arrival_ns[:10] == 0).all()
    assert (trace.arrival_ns[1:] >= trace.arrival_ns[:-1]).all()
    hours = trace.arrival_ns[-1] / 3600e9
    assert 3990 / hours == pytest.approx(100, rel=0.1)
    work = trace.samples * [drawn.alone_ns[kind] for kind in trace.kind]
    assert sorted(work)[2000] == pytest.approx(3600e9, rel=0.05)
    assert (trace.deadline_ns < NEVER).mean() == pytest.approx(0.25, abs=0.03)
    assert (trace.cancel_ns < NEVER).mean() == pytest.approx(0.1, abs=0.03)
    assert (trace.kind == 0).mean() == pytest.approx(0.5, abs=0.03)
    again = draw(what, MIX, HARDWARE["v100"], seed=1).trace
    assert (again.samples == trace.samples).all()


CSV = (
    "submit,run,n_gpu,what,how\n100,3600,1,a,inference\n40,1800,2,a,inference\n60,,1,a,training\n"
)


def test_a_csv_is_read_by_the_names_of_its_columns(tmp_path):
    write(tmp_path, CSV, "trace.csv")
    columns = Columns(arrival="submit", duration="run", gpus="n_gpu", model="what", kind="how")
    what = Csv(path="trace.csv", columns=columns, models={"a": "bert-base"})
    drawn = read_csv(what, MIX, HARDWARE["v100"], folder=tmp_path)
    assert drawn.left_out == 1  # it has no end
    assert drawn.trace.arrival_ns.tolist() == [0, 60 * 10**9]
    assert drawn.trace.kind.tolist() == [0, 0]
    hours = drawn.trace.samples * drawn.alone_ns[0] / 3600e9
    assert hours.tolist() == pytest.approx([1.0, 1.0], rel=1e-3)


def test_a_csv_may_hold_ends_and_dates_and_no_models(tmp_path):
    text = "from,to\n2020-07-01T12:00:00,2020-07-01T13:00:00\n2020-07-01T12:30:00,2020-07-02\n"
    write(tmp_path, text, "trace.csv")
    what = Csv(path="trace.csv", columns=Columns(arrival="from", end="to"))
    trace = read_csv(what, MIX, HARDWARE["v100"], folder=tmp_path, seed=3).trace
    assert trace.arrival_ns.tolist() == [0, 1800 * 10**9]
    assert set(trace.kind.tolist()) <= {0, 1}


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        (CSV, {"duration": "length"}, "missing columns: 'length'; found submit, run, n_gpu"),
        (CSV.replace("3600", "long"), {}, "line 2, run: found 'long'; allowed: seconds"),
        (CSV.replace("3600", "-1"), {}, "line 2: found a time of -1.0 s; allowed: 0 to 1e.08"),
        ("submit,run\n", {}, "holds no job"),
        ("submit,run\n0,5\n1e9,5\n", {}, "arrivals lie 1000000000 s apart; allowed: up to"),
        (CSV, {"model": "what", "kind": "how"}, "line 2: found 'a', 'inference'; allowed: .*bert"),
    ],
)
def test_bad_traces_are_refused_in_one_line(tmp_path, text, columns, message):
    write(tmp_path, text, "trace.csv")
    named = Columns(**{"arrival": "submit", "duration": "run"} | columns)
    with pytest.raises(MalformedError, match=message) as error:
        read_csv(Csv(path="trace.csv", columns=named), MIX, HARDWARE["v100"], folder=tmp_path)
    assert "trace.csv" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_trace_is_refused(tmp_path):
    what = Csv(path="none.csv", columns=Columns(arrival="a", duration="b"))
    with pytest.raises(MalformedError, match=r"none.csv: cannot be read: No such file"):
        read_csv(what, MIX, HARDWARE["v100"], folder=tmp_path)


def test_columns_need_a_duration_or_an_end():
    with pytest.raises(msgspec.ValidationError, match="duration or end is needed"):
        msgspec.json.decode(b'{"arrival": "a"}', type=Columns)


# --- what is documented


def test_the_documented_files_are_read(tmp_path):
    from pathlib import Path

    from octotune.fill import jobs
    from octotune.fill.fleet import read_fleet

    example = jobs.__doc__[jobs.__doc__.index("    format:") :]
    first, second = read_jobs(write(tmp_path, example))
    assert (first.name, second.factory) == ("nightly", "my_jobs.py:make")
    page = (Path(__file__).parent.parent / "docs" / "fill.md").read_text()
    block = page[page.index("    format: octotune-fleet") : page.index("Times drawn")]
    config = read_fleet(write(tmp_path, block, "fleet.yaml"))
    assert config.horizon_ns == 7 * 86400 * 10**9
    assert config.handover.slower == 1.3
