"""Reading of a sweep's folder: its head, shapes, points, failures and timelines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ficco.cli.sweeping.folder import RESULTS, read_head
from ficco.core import files, reading
from ficco.core.errors import InputError, shown
from ficco.core.reading import number, parsed_json, whole
from ficco.plan.schedule import Schedule
from ficco.plan.timeline import Span, Timeline

_SPAN = {
    "rank": int, "lane": str, "step": str, "kind": str, "unit": str, "start_us": float,
    "end_us": float, "bytes": float,
}  # fmt: skip
_ABOVE_0 = ("ms", "serial_ms", "ideal_ms", "speedup", "efficiency", "predicted_ms", "world")
_TIMELINE = {
    "spans": list, "engine": str, "machine": str, "paced": bool, "simulated": bool,
    "origin_us": float,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    """A schedule and grain that ran, or was simulated, on a shape.

    Attributes:
        id: the point's id, unique in a sweep.
        name: the schedule's name; "auto": ficco's own choice.
        grain: chunks per shard.
        schedule: all axes, resolved.
        ms, iqr_ms, runs: median of the slowest rank, its spread, and the number of runs.
        screened: it ran only a few times.
        ok, max_rel_error: whether its results were right, and the largest error if known.
        predicted_ms: the simulator's prediction.
        speedup, efficiency: serial and ideal over ms.
        dil, cil: cost of cutting its GEMM, and of copies beside it, as factors; 1 is no cost.
        chosen: for "auto", its choice, as "schedule", and the reasons.
    """

    id: str
    name: str
    grain: int
    schedule: Mapping[str, Any]
    ms: float
    iqr_ms: float | None
    runs: int
    screened: bool
    ok: bool
    max_rel_error: float | None
    predicted_ms: float | None
    speedup: float | None
    efficiency: float | None
    dil: float | None
    cil: float | None
    chosen: Mapping[str, Any] | None

    @property
    def label(self) -> str:
        """The schedule's name with its grain; for "auto", the name of its choice."""
        name = f"auto: {self.chosen['schedule']}" if self.chosen else self.name
        return name if name.endswith("serial") else f"{name} g{self.grain}"

    @property
    def kind(self) -> tuple[str, int]:
        """Its name and grain."""
        return self.name, self.grain

    @property
    def prediction_ratio(self) -> float:
        """The predicted time over the measured one; 0 without a prediction."""
        return (self.predicted_ms or 0.0) / self.ms

    @property
    def prediction_error(self) -> float:
        """The error of the prediction, as a fraction of the measured time."""
        return abs(self.prediction_ratio - 1)


@dataclass(frozen=True, slots=True)
class Traced:
    """A timeline of one call of a point; `which`: "best" or "worst"."""

    id: str
    which: str
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Bad:
    """A point without a time, and the reason."""

    id: str
    shape: str
    regime: str | None
    name: str
    grain: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Case:
    """A shape in a regime, with all its results.

    Attributes:
        shape: the shape's id.
        op, dtype, world, m, n, k: the problem, sizes over all ranks.
        regime: how calls were made.
        gemm_ms, transfer_ms: time of each alone; `ideal_ms`: the longer of the two.
        floor_ms: bytes over the link's peak rate.
        flops, bytes_out: of one rank; `op_to_byte`: the ratio of the two.
        serial_ms: time of the plain collective and GEMM.
        ended: whether the case is complete; None: the folder does not say.
        points, traced: in the sweep's order.
    """

    shape: str
    op: str
    dtype: str
    world: int
    m: int
    n: int
    k: int
    regime: str
    gemm_ms: float | None
    transfer_ms: float | None
    ideal_ms: float | None
    floor_ms: float | None
    flops: float
    bytes_out: float
    op_to_byte: float | None
    serial_ms: float | None
    ended: bool | None = None
    points: list[Point] = field(default_factory=list)
    traced: list[Traced] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sweep:
    """The contents of a folder.

    Attributes:
        head: the contents of sweep.json.
        cases: in the order of the sweep's grid.
        bad: bad points, in the same order.
    """

    head: Mapping[str, Any]
    cases: tuple[Case, ...]
    bad: tuple[Bad, ...]

    @property
    def simulated(self) -> bool:
        """Whether nothing ran."""
        return bool(self.head["how"] == "simulated")

    @property
    def found(self) -> int:
        """The number of points that have a result or a reason."""
        ids = {bad.id for bad in self.bad}
        return len(ids | {point.id for case in self.cases for point in case.points})

    @property
    def unfinished(self) -> bool:
        """Whether shapes are incomplete or points are missing, according to the folder."""
        points = self.head.get("points")
        if any(case.ended is False for case in self.cases):
            return True
        return isinstance(points, int) and self.found < points


