"""Reading of a sweep's folder: its head, shapes, points, failures and timelines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ficco.errors import InputError
from ficco.reading import number, parsed_json, whole
from ficco.timeline import Span, Timeline

__all__ = ["VERSION", "Bad", "Case", "Point", "Sweep", "Traced", "read"]

VERSION = 1  # of the folder's format
HEAD, RESULTS = "sweep.json", "results.jsonl"


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
    head = _head(folder / HEAD)
    cases: dict[tuple[str, str], Case] = {}
    later: list[tuple[str, Mapping[str, Any]]] = []
    bad = []
    for where, line in _lines(folder / RESULTS):
        kind = line.get("kind")
        if kind == "shape":
            case = _case(line, where)
            cases[case.shape, case.regime] = case
        elif kind in ("point", "timeline"):
            later.append((where, line))
        elif kind == "bad":
            bad.append(_bad(line, where))
        else:
            raise InputError(f"{where}: kind={kind!r}; it must be shape, point, bad or timeline")
    for where, line in later:
        key = (str(_take(line, "shape", where)), str(_take(line, "regime", where)))
        if key not in cases:
            raise InputError(f"{where}: no line describes shape {key[0]!r}, {key[1]}")
        if line["kind"] == "point":
            cases[key].points.append(_point(line, where))
        else:
            cases[key].traced.append(_traced(line, where))
    return Sweep(head, tuple(cases.values()), tuple(bad))


def _head(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{str(path.parent)!r} is not a sweep's folder: {path.name} in it cannot be read "
            f"({error.strerror}); give the folder that `ficco sweep --out` wrote"
        ) from None
    head = parsed_json(text, f"{path}, which is not a sweep's or is damaged,")
    if not isinstance(head, dict) or head.get("version") != VERSION:
        version = head.get("version") if isinstance(head, dict) else None
        raise InputError(
            f"{path}: version {version!r} found, this ficco reads {VERSION}; the file is not a "
            "sweep's, or another ficco wrote it"
        )
    for name, kind in (("grid", str), ("how", str), ("machine", dict), ("ficco", str)):
        if not isinstance(head.get(name), kind):
            raise InputError(f"{path}: {name}={head.get(name)!r}; a {kind.__name__} is needed")
    return head


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8")
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


def _number(line: Mapping[str, Any], name: str, where: str) -> float:
    return number(_take(line, name, where), f"{where}: {name}")


def _whole(line: Mapping[str, Any], name: str, where: str) -> int:
    return whole(_take(line, name, where), f"{where}: {name}")


def _error(line: Mapping[str, Any], where: str) -> float | None:
    """Return the largest error of a point's results; it may be infinite for wrong results."""
    value = line.get("max_rel_error")
    return math.inf if value == math.inf else _maybe(line, "max_rel_error", where)


def _maybe(line: Mapping[str, Any], name: str, where: str) -> float | None:
    return None if line.get(name) is None else _number(line, name, where)


def _case(line: Mapping[str, Any], where: str) -> Case:
    fields: dict[str, Any] = {}
    for name in ("shape", "op", "dtype", "regime"):
        fields[name] = str(_take(line, name, where))
    for name in ("world", "m", "n", "k"):
        fields[name] = _whole(line, name, where)
    for name in ("flops", "bytes_out"):
        fields[name] = _number(line, name, where)
    for name in ("gemm_ms", "transfer_ms", "ideal_ms", "floor_ms", "op_to_byte", "serial_ms"):
        fields[name] = _maybe(line, name, where)
    ended = line.get("ended")
    if ended is not None and not isinstance(ended, bool):
        raise InputError(f"{where}: ended={ended!r}; true or false is needed")
    return Case(**fields, ended=ended)


def _point(line: Mapping[str, Any], where: str) -> Point:
    known = ("iqr_ms", "predicted_ms", "speedup", "efficiency", "dil", "cil")
    figures: dict[str, Any] = {name: _maybe(line, name, where) for name in known}
    return Point(
        id=str(_take(line, "id", where)),
        name=str(_take(line, "name", where)),
        grain=_whole(line, "grain", where),
        schedule=_take(line, "schedule", where),
        ms=_number(line, "ms", where),
        runs=_whole(line, "runs", where),
        screened=bool(line.get("screened", False)),
        ok=bool(_take(line, "ok", where)),
        max_rel_error=_error(line, where),
        chosen=_chosen(line, where),
        **figures,
    )


def _chosen(line: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
    chosen = line.get("chosen")
    if chosen is not None and not isinstance(chosen.get("schedule"), str):
        raise InputError(f"{where}: chosen={chosen!r} names no schedule; run the sweep again")
    return chosen


def _bad(line: Mapping[str, Any], where: str) -> Bad:
    grain = line.get("grain")
    return Bad(
        id=str(_take(line, "id", where)),
        shape=str(_take(line, "shape", where)),
        regime=line.get("regime"),
        name=str(line.get("name") or ""),
        grain=grain if isinstance(grain, int) else None,
        reason=str(_take(line, "reason", where)),
    )


def _span(kind: str, **fields: Any) -> Span:
    """Return a span; sweeps of plans of version 2 wrote "signal" for "raise"."""
    return Span(kind="raise" if kind == "signal" else kind, **fields)


def _traced(line: Mapping[str, Any], where: str) -> Traced:
    table = _take(line, "timeline", where)
    try:
        spans = tuple(_span(**span) for span in table["spans"])
        timeline = Timeline(
            spans,
            str(table["engine"]),
            str(table["machine"]),
            bool(table["paced"]),
            bool(table["simulated"]),
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"{where}: not a timeline ({error}); run the sweep again") from None
    return Traced(str(_take(line, "id", where)), str(_take(line, "which", where)), timeline)
