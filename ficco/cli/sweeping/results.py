"""Results, CSV and the book from the journal: a line per shape and regime, and per point.

The lines are in the grid's order. They depend only on the journal and the cases, so they can be
computed again at any time.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ficco import __version__
from ficco.cli.sweeping.grid import AUTO, Grid
from ficco.cli.sweeping.journal import Records
from ficco.cli.sweeping.points import Case, Point, Shape
from ficco.core.errors import InputError
from ficco.core.machine import Machine
from ficco.measure.selector.book import KERNELS, Book
from ficco.measure.selector.book import Point as BookPoint
from ficco.measure.selector.facts import facts_of
from ficco.operators.problem import Problem
from ficco.plan.schedule import AXES, Schedule

Line = dict[str, Any]
_COLUMNS = (
    "op", "m", "n", "k", "dtype", "world", "regime", "name", "grain", "ms", "iqr_ms", "runs",
    "screened", "serial_ms", "speedup", "ideal_ms", "efficiency", "predicted_ms", "max_rel_error",
    "dil", "cil",
)  # fmt: skip
_DIGITS = 6  # decimals of milliseconds: nanoseconds


@dataclass(frozen=True)
class _Figures:
    """The statistics of a point's runs."""

    ms: float
    iqr_ms: float
    runs: int
    screened: bool


def points_to_time(points: Sequence[Point], known: Records, grid: Grid) -> list[Point]:
    """Return a regime's points that get all rounds: serial, AUTO, and the best of the screening.

    Args:
        points: points of one shape and regime; if the grid screens, all are screened.
        known: the records, with the screening's runs.
        grid: the grid, which says how many points to keep.
    """
    able = [point for point in points if not point.reason and point.id not in known.bad]
    if not grid.screening:
        return able
    middle = {
        point.id: statistics.median(known.screens[point.id].values())
        for point in able
        if known.screens.get(point.id)
    }
    always = {point.id for point in able if _always(point)}
    others = {name: ms for name, ms in middle.items() if name not in always}
    chosen = {*always, *fastest(others, grid.keep)}
    return [point for point in able if point.id in chosen]


def screens(point: Point, grid: Grid) -> bool:
    """Return whether a point is screened."""
    return bool(grid.screening) and not _always(point)


def _always(point: Point) -> bool:
    return point.name in ("serial", AUTO)


def lines(
    cases: Iterable[Case], journal: Records, grid: Grid, profile: Machine | None
) -> list[Line]:
    """Return the results of all cases that have records.

    Args:
        cases: the cases, in the grid's order.
        journal: the measurements.
        grid: the grid, which says how many runs a point needs.
        profile: the profile for `floor_ms`; None: `floor_ms` is unknown.
    """
    results: list[Line] = []
    for case in cases:
        if case.shape.id not in journal.touched:
            continue
        for regime in case.regimes:
            results += _regime_lines(case, regime, journal, grid, profile)
        for regime in case.regimes:
            for which in ("best", "worst"):
                line = journal.timelines.get((case.shape.id, regime, which))
                if line is not None:
                    order = ("id", "shape", "regime", "which", "timeline")
                    results.append({"kind": "timeline", **{key: line[key] for key in order}})
    return results


def extremes(case: Case, regime: str, known: Records, grid: Grid) -> list[tuple[str, Point]]:
    """Return the fastest and the slowest point of a regime, if it has any."""
    timed = [
        (figures.ms, point.id, point)
        for point in case.of(regime)
        if (figures := _figures(point, known, grid)) is not None
    ]
    timed.sort(key=lambda entry: entry[:2])
    if not timed:
        return []
    return [("best", timed[0][2])] + ([("worst", timed[-1][2])] if len(timed) > 1 else [])


def undrawn(case: Case, known: Records, grid: Grid) -> list[tuple[str, str, Point]]:
    """Return regime, which and point of each of the `extremes` that has no timeline yet."""
    return [
        (regime, which, point)
        for regime in case.regimes
        for which, point in extremes(case, regime, known, grid)
        if (case.shape.id, regime, which) not in known.timelines
    ]


def auto_slowdowns(results: Iterable[Line]) -> dict[str, float]:
    """Return, by shape and regime, AUTO's time over the time of the best point with all rounds.

    1 means that AUTO is the best. If the grid also contains AUTO's choice by name, one plan was
    measured twice, and the shorter time counts as AUTO's. Shapes on which AUTO lacks rounds are
    left out.
    """
    slowdowns = {}
    for name, points in _timed(results).items():
        auto_axes = [_axes(point) for point in points if point["name"] == AUTO]
        if auto_axes:
            ms = min(point["ms"] for point in points if _axes(point) in auto_axes)
            slowdowns[name] = ms / min(point["ms"] for point in points)
    return slowdowns


