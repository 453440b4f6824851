"""The context of a sweep's executor: cases, journal, deadline and progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ficco.cli.sweeping.grid import Grid
from ficco.cli.sweeping.journal import Journal
from ficco.cli.sweeping.points import Case, Point
from ficco.cli.sweeping.progress import Progress
from ficco.cli.sweeping.results import screens
from ficco.core.machine import Machine


@dataclass(frozen=True)
class Work:
    """A running sweep.

    Attributes:
        grid, cases: the points to measure.
        machine: the machine to run on or to simulate.
        world: number of ranks.
        journal: the measurements so far.
        profile: profile to predict from; None: there is none.
        deadline: value of `time.monotonic()` after which nothing is started.
        timeout_s: longest wait within a call, in seconds.
        progress: receives every run.
        written: is called after each case, to write the results.
    """

    grid: Grid
    cases: tuple[Case, ...]
    machine: Machine
    world: int
    journal: Journal
    profile: Machine | None
    deadline: float
    timeout_s: float
    progress: Progress
    written: Callable[[], object]

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.deadline

    @property
    def left_s(self) -> float:
        """Seconds until the time is up."""
        return self.deadline - time.monotonic()

    def remaining(self) -> Iterator[Case]:
        """Yield the incomplete cases."""
        for case in self.cases:
            if case.shape.id not in self.journal.ended:
                yield case

    def able(self, case: Case) -> list[Point]:
        """Return the points of a case that can still be measured."""
        return [point for point in case.able if point.id not in self.journal.bad]

    def refuse(self, point: Point, reason: str, kind: str) -> None:
        """Record why a point has no figures; `kind` is one of `ficco.cli.sweeping.journal.BAD`."""
        self.journal.append(point.shape.id, id=point.id, bad=reason, kind=kind)
        self.progress.say(f"{point.id}: {reason}")

    def lack(self, case: Case, part: str, reason: str) -> None:
        """Record why a part of a case, or a trace of one of its points, is missing."""
        self.journal.append(case.shape.id, part=part, bad=reason)
        self.progress.say(f"{case.shape.id}, {part}: {reason}")

    def end(self, case: Case) -> None:
        """Record that a case is complete, and write the results so far."""
        self.journal.append(case.shape.id, ended=True)
        self.progress.ended(case.shape.id)
        self.written()

    # ---- amount of work

    def runs_expected(self, case: Case) -> int:
        """Return the number of runs of a case if no point turns out bad."""
        able, grid = case.able, self.grid
        screened = [point for point in able if screens(point, grid)]
        full = len(able) - len(screened)
        for regime in case.regimes:
            full += min(grid.keep, sum(point.regime == regime for point in screened))
        return len(screened) * grid.screening + full * grid.rounds

    def runs_done(self, case: Case) -> int:
        """Return how many of these runs are in the journal; all of them if the case has ended."""
        if case.shape.id in self.journal.ended:
            return self.runs_expected(case)
        recorded = (self.journal.runs, self.journal.screens)
        return sum(len(runs.get(point.id, {})) for runs in recorded for point in case.able)
