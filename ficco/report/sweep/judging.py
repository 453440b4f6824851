"""What follows from a sweep: the best point of each case, who wins where, what choosing costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ficco.errors import FiccoError
from ficco.machine import Machine
from ficco.problem import Problem
from ficco.report.sweep.reading import Case, Point, Sweep
from ficco.schedule import Schedule
from ficco.selector import decide
from ficco.selector.facts import Facts, facts_of
from ficco.selector.rule import estimate_us
from ficco.timeline import REGIMES

__all__ = [
    "RIGHT",
    "Choosing",
    "Taken",
    "best",
    "best_of_each",
    "by_loss",
    "candidates",
    "choices",
    "finer_than_shards",
    "gain",
    "geomean",
    "loses",
    "middle",
    "quantile",
    "within",
]

RIGHT = 0.03  # a choice this much slower than the best point is right
LEAST_MS = 0.015  # what is slower than serial by less than this, or by RIGHT, is level with it


def candidates(case: Case) -> list[Point]:
    """Return ficco's right points of a case: neither serial nor what was chosen by itself."""
    return [p for p in case.points if p.ok and p.name not in ("serial", "auto")]


def best(case: Case) -> Point | None:
    """Return the fastest of ficco's right points that ran all rounds, else of those screened."""
    return min(candidates(case), key=_rank, default=None)


def _rank(point: Point) -> tuple[bool, float]:
    """Return what points are ranked by: the few runs of a screening make lucky ones too fast."""
    return point.screened, point.ms


def gain(case: Case) -> float | None:
    """Return serial's time over that of ficco's best; None where one of the two is missing."""
    found = best(case)
    return found.speedup if found is not None else None


def loses(case: Case) -> bool:
    """Whether ficco's best is slower than serial."""
    found = gain(case)
    return found is not None and found < 1.0


def within(case: Case) -> bool:
    """Whether ficco's best is slower than serial by no more than is taken for level."""
    found, serial = best(case), case.serial_ms
    if found is None or serial is None:
        return False
    return 0 < found.ms - serial <= max(RIGHT * serial, LEAST_MS)


def by_loss(cases: Iterable[Case]) -> list[Case]:
    """Return cases with the worst speed-up first; last those for which there is none."""
    return sorted(cases, key=lambda case: math.inf if (g := gain(case)) is None else g)


def best_of_each(case: Case) -> list[Point]:
    """Return the fastest right point of every schedule, fastest first, those screened last."""
    found: dict[str, Point] = {}
    for point in candidates(case):
        if point.name not in found or _rank(point) < _rank(found[point.name]):
            found[point.name] = point
    return sorted(found.values(), key=_rank)


def finer_than_shards(case: Case) -> float | None:
    """Return the best time with whole shards over the best with shards that are cut."""
    whole = [p.ms for p in candidates(case) if p.grain == 1]
    cut = [p.ms for p in candidates(case) if p.grain > 1]
    return min(whole) / min(cut) if whole and cut else None


def geomean(values: Sequence[float]) -> float | None:
    """Return the geometric mean; None of nothing."""
    return statistics.geometric_mean(values) if values else None


def middle(values: Sequence[float]) -> float | None:
    """Return the median; None of nothing."""
    return statistics.median(values) if values else None


def quantile(values: Sequence[float], part: float) -> float | None:
    """Return the smallest value that so large a part does not exceed; None of nothing."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(part * len(ranked)) - 1)] if ranked else None


@dataclass(frozen=True, slots=True)
class Taken:
    """What a way of choosing took in a case, beside the best point (serial is one, too)."""

    case: Case
    point: Point
    best: Point

    @property
    def loss(self) -> float:
        """How much longer the call lasts than with the best point; 0.1 is 10%."""
        return self.point.ms / self.best.ms - 1.0

    @property
    def right(self) -> bool:
        """Whether the loss is within RIGHT."""
        return self.loss <= RIGHT

    @property
    def slower_than_serial(self) -> bool:
        """Whether serial would have been faster by more than RIGHT."""
        serial = self.case.serial_ms
        return serial is not None and self.point.ms > (1 + RIGHT) * serial


@dataclass(frozen=True, slots=True)
class Choosing:
    """A way of choosing, over all cases in which it had a choice.

    Attributes:
        name, about: how the page calls it.
        taken: case by case, most lost first.
        reason: why there are none, if there are none.
    """

    name: str
    about: str
    taken: tuple[Taken, ...]
    reason: str = ""


Predictor = Callable[[Case, Facts, Machine], list[tuple[Point, float]]]


def choices(sweep: Sweep) -> list[Choosing]:
    """Return what the simulator, the rule and `auto` took, each among the points of the sweep.

    The simulator's predictions are those of the sweep, the rule is asked now; both take what
    `ficco.selector.decide` makes of them.
    """
    profile = sweep.head.get("profile")
    found = []
    if not sweep.simulated:
        found.append(_choosing(sweep, profile, _simulator, "simulator", "the points' predictions"))
    found.append(_choosing(sweep, profile, _rule, "rule", "the selector's formulas"))
    automatic = []
    for case in sweep.cases:
        auto = next((p for p in case.points if p.name == "auto"), None)
        fastest = _fastest(case)
        if auto is not None and fastest is not None:
            same = [p for p in case.points if p.ok and _plan_of(p) == _plan_of(auto)]
            automatic.append(Taken(case, min(same, key=_rank, default=auto), fastest))
    if automatic:
        found.append(Choosing("auto", "what ran when ficco chose", _ranked(automatic)))
    return found


def _plan_of(point: Point) -> dict[str, Any]:
    """Return what points have in common that are one plan by two names."""
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
    except FiccoError as problem:
        return Choosing(name, about, (), str(problem))
    reason = "" if taken else "no case has serial and another point with a prediction"
    return Choosing(name, about, _ranked(taken), reason)


def _take(case: Case, machine: Machine, predictor: Predictor) -> Taken | None:
    fastest = _fastest(case)
    if fastest is None:
        return None
    facts = facts_of(Problem.chunked(case.op, case.world, case.m, case.n, case.k, case.dtype))
    predicted = predictor(case, facts, machine)
    predicted.sort(key=lambda entry: entry[0].name != "serial")  # which `decide` wants first
    if len(predicted) < 2 or predicted[0][0].name != "serial":
        return None
    points = {Schedule.from_json(point.schedule): point for point, _ in predicted}
    asked = [(Schedule.from_json(point.schedule), ms) for point, ms in predicted]
    return Taken(case, points[decide(asked, facts, machine, "sweep").schedule], fastest)


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