def read(folder: Path) -> Sweep:
    """Read a sweep's folder; without results, there are no cases.

    Raises:
        InputError: the folder is not a sweep's, has another version, or contains an invalid line.
    """
    head = read_head(folder)
    cases: dict[tuple[str, str], Case] = {}
    later: list[tuple[str, Mapping[str, Any]]] = []
    bad, seen = [], set()
    for where, line in _lines(folder / RESULTS):
        kind = line.get("kind")
        if kind == "shape":
            case = _entry(Case, line, where)
            cases.setdefault((case.shape, case.regime), case)
        elif kind in ("point", "timeline"):
            later.append((where, line))
        elif kind == "bad":
            bad.append(_entry(Bad, line, where))
        else:
            raise InputError(
                f"{where}: kind={shown(kind)}; it must be shape, point, bad or timeline"
            )
    for where, line in later:
        key = (_text(line, "shape", where), _text(line, "regime", where))
        if key not in cases:
            raise InputError(f"{where}: no line describes shape {key[0]!r}, {key[1]}")
        traces = line["kind"] == "timeline"
        entry = _traced(line, where) if traces else _entry(Point, line, where)
        if (line["kind"], key, entry.id) in seen:  # a line that is there twice counts once
            continue
        seen.add((line["kind"], key, entry.id))
        if isinstance(entry, Point):
            cases[key].points.append(entry)
        else:
            cases[key].traced.append(entry)
    return Sweep(head, tuple(cases.values()), tuple(bad))


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        text = files.read_text(path, files.SWEEP_BYTES)
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    for line_number, line in enumerate(text.splitlines(), 1):
        where = f"{path}, line {line_number}"
        entry = parsed_json(line, f"{where} (run the sweep again)")
        if not isinstance(entry, dict):
            raise InputError(f"{where}: a JSON object is needed")
        yield where, entry


def _take(line: Mapping[str, Any], name: str, where: str) -> Any:
    if line.get(name) is None:
        raise InputError(f"{where}: {name} is missing; run the sweep again")
    return line[name]


def _text(line: Mapping[str, Any], name: str, where: str) -> str:
    value = _take(line, name, where)
    if not isinstance(value, str):
        raise InputError(f"{where}: {name}={shown(value)}; a text is needed")
    return value


def _number(line: Mapping[str, Any], name: str, where: str) -> float:
    value = number(_take(line, name, where), f"{where}: {name}")
    if value < 0 or (value == 0 and name in _ABOVE_0):
        least = "a number above 0" if name in _ABOVE_0 else "0 or more"
        raise InputError(f"{where}: {name}={value:g}: {least} is needed")
    return value


def _whole(line: Mapping[str, Any], name: str, where: str) -> int:
    return whole(_number(line, name, where), f"{where}: {name}")


def _error(line: Mapping[str, Any], name: str, where: str) -> float | None:
    """Return the largest error of a point's results; it may be infinite for wrong results."""
    return math.inf if line.get(name) == math.inf else _maybe(line, name, where)


def _maybe(line: Mapping[str, Any], name: str, where: str) -> float | None:
    return None if line.get(name) is None else _number(line, name, where)


def _maybe_text(line: Mapping[str, Any], name: str, where: str) -> str | None:
    return None if line.get(name) is None else _text(line, name, where)


def _maybe_flag(line: Mapping[str, Any], name: str, where: str) -> bool | None:
    return None if line.get(name) is None else _flag(line, name, where)


def _flag(line: Mapping[str, Any], name: str, where: str) -> bool:
    value = _take(line, name, where)
    if not isinstance(value, bool):
        raise InputError(f"{where}: {name}={shown(value)}; true or false is needed")
    return value


def _schedule(line: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    axes = _take(line, name, where)
    try:
        Schedule.from_json(axes)
    except InputError as wrong:
        raise InputError(f"{where}: schedule: {wrong}") from None
    return dict(axes)


def _chosen(line: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any] | None:
    chosen = line.get(name)
    if chosen is not None and not (
        isinstance(chosen, Mapping) and isinstance(chosen.get("schedule"), str)
    ):
        raise InputError(f"{where}: chosen={shown(chosen)} names no schedule; run the sweep again")
    return chosen


_MAYBE = ("iqr_ms", "predicted_ms", "speedup", "efficiency", "dil", "cil")
_FIELDS: dict[type, dict[str, Any]] = {  # of each kind of line, with the function that reads them
    Case: {
        **dict.fromkeys(("shape", "op", "dtype", "regime"), _text),
        **dict.fromkeys(("world", "m", "n", "k"), _whole),
        **dict.fromkeys(("flops", "bytes_out"), _number),
        **dict.fromkeys(("gemm_ms", "transfer_ms", "ideal_ms", "floor_ms"), _maybe),
        "op_to_byte": _maybe, "serial_ms": _maybe, "ended": _maybe_flag,
    },
    Point: {
        "id": _text, "name": _text, "grain": _whole, "schedule": _schedule, "ms": _number,
        "runs": _whole, "screened": lambda line, *at: _flag({"screened": False, **line}, *at),
        "ok": _flag,
        "max_rel_error": _error, "chosen": _chosen, **dict.fromkeys(_MAYBE, _maybe),
    },
    Bad: {
        "id": _text, "shape": _text, "regime": _maybe_text, "reason": _text,
        "name": lambda *place: _maybe_text(*place) or "",
        "grain": lambda line, *_: line["grain"] if isinstance(line.get("grain"), int) else None,
    },
}  # fmt: skip


def _entry(kind: type, line: Mapping[str, Any], where: str) -> Any:
    """Return a line's case, point or bad point."""
    return kind(**{name: read(line, name, where) for name, read in _FIELDS[kind].items()})


def _span(kind: str, **fields: Any) -> Span:
    """Return a span; sweeps of plans of version 2 wrote "signal" for "raise"."""
    return Span(kind="raise" if kind == "signal" else kind, **fields)


def _traced(line: Mapping[str, Any], where: str) -> Traced:
    entry = _take(line, "timeline", where)
    entry = reading.table(entry, _TIMELINE, f"{where}: timeline", _TIMELINE)
    spans = []
    for at, span in enumerate(entry["spans"]):
        place = f"{where}: timeline.spans[{at}]"
        spans.append(_span(**reading.table(span, _SPAN, place, set(_SPAN) - {"bytes"})))
    timeline = Timeline(**{**entry, "spans": tuple(spans)})
    return Traced(_text(line, "id", where), _text(line, "which", where), timeline)
