"""Choosing a schedule for a problem on a machine: by a book, by the simulator, or by a rule.

    choose(problem, machine)   a book's neighbourhood, else simulation of all candidates
    quick(problem, machine)    a book's neighbourhood, else the rule: for use inside a call
    automatic(problem, ...)    the same for a group, from the profile of its devices

`serial` is always a candidate: where nothing promises more than MARGIN over it, it is chosen. Nor
is a finer schedule taken for less than that over a plainer one. A choice follows from what all
ranks of a group know alike, so all come to the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ficco import logs
from ficco.errors import InputError
from ficco.machine import Machine
from ficco.problem import Problem
from ficco.schedule import Schedule
from ficco.selector.book import Book, Point, given, known
from ficco.selector.candidates import are_few, candidates, plainness, serial
from ficco.selector.facts import Facts, facts_of
from ficco.selector.profiles import profile_for
from ficco.selector.rule import MARGIN, estimate_us, reasons
from ficco.timeline import REGIMES

__all__ = ["METHODS", "Book", "Choice", "automatic", "choose", "decide", "profile_for", "quick"]

METHODS = ("book", "simulator", "rule")
# Of more ranks than these a simulation takes long: what the rule expects to take so many times as
# long as the best is not simulated. Rule and simulator differ by less than half of that.
_MANY_RANKS, _HOPELESS = 16, 4.0

Predicted = list[tuple[Schedule, float]]


@dataclass(frozen=True, slots=True)
class Choice:
    """A schedule and why.

    Attributes:
        schedule: resolved.
        predicted_ms: of a call with it; by a book, what was measured; None: there is no profile.
        by: one of METHODS.
        reasons: in words, the weightiest first.
        alternatives: other candidates with their predictions, fastest first; of a book, serial.
    """

    schedule: Schedule
    predicted_ms: float | None
    by: str
    reasons: tuple[str, ...]
    alternatives: tuple[tuple[Schedule, float], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the choice as JSON values."""
        return {
            "choice": _point(self.schedule),
            "predicted_ms": None if self.predicted_ms is None else round(self.predicted_ms, 5),
            "by": self.by,
            "reasons": list(self.reasons),
            "alternatives": [
                {**_point(schedule), "predicted_ms": round(ms, 5)}
                for schedule, ms in self.alternatives
            ],
        }


def choose(
    problem: Problem,
    machine: Machine,
    regime: str = "captured",
    *,
    book: Book | None = None,
    by: str | None = None,
    driver: str | None = None,
    told: Callable[[str], None] | None = None,
) -> Choice:
    """Choose with all that is known: a book, else the simulator.

    Args:
        problem: what is asked.
        machine: where it runs; it needs rates.
        regime: how calls are made, one of `ficco.timeline.REGIMES`.
        book: instead of FICCO_BOOK's and the shipped one of this machine.
        by: one of METHODS, to be used alone.
        driver: of the GPUs at hand, for which a book must have been measured; None: not known.
        told: is called with what is being done, again and again.

    Raises:
        MachineError: the machine has no rates.
        InputError: `regime` or `by` is none, or a book that is asked for cannot serve;
            or FICCO_BOOK names none.
    """
    _check(problem, machine, regime, by)
    if book is None:
        given()  # which refuses what names no book, whether it is looked at or not
    facts = facts_of(problem)
    found, passed = _by_book(facts, machine, regime, book, driver, by == "book")
    if found is not None and by in (None, "book"):
        return found
    if by == "book":
        raise InputError(
            f"no book has {problem.op} {facts.m}x{facts.n}x{facts.k} ({problem.dtype}, "
            f"{problem.world} ranks, {regime}) in its neighbourhood{passed and ': ' + passed}; "
            "leave the method open, or measure the shape"
        )
    method = by or "simulator"
    if method == "rule":
        predicted = _by_rule(facts, machine, regime)
    else:
        from ficco import simulator  # loads the native core

        points, said = _promising(facts, machine, regime)
        passed = "; ".join(filter(None, (passed, said)))
        predicted = []
        for number, schedule in enumerate(points, 1):
            if told is not None:
                told(f"simulates schedule {number} of {len(points)}")
            ms = simulator.predict_ms(problem, schedule, machine, regime)
            predicted.append((schedule, ms))
    return decide(predicted, facts, machine, method, passed)


