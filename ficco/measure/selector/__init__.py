"""Choosing a schedule for a problem on a machine: by a book, by the simulator, or by a rule.

    choose(problem, machine)   a book's neighbourhood, else simulation of all candidates
    quick(problem, machine)    a book's neighbourhood, else the rule: for use inside a call
    automatic(problem, ...)    as `quick`, for a group, from the profile of its devices

`serial` is always a candidate, and is chosen if no schedule is predicted to gain more than MARGIN
over it. A finer schedule must also gain more than MARGIN over a plainer one. A choice depends only
on data that is equal on all ranks of a group, so all ranks make the same choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ficco.core import logs
from ficco.core.errors import InputError, duration_text
from ficco.core.machine import Machine
from ficco.measure.selector.book import Book, Point, environment_book, known
from ficco.measure.selector.candidates import are_few, candidates, plainness, serial
from ficco.measure.selector.facts import Facts, facts_of, near
from ficco.measure.selector.profiles import profile_for
from ficco.measure.selector.rule import MARGIN, in_regime, reasons, times_us
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.plan.timeline import REGIMES

__all__ = [
    "METHODS",
    "Book",
    "Choice",
    "Ranked",
    "automatic",
    "choose",
    "decide",
    "facts_of",
    "near",
    "plain",
    "profile_for",
    "quick",
    "ranked",
    "serial",
    "waits_for_peers",
]

METHODS = ("book", "simulator", "rule")
# A simulation of more than _MANY_RANKS takes long, so schedules that the rule expects to take over
# _HOPELESS times as long as its best are skipped. That changes the choice only if the simulator's
# best is among them. In four problems of 64 ranks the rule gave that schedule at most 1.7 times its
# best time.
_MANY_RANKS, _HOPELESS = 16, 2.0

Predicted = list[tuple[Schedule, float]]
Ranked = list[tuple[Schedule, float | None]]


@dataclass(frozen=True, slots=True)
class Choice:
    """A schedule and why.

    Attributes:
        schedule: the chosen schedule, resolved.
        predicted_ms: predicted ms per call, or the measured ms of a book or of `ficco.tune`; None:
            no profile. The
            rule predicts eager calls on GPUs for a host that does other work between them.
        by: one of METHODS, or "measurement": `ficco.tune` has timed the schedules.
        reasons: the reasons in words, the most important first.
        alternatives: other candidates with their ms, fastest first; from a book, only serial.
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
    report: Callable[[str], None] | None = None,
) -> Choice:
    """Choose by all available data: a book, else the simulator.

    Args:
        problem: the problem.
        machine: the profile to predict for; it needs rates.
        regime: how calls are made, one of `ficco.plan.timeline.REGIMES`.
        book: used instead of FICCO_BOOK and of the shipped book of this machine.
        by: one of METHODS, to use only this method.
        driver: driver version of the GPUs, which a book must match; None: unknown.
        report: is called with a progress text before each simulation.

    Raises:
        MachineError: the machine has no rates.
        InputError: `regime` or `by` is unknown, a requested book cannot be used, or FICCO_BOOK
            does not name a book.
    """
    _check(problem, machine, regime, by)
    if book is None:
        environment_book()  # raises if FICCO_BOOK is wrong, even if the book is not used
    facts = facts_of(problem)
    choice, passed = _by_book(facts, machine, regime, book, driver, by == "book")
    if choice is not None and by in (None, "book"):
        return choice
    if by == "book":
        raise InputError(
            f"no tuning table has {problem.op} {facts.m}x{facts.n}x{facts.k} ({problem.dtype}, "
            f"{problem.world} ranks, {regime}) in its neighbourhood{passed and ': ' + passed}; "
            "leave out --by (by=None), or measure the shape"
        )
    method = by or "simulator"
    if method == "rule":
        predicted = _by_rule(facts, machine, regime)
    else:
        from ficco.measure import simulator  # loads the native core

        points, note = _promising(facts, machine, regime)
        passed = "; ".join(filter(None, (passed, note)))
        predicted = []
        for number, schedule in enumerate(points, 1):
            if report is not None:
                report(f"simulates schedule {number} of {len(points)}")
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
    """Choose within a call, in about a millisecond, by a shipped book, else the rule.

    See `choose` and `automatic` for arguments and errors.
    """
    _check(problem, machine, regime, None)
    facts = near(facts_of(problem))
    return _quick(facts, machine, regime, driver, gates, alone, environment_book())


