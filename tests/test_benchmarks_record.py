import json

import pytest

from benchmarks import record
from benchmarks.__main__ import benchmarks, main

WHERE = record.Environment(
    commit="0123456789ab",
    date="2026-03-09",
    python="3.12.0",
    versions={"numpy": "2.4.6"},
    cpu="Example(R) CPU 9000 8-Core Processor @ 3.0GHz",
    num_cores=2,
    memory_gib=16.0,
    accelerators=(),
    system="Linux",
)


def example(**changes):
    values = {
        "benchmark": "sort_speed",
        "workload": "10 lists",
        "question": "How fast is sorting?",
        "command": record.command("sort_speed", ["--rounds", "5"]),
        "seed": 7,
        "tables": (
            record.Table(
                title="Times",
                columns=("way", "items/s", "ratio"),
                rows=(("slow|one", 12345, None), ("quick", 2_500_000.0, 2.0123456)),
            ),
        ),
        "shows": ("The quick way is quicker.",),
        "does_not_show": ("How it does on other machines.",),
        "notes": ("1 warmup, 5 rounds",),
    }
    return record.Record(**(values | changes))


def test_record_is_written_as_page_and_as_data_under_one_name(tmp_path):
    markdown, data = record.write(example(), WHERE, tmp_path)
    assert markdown.name == "sort_speed_10-lists_2x-example-9000_2026-03.md"
    assert data == markdown.with_suffix(".json")
    page = markdown.read_text(encoding="utf-8")
    for text in (
        "# How fast is sorting?",
        "- command: `python -m benchmarks sort_speed --rounds 5`",
        "- commit: 0123456789ab, date: 2026-03-09, seed: 7",
        "- 1 warmup, 5 rounds",
        "| way | items/s | ratio |\n| --- | ---: | ---: |",
        "| slow\\|one | 12,345 |  |",
        "| quick | 2,500,000 | 2.012 |",
        "## What it does not show\n\n- How it does on other machines.",
    ):
        assert text in page
    content = json.loads(data.read_text(encoding="utf-8"))
    assert content["record"]["tables"][0]["rows"][1] == ["quick", 2_500_000.0, 2.0123456]
    assert content["environment"]["cpu"] == WHERE.cpu


def test_second_run_in_a_month_replaces_the_first(tmp_path):
    record.write(example(), WHERE, tmp_path)
    record.write(example(question="Once more?"), WHERE, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert "Once more?" in next(tmp_path.glob("*.md")).read_text(encoding="utf-8")


def test_table_refuses_a_row_of_another_length():
    with pytest.raises(ValueError, match=r"table 'T', row 1 has 1 cells; there are 2 columns"):
        record.Table(title="T", columns=("a", "b"), rows=((1, 2), (1,)))


def test_alternate_calls_in_turns_and_leaves_the_warmup_out():
    calls = []
    timings = record.alternate(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3, warmup=1
    )
    assert calls == ["a", "b"] * 4
    assert {name: len(timing.seconds) for name, timing in timings.items()} == {"a": 3, "b": 3}


def test_timing_gives_median_and_spread():
    timing = record.Timing(seconds=(2.0, 1.0, 4.0))
    assert timing.median == 2.0
    assert timing.spread == "-50% +100%"


def test_environment_names_this_interpreter_and_its_libraries():
    where = record.environment()
    assert where.num_cores >= 1
    assert {"numpy", "numba"} <= set(where.versions)


def test_list_and_refusal_of_benchmarks(capsys):
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in benchmarks())
    assert main(["no_such"]) == 2
    assert "there is no benchmark 'no_such'" in capsys.readouterr().err
