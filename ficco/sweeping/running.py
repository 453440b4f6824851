"""A sweep from its grid to its files: opened, measured, and written after every shape."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ficco import __version__
from ficco.errors import InputError
from ficco.machine import Machine
from ficco.problem import Problem
from ficco.selector import Book, Choice, choose, quick
from ficco.sweeping.booking import book_of
from ficco.sweeping.folder import BOOK, RESULTS, TABLE, VERSION, opened, replaced
from ficco.sweeping.grid import Grid
from ficco.sweeping.journal import Journal
from ficco.sweeping.points import Case, digest_of, expanded
from ficco.sweeping.progress import Progress
from ficco.sweeping.results import Line, as_csv, as_lines, auto_behind, kept, lines, screens
from ficco.sweeping.surroundings import gpus, surroundings
from ficco.sweeping.work import Work

__all__ = ["Asked", "Outcome", "run"]


@dataclass(frozen=True)
class Asked:
    """What a sweep is asked for.

    Attributes:
        grid: what is measured.
        folder: where it is written.
        machine: it runs on or is simulated for.
        world: ranks.
        simulated: nothing runs.
        profile: to predict from and to choose by; None: there is none.
        profile_name: as `Machine.named` takes it.
        driver: CUDA version that the driver serves; None: no GPUs.
        book: that AUTO chooses by; None: as calls do.
        seconds: for all of it.
        timeout_s: how long a wait within a call may last.
    """

    grid: Grid
    folder: Path
    machine: Machine
    world: int
    simulated: bool
    profile: Machine | None
    profile_name: str | None
    driver: str | None = None
    book: Book | None = None
    seconds: float = math.inf
    timeout_s: float = 30.0


@dataclass
class Outcome:
    """How a sweep ended.

    Attributes:
        points: of the grid.
        left: that have fewer runs than they are to have, and no reason for it.
        unended: shapes of which anything is missing, be it a timeline alone.
        bad: per kind of `ficco.sweeping.journal.BAD`, how many.
        why: the reason of the first of these.
        behind: per shape and regime, how much longer AUTO took than the best point with all rounds.
        interrupted: whether the user ended it.
        book: whether there is one; `no_book`: why not.
    """

    points: int
    left: int = 0
    unended: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    why: str = ""
    behind: dict[str, float] = field(default_factory=dict)
    interrupted: bool = False
    book: bool = False
    no_book: str = ""

    @property
    def done(self) -> int:
        """How many points have all their runs."""
        return self.points - self.left - sum(self.bad.values())


def run(asked: Asked) -> Outcome:
    """Measure what is missing in a folder, and write its results.

    Ctrl-C ends it like a deadline: results are written of what there is.

    Raises:
        InputError: the folder or the book cannot serve; nothing was measured.
        EngineError: the GPUs cannot run ficco, or ranks end before they have begun.
    """
    if asked.simulated:  # the simulator says the same every time
        asked = replace(asked, grid=replace(asked.grid, rounds=1, screening=0))
    grid, machine = asked.grid, asked.machine
    _check_book(asked)
    cases = expanded(grid, machine, asked.world, asked.simulated, _chooser(asked))
    journal, head = opened(asked.folder, _head(asked, cases))
    outcome = Outcome(sum(len(case.points) for case in cases))
    writer = _Writer(asked, cases, head)
    with journal, Progress(len(cases)) as progress:
        work = Work(
            grid, cases, machine, asked.world, journal, asked.profile,
            time.monotonic() + asked.seconds, asked.timeout_s, progress,
            lambda: writer.write(journal),
        )  # fmt: skip
        progress.begin(
            sum(work.runs_expected(case) for case in cases),
            len(journal.ended & {case.shape.id for case in cases}),
            sum(work.runs_done(case) for case in cases),
        )
        try:
            _executor(asked)(work)
        except KeyboardInterrupt:
            outcome.interrupted = True
        outcome.behind = auto_behind(writer.write(journal))
        for case in cases:
            ended = case.shape.id in journal.ended
            outcome.left += 0 if ended else _left(work, case)
            outcome.unended += not ended
            for point in case.points:
                refused = journal.bad.get(point.id, {})
                kind = "impossible" if point.reason else refused.get("kind")
                if kind:
                    outcome.why = outcome.why or point.reason or str(refused.get("bad", ""))
                    outcome.bad[kind] = outcome.bad.get(kind, 0) + 1
    outcome.book, outcome.no_book = writer.booked, writer.no_book
    return outcome


def _executor(asked: Asked) -> Callable[[Work], bool]:
    if asked.simulated:
        from ficco.sweeping.simulated import simulate

        return simulate
    if asked.machine.engine == "host":
        from ficco.sweeping.host import measure as on_host

        return on_host
    from ficco.sweeping.gpu.session import measure as on_gpus

    return on_gpus


def _left(work: Work, case: Case) -> int:
    """Return how many points of a case that has not ended are missing runs.

    Once a regime is screened, those that are not kept are missing none.
    """
    journal, grid = work.journal, work.grid
    left = 0
    for regime in case.regimes:
        points = [point for point in work.able(case) if point.regime == regime]
        missing = {
            point.id
            for point in points
            if screens(point, grid) and len(journal.screens.get(point.id, {})) < grid.screening
        }
        due = (
            [p for p in points if not screens(p, grid)] if missing else kept(points, journal, grid)
        )
        missing |= {point.id for point in due if journal.missing(point.id, grid.rounds)}
        left += len(missing)
    return left


def _check_book(asked: Asked) -> None:
    """Refuse a book that must not be used here, before anything is measured."""
    if asked.book is None:
        return
    if not asked.grid.chooses:
        raise InputError(
            f"--book: grid {asked.grid.name!r} has no schedule 'auto', which would choose by it; "
            "add it, or leave the book out"
        )
    if asked.profile is None:
        raise InputError("--book: there is no profile of this machine, so nothing chooses by it")
    if reason := asked.book.unfit(asked.profile, __version__, asked.driver):
        raise InputError(
            f"--book {asked.book.name}: {reason}; sweep this machine for a book of its own, or "
            "leave it out"
        )


def _chooser(asked: Asked) -> Callable[[Problem, str], Choice]:
    """Return what AUTO takes: by the book where it has the shape, else as a call does."""

    def chosen(problem: Problem, regime: str) -> Choice:
        if asked.profile is None:
            raise InputError(
                "there is no profile of this machine to choose by; `ficco doctor --profile FILE` "
                "measures one, --machine FILE names it"
            )
        if asked.book is not None:
            try:
                return choose(
                    problem, asked.profile, regime, book=asked.book, by="book", driver=asked.driver
                )
            except InputError:
                pass  # a shape that the book does not have
        return quick(problem, asked.profile, regime, asked.driver)

    return chosen


def _head(asked: Asked, cases: tuple[Case, ...]) -> dict[str, Any]:
    """Return what a folder's head says; of two equal heads one sweep can go on."""
    grid, machine, here = asked.grid, asked.machine, surroundings()
    executed = not asked.simulated
    on_gpus = executed and machine.engine != "host"
    head: dict[str, Any] = {
        "version": VERSION, "grid": grid.name, "about": grid.about,
        "digest": digest_of(grid, cases),
        "points": sum(len(case.points) for case in cases),
        "how": "executed" if executed else "simulated",
        "paced": executed and machine.paced,
        "machine": {
            "name": machine.name, "about": machine.about, "devices": machine.ranks,
            "engine": machine.engine, "digest": _digest(asdict(machine)),
        },
        "world": asked.world,
        "profile": asked.profile_name,
        "driver": asked.driver or "host",
        "book": None if asked.book is None else _digest(asked.book.points),
        "ficco": __version__,
        "rounds": grid.rounds, "screening": grid.screening, "keep": grid.keep,
        "assumptions": list(grid.assumptions),
        "date": here.pop("date"),
    }  # fmt: skip
    if executed:  # what is simulated is the same everywhere
        head |= here
        if on_gpus:
            about = gpus()
            head["versions"] |= about.pop("more")
            head |= about
    return head


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