def best_spreads(results: Iterable[Line]) -> dict[str, float]:
    """Return, by shape and regime, the interquartile range of the best point over its median."""
    best = {
        name: min(points, key=lambda point: point["ms"]) for name, points in _timed(results).items()
    }
    return {name: point["iqr_ms"] / point["ms"] for name, point in best.items()}


def _timed(results: Iterable[Line]) -> dict[str, list[Line]]:
    """Return the points with all rounds, by shape and regime."""
    timed: dict[str, list[Line]] = {}
    for line in results:
        if line["kind"] == "point" and not line["screened"]:
            timed.setdefault(f"{line['shape']}, {line['regime']}", []).append(line)
    return timed


def _axes(point: Line) -> dict[str, Any]:
    return {**point["schedule"], "name": ""}


def _regime_lines(
    case: Case, regime: str, journal: Records, grid: Grid, profile: Machine | None
) -> list[Line]:
    points = case.of(regime)
    figures = {point.id: _figures(point, journal, grid) for point in points}
    serial = next((figures[p.id] for p in points if p.name == "serial"), None)
    serial_ms = None if serial is None else serial.ms
    lacking = journal.lacking.get(case.shape.id, {})
    parts = {
        name: statistics.median(runs.values())
        for name, runs in journal.parts.get(case.shape.id, {}).items()
        if name not in lacking
    }
    alone = ideal(
        parts.get("gemm"), [ms for name, ms in parts.items() if name.startswith("transfer")]
    )
    results = [_shape_line(case.shape, regime, alone, serial_ms, profile)]
    results[0]["ended"] = case.shape.id in journal.ended
    if lacking:
        results[0]["lacking"] = lacking
    for point in points:
        reason = _reason(point, journal)
        point_figures = figures[point.id]
        if reason:
            results.append({
                "kind": "bad", "id": point.id, "shape": case.shape.id, "regime": regime,
                "name": point.name, "grain": point.grain, "reason": reason,
            })  # fmt: skip
        elif point_figures is not None:
            results.append(_point_line(point, point_figures, journal, serial_ms, alone["ideal_ms"]))
    return results


def _shape_line(
    shape: Shape, regime: str, alone: dict[str, float | None], serial_ms: float | None,
    profile: Machine | None,
) -> Line:  # fmt: skip
    line: Line = {
        "kind": "shape", "shape": shape.id, "op": shape.op, "dtype": shape.dtype,
        "world": shape.world, "m": shape.m, "n": shape.n, "k": shape.k, "regime": regime,
        **{name: _rounded(value) for name, value in alone.items()},
        "floor_ms": None, "flops": None, "bytes_out": None, "op_to_byte": None,
        "serial_ms": _rounded(serial_ms),
    }  # fmt: skip
    try:
        facts = facts_of(shape.problem)
    except InputError:
        return line  # the shape is invalid; every point reports it
    line |= {"flops": facts.flops, "bytes_out": facts.sent_bytes}
    if facts.sent_bytes:
        line["op_to_byte"] = round(facts.intensity, 3)
    if profile is not None and profile.link.paced:
        links = shape.world - 1 if profile.link.per == "pair" else 1
        rate = max(links, 1) * profile.link.peak_gbps
        line["floor_ms"] = _rounded(facts.sent_bytes / (rate * 1e6))
    return line


def _point_line(
    point: Point, figures: _Figures, journal: Records, serial_ms: float | None,
    ideal_ms: float | None,
) -> Line:  # fmt: skip
    computed = journal.worked_out.get(point.id, {})
    assert point.schedule is not None, point.id  # the point has run
    line: Line = {
        "kind": "point", "id": point.id, "shape": point.shape.id, "regime": point.regime,
        "name": point.name, "grain": point.grain, "schedule": point.schedule.to_json(),
        "ms": _rounded(figures.ms), "iqr_ms": _rounded(figures.iqr_ms), "runs": figures.runs,
        "screened": figures.screened, "ok": True,
        "max_rel_error": journal.errors.get(point.id), "predicted_ms": computed.get("predicted_ms"),
        "speedup": _rounded(serial_ms / figures.ms if serial_ms and figures.ms else None),
        "efficiency": _rounded(ideal_ms / figures.ms if ideal_ms and figures.ms else None),
        "dil": computed.get("dil"), "cil": computed.get("cil"),
    }  # fmt: skip
    if point.chosen is not None:
        line["chosen"] = point.chosen
    return line


