"""A plan as JSON, both ways. The format is described in schedules/plan.schema.json.

Reading checks only the form (fields, types, known kinds). The verifier checks correctness.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ficco.core.dtypes import ELEMENT_BYTES
from ficco.core.errors import InputError, PlanError, closest, shown
from ficco.core.reading import parsed_json
from ficco.operators.problem import MODES, Problem
from ficco.operators.routing import Routed
from ficco.plan import (
    EXPERT_MODES,
    KINDS,
    ROLES,
    SIGNALS,
    VERSION,
    Buffer,
    Part,
    Plan,
    Product,
    RankPlan,
    Region,
    Signal,
    Step,
    digest_of,
)
from ficco.plan.schedule import Schedule

T = TypeVar("T")
BEGINS = r'\{"version": \d+, "problem": \{'  # of every plan that `dumps` makes


def dumps(plan: Plan) -> str:
    """Return a plan as JSON text, with one step per line."""
    head = {
        "version": VERSION,
        "problem": plan.problem.to_json(),
        "schedule": plan.schedule.to_json(),
        "digest": plan.digest,
    }
    lines = [json.dumps(head)[:-1] + ', "ranks": [']
    for i, rank in enumerate(plan.ranks):
        buffers = json.dumps([buffer._asdict() for buffer in rank.buffers])
        steps = ",\n  ".join(json.dumps(_step(step)) for step in rank.steps)
        comma = "," if i + 1 < len(plan.ranks) else ""
        lines.append(
            f' {{"rank": {rank.rank}, "buffers": {buffers}, "steps": [\n  {steps}\n ]}}{comma}'
        )
    return "\n".join(lines) + "\n]}\n"


def _step(step: Step) -> dict[str, Any]:
    """Return a step without its empty fields; id, lane, kind and unit are always present."""
    out: dict[str, Any] = {
        "id": step.id,
        "lane": step.lane,
        "kind": step.kind,
        "unit": step.unit,
        "reads": [_region(r) for r in step.reads],
        "writes": [_region(r) for r in step.writes],
        "signals": [w._asdict() for w in step.signals],
        "products": [_product(p) for p in step.products],
        "transpose_a": step.transpose_a,
        "transpose_b": step.transpose_b,
        "after": list(step.after),
        "parts": [_part(p) for p in step.parts],
        "collective": step.collective,
        "concurrent": step.concurrent,
        "modes": list(step.modes),
        "routed": None if step.routed is None else step.routed._asdict(),
    }
    return {key: value for key, value in out.items() if value}


def _region(region: Region) -> dict[str, Any]:
    out: dict[str, Any] = {
        "rank": region.rank,
        "buffer": region.buffer,
        "copy": region.copy,
        "rows": [region.row0, region.row1],
        "cols": [region.col0, region.col1],
    }
    return out if region.of < 0 else out | {"of": region.of}


def _product(product: Product) -> dict[str, Any]:
    out: dict[str, Any] = {
        "a": _region(product.a),
        "b": _region(product.b),
        "c": _region(product.c),
        "accumulate": product.accumulate,
    }
    if product.add:
        out["add"] = [_region(r) for r in product.add]
    return out


def _part(part: Part) -> dict[str, Any]:
    out: dict[str, Any] = {
        "waits": [w._asdict() for w in part.waits],
        "products": [_product(p) for p in part.products],
        "reads": [_region(r) for r in part.reads],
        "writes": [_region(r) for r in part.writes],
        "raises": [w._asdict() for w in part.raises],
        "modes": list(part.modes),
    }
    return {key: value for key, value in out.items() if value}


def loads(text: str, source: str = "plan") -> Plan:
    """Read a plan from JSON text; `source` names it in messages.

    Raises:
        PlanError: the text is not JSON or not a plan; the message names the place.
    """
    raw = parsed_json(text, source, PlanError)
    top = _Fields(raw, source, ("version", "problem", "schedule", "digest", "ranks"))
    version = top.get("version", _whole)
    if version not in (2, 3, VERSION):
        raise PlanError(
            f"{source}: version {shown(version)} found, this ficco reads versions 2 to "
            f"{VERSION}; write the plan again with `ficco plan --json`"
        )
    if version == 2:
        _rename_fields_of_version_2(raw)
    problem_fields, axes = top.get("problem", _mapping), top.get("schedule", _mapping)
    try:
        problem = Problem.from_json(problem_fields)
        schedule = Schedule.from_json(axes)
    except InputError as wrong:
        raise PlanError(f"{source}: {wrong}") from None
    if version < VERSION and problem.flow.routes:
        raise PlanError(f"{source}: version {version} has no {problem.op}; version {VERSION} has")
    ranks = top.list("ranks", _read_rank)
    retired = {"network_transport": "collective"} if version == 2 else {}
    retired = {axis: str(raw["schedule"].get(axis, value)) for axis, value in retired.items()}
    expected = digest_of(problem, schedule, version, **retired)
    digest = top.get("digest", _whole, expected)
    unbiased = replace(problem, outputs=tuple(replace(o, bias=False) for o in problem.outputs))
    # Digests of files before 0.1.0 leave the bias out.
    if digest not in (expected, digest_of(unbiased, schedule, version, **retired)):
        raise PlanError(
            f"{source}: digest {shown(digest)} found, version, problem and schedule give "
            f"{expected}; leave the field out or write that number"
        )
    return Plan(problem, schedule, digest_of(problem, schedule), ranks)


def _rename_fields_of_version_2(raw: Any) -> None:
    """Rename the fields of a version 2 plan to those of version 3, in place, without checks."""
    steps = [s for rank in _objects(raw, "ranks") for s in _objects(rank, "steps")]
    for step in steps:
        if step.get("kind") == "signal":
            step["kind"] = "raise"
        if "words" in step:
            step["signals"] = step.pop("words")
        for part in _objects(step, "parts"):
            if "signals" in part:
                part["raises"] = part.pop("signals")


def _objects(raw: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """Return the objects in a field; readers reject other values later."""
    entries = raw.get(field)
    return [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []


def _read_rank(raw: Any, where: str) -> RankPlan:
    f = _Fields(raw, where, ("rank", "buffers", "steps"))
    return RankPlan(
        f.get("rank", _whole), f.list("buffers", _read_buffer), f.list("steps", _read_step)
    )


def _read_buffer(raw: Any, where: str) -> Buffer:
    f = _Fields(raw, where, Buffer._fields)
    return Buffer(
        f.get("name", _text),
        f.get("role", _one_of(ROLES)),
        f.get("rows", _whole),
        f.get("cols", _whole),
        f.get("dtype", _one_of(ELEMENT_BYTES)),
        f.get("copies", _whole, 1),
    )


def _read_step(raw: Any, where: str) -> Step:
    f = _Fields(raw, where, Step._fields)
    kind, unit = f.get("kind", _one_of(KINDS)), f.get("unit", _one_of(("sm", "dma", "none")))
    if kind == "local_copy" and unit == "dma":
        unit = "sm"  # older plans assigned copies within a device to a copy engine
    return Step(
        id=f.get("id", _text),
        lane=f.get("lane", _text),
        kind=kind,
        unit=unit,
        reads=f.list("reads", _read_region, ()),
        writes=f.list("writes", _read_region, ()),
        signals=f.list("signals", _read_signal, ()),
        products=f.list("products", _read_product, ()),
        transpose_a=f.get("transpose_a", _flag, False),
        transpose_b=f.get("transpose_b", _flag, False),
        after=f.list("after", _text, ()),
        parts=f.list("parts", _read_part, ()),
        collective=f.get("collective", _text, ""),
        concurrent=f.get("concurrent", _flag, False),
        modes=f.list("modes", _one_of(EXPERT_MODES if kind == "experts" else MODES), ()),
        routed=f.get("routed", _read_routed, None),
    )


def _read_routed(raw: Any, where: str) -> Routed:
    f = _Fields(raw, where, Routed._fields)
    return Routed(f.get("experts", _whole), f.get("topk", _whole), f.list("rows", _whole))


def _read_region(raw: Any, where: str) -> Region:
    f = _Fields(raw, where, ("rank", "buffer", "copy", "rows", "cols", "of"))
    rows, cols = f.list("rows", _whole), f.list("cols", _whole)
    if len(rows) != 2 or len(cols) != 2:
        raise PlanError(
            f"{where}: rows={shown(list(rows))} and cols={shown(list(cols))} found; each must be "
            "[first, one past the last]"
        )
    return Region(
        f.get("rank", _whole), f.get("buffer", _text), *rows, *cols, f.get("copy", _whole, 0),
        f.get("of", _whole, -1),
    )  # fmt: skip


def _read_signal(raw: Any, where: str) -> Signal:
    f = _Fields(raw, where, Signal._fields)
    return Signal(
        f.get("rank", _whole),
        f.get("name", _one_of(SIGNALS)),
        f.get("peer", _whole),
        f.get("chunk", _whole, 0),
        f.get("copy", _whole, 0),
    )


def _read_product(raw: Any, where: str) -> Product:
    f = _Fields(raw, where, Product._fields)
    return Product(
        f.get("a", _read_region),
        f.get("b", _read_region),
        f.get("c", _read_region),
        f.get("accumulate", _flag, False),
        f.list("add", _read_region, ()),
    )


def _read_part(raw: Any, where: str) -> Part:
    f = _Fields(raw, where, Part._fields)
    return Part(
        f.list("waits", _read_signal, ()),
        f.list("products", _read_product, ()),
        f.list("reads", _read_region, ()),
        f.list("writes", _read_region, ()),
        f.list("raises", _read_signal, ()),
        f.list("modes", _one_of(MODES), ()),
    )


class _Missing:
    """Marks a field without a default."""


class _Fields:
    """The fields of one JSON object; every error names its place."""

    def __init__(self, raw: Any, where: str, known: tuple[str, ...]) -> None:
        self.raw: Mapping[str, Any] = _mapping(raw, where)
        self.where = where
        for field in self.raw:
            if field not in known:
                raise PlanError(
                    f"{where}: unknown field {shown(field)}{closest(field, known)}. "
                    f"Known: {', '.join(known)}"
                )

    def get(self, field: str, read: Callable[[Any, str], T], default: Any = _Missing) -> T:
        if field not in self.raw:
            if default is _Missing:
                raise PlanError(f"{self.where}: the field {field!r} is missing")
            return default  # type: ignore[no-any-return]
        return read(self.raw[field], f"{self.where}.{field}")

    def list(
        self, field: str, read: Callable[[Any, str], T], default: Any = _Missing
    ) -> tuple[T, ...]:
        entries: Any = self.get(field, _array, default)
        return tuple(read(e, f"{self.where}.{field}[{i}]") for i, e in enumerate(entries))


def _mapping(raw: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise PlanError(f"{where}: an object is expected, {shown(raw)} found")
    return raw


def _array(raw: Any, where: str) -> list[Any]:
    if not isinstance(raw, list):
        raise PlanError(f"{where}: a list is expected, {shown(raw)} found")
    return raw


def _whole(raw: Any, where: str) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or raw < 0:
        raise PlanError(f"{where}: a whole number is expected, {shown(raw)} found")
    return raw


def _text(raw: Any, where: str) -> str:
    if not isinstance(raw, str) or not raw:
        raise PlanError(f"{where}: a text is expected, {shown(raw)} found")
    return raw


def _flag(raw: Any, where: str) -> bool:
    if not isinstance(raw, bool):
        raise PlanError(f"{where}: true or false is expected, {shown(raw)} found")
    return raw


def _one_of(known: Any) -> Callable[[Any, str], str]:
    def read(raw: Any, where: str) -> str:
        if not isinstance(raw, str) or raw not in known:
            raise PlanError(
                f"{where}: {shown(raw)}{closest(raw, known)}; must be one of {', '.join(known)}"
            )
        return raw

    return read