def quick(
    problem: Problem,
    machine: Machine,
    regime: str = "eager",
    driver: str | None = None,
    gates: bool = True,
    alone: bool = True,
) -> Choice:
    """Choose within a call, in a fraction of a millisecond: a shipped book, else the rule.

    Arguments and errors are those of `choose` and `automatic`.
    """
    _check(problem, machine, regime, None)
    return _quick(facts_of(problem), machine, regime, driver, gates, alone, given())


def automatic(
    problem: Problem,
    machine: Machine,
    device: str,
    regime: str,
    driver: str | None = None,
    gates: bool = True,
    alone: bool = True,
) -> Choice:
    """Choose for a group's call, as `quick`; serial where no profile of its devices is known.

    Args:
        problem: what is asked.
        machine: that the group was opened on; the schedule suits its engine.
        device: what the driver calls its devices; empty on the host engine.
        regime: how calls are made.
        driver: of the devices, for which a book must have been measured; None: not known.
        gates: whether there are ficco's own kernels for the arrays.
        alone: whether no other group works on the devices, so that kernels may wait for peers'.

    Raises:
        MachineError: the profile that was given does not fit.
    """
    given()  # as in `choose`
    profile = profile_for(machine, device, problem.world)
    pools = problem.flow.pools
    if profile is None:
        how = "" if device else f" --processes --ranks {problem.world}"
        reason = (
            f"there is no profile of {device or 'this machine'} with {problem.world} devices or "
            f"more, so nothing can be promised; `ficco doctor --profile FILE{how}` "
            "measures one, FICCO_MACHINE=FILE names it"
        )
    elif pools or profile.multiplies(problem.dtype):
        return quick(problem, profile, regime, driver, gates, alone)
    else:
        reason = f"profile {profile.name} has no GEMM rate for {problem.dtype}"
    return _unknown(problem.world, machine, reason)


@lru_cache(maxsize=64)
def _unknown(world: int, machine: Machine, reason: str) -> Choice:
    return Choice(serial(world, machine), None, "rule", (reason,), ())


@lru_cache(maxsize=4096)
def _quick(
    facts: Facts, machine: Machine, regime: str, driver: str | None, gates: bool, alone: bool,
    _given: str,
) -> Choice:  # fmt: skip
    """Return what `quick` does; `_given` is there so that another book is another answer."""
    found, passed = _by_book(facts, machine, regime, None, driver, False)
    if found is not None:
        taken = found.schedule
        waits = taken.transport == "sm" or taken.sums == "within"
        if (gates or taken.compute != "gated") and (alone or not waits):
            return found
    predicted = _by_rule(facts, machine, regime, gates, alone)
    return decide(predicted, facts, machine, "rule", passed)


def _by_rule(
    facts: Facts, machine: Machine, regime: str, gates: bool = True, alone: bool = True
) -> Predicted:
    found = candidates(facts, machine, gates, alone)
    return [(each, estimate_us(facts, machine, each, regime) / 1e3) for each in found]


def _promising(facts: Facts, machine: Machine, regime: str) -> tuple[list[Schedule], str]:
    """Return the schedules to simulate, `serial` first; and words on the others, or nothing."""
    every = _by_rule(facts, machine, regime)
    if facts.world <= _MANY_RANKS:
        return [schedule for schedule, _ in every], ""
    most = _HOPELESS * min(ms for _, ms in every)
    plain, *others = every
    found = [plain[0], *(schedule for schedule, ms in others if ms <= most)]
    left = len(every) - len(found)
    said = (
        f"{left} schedules that the rule expects to take over {_HOPELESS:g} times as long as the "
    )
    return found, f"{said}best of all were not simulated" if left else ""