def _figures(point: Point, known: Records, grid: Grid) -> _Figures | None:
    """Return the statistics of a point's timed runs, else of its screening."""
    if point.reason or point.id in known.bad:
        return None
    runs = [ms for _, ms in sorted(known.runs.get(point.id, {}).items())]
    times = runs or [ms for _, ms in sorted(known.screens.get(point.id, {}).items())]
    if not times:
        return None
    middle, range_ms = spread(times)
    return _Figures(middle, range_ms, len(times), not runs or len(runs) < grid.rounds)


def _reason(point: Point, journal: Records) -> str:
    return point.reason or str(journal.bad.get(point.id, {}).get("bad", ""))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)


def as_lines(results: Iterable[Line]) -> str:
    """Return results as JSON lines."""
    return "".join(json.dumps(line) + "\n" for line in results)


def as_csv(results: Iterable[Line]) -> str:
    """Return a table with a row per point; bad points have a reason and no figures."""
    text = io.StringIO()
    axes = [f"{axis}" for axis in AXES]
    writer = csv.DictWriter(text, [*_COLUMNS, *axes, "reason", "id"], lineterminator="\n")
    writer.writeheader()
    shape: Line = {}
    for line in results:
        if line["kind"] == "shape":
            shape = line
        elif line["kind"] in ("point", "bad"):
            row = {**shape, **line, **line.get("schedule", {}), "name": line["name"]}
            row["grain"] = line["grain"]
            writer.writerow({name: row.get(name) for name in writer.fieldnames})
    return text.getvalue()


# ---- statistics


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the interquartile range, which is 0 for one value."""
    if len(values) < 2:
        return values[0], 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return middle, high - low


def medians(times: Mapping[Any, Sequence[float]]) -> dict[Any, float]:
    """Return the median of each entry that has times."""
    return {key: statistics.median(values) for key, values in times.items() if values}


def fastest(values: Mapping[str, float], count: int) -> list[str]:
    """Return the `count` names with the lowest values, lowest first; ties sort by name."""
    return sorted(values, key=lambda name: (values[name], name))[:count]


def ideal(gemm_ms: float | None, transfers_ms: Iterable[float]) -> dict[str, float | None]:
    """Return the GEMM alone, the fastest transfer alone, and the larger of the two."""
    transfer = min(transfers_ms, default=None)
    both = [value for value in (gemm_ms, transfer) if value]
    return {
        "gemm_ms": gemm_ms,
        "transfer_ms": transfer,
        "ideal_ms": max(both) if len(both) == 2 else None,
    }


# ---- a book


def book_of(
    results: Iterable[Line], machine: Machine, driver: str, date: str, name: str
) -> Book | None:
    """Return the book of a sweep's results; None if no shape has all its runs.

    Only points with all rounds count. Where nothing is faster than serial, serial is in the book.

    Args:
        results: the measured results.
        machine: the profile; the selector finds the book by its name.
        driver: the driver's CUDA version, or "host".
        date: date of the measurement.
        name: the book's name in messages.
    """
    shape: Line = {}
    best: dict[tuple[str, str], Line] = {}
    serial: dict[tuple[str, str], Line] = {}
    shapes: dict[tuple[str, str], Line] = {}
    for line in results:
        if line["kind"] == "shape":
            shape = line
        if line["kind"] != "point" or line["screened"]:
            continue
        key = (line["shape"], line["regime"])
        shapes[key] = shape
        if line["name"] == "serial":
            serial[key] = line
        if key not in best or line["ms"] < best[key]["ms"]:
            best[key] = line
    points = [_point(shapes[key], serial[key], line) for key, line in best.items() if key in serial]
    if not points:
        return None
    return Book(
        name, machine.name, __version__, driver, date, tuple(points), KERNELS, machine.signals
    )


def _point(shape: Line, serial: Line, best: Line) -> BookPoint:
    sizes = (shape["op"], shape["world"], shape["m"], shape["n"], shape["k"], shape["dtype"])
    schedule = Schedule.from_toml(best["schedule"], AUTO)
    problem = Problem.chunked(*sizes)
    return BookPoint.measured(problem, shape["regime"], best["ms"], serial["ms"], schedule)
