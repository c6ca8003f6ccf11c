"""What people read: plans and timelines as tables, pictures and traces.

The only place that turns nanoseconds into ms, bytes into GiB and shares into %. Tables are rich
renderables, so a caller prints them where it likes; `print_...` do so on standard output.
`words` has the units, `tables` and `path` what goes on a terminal, `pictures` the PNGs (matplotlib
is imported when one is made), `traces` the files that Perfetto opens.
"""

from octotune.report.offload import print_host_link
from octotune.report.path import critical_path_text
from octotune.report.pictures import timeline_picture, timelines_picture
from octotune.report.tables import (
    baseline_table,
    bubble_table,
    check_report,
    device_table,
    difference_table,
    plan_table,
    print_check,
    print_comparison,
    print_plan,
    stage_table,
)
from octotune.report.traces import read_trace, write_trace

__all__ = [
    "baseline_table",
    "bubble_table",
    "check_report",
    "critical_path_text",
    "device_table",
    "difference_table",
    "plan_table",
    "print_check",
    "print_comparison",
    "print_host_link",
    "print_plan",
    "read_trace",
    "stage_table",
    "timeline_picture",
    "timelines_picture",
    "write_trace",
]
