"""A whole sweep: open the folder, measure, and write the files after every shape."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ficco import __version__
from ficco.cli.sweeping.folder import (
    BOOK,
    RESULTS,
    TABLE,
    VERSION,
    gpus,
    opened,
    replaced,
    surroundings,
)
from ficco.cli.sweeping.grid import Grid
from ficco.cli.sweeping.journal import Journal
from ficco.cli.sweeping.points import Case, digest_of, expanded
from ficco.cli.sweeping.progress import Progress
from ficco.cli.sweeping.results import (
    Line,
    as_csv,
    as_lines,
    auto_slowdowns,
    best_spreads,
    book_of,
    lines,
    points_to_time,
    screens,
)
from ficco.cli.sweeping.work import Work
from ficco.core.errors import InputError
from ficco.core.machine import Machine
from ficco.measure.selector import Book, Choice, choose, quick
from ficco.operators.problem import Problem


@dataclass(frozen=True)
class SweepRequest:
    """The settings of a sweep.

    Attributes:
        grid: the cases to measure.
        folder: the folder for the results.
        machine: the machine to run on or to simulate.
        world: number of ranks.
        simulated: nothing runs.
        profile: profile to predict from and to choose by; None: there is none.
        profile_name: the profile's name for `Machine.named`.
        driver: the driver's CUDA version; None: no GPUs.
        book: the book that AUTO uses; None: that of calls.
        seconds: time limit of the whole sweep.
        timeout_s: longest wait within a call, in seconds.
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
    """The outcome of a sweep.

    Attributes:
        points: number of points of the grid.
        left: points that lack runs and have no reason for it.
        unended: shapes that lack anything, for example only a timeline.
        bad: number of bad points by kind of `ficco.cli.sweeping.journal.BAD`.
        why: the reason of the first bad point.
        slowdowns: by shape and regime, AUTO's time over that of the best point with all rounds.
        spreads: by shape and regime, the best point's interquartile range over its median.
        interrupted: whether the user ended the sweep.
        book: whether there is a book; `no_book`: why not.
    """

    points: int
    left: int = 0
    unended: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    why: str = ""
    slowdowns: dict[str, float] = field(default_factory=dict)
    spreads: dict[str, float] = field(default_factory=dict)
    interrupted: bool = False
    book: bool = False
    no_book: str = ""

    @property
    def done(self) -> int:
        """The number of points that have all their runs."""
        return self.points - self.left - sum(self.bad.values())


def run(request: SweepRequest) -> Outcome:
    """Measure the missing points of a folder, and write the results.

    Ctrl-C has the effect of a deadline: the results so far are written.

    Raises:
        InputError: the folder or the book is not usable; nothing was measured.
        EngineError: the GPUs cannot run ficco, or ranks end before they start to measure.
    """
    if request.simulated:  # the simulator is deterministic
        request = replace(request, grid=replace(request.grid, rounds=1, screening=0))
    grid, machine = request.grid, request.machine
    _check_book(request)
    cases = expanded(grid, machine, request.world, request.simulated, _chooser(request))
    journal, head = opened(request.folder, _head(request, cases))
    outcome = Outcome(sum(len(case.points) for case in cases))
    writer = _Writer(request, cases, head)
    with journal, Progress(len(cases)) as progress:
        work = Work(
            grid, cases, machine, request.world, journal, request.profile,
            time.monotonic() + request.seconds, request.timeout_s, progress,
            lambda: writer.write(journal),
        )  # fmt: skip
        progress.begin(
            sum(work.runs_expected(case) for case in cases),
            len(journal.ended.keys() & {case.shape.id for case in cases}),
            sum(work.runs_done(case) for case in cases),
        )
        try:
            _executor(request)(work)
        except KeyboardInterrupt:
            outcome.interrupted = True
        results = writer.write(journal)
        outcome.slowdowns, outcome.spreads = auto_slowdowns(results), best_spreads(results)
        for case in cases:
            ended = case.shape.id in journal.ended
            outcome.left += 0 if ended else _left(work, case)
            outcome.unended += not ended
            for point in case.points:
                bad_record = journal.bad.get(point.id, {})
                kind = "impossible" if point.reason else bad_record.get("kind")
                if kind:
                    outcome.why = outcome.why or point.reason or str(bad_record.get("bad", ""))
                    outcome.bad[kind] = outcome.bad.get(kind, 0) + 1
    outcome.book, outcome.no_book = writer.booked, writer.no_book
    return outcome