class _Writer:
    """Writes results, table and book of a folder from its journal."""

    def __init__(self, asked: Asked, cases: tuple[Case, ...], head: dict[str, Any]) -> None:
        self._asked, self._cases, self._head = asked, cases, head
        self.booked, self.no_book = False, ""

    def write(self, journal: Journal) -> list[Line]:
        """Rewrite them all; return the results."""
        asked = self._asked
        found = lines(self._cases, journal, asked.grid, asked.profile)
        replaced(asked.folder / RESULTS, as_lines(found))
        replaced(asked.folder / TABLE, as_csv(found))
        self._write_book(found)
        return found

    def _write_book(self, found: list[Line]) -> None:
        asked = self._asked
        if asked.simulated:
            self.no_book = "nothing was measured, so there is no book"
            return
        if asked.profile is None or not asked.profile.rated:
            self.no_book = (
                f"no book: machine {asked.machine.name!r} has no rates, so nothing chooses on it; "
                "`ficco doctor --profile FILE` measures them, --machine FILE takes them"
            )
            return
        book = book_of(
            found, asked.profile.name, self._head["driver"], self._head["date"], asked.grid.name
        )
        if book is None:
            self.no_book = "no book yet: no shape has all its runs"
            return
        text = book.to_toml(f"Written by ficco sweep, of the grid {asked.grid.name}.")
        replaced(asked.folder / BOOK, text)
        self.booked, self.no_book = True, ""
