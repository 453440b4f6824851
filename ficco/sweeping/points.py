"""The shapes and points that a grid stands for on a machine, each with an id that stays.

A point is a resolved schedule on a shape in a regime. One that cannot run is a point, too, with the
reason, so that results tell of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from ficco import registry
from ficco.engines.gating import check_served
from ficco.errors import InputError
from ficco.machine import Machine
from ficco.problem import Problem
from ficco.schedule import Schedule
from ficco.selector import Choice
from ficco.sweeping.grid import AUTO, Grid

__all__ = ["Case", "Point", "Shape", "digest_of", "expanded"]

Choose = Callable[[Problem, str], Choice]


@dataclass(frozen=True)
class Shape:
    """An operator with its sizes over all ranks, as `Problem.chunked` takes them."""

    op: str
    m: int
    n: int
    k: int
    dtype: str
    world: int

    @property
    def id(self) -> str:
        """Return what names it in results."""
        return f"{self.op}-{self.m}x{self.n}x{self.k}-{self.dtype}-x{self.world}"

    @cached_property
    def problem(self) -> Problem:
        """The problem.

        Raises:
            InputError: it cannot be.
        """
        return Problem.chunked(self.op, self.world, self.m, self.n, self.k, self.dtype)


@dataclass(frozen=True)
class Point:
    """A schedule on a shape in a regime.

    Attributes:
        shape, regime: where it stands.
        name: the schedule's, or AUTO.
        schedule: resolved; None: it has no value, and `reason` says why.
        asked: the schedule as the grid has it, before it was resolved; None for AUTO.
        chosen: for AUTO, how the selector came to it.
        reason: why it cannot run; empty: it can.
    """

    shape: Shape
    regime: str
    name: str
    schedule: Schedule | None
    asked: Schedule | None = None
    chosen: dict[str, Any] | None = None
    reason: str = ""

    @property
    def grain(self) -> int | None:
        """Chunks per shard, where known."""
        return None if self.schedule is None else self.schedule.chunks

    @cached_property
    def id(self) -> str:
        """What names it in the journal and in results: readable, and told apart by all axes."""
        axes = self.schedule.to_json() if self.schedule else {}
        text = json.dumps([self.name, axes], sort_keys=True)
        mark = hashlib.sha256(text.encode()).hexdigest()[:8]
        grain = "" if self.name == AUTO or self.grain is None else f"-g{self.grain}"
        return f"{self.shape.id}-{self.regime}-{self.name}{grain}-{mark}"


@dataclass(frozen=True)
class Case:
    """A shape with all its points, regime by regime; the first of each regime is serial."""

    shape: Shape
    regimes: tuple[str, ...]
    points: tuple[Point, ...]

    @property
    def able(self) -> tuple[Point, ...]:
        """Points that can run."""
        return tuple(point for point in self.points if not point.reason)

    def of(self, regime: str) -> tuple[Point, ...]:
        """Return the points of a regime."""
        return tuple(point for point in self.points if point.regime == regime)


def expanded(
    grid: Grid, machine: Machine, world: int, simulated: bool, choose: Choose
) -> tuple[Case, ...]:
    """Return a grid's cases on a machine, each shape once.

    Args:
        grid: what is asked.
        machine: it is run on or simulated for.
        world: ranks.
        simulated: nothing runs.
        choose: what AUTO stands for.
    """
    found: dict[Shape, Case] = {}
    for entry in grid.cases:
        on_host = machine.engine == "host"
        dtypes = entry.dtypes or (("float32",) if on_host else ("bfloat16",))
        regimes = entry.regimes or (("synchronized",) if on_host else ("captured",))
        for op in entry.op:
            for sizes in entry.shapes:
                for dtype in dtypes:
                    m, n, k = sizes
                    shape = Shape(op, m * world if entry.m_each else m, n, k, dtype, world)
                    asked = entry.asked(op, shape.m)
                    served = lru_cache(_served)  # once for all regimes
                    points = [
                        point
                        for regime in regimes
                        for point in _points(
                            shape, regime, asked, machine, simulated, choose, served
                        )
                    ]
                    found[shape] = _joined(found.get(shape), Case(shape, regimes, tuple(points)))
    return tuple(found.values())


def _joined(first: Case | None, second: Case) -> Case:
    """Return one case of two entries of a grid that have the same shape."""
    if first is None:
        return second
    regimes = tuple(dict.fromkeys((*first.regimes, *second.regimes)))
    every = {point.id: point for case in (first, second) for point in case.points}
    ordered = [point for regime in regimes for point in every.values() if point.regime == regime]
    return Case(first.shape, regimes, tuple(ordered))


def _points(
    shape: Shape, regime: str, asked: Sequence[str | Schedule], machine: Machine,
    simulated: bool, choose: Choose, served: Callable[..., str],
) -> list[Point]:  # fmt: skip
    """Return a shape's points in a regime; of those that come to the same axes the first."""
    here = "" if simulated else _regime_refused(machine, regime)
    found: dict[Any, Point] = {}
    for entry in asked:
        if isinstance(entry, str):
            point = _automatic(shape, regime, choose)
        else:
            point = Point(shape, regime, entry.name, entry.resolve(shape.world, machine), entry)
        if not point.reason:
            reason = here or served(shape, point.schedule, machine.engine)
            point = replace(point, reason=reason)
        found.setdefault((point.name == AUTO, point.schedule), point)
    return list(found.values())


def _automatic(shape: Shape, regime: str, choose: Choose) -> Point:
    try:
        choice = choose(shape.problem, regime)
    except InputError as wrong:
        return Point(shape, regime, AUTO, None, reason=str(wrong))
    chosen = {"schedule": choice.schedule.name, "by": choice.by, "reasons": list(choice.reasons)}
    return Point(shape, regime, AUTO, choice.schedule, chosen=chosen)


def _regime_refused(machine: Machine, regime: str) -> str:
    if machine.engine == "host" and regime != "synchronized":
        return f"the host engine ends every call before the next: it is synchronized, not {regime}"
    return ""


def _served(shape: Shape, schedule: Schedule, engine: str) -> str:
    """Say why the engine cannot run a schedule, or nothing."""
    if engine == "cuda" and registry.get(shape.op).flow.pools:
        return "bags are not swept on GPUs: their calls have no GEMM to be held against"
    try:
        check_served(shape.problem, schedule, engine)
    except InputError as wrong:
        return str(wrong)
    return ""


def digest_of(grid: Grid, cases: Sequence[Case]) -> str:
    """Return a digest of all that decides which lines a sweep's results have."""
    table = {
        "points": [point.id for case in cases for point in case.points],
        "rounds": grid.rounds,
        "screening": grid.screening,
        "keep": grid.keep,
    }
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()[:16]
