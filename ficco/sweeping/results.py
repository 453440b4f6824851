"""Results from the journal: a line a shape and regime, a line a point, in the grid's order; CSV.

Everything here follows from the journal and the cases, so it can be made again at any time.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ficco.errors import InputError
from ficco.machine import Machine
from ficco.schedule import AXES
from ficco.selector.facts import facts_of
from ficco.sweeping.figures import fastest, ideal, spread
from ficco.sweeping.grid import AUTO, Grid
from ficco.sweeping.journal import Journal
from ficco.sweeping.points import Case, Point, Shape

__all__ = [
    "Figures",
    "Line",
    "as_csv",
    "as_lines",
    "auto_behind",
    "extremes",
    "kept",
    "lines",
    "screens",
]

Line = dict[str, Any]
_COLUMNS = (
    "op", "m", "n", "k", "dtype", "world", "regime", "name", "grain", "ms", "iqr_ms", "runs",
    "screened", "serial_ms", "speedup", "ideal_ms", "efficiency", "predicted_ms", "max_rel_error",
    "dil", "cil",
)  # fmt: skip
_DIGITS = 6  # behind the point, of milliseconds: picoseconds are nobody's


@dataclass(frozen=True)
class _Figures:
    """What a point's runs say."""

    ms: float
    iqr_ms: float
    runs: int
    screened: bool


class Figures(Protocol):
    """What is known of points: a journal, or what a rank has been told of one.

    Attributes:
        runs, screens: ms by point and number.
        bad: points that have no figures.
    """

    runs: dict[str, dict[int, float]]
    screens: dict[str, dict[int, float]]
    bad: dict[str, Any]