def _executor(request: SweepRequest) -> Callable[[Work], bool]:
    if request.simulated:
        from ficco.cli.sweeping.simulated import simulate

        return simulate
    if request.machine.engine == "host":
        from ficco.cli.sweeping.host import measure as on_host

        return on_host
    from ficco.cli.sweeping.gpu.session import measure as on_gpus

    return on_gpus


def _left(work: Work, case: Case) -> int:
    """Return the number of points of an unfinished case that lack runs.

    Once a regime is screened, the points that are not kept lack none.
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
            [p for p in points if not screens(p, grid)]
            if missing
            else points_to_time(points, journal, grid)
        )
        missing |= {point.id for point in due if journal.missing(point.id, grid.rounds)}
        left += len(missing)
    return left


def _check_book(request: SweepRequest) -> None:
    """Refuse an unsuitable book before anything is measured."""
    if request.book is None:
        return
    if not request.grid.chooses:
        raise InputError(
            f"--book: grid {request.grid.name!r} has no schedule 'auto', which would use it; "
            "add it, or leave --book out"
        )
    if request.profile is None:
        raise InputError("--book: there is no profile of this machine, so nothing uses the table")
    if reason := request.book.unfit(request.profile, request.driver):
        raise InputError(
            f"--book {request.book.name}: {reason}; sweep this machine for a table of its own, or "
            "leave --book out"
        )


def _chooser(request: SweepRequest) -> Callable[[Problem, str], Choice]:
    """Return AUTO's selector: it uses the book if it has the shape, else it works as in a call."""

    def selected(problem: Problem, regime: str) -> Choice:
        if request.profile is None:
            raise InputError(
                "there is no profile of this machine to choose by; `ficco doctor --profile FILE` "
                "measures one, --machine FILE selects it"
            )
        if request.book is not None:
            try:
                return choose(
                    problem,
                    request.profile,
                    regime,
                    book=request.book,
                    by="book",
                    driver=request.driver,
                )
            except InputError:
                pass  # the book lacks the shape
        return quick(problem, request.profile, regime, request.driver)

    return selected


def _head(request: SweepRequest, cases: tuple[Case, ...]) -> dict[str, Any]:
    """Return a folder's head; a sweep continues in a folder with an equal head."""
    grid, machine, here = request.grid, request.machine, surroundings()
    executed = not request.simulated
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
        "world": request.world,
        "profile": request.profile_name,
        "driver": request.driver or "host",
        "book": None if request.book is None else _digest(request.book.points),
        "ficco": __version__,
        "rounds": grid.rounds, "screening": grid.screening, "keep": grid.keep,
        "assumptions": list(grid.assumptions),
        "date": here.pop("date"),
    }  # fmt: skip
    if executed:  # simulations do not depend on the surroundings
        head |= here
        if on_gpus:
            about = gpus()
            head["versions"] |= about.pop("more")
            head |= about
    return head


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


class _Writer:
    """Writes a folder's results, table and book from its journal."""

    def __init__(
        self, request: SweepRequest, cases: tuple[Case, ...], head: dict[str, Any]
    ) -> None:
        self._request, self._cases, self._head = request, cases, head
        self.booked, self.no_book = False, ""

    def write(self, journal: Journal) -> list[Line]:
        """Rewrite all three files; return the results."""
        request = self._request
        results = lines(self._cases, journal, request.grid, request.profile)
        replaced(request.folder / RESULTS, as_lines(results))
        replaced(request.folder / TABLE, as_csv(results))
        self._write_book(results)
        return results

    def _write_book(self, results: list[Line]) -> None:
        request = self._request
        if request.simulated:
            self.no_book = "nothing was measured, so there is no tuning table"
            return
        if request.profile is None or not request.profile.rated:
            self.no_book = (
                f"no tuning table: machine {request.machine.name!r} has no rates, so nothing "
                "chooses on it; `ficco doctor --profile FILE` measures rates, --machine FILE uses "
                "them"
            )
            return
        book = book_of(
            results,
            request.profile,
            self._head["driver"],
            self._head["date"],
            request.grid.name,
        )
        if book is None:
            self.no_book = "no tuning table yet: no shape has all its runs"
            return
        text = book.to_toml(f"Written by ficco sweep, of the grid {request.grid.name}.")
        replaced(request.folder / BOOK, text)
        self.booked, self.no_book = True, ""
