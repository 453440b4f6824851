"""Grids: TOML files that define a sweep. This module reads and checks them; `points` expands them.

    about = "one line on the purpose"
    assumptions = ["a fact that readers of the results must know"]
    how = "simulated"          # or "executed" (default)
    machine = "mesh4"          # to simulate, or to run as; default: that of `ficco run`
    ranks = 4                  # default: that of the commands
    rounds = 20                # timed runs of a point
    screening = 3              # runs of every point first ...
    keep = 2                   # ... then `rounds` runs of the `keep` best of each shape and regime;
                               # 0: of all points
    [[cases]]
    op = "all_gather_matmul"   # or a list
    shapes = [[8192, 10240, 8192]]       # m, n, k over all ranks
    m_each = true              # m counts the rows of each rank instead
    dtypes = ["bfloat16"]      # default: float32 on the host engine, else bfloat16
    regimes = ["captured", "eager"]      # default: captured; on the host engine synchronized
    schedules = ["auto", "gated_1d", { name = "hetero_unfused_1d", pace = "in_step" }]
    grains = [1, 2, "world"]   # of schedules without a fixed grain; default: the schedule's

Sizes are from 1 to 2147483647, over all ranks. `serial` is always a point. Without `schedules`, all
schedules of the operator are points.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ficco.core import data, reading
from ficco.core.dtypes import DTYPES
from ficco.core.errors import InputError, MachineError, ScheduleError, closest, shown
from ficco.core.machine import Machine
from ficco.measure.selector.candidates import few_rows
from ficco.operators import registry
from ficco.operators.problem_checks import MAX_WORLD, MOST
from ficco.plan.schedule import MAX_CHUNKS, Schedule
from ficco.plan.timeline import REGIMES

HOW = ("executed", "simulated")
AUTO = "auto"  # a schedule's name in a grid: the selector's choice
MOST_ROUNDS = 1000
Sizes = tuple[int, int, int]
_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class Cases:
    """An entry of a grid: operators on shapes, and the schedules to try.

    Attributes:
        op: operators.
        shapes: m, n, k over all ranks.
        m_each: m counts the rows of each rank instead.
        dtypes, regimes: empty: the machine's defaults.
        schedules: names, or schedules with changed axes; empty: all schedules of an operator.
        grains: chunks per shard, for schedules without a fixed grain; empty: the schedule's.
    """

    op: tuple[str, ...]
    shapes: tuple[Sizes, ...]
    m_each: bool = False
    dtypes: tuple[str, ...] = ()
    regimes: tuple[str, ...] = ()
    schedules: tuple[str | Schedule, ...] = ()
    grains: tuple[int | str, ...] = ()

    def schedules_for(self, op: str, m: int) -> tuple[str | Schedule, ...]:
        """Return the schedules to try on `m` rows; AUTO is not resolved.

        Raises:
            ScheduleError: a schedule does not exist.
        """
        named = self.schedules
        if not named:
            named = tuple(
                name
                for name in Schedule.names(op)
                if m <= few_rows(op) or not Schedule.named(name).for_few_rows
            )
        schedules: list[str | Schedule] = [Schedule.named("serial")]
        for entry in named:
            if entry == AUTO:
                schedules.append(AUTO)
                continue
            schedule = entry if isinstance(entry, Schedule) else Schedule.named(entry)
            open_grain = schedule.grain == "world"
            grains = self.grains if open_grain and self.grains else (schedule.grain,)
            schedules += [replace(schedule, grain=grain) for grain in grains]
        return tuple(dict.fromkeys(schedules))


@dataclass(frozen=True, slots=True)
class Grid:
    """The points that a sweep measures, and the number of runs.

    Attributes:
        name: the grid's name in messages and results.
        cases: in the order of results.
        about, assumptions: for readers of the results.
        how: one of HOW.
        machine: a profile's name or file; empty: not fixed.
        ranks: 0: not fixed.
        rounds: timed runs of a point.
        screening: runs of all points first; 0: all points get `rounds` at once.
        keep: points of each shape and regime that get `rounds`; serial and AUTO always do.
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
        """Read a shipped grid, or a file if the name ends in .toml.

        Raises:
            InputError: there is no such grid, or the file is not a grid.
        """
        table = data.load("sweeps", name, "grid", InputError)
        text = data.text("sweeps", name, "grid", InputError)
        stem = Path(name).stem if name.endswith(".toml") else name
        return cls.from_toml(table, stem, text, source=name)

    @classmethod
    def from_toml(
        cls, table: Mapping[str, Any], name: str, text: str = "", source: str = ""
    ) -> Grid:
        """Build a grid from a parsed file.

        Args:
            table: the parsed file.
            name: the grid's name.
            text: the file's text, for line numbers in messages; empty: there is none.
            source: the file in messages; empty: `name`.

        Raises:
            InputError: a field is missing, unknown or wrong.
        """
        where = f"grid {(source or name)!r}"
        known = [field.name for field in fields(cls) if field.name != "name"]
        reading.check_known(table, known, where, ("cases",))
        entries = table["cases"]
        if not isinstance(entries, list) or not entries:
            raise InputError(
                f"{where}: cases={shown(entries)}; it must be a list of tables, [[cases]], at "
                "least one"
            )
        how = _one(table.get("how", "executed"), HOW, "how", where)
        machine = _text(table.get("machine", ""), "machine", where)
        if how == "simulated" and not machine:
            raise InputError(f"{where}: machine is missing; how = 'simulated' needs one")
        if machine:
            try:
                Machine.named(machine)
            except MachineError as error:
                raise InputError(f"{where}: {error}") from None
        ranks, rounds, screening, keep = (
            _whole(table.get(field, default), least, most, field, where)
            for field, default, least, most in (
                ("ranks", 0, 0, MAX_WORLD), ("rounds", 20, 1, MOST_ROUNDS),
                ("screening", 0, 0, MOST_ROUNDS), ("keep", 2, 0, MOST_ROUNDS),
            )
        )  # fmt: skip
        if "ranks" in table and ranks == 0:
            raise InputError(f"{where}: ranks=0; use 1 to {MAX_WORLD}, or leave it out")
        return cls(
            name=name,
            cases=tuple(
                _cases(entry, f"{where}, cases[{i}]", partial(line_of, text, i))
                for i, entry in enumerate(entries)
            ),
            about=_text(table.get("about", ""), "about", where),
            assumptions=_each(table, "assumptions", where, _text),
            how=how,
            machine=machine,
            ranks=ranks,
            rounds=rounds,
            screening=screening if keep else 0,
            keep=keep,
        )

    @property
    def chooses(self) -> bool:
        """Whether AUTO is among the grid's schedules."""
        return any(AUTO in entry.schedules for entry in self.cases)


