"""Timelines as pictures: one row a device, colours for kinds, thin strips for idle time by cause.

The colours are Okabe and Ito's, which people with any colour vision tell apart; the stages of a
device are shades of them, the later the lighter. Causes of idle time have colours of their own
and are drawn as strips of less than half the height, so that work and waiting are never confused.

Source:
    Okabe, Ito, "Color Universal Design", 2008, https://jfly.uni-koeln.de/color/
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octotune.report.words import duration, percent, size
from simulator.actions import CopyKind, Kind, kind_of, microbatch_of, stage_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from simulator.bubbles import Bubbles
    from simulator.timeline import Timeline

Floats = NDArray[np.floating[Any]]

_KIND_COLOURS = {
    Kind.F: "#0072B2",
    Kind.B: "#009E73",
    Kind.I: "#E69F00",
    Kind.W: "#CC79A7",
}
_KIND_WORDS = {
    Kind.F: "F forward",
    Kind.B: "B backward",
    Kind.I: "I input half",
    Kind.W: "W weight half",
}
_OPTIMIZER = "#3B3B3B"
_CAUSE_COLOURS = {
    "WARMUP": "#D9D9D9",
    "INPUT": "#D55E00",
    "QUEUED": "#5B2A86",
    "IN_FLIGHT": "#56B4E9",
    "RELOAD": "#F0E442",
    "LATE": "#000000",
    "REDUCTION": "#8C6D46",
    "EXCHANGE": "#BFA27A",
    "COOLDOWN": "#A6A6A6",
    "UNUSED": "#EFEFEF",
    "UNKNOWN": "#FFFFFF",
}
_COPY_COLOURS = {CopyKind.O: "#7F7F7F", CopyKind.R: "#F0E442"}

_WIDTH_IN = 14.0
_DPI = 150
_BAR = 0.82  # of a row's height
_STRIP = 0.34
_LANE = 0.16
_TEXT_POINTS = (5.0, 6.0, 7.5)
_MOST_TEXTS = 6000  # drawing a text takes as long as hundreds of bars
_LEFT_IN, _RIGHT_IN, _TOP_IN, _BOTTOM_IN = 0.75, 0.15, 0.42, 0.5
_LEGEND_IN = 0.42  # two lines
_MOST_IN_LINE = 12
_GAP_IN = 0.55


def timeline_picture(
    timeline: Timeline,
    path: str | Path,
    *,
    title: str = "",
    copies: bool = True,
    memory: bool = False,
) -> None:
    """Draw a timeline into an image file; the ending of its name says which kind (.png, .svg).

    Args:
        timeline: simulated or measured.
        path: where to write it. Raises OSError where that cannot be, ValueError where matplotlib
            knows no such kind of image.
        title: stands above, beside step and bubbles.
        copies: draw the copy lane below each device that has one.
        memory: draw the bytes held over time in a second field, a line or colour a device.
    """
    timelines_picture({title: timeline}, path, copies=copies, memory=memory)


def timelines_picture(
    named: Mapping[str, Timeline],
    path: str | Path,
    *,
    copies: bool = True,
    memory: bool = False,
) -> None:
    """Draw several timelines above each other, over one time axis.

    Args:
        named: what to write above each -> timeline; at least one.
        path: as in `timeline_picture`.
        copies: draw copy lanes.
        memory: draw the bytes held, below each timeline.
    """
    if not named:
        raise ValueError("no timeline to draw; pass at least one")
    from matplotlib.figure import Figure

    fields: list[tuple[str, str, float]] = []  # name, what, height in inches
    for name, timeline in named.items():
        rows = timeline.schedule.num_devices
        fields.append((name, "actions", _row_height_in(rows) * rows))
        if memory:
            fields.append((name, "memory", max(1.2, min(0.12 * rows, 3.0))))
    height = _TOP_IN + sum(field[2] for field in fields) + _BOTTOM_IN + _LEGEND_IN
    height += _GAP_IN * (len(fields) - 1)
    figure = Figure(figsize=(_WIDTH_IN, height), dpi=_DPI, facecolor="white")
    end = max(timeline.step_ns for timeline in named.values())
    factor, unit = _axis_unit(end)
    all_bubbles = {name: timeline.bubbles() for name, timeline in named.items()}
    top = height - _TOP_IN
    width = _WIDTH_IN - _LEFT_IN - _RIGHT_IN
    for number, (name, what, field_height) in enumerate(fields):
        axes = figure.add_axes(
            (
                _LEFT_IN / _WIDTH_IN,
                (top - field_height) / height,
                width / _WIDTH_IN,
                field_height / height,
            )
        )
        axes.set_xlim(0, end / factor)
        if what == "actions":
            _draw_actions(axes, named[name], all_bubbles[name], factor, copies=copies)
            axes.set_title(_headline(name, named[name]), loc="left", fontsize=9.5, pad=5)
        else:
            _draw_memory(axes, named[name], factor)
        last = number == len(fields) - 1
        axes.tick_params(axis="x", labelsize=8, labelbottom=last)
        if last:
            axes.set_xlabel(f"time, {unit}", fontsize=8.5, labelpad=2)
        top -= field_height + _GAP_IN
    _legend(figure, named, all_bubbles, height, copies=copies)
    figure.savefig(path)


def _axis_unit(end_ns: int) -> tuple[float, str]:
    """Return what divides ns, and the unit; ms, but for steps that are far shorter or longer."""
    if end_ns >= 60 * 10**9:
        return 1e9, "s"
    if end_ns >= 10**5:
        return 1e6, "ms"
    if end_ns >= 10**3:
        return 1e3, "us"
    return 1.0, "ns"


def _row_height_in(rows: int) -> float:
    return float(np.clip(12.0 / rows, 0.13, 0.36))


def _headline(name: str, timeline: Timeline) -> str:
    words = f"{duration(timeline.step_ns)}, {percent(timeline.bubble_fraction, 1)} bubbles"
    return f"{name}: {words}" if name else words


def _boxes(start: Any, end: Any, middle: Any, height: float) -> Floats:
    """Return rectangles [N, 4, 2] from start to end, centred on rows."""
    low, high = middle - height / 2, middle + height / 2
    return np.stack(
        (
            np.stack((start, low), axis=-1),
            np.stack((end, low), axis=-1),
            np.stack((end, high), axis=-1),
            np.stack((start, high), axis=-1),
        ),
        axis=1,
    )


def _shades(timeline: Timeline) -> Floats:
    """Return how far each stage's colour is mixed with white: 0 for a device's first stage."""
    lightness = np.zeros(timeline.costs.num_stages)
    for device in range(timeline.costs.num_devices):
        stages = np.flatnonzero(timeline.costs.stage_device == device)
        if len(stages) > 1:
            lightness[stages] = np.linspace(0, 0.62, len(stages))
    return lightness


def _mixed(colour: str, lightness: Floats) -> Floats:
    from matplotlib.colors import to_rgb

    base = np.array(to_rgb(colour))
    return base[None, :] + (1 - base)[None, :] * lightness[:, None]


def _draw_actions(
    axes: Axes, timeline: Timeline, bubbles: Bubbles, factor: float, *, copies: bool
) -> None:
    from matplotlib.collections import PolyCollection

    schedule = timeline.schedule
    rows = schedule.num_devices
    row_points = 72 * _row_height_in(rows)
    recorded = np.flatnonzero((timeline.start_ns >= 0) & (timeline.end_ns >= 0))
    device = np.repeat(np.arange(rows), np.diff(schedule.offsets))[recorded]
    codes = schedule.codes[recorded]
    start, end = timeline.start_ns[recorded] / factor, timeline.end_ns[recorded] / factor
    lightness = _shades(timeline)[stage_of(codes)]
    colours = np.empty((len(codes), 3))
    for kind in Kind:
        chosen = kind_of(codes) == kind
        colours[chosen] = _mixed(_KIND_COLOURS[kind], lightness[chosen])

    has_lane = copies and timeline.copies is not None and len(timeline.copies.codes) > 0
    shift = -_LANE / 2 if has_lane else 0.0
    bar = _BAR - (_LANE if has_lane else 0.0)
    point = 72 * (_WIDTH_IN - _LEFT_IN - _RIGHT_IN) / axes.get_xlim()[1]  # per unit of time
    wide = (end - start) * point
    # an outline that is as wide as the bar would leave nothing of its colour
    edge = 0.3 if len(wide) and np.median(wide) > 4 else 0.0
    for cause, colour in _CAUSE_COLOURS.items():
        from simulator.bubbles import Cause

        chosen = bubbles.cause == Cause[cause]
        if chosen.any():
            strips = _boxes(
                bubbles.start_ns[chosen] / factor,
                bubbles.end_ns[chosen] / factor,
                bubbles.device[chosen] + shift,
                _STRIP,
            )
            axes.add_collection(
                PolyCollection(
                    list(strips),
                    facecolors=colour,
                    edgecolors="#888888" if cause in ("UNKNOWN", "UNUSED") else "none",
                    linewidths=0.3,
                )
            )
    axes.add_collection(
        PolyCollection(
            list(_boxes(start, end, device + shift, bar)),
            facecolors=colours,
            edgecolors="white" if edge else "none",
            linewidths=edge,
        )
    )
    ran = (timeline.optimizer_start_ns >= 0) & (
        timeline.optimizer_end_ns > timeline.optimizer_start_ns
    )
    if ran.any():
        axes.add_collection(
            PolyCollection(
                list(
                    _boxes(
                        timeline.optimizer_start_ns[ran] / factor,
                        timeline.optimizer_end_ns[ran] / factor,
                        np.flatnonzero(ran) + shift,
                        bar,
                    )
                ),
                facecolors=_OPTIMIZER,
                edgecolors="none",
            )
        )
    if has_lane:
        _draw_lanes(axes, timeline, factor)

    _draw_numbers(axes, codes, device + shift, (start + end) / 2, wide, bar * row_points, colours)
    axes.set_ylim(rows - 0.5, -0.5)
    every = max(1, int(np.ceil(8.0 / row_points)))
    axes.set_yticks(range(0, rows, every))
    axes.set_yticklabels(
        [f"device {row}" if rows <= 16 else str(row) for row in range(0, rows, every)]
    )
    axes.tick_params(axis="y", length=0, labelsize=min(8.5, max(5.5, 0.75 * row_points)))
    if rows > 16:
        axes.set_ylabel("device", fontsize=8.5)
    _plain(axes)


def _draw_numbers(
    axes: Axes,
    codes: NDArray[np.int64],
    middle_y: Floats,
    middle_x: Floats,
    wide: Floats,
    high: float,
    colours: Floats,
) -> None:
    """Write microbatch numbers into bars, smaller where need be, and none where too small.

    `wide` and `high` are the bars' sizes in points.
    """
    microbatch = microbatch_of(codes)
    digits = np.char.str_len(microbatch.astype(str))
    room = np.minimum(0.62 * high, wide / (0.62 * digits + 0.3))
    sizes = np.zeros(len(codes))
    for points in _TEXT_POINTS:  # a few sizes, not one a bar, so that rows look calm
        sizes[room >= points] = points
    fits = np.flatnonzero(sizes)
    if len(fits) > _MOST_TEXTS:
        return
    dark = colours @ np.array([0.299, 0.587, 0.114]) < 0.62
    for at in fits.tolist():
        axes.text(
            middle_x[at],
            middle_y[at],
            str(microbatch[at]),
            fontsize=sizes[at],
            color="white" if dark[at] else "black",
            ha="center",
            va="center_baseline",
            clip_on=True,
        )


def _draw_lanes(axes: Axes, timeline: Timeline, factor: float) -> None:
    from matplotlib.collections import PolyCollection

    assert timeline.copies is not None
    lane = np.repeat(np.arange(timeline.schedule.num_devices), np.diff(timeline.copies.offsets))
    kinds = kind_of(timeline.copies.codes)
    recorded = (timeline.copy_start_ns >= 0) & (timeline.copy_end_ns >= 0)
    for kind, colour in _COPY_COLOURS.items():
        chosen = recorded & (kinds == kind)
        if chosen.any():
            axes.add_collection(
                PolyCollection(
                    list(
                        _boxes(
                            timeline.copy_start_ns[chosen] / factor,
                            timeline.copy_end_ns[chosen] / factor,
                            lane[chosen] + _BAR / 2 - _LANE / 2,
                            _LANE * 0.8,
                        )
                    ),
                    facecolors=colour,
                    edgecolors="#555555",
                    linewidths=0.25,
                )
            )


def _draw_memory(axes: Axes, timeline: Timeline, factor: float) -> None:
    """Draw the bytes held: lines for few devices, a colour map for many."""
    from simulator.memory import usage

    devices = timeline.schedule.num_devices
    step = timeline.step_ns
    recorded = (timeline.start_ns >= 0) & (timeline.end_ns >= 0)
    offsets = timeline.schedule.offsets.tolist()
    # what was not recorded cannot be added up: such a device has no line
    curves = {
        device: usage(timeline, device)
        for device, (begin, end) in enumerate(pairwise(offsets))
        if recorded[begin:end].all()
    }
    if devices <= 8:
        from matplotlib import colormaps

        largest = max((int(held.max()) for _, held in curves.values()), default=0)
        shown, unit = _size_unit(largest)
        colours = colormaps["viridis"](np.linspace(0, 0.9, devices))
        for device, (times, held) in curves.items():
            axes.step(
                np.append(times, step) / factor,
                np.append(held, held[-1]) / shown,
                where="post",
                linewidth=1.0,
                color=colours[device],
                label=str(device),
            )
        limits = np.unique(timeline.costs.memory_bytes)
        for most in limits[limits <= 2 * largest].tolist():
            axes.axhline(most / shown, color="#555555", linewidth=0.8, linestyle="--")
            axes.text(0, most / shown, " limit", fontsize=7, color="#555555", va="bottom")
            largest = max(largest, most)
        axes.set_ylim(0, 1.08 * largest / shown if largest else 1)
        axes.set_ylabel(f"held, {unit}", fontsize=8.5)
        if curves:
            axes.legend(
                title="device",
                fontsize=7,
                title_fontsize=7,
                ncols=devices,
                loc="lower right",
                bbox_to_anchor=(1.0, 1.0),
                frameon=False,
                borderpad=0.2,
                handlelength=1.0,
                columnspacing=0.8,
            )
        axes.tick_params(axis="y", labelsize=8)
    else:
        bins = 1200
        moments = np.linspace(0, step, bins, endpoint=False)
        table = np.full((devices, bins), np.nan)
        for device, (times, held) in curves.items():
            table[device] = held[np.searchsorted(times, moments, side="right") - 1]
        top = int(timeline.peak_bytes.max())
        image = axes.imshow(
            table / max(top, 1),
            aspect="auto",
            extent=(0, step / factor, devices - 0.5, -0.5),
            cmap="cividis",
            vmin=0,
            vmax=1,
            interpolation="nearest",
        )
        axes.set_ylabel("held by device", fontsize=8.5)
        axes.tick_params(axis="y", labelsize=7)
        bar = axes.inset_axes((0.86, 1.03, 0.14, 0.055))
        axes.figure.colorbar(image, cax=bar, orientation="horizontal")
        bar.set_xticks([])
        for x, words in ((-0.01, "0"), (0.98, size(top))):
            bar.text(
                x,
                0.45,
                words,
                ha="right",
                va="center",
                fontsize=7.5,
                transform=bar.transAxes,
            )
    _plain(axes)


def _size_unit(largest: int) -> tuple[float, str]:
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if largest >= factor:
            return float(factor), unit
    return 1.0, "B"


def _plain(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_linewidth(0.6)
    axes.grid(visible=False)


def _legend(
    figure: Figure,
    named: Mapping[str, Timeline],
    all_bubbles: Mapping[str, Bubbles],
    height: float,
    *,
    copies: bool,
) -> None:
    """Put what is in the picture, and nothing else, below it."""
    from matplotlib.patches import Patch

    from simulator.bubbles import Cause

    kinds = np.unique(
        np.concatenate([kind_of(timeline.schedule.codes) for timeline in named.values()])
    )
    handles = [
        Patch(facecolor=_KIND_COLOURS[kind], label=_KIND_WORDS[kind])
        for kind in Kind
        if kind in kinds
    ]
    if any(_shades(timeline).any() for timeline in named.values()):
        handles.append(Patch(facecolor="#9FC6DE", label="later stage: lighter"))
    if any(
        (timeline.optimizer_end_ns > timeline.optimizer_start_ns).any()
        for timeline in named.values()
    ):
        handles.append(Patch(facecolor=_OPTIMIZER, label="optimizer"))
    causes = np.unique(np.concatenate([bubbles.cause for bubbles in all_bubbles.values()]))
    handles += [
        Patch(
            facecolor=_CAUSE_COLOURS[cause.name],
            edgecolor="#888888" if cause in (Cause.UNKNOWN, Cause.UNUSED) else "none",
            linewidth=0.4,
            label=f"idle: {cause.words}",
        )
        for cause in Cause
        if cause in causes
    ]
    if copies and any(
        timeline.copies is not None and len(timeline.copies.codes) for timeline in named.values()
    ):
        handles += [
            Patch(facecolor=_COPY_COLOURS[CopyKind.O], label="copy out"),
            Patch(facecolor=_COPY_COLOURS[CopyKind.R], label="copy back"),
        ]
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(_LEFT_IN / _WIDTH_IN, 0.06 / height),
        ncols=len(handles) if len(handles) <= _MOST_IN_LINE else (len(handles) + 1) // 2,
        fontsize=7.5,
        frameon=False,
        handlelength=1.1,
        handleheight=0.9,
        handletextpad=0.4,
        columnspacing=1.2,
        borderpad=0,
    )
