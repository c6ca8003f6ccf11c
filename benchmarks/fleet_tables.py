"""The fleet benchmark's tables: what was published beside it, single changes, tuned plans."""

from __future__ import annotations

from benchmarks import record
from benchmarks.fleet_job import (
    INFERENCE,
    MARGIN,
    MIXED,
    PUBLISHED_DAYS,
    SCALES,
    Main,
    fill,
    microbatches,
    relative_utilisation,
    tuned_timeline,
)


def published_tables(main: Main, scales: dict[str, float]) -> list[record.Table]:
    """Predict what was published: days, utilisation and GPUs saved by scale and mix."""
    days = record.Table(
        title="Days to train 40B",
        columns=("GPUs", "microbatches", "simulated days", "published days", "use"),
        rows=tuple(
            (
                num,
                microbatches(num),
                main.days(num),
                PUBLISHED_DAYS.get(num),
                "fitted" if num in (1024, 8192) else "predicted",
            )
            for num in SCALES
        ),
    )
    plain = {num: relative_utilisation(main, num) for num in SCALES}
    outcomes = {
        (name, num): fill(main, num, mix, scales[name])
        for name, mix in (("mixed", MIXED), ("inference", INFERENCE))
        for num in SCALES
    }
    rows = []
    saved = {
        ("mixed", 2048): "200-300",
        ("mixed", 4096): "600-900",
        ("mixed", 8192): "1500-2000",
        ("inference", 8192): "2000-2600",
    }
    for (name, num), outcome in outcomes.items():
        report = outcome.report
        assert report.slowdown is not None
        rows.append(
            (
                name,
                num,
                100 * outcome.gain,
                100 * report.filled_fraction,
                100 * report.slowdown.mean,
                round(report.gpus_saved),
                saved.get((name, num)),
                int(report.result.done.sum()),
            )
        )
    fleet = record.Table(
        title="24 hours of the filled fleet, GPipe",
        columns=(
            "mix",
            "GPUs",
            "more work %",
            "bubble time filled %",
            "main slower %",
            "GPUs saved",
            "published GPUs saved",
            "fill jobs done",
        ),
        rows=tuple(rows),
    )

    def filled(name: str, num: int) -> float:
        return plain[num] * (1 + outcomes[name, num].gain)

    claims = (
        (
            "mixed, 4K filled / plain 2K",
            100 * filled("mixed", 4096) / plain[2048],
            89.0,
            "predicted",
        ),
        ("mixed, 8K filled / plain 4K", 100 * filled("mixed", 8192) / plain[4096], 92.0, "fitted"),
        (
            "BERT inference, 8K filled / plain 4K",
            100 * filled("inference", 8192) / plain[4096],
            106.5,
            "predicted",
        ),
        ("BERT inference, 8K, more work", 100 * outcomes["inference", 8192].gain, 63.0, "fitted"),
        ("mixed, 1K, more work", 100 * outcomes["mixed", 1024].gain, "5-15", "predicted"),
    )
    return [
        days,
        fleet,
        record.Table(
            title="Utilisation",
            columns=("claim", "simulated %", "published %", "use"),
            rows=claims,
        ),
    ]


def direction_table(main: Main, scales: dict[str, float]) -> record.Table:
    """Change one thing at a time: schedule, bubble size, free memory."""
    scale = scales["mixed"]

    def run(num: int, **changed: object) -> float:
        return fill(main, num, MIXED, scale, replicas=4, **changed).tera_a_second  # type: ignore[arg-type]

    pairs = (
        ("GPipe instead of 1F1B, 1K", run(1024, schedule="1f1b"), run(1024), "about +20"),
        ("GPipe instead of 1F1B, 8K", run(8192, schedule="1f1b"), run(8192), "about +5"),
        ("bubbles half as long, 8K", run(8192), run(8192, shrink=0.5), "-5.3"),
        ("4 GiB free instead of 2, 8K", run(8192, free_gib=2), run(8192, free_gib=4), "+30"),
        ("8 GiB free instead of 4, 8K", run(8192, free_gib=4), run(8192, free_gib=8), "+12.2"),
    )
    return record.Table(
        title="One change at a time, mixed jobs: fill TFLOPS a GPU",
        columns=("change", "before", "after", "difference %", "published %"),
        rows=tuple(
            (name, before, after, 100 * (after / before - 1), published)
            for name, before, after, published in pairs
        ),
    )


def margin_table(main: Main, scale: float) -> record.Table:
    """Hand over more and more of each bubble, under durations that vary much."""
    rows = []
    for margin in (0.0, 0.05, 0.1, 0.2, MARGIN):
        outcome = fill(main, 8192, MIXED, scale, replicas=1, margin=margin, spreads=(0.05, 0.2))
        late = outcome.report.slowdown
        assert late is not None
        rows.append(
            (
                margin,
                100 * outcome.report.filled_fraction,
                100 * late.mean,
                100 * late.worst,
                100 * late.late_share,
            )
        )
    return record.Table(
        title="Margins at 8K: main actions +-5 %, fill work +-20 %",
        columns=(
            "margin",
            "bubble time filled %",
            "main slower %, mean",
            "main slower %, worst step",
            "bubbles overrun %",
        ),
        rows=tuple(rows),
    )


def tuned_table(main: Main, scales: dict[str, float], seconds: float) -> record.Table:
    """Fill what a tuned plan leaves, beside GPipe and 1F1B."""
    rows = []
    for num in SCALES:
        base = main.timeline(num, "gpipe")
        for name in ("gpipe", "1f1b", "tuned"):
            timeline = (
                tuned_timeline(main, num, seconds) if name == "tuned" else main.timeline(num, name)
            )
            outcome = fill(main, num, MIXED, scales["mixed"], timeline=timeline, replicas=4)
            fits = sum(any(row) for row in outcome.report.packings)
            faster = base.step_ns / timeline.step_ns
            rows.append(
                (
                    num,
                    name,
                    timeline.step_ns / 1e9,
                    100 * timeline.bubble_fraction,
                    fits,
                    100 * outcome.report.filled_fraction,
                    faster,
                    100 * outcome.gain,
                    faster * (1 + outcome.gain),
                )
            )
    return record.Table(
        title="Tuned plans, filled with mixed jobs",
        columns=(
            "GPUs",
            "plan",
            "step s",
            "bubbles %",
            "kinds of jobs that fit, of 10",
            "of them filled %",
            "main job, GPipe = 1",
            "more work %",
            "main and fill work, GPipe's main = 1",
        ),
        rows=tuple(rows),
    )


def compared(tables: list[record.Table]) -> list[str]:
    """Say in words which of tuning and filling is worth more at which scale."""
    rows = next(table for table in tables if table.title.startswith("Tuned plans")).rows
    total = {(row[0], row[1]): float(row[-1] or 0) for row in rows}
    alone = {row[0]: float(row[6] or 0) for row in rows if row[1] == "tuned"}
    return [
        f"At {num} GPUs filling GPipe's bubbles gives {100 * (total[num, 'gpipe'] - 1):.0f} % "
        f"more work, tuning alone {100 * (alone[num] - 1):.0f} %, and both together "
        f"{100 * (total[num, 'tuned'] - 1):.0f} %, of main and fill work in equal operations."
        for num in SCALES
    ]
