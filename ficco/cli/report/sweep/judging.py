"""Evaluation of a sweep: each case's best point, wins and losses, and the cost of choosing."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ficco.cli.report.sweep.reading import Case, Point, Sweep
from ficco.core.errors import FiccoError
from ficco.core.machine import Machine
from ficco.measure.selector import decide
from ficco.measure.selector.facts import Facts, facts_of
from ficco.measure.selector.rule import estimate_us
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.plan.timeline import REGIMES

RIGHT = 0.03  # a choice is right if it is slower than the best point by at most this fraction
LEAST_MS = 0.015  # a point slower than serial by at most this, or by RIGHT, is level with serial


def candidates(case: Case) -> list[Point]:
    """Return ficco's right points of a case, without serial and "auto"."""
    return [p for p in case.points if p.ok and p.name not in ("serial", "auto")]


def best(case: Case) -> Point | None:
    """Return ficco's fastest right point with all rounds, else the fastest screened one."""
    return min(candidates(case), key=_rank, default=None)


def _rank(point: Point) -> tuple[bool, float]:
    """Return a point's sort key; screened points rank last, as few runs can look too fast."""
    return point.screened, point.ms


def gain(case: Case) -> float | None:
    """Return serial's time over that of ficco's best point; None if one of the two is missing."""
    winner = best(case)
    return winner.speedup if winner is not None else None


def loses(case: Case) -> bool:
    """Return whether ficco's best point is slower than serial."""
    gain_value = gain(case)
    return gain_value is not None and gain_value < 1.0


def within(case: Case) -> bool:
    """Return whether ficco's best point is slower than serial, but level with it."""
    winner, serial = best(case), case.serial_ms
    if winner is None or serial is None:
        return False
    return 0 < winner.ms - serial <= max(RIGHT * serial, LEAST_MS)


def by_loss(cases: Iterable[Case]) -> list[Case]:
    """Return cases with the worst speed-up first; cases without a speed-up come last."""
    return sorted(cases, key=lambda case: math.inf if (g := gain(case)) is None else g)


def best_of_each(case: Case) -> list[Point]:
    """Return the fastest right point of every schedule, fastest first, screened points last."""
    best_points: dict[str, Point] = {}
    for point in candidates(case):
        if point.name not in best_points or _rank(point) < _rank(best_points[point.name]):
            best_points[point.name] = point
    return sorted(best_points.values(), key=_rank)


def finer_than_shards(case: Case) -> float | None:
    """Return the best time with whole shards over the best time with cut shards."""
    whole = [p.ms for p in candidates(case) if p.grain == 1]
    cut = [p.ms for p in candidates(case) if p.grain > 1]
    return min(whole) / min(cut) if whole and cut else None


def by_cutting(sweep: Sweep) -> list[Case]:
    """Return the cases with whole and cut shards, the largest loss by cutting first."""
    ratios = [(case, r) for case in sweep.cases if (r := finer_than_shards(case)) is not None]
    return [case for case, _ in sorted(ratios, key=lambda entry: entry[1])]


def fastest(points: Iterable[Point]) -> Point | None:
    """Return the point with the least time; None if there are no points."""
    return min(points, key=lambda point: point.ms, default=None)


def most_often(cases: Iterable[Case]) -> tuple[str, int] | None:
    """Return the schedule that wins most often, and how often; None if serial always does."""
    winners = Counter(p.name for c in cases if (p := best(c)) and not loses(c) and gain(c))
    return next(iter(winners.most_common(1)), None)


class Ranking(NamedTuple):
    """A schedule's points, each at its best grain in a case, and how many of them are the best."""

    name: str
    points: list[Point]
    best_of_all: int


def rankings(sweep: Sweep) -> list[Ranking]:
    """Return the schedules with a speed-up, the largest geometric mean of speed-ups first."""
    entries: dict[str, list[tuple[Case, Point]]] = {}
    for case in sweep.cases:
        for point in best_of_each(case):
            if point.speedup is not None:
                entries.setdefault(point.name, []).append((case, point))
    found = [
        Ranking(
            name,
            [point for _, point in pairs],
            sum(best(case) is point and (point.speedup or 0.0) >= 1 for case, point in pairs),
        )
        for name, pairs in entries.items()
    ]
    return sorted(found, key=lambda each: -(geomean([p.speedup or 0.0 for p in each.points]) or 0))


def cut_points(sweep: Sweep) -> list[Point]:
    """Return ficco's right points with DIL or CIL."""
    points = [point for case in sweep.cases for point in candidates(case)]
    return [point for point in points if point.dil is not None or point.cil is not None]


def wrong_points(sweep: Sweep) -> list[tuple[Case, Point]]:
    """Return the points with wrong results, and their cases."""
    return [(case, point) for case in sweep.cases for point in case.points if not point.ok]


def predicted(sweep: Sweep) -> dict[str, list[Point]]:
    """Return the right points with predictions: all, by regime if there are several, by name."""
    groups: dict[str, list[Point]] = {}
    several = len({case.regime for case in sweep.cases}) > 1
    points = [
        (case, point)
        for case in sweep.cases
        for point in case.points
        if point.ok and point.name != "auto" and point.predicted_ms
    ]
    for case in sweep.cases if several and points else ():
        groups.setdefault(case.regime, [])
    for case, point in points:
        for name in ("all", case.regime, point.name) if several else ("all", point.name):
            groups.setdefault(name, []).append(point)
    return {"all": groups.pop("all"), **groups} if groups else {}