def automatic(
    problem: Problem,
    machine: Machine,
    device: str,
    regime: str,
    driver: str | None = None,
    gates: bool = True,
    alone: bool = True,
) -> Choice:
    """Choose for a group's call, as `quick`; serial if its devices have no profile.

    Args:
        problem: the problem.
        machine: the machine that the group was opened on; its engine can run the schedule.
        device: the driver's name of the group's devices; empty on the host engine.
        regime: how calls are made.
        driver: driver version of the devices, which a book must match; None: unknown.
        gates: whether ficco's own kernels are available for the arrays.
        alone: whether no other group uses the devices, so that kernels may wait for peers' kernels.

    Raises:
        MachineError: the profile of `machine` or FICCO_MACHINE does not fit.
    """
    environment_book()  # as in `choose`
    profile = profile_for(machine, device, problem.world)
    if profile is None:
        how = "" if device else f" --processes --ranks {problem.world}"
        reason = (
            f"there is no profile of {device or 'this machine'} with {problem.world} devices or "
            f"more, so nothing can be promised; `ficco doctor --profile FILE{how}` "
            "measures one, FICCO_MACHINE=FILE names it"
        )
    elif _is_known(problem, profile):
        return quick(problem, profile, regime, driver, gates, alone)
    else:
        reason = f"profile {profile.name} has no GEMM rate for {problem.dtype}"
    return plain(problem.world, machine, reason)


def ranked(
    problem: Problem,
    machine: Machine,
    device: str,
    regime: str,
    gates: bool = True,
    alone: bool = True,
) -> Ranked:
    """Return the schedules that a group's call can run, with ms, the fastest predictions first.

    Without a profile of the devices, `serial` is first, the others are in no order, and ms is None.

    Args and errors: as `automatic`; no book is read.
    """
    profile, facts = profile_for(machine, device, problem.world), facts_of(problem)
    if profile is None or not _is_known(problem, profile):
        return [(schedule, None) for schedule in candidates(facts, machine, gates, alone)]
    predicted = _by_rule(facts, profile, regime, gates, alone)
    return [*sorted(predicted, key=lambda entry: entry[1])]


def waits_for_peers(schedule: Schedule) -> bool:
    """Return whether a schedule's kernels wait for data from peers' kernels."""
    return schedule.transport == "sm" or schedule.sums == "within"


def _is_known(problem: Problem, profile: Machine) -> bool:
    """Return whether a profile has the rates that predictions for a problem need."""
    return problem.flow.pools or profile.multiplies(problem.dtype)


@lru_cache(maxsize=64)
def plain(world: int, machine: Machine, reason: str) -> Choice:
    """Return the choice of `serial` for a reason, without a prediction."""
    return Choice(serial(world, machine), None, "rule", (reason,), ())


@lru_cache(maxsize=4096)
def _quick(
    facts: Facts, machine: Machine, regime: str, driver: str | None, gates: bool, alone: bool,
    _book_name: str,
) -> Choice:  # fmt: skip
    """Return the choice of `quick`; `_book_name` is a part of the cache's key."""
    choice, passed = _by_book(facts, machine, regime, None, driver, False)
    if choice is not None:
        schedule = choice.schedule
        if (gates or schedule.compute != "gated") and (alone or not waits_for_peers(schedule)):
            return choice
    predicted = _by_rule(facts, machine, regime, gates, alone)
    return decide(predicted, facts, machine, "rule", passed)


def _by_rule(
    facts: Facts, machine: Machine, regime: str, gates: bool = True, alone: bool = True
) -> Predicted:
    points, eager = _times(facts, machine, gates, alone), regime == "eager"
    if eager:  # one choice serves calls back to back, and calls that are waited for
        waited = [in_regime(us, machine, point, "synchronized", True) for point, us in points]
        most = waited[0] * (1 + MARGIN)  # that of serial
        points = [each for each, us in zip(points, waited, strict=True) if us <= most]
    return [(point, in_regime(us, machine, point, regime, eager) / 1e3) for point, us in points]


@lru_cache(maxsize=16)  # a problem is asked for in two regimes, one after the other
def _times(
    facts: Facts, machine: Machine, gates: bool, alone: bool
) -> list[tuple[Schedule, tuple[float, float]]]:
    """Return the schedules that can run, with the times of a call on the devices and the host."""
    schedules = candidates(facts, machine, gates, alone)
    return [(schedule, times_us(facts, machine, schedule)) for schedule in schedules]


def _promising(facts: Facts, machine: Machine, regime: str) -> tuple[list[Schedule], str]:
    """Return the schedules to simulate, `serial` first, and a note on skipped ones, or ""."""
    predicted = _by_rule(facts, machine, regime)
    if facts.world <= _MANY_RANKS:
        return [schedule for schedule, _ in predicted], ""
    most = _HOPELESS * min(ms for _, ms in predicted)
    plain, *others = predicted
    promising = [plain[0], *(schedule for schedule, ms in others if ms <= most)]
    left = len(predicted) - len(promising)
    note = (
        f"{left} schedules that the rule expects to take over {_HOPELESS:g} times as long as the "
        "best of all were not simulated"
    )
    return promising, note if left else ""