def kept(points: Sequence[Point], known: Figures, grid: Grid) -> list[Point]:
    """Return those of a regime's points that get all rounds: serial, AUTO, the best of a screening.

    Args:
        points: of one shape and regime, all screened where the grid screens.
        known: with the screening's runs.
        grid: how many are kept.
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
    """Whether a point has a screening."""
    return bool(grid.screening) and not _always(point)


def _always(point: Point) -> bool:
    return point.name in ("serial", AUTO)


def lines(
    cases: Iterable[Case], journal: Journal, grid: Grid, profile: Machine | None
) -> list[Line]:
    """Return the results of all cases of which something is known.

    Args:
        cases: in the grid's order.
        journal: what was measured.
        grid: how often it was to be.
        profile: that `floor_ms` is worked out from; None: it is not known.
    """
    found: list[Line] = []
    for case in cases:
        if case.shape.id not in journal.touched:
            continue
        for regime in case.regimes:
            found += _regime_lines(case, regime, journal, grid, profile)
        for regime in case.regimes:
            for which in ("best", "worst"):
                line = journal.timelines.get((case.shape.id, regime, which))
                if line is not None:
                    order = ("id", "shape", "regime", "which", "timeline")
                    found.append({"kind": "timeline", **{key: line[key] for key in order}})
    return found


def extremes(case: Case, regime: str, known: Figures, grid: Grid) -> list[tuple[str, Point]]:
    """Return the fastest and the slowest point of a regime, as far as it has any."""
    timed = [
        (figures.ms, point.id, point)
        for point in case.of(regime)
        if (figures := _figures(point, known, grid)) is not None
    ]
    timed.sort(key=lambda entry: entry[:2])
    if not timed:
        return []
    return [("best", timed[0][2])] + ([("worst", timed[-1][2])] if len(timed) > 1 else [])


def auto_behind(found: Iterable[Line]) -> dict[str, float]:
    """Return per shape and regime how many times as long AUTO took as the best that had all rounds.

    1 is the best itself. What AUTO took may be in the grid by its own name, too: then one plan was
    measured twice, and the shorter of both times is AUTO's. Shapes on which AUTO has not had all
    rounds are left out.
    """
    timed: dict[str, list[Line]] = {}
    for line in found:
        if line["kind"] == "point" and not line["screened"]:
            timed.setdefault(f"{line['shape']}, {line['regime']}", []).append(line)
    behind = {}
    for name, points in timed.items():
        taken = [_axes(point) for point in points if point["name"] == AUTO]
        if taken:
            ms = min(point["ms"] for point in points if _axes(point) in taken)
            behind[name] = ms / min(point["ms"] for point in points)
    return behind


def _axes(point: Line) -> dict[str, Any]:
    return {**point["schedule"], "name": ""}


def _regime_lines(
    case: Case, regime: str, journal: Journal, grid: Grid, profile: Machine | None
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
    found = [_shape_line(case.shape, regime, alone, serial_ms, profile)]
    found[0]["ended"] = case.shape.id in journal.ended
    if lacking:
        found[0]["lacking"] = lacking
    for point in points:
        bad = _reason(point, journal)
        figured = figures[point.id]
        if bad:
            found.append({
                "kind": "bad", "id": point.id, "shape": case.shape.id, "regime": regime,
                "name": point.name, "grain": point.grain, "reason": bad,
            })  # fmt: skip
        elif figured is not None:
            found.append(_point_line(point, figured, journal, serial_ms, alone["ideal_ms"]))
    return found


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
        return line  # it cannot be; every point says so
    line |= {"flops": facts.flops, "bytes_out": facts.sent_bytes}
    if facts.sent_bytes:
        line["op_to_byte"] = round(facts.intensity, 3)
    if profile is not None and profile.link.paced:
        links = shape.world - 1 if profile.link.per == "pair" else 1
        rate = max(links, 1) * profile.link.peak_gbps
        line["floor_ms"] = _rounded(facts.sent_bytes / (rate * 1e6))
    return line


def _point_line(
    point: Point, figures: _Figures, journal: Journal, serial_ms: float | None,
    ideal_ms: float | None,
) -> Line:  # fmt: skip
    more = journal.worked_out.get(point.id, {})
    assert point.schedule is not None, point.id  # it has run
    line: Line = {
        "kind": "point", "id": point.id, "shape": point.shape.id, "regime": point.regime,
        "name": point.name, "grain": point.grain, "schedule": point.schedule.to_json(),
        "ms": _rounded(figures.ms), "iqr_ms": _rounded(figures.iqr_ms), "runs": figures.runs,
        "screened": figures.screened, "ok": True,
        "max_rel_error": journal.errors.get(point.id), "predicted_ms": more.get("predicted_ms"),
        "speedup": _rounded(serial_ms / figures.ms if serial_ms and figures.ms else None),
        "efficiency": _rounded(ideal_ms / figures.ms if ideal_ms and figures.ms else None),
        "dil": more.get("dil"), "cil": more.get("cil"),
    }  # fmt: skip
    if point.chosen is not None:
        line["chosen"] = point.chosen
    return line


def _figures(point: Point, known: Figures, grid: Grid) -> _Figures | None:
    """Return what is known of a point: of its timed runs, else of its screening."""
    if point.reason or point.id in known.bad:
        return None
    runs = [ms for _, ms in sorted(known.runs.get(point.id, {}).items())]
    times = runs or [ms for _, ms in sorted(known.screens.get(point.id, {}).items())]
    if not times:
        return None
    middle, range_ms = spread(times)
    return _Figures(middle, range_ms, len(times), not runs or len(runs) < grid.rounds)


def _reason(point: Point, journal: Journal) -> str:
    return point.reason or str(journal.bad.get(point.id, {}).get("bad", ""))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)


def as_lines(found: Iterable[Line]) -> str:
    """Return results as JSON lines."""
    return "".join(json.dumps(line) + "\n" for line in found)


def as_csv(found: Iterable[Line]) -> str:
    """Return points as a table: a row a point, bad ones with their reason and no figures."""
    text = io.StringIO()
    axes = [f"{axis}" for axis in AXES]
    writer = csv.DictWriter(text, [*_COLUMNS, *axes, "reason", "id"], lineterminator="\n")
    writer.writeheader()
    shape: Line = {}
    for line in found:
        if line["kind"] == "shape":
            shape = line
        elif line["kind"] in ("point", "bad"):
            own = {**shape, **line, **line.get("schedule", {}), "name": line["name"]}
            own["grain"] = line["grain"]
            writer.writerow({name: own.get(name) for name in writer.fieldnames})
    return text.getvalue()