def _by_book(
    facts: Facts, machine: Machine, regime: str, book: Book | None, driver: str | None,
    needed: bool,
) -> tuple[Choice | None, str]:  # fmt: skip
    """Return a choice by a book, and why there is none if a book was passed over."""
    if not facts.plain:
        return None, "books hold products along rows alone" if needed else ""
    books = known(machine.name) if book is None else [book]
    if not books:
        return None, "there is none of this machine" if needed else ""
    passed = []
    for found in books:
        if reason := found.unfit(machine, driver):
            if book is not None:
                raise InputError(f"book {book.name!r}: {reason}; measure it again, or leave it out")
            passed.append(f"book {found.name!r} was passed over: {reason}")
            continue
        point = found.nearest(facts, regime)
        if point is not None and (are_few(facts) or point.schedule.transport != "sm"):
            return _of_book(found, point, facts, machine, driver), ""
        if book is not None:
            held = ", ".join(sorted({point.regime for point in found.points})) or "no"
            passed.append(
                f"book {found.name!r} has no {regime} call of about this size, but {held} calls"
            )
    return None, "; ".join(passed)


@lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    logs.log.warning("%s", text)


def _of_book(
    found: Book, point: Point, facts: Facts, machine: Machine, driver: str | None
) -> Choice:
    measured = f"{point.m}x{point.n}x{point.k} took {point.ms:.3f} ms, serial {point.serial_ms:.3f}"
    reasons = [f"measured {found.date} on {found.machine} (driver {found.driver}): {measured}"]
    if caution := found.caution(driver):
        reasons.append(caution)
        _warn_once(f"book {found.name!r}: {caution}; measure it again by `ficco sweep`")
    if point.distance(facts) > 1:
        reasons.append(
            "that is the nearest shape that was measured, of one rank's GEMM; here it is "
            f"{facts.m}x{facts.n}x{facts.k}, and takes another time"
        )
    plain = serial(facts.world, machine)
    others = () if point.schedule == plain else ((plain, point.serial_ms),)
    return Choice(point.schedule, point.ms, "book", tuple(reasons), others)


def decide(
    predicted: Predicted, facts: Facts, machine: Machine, by: str, passed: str = ""
) -> Choice:
    """Take the plainest of those within MARGIN of the fastest; serial where no gain is promised.

    Args:
        predicted: schedules with ms a call, `serial` first.
        facts: of the problem, for the reasons.
        machine: it runs on, likewise.
        by: where the predictions are from.
        passed: a last reason, if there is one.
    """
    plain, plain_ms = predicted[0]
    least = min(ms for _, ms in predicted)
    gains = [(s, ms) for s, ms in predicted if ms * (1 + MARGIN) <= plain_ms] or predicted
    near = [(schedule, ms) for schedule, ms in gains if ms <= least * (1 + MARGIN)]
    best, best_ms = min(near, key=lambda entry: plainness(entry[0]))
    said = reasons(facts, machine, best)
    gain = plain_ms / best_ms if best_ms else 1.0
    if best is not plain and gain < 1 + MARGIN:
        said.insert(0, f"{best.name} promises {gain:.3f}x of serial, less than {1 + MARGIN:g}x")
        best, best_ms = plain, plain_ms
    elif best is plain:
        said.insert(0, "nothing promises to be faster than serial")
    else:
        said.insert(0, f"{gain:.2f}x of serial, which takes {plain_ms:.3f} ms")
        first, first_ms = min(near, key=lambda entry: entry[1])
        if first_ms < best_ms:
            said.insert(
                1,
                f"{first.name}, grain {first.grain_text}, is predicted to be "
                f"{best_ms / first_ms - 1:.1%} faster; of all within {MARGIN:.0%} the one with the "
                "fewest chunks is taken",
            )
    if passed:
        said.append(passed)
    ranked = sorted(predicted, key=lambda entry: entry[1])
    others = tuple((schedule, ms) for schedule, ms in ranked if schedule is not best)
    return Choice(best, best_ms, by, tuple(said), others)


def _check(problem: Problem, machine: Machine, regime: str, by: str | None) -> None:
    machine.check_rated(None if problem.flow.pools else problem.dtype)
    if regime not in REGIMES:
        raise InputError(f"regime {regime!r}: it is one of {', '.join(REGIMES)}")
    if by is not None and by not in METHODS:
        raise InputError(f"by {by!r}: it is one of {', '.join(METHODS)}")


def _point(schedule: Schedule) -> dict[str, Any]:
    """Return what names a point: the schedule, its grain, and axes that it may differ in."""
    return {
        "schedule": schedule.name,
        "grain": schedule.chunks,
        "route": schedule.route,
        "order": schedule.order,
        "pace": schedule.pace,
        "taper": schedule.taper,
    }
