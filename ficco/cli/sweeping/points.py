"""Expansion of a grid to shapes and points on a machine, each with a stable id.

A point is a resolved schedule on a shape in a regime. A schedule that cannot run is a point, too,
with the reason, so that results report it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from ficco.cli.sweeping.grid import AUTO, Grid
from ficco.core.errors import InputError
from ficco.core.machine import Machine
from ficco.lowering.lowered import Lowered
from ficco.measure.selector import Choice
from ficco.operators import registry
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.program.passes.served import check_served

Choose = Callable[[Problem, str], Choice]


@dataclass(frozen=True)
class Shape:
    """An operator with its sizes over all ranks, the arguments of `Problem.chunked`."""

    op: str
    m: int
    n: int
    k: int
    dtype: str
    world: int

    @property
    def id(self) -> str:
        """Return the shape's name in results."""
        return f"{self.op}-{self.m}x{self.n}x{self.k}-{self.dtype}-x{self.world}"

    @cached_property
    def problem(self) -> Problem:
        """The problem.

        Raises:
            InputError: the sizes are invalid.
        """
        return Problem.chunked(self.op, self.world, self.m, self.n, self.k, self.dtype)


@dataclass(frozen=True)
class Point:
    """A schedule on a shape in a regime.

    Attributes:
        shape, regime: the point's shape and regime.
        name: the schedule's name, or AUTO.
        schedule: the resolved schedule; None: there is none, and `reason` says why.
        requested: the grid's schedule, before it was resolved; None for AUTO.
        chosen: for AUTO, the selector's choice and reasons.
        reason: why the point cannot run; empty: it can.
    """

    shape: Shape
    regime: str
    name: str
    schedule: Schedule | None
    requested: Schedule | None = None
    chosen: dict[str, Any] | None = None
    reason: str = ""

    @property
    def grain(self) -> int | None:
        """Chunks per shard, where known."""
        return None if self.schedule is None else self.schedule.chunks

    @cached_property
    def id(self) -> str:
        """The point's name in the journal and in results: readable, and unique in all axes."""
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
        """The points that can run."""
        return tuple(point for point in self.points if not point.reason)

    def of(self, regime: str) -> tuple[Point, ...]:
        """Return the points of a regime."""
        return tuple(point for point in self.points if point.regime == regime)


def expanded(
    grid: Grid, machine: Machine, world: int, simulated: bool, choose: Choose
) -> tuple[Case, ...]:
    """Return a grid's cases on a machine, each shape once.

    Args:
        grid: the requested cases.
        machine: the machine to run on or to simulate.
        world: number of ranks.
        simulated: nothing runs.
        choose: the selector for AUTO.
    """
    cases: dict[Shape, Case] = {}
    for entry in grid.cases:
        on_host = machine.engine == "host"
        dtypes = entry.dtypes or (("float32",) if on_host else ("bfloat16",))
        regimes = entry.regimes or (("synchronized",) if on_host else ("captured",))
        for op in entry.op:
            for sizes in entry.shapes:
                for dtype in dtypes:
                    m, n, k = sizes
                    shape = Shape(op, m * world if entry.m_each else m, n, k, dtype, world)
                    schedules = entry.schedules_for(op, shape.m)
                    served = lru_cache(_served)  # once for all regimes
                    points = [
                        point
                        for regime in regimes
                        for point in _points(
                            shape, regime, schedules, machine, simulated, choose, served
                        )
                    ]
                    cases[shape] = _joined(cases.get(shape), Case(shape, regimes, tuple(points)))
    return tuple(cases.values())


def _joined(first: Case | None, second: Case) -> Case:
    """Join two cases with the same shape."""
    if first is None:
        return second
    regimes = tuple(dict.fromkeys((*first.regimes, *second.regimes)))
    every = {point.id: point for case in (first, second) for point in case.points}
    ordered = [point for regime in regimes for point in every.values() if point.regime == regime]
    return Case(first.shape, regimes, tuple(ordered))


def _points(
    shape: Shape, regime: str, schedules: Sequence[str | Schedule], machine: Machine,
    simulated: bool, choose: Choose, served: Callable[..., str],
) -> list[Point]:  # fmt: skip
    """Return a shape's points in a regime; keep the first of points with the same axes."""
    refused = "" if simulated else _regime_refused(machine, regime)
    points: dict[Any, Point] = {}
    for entry in schedules:
        if isinstance(entry, str):
            point = _automatic(shape, regime, choose)
        else:
            point = Point(shape, regime, entry.name, entry.resolve(shape.world, machine), entry)
        if not point.reason:
            reason = refused or served(shape, point.schedule, machine, simulated)
            point = replace(point, reason=reason)
        points.setdefault((point.name == AUTO, point.schedule), point)
    return list(points.values())


def _automatic(shape: Shape, regime: str, choose: Choose) -> Point:
    try:
        choice = choose(shape.problem, regime)
    except InputError as error:
        return Point(shape, regime, AUTO, None, reason=str(error))
    chosen = {"schedule": choice.schedule.name, "by": choice.by, "reasons": list(choice.reasons)}
    return Point(shape, regime, AUTO, choice.schedule, chosen=chosen)


def _regime_refused(machine: Machine, regime: str) -> str:
    if machine.engine == "host" and regime != "synchronized":
        return f"the host engine only runs the regime synchronized, not {regime}"
    return ""


def _served(shape: Shape, schedule: Schedule, machine: Machine, simulated: bool) -> str:
    """Return why the machine cannot run or predict a schedule; empty if it can."""
    engine, pools = machine.engine, registry.get(shape.op).flow.pools
    if pools and (engine == "cuda" or (engine == "hip" and not simulated)):
        return "bags are not swept on GPUs: their calls have no GEMM to compare with"
    try:
        check_served(Lowered(shape.problem, schedule), engine, machine if simulated else None)
    except InputError as error:
        return str(error)
    return ""


def digest_of(grid: Grid, cases: Sequence[Case]) -> str:
    """Return a digest of everything that determines the lines of a sweep's results."""
    table = {
        "points": [point.id for case in cases for point in case.points],
        "rounds": grid.rounds,
        "screening": grid.screening,
        "keep": grid.keep,
    }
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()[:16]