def _by_book(
    facts: Facts, machine: Machine, regime: str, book: Book | None, driver: str | None,
    needed: bool,
) -> tuple[Choice | None, str]:  # fmt: skip
    """Return a choice by a book, or None and the reasons why books were skipped."""
    if not facts.plain:
        return None, "books hold only products along rows" if needed else ""
    books = known(machine.name) if book is None else [book]
    if not books:
        return None, "there is no tuning table of this machine" if needed else ""
    passed = []
    for candidate in books:
        if reason := candidate.unfit(machine, driver):
            if book is not None:
                raise InputError(
                    f"tuning table {book.name!r}: {reason}; measure it again, or leave it out"
                )
            passed.append(f"tuning table {candidate.name!r} is not used: {reason}")
            continue
        point = candidate.nearest(facts, regime)
        if point is not None and (are_few(facts) or not point.schedule.for_few_rows):
            return _of_book(candidate, point, facts, machine, driver), ""
        if book is not None:
            held = ", ".join(sorted({point.regime for point in candidate.points})) or "no"
            passed.append(
                f"tuning table {candidate.name!r} has no {regime} call of about this size, but "
                f"{held} calls"
            )
    return None, "; ".join(passed)


@lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    logs.log.warning("%s", text)


def _of_book(
    book: Book, point: Point, facts: Facts, machine: Machine, driver: str | None
) -> Choice:
    plain = serial(facts.world, machine)
    gain = f"{point.serial_ms / point.ms:.2f} times as fast as serial"
    driver_text = "" if book.driver == "host" else f" (CUDA driver API {book.driver})"
    reasons = [
        "no schedule was measured to be faster than serial" if point.schedule == plain
        else f"{gain} ({duration_text(point.serial_ms)})",
        f"measured {book.date} on {book.machine}{driver_text}: with one rank's GEMM of "
        f"{point.m}x{point.n}x{point.k} the call took {duration_text(point.ms)}",
    ]  # fmt: skip
    if caution := book.caution(driver):
        reasons.append(caution)
        _warn_once(f"tuning table {book.name!r}: {caution}; measure it again by `ficco sweep`")
    if point.distance(facts) > 1:
        reasons.append(
            "that is the nearest measured shape of one rank's GEMM; this problem's is "
            f"{facts.m}x{facts.n}x{facts.k}, and its time differs"
        )
    others = () if point.schedule == plain else ((plain, point.serial_ms),)
    return Choice(point.schedule, point.ms, "book", tuple(reasons), others)


def decide(
    predicted: Predicted, facts: Facts, machine: Machine, by: str, passed: str = ""
) -> Choice:
    """Choose the plainest schedule within MARGIN of the fastest; serial if none gains MARGIN.

    Args:
        predicted: schedules with ms per call, `serial` first.
        facts: facts of the problem, for the reasons.
        machine: the machine, for the reasons.
        by: the method of the predictions.
        passed: a last reason, or "".
    """
    plain, plain_ms = predicted[0]
    least = min(ms for _, ms in predicted)
    gains = [(s, ms) for s, ms in predicted if ms * (1 + MARGIN) <= plain_ms] or predicted
    near = [(schedule, ms) for schedule, ms in gains if ms <= least * (1 + MARGIN)]
    best, best_ms = min(near, key=lambda entry: plainness(entry[0]))
    notes = reasons(facts, machine, best)
    gain = plain_ms / best_ms if best_ms else 1.0
    if best is not plain and gain < 1 + MARGIN:
        notes.insert(
            0,
            f"{best.name} promises to be {gain:.3f} times as fast as serial, less than "
            f"{1 + MARGIN:g}",
        )
        best, best_ms = plain, plain_ms
    elif best is plain:
        notes.insert(0, "no schedule is expected to be faster than serial")
    else:
        notes.insert(0, f"{gain:.2f} times as fast as serial ({duration_text(plain_ms)})")
        first, first_ms = min(near, key=lambda entry: entry[1])
        if first_ms < best_ms:
            notes.insert(
                1,
                f"{first.name}, grain {first.grain_text}, is predicted to be "
                f"{best_ms / first_ms - 1:.1%} faster; of all within {MARGIN:.0%} the one with the "
                "fewest chunks is taken",
            )
    if passed:
        notes.append(passed)
    ranked = sorted(predicted, key=lambda entry: entry[1])
    others = tuple((schedule, ms) for schedule, ms in ranked if schedule is not best)
    return Choice(best, best_ms, by, tuple(notes), others)


def _check(problem: Problem, machine: Machine, regime: str, by: str | None) -> None:
    machine.check_rated(None if problem.flow.pools else problem.dtype)
    if regime not in REGIMES:
        raise InputError(f"regime {regime!r}: must be one of {', '.join(REGIMES)}")
    if by is not None and by not in METHODS:
        raise InputError(f"by {by!r}: must be one of {', '.join(METHODS)}")


def _point(schedule: Schedule) -> dict[str, Any]:
    """Return the JSON values that identify a point: schedule, grain, and axes that vary."""
    return {
        "schedule": schedule.name,
        "grain": schedule.chunks,
        "route": schedule.route,
        "order": schedule.order,
        "pace": schedule.pace,
        "taper": schedule.taper,
    }