def _cases(entry: Any, where: str, line: Callable[[Any], str]) -> Cases:
    if not isinstance(entry, Mapping):
        raise InputError(f"{where}: {shown(entry)} found, a table is needed")
    known = [field.name for field in fields(Cases)]
    reading.check_known(entry, known, where, ("op", "shapes"))
    listed = isinstance(entry["op"], list)
    ops = entry["op"] if listed else [entry["op"]]
    m_each = entry.get("m_each", False)
    if not isinstance(m_each, bool):
        raise InputError(f"{where}: m_each={shown(m_each)}; it must be true or false")
    shapes = _list(entry["shapes"], "shapes", where)
    for field, values in (("op", ops), ("shapes", shapes)):
        if not values:
            raise InputError(f"{where}: {field}=[]; at least one entry is needed")
    return Cases(
        op=tuple(
            _one(op, registry.names(), f"op[{i}]" if listed else "op", where)
            for i, op in enumerate(ops)
        ),
        shapes=tuple(_sizes(shape, i, where, line) for i, shape in enumerate(shapes)),
        m_each=m_each,
        dtypes=_some(entry, "dtypes", tuple(DTYPES), where),
        regimes=_some(entry, "regimes", REGIMES, where),
        schedules=_each(entry, "schedules", where, _schedule),
        grains=_each(entry, "grains", where, _grain),
    )


