"""What an executor of a sweep works with: the cases, the journal, the time, and whom to tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ficco.machine import Machine
from ficco.sweeping.grid import Grid
from ficco.sweeping.journal import Journal
from ficco.sweeping.points import Case, Point
from ficco.sweeping.progress import Progress
from ficco.sweeping.results import screens

__all__ = ["Work"]


@dataclass(frozen=True)
class Work:
    """A sweep under way.

    Attributes:
        grid, cases: what is to be measured.
        machine: it runs on or is simulated for.
        world: ranks.
        journal: what has been.
        profile: to predict from; None: there is none.
        deadline: of `time.monotonic()`, after which nothing is begun.
        timeout_s: how long a wait within a call may last.
        progress: is told of every run.
        written: is called when a case has ended, to write the results.
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
        """Yield the cases that have not ended."""
        for case in self.cases:
            if case.shape.id not in self.journal.ended:
                yield case

    def able(self, case: Case) -> list[Point]:
        """Return the points of a case that can still be measured."""
        return [point for point in case.able if point.id not in self.journal.bad]

    def refuse(self, point: Point, reason: str, kind: str) -> None:
        """Write down why a point has no figures; `kind` is one of `ficco.sweeping.journal.BAD`."""
        self.journal.append(point.shape.id, id=point.id, bad=reason, kind=kind)
        self.progress.say(f"{point.id}: {reason}")

    def lack(self, case: Case, part: str, reason: str) -> None:
        """Write down why a part of a case, or a trace of one of its points, is not to be had."""
        self.journal.append(case.shape.id, part=part, bad=reason)
        self.progress.say(f"{case.shape.id}, {part}: {reason}")

    def end(self, case: Case) -> None:
        """Write down that nothing of a case is missing, and the results so far."""
        self.journal.append(case.shape.id, ended=True)
        self.progress.ended(case.shape.id)
        self.written()

    # ---- how much is to be done

    def runs_expected(self, case: Case) -> int:
        """Return how many runs a case takes if no point turns out bad."""
        able, grid = case.able, self.grid
        screened = [point for point in able if screens(point, grid)]
        full = len(able) - len(screened)
        for regime in case.regimes:
            full += min(grid.keep, sum(point.regime == regime for point in screened))
        return len(screened) * grid.screening + full * grid.rounds

    def runs_done(self, case: Case) -> int:
        """Return how many of them are in the journal, all of them where the case has ended."""
        if case.shape.id in self.journal.ended:
            return self.runs_expected(case)
        held = (self.journal.runs, self.journal.screens)
        return sum(len(runs.get(point.id, {})) for runs in held for point in case.able)
