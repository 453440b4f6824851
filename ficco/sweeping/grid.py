"""Grids: TOML files that say what a sweep measures. Read and checked here, expanded in `points`.

    about = "one line on what it is for"
    assumptions = ["what a reader of the results must know"]
    how = "simulated"          # or "executed" (where left out)
    machine = "mesh4"          # to simulate, or to run as; left out: as ficco run has it
    ranks = 4                  # left out: as the commands have it
    rounds = 20                # timed runs of a point
    screening = 3              # first so many runs of every point ...
    keep = 2                   # ... then `rounds` of the best of each shape and regime; 0: of all

    [[cases]]
    op = "all_gather_matmul"   # or several
    shapes = [[8192, 10240, 8192]]       # m, n, k over all ranks
    m_each = true              # m is rows on each rank instead
    dtypes = ["bfloat16"]      # left out: float32 on the host engine, else bfloat16
    regimes = ["captured", "eager"]      # left out: captured; on the host engine synchronized
    schedules = ["auto", "gated_1d", { name = "hetero_unfused_1d", pace = "in_step" }]
    grains = [1, 2, "world"]   # of schedules that have none of their own; left out: theirs

Sizes are from 1 to 2147483647, over all ranks. `serial` is always a point. Where `schedules` is
left out, all that the operator has are points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from ficco import data, registry
from ficco.errors import InputError, MachineError, ScheduleError, closest
from ficco.machine import Machine
from ficco.problem import DTYPES, MAX_WORLD, MOST
from ficco.schedule import MAX_CHUNKS, Schedule
from ficco.selector.candidates import few_rows
from ficco.sweeping.lines import line_of
from ficco.timeline import REGIMES

__all__ = ["AUTO", "HOW", "Cases", "Grid"]

HOW = ("executed", "simulated")
AUTO = "auto"  # a schedule's name in a grid: what the selector takes
MOST_ROUNDS = 1000
Sizes = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Cases:
    """An entry of a grid: operators on shapes, and what is tried on them.

    Attributes:
        op: operators.
        shapes: m, n, k over all ranks.
        m_each: m is rows on each rank instead.
        dtypes, regimes: empty: what suits the machine.
        schedules: names, or schedules with axes of their own; empty: all that an operator has.
        grains: chunks per shard, for schedules that leave it open; empty: the schedule's.
    """

    op: tuple[str, ...]
    shapes: tuple[Sizes, ...]
    m_each: bool = False
    dtypes: tuple[str, ...] = ()
    regimes: tuple[str, ...] = ()
    schedules: tuple[str | Schedule, ...] = ()
    grains: tuple[int | str, ...] = ()

    def asked(self, op: str, m: int) -> tuple[str | Schedule, ...]:
        """Return the schedules to try on so many rows; AUTO stays what it is.

        Raises:
            ScheduleError: one does not exist.
        """
        named = self.schedules
        if not named:
            named = tuple(
                name
                for name in Schedule.names(op)
                if m <= few_rows(op) or Schedule.named(name).transport != "sm"
            )
        found: list[str | Schedule] = [Schedule.named("serial")]
        for entry in named:
            if entry == AUTO:
                found.append(AUTO)
                continue
            schedule = entry if isinstance(entry, Schedule) else Schedule.named(entry)
            open_grain = schedule.grain == "world"
            grains = self.grains if open_grain and self.grains else (schedule.grain,)
            found += [replace(schedule, grain=grain) for grain in grains]
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Grid:
    """What a sweep measures, and how often.

    Attributes:
        name: how messages and results call it.
        cases: in the order of results.
        about, assumptions: for readers of the results.
        how: one of HOW.
        machine: a profile's name or file; empty: left open.
        ranks: 0: left open.
        rounds: timed runs of a point.
        screening: runs of all points first; 0: all points have `rounds`.
        keep: how many of each shape and regime go on to `rounds`; serial and AUTO always do.
    """

    name: str
    cases: tuple[Cases, ...]
    about: str = ""
    assumptions: tuple[str, ...] = ()
    how: str = "executed"
    machine: str = ""
    ranks: int = 0
    rounds: int = 20
    screening: int = 0
    keep: int = 2

    @classmethod
    def named(cls, name: str) -> Grid:
        """Read a shipped grid, or a file where the name ends in .toml.

        Raises:
            InputError: there is none, or it is no grid.
        """
        table = data.load("sweeps", name, "grid", InputError)
        text = data.text("sweeps", name, "grid", InputError)
        return cls.from_toml(table, Path(name).stem if name.endswith(".toml") else name, text)

    @classmethod
    def from_toml(cls, table: Mapping[str, Any], name: str, text: str = "") -> Grid:
        """Build a grid from a parsed file; `name`, and lines of its `text`, serve for messages.

        Raises:
            InputError: a field is missing, unknown or wrong.
        """
        where = f"grid {name!r}"
        known = [field.name for field in fields(cls) if field.name != "name"]
        _check_fields(table, known, ("cases",), where)
        entries = table["cases"]
        if not isinstance(entries, list) or not entries:
            raise InputError(f"{where}: cases are a list of tables, [[cases]]; at least one")
        how = _one(table.get("how", "executed"), HOW, "how", where)
        machine = _text(table.get("machine", ""), "machine", where)
        if how == "simulated" and not machine:
            raise InputError(f"{where}: machine is missing; how = 'simulated' needs one")
        if machine:
            try:
                Machine.named(machine)
            except MachineError as wrong:
                raise InputError(f"{where}: {wrong}") from None
        ranks, rounds, screening, keep = (
            _whole(table.get(field, default), least, most, field, where)
            for field, default, least, most in (
                ("ranks", 0, 0, MAX_WORLD), ("rounds", 20, 1, MOST_ROUNDS),
                ("screening", 0, 0, MOST_ROUNDS), ("keep", 2, 0, MOST_ROUNDS),
            )
        )  # fmt: skip
        if "ranks" in table and ranks == 0:
            raise InputError(f"{where}: ranks=0; it is 1 to {MAX_WORLD}, or left out")
        assumptions = tuple(
            _text(text, "assumptions", where)
            for text in _list(table.get("assumptions", []), "assumptions", where)
        )
        return cls(
            name=name,
            cases=tuple(
                _cases(entry, f"{where}, cases[{i}]", partial(line_of, text, i))
                for i, entry in enumerate(entries)
            ),
            about=_text(table.get("about", ""), "about", where),
            assumptions=assumptions,
            how=how,
            machine=machine,
            ranks=ranks,
            rounds=rounds,
            screening=screening if keep else 0,
            keep=keep,
        )

    @property
    def chooses(self) -> bool:
        """Whether AUTO is among its schedules."""
        return any(AUTO in entry.schedules for entry in self.cases)


def _cases(entry: Any, where: str, line: Callable[[Any], str]) -> Cases:
    if not isinstance(entry, Mapping):
        raise InputError(f"{where}: {entry!r} found, a table is needed")
    known = [field.name for field in fields(Cases)]
    _check_fields(entry, known, ("op", "shapes"), where)
    ops = entry["op"] if isinstance(entry["op"], list) else [entry["op"]]
    m_each = entry.get("m_each", False)
    if not isinstance(m_each, bool):
        raise InputError(f"{where}: m_each={m_each!r}; it is true or false")
    shapes = _list(entry["shapes"], "shapes", where)
    if not shapes or not ops:
        raise InputError(f"{where}: op and shapes have one entry at least")
    return Cases(
        op=tuple(_one(op, registry.names(), "op", where) for op in ops),
        shapes=tuple(_sizes(shape, where, line) for shape in shapes),
        m_each=m_each,
        dtypes=_some(entry, "dtypes", tuple(DTYPES), where),
        regimes=_some(entry, "regimes", REGIMES, where),
        schedules=tuple(
            _schedule(asked, where)
            for asked in _list(entry.get("schedules", []), "schedules", where)
        ),
        grains=tuple(
            _grain(grain, where) for grain in _list(entry.get("grains", []), "grains", where)
        ),
    )


def _schedule(asked: Any, where: str) -> str | Schedule:
    """Return a name that exists, or the named schedule with axes of its own."""
    if isinstance(asked, Mapping):
        if "name" not in asked:
            raise InputError(f"{where}: schedules: a table names the schedule that it changes")
        try:
            base = Schedule.named(asked["name"]).to_json()
            return Schedule.from_toml({**base, **asked, "name": base["name"]}, base["name"])
        except ScheduleError as wrong:
            raise InputError(f"{where}: {wrong}") from None
    if asked == AUTO:
        return AUTO
    try:
        Schedule.named(asked)
    except ScheduleError as wrong:
        raise InputError(f"{where}: {wrong}; {AUTO!r} is what the selector takes") from None
    return str(asked)


def _sizes(shape: Any, where: str, line: Callable[[Any], str]) -> Sizes:
    said = f"{shape!r:.80} found; each is [m, n, k], whole numbers from 1 to {MOST}"
    if not isinstance(shape, list) or len(shape) != 3:
        raise InputError(f"{where}{line(shape)}: shapes: {said}")
    for size in shape:
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MOST:
            raise InputError(f"{where}{line(size)}: shapes: {said}")
    m, n, k = shape
    return m, n, k


def _grain(grain: Any, where: str) -> int | str:
    if grain == "world":
        return "world"
    return _whole(grain, 1, MAX_CHUNKS, "grains", where, ", or 'world'")


def _some(
    entry: Mapping[str, Any], field: str, values: Sequence[str], where: str
) -> tuple[str, ...]:
    found = _list(entry.get(field, []), field, where)
    return tuple(dict.fromkeys(_one(value, values, field, where) for value in found))


def _one(value: Any, values: Sequence[str], field: str, where: str) -> str:
    if value not in values:
        raise InputError(
            f"{where}: {field}={value!r}{closest(str(value), values)}; it is one of "
            f"{', '.join(values)}"
        )
    return str(value)


def _list(value: Any, field: str, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{where}: {field}={value!r}; it is a list")
    return value


def _text(value: Any, field: str, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where}: {field}={value!r}; it is a text")
    return value


def _whole(value: Any, least: int, most: int, field: str, where: str, more: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InputError(
            f"{where}: {field}={value!r}; it is a whole number from {least} to {most}{more}"
        )
    return value


def _check_fields(
    table: Mapping[str, Any], known: Sequence[str], needed: Sequence[str], where: str
) -> None:
    for field in table:
        if field not in known:
            raise InputError(
                f"{where}: unknown field {field!r}{closest(field, known)}. Known: "
                f"{', '.join(known)}"
            )
    for field in needed:
        if field not in table:
            raise InputError(f"{where}: the field {field!r} is missing")