def _schedule(value: Any, field: str, where: str) -> str | Schedule:
    """Return the name of an existing schedule, or a named schedule with changed axes."""
    where = f"{where}, {field}"
    if isinstance(value, Mapping):
        if "name" not in value:
            raise InputError(
                f"{where}: {shown(dict(value))} found; a table needs the name of a schedule to "
                "change"
            )
        try:
            base = Schedule.named(value["name"]).to_json()
            return Schedule.from_toml({**base, **value, "name": base["name"]}, base["name"])
        except ScheduleError as error:
            raise InputError(f"{where}: {error}") from None
    if value == AUTO:
        return AUTO
    try:
        Schedule.named(value)
    except ScheduleError as error:
        raise InputError(f"{where}: {error}; {AUTO!r} is the selector's choice") from None
    return str(value)


def _sizes(shape: Any, index: int, where: str, line: Callable[[Any], str]) -> Sizes:
    expected = f"{shown(shape)} found; each must be [m, n, k], whole numbers from 1 to {MOST}"
    if not isinstance(shape, list) or len(shape) != 3:
        raise InputError(f"{where}{line(shape)}: shapes[{index}]: {expected}")
    for size in shape:
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MOST:
            raise InputError(f"{where}{line(size)}: shapes[{index}]: {expected}")
    m, n, k = shape
    return m, n, k


def _grain(grain: Any, field: str, where: str) -> int | str:
    if grain == "world":
        return "world"
    return _whole(grain, 1, MAX_CHUNKS, field, where, ", or 'world'")


def _each(
    entry: Mapping[str, Any], field: str, where: str, read: Callable[[Any, str, str], _Read]
) -> tuple[_Read, ...]:
    """Return the entries of a list, which `read` checks by their fields' names."""
    values = _list(entry.get(field, []), field, where)
    return tuple(read(value, f"{field}[{i}]", where) for i, value in enumerate(values))


def _some(
    entry: Mapping[str, Any], field: str, values: Sequence[str], where: str
) -> tuple[str, ...]:
    found = _each(entry, field, where, lambda value, *at: _one(value, values, *at))
    return tuple(dict.fromkeys(found))


def _one(value: Any, values: Sequence[str], field: str, where: str) -> str:
    if value not in values:
        raise InputError(
            f"{where}: {field}={shown(value)}{closest(value, values)}; it must be one of "
            f"{', '.join(values)}"
        )
    return str(value)


def _list(value: Any, field: str, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{where}: {field}={shown(value)}; it must be a list")
    return value


def _text(value: Any, field: str, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where}: {field}={shown(value)}; it must be a string")
    return value


def _whole(value: Any, least: int, most: int, field: str, where: str, more: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InputError(
            f"{where}: {field}={shown(value)}; it must be a whole number from {least} to "
            f"{most}{more}"
        )
    return value


# ---- line numbers, which Python's TOML parser does not tell

_MOST_BITS = 10_000  # Python converts no longer number to digits
_CASES = re.compile(r"\s*\[\[\s*cases\s*\]\]")


def line_of(text: str, case: int, value: Any) -> str:
    r"""Return the line number of a value of a case in a grid's file, as ", line 7".

    Args:
        text: the file's text; empty: there is none.
        case: index in the grid's [[cases]], from 0.
        value: the value. A number that is written in decimal digits is searched for; for any other
            value, the line is that of [[cases]].

    Returns:
        The line in words; empty if nothing is found.

    Example:
        >>> line_of("[[cases]]\nshapes = [[1, 2, 3_000_000_000]]", 0, 3_000_000_000)
        ', line 2'
    """
    rows = text.splitlines()
    starts = [number for number, row in enumerate(rows) if _CASES.match(row)]
    begin = starts[case] if case < len(starts) else 0
    end = starts[case + 1] if case + 1 < len(starts) else len(rows)
    shown_in_digits = isinstance(value, int) and value.bit_length() < _MOST_BITS
    if shown_in_digits and not isinstance(value, bool):
        pattern = re.compile(rf"(?<![\w.]){'_?'.join(str(value))}(?![\w.])")
        for number in range(begin, end):
            if pattern.search(rows[number].partition("#")[0]):
                return f", line {number + 1}"
    return f", line {begin + 1}" if case < len(starts) else ""
