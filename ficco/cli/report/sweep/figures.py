"""The plots of a sweep: functions of cases, points or timelines, which return figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from ficco.cli.report.sweep.drawing import GRID, INK, MUTED, decorate, figure, legend, mark_of
from ficco.cli.report.sweep.judging import best, best_of_each, middle
from ficco.cli.report.sweep.naming import number, operator_label, percent, short
from ficco.cli.report.sweep.reading import Case, Point
from ficco.plan.timeline import Span, Timeline

_Label = tuple[float, float, str]  # x, y, text
_Bounds = tuple[float, float]

CURVE = 3.1  # inches
WIDE = 9.6  # inches; text of 8.5 points is legible at the page's width


def _plain_log(axes: Axes, which: str, low: float, high: float) -> None:
    """Make an axis logarithmic with plain numbers at its ticks."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)
    span = high / low
    if span > 5:
        axis.set_major_locator(LogLocator(subs=(1.0,) if span > 200 else (1.0, 2.0, 5.0)))
    else:
        axis.set_major_locator(MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _bounds(values: Sequence[float], room: float = 1.12) -> _Bounds:
    low, high = min(values), max(values)
    if high / low < 1.3:
        room = max(room, 1.2)
    return low / room, high * room


def overview(cases: Sequence[Case]) -> Figure:
    """Draw the speed-up over serial and the best point's fraction of ideal, a row per case."""
    drawn = figure(WIDE, 0.95 + 0.21 * max(len(cases), 2))
    left, right = drawn.subplots(1, 2, sharey=True, width_ratios=(3.2, 1))
    rows = range(len(cases))
    names, reach = set(), [1.0]
    for row, case in enumerate(cases):
        ranked = best_of_each(case)
        serial = case.serial_ms
        if serial is not None and case.ideal_ms:
            left.plot(
                serial / case.ideal_ms, row, "|", color=INK, markersize=9, markeredgewidth=1.4
            )
            reach.append(serial / case.ideal_ms)
        for place, point in reversed(list(enumerate(ranked))):
            if point.speedup is None:
                continue
            names.add(point.name)
            reach.append(point.speedup)
            mark = mark_of(point.name)
            left.plot(
                point.speedup, row, marker=mark.shape, color=mark.colour, zorder=3 - place / 100,
                markersize=(7 if place == 0 else 4) * mark.scale, alpha=1 if place == 0 else 0.75,
                markeredgecolor="white", markeredgewidth=0.5,
            )  # fmt: skip
        efficiency = ranked[0].efficiency if ranked else None
        if efficiency is not None:
            right.barh(row, min(efficiency, 1.25), height=0.6, color="#9fb8cc")
            end, inside = min(efficiency, 1.25), efficiency > 0.4
            right.text(
                end - 0.02 if inside else end + 0.02, row, percent(efficiency), va="center",
                ha="right" if inside else "left", fontsize=7.5,
            )  # fmt: skip
    left.axvline(1.0, color=INK, linewidth=1, linestyle="--")
    left.set_yticks(rows, [short(case) for case in cases])
    left.set_ylim(len(cases) - 0.4, -0.6)
    decorate(left)
    _plain_log(left, "x", *_bounds(reach, 1.06))
    left.set_xlabel("times as fast as serial (dashed: equal; |: ideal)")
    right.set_xlim(0, 1.25)
    right.set_xticks([0, 0.5, 1.0], ["0", "50%", "100%"])
    decorate(right, "x")
    right.set_xlabel("of ideal, best point")
    right.tick_params(labelleft=False)
    legend(drawn, names)
    return drawn


def schedule_map(cases: Sequence[Case]) -> Figure:
    """Draw the best schedule and the best grain by bytes sent and operations per byte."""
    placed = [c for c in cases if c.op_to_byte and c.bytes_out > 0]
    ops = list(dict.fromkeys(case.op for case in placed))
    drawn = figure(WIDE, 0.75 + 2.35 * len(ops))
    grid = drawn.subplots(len(ops), 2, squeeze=False, sharex=True, sharey=True)
    across = _bounds([case.bytes_out / 1e6 for case in placed], 1.5)
    upwards = _bounds([case.op_to_byte or 1.0 for case in placed], 1.5)
    names = set()
    for (left, right), op in zip(grid, ops, strict=True):
        labels: list[_Label] = []
        for case in (case for case in placed if case.op == op):
            winner = best(case)
            wins = winner is not None and (winner.speedup is None or winner.speedup >= 1.0)
            name = winner.name if winner is not None and wins else "serial"
            names.add(name)
            mark, at = mark_of(name), (case.bytes_out / 1e6, case.op_to_byte or 1.0)
            left.plot(
                *at, marker=mark.shape, color=mark.colour, markersize=8 * mark.scale, alpha=0.9,
                markeredgecolor="white", markeredgewidth=0.6,
            )  # fmt: skip
            labels.append((*at, str(winner.grain) if winner is not None and wins else "s"))
        for x, y, label in _apart(labels, across, upwards):
            right.text(
                x, y, label, ha="center", va="center", fontsize=8.5, fontweight="bold",
                color=MUTED if label == "s" else INK,
            )  # fmt: skip
        for axes, title in ((left, "schedule"), (right, "grain (s: serial)")):
            decorate(axes)
            axes.set_title(f"{operator_label(op)}: {title}", fontsize=9, loc="left")
            _plain_log(axes, "x", *across)
            _plain_log(axes, "y", *upwards)
        left.set_ylabel("operations per byte sent")
    for axes in grid[-1]:
        axes.set_xlabel("MB that leave a rank")
    legend(drawn, names)
    return drawn


def _apart(labels: Sequence[_Label], across: _Bounds, upwards: _Bounds) -> list[_Label]:
    """Merge labels that would overlap to one label, such as "4, 8"."""
    near_x = 0.06 * math.log(across[1] / across[0])
    near_y = 0.08 * math.log(upwards[1] / upwards[0])
    groups: list[tuple[float, float, set[str]]] = []
    for x, y, label in labels:
        for group_x, group_y, group_labels in groups:
            close = abs(math.log(x / group_x)) < near_x and abs(math.log(y / group_y)) < near_y
            if close:
                group_labels.add(label)
                break
        else:
            groups.append((x, y, {label}))
    return [(x, y, ", ".join(sorted(group_labels))) for x, y, group_labels in groups]


def _some(grains: Sequence[int]) -> list[int]:
    """Return the grains that have room for a label on a logarithmic axis."""
    ratio = (max(grains) / min(grains)) ** (1 / 10)
    labelled = [grains[0]]
    for grain in grains[1:]:
        if grain / labelled[-1] >= ratio:
            labelled.append(grain)
    return labelled


def curve(case: Case) -> Figure:
    """Draw the speed-up by grain, or the time if serial is unknown, a line per schedule."""
    drawn = figure(4.6, CURVE, packed=False)  # packing would take half the time of many curves
    axes = drawn.subplots()
    points = [p for p in case.points if p.ok and p.name not in ("serial", "auto")]
    over = case.serial_ms is not None
    lines: dict[str, dict[int, float]] = {}
    for point in points:
        value = point.speedup if over else point.ms
        if value is not None:  # of points that differ in other axes, draw the best
            line = lines.setdefault(point.name, {})
            known = line.get(point.grain)
            line[point.grain] = value if known is None else (max if over else min)(known, value)
    for name, line in lines.items():
        mark, grains = mark_of(name), sorted(line)
        axes.plot(
            grains, [line[g] for g in grains], marker=mark.shape, color=mark.colour,
            markersize=5 * mark.scale, linewidth=1.2, markeredgecolor="white", markeredgewidth=0.4,
        )  # fmt: skip
    grains = sorted({grain for line in lines.values() for grain in line})
    axes.set_xscale("log", base=2)
    axes.set_xticks(labelled := _some(grains), [str(grain) for grain in labelled])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(min(grains) / 1.25, max(grains) * 1.25)
    axes.set_xlabel("chunks per shard")
    axes.set_ylabel("times as fast as serial" if over else "ms")
    if over:
        axes.axhline(1.0, color=INK, linewidth=1, linestyle="--")
    if over and case.ideal_ms and case.serial_ms:
        axes.axhline(case.serial_ms / case.ideal_ms, color=MUTED, linewidth=1, linestyle=":")
    decorate(axes)
    below = 0.52 + 0.18 * legend(drawn, lines, lines=True)
    drawn.subplots_adjust(left=0.13, right=0.98, top=0.97, bottom=below / CURVE)
    return drawn


def losses(points: Sequence[Point]) -> Figure:
    """Draw DIL and CIL of all points, by schedule and grain, with their medians."""
    kinds = sorted({(p.name, p.grain) for p in points if p.dil is not None or p.cil is not None})
    drawn = figure(WIDE, 0.9 + 0.21 * max(len(kinds), 2))
    both = drawn.subplots(1, 2, sharey=True)
    for axes, loss_name in zip(both, ("dil", "cil"), strict=True):
        known = [1.0]
        for row, kind in enumerate(kinds):
            values = sorted(
                value
                for p in points
                if (p.name, p.grain) == kind and (value := getattr(p, loss_name)) is not None
            )
            mark = mark_of(kind[0])
            axes.plot(
                values, [row] * len(values), linestyle="none", marker=mark.shape, color=mark.colour,
                markersize=4.5 * mark.scale, alpha=0.45, markeredgewidth=0,
            )  # fmt: skip
            if values:
                axes.plot(middle(values), row, "|", color=INK, markersize=9, markeredgewidth=1.6)
            known += values
        axes.axvline(1.0, color=INK, linewidth=1, linestyle="--")
        room = max(0.01, 0.05 * (max(known) - min(known)))
        if max(known) > 3 * min(known):
            _plain_log(axes, "x", min(known) / 1.1, max(known) * 1.1)
        else:
            axes.set_xlim(min(known) - room, max(known) + room)
            axes.xaxis.set_major_locator(MaxNLocator(5))
        decorate(axes)
    both[0].set_yticks(range(len(kinds)), [f"{name} g{grain}" for name, grain in kinds])
    both[0].set_ylim(len(kinds) - 0.4, -0.6)
    both[0].set_xlabel("DIL: pieces alone / whole GEMM alone")
    both[1].set_xlabel("CIL: pieces in the call / pieces alone")
    return drawn


def foresight(points: Sequence[Point]) -> Figure:
    """Draw predicted over measured times, with a band of 10% around equality."""
    drawn = figure(5.6, 4.4)
    axes = drawn.subplots()
    known = [(p, p.predicted_ms) for p in points if p.predicted_ms]
    low, high = _bounds([value for p, predicted in known for value in (p.ms, predicted)])
    axes.fill_between([low, high], [low * 0.9, high * 0.9], [low * 1.1, high * 1.1], color=GRID)
    axes.plot([low, high], [low, high], color=INK, linewidth=0.9)
    for name in dict.fromkeys(point.name for point, _ in known):
        mark, pairs = mark_of(name), [(p.ms, ms) for p, ms in known if p.name == name]
        axes.plot(
            [ms for ms, _ in pairs], [ms for _, ms in pairs], linestyle="none", marker=mark.shape,
            color=mark.colour, markersize=4.5 * mark.scale, alpha=0.7, markeredgewidth=0,
        )  # fmt: skip
    _plain_log(axes, "x", low, high)
    _plain_log(axes, "y", low, high)
    axes.set_xlabel("measured, ms")
    axes.set_ylabel(f"predicted, ms (band: {number(10, 2)}%)")
    decorate(axes)
    legend(drawn, (point.name for point, _ in known))
    return drawn


# ---- timelines

MOST_BARS = 400  # per lane and kind; more are too thin to see, so bars that touch are merged


@dataclass(frozen=True, slots=True)
class _Bar:
    colour: str
    hatch: str
    height: float
    label: str


# Kinds that differ in colour also differ in height or hatching.
_BARS = {
    "gemm": _Bar("#0072b2", "", 0.78, "GEMM or pooling"),
    "bag": _Bar("#0072b2", "", 0.78, "GEMM or pooling"),
    "experts": _Bar("#0072b2", "", 0.78, "GEMM or pooling"),
    "copy": _Bar("#e69f00", "////", 0.78, "copy between ranks"),
    "collective": _Bar("#e69f00", "||||", 0.78, "collective"),
    "local_copy": _Bar("#f3d28a", "\\\\\\\\", 0.55, "local copy"),
    "reduce": _Bar("#009e73", "xxxx", 0.55, "sum or rounding"),
    "wait": _Bar("#b5b5b5", "", 0.16, "waiting or signalling"),
    "raise": _Bar("#b5b5b5", "", 0.16, "waiting or signalling"),
    "clear": _Bar("#b5b5b5", "", 0.16, "waiting or signalling"),
}


@dataclass(frozen=True, slots=True)
class Busy:
    """A lane's steps of one kind: count, first start, last end and total time, in us."""

    lane: str
    kind: str
    steps: int
    start_us: float
    end_us: float
    busy_us: float


def last_rank(timeline: Timeline) -> int:
    """Return the rank that ended last."""
    return max(timeline.spans, key=lambda span: span.end_us).rank if timeline.spans else 0


def busy(timeline: Timeline, rank: int) -> list[Busy]:
    """Return the busy times of a rank's lanes, in the order of their first steps."""
    spans_by_lane: dict[tuple[str, str], list[Span]] = {}
    for span in timeline.spans:
        if span.rank == rank:
            spans_by_lane.setdefault((span.lane, span.kind), []).append(span)
    return [
        Busy(
            lane,
            kind,
            len(spans),
            min(span.start_us for span in spans),
            max(span.end_us for span in spans),
            sum(span.end_us - span.start_us for span in spans),
        )
        for (lane, kind), spans in spans_by_lane.items()
    ]


def gantt(timeline: Timeline, rank: int, longest_us: float) -> Figure:
    """Draw a rank's lanes from 0 to `longest_us`; timelines of one shape share this scale."""
    rank_spans = [span for span in timeline.spans if span.rank == rank]
    lanes = list(dict.fromkeys(span.lane for span in rank_spans))
    height = 0.95 + 0.27 * max(len(lanes), 2)
    drawn = figure(9.6, height, packed=False)  # zero is at the same place in all timelines
    axes = drawn.subplots()
    drawn.subplots_adjust(left=0.14, right=0.985, bottom=0.8 / height, top=1 - 0.1 / height)
    kinds = [kind for kind in reversed(_BARS) if any(span.kind == kind for span in rank_spans)]
    for row, lane in enumerate(lanes):
        for kind in kinds:
            bars = _merged([s for s in rank_spans if s.lane == lane and s.kind == kind], longest_us)
            bar = _BARS[kind]
            if bars:
                axes.broken_barh(
                    [(begin / 1e3, (end - begin) / 1e3) for begin, end in bars],
                    (row - bar.height / 2, bar.height), facecolor=bar.colour, hatch=bar.hatch,
                    edgecolor="white", linewidth=0.3,
                )  # fmt: skip
    end = max((span.end_us for span in rank_spans), default=0.0) / 1e3
    axes.axvline(end, color=INK, linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(0, max(longest_us / 1e3, 1e-6) * 1.01)
    axes.set_xlabel("ms", color=MUTED)
    decorate(axes, "x")
    keys = {_BARS[kind].label: _BARS[kind] for kind in reversed(kinds)}
    drawn.legend(
        handles=[
            Patch(facecolor=bar.colour, hatch=bar.hatch, edgecolor="white", label=label)
            for label, bar in keys.items()
        ],
        loc="lower center", ncols=5, frameon=False,
    )  # fmt: skip
    return drawn


def _merged(spans: Sequence[Span], longest_us: float) -> list[tuple[float, float]]:
    """Return starts and ends; merge spans that touch if there are more than MOST_BARS."""
    ranked = sorted((span.start_us, span.end_us) for span in spans)
    if len(ranked) <= MOST_BARS:
        return ranked
    gap = longest_us / 1000
    joined: list[tuple[float, float]] = []
    for begin, end in ranked:
        if joined and begin - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