def geomean(values: Sequence[float]) -> float | None:
    """Return the geometric mean; None if there are no values."""
    return statistics.geometric_mean(values) if values else None


def middle(values: Sequence[float]) -> float | None:
    """Return the median; None if there are no values."""
    return statistics.median(values) if values else None


def quantile(values: Sequence[float], part: float) -> float | None:
    """Return the smallest value that a fraction `part` of the values does not exceed, or None."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(part * len(ranked)) - 1)] if ranked else None


@dataclass(frozen=True, slots=True)
class Taken:
    """A method's choice in a case, and the case's best point, which may be serial."""

    case: Case
    point: Point
    best: Point

    @property
    def loss(self) -> float:
        """The choice's extra time over the best point, as a fraction; 0.1 is 10%."""
        return self.point.ms / self.best.ms - 1.0

    @property
    def right(self) -> bool:
        """Whether the loss is within RIGHT."""
        return self.loss <= RIGHT

    @property
    def gain(self) -> float | None:
        """Serial's time over the choice's."""
        return self.case.serial_ms / self.point.ms if self.case.serial_ms else None

    @property
    def best_gain(self) -> float | None:
        """Serial's time over that of the best point."""
        return self.case.serial_ms / self.best.ms if self.case.serial_ms else None

    @property
    def slower_than_serial(self) -> bool:
        """Whether the choice is slower than serial by more than RIGHT."""
        serial = self.case.serial_ms
        return serial is not None and self.point.ms > (1 + RIGHT) * serial


@dataclass(frozen=True, slots=True)
class Choosing:
    """The choices of one method, over all cases that offer a choice.

    Attributes:
        name, about: the method's name and description on the page.
        taken: the choices, largest loss first.
        reason: why there are no choices; empty if there are some.
    """

    name: str
    about: str
    taken: tuple[Taken, ...]
    reason: str = ""


Predictor = Callable[[Case, Facts, Machine], list[tuple[Point, float]]]


def choices(sweep: Sweep) -> list[Choosing]:
    """Return the choices of the simulator, the rule and `auto` among the points of the sweep.

    The simulator's predictions are read from the sweep, the rule is evaluated now;
    `ficco.measure.selector.decide` chooses by either.
    """
    profile = sweep.head.get("profile")
    results = []
    if not sweep.simulated:
        results.append(
            _choosing(sweep, profile, _simulator, "simulator", "the points' predictions")
        )
    results.append(_choosing(sweep, profile, _rule, "rule", "the selector's formulas"))
    automatic = []
    for case in sweep.cases:
        auto = next((p for p in case.points if p.name == "auto"), None)
        fastest = _fastest(case)
        if auto is not None and fastest is not None:
            same = [p for p in case.points if p.ok and _plan_of(p) == _plan_of(auto)]
            automatic.append(Taken(case, min(same, key=_rank, default=auto), fastest))
    if automatic:
        results.append(Choosing("auto", "the schedule that ficco chose", _ranked(automatic)))
    return results


def _plan_of(point: Point) -> dict[str, Any]:
    """Return a value that is equal for two names of one plan."""
    return {**point.schedule, "name": ""}


def _fastest(case: Case) -> Point | None:
    right = [p for p in case.points if p.ok and p.name != "auto"]
    return min(right, key=_rank, default=None)


def _ranked(taken: list[Taken]) -> tuple[Taken, ...]:
    return tuple(sorted(taken, key=lambda entry: -entry.loss))


def _choosing(
    sweep: Sweep, profile: str | None, predictor: Predictor, name: str, about: str
) -> Choosing:
    if profile is None:
        return Choosing(name, about, (), "the sweep names no profile to predict from")
    try:
        machine = Machine.named(profile)
        taken = [
            entry for case in sweep.cases if (entry := _take(case, machine, predictor)) is not None
        ]
    except FiccoError as error:
        return Choosing(name, about, (), str(error))
    reason = "" if taken else "no case has serial and another point with a prediction"
    return Choosing(name, about, _ranked(taken), reason)


def _take(case: Case, machine: Machine, predictor: Predictor) -> Taken | None:
    fastest = _fastest(case)
    if fastest is None:
        return None
    facts = facts_of(Problem.chunked(case.op, case.world, case.m, case.n, case.k, case.dtype))
    predicted = predictor(case, facts, machine)
    predicted.sort(key=lambda entry: entry[0].name != "serial")  # `decide` needs serial first
    if len(predicted) < 2 or predicted[0][0].name != "serial":
        return None
    points = {Schedule.from_json(point.schedule): point for point, _ in predicted}
    predictions = [(Schedule.from_json(point.schedule), ms) for point, ms in predicted]
    return Taken(case, points[decide(predictions, facts, machine, "sweep").schedule], fastest)


def _simulator(case: Case, facts: Facts, machine: Machine) -> list[tuple[Point, float]]:
    return [
        (p, p.predicted_ms)
        for p in case.points
        if p.ok and p.name != "auto" and p.predicted_ms is not None
    ]


def _rule(case: Case, facts: Facts, machine: Machine) -> list[tuple[Point, float]]:
    regime = case.regime if case.regime in REGIMES else "captured"
    return [
        (p, estimate_us(facts, machine, Schedule.from_json(p.schedule), regime) / 1e3)
        for p in case.points
        if p.ok and p.name != "auto"
    ]
